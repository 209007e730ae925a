package ui_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// step is what a tab is told to do.
type step = chromedp.Action[chromedp.Void]

// browser is the one browser of the package; every tab has cookies of its own.
var browser = sync.OnceValues(func() (context.Context, error) {
	path := os.Getenv("BACKFILL_CHROMIUM")
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path == "" {
			path, _ = exec.LookPath(name)
		}
	}
	if path == "" {
		return nil, fmt.Errorf("%w on this machine; install it (Debian: apt-get install chromium) or name it in BACKFILL_CHROMIUM", errNoBrowser)
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path),
		chromedp.NoSandbox, // Chromium refuses its sandbox to root
		chromedp.Flag("font-render-hinting", "none"),
		chromedp.WSURLReadTimeout(2*time.Minute)) // on a busy machine it starts slowly
	allocator, _ := chromedp.NewExecAllocator(context.Background(), opts...)
	ctx, cancel := chromedp.NewContext(allocator)
	if err := chromedp.Do(ctx); err != nil {
		cancel()
		return nil, err
	}
	closeBrowser = cancel
	return ctx, nil
})

var errNoBrowser = errors.New("no Chromium")

var closeBrowser = func() {}

// tab is a browser's tab on a world's pages.
type tab struct {
	*world
	ctx context.Context

	mu       sync.Mutex
	problems []string // what scripts and the content policy complained of
}

// open signs a new tab in with a token, "" for nobody, and goes to a path.
func (w *world) open(token, path string) *tab {
	w.t.Helper()
	parent, err := browser()
	if errors.Is(err, errNoBrowser) {
		w.t.Skipf("not tested in a browser: %v", err)
	}
	require.NoError(w.t, err) // one that is there and does not start tests nothing
	b := &tab{world: w}
	ctx, cancel := chromedp.NewContext(parent, chromedp.WithNewBrowserContext())
	w.t.Cleanup(cancel)
	require.NoError(w.t, chromedp.Do(ctx)) // the tab must not end with the time limit's context
	b.ctx, cancel = context.WithTimeout(ctx, 5*time.Minute)
	w.t.Cleanup(cancel)
	require.NoError(w.t, chromedp.Listen(b.ctx, b.heard))
	b.do(chromedp.EmulateViewport(1280, 800))
	command(b, log.Enable, cdp.Empty{})
	if token != "" {
		command(b, network.SetCookie, network.SetCookieParams{Name: "backfill_session", Value: w.session(token), URL: w.url, HTTPOnly: new(true), SameSite: network.CookieSameSiteStrict})
	}
	b.do(chromedp.Navigate(w.url + path))
	return b
}

func (b *tab) heard(e any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := e.(type) {
	case *runtime.EventExceptionThrown:
		b.problems = append(b.problems, fmt.Sprintf("%+v", e.ExceptionDetails))
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError {
			b.problems = append(b.problems, e.Entry.Text+" "+e.Entry.URL)
		}
	}
}

// clean fails when a script threw, or the content policy had something to forbid.
func (b *tab) clean() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	require.Empty(b.t, b.problems)
}

func (b *tab) do(steps ...step) {
	b.t.Helper()
	require.NoError(b.t, chromedp.Do(b.ctx, steps...))
}

// command runs one of the browser's own commands.
func command[P, R any](b *tab, c cdp.Command[P, R], params P) {
	b.t.Helper()
	b.do(chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, c, params)
		return err
	}))
}

// eval returns what a script's expression gives.
func eval[T any](b *tab, script string) T {
	b.t.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](script))
	require.NoError(b.t, err, script)
	return v
}

// until waits for a script's expression to become true. It asks again and again
// rather than once in the page, so that it may outlive a navigation.
func (b *tab) until(script string) {
	b.t.Helper()
	var last error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		ok, err := chromedp.Run(b.ctx, chromedp.Evaluate[bool]("!!("+script+")"))
		if ok {
			return
		}
		last = err
		select {
		case <-b.ctx.Done():
			b.t.Fatal(b.ctx.Err())
		case <-time.After(30 * time.Millisecond):
		}
	}
	seen, _ := chromedp.Run(b.ctx, chromedp.Evaluate[string](`document.body.innerText`))
	require.FailNow(b.t, "waiting for "+script, "last error: %v; the page says:\n%.700s", last, seen)
}

func (b *tab) text(selector string) string {
	b.t.Helper()
	return eval[string](b, `document.querySelector(`+strconv.Quote(selector)+`)?.innerText ?? ""`)
}

func (b *tab) click(selector string) {
	b.t.Helper()
	b.do(chromedp.Click(chromedp.CSS(selector)))
}

// typed replaces what stands in a field. The keys go to what has the focus, for
// chromedp's SendKeys reads the field's attributes while they may change.
func (b *tab) typed(selector, text string) {
	b.t.Helper()
	b.until(fmt.Sprintf(`document.querySelector(%q)?.checkVisibility() === true`, selector))
	eval[any](b, fmt.Sprintf(`(field => { field.focus(); field.select(); return null })(document.querySelector(%q))`, selector))
	b.keys(text)
}

func (b *tab) keys(keys ...string) {
	b.t.Helper()
	for _, k := range keys {
		b.do(chromedp.KeyEvent(k))
	}
}

func (b *tab) scheme(name string) {
	b.t.Helper()
	command(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
}

// still waits until the page looks the same for a second, or half a minute: what a
// page tells of time that passes is never still.
func (b *tab) still() {
	b.t.Helper()
	var last []byte
	for same, deadline := 0, time.Now().Add(30*time.Second); same < 4 && time.Now().Before(deadline); same++ {
		b.do(chromedp.Sleep(250 * time.Millisecond))
		png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
		require.NoError(b.t, err)
		if !bytes.Equal(png, last) {
			last, same = png, 0
		}
	}
}

func (b *tab) picture(file string) {
	b.t.Helper()
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	require.NoError(b.t, err)
	require.NoError(b.t, os.WriteFile(file, png, 0o644))
}

// get fetches an address without a browser and follows nothing.
func (w *world) get(path, token string, header ...string) (*http.Response, string) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), http.MethodGet, w.url+path, nil)
	require.NoError(w.t, err)
	return w.send(r, token, header...)
}

// session is the id of a session of a token; what is no token is none.
func (w *world) session(token string) string {
	w.t.Helper()
	if id, ok := w.sessions.Load(token); ok {
		return id.(string)
	}
	if w.store == nil {
		// A server of somebody else's: as a person does it.
		r, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, w.url+"/signin", strings.NewReader(url.Values{"token": {token}}.Encode()))
		require.NoError(w.t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Origin", w.url)
		res, err := http.DefaultTransport.RoundTrip(r)
		require.NoError(w.t, err)
		require.NoError(w.t, res.Body.Close())
		for _, c := range res.Cookies() {
			if c.Name == "backfill_session" {
				w.sessions.Store(token, c.Value)
				return c.Value
			}
		}
		w.t.Fatalf("nobody was signed in: %s", res.Status)
	}
	id, err := w.store.SignInByToken(w.t.Context(), token, "127.0.0.1", time.Hour)
	if err != nil {
		return token
	}
	w.sessions.Store(token, id)
	return id
}

func (w *world) send(r *http.Request, token string, header ...string) (*http.Response, string) {
	w.t.Helper()
	if token != "" {
		r.AddCookie(&http.Cookie{Name: "backfill_session", Value: w.session(token)})
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return w.through(&http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}, r)
}

func (w *world) through(client *http.Client, r *http.Request) (*http.Response, string) {
	w.t.Helper()
	res, err := client.Do(r)
	require.NoError(w.t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(w.t, err)
	return res, string(b)
}
