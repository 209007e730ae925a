package serve_test

import (
	"bytes"
	"context"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/testsuite"

	"backfill/activities"
	"backfill/internal/backfill"
	"backfill/internal/local"
	"backfill/internal/serve"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// turn runs one of an agent's activities for a short turn.
func turn(t *testing.T, controlDSN string, db *side.DB, which func(*activities.Agent) func(context.Context) error) error {
	t.Helper()
	a, err := activities.NewAgent(t.Context(), testkit.Open(t, controlDSN), db, "agent of "+db.Side, activities.Settings{Cycle: 10 * time.Millisecond, Turn: 100 * time.Millisecond})
	require.NoError(t, err)
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestActivityEnvironment()
	env.RegisterActivity(which(a))
	_, err = env.ExecuteActivity(which(a))
	return err
}

// copyOf restores a dump of a database into a new one.
func copyOf(t *testing.T, dsn string) string {
	t.Helper()
	bin, err := local.FindPostgres()
	require.NoError(t, err)
	file, to := filepath.Join(t.TempDir(), "dump"), testkit.DatabaseWith(t, "")
	out, err := exec.Command(filepath.Join(bin, "pg_dump"), "--format=custom", "--file="+file, "--dbname="+dsn).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command(filepath.Join(bin, "pg_restore"), "--clean", "--if-exists", "--exit-on-error", "--dbname="+to, file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return to
}

// A control database that is restored from a dump fits the sides while nothing was
// pushed or applied since, and else does not; the check itself changes nothing.
func TestBackupCheck(t *testing.T) {
	t.Parallel()
	const orders = `CREATE TABLE orders (id int PRIMARY KEY, note text)`
	p := testkit.NewPair(t, orders, "public.orders")
	sides := map[string]string{"maple/school": p.SourceDSN, "maple/central": p.ReceiverDSN}
	check := func(control string, sides map[string]string) (string, error) {
		var out bytes.Buffer
		err := serve.BackupCheck{Control: control, Sides: sides}.Run(t.Context(), &out)
		return out.String(), err
	}
	cycle := func(control string) (push, apply error) {
		push = turn(t, control, p.From, func(a *activities.Agent) func(context.Context) error { return a.Push })
		apply = turn(t, control, p.To, func(a *activities.Agent) func(context.Context) error { return a.Apply })
		return push, apply
	}
	round := func(note string) {
		testkit.Exec(t, p.S, `INSERT INTO orders SELECT coalesce(max(id), 0) + 1, $1 FROM orders`, note)
		push, apply := cycle(p.ControlDSN)
		require.NoError(t, push)
		require.NoError(t, apply)
		p.Equal("orders")
	}
	round("before")
	said, err := check(p.ControlDSN, nil)
	require.NoError(t, err)
	require.Contains(t, said, "Back up the control database, ")
	require.Contains(t, said, "maple/school: schema backfill_maple_school")
	require.NotContains(t, said, "postgres:postgres")

	old := copyOf(t, p.ControlDSN)
	said, err = check(old, sides)
	require.NoError(t, err, said)
	require.Contains(t, said, "maple/school: fits: push 1 of both")
	require.Contains(t, said, "yes: everything may be started")
	said, err = check(old, map[string]string{"maple/school": p.SourceDSN})
	require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
	require.Contains(t, said, "maple/central: not looked at: give --side maple/central=DSN")
	_, err = check(old, map[string]string{"maple/elsewhere": p.SourceDSN})
	require.ErrorContains(t, err, "knows no side maple/elsewhere")

	// The other side's database, and one that was never set up.
	said, err = check(old, map[string]string{"maple/school": p.ReceiverDSN, "maple/central": p.ReceiverDSN})
	require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
	require.Contains(t, said, "maple/school: does not fit: ")

	// Life goes on, and then it is that dump which is restored.
	round("lost")
	testkit.Exec(t, p.S, `INSERT INTO orders VALUES (100, 'captured, not pushed')`)
	for range 2 {
		said, err = check(old, sides)
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
		require.Contains(t, said, "maple/school: does not fit: school remembers push 2, the control database push 1 as the last: the control database was restored from a backup")
		require.Contains(t, said, "maple/central: does not fit: maple: school → central: central stands at change 2, which this control database did not give out")
		require.Contains(t, said, "backfill site new-epoch maple --note WHY")
		require.Contains(t, said, "what was approved, rejected, configured, revoked or removed later is to be done again")
		require.NotContains(t, said, "yes:")
	}
	// The running processes say the same, and after what the check has said to do all goes on.
	push, apply := cycle(old)
	require.ErrorContains(t, push, "the control database was restored")
	require.Error(t, apply)
	store := testkit.Open(t, old)
	require.NoError(t, store.NewEpoch(t.Context(), "admin", "maple", "restored"))
	said, err = check(old, sides)
	require.NoError(t, err, said)
	require.Contains(t, said, "epoch 2 begins when its agent starts")
	push, apply = cycle(old)
	require.NoError(t, push)
	require.NoError(t, apply)
	said, err = check(old, sides)
	require.NoError(t, err, said)
	p.Equal("orders")

	// A receiver that was restored is sent again what it has lost.
	at := testkit.Strings(t, p.R, `SELECT seq || ' ' || nonce FROM backfill_maple_central.applied`)
	testkit.Exec(t, p.S, `UPDATE orders SET note = 'again'`)
	push, apply = cycle(old)
	require.NoError(t, push)
	require.NoError(t, apply)
	testkit.Exec(t, p.R, `UPDATE backfill_maple_central.applied SET seq = split_part($1, ' ', 1)::bigint, nonce = split_part($1, ' ', 2)`, at[0])
	said, err = check(old, sides)
	require.NoError(t, err, said)
	require.Contains(t, said, "are sent to it again from history")
}
