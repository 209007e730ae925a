package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
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
