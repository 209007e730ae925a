package activities

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

// proven looks for the resume point of a request with the receiver's agent beside, and
// returns the request and the walk that goes on from there.
func (w *world) proven(id int64) (*backfill.Request, *walk) {
	w.Helper()
	k := w.claim(w.from, id)
	require.NoError(w, k.freeze(w.Context()))
	k.req.Expected = 1 << 30 // how many rows were counted is not the matter here
	ctx, cancel := context.WithCancel(w.Context())
	done := make(chan struct{})
	asked := *k.req
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			_ = w.to.compare(ctx, &asked)
			sleep(ctx, 5*time.Millisecond)
		}
	}()
	require.NoError(w, k.prove(w.Context(), nil))
	cancel()
	<-done
	return w.Now(id), k
}

func proofWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	w := worldOf(testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY, note text, more text)`, "public.orders"), Settings{LeafRows: 10, AnswerWithin: time.Minute})
	w.onSource(`INSERT INTO orders SELECT n, 'note ' || n, CASE WHEN n % 3 = 0 THEN '' WHEN n % 3 = 1 THEN 'a,"b' END FROM generate_series(1, 95) n`)
	w.drain()
	w.Equal("orders")
	return w
}

// Where the receiver provably holds the first part of the table, the walk begins
// after it.
func TestTheWalkBeginsAfterWhatTheReceiverProvablyHolds(t *testing.T) {
	w := proofWorld(t)
	w.onReceiver(`DELETE FROM orders WHERE id IN (47, 60)`)
	r := w.Request("public.orders")
	now, k := w.proven(r.ID)
	require.Equal(t, backfill.Key{"40"}, now.ProvenKey)
	require.Equal(t, int64(40), now.ProvenRows)
	require.NotNil(t, now.ProofAt)
	w.finish(k)
	keys := w.staged(r.ID)
	require.Len(t, keys, 55)
	require.Equal(t, "41", keys[0])
	w.Approve(r.ID)
	w.release(r.ID, 1000)
	w.drain()
	w.Equal("orders")

	// All of it: there is nothing left to walk.
	r = w.Request("public.orders")
	now, k = w.proven(r.ID)
	require.Equal(t, int64(95), now.ProvenRows)
	w.finish(k)
	require.Empty(t, w.staged(r.ID))
}

// The same highest key and the same count, with other values before it, prove
// nothing: the walk begins at the start.
func TestWrongProofsBeginAtTheStart(t *testing.T) {
	for name, change := range map[string]string{
		"another value":              `UPDATE orders SET note = 'note 6' WHERE id = 5`,
		"values swapped":             `UPDATE orders SET note = 'note ' || (11 - id) WHERE id IN (3, 8)`,
		"a value in another column":  `UPDATE orders SET more = note, note = more WHERE id = 4`,
		"NULL for empty":             `UPDATE orders SET more = NULL WHERE id = 3`,
		"text moved over the border": `UPDATE orders SET note = note || ',', more = substr(more, 2) WHERE id = 4`,
		"another key":                `UPDATE orders SET id = -1 WHERE id = 2`,
		"a row more":                 `INSERT INTO orders VALUES (0, 'x', 'x')`,
		"two rows alike":             `UPDATE orders SET note = 'same', more = 'same' WHERE id IN (1, 2)`,
	} {
		t.Run(name, func(t *testing.T) {
			w := proofWorld(t)
			w.onReceiver(change)
			now, k := w.proven(w.Request("public.orders").ID)
			require.Nil(t, now.ProvenKey)
			require.Zero(t, now.ProvenRows)
			require.NotNil(t, now.ProofAt, "it was looked at")
			w.finish(k)
			require.Len(t, w.staged(now.ID), 95)
		})
	}
}

// Rows on their way are waited for rather than taken for differences; what changes
// later is captured, and comes.
func TestProofWaitsForRowsInFlight(t *testing.T) {
	w := proofWorld(t)
	w.onReceiver(`DELETE FROM orders WHERE id = 95`)
	w.onSource(`UPDATE orders SET note = 'new' WHERE id <= 30; DELETE FROM orders WHERE id = 7`)
	r := w.Request("public.orders")
	applying, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		sleep(applying, 200*time.Millisecond)
		l := &applier{Agent: w.to}
		for applying.Err() == nil {
			_, _ = l.apply(applying)
			sleep(applying, 10*time.Millisecond)
		}
	}()
	now, k := w.proven(r.ID)
	stop()
	require.Equal(t, int64(90), now.ProvenRows)
	w.onSource(`UPDATE orders SET note = 'newer' WHERE id = 12`)
	w.finish(k)
	w.Approve(r.ID)
	w.release(r.ID, 1000)
	w.drain()
	w.Equal("orders")
}

// While the receiver's agent is away nothing is proven, and the walk goes on.
func TestWithoutTheReceiversAgentTheWalkBeginsAtTheStart(t *testing.T) {
	w := proofWorld(t)
	w.from.AnswerWithin = 300 * time.Millisecond
	r := w.Request("public.orders")
	k := w.claim(w.from, r.ID)
	require.NoError(t, k.freeze(t.Context()))
	k.req.Expected = 1 << 30
	require.NoError(t, k.prove(t.Context(), nil))
	w.finish(k)
	require.Len(t, w.staged(r.ID), 95)
}
