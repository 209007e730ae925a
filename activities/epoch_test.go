package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// After a database was restored everything stops, until an admin opens a new epoch:
// then changes go on, and what is pushed from then on arrives, however late the
// receiver begins it.
func TestANewEpoch(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 5) g`)
	w.drain()
	id := w.Request("public.orders").ID
	w.walk(id)
	w.onReceiver(`ALTER TABLE orders ADD CHECK (note <> 'refused')`)
	w.onSource(`INSERT INTO orders VALUES (50, 'refused')`)
	w.drain()
	require.Len(t, w.setAside(), 1)
	w.onSource(`INSERT INTO orders VALUES (51, 'not delivered')`)
	w.push()
	run := w.newRun("public.orders", control.NewReconciliation{})
	// The source was restored.
	w.onSource(`UPDATE backfill_maple_school.pushed SET batch = 77, nonce = 'of another time'; INSERT INTO orders VALUES (6)`)
	_, err := w.from.push(t.Context())
	require.Equal(t, backfill.Refused, backfill.CodeOf(err))

	require.NoError(t, w.Store.NewEpoch(t.Context(), "admin", testkit.Site, "the source was restored"))
	require.Equal(t, backfill.Failed, w.Now(id).State)
	require.Zero(t, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.quarantine`))
	r, err := w.Store.Reconciliation(t.Context(), run)
	require.NoError(t, err)
	require.Equal(t, backfill.RunFailed, r.State)
	log, err := w.Store.Audit(t.Context(), control.AuditFilter{Site: testkit.Site, Limit: 1})
	require.NoError(t, err)
	require.Equal(t, "site.new_epoch", log[0].Action)

	// The source goes on at once, the receiver comes later.
	w.push()
	w.onSource(`INSERT INTO orders VALUES (7); DELETE FROM orders WHERE id = 1`)
	w.push()
	w.applyAll()
	require.Empty(t, w.setAside(), "what was set aside is forgotten")
	require.Zero(t, testkit.Value[int](t, w.R, `SELECT count(*) FROM orders WHERE id = 51`), "what had not been delivered is not delivered any more")
	require.True(t, testkit.Value[bool](t, w.C, `SELECT dropped FROM backfill_control.entry WHERE key = '{51}'`), "and history says so")
	w.onSource(`DELETE FROM orders WHERE id IN (50, 51)`)
	w.drain()
	w.Equal("orders")

	// An agent that began the epoch, was held up, and begins it again, sets nothing back.
	begin, err := w.Store.Beginning(t.Context(), w.from.Out, w.from.In)
	require.NoError(t, err)
	require.NoError(t, w.from.db.Begin(t.Context(), begin.Epoch, 1, "old", w.positionOf("old")))
	in, err := w.Store.Beginning(t.Context(), w.to.Out, w.to.In)
	require.NoError(t, err)
	require.NoError(t, w.to.db.Begin(t.Context(), in.Epoch, in.Batch, in.Nonce, w.positionOf("old")))
	w.onSource(`INSERT INTO orders VALUES (8)`)
	w.drain()
	w.Equal("orders")
}

// What is being pushed belongs to one epoch or the other.
func TestANewEpochWaitsForAPush(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	p, err := w.Store.BeginPush(t.Context(), w.Out)
	require.NoError(t, err)
	defer p.Rollback()
	ended := make(chan error, 1)
	go func() { ended <- w.Store.NewEpoch(t.Context(), "admin", testkit.Site, "restored") }()
	testkit.Eventually(t, "the epoch waits, or has begun", func() bool { return testkit.LockWaiters(t, w.C) == 1 || len(ended) == 1 })
	require.Empty(t, ended, "it has begun")
	p.Rollback()
	require.NoError(t, <-ended)
}

// A side that had begun an epoch and was set back to before it begins none: what it
// has lost since would go unnoticed.
func TestASideSetBackToBeforeItsEpochStops(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	require.NoError(t, w.Store.NewEpoch(t.Context(), "admin", testkit.Site, "restored"))
	w.onSource(`INSERT INTO orders VALUES (1)`)
	w.drain()
	w.onSource(`UPDATE backfill_maple_school.pushed SET epoch = 1; INSERT INTO orders VALUES (2)`)
	for range 2 {
		_, err := w.from.push(t.Context())
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "it was restored from a backup")
	}
	_, err := (&applier{Agent: w.to}).apply(t.Context())
	require.Equal(t, backfill.Refused, backfill.CodeOf(err), "nor is anything of it applied: %v", err)
}

// A control database that was restored knows of an earlier epoch than the sides.
func TestAnEarlierEpochStops(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders VALUES (1)`)
	w.drain()
	w.onSource(`UPDATE backfill_maple_school.pushed SET epoch = 5; INSERT INTO orders VALUES (2)`)
	_, err := w.from.push(t.Context())
	require.Equal(t, backfill.Refused, backfill.CodeOf(err))
	require.ErrorContains(t, err, "epoch")
	require.Contains(t, w.from.problem(t.Context()), "epoch")
}

// A side that turns out to be another cluster stops.
func TestAnotherClusterStops(t *testing.T) {
	for _, changed := range []string{"timeline = '00000042'", "system_identifier = '42'"} {
		t.Run(changed, func(t *testing.T) {
			w := newWorld(t, orders, "public.orders")
			w.onSource(`INSERT INTO orders VALUES (1)`)
			w.drain()
			testkit.Exec(t, w.C, `UPDATE backfill_control.side SET `+changed)
			w.onSource(`INSERT INTO orders VALUES (2)`)
			_, err := w.from.push(t.Context())
			require.Equal(t, backfill.Refused, backfill.CodeOf(err))
			_, err = (&applier{Agent: w.to}).apply(t.Context())
			require.Equal(t, backfill.Refused, backfill.CodeOf(err))
			k := w.claim(w.from, w.Request("public.orders").ID)
			require.Error(t, k.ready(t.Context()))
			require.NoError(t, w.Store.NewEpoch(t.Context(), "admin", testkit.Site, "failed over"))
			w.drain()
			w.Equal("orders")
		})
	}
}

// A receiver that was set up anew, and a source that remembers another push of the
// same number, were restored or replaced: neither goes on.
func TestSidesThatRememberSomethingElseStop(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders VALUES (1)`)
	w.drain()
	w.onReceiver(`UPDATE backfill_maple_central.applied SET seq = 0, nonce = ''`)
	_, err := (&applier{Agent: w.to}).apply(t.Context())
	require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, "has no position")
	w.onSource(`UPDATE backfill_maple_school.pushed SET nonce = 'another'; INSERT INTO orders VALUES (2)`)
	require.ErrorContains(t, w.from.ready(t.Context()), "remember two different pushes")
}
