package testkit

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/local"
)

// Replicated is a server of a test's own with a streaming replica.
type Replicated struct {
	ReplicaDSN string // of the database postgres on the replica

	primary *local.Postgres
	made    int
}

// StartReplicated starts a primary and a replica of it, which end with the test. It
// skips the test where no PostgreSQL can be started.
func StartReplicated(t testing.TB) *Replicated {
	t.Helper()
	if _, err := local.FindPostgres(); err != nil {
		t.Skip("needs PostgreSQL's programs to start a replica: ", err)
	}
	dir, err := os.MkdirTemp("", "backfill-replica-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	run := func(name string, more map[string]string) *local.Postgres {
		p, err := local.StartPostgres(context.Background(), local.PostgresOptions{Dir: filepath.Join(dir, name), Fast: true, Settings: more})
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Kill() })
		return p
	}
	small := map[string]string{"max_connections": "60", "shared_buffers": "32MB", "wal_receiver_status_interval": "1s"}
	// A copy of a primary that was shut down is a replica once it has a signal file.
	require.NoError(t, run("primary", small).Stop(context.Background()))
	for _, suffix := range []string{"", ".password"} {
		out, err := exec.Command("cp", "-a", filepath.Join(dir, "primary"+suffix), filepath.Join(dir, "replica"+suffix)).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	out, err := exec.Command("cp", "-a", filepath.Join(dir, "replica", "PG_VERSION"), filepath.Join(dir, "replica", "standby.signal")).CombinedOutput()
	require.NoError(t, err, string(out))
	r := &Replicated{primary: run("primary", small)}
	u, err := url.Parse(r.primary.DSN("postgres"))
	require.NoError(t, err)
	password, _ := u.User.Password()
	follow := map[string]string{"primary_conninfo": fmt.Sprintf("host=127.0.0.1 port=%s user=postgres password=%s sslmode=disable application_name=replica", u.Port(), password)}
	for name, value := range small {
		follow[name] = value
	}
	r.ReplicaDSN = run("replica", follow).DSN("postgres")
	return r
}

// Database makes a database on the primary and returns its connection string.
func (r *Replicated) Database(t testing.TB) string {
	t.Helper()
	r.made++
	name := fmt.Sprintf("d%d", r.made)
	require.NoError(t, r.primary.CreateDatabase(t.Context(), name))
	return r.primary.DSN(name)
}
