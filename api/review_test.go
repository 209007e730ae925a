package api

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// judged gives the staged rows of a request effects at random, in chunks as an agent
// would, up to the last but behind, and returns the numbers of the rows of each effect.
func (w *world) judged(id int64, rows, behind int) map[string][]int64 {
	w.Helper()
	seed := uint64(time.Now().UnixNano())
	w.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	of := map[string][]int64{}
	chunk := map[string]int{}
	for n := 1; n <= rows; n++ {
		effect := "unknown"
		if n <= rows-behind {
			effect = []string{"insert", "insert", "insert", "overwrite", "identical", "unknown"}[random.IntN(6)]
			code := map[string]string{"insert": "i", "overwrite": "o", "identical": "=", "unknown": "?"}[effect]
			w.exec(`INSERT INTO backfill_control.effect (request_id, n, effect) VALUES ($1, $2, $3)`, id, n, code)
			chunk[effect]++
			if n%37 == 0 || n == rows-behind {
				w.exec(`INSERT INTO backfill_control.judged VALUES ($1, $2, $3, $4, $5)`, id, n, chunk["insert"], chunk["overwrite"], chunk["identical"])
				clear(chunk)
			}
		}
		of[effect] = append(of[effect], int64(n))
		of[""] = append(of[""], int64(n))
	}
	w.exec(`UPDATE backfill_control.request SET classified = $2 WHERE id = $1`, id, rows-behind)
	return of
}

func numbers(a answer) (out []int64) {
	for _, r := range a.data() {
		n, _ := r["n"].(json.Number).Int64()
		out = append(out, n)
	}
	return out
}

// Whatever row is asked for, by its place among those of an effect, by its key, or
// going on from a page, the answer is the list cut at just that place.
func TestRowsFromAnywhere(t *testing.T) {
	w := newWorld(t)
	const rows = 160
	id := w.staged(rows)
	of := w.judged(id, rows, 23)
	w.exec(`UPDATE backfill_control.staged SET superseded_by = 9 WHERE request_id = $1 AND n % 11 = 3`, id)
	for n := int64(3); n <= rows; n += 11 {
		of["superseded"] = append(of["superseded"], n)
	}
	at := path("/backfills/%d/rows", id)
	for effect, all := range of {
		for position := 0; position <= len(all); position += 1 + position%7 {
			a := w.get(control.Viewer, fmt.Sprintf("%s?effect=%s&limit=5&position=%d", at, effect, position))
			require.Equal(t, 200, a.status, "%s", a.raw)
			require.Equal(t, all[position:min(position+5, len(all))], append([]int64{}, numbers(a)...), "%s after %d", effect, position)
			require.Equal(t, json.Number(fmt.Sprint(position)), a.json["position"], "%s after %d", effect, position)
		}
		for _, key := range []int64{0, 1, 36, 37, 38, 100, rows - 23, rows - 22, rows, rows + 5} {
			i := slices.IndexFunc(all, func(n int64) bool { return n >= key })
			if i < 0 {
				i = len(all)
			}
			a := w.get(control.Viewer, fmt.Sprintf("%s?effect=%s&limit=3&from_key=%d", at, effect, key))
			require.Equal(t, 200, a.status, "%s", a.raw)
			require.Equal(t, all[i:min(i+3, len(all))], append([]int64{}, numbers(a)...), "%s from %d", effect, key)
			require.Equal(t, json.Number(fmt.Sprint(i)), a.json["position"], "%s from %d", effect, key)
			a = w.get(control.Viewer, fmt.Sprintf("%s?effect=%s&key=%d", at, effect, key))
			if i < len(all) && all[i] == key {
				require.Equal(t, []int64{key}, numbers(a))
			} else {
				require.Empty(t, numbers(a), "%s, key %d: %s", effect, key, a.raw)
			}
		}
	}

	// A page found by its place goes on by its cursor.
	a := w.get(control.Viewer, at+"?effect=insert&limit=4&position=6")
	a = w.get(control.Viewer, at+"?effect=insert&limit=4&cursor="+a.json["next_cursor"].(string))
	require.Equal(t, of["insert"][10:14], numbers(a))

	for _, bad := range []string{"from_key=x", "from_key=1&from_key=2", "position=1&from_key=2", "position=-1", "effect=nonsense"} {
		require.Equal(t, 422, w.get(control.Viewer, at+"?"+bad).status, bad)
	}
}

// Keys are ordered by their type as PostgreSQL has it, one column after the other.
func TestKeysArePlacedByTheirTypes(t *testing.T) {
	w := newWorld(t)
	id := w.staged(0)
	w.exec(`UPDATE backfill_control.layout SET definition = '{"columns":[{"name":"day","type":"date"},{"name":"n","type":"numeric"}],"key":["day","n"]}'`)
	w.exec(`INSERT INTO backfill_control.staged (request_id, n, snap, key, row)
		SELECT $1, row_number() OVER (ORDER BY d, v), '1:1:', ARRAY[d::text, v::text], ARRAY[d::text, v::text]
		  FROM (VALUES (date '0044-03-15 BC'), ('2024-01-31'), ('2024-02-01'), ('10000-01-01')) a (d), (VALUES (-1.5), (9), (10.25), ('NaN'::numeric)) b (v)`, id)
	w.exec(`UPDATE backfill_control.request SET staged = 16 WHERE id = $1`, id)
	for _, c := range []struct {
		day, n string
		first  int64
	}{{"0044-03-15 BC", "-2", 1}, {"2024-01-31", "9.5", 7}, {"2024-01-31", "9.0", 6}, {"2024-01-31", "NaN", 8}, {"9999-01-01", "0", 13}} {
		a := w.get(control.Viewer, path("/backfills/%d/rows?limit=1&", id)+url.Values{"from_key": {c.day, c.n}}.Encode())
		require.Equal(t, []int64{c.first}, numbers(a), "%s %s: %s", c.day, c.n, a.raw)
	}

	// What this database does not know is found exactly, and otherwise said so.
	w.exec(`UPDATE backfill_control.layout SET definition = '{"columns":[{"name":"day","type":"app.mood"},{"name":"n","type":"numeric"}],"key":["day","n"]}' `)
	w.service.layouts.Clear()
	a := w.get(control.Viewer, path("/backfills/%d/rows?limit=1&", id)+url.Values{"from_key": {"2024-02-01", "9"}}.Encode())
	require.Equal(t, []int64{10}, numbers(a), "%s", a.raw)
	a = w.get(control.Viewer, path("/backfills/%d/rows?limit=1&", id)+url.Values{"from_key": {"happy", "9"}}.Encode())
	require.Equal(t, 422, a.status)
	require.Contains(t, a.json["detail"], "only exactly")
}

func TestOvertakenRowsNameTheChange(t *testing.T) {
	w := newWorld(t)
	id := w.staged(3)
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, snap, op, dropped, key) OVERRIDING SYSTEM VALUE
		SELECT r.direction, r.table_id, '9:9:', 'd', true, '{2}' FROM backfill_control.request r WHERE r.id = $1`, id)
	w.exec(`UPDATE backfill_control.staged SET superseded_by = (SELECT max(seq) FROM backfill_control.entry) WHERE n = 2`)
	rows := w.get(control.Viewer, path("/backfills/%d/rows?effect=superseded", id)).data()
	require.Len(t, rows, 1)
	by := rows[0]["superseded_by"].(map[string]any)
	require.Equal(t, "delete", by["op"])
	require.Equal(t, "dropped", by["state"])
	require.NotEmpty(t, by["at"])
}

// Judging again forgets what was judged, and decisions on it no longer count.
func TestJudgingAgain(t *testing.T) {
	w := newWorld(t)
	id := w.staged(50)
	w.judged(id, 50, 0)
	w.exec(`UPDATE backfill_control.request SET n_insert = 30, judged_seq = 4 WHERE id = $1`, id)
	require.Equal(t, 403, w.post(control.Viewer, path("/backfills/%d/judge", id), "").status)
	a := w.post(control.Requester, path("/backfills/%d/judge", id), "")
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, json.Number("8"), a.json["revision"])
	require.Equal(t, json.Number("50"), a.json["effects"].(map[string]any)["unknown"])
	require.Len(t, w.get(control.Viewer, path("/backfills/%d/rows?effect=unknown", id)).data(), 50)
	require.Equal(t, 409, w.post(control.Reviewer, path("/backfills/%d/approve", id), `{"revision":7}`).status)
	require.Equal(t, 200, w.post(control.Reviewer, path("/backfills/%d/approve", id), `{"revision":8}`).status)
	require.Equal(t, 409, w.post(control.Requester, path("/backfills/%d/judge", id), "").status)
	require.Equal(t, backfill.Releasing, w.state(id))
}

// Everything that happened to one row is told in one list, oldest first.
func TestTheLifeOfARow(t *testing.T) {
	w := newWorld(t)
	id := w.staged(3)
	require.Equal(t, 200, w.post(control.Reviewer, path("/backfills/%d/approve", id), `{"revision":7,"note":"fine"}`).status)
	_, _, err := w.store.ReleaseBatch(t.Context(), id, 10)
	require.NoError(t, err)
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, snap, op, key, dropped)
		SELECT r.direction, r.table_id, '9:9:', v.op::"char", v.key, v.dropped FROM backfill_control.request r,
		       (VALUES (1, 'u', '{2}'::text[], false), (2, 'd', '{2}', true), (3, 'u', '{3}', false)) v (i, op, key, dropped) WHERE r.id = $1 ORDER BY v.i`, id)
	w.exec(`UPDATE backfill_control.direction SET applied_seq = (SELECT max(seq) FROM backfill_control.entry) WHERE from_side = 'school'`)
	w.exec(`INSERT INTO backfill_control.ack SELECT direction, max(seq), clock_timestamp() FROM backfill_control.entry GROUP BY 1`)
	life := w.get(control.Viewer, "/api/v1/sites/maple/tables/public.orders/life?key=2").data()
	var what []string
	for _, h := range life {
		what = append(what, h["what"].(string))
	}
	require.Subset(t, what, []string{"staged", "approved", "released", "pushed", "dropped", "applied"})
	require.Len(t, what, 7, "%v", what)
	require.Less(t, slices.Index(what, "approved"), slices.Index(what, "released"))
	require.Less(t, slices.Index(what, "released"), slices.Index(what, "applied"))
	require.Equal(t, "reviewer", life[slices.Index(what, "approved")]["by"])
	require.Empty(t, w.get(control.Viewer, "/api/v1/sites/maple/tables/public.orders/life?key=99").data())
	require.Equal(t, 404, w.get(control.Viewer, "/api/v1/sites/maple/tables/public.nothing/life?key=1").status)
}
