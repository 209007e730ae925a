package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

// No more walks go on at once than may, and those that wait get their turn in the
// order of asking.
func TestWalksTakeTurns(t *testing.T) {
	w := newWorld(t, `CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); CREATE TABLE c (id int PRIMARY KEY)`, "public.a", "public.b", "public.c")
	one := control.Limits{Side: 1, All: 8}
	a, b, c := w.Request("public.a").ID, w.Request("public.b").ID, w.Request("public.c").ID
	admit := func(id int64, l control.Limits) bool {
		err := w.Store.Admit(t.Context(), id, l)
		if err != nil {
			var later *control.NotYet
			require.ErrorAs(t, err, &later)
		}
		return err == nil
	}
	wanted := func(id int64) bool {
		v, err := w.Store.Wanted(t.Context(), id, one)
		require.NoError(t, err)
		return v
	}
	require.True(t, admit(a, one))
	w.claim(w.from, a)
	require.False(t, wanted(a))
	require.False(t, admit(b, one))
	require.False(t, admit(c, one))
	require.Contains(t, w.Now(b).Waiting, "its turn: 1 of at most 1 backfills walk on school, 0 wait before it")
	require.True(t, wanted(a))
	require.False(t, admit(c, control.Limits{Side: 8, All: 1}), "the limit of all sides")

	// a makes place, and stands at the end of the queue: first come, first served.
	w.expire(a)
	require.NoError(t, w.Store.Vacate(t.Context(), a))
	require.False(t, admit(a, one), "b and c asked before")
	require.False(t, admit(c, one), "b asked before")
	require.True(t, admit(b, one))
	require.False(t, admit(c, one), "a place given counts before it is claimed")
	w.claim(w.from, b)
	require.Empty(t, w.Now(b).Waiting)
	w.expire(b)
	require.NoError(t, w.Store.Vacate(t.Context(), b))
	require.True(t, admit(c, one))

	// One row needs no place; more places let everybody in.
	require.NoError(t, w.from.admit(t.Context(), w.Request("public.a", "1").ID))
	require.True(t, admit(a, control.Limits{Side: 2, All: 8}))
}
