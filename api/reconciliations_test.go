package api

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
	"backfill/internal/proof"
)

// reconciled is a finished run of public.orders with a missing, a different and a
// surplus row.
func (w *world) reconciled() string {
	w.Helper()
	a := w.post(control.Requester, "/api/v1/sites/maple/reconciliations", ordersBackfill)
	require.Equal(w, 201, a.status, "%s", a.raw)
	id := a.json["id"].(json.Number).String()
	require.Equal(w, "/api/v1/reconciliations/"+id, a.header.Get("Location"))
	w.exec(`UPDATE backfill_control.reconciliation SET state = 'RUNNING', layout_id = l.id, receiver_layout = l.id, normaliser = 1, cut = true, leaves = 2, floor = '1:1:', started_at = now()
		FROM backfill_control.layout l WHERE reconciliation.id = $1::text::bigint`, id)
	w.exec(`INSERT INTO backfill_control.run_leaf (run_id, n, state, lower, upper, source_count, source_digest, receiver_count, receiver_digest)
		VALUES ($1::text::bigint, 1, 'equal', NULL, '{5}', 5, '12', 5, '12'), ($1::text::bigint, 2, 'different', '{5}', NULL, 5, '34', 4, '56')`, id)
	w.exec(`INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key, here, source, receiver, cause)
		VALUES ($1::text::bigint, 2, 'missing', true, '{6}', NULL, '{6,z,a}', NULL, ''), ($1::text::bigint, 2, 'different', true, '{7}', '{7}', '{7,z,a}', '{7,z,NULL}', ''), ($1::text::bigint, 2, 'surplus', true, '{8}', '{8}', NULL, '{8,z,a}', '')`, id)
	run, err := a.json["id"].(json.Number).Int64()
	require.NoError(w, err)
	_, err = w.store.Conclude(w.Context(), run)
	require.NoError(w, err)
	return id
}

func TestReconciliationOverTheAPI(t *testing.T) {
	w := newWorld(t)
	require.Equal(t, 403, w.post(control.Viewer, "/api/v1/sites/maple/reconciliations", ordersBackfill).status)
	require.Equal(t, 404, w.post(control.Requester, "/api/v1/sites/maple/reconciliations", `{"table":"public.none","from":"school"}`).status)
	require.Equal(t, 422, w.post(control.Requester, "/api/v1/sites/maple/reconciliations", `{"table":"public.orders","from":"central"}`).status)
	for _, bad := range []string{`"mode":"other"`, `"sample":0`, `"sample":5`, `"mode":"leaves"`, `"leaf":3`} {
		require.Contains(t, []int{404, 422}, w.post(control.Requester, "/api/v1/sites/maple/reconciliations", `{"table":"public.orders","from":"school",`+bad+`}`).status, bad)
	}
	id := w.reconciled()
	a := w.get(control.Viewer, "/api/v1/reconciliations/"+id)
	require.Equal(t, "DIFFERENT", a.json["verdict"])
	require.Equal(t, false, a.json["clean"])
	require.NotEmpty(t, a.json["root"])
	require.Len(t, w.get(control.Viewer, "/api/v1/reconciliations?site=maple&table=public.orders").data(), 1)
	leaves := w.get(control.Viewer, "/api/v1/reconciliations/"+id+"/leaves?state=different").data()
	require.Len(t, leaves, 1)
	require.Equal(t, "different", leaves[0]["state"])
	all := func() (out string) {
		for _, state := range []string{"equal", "different", "unknown", "counted", "repaired", "pending"} {
			for _, l := range w.get(control.Viewer, "/api/v1/reconciliations/"+id+"/leaves?state="+state).data() {
				require.Equal(t, state, l["state"])
				out += fmt.Sprint(l["n"], " ", state, "; ")
			}
		}
		return out
	}
	require.Equal(t, "1 equal; 2 different; ", all())
	w.exec(`UPDATE backfill_control.difference SET state = 'repaired'; UPDATE backfill_control.run_leaf SET state = 'suspect' WHERE n = 1`)
	require.Equal(t, "2 repaired; 1 pending; ", all())
	w.exec(`UPDATE backfill_control.difference SET state = 'open'; UPDATE backfill_control.run_leaf SET state = 'equal' WHERE n = 1`)
	keys := w.get(control.Viewer, "/api/v1/reconciliations/"+id+"/keys?kind=different").data()
	require.Len(t, keys, 1)
	require.Equal(t, []any{"alpha"}, keys[0]["columns"])
	require.Equal(t, "never captured: older than capture, or changed while it was interrupted", keys[0]["cause"])

	// The table may be backfilled now although the counts agree.
	w.exec(`UPDATE backfill_control.table_side SET row_count = 10`)
	panel := w.get(control.Viewer, "/api/v1/sites/maple/tables").data()[0]["backfill"].(map[string]any)
	require.Equal(t, true, panel["can_request"])

	require.Equal(t, 403, w.post(control.Requester, "/api/v1/reconciliations/"+id+"/repair", `{}`).status)
	require.Equal(t, 422, w.post(control.Reviewer, "/api/v1/reconciliations/"+id+"/waive", `{}`).status, "a reason is needed")
	child := w.post(control.Reviewer, "/api/v1/reconciliations/"+id+"/repair", `{"note":"read"}`)
	require.Equal(t, 201, child.status, "%s", child.raw)
	require.Equal(t, "repair", child.json["mode"])
	require.Equal(t, 409, w.post(control.Requester, "/api/v1/sites/maple/reconciliations", ordersBackfill).status, "one is open")
	require.Equal(t, 422, w.post(control.Reviewer, "/api/v1/reconciliations/"+child.json["id"].(json.Number).String()+"/repair", `{}`).status)
	end := w.post(control.Requester, "/api/v1/reconciliations/"+child.json["id"].(json.Number).String()+"/cancel", `{"note":"no"}`)
	require.Equal(t, "CANCELLED", end.json["state"])
	require.Equal(t, "UNKNOWN", end.json["verdict"])

	n := w.get(control.Viewer, "/api/v1/reconciliations/"+id+"/keys?kind=surplus").data()[0]["n"].(json.Number).String()
	a = w.post(control.Reviewer, "/api/v1/reconciliations/"+id+"/waive", `{"keys":[`+n+`],"note":"born there"}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, json.Number("2"), a.json["keys"].(map[string]any)["open"])
	require.Equal(t, 422, w.post(control.Reviewer, "/api/v1/reconciliations/"+id+"/waive", `{"keys":[`+n+`],"note":"again"}`).status)
}

func TestCertificates(t *testing.T) {
	w := newWorld(t)
	id := w.reconciled()
	a := w.get(control.Viewer, "/api/v1/reconciliations/"+id+"/certificate")
	require.Equal(t, 200, a.status, "%s", a.raw)
	key := w.get(control.Viewer, "/api/v1/certificate-key").json["key"].(string)
	signed, err := proof.Verify(a.raw, key)
	require.NoError(t, err)
	require.Contains(t, string(signed.Statement), `"verdict":"DIFFERENT"`)
	require.Contains(t, string(signed.Statement), `"columns":["id","zeta","alpha"]`)
	_, err = proof.Verify([]byte(strings.Replace(string(a.raw), "DIFFERENT", "EQUAL", 1)), key)
	require.Error(t, err)
	open := w.post(control.Requester, "/api/v1/sites/maple/reconciliations", ordersBackfill)
	require.Equal(t, 409, w.get(control.Viewer, "/api/v1/reconciliations/"+open.json["id"].(json.Number).String()+"/certificate").status)
}

func TestReconciliationByTheClock(t *testing.T) {
	w := newWorld(t)
	const path = "/api/v1/sites/maple/tables/public.orders/schedule"
	require.Nil(t, w.get(control.Viewer, path+"?from=school").json["every_seconds"])
	require.Equal(t, 403, w.call(control.Reviewer, "PUT", path, `{"from":"school","every_seconds":3600}`).status)
	require.Equal(t, 422, w.call(control.Admin, "PUT", path, `{"from":"school","every_seconds":5}`).status)
	a := w.call(control.Admin, "PUT", path, `{"from":"school","every_seconds":3600,"mode":"sampled"}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, json.Number("100"), w.get(control.Viewer, path+"?from=school").json["sample"])
	for range 2 {
		require.NoError(t, w.store.StartDue(t.Context()))
	}
	runs := w.get(control.Viewer, "/api/v1/reconciliations").data()
	require.Len(t, runs, 1, "due once")
	require.Equal(t, "sampled", runs[0]["mode"])
	w.exec(`UPDATE backfill_control.reconciliation SET state = 'FINISHED', verdict = 'EQUAL', closed_at = now()`)
	require.NoError(t, w.store.StartDue(t.Context()))
	require.Len(t, w.get(control.Viewer, "/api/v1/reconciliations").data(), 1, "not due yet")
	w.exec(`UPDATE backfill_control.reconciliation SET requested_at = now() - interval '2 h'`)
	require.NoError(t, w.store.StartDue(t.Context()))
	require.Len(t, w.get(control.Viewer, "/api/v1/reconciliations").data(), 2)
	require.Equal(t, 200, w.call(control.Admin, "PUT", path, `{"from":"school","every_seconds":null}`).status)
	require.Nil(t, w.get(control.Viewer, path+"?from=school").json["every_seconds"])
}
