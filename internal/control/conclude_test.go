package control_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// A run that found most of a table missing is concluded in one pass over keys and
// history, not in one for each key.
func TestManyDifferencesAreConcludedQuickly(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders")
	table := p.Tables["public.orders"].ID
	r, err := p.Store.CreateReconciliation(t.Context(), control.NewReconciliation{Direction: p.Out.ID, TableID: table, Mode: backfill.RunFull, By: "test"})
	require.NoError(t, err)
	testkit.Exec(t, p.C, `UPDATE backfill_control.reconciliation SET state = 'RUNNING', cut = true, leaves = 1, started_at = now() WHERE id = $1`, r.ID)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.run_leaf (run_id, n, state, source_count, source_digest, receiver_count, receiver_digest) VALUES ($1, 1, 'different', 60000, '11', 0, '00')`, r.ID)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.entry (direction, table_id, snap, op, dropped, key) SELECT $1, $2, '9:9:', 'c', n % 2 = 0, ARRAY[n::text] FROM generate_series(1, 20000) n`, p.Out.ID, table)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key) SELECT $1, 1, 'missing', true, ARRAY[n::text] FROM generate_series(1, 60000) n`, r.ID)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err = p.Store.Conclude(ctx, r.ID)
	require.NoError(t, err)
	require.Equal(t, "DIFFERENT", r.Verdict)
	require.Equal(t, []string{"changed on central since its last change arrived, or on school while capture was interrupted 10000",
		"its last change was not sent: the table or the operation was off 10000", "never captured: older than capture, or changed while it was interrupted 40000"},
		testkit.Strings(t, p.C, `SELECT cause || ' ' || count(*) FROM backfill_control.difference GROUP BY cause ORDER BY cause`))
}

// A run is concluded once all leaves are cut and all of them are judged, and not before.
func TestGuarantee10_ARunIsConcludedAtItsEnd(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders")
	r, err := p.Store.CreateReconciliation(t.Context(), control.NewReconciliation{Direction: p.Out.ID, TableID: p.Tables["public.orders"].ID, Mode: backfill.RunFull, By: "test"})
	require.NoError(t, err)
	conclude := func(sql string) *backfill.Reconciliation {
		t.Helper()
		testkit.Exec(t, p.C, sql)
		r, err := p.Store.Conclude(t.Context(), r.ID)
		require.NoError(t, err)
		return r
	}
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.run_leaf (run_id, n, state, source_count, source_digest, receiver_count, receiver_digest) SELECT id, 1, 'equal', 5, '11', 5, '11' FROM backfill_control.reconciliation`)
	require.True(t, conclude(`UPDATE backfill_control.reconciliation SET state = 'RUNNING', started_at = now(), leaves = 1`).State.Open(), "more leaves are to come")
	require.True(t, conclude(`UPDATE backfill_control.reconciliation SET cut = true, leaves = 2; INSERT INTO backfill_control.run_leaf (run_id, n, state) SELECT id, 2, 'cut' FROM backfill_control.reconciliation`).State.Open(), "one is not judged")
	done := conclude(`UPDATE backfill_control.run_leaf SET state = 'equal', source_count = 0, source_digest = '00' WHERE n = 2`)
	require.Equal(t, "EQUAL", done.Verdict)
	require.True(t, done.Clean())
}

// A run that is ended while it is judged keeps none of what was about to be stored: keys
// found under a mapping that has changed would keep the cutover gate shut for good.
func TestNothingIsFoundByARunThatWasEndedMeanwhile(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders")
	r, err := p.Store.CreateReconciliation(t.Context(), control.NewReconciliation{Direction: p.Out.ID, TableID: p.Tables["public.orders"].ID, Mode: backfill.RunFull, By: "test"})
	require.NoError(t, err)
	testkit.Exec(t, p.C, `UPDATE backfill_control.reconciliation SET state = 'RUNNING', cut = true, leaves = 1, started_at = now() WHERE id = $1`, r.ID)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.run_leaf (run_id, n, state, snap, after_seq) VALUES ($1, 1, 'listed', '9:9:', 0)`, r.ID)
	var differing bytes.Buffer
	_, err = p.C.PgConn().CopyTo(t.Context(), &differing, `COPY (SELECT 1::bigint, '{1}'::text[], '{1}'::text[], 'm'::"char", '{1}'::text[], NULL::text[], NULL::text) TO STDOUT (FORMAT binary)`)
	require.NoError(t, err)
	ending, watch := testkit.Session(t, p.C.Config().ConnString()), testkit.Session(t, p.C.Config().ConnString())
	testkit.Exec(t, ending, `BEGIN`)
	testkit.Exec(t, ending, `UPDATE backfill_control.reconciliation SET state = 'FAILED' WHERE id = $1`, r.ID)
	judged := make(chan error, 1)
	go func() { judged <- p.Store.Judge(t.Context(), r, []int64{1}, 0, &differing) }()
	testkit.Eventually(t, "the judge waits", func() bool { return len(judged) > 0 || testkit.LockWaiters(t, watch) > 0 })
	testkit.Exec(t, ending, `COMMIT`)
	require.ErrorIs(t, <-judged, control.ErrFenced)
	require.Zero(t, testkit.Value[int](t, p.C, `SELECT count(*) FROM backfill_control.difference`))
}
