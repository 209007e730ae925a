package api

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

func sorted(s []string) []string { slices.Sort(s); return s }

func TestRows(t *testing.T) {
	w := newWorld(t)
	id := w.staged(4)
	w.exec(`INSERT INTO backfill_control.effect (request_id, n, effect, receiver) VALUES
		($1, 1, 'i', NULL), ($1, 2, 'o', ARRAY['2', NULL, NULL]), ($1, 3, '=', NULL)`, id)
	w.exec(`UPDATE backfill_control.request SET classified = 3 WHERE id = $1`, id)
	w.exec(`UPDATE backfill_control.staged SET superseded_by = 9 WHERE n = 1`)
	a := w.get(control.Viewer, path("/backfills/%d/rows", id))
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, json.Number("7"), a.json["revision"])
	require.Nil(t, a.json["next_cursor"])
	require.Contains(t, string(a.raw), `"row":{"id":"1","zeta":"z1","alpha":null}`, "columns in their order")
	rows := a.data()
	require.Len(t, rows, 4)
	for i, effect := range []string{"insert", "overwrite", "identical", "unknown"} {
		require.Equal(t, effect, rows[i]["effect"])
		require.Equal(t, i == 0, rows[i]["superseded"])
		require.Len(t, w.get(control.Viewer, path("/backfills/%d/rows", id)+"?effect="+effect).data(), 1)
	}
	require.Nil(t, rows[0]["receiver"])
	require.Equal(t, map[string]any{"id": "2", "zeta": nil, "alpha": nil}, rows[1]["receiver"])
	require.Equal(t, []any{"zeta"}, rows[1]["changed"])
	require.Equal(t, []any{"2"}, rows[1]["key"])
	require.Len(t, w.get(control.Viewer, path("/backfills/%d/rows?effect=", id)).data(), 4)

	empty := w.get(control.Viewer, path("/backfills/%s/rows", w.rowBackfill("77")))
	require.Equal(t, 200, empty.status)
	require.Empty(t, empty.data())
}

func (w *world) rowBackfill(key string) string {
	w.Helper()
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","key":["`+key+`"]}`)
	require.Equal(w, 201, a.status, "%s", a.raw)
	return a.json["id"].(json.Number).String()
}

func TestRowPages(t *testing.T) {
	w := newWorld(t)
	id := w.staged(250)
	at := path("/backfills/%d/rows", id)
	var keys []string
	cursors := []string{""}
	for {
		a := w.get(control.Viewer, at+"?cursor="+cursors[len(cursors)-1])
		require.Equal(t, 200, a.status, "%s", a.raw)
		for _, r := range a.data() {
			keys = append(keys, r["key"].([]any)[0].(string))
		}
		next, ok := a.json["next_cursor"].(string)
		if !ok {
			break
		}
		cursors = append(cursors, next)
	}
	require.Len(t, cursors, 3, "100 a page")
	require.Len(t, keys, 250)
	require.Len(t, slices.Compact(keys), 250)

	good := cursors[1]
	require.Len(t, w.get(control.Viewer, at+"?limit=10&cursor="+good).data(), 10, "a page may have another size")
	for name, bad := range map[string]string{
		"rubbish": at + "?cursor=rubbish", "not base64": at + "?cursor=***", "cut": at + "?cursor=" + good[:len(good)-2], "short": at + "?cursor=AAAA",
		"changed":      at + "?cursor=" + swap(good),
		"other filter": at + "?effect=unknown&cursor=" + good,
		"other list":   "/api/v1/backfills?cursor=" + good,
	} {
		a := w.get(control.Viewer, bad)
		require.Equal(t, 422, a.status, "%s: %s", name, a.raw)
		require.Equal(t, []string{"cursor"}, a.fields())
	}
}

// swap changes the position in a cursor.
func swap(cursor string) string {
	return strings.Replace(cursor, cursor[:8], "AAAAAAAB", 1)
}
