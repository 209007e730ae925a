package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

// token makes a token with roles on some sites and returns what a call as it sends.
func (w *world) token(name string, sites map[string]control.Role) header {
	w.Helper()
	secret := "secret-of-the-token-" + name
	require.NoError(w, w.store.CreateToken(w.Context(), "test", control.Token{Name: name, Rights: control.Rights{Sites: sites}}, secret))
	return header{"Authorization", "Bearer " + secret}
}

// contents stands for everything in the control database but what any request leaves
// behind, refused or not.
func (w *world) contents() string {
	w.Helper()
	conn, err := pgx.Connect(w.Context(), dsnOf(w.database))
	require.NoError(w, err)
	defer conn.Close(context.Background())
	rows, err := conn.Query(w.Context(), `SELECT tablename FROM pg_tables WHERE schemaname = 'backfill_control' AND tablename NOT IN ('token', 'session') ORDER BY 1`)
	require.NoError(w, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(w, err)
	var b strings.Builder
	for _, t := range tables {
		var sum string
		require.NoError(w, conn.QueryRow(w.Context(), `SELECT coalesce(md5(string_agg(t::text, '|' ORDER BY t::text)), '') FROM backfill_control.`+t+` t`).Scan(&sum))
		fmt.Fprintln(&b, t, sum)
	}
	return b.String()
}

// Guarantee 12: a token of one site sees and changes nothing of another, at any
// address that the document has.
func TestGuarantee12_ATokenOfOneSiteAtEveryAddressOfAnother(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.store.CreateSite(t.Context(), "test", "oak", [2]string{"school", "central"}))
	oak := w.token("oak", map[string]control.Role{"oak": control.Admin})
	request := w.staged(2)
	run := w.reconciled()
	require.Equal(t, 200, w.call(control.Admin, "PUT", "/api/v1/sites/maple/gates/lag", `{"side":"central","kind":"sessions","limit":5}`).status)
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, layout_id, snap, op, key, row)
		SELECT d.id, t.id, l.id, '1:1:', 'u', ARRAY['1'], ARRAY['1', 'z', NULL]
		  FROM backfill_control.direction d, backfill_control.table_config t, backfill_control.layout l WHERE d.site = 'maple' AND d.from_side = 'school'`)
	w.exec(`UPDATE backfill_control.direction SET applied_seq = 1 WHERE site = 'maple'`)
	w.exec(`INSERT INTO backfill_control.quarantine (direction, seq, table_id, key, state, reason, since)
		SELECT d.id, 1, t.id, ARRAY['1'], 'quarantined', 'violates a constraint', now()
		  FROM backfill_control.direction d, backfill_control.table_config t WHERE d.site = 'maple' AND d.from_side = 'school'`)
	fill := func(path string) string {
		id := run
		if strings.HasPrefix(path, "/backfills") {
			id = fmt.Sprint(request)
		}
		return prefix + strings.NewReplacer("{site}", "maple", "{table}", "public.orders", "{gate}", "lag", "{seq}", "1", "{id}", id, "{name}", "ruth").Replace(path)
	}

	// What a call needs beside its path, so that it is not refused for another reason.
	needs := map[string]struct{ query, body string }{
		"POST /sites/{site}/epoch":                      {body: `{"note":"restored"}`},
		"PATCH /sites/{site}":                           {body: `{"second_person":true}`},
		"PUT /sites/{site}/gates":                       {body: `{"gates":[]}`},
		"PUT /sites/{site}/gates/{gate}":                {body: `{"side":"central","kind":"sessions","limit":1}`},
		"PUT /sites/{site}/tables/{table}":              {body: `{"active":true}`},
		"POST /sites/{site}/backfills":                  {body: `{"table":"public.orders","from":"school","key":["5"]}`},
		"POST /backfills/{id}/approve":                  {body: `{"revision":7}`},
		"POST /backfills/{id}/reject":                   {body: `{"revision":7,"note":"no"}`},
		"POST /sites/{site}/tables/{table}/mapping/try": {body: `{"from":"school","mapping":{"target":"public.other"}}`},
		"GET /sites/{site}/tables/{table}/life":         {query: "?key=1"},
		"GET /sites/{site}/tables/{table}/schedule":     {query: "?from=school"},
		"PUT /sites/{site}/tables/{table}/schedule":     {body: `{"from":"school","every_seconds":3600}`},
		"GET /sites/{site}/tables/{table}/shadow":       {query: "?from=school"},
		"GET /sites/{site}/tables/{table}/cutover":      {query: "?from=school"},
		"PUT /sites/{site}/tables/{table}/cutover":      {body: `{"from":"school","objective":0.01}`},
		"POST /sites/{site}/reconciliations":            {body: ordersBackfill},
		"POST /reconciliations/{id}/repair":             {body: `{}`},
		"POST /reconciliations/{id}/waive":              {body: `{"note":"let be"}`},
		"POST /shadow-reads":                            {body: `{"site":"maple","from":"school","reads":[{"table":"public.orders","key":[7],"row":{"zeta":"z","alpha":null}}]}`},
		"POST /users":                                   {body: `{"name":"eve","password":"a long enough one","role":"admin"}`},
		"PATCH /users/{name}":                           {body: `{"role":"admin"}`},
		"GET /backfills":                                {query: "?site=maple"},
		"GET /reconciliations":                          {query: "?site=maple"},
		"GET /audit":                                    {query: "?site=maple"},
		"GET /events":                                   {query: "?site=maple"},
	}
	// Addresses of no one site: what they answer.
	special := map[string]int{"GET /sites": 200, "POST /sites": 403, "GET /certificate-key": 200,
		"GET /users": 403, "POST /users": 403, "PATCH /users/{name}": 403, "DELETE /users/{name}": 403}

	documented := 0
	for path, item := range w.server.document.Paths.Map() {
		if strings.HasPrefix(path, prefix) {
			documented += len(item.Operations())
		}
	}
	routes := w.server.routes()
	require.Len(t, routes, documented, "every operation of the document is tried")
	_, err := w.store.PutTable(t.Context(), "test", "oak", "public.trees", control.TableChange{CapturedFrom: []string{"school"}})
	require.NoError(t, err)
	require.Equal(t, 200, w.get(control.Viewer, "/api/v1/certificate-key").status) // which makes the key
	before := w.contents()
	for _, r := range routes {
		name := r.method + " " + r.path
		n := needs[name]
		if name == "POST /sites" {
			n.body = `{"name":"elm","sides":["a","b"]}`
		}
		want, ok := special[name]
		if !ok {
			want = 404
		}
		a := w.call("", r.method, fill(r.path)+n.query, n.body, oak)
		require.Equal(t, want, a.status, "%s: %s", name, a.raw)
		require.NotContains(t, string(a.raw), "orders", name)
		if want == 404 {
			require.NotContains(t, string(a.raw), "oak", "%s: as if it were not there", name)
		} else {
			require.NotContains(t, string(a.raw), "maple", name)
		}
	}
	for _, path := range []string{"/backfills", "/reconciliations", "/audit", "/sites", "/audit?action=backfill", fmt.Sprintf("/audit?request=%d", request)} {
		a := w.call("", "GET", prefix+path, "", oak)
		require.Equal(t, 200, a.status, "%s: %s", path, a.raw)
		require.NotContains(t, string(a.raw), "maple", path)
	}
	a := w.call("", "GET", prefix+fmt.Sprintf("/events?request=%d", request), "", oak)
	require.Equal(t, 404, a.status)
	for _, of := range []string{run, "999"} { // a run to go on from tells nothing either
		a = w.call("", "POST", prefix+"/sites/oak/reconciliations", `{"table":"public.trees","from":"school","mode":"leaves","of":`+of+`,"leaf":1}`, oak)
		require.Equal(t, 404, a.status, "%s", a.raw)
	}
	require.Equal(t, before, w.contents(), "nothing has changed")

	// The same calls are good for somebody of the site: so it was for the site that they were refused.
	slices.SortStableFunc(routes, func(a, b route) int { // what ends others comes last
		last := func(r route) int { return strings.Count(r.method+r.path, "DELETE") + strings.Count(r.path, "/epoch") }
		return last(a) - last(b)
	})
	maple := w.token("maple", map[string]control.Role{"maple": control.Admin, "oak": control.Viewer})
	for _, r := range routes {
		name := r.method + " " + r.path
		if special[name] == 403 || strings.HasSuffix(r.path, "/mapping/try") { // the latter waits for agents
			continue
		}
		if strings.HasSuffix(r.path, "/events") {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			q, err := http.NewRequestWithContext(ctx, r.method, w.url+fill(r.path)+needs[name].query, nil)
			require.NoError(t, err)
			q.Header.Set(maple[0], maple[1])
			resp, err := http.DefaultClient.Do(q)
			require.NoError(t, err)
			resp.Body.Close()
			cancel()
			require.Equal(t, 200, resp.StatusCode, name)
			continue
		}
		a := w.call("", r.method, fill(r.path)+needs[name].query, needs[name].body, maple)
		require.Contains(t, []int{200, 201, 202, 204, 409, 422}, a.status, "%s: %s", name, a.raw)
		if r.method == "GET" {
			require.Equal(t, 200, a.status, "%s: %s", name, a.raw)
		}
		if a.status == 422 {
			require.Equal(t, "refused", a.kind(), "%s: %s", name, a.raw)
		}
	}
	require.Equal(t, 403, w.call("", "PATCH", "/api/v1/sites/oak", `{"second_person":true}`, maple).status, "a viewer there")
	a = w.call("", "POST", "/api/v1/sites", `{"name":"elm","sides":["a","b"]}`, maple)
	require.Equal(t, 403, a.status)
	require.Contains(t, a.json["detail"], "needs role admin on every site, maple has admin on maple, viewer on oak")
}

func TestUsersOverTheAPI(t *testing.T) {
	w := newWorld(t)
	const ruth = `{"name":"Ruth","password":"correct horse battery","sites":{"maple":"reviewer"}}`
	require.Equal(t, 403, w.post(control.Reviewer, "/api/v1/users", ruth).status)
	a := w.post(control.Admin, "/api/v1/users", ruth)
	require.Equal(t, 201, a.status, "%s", a.raw)
	require.NotContains(t, string(a.raw), "password")
	require.Equal(t, "/api/v1/users/Ruth", a.header.Get("Location"))
	require.Equal(t, 409, w.post(control.Admin, "/api/v1/users", ruth).status)
	for _, bad := range []string{`{"name":"x","password":"short","role":"admin"}`, `{"name":"x","password":"correct horse battery"}`, `{"name":"x","password":"correct horse battery","role":"king"}`,
		`{"name":"x","password":"correct horse battery","role":"admin","sites":{"maple":"admin"}}`, `{"name":" x","password":"correct horse battery","role":"admin"}`} {
		require.Equal(t, 422, w.post(control.Admin, "/api/v1/users", bad).status, bad)
	}
	require.Equal(t, 404, w.post(control.Admin, "/api/v1/users", `{"name":"x","password":"correct horse battery","sites":{"moon":"admin"}}`).status)
	a = w.call(control.Admin, "PATCH", "/api/v1/users/Ruth", `{"role":"viewer"}`)
	require.Equal(t, "viewer", a.json["role"], "%s", a.raw)
	require.Equal(t, 404, w.call(control.Admin, "PATCH", "/api/v1/users/nobody-else", `{"role":"viewer"}`).status)
	require.Len(t, w.get(control.Admin, "/api/v1/users").data(), 1)
	require.Equal(t, 204, w.call(control.Admin, "DELETE", "/api/v1/users/Ruth", "").status)
	require.Empty(t, w.get(control.Admin, "/api/v1/users").data())
	var said []string
	for _, e := range w.get(control.Viewer, "/api/v1/audit?action=user").data() {
		require.Equal(t, "admin", e["account"])
		require.NotContains(t, fmt.Sprint(e), "horse")
		said = append(said, fmt.Sprint(e["action"], e["detail"].(map[string]any)["before"], e["detail"].(map[string]any)["after"]))
	}
	require.Equal(t, []string{"user.removemap[role:viewer] <nil>", "user.setmap[sites:map[maple:reviewer]] map[role:viewer]", "user.create<nil> map[sites:map[maple:reviewer]]"}, said)
}

func TestTokensExpireAndTellWhenTheyWereUsed(t *testing.T) {
	w := newWorld(t)
	soon := time.Now().Add(time.Hour)
	require.NoError(t, w.store.CreateToken(t.Context(), "test", control.Token{Name: "short", Rights: control.Rights{Role: control.Viewer}, ExpiresAt: &soon}, "secret-that-will-expire"))
	as := header{"Authorization", "Bearer secret-that-will-expire"}
	require.Equal(t, 200, w.call("", "GET", "/api/v1/sites", "", as).status)
	w.exec(`UPDATE backfill_control.token SET expires_at = now() WHERE name = 'short'`)
	require.Equal(t, 401, w.call("", "GET", "/api/v1/sites", "", as).status)
	all, err := w.store.Tokens(t.Context())
	require.NoError(t, err)
	for _, x := range all {
		require.Equal(t, x.Name == "short", x.UsedAt != nil, x.Name)
	}
	for name, rights := range map[string]control.Rights{
		"no role": {}, "a role there is not": {Role: "king"}, "no site": {Sites: map[string]control.Role{}}, "both": {Role: control.Admin, Sites: map[string]control.Role{"maple": control.Admin}},
		"a site there is not": {Sites: map[string]control.Role{"moon": control.Admin}}, "no role on a site": {Sites: map[string]control.Role{"maple": ""}},
	} {
		require.Error(t, w.store.CreateToken(t.Context(), "test", control.Token{Name: "x", Rights: rights}, control.NewSecret()), name)
	}
}

// A role on every site, and a higher one on some: each holds where it is the higher.
func TestAHigherRoleOnASiteIsOneThereOnly(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.store.CreateSite(t.Context(), "test", "oak", [2]string{"school", "central"}))
	as := func(name string, rights control.Rights) []header {
		id, err := w.store.SignInAs(t.Context(), control.Person{Issuer: "https://id.example", Subject: name, Name: name}, rights, "127.0.0.1", time.Hour)
		require.NoError(t, err)
		return []header{{"Cookie", SessionCookie + "=" + id}, {"Sec-Fetch-Site", "same-origin"}}
	}
	ann := as("ann", control.Rights{Role: control.Viewer, Sites: map[string]control.Role{"maple": control.Admin}})
	bob := as("bob", control.Rights{Role: control.Admin, Sites: map[string]control.Role{"maple": control.Viewer}})
	const gate = `{"side":"central","kind":"sessions","limit":5}`
	for _, c := range []struct {
		who    []header
		method string
		path   string
		body   string
		status int
	}{
		{ann, "PUT", "/sites/maple/gates/lag", gate, 200},
		{ann, "PUT", "/sites/oak/gates/lag", gate, 403},
		{ann, "GET", "/sites/oak", "", 200},
		{ann, "GET", "/users", "", 403},
		{ann, "POST", "/sites", `{"name":"elm","sides":["a","b"]}`, 403},
		{bob, "PUT", "/sites/maple/gates/lag", gate, 200},
		{bob, "GET", "/users", "", 200},
	} {
		a := w.call("", c.method, prefix+c.path, c.body, c.who...)
		require.Equal(t, c.status, a.status, "%s %s: %s", c.method, c.path, a.raw)
	}
	var names []any
	for _, site := range w.call("", "GET", prefix+"/sites", "", ann...).data() {
		names = append(names, site["name"])
	}
	require.Equal(t, []any{"maple", "oak"}, names)
}

// What is recorded says by what way and from where it was done.
func TestTheAuditSaysFromWhere(t *testing.T) {
	w := newWorld(t)
	w.backfill()
	e := w.get(control.Viewer, "/api/v1/audit?action=backfill.request").data()[0]
	require.Equal(t, "token", e["via"])
	require.Equal(t, "127.0.0.1", e["address"])
}

// A change of configuration is recorded with what it changed.
func TestTheAuditSaysWhatWasBefore(t *testing.T) {
	w := newWorld(t)
	const table = "/api/v1/sites/maple/tables/public.orders"
	for _, x := range []struct{ method, path, first, second, action, field, was string }{
		{"PATCH", "/api/v1/sites/maple", `{"second_person":true}`, `{"second_person":false}`, "site.change", "", "on"},
		{"PUT", "/api/v1/sites/maple/gates/lag", `{"side":"central","kind":"sessions","limit":5}`, `{"side":"central","kind":"sessions","limit":6}`, "gate.put", "limit", "5"},
		{"DELETE", "/api/v1/sites/maple/gates/lag", "", "", "gate.remove", "limit", "6"},
		{"PUT", table + "/schedule", `{"from":"school","every_seconds":3600}`, `{"from":"school","every_seconds":7200}`, "schedule.put", "every", "01:00:00"},
		{"PUT", table + "/cutover", `{"from":"school","objective":0.01}`, `{"from":"school","objective":0.02}`, "cutover.policy", "objective", "0.01"},
		{"PUT", table, `{"apply_order":3}`, `{"apply_order":4}`, "table.put", "apply_order", "3"},
		{"PUT", table, `{"captured_from":["school","central"],"conflict":"school"}`, `{"conflict":"central"}`, "table.put", "conflict", "school"},
		{"DELETE", table, "", "", "table.remove", "apply_order", "4"},
	} {
		for _, body := range []string{x.first, x.second} {
			if a := w.call(control.Admin, x.method, x.path, body); x.method != "DELETE" {
				require.Equal(t, 200, a.status, "%s: %s", x.action, a.raw)
			}
		}
		e := w.get(control.Viewer, "/api/v1/audit?action="+x.action).data()[0]
		before := e["detail"].(map[string]any)["before"]
		if x.field != "" {
			before = before.(map[string]any)[x.field]
		}
		require.Equal(t, x.was, fmt.Sprint(before), x.action)
	}
	require.NoError(t, w.store.RevokeToken(t.Context(), "test", "reviewer"))
	e := w.get(control.Viewer, "/api/v1/audit?action=token.revoke").data()[0]
	require.Equal(t, map[string]any{"role": "reviewer"}, e["detail"].(map[string]any)["before"])
}

// Who asked may not approve, whatever the way they are known by.
func TestASecondPersonIsAnotherAccount(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.store.SetSecondPerson(t.Context(), "test", "maple", true))
	signIn := func(name string) []header {
		require.NoError(t, w.store.CreateUser(t.Context(), "test", name, control.Rights{Sites: map[string]control.Role{"maple": control.Reviewer}}, "correct horse battery"))
		id, err := w.store.SignIn(t.Context(), name, "correct horse battery", "127.0.0.1", time.Hour)
		require.NoError(t, err)
		return []header{{"Cookie", SessionCookie + "=" + id}, {"Sec-Fetch-Site", "same-origin"}}
	}
	id := w.staged(1)
	w.exec(`UPDATE backfill_control.request SET requested_by = 'ruth'`)
	ruth, sam := signIn("Ruth"), signIn("sam")
	require.Equal(t, 403, w.post("", path("/backfills/%d/approve", id), `{"revision":7}`, ruth...).status)
	require.Equal(t, 200, w.post("", path("/backfills/%d/approve", id), `{"revision":7}`, sam...).status)
	e := w.get(control.Viewer, "/api/v1/audit?action=backfill.approve").data()[0]
	require.Equal(t, []any{"sam", "session", "127.0.0.1"}, []any{e["account"], e["via"], e["address"]})
}
