package api

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
)

func TestGatesAreSetListedReplacedAndRemoved(t *testing.T) {
	w := newWorld(t)
	put := func(name, body string) answer {
		return w.call(control.Admin, "PUT", "/api/v1/sites/maple/gates/"+name, body)
	}
	a := put("lag", `{"side":"central","kind":"replica_lag","limit":5}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, false, a.json["open"], "nobody has measured it yet")
	require.Contains(t, a.json["why"], "the agent of central does within seconds, when it runs")
	require.NoError(t, w.store.Measured(t.Context(), "maple", []control.Measurement{{Gate: pace.Gate{Name: "lag", Side: "central", Kind: pace.ReplicaLag}, Value: 2}}))
	list := w.get(control.Viewer, "/api/v1/sites/maple/gates").data()
	require.Len(t, list, 1)
	require.Equal(t, true, list[0]["open"])
	require.Equal(t, "open", list[0]["state"])
	w.exec(`UPDATE backfill_control.gate SET measured_at = now() - interval '20 s'`)
	require.Equal(t, "idle", w.get(control.Viewer, "/api/v1/sites/maple/gates").data()[0]["state"], "nothing asks it")
	w.exec(`INSERT INTO backfill_control.reconciliation (direction, table_id, mode, requested_by) SELECT d.id, t.id, 'full', 'x' FROM backfill_control.table_config t JOIN backfill_control.direction d ON d.site = t.site AND d.from_side = 'school' WHERE t.name = 'public.orders'`)
	require.Equal(t, "closed", w.get(control.Viewer, "/api/v1/sites/maple/gates").data()[0]["state"], "a reconciliation asks it")

	for body, status := range map[string]int{
		`{"side":"moon","kind":"sessions","limit":1}`:                          404,
		`{"side":"central","kind":"sessions","limit":1,"table":"public.nope"}`: 404,
		`{"side":"central","kind":"sql","limit":1}`:                            422,
		`{"side":"central","kind":"http","url":"ftp://x"}`:                     422,
		`{"side":"central","kind":"moon","limit":1}`:                           422,
		`{"side":"central","kind":"sessions","limit":1,"colour":"red"}`:        422,
		`{"name":"other","side":"central","kind":"sessions","limit":1}`:        422,
	} {
		require.Equal(t, status, put("bad", body).status, body)
	}
	require.Equal(t, 403, w.call(control.Reviewer, "PUT", "/api/v1/sites/maple/gates/lag", `{"side":"central","kind":"sessions","limit":1}`).status)

	a = w.call(control.Admin, "PUT", "/api/v1/sites/maple/gates", `{"gates":[{"name":"load","side":"school","kind":"sessions","limit":20,"table":"public.orders"},{"name":"slow","side":"school","kind":"rows_per_second","limit":100}]}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Len(t, a.data(), 2)
	a = w.call(control.Admin, "PUT", "/api/v1/sites/maple/gates", `{"gates":[{"name":"x","side":"school","kind":"sessions","limit":20},{"name":"x","side":"school","kind":"sessions","limit":2}]}`)
	require.Equal(t, 422, a.status)
	require.Len(t, w.get(control.Viewer, "/api/v1/sites/maple/gates").data(), 2, "all or nothing")

	require.Equal(t, 204, w.call(control.Admin, "DELETE", "/api/v1/sites/maple/gates/slow", "").status)
	require.Equal(t, 404, w.call(control.Admin, "DELETE", "/api/v1/sites/maple/gates/slow", "").status)
	require.Equal(t, 403, w.call(control.Requester, "DELETE", "/api/v1/sites/maple/gates/load", "").status)
	require.Equal(t, 404, w.get(control.Viewer, "/api/v1/sites/nope/gates").status)
	audit := w.get(control.Viewer, "/api/v1/audit").data()
	require.Equal(t, "gate.remove", audit[0]["action"])
}

func TestProgressTakesPhasesAndThrottledTimeApart(t *testing.T) {
	w := newWorld(t)
	id := w.backfill()
	w.exec(`UPDATE backfill_control.request SET state = 'IN_PROGRESS', started_at = clock_timestamp() - interval '100 s', staged = 500, expected = 1 WHERE id = $1`, id)
	gate := pace.Gate{Name: "lag", Side: "school", Kind: pace.ReplicaLag}
	require.NoError(t, w.store.Throttled(t.Context(), id, gate, "it is late", 30*time.Second))
	half := 0.5
	require.NoError(t, w.store.Sample(t.Context(), id, control.Point{Sample: pace.Sample{Rows: 500, Throttled: 30 * time.Second}, Position: &half},
		pace.Forecast{Rate: 10, Duty: 0.7, P50: time.Minute, P90: 2 * time.Minute}))
	a := w.get(control.Viewer, path("/backfills/%d/progress", id))
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, "50", a.json["percent"].(interface{ String() string }).String(), "by the key's position, not by counts")
	require.Equal(t, "gate lag: it is late", a.json["waiting"])
	number := func(name string) float64 {
		v, err := a.json[name].(interface{ Float64() (float64, error) }).Float64()
		require.NoError(t, err)
		return v
	}
	require.InDelta(t, 7, number("rate"), 0.01)
	require.InDelta(t, 30, number("throttled_seconds"), 0.01)
	require.InDelta(t, 100, number("walk_seconds"), 20)
	require.Zero(t, number("review_seconds"))
	require.Len(t, a.json["points"], 1)
	require.Less(t, a.json["eta"], a.json["eta_p90"])

	_, err := w.store.Pause(t.Context(), id, "ann", "", true)
	require.NoError(t, err)
	a = w.get(control.Viewer, path("/backfills/%d/progress", id))
	require.Zero(t, number("rate"), "while paused nothing is forecast")
	require.Nil(t, a.json["eta"])
	require.Nil(t, a.json["eta_p90"])
	require.Equal(t, 404, w.get(control.Viewer, path("/backfills/%d/progress", 999)).status)
}

func TestWhatStandsStillIsNamed(t *testing.T) {
	w := newWorld(t)
	standing := func() (what []string) {
		for _, x := range w.get(control.Viewer, "/api/v1/sites/maple").json["standstill"].([]any) {
			what = append(what, x.(map[string]any)["what"].(string)+x.(map[string]any)["side"].(string))
		}
		return what
	}
	waiting := func(id int64) string {
		return w.get(control.Viewer, path("/backfills/%d", id)).json["waiting"].(string)
	}
	require.Equal(t, []string{"control worker", "agentcentral", "agentschool"}, standing())
	id := w.backfill()
	require.Contains(t, waiting(id), "no control worker")
	require.NoError(t, w.store.Attend(t.Context(), "w"))
	require.Contains(t, waiting(id), "no agent of school")
	for _, side := range []string{"school", "central"} {
		require.NoError(t, w.store.AgentSeen(t.Context(), "maple", side, "a", "db", ""))
	}
	require.Empty(t, standing())
	require.Empty(t, waiting(id))
	w.runs.fail(&backfill.Error{Code: backfill.Unavailable, Message: "away"})
	require.Eventually(t, func() bool { return len(standing()) == 1 }, 20*time.Second, 100*time.Millisecond)
	require.Equal(t, []string{"temporal"}, standing())
	require.Contains(t, waiting(id), "Temporal is away")
}

func TestLagCountsTheOutboxToo(t *testing.T) {
	w := newWorld(t)
	lag := func() map[string]any {
		for _, l := range w.get(control.Viewer, "/api/v1/sites/maple").json["lag"].([]any) {
			if l := l.(map[string]any); l["from"] == "school" {
				return l
			}
		}
		return nil
	}
	text := func(v any) string { return v.(interface{ String() string }).String() }
	report := func(waited time.Duration, all ...control.Backlog) {
		for i := range all {
			all[i].Waited = waited
		}
		require.NoError(t, w.store.ReportOutbox(t.Context(), "maple", "school", all))
	}
	require.Nil(t, lag()["outbox_at"])
	report(time.Minute, control.Backlog{Table: "public.orders", Rows: 7, First: 3})
	require.Equal(t, "7", text(lag()["waiting"]))
	require.Equal(t, "7", text(lag()["outbox"]))
	oldest := lag()["oldest"]
	require.NotNil(t, oldest)
	report(0, control.Backlog{Table: "public.orders", Rows: 9, First: 3}) // by an agent that was started anew
	require.Equal(t, oldest, lag()["oldest"])
	panel := w.get(control.Viewer, "/api/v1/sites/maple/tables").data()[0]["lag"].(map[string]any)
	require.Equal(t, "9", text(panel["waiting"]))
	report(0)
	require.Equal(t, "0", text(lag()["waiting"]))
	require.Nil(t, lag()["oldest"])
}
