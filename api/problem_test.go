package api

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

func TestProblems(t *testing.T) {
	w := newWorld(t, extra)
	id := w.staged(1)
	w.table("public.rooms", []string{"id"}, []string{"bigint"})
	tests := []struct {
		name         string
		role         control.Role
		method, path string
		body         string
		status       int
		kind         string
		fields       []string
	}{
		{"unknown address", control.Viewer, "GET", "/api/v1/nothing", "", 404, "not_found", nil},
		{"unknown method", control.Viewer, "DELETE", "/api/v1/sites", "", 405, "method_not_allowed", nil},
		{"no token", "", "GET", "/api/v1/sites", "", 401, "unauthorized", nil},
		{"role too small", control.Viewer, "POST", "/api/v1/sites/maple/backfills", ordersBackfill, 403, "forbidden", nil},
		{"unknown site", control.Viewer, "GET", "/api/v1/sites/oak", "", 404, "not_found", nil},
		{"unknown site's tables", control.Viewer, "GET", "/api/v1/sites/oak/tables", "", 404, "not_found", nil},
		{"unknown site's queue", control.Viewer, "GET", "/api/v1/sites/oak/queue", "", 404, "not_found", nil},
		{"unknown site's history", control.Viewer, "GET", "/api/v1/sites/oak/history", "", 404, "not_found", nil},
		{"unknown site's events", control.Viewer, "GET", "/api/v1/sites/oak/events", "", 404, "not_found", nil},
		{"unknown site in a filter", control.Viewer, "GET", "/api/v1/backfills?site=oak", "", 404, "not_found", nil},
		{"unknown table in a filter", control.Viewer, "GET", "/api/v1/backfills?site=maple&table=public.none", "", 404, "not_found", nil},
		{"unknown side in a filter", control.Viewer, "GET", "/api/v1/sites/maple/queue?from=moon", "", 404, "not_found", nil},
		{"unknown request", control.Viewer, "GET", "/api/v1/backfills/999999", "", 404, "not_found", nil},
		{"request that is no number", control.Viewer, "GET", "/api/v1/backfills/abc", "", 404, "not_found", nil},
		{"request beyond all numbers", control.Viewer, "GET", "/api/v1/backfills/99999999999999999999", "", 404, "not_found", nil},
		{"unknown request's rows", control.Viewer, "GET", "/api/v1/backfills/999999/rows", "", 404, "not_found", nil},
		{"unknown request's events", control.Viewer, "GET", "/api/v1/backfills/999999/events", "", 404, "not_found", nil},
		{"unknown change", control.Reviewer, "POST", "/api/v1/sites/maple/queue/1/retry", "", 404, "not_found", nil},
		{"request of an unknown site", control.Requester, "POST", "/api/v1/sites/oak/backfills", ordersBackfill, 404, "not_found", nil},
		{"request of an unknown table", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.none","from":"school"}`, 404, "not_found", nil},
		{"request from an unknown side", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"moon"}`, 404, "not_found", nil},
		{"no JSON", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":`, 400, "malformed", nil},
		{"more than JSON", control.Requester, "POST", "/api/v1/sites/maple/backfills", ordersBackfill + "}", 400, "malformed", nil},
		{"no body", control.Requester, "POST", "/api/v1/sites/maple/backfills", "", 400, "malformed", nil},
		{"broken escape", control.Viewer, "GET", "/api/v1/backfills?site=%zz", "", 400, "malformed", nil},
		{"missing field", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders"}`, 422, "invalid", []string{"from"}},
		{"unknown and missing fields", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"tabel":"x","from":"school"}`, 422, "invalid", []string{"tabel", "table"}},
		{"wrong case", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"Table":"public.orders","table":"public.orders","from":"school"}`, 422, "invalid", []string{"Table"}},
		{"wrong type", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":5,"from":"school"}`, 422, "invalid", []string{"table"}},
		{"key null", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","key":null}`, 422, "invalid", []string{"key"}},
		{"no table name", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"orders","from":"school"}`, 422, "invalid", nil},
		{"note with NUL", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","note":"\u0000"}`, 422, "invalid", []string{"note"}},
		{"long note", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","note":"` + strings.Repeat("x", 4001) + `"}`, 422, "invalid", []string{"note"}},
		{"mode differences with nothing known to differ", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.rooms","from":"school","mode":"differences"}`, 422, "refused", []string{"mode"}},
		{"mode differences while one is open", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","mode":"differences"}`, 409, "conflict", nil},
		{"mode unknown", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","mode":"half"}`, 422, "invalid", []string{"mode"}},
		{"mode row without key", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","mode":"row"}`, 422, "invalid", []string{"key"}},
		{"mode full with key", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","mode":"full","key":[1]}`, 422, "invalid", []string{"mode"}},
		{"key of the wrong arity", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","key":[1,2]}`, 422, "invalid", []string{"key"}},
		{"key of the wrong type", control.Requester, "POST", "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","key":["one"]}`, 422, "invalid", []string{"key.id"}},
		{"open already", control.Requester, "POST", "/api/v1/sites/maple/backfills", ordersBackfill, 409, "conflict", nil},
		{"rejection without a note", control.Reviewer, "POST", path("/backfills/%d/reject", id), `{"revision":7,"note":" "}`, 422, "invalid", []string{"note"}},
		{"decision without a revision", control.Reviewer, "POST", path("/backfills/%d/approve", id), `{}`, 422, "invalid", []string{"revision"}},
		{"decision for another revision", control.Reviewer, "POST", path("/backfills/%d/approve", id), `{"revision":6}`, 409, "conflict", nil},
		{"pause while it awaits review", control.Requester, "POST", path("/backfills/%d/pause", id), "", 409, "conflict", nil},
		{"resume of what runs", control.Requester, "POST", path("/backfills/%d/resume", id), `{}`, 409, "conflict", nil},
		{"limit too large", control.Viewer, "GET", "/api/v1/backfills?limit=1001", "", 422, "invalid", []string{"limit"}},
		{"limit too small", control.Viewer, "GET", "/api/v1/backfills?limit=0", "", 422, "invalid", []string{"limit"}},
		{"limit no number", control.Viewer, "GET", "/api/v1/backfills?limit=ten", "", 422, "invalid", []string{"limit"}},
		{"unknown parameter", control.Viewer, "GET", "/api/v1/backfills?stat=PENDING", "", 422, "invalid", []string{"stat"}},
		{"unknown state", control.Viewer, "GET", "/api/v1/backfills?state=OPEN", "", 422, "invalid", []string{"state.0"}},
		{"unknown effect", control.Viewer, "GET", path("/backfills/%d/rows?effect=none", id), "", 422, "invalid", []string{"effect"}},
		{"invalid text in a parameter", control.Viewer, "GET", "/api/v1/backfills?site=%ff", "", 422, "invalid", []string{"site"}},
		{"invalid text in the path", control.Viewer, "GET", "/api/v1/sites/%00", "", 404, "not_found", nil},
		{"bad site name", control.Admin, "POST", "/api/v1/sites", `{"name":"Ma ple","sides":["a","b"]}`, 422, "invalid", nil},
		{"equal sides", control.Admin, "POST", "/api/v1/sites", `{"name":"oak","sides":["a","a"]}`, 422, "invalid", nil},
		{"one side", control.Admin, "POST", "/api/v1/sites", `{"name":"oak","sides":["a"]}`, 422, "invalid", []string{"sides"}},
		{"site exists", control.Admin, "POST", "/api/v1/sites", `{"name":"maple","sides":["a","b"]}`, 409, "conflict", nil},
		{"table from both sides", control.Admin, "PUT", "/api/v1/sites/maple/tables/public.orders", `{"captured_from":["school","central"]}`, 422, "invalid", []string{"conflict"}},
		{"table from both sides, the wrong winner", control.Admin, "PUT", "/api/v1/sites/maple/tables/public.orders", `{"captured_from":["school","central"],"conflict":"moon"}`, 422, "invalid", []string{"conflict"}},
		{"conflicts of a table from one side", control.Admin, "PUT", "/api/v1/sites/maple/tables/public.orders", `{"conflict":"school"}`, 422, "invalid", []string{"conflict"}},
		{"table from nowhere", control.Admin, "PUT", "/api/v1/sites/maple/tables/public.orders", `{"captured_from":[]}`, 422, "invalid", []string{"captured_from"}},
		{"table's unknown side", control.Admin, "PUT", "/api/v1/sites/maple/tables/public.orders", `{"captured_from":["moon"]}`, 404, "not_found", nil},
		{"failure", "", "GET", "/fail", "", 500, "internal", nil},
		{"panic", "", "GET", "/panic", "", 500, "internal", nil},
	}
	for _, x := range tests {
		t.Run(x.name, func(t *testing.T) {
			a := (&world{T: t, url: w.url, server: w.server}).call(x.role, x.method, x.path, x.body)
			require.Equal(t, x.status, a.status, "%s", a.raw)
			require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
			require.Equal(t, x.kind, a.kind(), "%s", a.raw)
			require.Equal(t, kinds[x.kind].title, a.json["title"])
			require.Equal(t, fmt.Sprint(x.status), fmt.Sprint(a.json["status"]))
			require.NotEmpty(t, a.json["detail"])
			require.Equal(t, "urn:backfill:occurrence:"+a.header.Get("X-Request-Id"), a.json["instance"])
			if x.fields != nil {
				require.Equal(t, x.fields, a.fields(), "%s", a.raw)
			}
			require.NotContains(t, string(a.raw), "secret cause")
		})
	}
	require.Equal(t, backfill.AwaitingReview, w.state(id), "nothing of this changes anything")
}

func (w *world) state(id int64) backfill.State {
	w.Helper()
	r, err := w.store.Request(w.Context(), id)
	require.NoError(w, err)
	return r.State
}

func TestTooLarge(t *testing.T) {
	w := newWorld(t)
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"note":"`+strings.Repeat("x", maxBody)+`"}`)
	require.Equal(t, 413, a.status)
	require.Equal(t, "too_large", a.kind())
}

func TestOnlyJSON(t *testing.T) {
	w := newWorld(t)
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill, header{"Content-Type", "application/x-www-form-urlencoded"})
	require.Equal(t, 415, a.status)
	require.Equal(t, "unsupported_media_type", a.kind())
	a = w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill, header{"Content-Type", "application/json; charset=utf-8"})
	require.Equal(t, 201, a.status)
}

func TestTemporalAway(t *testing.T) {
	w := newWorld(t)
	w.runs.fail(&backfill.Error{Code: backfill.Unavailable, Message: "Temporal is away", Cause: fmt.Errorf("secret cause")})
	require.Contains(t, string(w.get(control.Viewer, "/api/v1/sites/maple").raw), "Temporal is away", "the first who looks is told")

	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill)
	require.Equal(t, 201, a.status, "a request is recorded all the same")
	require.Equal(t, "PENDING", a.json["state"])

	a = w.post(control.Requester, a.header.Get("Location")+"/cancel", "")
	require.Equal(t, 503, a.status)
	require.Equal(t, "unavailable", a.kind())
	require.NotEmpty(t, a.header.Get("Retry-After"))
	require.NotContains(t, string(a.raw), "secret cause")

	require.Equal(t, 200, w.get(control.Viewer, "/api/v1/backfills").status)
	a = w.get("", "/readyz")
	require.Equal(t, 200, a.status)
	require.Equal(t, "away", a.json["temporal"])
}

func TestDatabaseAway(t *testing.T) {
	w := newWorld(t)
	require.Equal(t, 200, w.get("", "/readyz").status)
	require.Equal(t, 200, w.get(control.Viewer, "/api/v1/sites").status) // the token is known for a moment
	require.NoError(t, execute(t.Context(), dsnOf("postgres"), `DROP DATABASE `+w.database+` WITH (FORCE)`))

	for range 2 { // on a connection that broke, and on none
		a := w.get(control.Viewer, "/api/v1/sites")
		require.Equal(t, 503, a.status, "%s", a.raw)
		require.NotContains(t, string(a.raw), w.database)
	}
	a := w.get("", "/readyz")
	require.Equal(t, 503, a.status)
	require.Equal(t, "away", a.json["database"])
	require.Equal(t, 200, w.get("", "/healthz").status)
}

func TestStrangeNames(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{
		`public."Robert'); DROP TABLE backfill_control.request;--"`, `"a.b"."c/d"`, `"a""b"."%2F"`, `public."ümläut 表 🙂"`,
		`public."${x} {{y}} $1 \"`, `public."?a=b&c=d#e"`, `public.".."`, `public."a	b"`,
	} {
		a := w.call(control.Admin, "PUT", path("/sites/maple/tables/%s", name), `{"captured_from":["school"],"delete":false}`)
		require.Equal(t, 200, a.status, "%s: %s", name, a.raw)
		require.Equal(t, name, a.json["table"])
		require.Equal(t, false, a.json["delete"])

		w.table(name, []string{`k"; --`}, []string{"text"})
		body := fmt.Appendf(nil, `{"table":%q,"from":"school"}`, name)
		a = w.post(control.Requester, "/api/v1/sites/maple/backfills", string(bytes.ReplaceAll(body, []byte(`\x`), []byte(`\u00`))))
		require.Equal(t, 201, a.status, "%s: %s", name, a.raw)
		require.Equal(t, name, a.json["table"])

		a = w.get(control.Viewer, path("/backfills")+"?site=maple&table="+queryEscape(name))
		require.Len(t, a.data(), 1, "%s", a.raw)
		require.Equal(t, http.StatusOK, w.get(control.Viewer, path("/sites/maple/history")+"?table="+queryEscape(name)).status)
	}
	for _, name := range []string{`' OR 1=1 --`, `maple' --`, `maple%`, `MAPLE`, "maple\n", strings.Repeat("m", 5000)} {
		a := w.get(control.Viewer, path("/sites/%s", name))
		require.Equal(t, 404, a.status, "%q: %s", name, a.raw)
	}
	require.Equal(t, 200, w.get(control.Viewer, "/api/v1/sites/maple").status)
}
