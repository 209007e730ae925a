package api

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

func clausesOf(a answer) (out []string) {
	for _, b := range a.json["because"].([]any) {
		out = append(out, b.(map[string]any)["clause"].(string))
	}
	return out
}

func TestCutoverOverTheAPI(t *testing.T) {
	w := newWorld(t)
	const path = "/api/v1/sites/maple/tables/public.orders/cutover"
	require.Equal(t, 404, w.get(control.Viewer, "/api/v1/sites/maple/tables/public.none/cutover?from=school").status)
	require.Equal(t, 422, w.get(control.Viewer, path).status)
	a := w.get(control.Viewer, path+"?from=school")
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Equal(t, false, a.json["read_new"])
	require.Equal(t, []string{"capture", "proof", "shadow", "lag", "sequences"}, clausesOf(a), "nothing is known")
	require.Contains(t, clausesOf(w.get(control.Viewer, path+"?from=central")), "capture")

	// The answer is on record once for each who asks, until it is another.
	answers := func() int { return len(w.get(control.Viewer, "/api/v1/audit?action=cutover.answer").data()) }
	require.Equal(t, 2, answers())
	w.get(control.Viewer, path+"?from=school")
	require.Equal(t, 2, answers())
	w.get(control.Admin, path+"?from=school")
	require.Equal(t, 3, answers())
	w.exec(`UPDATE backfill_control.side SET agent_seen_at = now(), outbox_at = now()`)
	require.NotContains(t, clausesOf(w.get(control.Admin, path+"?from=school")), "lag")
	last := w.get(control.Viewer, "/api/v1/audit?action=cutover.answer").data()
	require.Len(t, last, 4)
	require.Equal(t, "admin", last[0]["account"])
	require.Contains(t, last[0]["detail"], "proof")

	require.Equal(t, 403, w.call(control.Reviewer, "PUT", path, `{"from":"school"}`).status)
	for _, bad := range []string{`"objective":0`, `"objective":1`, `"soak_seconds":5`, `"max_lag_seconds":0`, `"other":1`} {
		require.Equal(t, 422, w.call(control.Admin, "PUT", path, `{"from":"school",`+bad+`}`).status, bad)
	}
	require.Equal(t, 422, w.call(control.Admin, "PUT", path, `{"from":"central"}`).status)
	a = w.call(control.Admin, "PUT", path, `{"from":"school","objective":0.01,"soak_seconds":3600,"sample_per_minute":60}`)
	require.Equal(t, 200, a.status, "%s", a.raw)
	a = w.call(control.Admin, "PUT", path, `{"from":"school","max_lag_seconds":5}`)
	require.Equal(t, map[string]any{"objective": json.Number("0.01"), "soak_seconds": json.Number("3600"), "proof_age_seconds": json.Number("86400"),
		"max_lag_seconds": json.Number("5"), "sample_per_minute": json.Number("60"), "set_by": "admin"}, a.json["policy"])
}

func TestShadowReadsOverTheAPI(t *testing.T) {
	w := newWorld(t)
	report := func(role control.Role, read string) answer {
		return w.post(role, "/api/v1/shadow-reads", `{"site":"maple","from":"school","reads":[`+read+`]}`)
	}
	const good = `{"table":"public.orders","key":[7],"row":{"zeta":"z","alpha":null},"age_ms":5}`
	require.Equal(t, 403, report(control.Viewer, good).status)
	for _, bad := range []string{
		`{"table":"public.orders","key":[7,8],"row":null}`, `{"table":"public.orders","key":["x"],"row":null}`, `{"table":"public.orders","key":[7],"row":{"beta":1}}`,
		`{"table":"public.orders","key":[7]}`, `{"table":"public.orders","key":[7],"row":{"zeta":"\u0000"}}`,
	} {
		require.Equal(t, 422, report(control.Requester, bad).status, bad)
	}
	require.Equal(t, 404, report(control.Requester, `{"table":"public.none","key":[7],"row":null}`).status)
	a := report(control.Requester, good+`,{"table":"public.orders","key":{"id":8},"row":null},{"table":"public.orders","key":["9"],"row":{"id":9,"zeta":{"a": 1}, "alpha": 1.50}}`)
	require.Equal(t, 202, a.status, "%s", a.raw)
	require.Equal(t, json.Number("3"), a.json["accepted"])
	w.exec(`UPDATE backfill_control.shadow_read SET verdict = CASE key[1] WHEN '8' THEN 'unknown' ELSE 'mismatch' END WHERE "values" = CASE key[1] WHEN '7' THEN '{z,NULL}' WHEN '8' THEN '{}' ELSE ARRAY['9','{"a": 1}','1.50'] END
		AND columns = CASE key[1] WHEN '7' THEN '{zeta,alpha}' WHEN '8' THEN '{}' ELSE '{id,zeta,alpha}'::text[] END AND found = (key <> '{8}')`)
	w.exec(`INSERT INTO backfill_control.shadow_count SELECT direction, table_id, soak_since, 997, 50, 2, 1 FROM backfill_control.cutover`)
	a = w.get(control.Viewer, "/api/v1/sites/maple/tables/public.orders/shadow?from=school")
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Len(t, a.json["odd"], 3)
	require.Len(t, a.json["points"], 1)
	rate, _ := a.json["rate"].(json.Number).Float64()
	require.InDelta(t, 2.0/999, rate, 1e-9)
	bound, _ := a.json["bound"].(json.Number).Float64()
	require.InDelta(t, 0.00774, bound, 0.0001, "three of a thousand, at 95 %")
	require.Equal(t, 422, w.get(control.Viewer, "/api/v1/sites/maple/tables/public.orders/shadow").status)
}
