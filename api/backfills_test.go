package api

import (
	"encoding/json"
	"fmt"
	"net/url"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

func queryEscape(s string) string { return url.QueryEscape(s) }

func TestRequest(t *testing.T) {
	w := newWorld(t)
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"\"public\".\"orders\"","from":"school","mode":"full","note":"after <setup>"}`)
	require.Equal(t, 201, a.status, "%s", a.raw)
	require.Equal(t, fmt.Sprintf("/api/v1/backfills/%s", a.json["id"]), a.header.Get("Location"))
	require.Equal(t, "PENDING", a.json["state"])
	require.Equal(t, "public.orders", a.json["table"])
	require.Equal(t, "central", a.json["to"])
	require.Equal(t, "full", a.json["mode"])
	require.Nil(t, a.json["key"])
	require.Equal(t, "requester", a.json["requested_by"])
	require.Equal(t, "after <setup>", a.json["note"])
	require.Equal(t, "backfill/maple/public.orders/school", a.json["workflow_id"])
	require.Equal(t, "https://temporal.test/namespaces/default/workflows/backfill%2Fmaple%2Fpublic.orders%2Fschool", a.json["console_url"])
	links := a.json["links"].(map[string]any)
	require.Contains(t, links, "cancel")
	require.NotContains(t, links, "approve")
	require.Equal(t, "https://backfill.test/backfills/"+fmt.Sprint(a.json["id"]), links["review"])
	require.Len(t, w.runs.started, 1)

	same := w.get(control.Viewer, a.header.Get("Location"))
	require.Equal(t, 200, same.status)
	require.JSONEq(t, string(a.raw), string(same.raw))

	a = w.get(control.Viewer, "/api/v1/sites/maple/tables")
	require.Equal(t, 200, a.status, "%s", a.raw)
	panel := a.data()[0]
	require.Equal(t, "public.orders", panel["table"])
	require.Equal(t, json.Number("10"), panel["source_rows"])
	require.Equal(t, json.Number("9"), panel["receiver_rows"])
	open := panel["backfill"].(map[string]any)
	require.Equal(t, "PENDING", open["state"])
	require.Equal(t, same.json["id"], open["id"])
	require.Equal(t, false, open["can_request"])
}

// Guarantee 7: at most one request is open per table and direction, whatever the race.
func TestOneOpenRequest(t *testing.T) {
	w := newWorld(t)
	const n = 20
	answers := make([]answer, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { answers[i] = w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill) })
	}
	wg.Wait()
	var made []answer
	for _, a := range answers {
		if a.status == 201 {
			made = append(made, a)
		}
	}
	require.Len(t, made, 1)
	at := made[0].header.Get("Location")
	for _, a := range answers {
		if a.status == 201 {
			continue
		}
		require.Equal(t, 409, a.status, "%s", a.raw)
		require.Equal(t, "conflict", a.kind())
		require.Equal(t, at, a.header.Get("Location"))
		require.Equal(t, at, a.json["open"])
		require.Equal(t, made[0].json["id"], a.json["request"])
	}
	require.Len(t, w.get(control.Viewer, "/api/v1/backfills").data(), 1)
}

func TestConditions(t *testing.T) {
	w := newWorld(t)
	w.exec(`UPDATE backfill_control.table_config SET active = false, op_update = false`)
	w.exec(`UPDATE backfill_control.table_side SET capture_ok = false, row_count = 5`)
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill)
	require.Equal(t, 422, a.status)
	require.Equal(t, "refused", a.kind())
	require.Equal(t, []string{"active", "operations", "capture", "behind"}, a.fields())

	a = w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","key":["1"]}`)
	require.Equal(t, []string{"active", "operations", "capture"}, a.fields(), "a row needs the first three only")

	w.exec(`UPDATE backfill_control.table_config SET active = true, op_update = true`)
	w.exec(`UPDATE backfill_control.table_side SET capture_ok = true`)
	a = w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill)
	require.Equal(t, []string{"behind"}, a.fields())
	a = w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"central"}`)
	require.Contains(t, a.fields(), "capture", "not captured that way")

	w.exec(`UPDATE backfill_control.table_side SET row_count = 6 WHERE side = 'school'`)
	w.backfill()
	w.exec(`UPDATE backfill_control.table_config SET active = false`)
	a = w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill)
	require.Equal(t, 409, a.status, "an open request comes before conditions")
}

// A known gap makes a table requestable although the counts agree, and is shown.
func TestAGapIsShownAndMakesATableRequestable(t *testing.T) {
	w := newWorld(t)
	w.exec(`UPDATE backfill_control.table_side SET row_count = 9`)
	capture := func() (map[string]any, map[string]any) {
		a := w.get(control.Viewer, "/api/v1/sites/maple/tables")
		require.Equal(t, 200, a.status, "%s", a.raw)
		return a.data()[0]["capture"].(map[string]any), a.data()[0]["backfill"].(map[string]any)
	}
	c, b := capture()
	require.Nil(t, c["gap"])
	require.Equal(t, false, b["can_request"])

	w.exec(`UPDATE backfill_control.table_side SET gap = 'a trigger was disabled', gap_since = '2026-01-02 03:04:05Z', capture_ok = false, problem = 'trigger x is missing on orders' WHERE side = 'school'`)
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill)
	require.Equal(t, []string{"capture"}, a.fields())
	require.Contains(t, string(a.raw), "on school since 2026-01-02 03:04:05 UTC: trigger x is missing on orders: run backfill setup --site maple --side school")

	w.exec(`UPDATE backfill_control.table_side SET capture_ok = true, problem = NULL WHERE side = 'school'`)
	c, b = capture()
	require.Equal(t, "a trigger was disabled", c["gap"])
	require.NotNil(t, c["gap_since"])
	require.Equal(t, true, b["can_request"])
	w.backfill()
}

func TestRowRequest(t *testing.T) {
	w := newWorld(t)
	w.table("public.lines", []string{"order id", "n"}, []string{"bigint", "numeric"})
	ask := func(key string) answer {
		return w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.lines","from":"school","key":`+key+`}`)
	}
	a := ask(`[9007199254740993, 1.50]`)
	require.Equal(t, 201, a.status, "%s", a.raw)
	require.Equal(t, "row", a.json["mode"])
	require.Equal(t, []any{"9007199254740993", "1.50"}, a.json["key"], "numbers keep their spelling")
	at := a.header.Get("Location")

	a = ask(`{"n":"1.50","order id":"9007199254740993"}`)
	require.Equal(t, 409, a.status, "the same row")
	require.Equal(t, at, a.header.Get("Location"))
	require.Equal(t, 201, ask(`[1, 1]`).status, "another row")
	require.Equal(t, 201, w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.lines","from":"school"}`).status, "the whole table")

	require.Equal(t, []string{"key.n"}, ask(`{"order id":1}`).fields())
	require.Equal(t, []string{"key.m", "key.n"}, sorted(ask(`{"order id":1,"m":2}`).fields()))
	require.Equal(t, []string{"key.order id"}, ask(`[true, 1]`).fields())
	require.Equal(t, []string{"key.order id", "key.n"}, ask(`[null, [1]]`).fields())
	require.Equal(t, []string{"key.n"}, ask(`[1, "\u0000"]`).fields())

	rows := w.get(control.Viewer, "/api/v1/sites/maple/tables").data()[0]["row_backfills"].([]any)
	require.Len(t, rows, 2)
}

func TestReview(t *testing.T) {
	w := newWorld(t)
	id := w.staged(3)
	at := path("/backfills/%d", id)
	require.Contains(t, w.get(control.Viewer, at).json["links"], "approve")
	a := w.post(control.Reviewer, at+"/approve", `{"revision":7,"skip_identical":true,"note":"read"}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, "RELEASING", a.json["state"])
	require.Equal(t, "reviewer", a.json["reviewed_by"])
	require.Equal(t, "read", a.json["note"])

	a = w.post(control.Reviewer, at+"/reject", `{"revision":7,"note":"too late"}`)
	require.Equal(t, 409, a.status, "the first decision wins")
	require.Contains(t, a.json["detail"], "RELEASING")

	a = w.post(control.Requester, at+"/pause", `{"note":"lunch"}`)
	require.Equal(t, true, a.json["paused"], "%s", a.raw)
	require.Equal(t, 409, w.post(control.Requester, at+"/pause", "").status)
	a = w.post(control.Requester, at+"/resume", "")
	require.Equal(t, false, a.json["paused"], "%s", a.raw)
	a = w.post(control.Requester, at+"/cancel", `{"note":"enough"}`)
	require.Equal(t, "CANCELLED", a.json["state"], "%s", a.raw)
	require.Equal(t, 409, w.post(control.Requester, at+"/cancel", "").status)

	id = w.staged(1)
	a = w.post(control.Reviewer, path("/backfills/%d/reject", id), `{"revision":7,"note":"wrong table"}`)
	require.Equal(t, "REJECTED", a.json["state"], "%s", a.raw)
	require.Equal(t, 200, w.get(control.Viewer, path("/backfills/%d/rows", id)).status, "staged rows stay readable")

	actions := map[string]string{}
	for _, e := range w.get(control.Viewer, "/api/v1/audit?site=maple").data() {
		actions[e["action"].(string)] = e["account"].(string)
		require.NotEmpty(t, e["at"])
	}
	require.Equal(t, "reviewer", actions["backfill.approve"])
	require.Equal(t, "reviewer", actions["backfill.reject"])
	require.Equal(t, "requester", actions["backfill.cancelled"])
}

// A site may want two people, whatever way the decision comes.
func TestSecondPerson(t *testing.T) {
	w := newWorld(t)
	require.Equal(t, 403, w.call(control.Reviewer, "PATCH", "/api/v1/sites/maple", `{"second_person":true}`).status)
	a := w.call(control.Admin, "PATCH", "/api/v1/sites/maple", `{"second_person":true}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, true, a.json["second_person"])
	require.Equal(t, 422, w.call(control.Admin, "PATCH", "/api/v1/sites/maple", `{}`).status)
	require.Equal(t, 404, w.call(control.Admin, "PATCH", "/api/v1/sites/nowhere", `{"second_person":true}`).status)

	id := w.staged(1)
	w.exec(`UPDATE backfill_control.request SET requested_by = 'reviewer' WHERE id = $1`, id)
	a = w.post(control.Reviewer, path("/backfills/%d/approve", id), `{"revision":7}`)
	require.Equal(t, 403, a.status)
	// What a signal brings never passed the API.
	for _, by := range []string{"reviewer", " Reviewer"} {
		_, err := w.store.Approve(t.Context(), id, control.Decision{By: by, Revision: 7, Via: "temporal"})
		require.Equal(t, backfill.Forbidden, backfill.CodeOf(err), "%v", err)
	}
	require.Equal(t, backfill.AwaitingReview, w.state(id))
	require.Equal(t, 200, w.post(control.Admin, path("/backfills/%d/approve", id), `{"revision":7}`).status)
}

func TestTheOneWhoAskedMayReject(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.store.SetSecondPerson(t.Context(), "admin", "maple", true))
	id := w.staged(1)
	w.exec(`UPDATE backfill_control.request SET requested_by = 'reviewer' WHERE id = $1`, id)
	require.Equal(t, 200, w.post(control.Reviewer, path("/backfills/%d/reject", id), `{"revision":7,"note":"my mistake"}`).status)
}

func TestDecisionsNeedAName(t *testing.T) {
	w := newWorld(t)
	id := w.staged(1)
	for _, by := range []string{"", "  ", "your name", "<Your Name>"} {
		_, err := w.store.Approve(t.Context(), id, control.Decision{By: by, Revision: 7})
		require.Equal(t, backfill.Invalid, backfill.CodeOf(err), "%q: %v", by, err)
	}
	require.Equal(t, backfill.AwaitingReview, w.state(id))
	_, err := w.store.Reject(t.Context(), id, control.Decision{By: "ana", Revision: 7, Note: "no", Via: "temporal"})
	require.NoError(t, err)
	require.Equal(t, "temporal", w.get(control.Viewer, path("/backfills/%d", id)).json["reviewed_via"])
	log := w.get(control.Viewer, "/api/v1/audit?action=backfill.reject").data()
	require.Equal(t, "temporal", log[0]["detail"].(map[string]any)["via"])
}

func TestAuditIsFiltered(t *testing.T) {
	w := newWorld(t)
	id := w.staged(1)
	require.Equal(t, 200, w.post(control.Reviewer, path("/backfills/%d/reject", id), `{"revision":7,"note":"no"}`).status)
	one := func(query string) []map[string]any {
		return w.get(control.Viewer, "/api/v1/audit?site=maple&"+query).data()
	}
	require.Len(t, one("account=reviewer"), 1)
	require.Len(t, one("action=backfill.reject"), 1)
	require.Len(t, one("action=backfill"), 2)
	require.Len(t, one(fmt.Sprintf("request=%d", id)), 2)
	require.Empty(t, one("request=99"))
	require.Empty(t, one("account=reviewer&action=site"))
}

// A run that has just ended is no reason to say that Temporal is away.
func TestRunEnded(t *testing.T) {
	w := newWorld(t)
	w.service.Runs = endingRuns{w.runs}
	id := w.backfill()
	a := w.post(control.Requester, path("/backfills/%d/cancel", id), "")
	require.Equal(t, 409, a.status, "%s", a.raw)
	require.Equal(t, backfill.Cancelled, w.state(id))
}

type endingRuns struct{ *fakeRuns }

func (f endingRuns) Cancel(ctx ctx, r *backfill.Request, by, note string) error {
	if err := f.fakeRuns.Cancel(ctx, r, by, note); err != nil {
		return err
	}
	return &backfill.Error{Code: backfill.Unavailable, Message: "no run", Cause: errNoRun}
}

func TestListBackfills(t *testing.T) {
	w := newWorld(t)
	for range 5 {
		w.exec(`UPDATE backfill_control.request SET state = 'FINISHED', closed_at = now() WHERE id = $1`, w.backfill())
	}
	last := w.backfill()
	var ids []string
	at := "/api/v1/backfills?site=maple&table=public.orders&from=school&state=FINISHED&state=PENDING&limit=4"
	a := w.get(control.Viewer, at)
	for {
		for _, b := range a.data() {
			ids = append(ids, fmt.Sprint(b["id"]))
		}
		next, ok := a.json["next_cursor"].(string)
		if !ok {
			break
		}
		a = w.get(control.Viewer, at+"&cursor="+next)
		require.Equal(t, 200, a.status, "%s", a.raw)
	}
	require.Len(t, ids, 6)
	require.Equal(t, fmt.Sprint(last), ids[0], "newest first")
	require.Len(t, w.get(control.Viewer, "/api/v1/backfills?state=PENDING").data(), 1)
	require.Len(t, w.get(control.Viewer, "/api/v1/backfills?state=&site=").data(), 6, "empty is not given")
	require.Empty(t, w.get(control.Viewer, "/api/v1/backfills?state=FAILED").data())
	require.Len(t, w.get(control.Viewer, `/api/v1/backfills?table="public"."orders"`).data(), 6)
}
