package api

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Changes of a stopped table are neither applied nor lost: they are shown as such, and
// to retry one is to try the table.
func TestChangesOfAStoppedTable(t *testing.T) {
	w := newWorld(t)
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, layout_id, snap, op, key, row)
		SELECT d.id, t.id, l.id, '1:1:', 'u', ARRAY[n::text], ARRAY[n::text, 'z', NULL]
		  FROM backfill_control.direction d, backfill_control.table_config t, backfill_control.layout l, generate_series(1, 5) n
		 WHERE d.from_side = 'school' ORDER BY n`)
	w.exec(`UPDATE backfill_control.direction SET applied_seq = 4`)
	w.exec(`INSERT INTO backfill_control.stopped (direction, table_id, seq, reason, since)
		SELECT d.id, t.id, 2, 'violates check constraint', now() FROM backfill_control.direction d, backfill_control.table_config t WHERE d.from_side = 'school'`)
	for _, state := range []string{"", "?state=stopped"} {
		a := w.get(control.Viewer, "/api/v1/sites/maple/queue"+state)
		require.Equal(t, []string{"3", "4", "5"}, seqs(a), "%s", a.raw)
		require.Equal(t, "stopped", a.data()[0]["state"])
		require.Equal(t, "violates check constraint", a.data()[0]["reason"])
	}
	require.Empty(t, seqs(w.get(control.Viewer, "/api/v1/sites/maple/queue?state=waiting")))
	require.Equal(t, []string{"2", "1"}, seqs(w.get(control.Viewer, "/api/v1/sites/maple/history")))
	panel := w.get(control.Viewer, "/api/v1/sites/maple/tables").data()[0]
	require.Equal(t, "violates check constraint", panel["stopped"].(map[string]any)["reason"])
	require.Equal(t, json.Number("3"), panel["lag"].(map[string]any)["waiting"])

	require.Equal(t, 202, w.post(control.Reviewer, "/api/v1/sites/maple/queue/4/retry", "").status)
	d, err := w.store.Direction(t.Context(), "maple", "school")
	require.NoError(t, err)
	wishes, err := w.store.Wishes(t.Context(), d.ID)
	require.NoError(t, err)
	require.True(t, wishes.CatchUp)
	a := w.post(control.Reviewer, "/api/v1/sites/maple/queue/4/skip", "")
	require.Equal(t, 409, a.status)
	require.Contains(t, string(a.raw), "has stopped")
	require.Equal(t, 409, w.post(control.Reviewer, "/api/v1/sites/maple/queue/1/retry", "").status, "it was applied")
}

func TestQueueAndHistory(t *testing.T) {
	w := newWorld(t)
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, layout_id, snap, op, key, row)
		SELECT d.id, t.id, l.id, '1:1:', 'u', ARRAY[n::text], ARRAY[n::text, 'z', NULL]
		  FROM backfill_control.direction d, backfill_control.table_config t, backfill_control.layout l, generate_series(1, 5) n
		 WHERE d.from_side = 'school' ORDER BY n`)
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, snap, op, key) SELECT d.id, t.id, '1:1:', 'd', ARRAY['6']
		  FROM backfill_control.direction d, backfill_control.table_config t WHERE d.from_side = 'school'`)
	w.exec(`UPDATE backfill_control.direction SET applied_seq = 3`)
	w.exec(`INSERT INTO backfill_control.ack (direction, seq) SELECT id, 3 FROM backfill_control.direction`)
	w.exec(`INSERT INTO backfill_control.quarantine (direction, seq, table_id, key, state, reason, since)
		SELECT d.id, 2, t.id, ARRAY['2'], 'quarantined', 'violates a constraint', now()
		  FROM backfill_control.direction d, backfill_control.table_config t WHERE d.from_side = 'school'`)

	a := w.get(control.Viewer, "/api/v1/sites/maple/queue")
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, []string{"2", "4", "5", "6"}, seqs(a))
	first, last := a.data()[0], a.data()[3]
	require.Equal(t, "quarantined", first["state"])
	require.Equal(t, "violates a constraint", first["reason"])
	require.Equal(t, "delete", last["op"])
	require.Nil(t, last["row"])
	require.Contains(t, string(a.raw), `"row":{"id":"4","zeta":"z","alpha":null}`)

	a = w.get(control.Viewer, "/api/v1/sites/maple/queue?limit=2")
	require.Equal(t, []string{"2", "4"}, seqs(a))
	a = w.get(control.Viewer, "/api/v1/sites/maple/queue?limit=2&cursor="+a.json["next_cursor"].(string))
	require.Equal(t, []string{"5", "6"}, seqs(a))
	require.Nil(t, a.json["next_cursor"])
	require.Equal(t, []string{"2"}, seqs(w.get(control.Viewer, "/api/v1/sites/maple/queue?state=quarantined")))
	require.Equal(t, []string{"5"}, seqs(w.get(control.Viewer, "/api/v1/sites/maple/queue?key=5&table=public.orders&from=school")))

	a = w.get(control.Viewer, "/api/v1/sites/maple/history?limit=2")
	require.Equal(t, []string{"3", "2"}, seqs(a))
	require.NotNil(t, a.data()[0]["applied_at"])
	a = w.get(control.Viewer, "/api/v1/sites/maple/history?limit=2&cursor="+a.json["next_cursor"].(string))
	require.Equal(t, []string{"1"}, seqs(a))

	require.Equal(t, 403, w.post(control.Requester, "/api/v1/sites/maple/queue/2/retry", "").status)
	a = w.post(control.Reviewer, "/api/v1/sites/maple/queue/2/retry", "")
	require.Equal(t, 202, a.status, "%s", a.raw)
	require.Equal(t, "retry", a.json["wish"])
	require.Equal(t, 202, w.post(control.Reviewer, "/api/v1/sites/maple/queue/2/skip", "").status)
	require.Equal(t, 409, w.post(control.Reviewer, "/api/v1/sites/maple/queue/4/skip", "").status, "it is not set aside")

	a = w.get(control.Viewer, "/api/v1/sites/maple")
	lag := a.json["lag"].([]any)[1].(map[string]any)
	require.Equal(t, "school", lag["from"])
	require.Equal(t, json.Number("3"), lag["waiting"])
}

func seqs(a answer) []string {
	var out []string
	for _, e := range a.data() {
		out = append(out, e["seq"].(json.Number).String())
	}
	return out
}

func TestSites(t *testing.T) {
	w := newWorld(t)
	a := w.post(control.Admin, "/api/v1/sites", `{"name":"oak","sides":["b","a"]}`)
	require.Equal(t, 201, a.status, "%s", a.raw)
	require.Equal(t, "/api/v1/sites/oak", a.header.Get("Location"))
	require.JSONEq(t, string(a.raw), string(w.get(control.Viewer, "/api/v1/sites/oak").raw))
	require.Len(t, w.get(control.Viewer, "/api/v1/sites").data(), 2)
	require.NotNil(t, w.get(control.Viewer, "/api/v1/sites/oak/tables").json["data"], "an empty list, not null")
}

func TestPutTable(t *testing.T) {
	w := newWorld(t)
	const at = "/api/v1/sites/maple/tables/public.lines"
	a := w.call(control.Admin, "PUT", at, `{}`)
	require.Equal(t, 422, a.status, "a new table needs captured_from: %s", a.raw)
	a = w.call(control.Admin, "PUT", at, `{"captured_from":["school"],"apply_order":2}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, map[string]any{"create": true, "update": true, "delete": true}, a.json["operations"])
	a = w.call(control.Admin, "PUT", at, `{"active":false,"delete":false}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, false, a.json["active"])
	require.Equal(t, false, a.json["delete"])
	require.Equal(t, true, a.json["create"], "what is not given stays")
	require.Equal(t, []any{"school"}, a.json["captured_from"])
	require.Equal(t, json.Number("2"), a.json["apply_order"])

	a = w.call(control.Admin, "PUT", at, `{"captured_from":["central"]}`, header{"If-None-Match", "*"})
	require.Equal(t, 409, a.status, "%s", a.raw)
	require.Equal(t, "table", a.json["errors"].([]any)[0].(map[string]any)["field"])
	require.Equal(t, []any{"school"}, w.call(control.Admin, "PUT", at, `{}`).json["captured_from"], "nothing has changed")
	a = w.call(control.Admin, "PUT", "/api/v1/sites/maple/tables/lines", `{"captured_from":["central"]}`)
	require.Equal(t, 422, a.status)
	require.Equal(t, "table", a.json["errors"].([]any)[0].(map[string]any)["field"])
}

func TestRemoveTable(t *testing.T) {
	w := newWorld(t)
	const at = "/api/v1/sites/maple/tables/public.orders"
	open := w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill)
	require.Equal(t, 201, open.status, "%s", open.raw)
	a := w.call(control.Admin, "DELETE", at, "")
	require.Equal(t, 409, a.status, "%s", a.raw)
	require.Equal(t, open.header.Get("Location"), a.json["open"])
	id, err := open.json["id"].(json.Number).Int64()
	require.NoError(t, err)
	_, err = w.store.Close(t.Context(), id, "test", backfill.Cancelled, "")
	require.NoError(t, err)
	a = w.call(control.Admin, "DELETE", at, "")
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, "public.orders", a.json["table"])
	require.Equal(t, 404, w.call(control.Admin, "DELETE", at, "").status, "it is gone")
	require.Equal(t, 404, w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill).status)
	require.Equal(t, 200, w.get(control.Viewer, open.header.Get("Location")).status, "its requests stay")
	require.Equal(t, 200, w.get(control.Viewer, "/api/v1/sites/maple/history?table=public.orders").status, "its history stays")
	require.Equal(t, "table.remove", w.get(control.Viewer, "/api/v1/audit").data()[0]["action"])
	require.Equal(t, 422, w.call(control.Admin, "PUT", at, `{}`).status, "configured again it begins anew")
	require.Equal(t, 200, w.call(control.Admin, "PUT", at, `{"captured_from":["school"]}`).status)
}
