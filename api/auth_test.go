package api

import (
	"context"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

type ctx = context.Context

func TestToken(t *testing.T) {
	w := newWorld(t)
	tests := []struct {
		name, header string
		status       int
	}{
		{"none", "", 401},
		{"wrong", "Bearer " + strings.Repeat("x", 40), 401},
		{"empty", "Bearer ", 401},
		{"another scheme", "Basic " + secret(control.Admin), 401},
		{"no scheme", secret(control.Admin), 401},
		{"valid", "Bearer " + secret(control.Viewer), 200},
		{"scheme in any case", "bearer " + secret(control.Viewer), 200},
	}
	for _, x := range tests {
		a := w.call("", "GET", "/api/v1/sites", "", header{"Authorization", x.header})
		require.Equal(t, x.status, a.status, x.name)
		if x.status == 401 {
			require.Equal(t, "Bearer", a.header.Get("WWW-Authenticate"))
		}
	}
	require.NoError(t, w.store.RevokeToken(t.Context(), "test", "reviewer"))
	require.Equal(t, 401, w.get(control.Reviewer, "/api/v1/sites").status)
	for _, open := range []string{"/healthz", "/readyz", "/metrics", "/openapi.yaml"} {
		require.Equal(t, 200, w.get("", open).status, open)
	}
}

func TestSessionCookie(t *testing.T) {
	w := newWorld(t)
	host := strings.TrimPrefix(w.url, "http://")
	id, err := w.store.SignInByToken(t.Context(), secret(control.Admin), "127.0.0.1", time.Hour)
	require.NoError(t, err)
	cookie := header{"Cookie", SessionCookie + "=" + id}
	require.Equal(t, 401, w.call("", "GET", "/api/v1/sites", "", header{"Cookie", SessionCookie + "=" + secret(control.Admin)}).status, "a token is no session")
	require.Equal(t, 401, w.call("", "GET", "/api/v1/sites", "", header{"Authorization", "Bearer " + id}).status, "a session is no token")
	require.Equal(t, 200, w.call("", "GET", "/api/v1/sites", "", cookie).status)
	tests := []struct {
		name    string
		headers []header
		allowed bool
	}{
		{"neither header", nil, false},
		{"same origin", []header{{"Sec-Fetch-Site", "same-origin"}}, true},
		{"same site", []header{{"Sec-Fetch-Site", "same-site"}}, false},
		{"cross site", []header{{"Sec-Fetch-Site", "cross-site"}}, false},
		{"typed in", []header{{"Sec-Fetch-Site", "none"}}, false},
		{"cross site whatever the origin", []header{{"Sec-Fetch-Site", "cross-site"}, {"Origin", w.url}}, false},
		{"own origin", []header{{"Origin", w.url}}, true},
		{"other origin", []header{{"Origin", "https://evil.test"}}, false},
		{"origin with our name in it", []header{{"Origin", "https://evil.test/" + host}}, false},
		{"no origin", []header{{"Origin", "null"}}, false},
	}
	for i, x := range tests {
		a := w.call("", "POST", "/api/v1/sites", `{"name":"site`+string(rune('a'+i))+`","sides":["a","b"]}`, append(x.headers, cookie)...)
		require.Equal(t, map[bool]int{true: 201, false: 403}[x.allowed], a.status, "%s: %s", x.name, a.raw)
	}
	a := w.call(control.Viewer, "POST", "/api/v1/sites", `{"name":"z","sides":["a","b"]}`, cookie, header{"Sec-Fetch-Site", "same-origin"})
	require.Equal(t, 403, a.status, "a bearer token wins over a cookie")
}

// Guarantee 12: no role can do what it was not given.
func TestRoles(t *testing.T) {
	w := newWorld(t)
	roles := []control.Role{control.Viewer, control.Requester, control.Reviewer, control.Admin}
	tests := []struct {
		method, path, body string
		need               control.Role
	}{
		{"GET", "/api/v1/sites", "", control.Viewer},
		{"GET", "/api/v1/audit", "", control.Viewer},
		{"POST", "/api/v1/sites/maple/backfills", `{"table":"public.none","from":"school"}`, control.Requester},
		{"POST", "/api/v1/backfills/999/pause", "", control.Requester},
		{"POST", "/api/v1/backfills/999/resume", "", control.Requester},
		{"POST", "/api/v1/backfills/999/cancel", "", control.Requester},
		{"POST", "/api/v1/backfills/999/approve", `{"revision":1}`, control.Reviewer},
		{"POST", "/api/v1/backfills/999/reject", `{"revision":1,"note":"n"}`, control.Reviewer},
		{"POST", "/api/v1/sites/maple/queue/999/retry", "", control.Reviewer},
		{"POST", "/api/v1/sites/maple/queue/999/skip", "", control.Reviewer},
		{"POST", "/api/v1/sites", `{"name":"Bad name","sides":["a","b"]}`, control.Admin},
		{"PUT", "/api/v1/sites/maple/tables/nope", `{}`, control.Admin},
		{"DELETE", "/api/v1/sites/maple/tables/public.none", "", control.Admin},
	}
	for _, x := range tests {
		for _, role := range roles {
			a := w.call(role, x.method, x.path, x.body)
			if role.Covers(x.need) {
				require.NotEqual(t, 403, a.status, "%s %s as %s", x.method, x.path, role)
				continue
			}
			require.Equal(t, 403, a.status, "%s %s as %s", x.method, x.path, role)
			require.Contains(t, a.json["detail"], "needs role "+string(x.need))
		}
	}
}

// A header that names somebody is believed of a trusted proxy alone.
func TestTrustedProxies(t *testing.T) {
	here := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/24")}
	const name = "X-Remote-User"
	w := newWorld(t, func(c *Config) { c.Auth = NewAuthBehind(c.Service.Store, Trust{Header: name, From: here}) })
	require.NoError(t, w.store.CreateUser(t.Context(), "test", "ruth", control.Rights{Sites: map[string]control.Role{"maple": control.Requester}}, ""))
	as := header{name, "ruth"}
	forged, _ := http.NewRequest("GET", "/", nil)
	forged.RemoteAddr = "127.0.0.1:5"
	forged.Header.Set(name, "ruth")
	forged.Header.Set("X-Forwarded-For", "192.0.2.1")
	for what, trust := range map[string]Trust{"no header": {From: here}, "elsewhere": {Header: name, From: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}, "nowhere": {Header: name}} {
		auth := NewAuthBehind(w.store, trust)
		_, err := auth.Authenticate(forged)
		require.Equal(t, backfill.Unauthorized, backfill.CodeOf(err), what)
		require.Equal(t, map[bool]string{true: "192.0.2.1", false: "127.0.0.1"}[what == "no header"], auth.Address(forged), what)
	}
	own := header{"Sec-Fetch-Site", "same-origin"}
	require.Equal(t, 200, w.call("", "GET", "/api/v1/sites/maple", "", as).status)
	require.Equal(t, 401, w.call("", "GET", "/api/v1/sites", "", header{name, "nobody"}).status)
	require.Equal(t, 403, w.call("", "POST", "/api/v1/sites/maple/backfills", ordersBackfill, as, header{"Sec-Fetch-Site", "cross-site"}).status, "as with a cookie")
	require.Equal(t, 403, w.call("", "PATCH", "/api/v1/sites/maple", `{"second_person":true}`, as, own).status)
	require.Equal(t, 201, w.call("", "POST", "/api/v1/sites/maple/backfills", ordersBackfill, as, own, header{"X-Forwarded-For", "198.51.100.7, 203.0.113.9, 10.0.0.5"}).status)
	e := w.get(control.Admin, "/api/v1/audit?action=backfill.request").data()[0]
	require.Equal(t, []any{"ruth", "header", "203.0.113.9"}, []any{e["account"], e["via"], e["address"]}, "the first hop is the client's own word")
	r, _ := http.NewRequest("GET", w.url+"/api/v1/sites", nil)
	r.Header[name] = []string{"ruth", "admin"}
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, 401, resp.StatusCode, "two names are none")
	_, err = w.store.SignIn(t.Context(), "ruth", "", "127.0.0.1", time.Hour)
	require.Equal(t, backfill.Unauthorized, backfill.CodeOf(err), "no password is not the empty one")
}

func TestWhatIsRevokedIsRefusedAtOnce(t *testing.T) {
	w := newWorld(t)
	secret := control.NewSecret()
	require.NoError(t, w.store.CreateToken(t.Context(), "test", control.Token{Name: "script", Rights: control.Rights{Role: control.Admin}}, secret))
	as := header{"Authorization", "Bearer " + secret}
	require.Equal(t, 200, w.call("", "PATCH", "/api/v1/sites/maple", `{"second_person":true}`, as).status)
	require.NoError(t, w.store.CreateToken(t.Context(), "test", control.Token{Name: "script", Rights: control.Rights{Role: control.Viewer}}, secret))
	require.Equal(t, 403, w.call("", "PATCH", "/api/v1/sites/maple", `{"second_person":false}`, as).status, "it has fewer rights")
	require.NoError(t, w.store.RevokeToken(t.Context(), "test", "script"))
	require.Equal(t, 401, w.call("", "GET", "/api/v1/sites", "", as).status)
}
