package activities

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/local"
	"backfill/internal/testkit"
)

// crashing is a PostgreSQL of the test's own, which it can let crash, and which is
// slow to write what was committed asynchronously.
type crashing struct {
	t   *testing.T
	opt local.PostgresOptions
	pg  *local.Postgres
}

func startCrashing(t *testing.T) *crashing {
	t.Helper()
	if _, err := local.FindPostgres(); err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("", "backfill-crash-")
	require.NoError(t, err)
	c := &crashing{t: t, opt: local.PostgresOptions{Dir: filepath.Join(dir, "pg"), Fast: true,
		Settings: map[string]string{"wal_writer_delay": "10s", "bgwriter_delay": "10s", "autovacuum": "off"}}}
	c.start()
	t.Cleanup(func() {
		_ = c.pg.Kill()
		_ = os.RemoveAll(dir)
	})
	return c
}

func (c *crashing) start() {
	c.t.Helper()
	var err error
	c.pg, err = local.StartPostgres(context.Background(), c.opt)
	require.NoError(c.t, err)
}

// crash lets the server crash and come back.
func (c *crashing) crash() {
	c.t.Helper()
	require.NoError(c.t, c.pg.Kill())
	c.start()
}

// What the application has committed asynchronously is read before it is on disk. A
// crash of the source must not take back what was pushed.
func TestGuarantee2_ACrashOfTheSourceTakesBackNothingThatWasPushed(t *testing.T) {
	t.Parallel()
	c := startCrashing(t)
	p := testkit.NewPairAt(t, c.pg.DSN("postgres"), orders, orders, "public.orders")
	w := worldOf(p, Settings{})
	back := func() {
		c.crash()
		w.S = testkit.Session(w, w.SourceDSN)
		w.from = w.agent(testkit.Source)
	}
	t.Run("after the push's commit", func(t *testing.T) {
		w.onSource(`SET synchronous_commit = off; INSERT INTO orders VALUES (1, 'asynchronous')`)
		failAt(w.from, "push: committed")
		_, err := w.from.push(t.Context())
		require.ErrorIs(t, err, errCrash)
		back()
		w.drain()
		w.Equal("orders")
		require.Len(t, testkit.Rows(t, w.R, "orders"), 1)
	})
	// The server writes by itself now and then, and the row with that: then it is no crash
	// that takes it back.
	taken := func(t *testing.T) bool {
		w.onSource(`SET synchronous_commit = off; INSERT INTO orders VALUES (2, 'asynchronous') ON CONFLICT (id) DO UPDATE SET total = orders.total + 1`)
		last, err := w.Store.LastSeq(t.Context(), w.Out.ID)
		require.NoError(t, err)
		// The write has a connection of its own, made just then: it reaches a server that
		// knows nothing of what was read.
		proxy := testkit.NewProxy(w, w.SourceDSN)
		w.from = w.agentAt(testkit.Source, w.ControlDSN, proxy.DSN)
		var crashed atomic.Bool
		meanwhile(w.from, "push: read", func() { proxy.Next(func() { c.crash(); crashed.Store(true) }) })
		_, err = w.from.push(t.Context())
		require.True(t, crashed.Load())
		require.Error(t, err)
		now, err := w.Store.LastSeq(t.Context(), w.Out.ID)
		require.NoError(t, err)
		require.Equal(t, last, now, "what may be gone was not pushed")
		w.S = testkit.Session(w, w.SourceDSN)
		lost := testkit.Value[int](t, w.S, `SELECT count(*) FROM orders WHERE id = 2`) == 0
		w.from = w.agent(testkit.Source)
		w.drain()
		w.Equal("orders")
		return lost
	}
	t.Run("a crash between the read and the write that makes it safe", func(t *testing.T) {
		for range 5 {
			if taken(t) {
				return
			}
			w.onSource(`DELETE FROM orders WHERE id = 2`)
			w.drain()
		}
		t.Fatal("no crash has taken the write back: this test shows nothing")
	})
	t.Run("after a page", func(t *testing.T) {
		w.onSource(`SET synchronous_commit = off; INSERT INTO orders VALUES (3, 'asynchronous')`)
		id := w.Request("public.orders").ID
		k := w.claim(w.from, id)
		require.NoError(t, k.freeze(t.Context()))
		_, err := k.page(t.Context())
		require.NoError(t, err)
		back()
		w.expire(id)
		w.walk(id)
		w.Approve(id)
		w.release(id, 10)
		w.drain()
		w.Equal("orders")
	})
}
