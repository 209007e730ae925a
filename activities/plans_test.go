package activities

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// What is done again and again for a few rows reads a few rows, however large the tables are: it scans no table, and no
// index that leaves most to be filtered. PostgreSQL itself counts what it reads. First nothing is analyzed, as right after
// the first backfill began; then the statistics know nothing of the second.
func TestNothingThatIsDoneForAFewRowsReadsAWholeTable(t *testing.T) {
	const rows = 20_000
	w := history(t, rows)
	id := w.Request("public.orders").ID
	w.apart(func(_, _ *Agent) { w.upTo(id, rows-2000) })
	w.few("the last pages of a walk", func(from, _ *Agent) { w.lastPages(from, id) })
	w.onReceiver(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(1, $1::int) g WHERE g % 2 = 0`, rows)
	w.few("a chunk of rows judged", func(_, to *Agent) {
		require.NoError(t, to.classify(t.Context(), w.Now(id), 0, 300))
	})
	w.apart(func(_, _ *Agent) { w.classify(id) })
	for _, effect := range []backfill.Effect{"", backfill.Insert, backfill.Identical, backfill.Overwrite, backfill.Unknown, backfill.Superseded} {
		w.few("pages of the staged rows: "+string(effect), func(from, _ *Agent) {
			for _, skip := range []int64{0, rows / 4} {
				after, err := from.store.StagedAt(t.Context(), id, effect, skip)
				require.NoError(t, err)
				_, err = from.store.StagedRows(t.Context(), id, effect, after, 100)
				require.NoError(t, err)
				_, err = from.store.StagedRank(t.Context(), id, effect, after)
				require.NoError(t, err)
			}
		})
	}
	w.Approve(id)
	w.apart(func(_, _ *Agent) { w.release(id, rows*3/4) })
	w.few("the next batch of a long queue", func(_, to *Agent) {
		b, err := to.store.Next(t.Context(), w.Out, control.Position{}, 100, 1<<20)
		require.NoError(t, err)
		require.EqualValues(t, 100, b.Rows)
	})
	w.apart(func(_, _ *Agent) { w.drain() })
	testkit.Exec(t, w.C, `ANALYZE`)
	second := w.Request("public.orders").ID
	w.apart(func(_, _ *Agent) { w.upTo(second, rows-2000) })
	w.few("the last pages of a walk of a second request", func(from, _ *Agent) { w.lastPages(from, second) })
	w.few("a chunk of rows judged, of a second request", func(_, to *Agent) {
		require.NoError(t, to.classify(t.Context(), w.Now(second), 0, 300))
	})
	testkit.Exec(t, w.S, `SET enable_seqscan = off`)
	w.onSource(`UPDATE orders SET note = 'live' WHERE id <= 50`)
	w.few("a push", func(from, _ *Agent) {
		_, err := from.push(t.Context())
		require.NoError(t, err)
	})
	w.Approve(second)
	w.few("a batch of a release, with rows that are overtaken", func(from, _ *Agent) {
		_, _, err := from.store.ReleaseBatch(t.Context(), second, 100)
		require.NoError(t, err)
		_, err = from.store.Lead(t.Context(), w.Out.ID)
		require.NoError(t, err)
	})
	require.Equal(t, int64(50), w.Now(second).Superseded)
	w.few("batches applied", func(_, to *Agent) {
		for range 4 { // of changes and of released rows, copied and the long way
			to.BatchRows = 50
			_, err := (&applier{Agent: to}).apply(t.Context())
			require.NoError(t, err)
		}
	})
}

// upTo walks a request until so many rows are staged.
func (w *world) upTo(id, staged int64) {
	w.Helper()
	w.from.PageRows = 1900
	k := w.claim(w.from, id)
	require.NoError(w, k.freeze(w.Context()))
	for w.Now(id).Staged < staged {
		_, err := k.page(w.Context())
		require.NoError(w, err)
	}
}

// lastPages has an agent take a walk over and end it in pages of 100 rows.
func (w *world) lastPages(a *Agent, id int64) {
	w.Helper()
	w.expire(id)
	k := w.claim(a, id)
	k.keeper.size.Max = 100
	require.NoError(w, toTheEnd(w.Context(), k))
}

// few runs fn apart, and fails when a large table was read through.
func (w *world) few(what string, fn func(from, to *Agent)) {
	w.Helper()
	large := map[string]*pgx.Conn{"control": w.C, "source": w.S, "receiver": w.R}
	read := map[string]map[string]int64{}
	for name, db := range large {
		read[name] = scanned(w, db)
	}
	w.apart(fn)
	for name, db := range large {
		for table, n := range scanned(w, db) {
			require.Less(w, n-read[name][table], int64(15_000), "%s: rows of %s on %s that were read", what, table, name)
		}
	}
}

// apart runs fn with agents of its own, which are the world's meanwhile, and ends their
// sessions: at its end a session tells what it has read.
func (w *world) apart(fn func(from, to *Agent)) {
	w.Helper()
	sessions := map[*pgx.Conn]int64{w.C: 0, w.S: 0, w.R: 0}
	for db := range sessions {
		sessions[db] = testkit.Value[int64](w, db, countSessions)
	}
	from, to, store := w.from, w.to, w.Store
	w.from, w.to = w.agent(testkit.Source), w.agent(testkit.Receiver)
	w.Store = w.from.store
	fn(w.from, w.to)
	for _, a := range []*Agent{w.from, w.to} {
		a.store.Disconnect()
		a.db.Close()
	}
	w.from, w.to, w.Store = from, to, store
	for db, n := range sessions {
		testkit.Eventually(w, "the agents' sessions have ended", func() bool { return testkit.Value[int64](w, db, countSessions) <= n })
	}
}

const countSessions = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'`

// scanned is how many rows of each table were ever read by scans of it or of its indexes.
func scanned(w *world, db *pgx.Conn) map[string]int64 {
	out := map[string]int64{}
	for _, line := range testkit.Strings(w, db, `SELECT relname || ' ' || seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables`) {
		var table string
		var n int64
		_, err := fmt.Sscan(line, &table, &n)
		require.NoError(w, err)
		out[table] = n
	}
	return out
}
