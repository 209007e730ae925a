package ui_test

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"math/big"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
	"backfill/internal/oidc"
	"backfill/ui"
)

// fakeProvider is a small OpenID Connect provider that holds its clients to PKCE.
type fakeProvider struct {
	*httptest.Server
	t      *testing.T
	key    *rsa.PrivateKey
	mu     sync.Mutex
	claims map[string]any        // of whoever signs in next
	bend   func(map[string]any)  // makes them wrong
	signer *rsa.PrivateKey       // another key than the published one
	codes  map[string]url.Values // what was asked for, by code
}

func newProvider(t *testing.T) *fakeProvider {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	p := &fakeProvider{t: t, key: key, codes: map[string]url.Values{}}
	mux := http.NewServeMux()
	p.Server = httptest.NewServer(mux)
	t.Cleanup(p.Close)
	answer := func(w http.ResponseWriter, status int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		json.NewEncoder(w).Encode(v)
	}
	mux.HandleFunc("/.well-known/openid-configuration", func(w http.ResponseWriter, r *http.Request) {
		answer(w, 200, map[string]any{"issuer": p.URL, "authorization_endpoint": p.URL + "/authorize", "token_endpoint": p.URL + "/token", "jwks_uri": p.URL + "/keys",
			"id_token_signing_alg_values_supported": []string{"RS256"}})
	})
	mux.HandleFunc("/keys", func(w http.ResponseWriter, r *http.Request) {
		answer(w, 200, map[string]any{"keys": []any{map[string]any{"kty": "RSA", "kid": "1", "alg": "RS256", "use": "sig",
			"n": base64.RawURLEncoding.EncodeToString(key.N.Bytes()), "e": base64.RawURLEncoding.EncodeToString(big.NewInt(int64(key.E)).Bytes())}}})
	})
	mux.HandleFunc("/authorize", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if q.Get("response_type") != "code" || q.Get("client_id") != "backfill" || q.Get("code_challenge_method") != "S256" || q.Get("nonce") == "" || !strings.Contains(q.Get("scope"), "openid") {
			http.Error(w, "bad request", 400)
			return
		}
		p.mu.Lock()
		code := rand.Text()
		p.codes[code] = q
		p.mu.Unlock()
		http.Redirect(w, r, q.Get("redirect_uri")+"?"+url.Values{"code": {code}, "state": {q.Get("state")}}.Encode(), http.StatusFound)
	})
	mux.HandleFunc("/token", func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		defer p.mu.Unlock()
		id, secret, _ := r.BasicAuth()
		asked := p.codes[r.FormValue("code")]
		delete(p.codes, r.FormValue("code"))
		sum := sha256.Sum256([]byte(r.FormValue("code_verifier")))
		if id != "backfill" || secret != "s3cret" || asked == nil || asked.Get("code_challenge") != base64.RawURLEncoding.EncodeToString(sum[:]) || asked.Get("redirect_uri") != r.FormValue("redirect_uri") {
			answer(w, 400, map[string]any{"error": "invalid_grant"})
			return
		}
		claims := map[string]any{"iss": p.URL, "aud": "backfill", "nonce": asked.Get("nonce"), "iat": time.Now().Unix(), "exp": time.Now().Add(time.Minute).Unix()}
		for k, v := range p.claims {
			claims[k] = v
		}
		if p.bend != nil {
			p.bend(claims)
		}
		answer(w, 200, map[string]any{"access_token": "x", "token_type": "Bearer", "id_token": p.sign(claims)})
	})
	return p
}

func (p *fakeProvider) sign(claims map[string]any) string {
	part := func(v any) string {
		raw, err := json.Marshal(v)
		require.NoError(p.t, err)
		return base64.RawURLEncoding.EncodeToString(raw)
	}
	text := part(map[string]any{"alg": "RS256", "kid": "1"}) + "." + part(claims)
	sum := sha256.Sum256([]byte(text))
	key := p.key
	if p.signer != nil {
		key = p.signer
	}
	sig, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, sum[:])
	require.NoError(p.t, err)
	return text + "." + base64.RawURLEncoding.EncodeToString(sig)
}

// behind mounts the pages with the provider.
func (p *fakeProvider) behind(w *world, o *ui.Options) {
	o.Provider = oidc.New(oidc.Config{Issuer: p.URL, ClientID: "backfill", Secret: "s3cret", Redirect: w.url + ui.ProviderReturn,
		Grants: []oidc.Grant{{Group: "staff", Role: control.Viewer}, {Group: "dba", Role: control.Admin}, {Group: "maple-leads", Role: control.Reviewer, Site: "maple"}}})
}

// browser follows redirects and keeps cookies.
func (w *world) browser() *http.Client {
	jar, err := cookiejar.New(nil)
	require.NoError(w.t, err)
	return &http.Client{Jar: jar}
}

func (w *world) visit(b *http.Client, path string) (*http.Response, string) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), "GET", w.url+path, nil)
	require.NoError(w.t, err)
	return w.through(b, r)
}

func TestSigningInAtAProvider(t *testing.T) {
	p := newProvider(t)
	w := newWorld(t, p.behind)
	ctx := t.Context()
	_, body := w.get("/signin?next=/sites/maple", "")
	require.Contains(t, body, `href="/signin/provider?next=%2Fsites%2Fmaple"`)

	p.claims = map[string]any{"sub": "u-1", "preferred_username": "ruth", "groups": []string{"staff", "maple-leads", "others"}}
	ruth := w.browser()
	res, body := w.visit(ruth, "/signin/provider?next=/sites/maple")
	require.Equal(t, 200, res.StatusCode, body)
	require.Contains(t, body, "/sites/maple", "the page that goes on to where one wanted to go")
	_, body = w.visit(ruth, "/sites/maple")
	require.Contains(t, body, "ruth · reviewer", "the higher of her two roles on this site")
	_, body = w.visit(ruth, "/sites/birch")
	require.Contains(t, body, "ruth · viewer", "the one on every site elsewhere")

	// The same person under another name and in other groups is the same account.
	p.claims["preferred_username"], p.claims["groups"] = "ruth.b", "maple-leads"
	again := w.browser()
	w.visit(again, "/signin/provider")
	_, body = w.visit(again, "/sites/maple")
	require.Contains(t, body, "ruth · reviewer")
	res, _ = w.visit(again, "/sites/birch")
	require.Equal(t, 404, res.StatusCode)
	users, err := w.store.Users(ctx)
	require.NoError(t, err)
	require.Len(t, users, 1)

	// Without a group there is no way in, and what was open closes.
	p.claims["groups"] = []string{"others"}
	res, body = w.visit(w.browser(), "/signin/provider")
	require.Equal(t, 403, res.StatusCode)
	require.Contains(t, body, "None of your groups")
	require.Eventually(t, func() bool {
		_, body := w.visit(again, "/sites/maple")
		return strings.Contains(body, "Sign in")
	}, 20*time.Second, 100*time.Millisecond)
	p.claims = map[string]any{"sub": "u-2", "preferred_username": "stranger"}
	res, _ = w.visit(w.browser(), "/signin/provider")
	require.Equal(t, 403, res.StatusCode)

	// A name of somebody here opens nothing: neither another person's, nor a token's.
	require.NoError(t, w.store.CreateUser(ctx, "test", "ann", control.Rights{Role: control.Admin}, "correct horse battery"))
	for _, name := range []string{"ann", "Ann", "ruth", "", " ann"} {
		p.claims = map[string]any{"sub": "u-3", "preferred_username": name, "groups": []string{"staff"}}
		b := w.browser()
		res, body = w.visit(b, "/signin/provider")
		require.Contains(t, []int{409, 422}, res.StatusCode, "%q: %s", name, body)
		_, body = w.visit(b, "/sites/maple")
		require.Contains(t, body, "Sign in", name)
	}
	// Nor does the same subject of another issuer: that is another provider's person.
	_, err = w.store.SignInAs(ctx, control.Person{Issuer: "https://other.example", Subject: "u-1", Name: "ruth"}, control.Rights{Role: control.Admin}, "10.0.0.1", time.Hour)
	require.Error(t, err)

	// Who has a password still signs in with it; who comes from the provider has none.
	id, err := w.store.SignIn(ctx, "ann", "correct horse battery", "10.0.0.1", time.Hour)
	require.NoError(t, err)
	require.NotEmpty(t, id)
	_, err = w.store.SignIn(ctx, "ruth", "", "10.0.0.1", time.Hour)
	require.Error(t, err)
}

// What a provider's answer must be, each held by an answer that is not.
func TestForgedAnswersOfAProvider(t *testing.T) {
	p := newProvider(t)
	w := newWorld(t, p.behind)
	p.claims = map[string]any{"sub": "u-1", "preferred_username": "ruth", "groups": []string{"dba"}}
	other, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	refused := func(name string, b *http.Client, path string) {
		res, body := w.visit(b, path)
		require.Equal(t, 401, res.StatusCode, "%s: %s", name, body)
		require.Contains(t, body, "Signing in there has failed", name)
		require.NotContains(t, body, "nonce is not", "the cause is for the log")
		_, body = w.visit(b, "/sites/maple")
		require.Contains(t, body, "Sign in", name)
	}
	for name, bend := range map[string]func(map[string]any){
		"another nonce":    func(c map[string]any) { c["nonce"] = "x" },
		"no nonce":         func(c map[string]any) { delete(c, "nonce") },
		"another audience": func(c map[string]any) { c["aud"] = "somebody-else" },
		"another issuer":   func(c map[string]any) { c["iss"] = "https://elsewhere.example" },
		"expired":          func(c map[string]any) { c["exp"] = time.Now().Add(-time.Hour).Unix() },
		"another key":      func(map[string]any) { p.signer = other },
	} {
		p.bend = bend
		refused(name, w.browser(), "/signin/provider")
		p.bend, p.signer = nil, nil
	}

	// A code that somebody else was given, brought to a browser that did not ask for it,
	// or under another state.
	stop := &http.Client{Jar: w.browser().Jar, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		if r.URL.Path == ui.ProviderReturn {
			return http.ErrUseLastResponse
		}
		return nil
	}}
	back := func() string {
		res, _ := w.visit(stop, "/signin/provider")
		u, err := url.Parse(res.Header.Get("Location"))
		require.NoError(t, err)
		return u.RequestURI()
	}
	refused("another browser", w.browser(), back())
	to := back()
	refused("another state", &http.Client{Jar: stop.Jar}, strings.Replace(to, "state=", "state=x", 1))
	refused("an attempt that has ended", &http.Client{Jar: stop.Jar}, to)
	to = back()
	second := back() // whose flow takes the place of the first one's
	refused("an earlier attempt", &http.Client{Jar: stop.Jar}, to)
	_ = second
	refused("refused there", w.browser(), ui.ProviderReturn+"?error=access_denied&error_description=<script>")

	res, _ := w.get("/signin/provider?next=//evil.example", "")
	require.Equal(t, http.StatusSeeOther, res.StatusCode)
	require.True(t, strings.HasPrefix(res.Header.Get("Location"), p.URL))
}

// A provider that is away keeps nobody from signing in otherwise.
func TestAProviderThatIsAway(t *testing.T) {
	w := newWorld(t, func(w *world, o *ui.Options) {
		o.Provider = oidc.New(oidc.Config{Issuer: "http://127.0.0.1:1", ClientID: "backfill", Redirect: w.url + ui.ProviderReturn})
	})
	res, body := w.get("/signin/provider", "")
	require.Equal(t, 503, res.StatusCode)
	require.Contains(t, body, "The sign-in provider does not answer")
	res, _ = w.get("/sites/maple", adminToken)
	require.Equal(t, 200, res.StatusCode)
}

func TestWithoutAProvider(t *testing.T) {
	w := newWorld(t)
	_, body := w.get("/signin", "")
	require.NotContains(t, body, "/signin/provider")
	res, _ := w.get("/signin/provider", "")
	require.Equal(t, 404, res.StatusCode)
}
