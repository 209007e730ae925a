package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

// Rows are sent to be compared only where the receiver has their key: all are judged by
// what it has at one moment, whatever comes to be there meanwhile.
func TestRowsAreJudgedAtOneMoment(t *testing.T) {
	w := history(t, 3)
	w.onReceiver(`INSERT INTO orders SELECT * FROM (VALUES (1, 'another', 1)) v`)
	id := w.Request("public.orders").ID
	w.walk(id)
	meanwhile(w.to, "classify: rows read", func() { w.onReceiver(`INSERT INTO orders VALUES (3, 'meanwhile', 3)`) })
	require.NoError(t, w.to.classify(t.Context(), w.Now(id), 0, 3))
	require.Equal(t, map[backfill.Effect]int64{backfill.Insert: 2, backfill.Overwrite: 1, backfill.Identical: 0, backfill.Unknown: 0}, w.Now(id).Effects)
}

// A chunk counts once, however many agents judge it at a time, and not at all when the
// request has moved on meanwhile.
func TestAChunkIsJudgedOnce(t *testing.T) {
	judged := map[backfill.Effect]int64{backfill.Insert: 2, backfill.Overwrite: 1, backfill.Identical: 0, backfill.Unknown: 0}
	for name, c := range map[string]struct {
		meanwhile func(w *world, id int64)
		want      map[backfill.Effect]int64
	}{
		"another agent was faster": {func(w *world, id int64) {
			require.NoError(w, w.agent(testkit.Receiver).classify(w.Context(), w.Now(id), 0, 3))
		}, judged},
		"another agent has judged a part": {func(w *world, id int64) {
			require.NoError(w, w.agent(testkit.Receiver).classify(w.Context(), w.Now(id), 0, 2))
		}, map[backfill.Effect]int64{backfill.Insert: 1, backfill.Overwrite: 1, backfill.Identical: 0, backfill.Unknown: 1}},
		"it is to be judged again": {func(w *world, id int64) {
			_, err := w.Store.Rejudge(w.Context(), id, "test")
			require.NoError(w, err)
		}, map[backfill.Effect]int64{backfill.Insert: 0, backfill.Overwrite: 0, backfill.Identical: 0, backfill.Unknown: 3}},
		"it was rejected": {func(w *world, id int64) { w.Reject(id) },
			map[backfill.Effect]int64{backfill.Insert: 0, backfill.Overwrite: 0, backfill.Identical: 0, backfill.Unknown: 3}},
	} {
		t.Run(name, func(t *testing.T) {
			w := history(t, 3)
			w.onReceiver(`INSERT INTO orders SELECT * FROM (VALUES (1, 'another', 1)) v`)
			id := w.Request("public.orders").ID
			w.walk(id)
			meanwhile(w.to, "classify: rows read", func() { c.meanwhile(w, id) })
			require.NoError(t, w.to.classify(t.Context(), w.Now(id), 0, 3))
			require.Equal(t, c.want, w.Now(id).Effects)
			require.EqualValues(t, testkit.Value[int64](t, w.C, `SELECT classified FROM backfill_control.request WHERE id = $1`, id),
				testkit.Value[int64](t, w.C, `SELECT count(*) FROM backfill_control.effect WHERE request_id = $1`, id), "effects of what is judged, and of nothing else")
		})
	}
}

// Two that store a chunk at one moment wait for each other, and one of them stores it.
func TestTwoAgentsStoreAChunkAtOneMoment(t *testing.T) {
	w := history(t, 3)
	w.onReceiver(`INSERT INTO orders SELECT * FROM (VALUES (1, 'another', 1)) v`)
	id := w.Request("public.orders").ID
	w.walk(id)
	held := testkit.Session(t, w.ControlDSN)
	testkit.Exec(t, held, `BEGIN; SELECT FROM backfill_control.request FOR UPDATE`)
	other := w.agent(testkit.Receiver)
	first := async(func() (bool, error) { return true, w.to.classify(t.Context(), w.Now(id), 0, 3) })
	second := async(func() (bool, error) { return true, other.classify(t.Context(), w.Now(id), 0, 3) })
	testkit.Eventually(t, "both wait", func() bool { return testkit.LockWaiters(t, w.C) == 2 })
	testkit.Exec(t, held, `COMMIT`)
	for _, wait := range []func() (bool, error){first, second} {
		_, err := wait()
		require.NoError(t, err)
	}
	require.Equal(t, map[backfill.Effect]int64{backfill.Insert: 2, backfill.Overwrite: 1, backfill.Identical: 0, backfill.Unknown: 0}, w.Now(id).Effects)
}
