package ui_test

import (
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// everyPage lists a page of each kind.
func (w *world) everyPage() []string {
	out := []string{"/", "/sites/maple", "/sites/maple?open=3-school&open=4-school", "/sites/birch", "/sites/maple/queue", "/sites/maple/queue?state=skipped",
		"/sites/maple/history", "/sites/maple/history?table=public.students&key=31", "/sites/maple/history?origin=backfill", "/sites/maple/row?table=public.students&key=31", "/sites/maple/row", "/sites/maple/audit", "/sites/maple/audit?action=backfill", "/backfills/99999"}
	for table, state := range map[string]backfill.State{
		"public.students": backfill.AwaitingReview, "public.guardians": backfill.AwaitingReview, "public.attendance": backfill.InProgress,
		"public.teachers": backfill.Releasing, "public.rooms": backfill.Pending, "public.loans": backfill.Finished,
	} {
		out = append(out, fmt.Sprintf("/backfills/%d", w.request(table, state)))
	}
	for _, state := range []backfill.State{backfill.Finished, backfill.Failed, backfill.Rejected} {
		out = append(out, fmt.Sprintf("/backfills/%d", w.request("public.enrollments", state)))
	}
	return out
}

func TestPagesNeedASession(t *testing.T) {
	w := newWorld(t)
	for _, path := range w.everyPage() {
		for _, token := range []string{"", "no-such-token-0123456789"} {
			res, _ := w.get(path, token)
			require.Equal(t, http.StatusSeeOther, res.StatusCode, path)
			to, err := res.Location()
			require.NoError(t, err)
			require.Equal(t, "/signin", to.Path)
			if path != "/" {
				require.Equal(t, path, to.Query().Get("next"))
			}
			res, _ = w.get(path, token, "Backfill-Fragment", "1")
			require.Equal(t, http.StatusUnauthorized, res.StatusCode, "a script is told, not sent elsewhere")
		}
		res, _ := w.get(path, viewerToken)
		require.NotEqual(t, http.StatusSeeOther, res.StatusCode, path)
	}
}

func TestPagesOfAnotherSite(t *testing.T) {
	w := newWorld(t)
	const birchToken = "token-of-birch-0123456789"
	require.NoError(t, w.store.CreateToken(t.Context(), "ada", control.Token{Name: "bert", Rights: control.Rights{Sites: map[string]control.Role{"birch": control.Admin}}}, birchToken))
	for _, path := range append(w.everyPage(), "/sites/maple/proof", "/sites/maple/cutover?table=public.students&from=school") {
		for _, header := range [][]string{nil, {"Backfill-Fragment", "1"}} {
			// First somebody who may, so that what is kept of that page is not handed on.
			_, body := w.get(path, adminToken, header...)
			if path != "/backfills/99999" {
				require.Regexp(t, "maple|birch", body, path)
			}
			own := strings.Contains(body, "/sites/birch")
			res, body := w.get(path, birchToken, header...)
			if own {
				require.Equal(t, http.StatusOK, res.StatusCode, path)
				require.Contains(t, body, "birch", path)
			} else {
				require.Equal(t, http.StatusNotFound, res.StatusCode, path)
			}
			require.NotContains(t, body, "/sites/maple", path)
			require.NotContains(t, body, "students", path)
		}
	}
}

func TestSigningIn(t *testing.T) {
	w := newWorld(t)
	post := func(form url.Values, header ...string) (*http.Response, string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+"/signin", strings.NewReader(form.Encode()))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		return w.send(r, "", header...)
	}
	session := func(res *http.Response) *http.Cookie {
		for _, c := range res.Cookies() {
			if c.Name == "backfill_session" {
				return c
			}
		}
		return nil
	}

	res, body := post(url.Values{"token": {adminToken}, "next": {"/sites/maple?open=1-school"}})
	require.Equal(t, http.StatusOK, res.StatusCode)
	require.Contains(t, body, `content="0; url=/sites/maple?open=1-school"`)
	c := session(res)
	require.NotNil(t, c)
	require.NotEqual(t, adminToken, c.Value)
	require.True(t, c.HttpOnly)
	require.Equal(t, http.SameSiteStrictMode, c.SameSite)

	res, body = w.get("/signin?token="+adminToken, "")
	require.NotNil(t, session(res), "the link from the terminal signs in")
	require.Contains(t, body, `url=/"`)

	for _, elsewhere := range []string{"//evil.example/", "https://evil.example/", `/\evil.example`, "javascript:alert(1)", "/\t/evil.example"} {
		_, body = post(url.Values{"token": {adminToken}, "next": {elsewhere}})
		require.Contains(t, body, `url=/"`, elsewhere)
	}

	res, body = post(url.Values{"token": {"wrong-token-0123456789"}})
	require.Equal(t, http.StatusUnauthorized, res.StatusCode)
	require.Nil(t, session(res))
	require.Contains(t, body, "wrong, revoked or expired")

	for _, site := range []string{"cross-site", "same-site"} {
		res, _ = w.get("/signin?token="+adminToken, "", "Sec-Fetch-Site", site)
		require.Nil(t, session(res), "another site's page must not choose who one is")
		res, _ = post(url.Values{"token": {adminToken}}, "Sec-Fetch-Site", site)
		require.Nil(t, session(res))
	}
	// A link in a mail: the strict cookie is not sent along, but may be there.
	_, body = w.get("/sites/maple", "", "Sec-Fetch-Site", "cross-site")
	require.Contains(t, body, `content="0; url=/sites/maple"`)

	res, _ = w.get("/signin?next=/sites/maple", adminToken)
	require.Equal(t, "/sites/maple", res.Header.Get("Location"), "who is signed in goes on")

	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+"/signout", nil)
	require.NoError(t, err)
	res, _ = w.send(r, adminToken)
	require.Less(t, session(res).MaxAge, 0)
	res, _ = w.get("/", adminToken)
	require.Equal(t, http.StatusSeeOther, res.StatusCode, "it is over, whoever still has the cookie")
}

func TestSigningInWithAPassword(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	const password = "correct horse battery"
	require.NoError(t, w.store.CreateUser(ctx, "test", "Ruth", control.Rights{Sites: map[string]control.Role{"maple": control.Reviewer}}, password))
	post := func(name, password, old string) (*http.Response, string) {
		form := url.Values{"name": {name}, "password": {password}}
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+"/signin", strings.NewReader(form.Encode()))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		return w.send(r, old)
	}
	res, body := post("Ruth", "wrong horse battery", "")
	require.Equal(t, http.StatusUnauthorized, res.StatusCode)
	require.Contains(t, body, "The name or the password is wrong.")
	require.NotContains(t, body, "wrong horse", "what was typed is not sent back")
	_, unknown := post("nobody-of-us", "wrong horse battery", "")
	require.Equal(t, strings.Replace(body, "Ruth", "nobody-of-us", 1), unknown, "names are not told")
	res, _ = w.get("/signin?name=Ruth&password="+url.QueryEscape(password), "")
	require.Empty(t, res.Cookies(), "a password in an address is not taken")

	res, body = post("ruth", password, "")
	require.Equal(t, http.StatusOK, res.StatusCode, body)
	first := res.Cookies()[0].Value
	_, body = w.get("/sites/maple", first)
	require.Contains(t, body, "Ruth · reviewer")
	res, _ = w.get("/sites/birch", first)
	require.Equal(t, http.StatusNotFound, res.StatusCode)
	res, _ = post("ruth", password, first)
	second := res.Cookies()[0].Value
	require.NotEqual(t, first, second)
	res, _ = w.get("/sites/maple", first)
	require.Equal(t, http.StatusSeeOther, res.StatusCode, "the session before has ended")
	require.NoError(t, w.store.SetUser(ctx, "test", "Ruth", nil, new("another horse battery")))
	require.Eventually(t, func() bool {
		res, _ := w.get("/sites/maple", second)
		return res.StatusCode == http.StatusSeeOther
	}, 20*time.Second, 100*time.Millisecond, "another password ends sessions")

	for range 12 {
		res, body = post("Ruth", "wrong horse battery", "")
	}
	require.Equal(t, http.StatusTooManyRequests, res.StatusCode)
	require.Contains(t, body, "Too many failed tries")
	res, _ = post("Ruth", "another horse battery", "")
	require.Equal(t, http.StatusTooManyRequests, res.StatusCode, "the right one neither: else guessing could go on")
}

var inline = regexp.MustCompile(`(?i)<script(?:\s[^>]*)?>\s*[^<\s]|<style|<[^>]+\s(style|on[a-z]+)=|(src|href|action)="?(https?:)?//`)

func TestPagesAllowNothingInlineOrForeign(t *testing.T) {
	w := newWorld(t)
	for _, path := range append(w.everyPage(), "/signin") {
		token := adminToken
		if path == "/signin" {
			token = ""
		}
		res, body := w.get(path, token)
		policy := res.Header.Get("Content-Security-Policy")
		require.Contains(t, policy, "default-src 'self'", path)
		require.NotContains(t, policy, "unsafe", path)
		require.Equal(t, "no-store", res.Header.Get("Cache-Control"), path)
		// The console is another server, and a link to it no request.
		body = strings.ReplaceAll(body, `href="http://127.0.0.1:8233/`, `href="/console/`)
		require.Empty(t, inline.FindString(body), path)
	}
}

func TestFragmentsHoldTheMainPartAlone(t *testing.T) {
	w := newWorld(t)
	res, body := w.get("/sites/maple", adminToken, "Backfill-Fragment", "1")
	require.Equal(t, http.StatusOK, res.StatusCode)
	require.True(t, strings.HasPrefix(body, `<main id="main"`), "%.100s", body)
	require.NotContains(t, body, "<head")
	require.Contains(t, body, "public.students")
}

func TestWhatIsNotThere(t *testing.T) {
	w := newWorld(t)
	for _, path := range []string{"/sites/nowhere", "/sites/nowhere/queue", "/sites/nowhere/history", "/sites/nowhere/audit", "/backfills/99999", "/backfills/x", "/sites/maple/nothing", "/backfills/1/2"} {
		res, body := w.get(path, adminToken)
		require.Equal(t, http.StatusNotFound, res.StatusCode, path)
		require.Contains(t, body, "All sites", path)
	}
	res, _ := w.get("/sites/maple/queue?state=nonsense", adminToken)
	require.Equal(t, http.StatusSeeOther, res.StatusCode)
}

func TestListsGoOn(t *testing.T) {
	w := newWorld(t)
	seq := regexp.MustCompile(`id="h(\d+)"`)
	seen := map[string]bool{}
	path := "/sites/maple/history?table=public.students"
	for range 20 {
		_, body := w.get(path, adminToken)
		for _, m := range seq.FindAllStringSubmatch(body, -1) {
			require.False(t, seen[m[1]], "change %s stands on two pages", m[1])
			seen[m[1]] = true
		}
		next := regexp.MustCompile(`href="(/sites/maple/history[^"]*before=\d+[^"]*)"`).FindStringSubmatch(body)
		if next == nil {
			break
		}
		path = strings.ReplaceAll(next[1], "&amp;", "&")
	}
	require.Len(t, seen, 388)
}

func TestAViewerIsToldWhy(t *testing.T) {
	w := newWorld(t)
	_, body := w.get("/sites/maple", viewerToken)
	require.Contains(t, body, "requesting a backfill needs the role requester: you are a viewer")
	require.NotContains(t, body, `data-dialog="ask" data-table`)
	_, body = w.get(fmt.Sprintf("/backfills/%d", w.request("public.students", backfill.AwaitingReview)), viewerToken)
	require.Contains(t, body, "Deciding needs the role reviewer: you are a viewer")
	require.NotContains(t, body, `id="cancel"`)
	_, body = w.get("/sites/maple/queue", viewerToken)
	require.NotContains(t, body, "/retry")
}

// Pages are made once for all of a role; what concerns one person is not.
func TestWhatConcernsOnePersonIsNotShared(t *testing.T) {
	w := newWorld(t)
	const graceToken = "grace-token-0123456789"
	require.NoError(t, w.store.PutToken(t.Context(), "ada", "grace", control.Admin, graceToken)) // who asked
	require.NoError(t, w.store.SetSecondPerson(t.Context(), "ada", "maple", true))
	path := fmt.Sprintf("/backfills/%d", w.request("public.students", backfill.AwaitingReview))
	for range 3 {
		_, ada := w.get(path, adminToken, "Backfill-Fragment", "1")
		_, grace := w.get(path, graceToken, "Backfill-Fragment", "1")
		require.NotContains(t, ada, "another reviewer has to approve it")
		require.Contains(t, grace, "another reviewer has to approve it")
		require.Contains(t, ada, `&#34;by&#34;: &#34;ada&#34;`)
		require.Contains(t, grace, `&#34;by&#34;: &#34;grace&#34;`)
	}
}

func TestFragmentsAreCompressedOnce(t *testing.T) {
	w := newWorld(t)
	res, plain := w.get("/sites/maple", viewerToken, "Backfill-Fragment", "1", "Accept-Encoding", "identity")
	require.Empty(t, res.Header.Get("Content-Encoding"))
	require.EqualValues(t, len(plain), res.ContentLength)
	res, zipped := w.get("/sites/maple", viewerToken, "Backfill-Fragment", "1", "Accept-Encoding", "gzip")
	require.Equal(t, "gzip", res.Header.Get("Content-Encoding"))
	require.Contains(t, res.Header.Values("Vary"), "Accept-Encoding")
	require.Less(t, len(zipped), len(plain)/3)
	z, err := gzip.NewReader(strings.NewReader(zipped))
	require.NoError(t, err)
	text, err := io.ReadAll(z)
	require.NoError(t, err)
	require.Contains(t, string(text), "public.students")
	require.Equal(t, 1, strings.Count(string(text), "<main "))
}

// A browser that does not read its answer holds up nobody else's.
func TestASlowBrowserHoldsUpItselfAlone(t *testing.T) {
	w := newWorld(t)
	const path = "/sites/maple"
	slow, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	require.NoError(t, err)
	defer slow.Close()
	ask := fmt.Sprintf("GET %s HTTP/1.1\r\nHost: x\r\nBackfill-Fragment: 1\r\nCookie: backfill_session=%s\r\n\r\n", path, w.session(viewerToken))
	// Until the server takes no more questions, as its answers find no room.
	for err == nil {
		require.NoError(t, slow.SetWriteDeadline(time.Now().Add(time.Second)))
		_, err = slow.Write([]byte(ask))
	}
	var late net.Error
	require.ErrorAs(t, err, &late)
	require.True(t, late.Timeout(), "%v", err)
	client := http.Client{Timeout: 5 * time.Second}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+path, nil)
	require.NoError(t, err)
	r.AddCookie(&http.Cookie{Name: "backfill_session", Value: w.session(viewerToken)})
	r.Header.Set("Backfill-Fragment", "1")
	res, err := client.Do(r)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusOK, res.StatusCode)
}
