package ui_test

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
)

var (
	screenshots = flag.String("screenshots", "", "write the pictures of the documentation to this directory")
	every       = flag.Bool("every", false, "every page, narrow and wide, light and dark")
)

// documented are the pictures that the documentation shows.
var documented = []string{"sites", "tables", "gate", "walking", "review", "review-overwrite", "review-narrow-dark", "approve", "queue", "life"}

// TestScreenshots draws pages: NAME.png is wide and light, NAME-dark, NAME-narrow and
// NAME-narrow-dark are the others.
//
//	go test ./ui -run TestScreenshots -args -screenshots $PWD/docs/img -every
func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("no -screenshots DIR")
	}
	require.NoError(t, os.MkdirAll(*screenshots, 0o755))
	w := newWorld(t)
	review, rejected := w.request("public.students", backfill.AwaitingReview), w.request("public.enrollments", backfill.Rejected)
	ready := `document.querySelector("#rows") === null || document.querySelector(".window .r .swatch") !== null || document.querySelector("#rows .tail").dataset.text.startsWith("No row")`
	for _, p := range []struct {
		name, path string
		act        string
	}{
		{name: "sites", path: "/"},
		{name: "tables", path: "/sites/maple"},
		{name: "table-open", path: "/sites/maple?open=3-school"},
		{name: "gates", path: "/sites/maple", act: `document.querySelector('#gates').scrollIntoView({block: "center"})`},
		{name: "gate", path: "/sites/maple", act: `document.querySelector('[id="g:load:change"]').click()`},
		{name: "gate-wrong", path: "/sites/maple", act: `document.querySelector('#gate-add').click(), document.querySelector('#gate .primary').click()`},
		{name: "untable", path: "/sites/maple?open=8-school", act: `document.querySelector('[id="8-school-remove"]').click()`},
		{name: "proof", path: "/sites/maple/proof"},
		{name: "tables-few", path: "/sites/birch"},
		{name: "tables-away", path: "/sites/oak"},
		{name: "ask", path: "/sites/maple", act: `document.querySelector('[data-dialog=ask]').click()`},
		{name: "review", path: fmt.Sprintf("/backfills/%d", review)},
		{name: "review-overwrite", path: fmt.Sprintf("/backfills/%d?effect=overwrite", review), act: `document.querySelector('.window .r').focus()`},
		{name: "review-sheet", path: fmt.Sprintf("/backfills/%d?effect=overwrite", review), act: `document.querySelector('.window .r').click()`},
		{name: "approve", path: fmt.Sprintf("/backfills/%d", review), act: `document.querySelector('#approve').click()`},
		{name: "review-row", path: fmt.Sprintf("/backfills/%d", w.request("public.guardians", backfill.AwaitingReview))},
		{name: "walking", path: fmt.Sprintf("/backfills/%d", w.request("public.attendance", backfill.InProgress))},
		{name: "pending", path: fmt.Sprintf("/backfills/%d", w.request("public.rooms", backfill.Pending))},
		{name: "releasing", path: fmt.Sprintf("/backfills/%d", w.request("public.teachers", backfill.Releasing))},
		{name: "finished", path: fmt.Sprintf("/backfills/%d", w.request("public.enrollments", backfill.Finished))},
		{name: "rejected", path: fmt.Sprintf("/backfills/%d", rejected)},
		{name: "failed", path: fmt.Sprintf("/backfills/%d", w.request("public.enrollments", backfill.Failed))},
		{name: "queue", path: "/sites/maple/queue"},
		{name: "history", path: "/sites/maple/history"},
		{name: "superseded", path: fmt.Sprintf("/backfills/%d?effect=superseded", w.request("public.teachers", backfill.Releasing)), act: `document.querySelector('.window .r').focus()`},
		{name: "life", path: "/sites/maple/row?table=public.students&key=11656"},
		{name: "audit", path: "/sites/maple/audit"},
		{name: "missing", path: "/backfills/99999"},
	} {
		b := w.open(adminToken, p.path)
		for _, scheme := range []string{"light", "dark"} {
			for _, width := range []int64{1280, 360} {
				name := p.name + map[int64]string{360: "-narrow"}[width] + map[string]string{"dark": "-dark"}[scheme]
				if !*every && !slices.Contains(documented, name) {
					continue
				}
				height := map[int64]int64{1280: 860, 360: 740}[width]
				b.scheme(scheme)
				b.do(chromedp.EmulateViewport(width, height), chromedp.Navigate(w.url+p.path))
				b.until(ready)
				if p.act != "" {
					eval[any](b, p.act+", null")
				}
				b.until(`document.getAnimations().length === 0`)
				b.picture(filepath.Join(*screenshots, name+".png"))
				require.LessOrEqual(t, eval[int](b, `document.documentElement.scrollWidth - innerWidth`), 0, "%s scrolls sideways at %d", p.path, width)
			}
		}
		if p.name != "missing" { // whose status the browser reports as an error
			b.clean()
		}
	}
	if !*every {
		return
	}
	b := w.open("", "/signin")
	b.do(chromedp.EmulateViewport(1280, 860))
	b.picture(filepath.Join(*screenshots, "signin.png"))
}

// TestScreenshotsOfTheConsole draws Temporal's console as operators see it: the
// runs, and one that awaits review.
func TestScreenshotsOfTheConsole(t *testing.T) {
	if *screenshots == "" {
		t.Skip("no -screenshots DIR")
	}
	p := start(t, "dev", "--demo", "--state-dir", t.TempDir(), "--listen", "127.0.0.1:0")
	w := &world{t: t, url: p.printed("ready:")}
	token, console := p.printed("token:"), p.printed("console:")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+"/api/v1/sites/maple/backfills", strings.NewReader(`{"table":"public.students","from":"school"}`))
	require.NoError(t, err)
	res, body := w.send(r, "", "Authorization", "Bearer "+token, "Content-Type", "application/json")
	require.Equal(t, http.StatusCreated, res.StatusCode, body)

	b := w.open(token, strings.TrimPrefix(res.Header.Get("Location"), "/api/v1"))
	b.until(`document.querySelector("#approve")`)
	run := eval[string](b, `document.querySelector(".line a").href`)
	b.do(chromedp.EmulateViewport(1280, 640), chromedp.Navigate(console+"/namespaces/default/workflows"))
	b.until(`document.body.innerText.includes("backfill/maple/public.students/school")`)
	b.picture(filepath.Join(*screenshots, "console-runs.png"))
	b.do(chromedp.EmulateViewport(1280, 1080), chromedp.Navigate(run))
	b.until(`document.body.innerText.includes("Timeline")`)
	b.still() // nothing in the document tells when the timeline is drawn
	b.picture(filepath.Join(*screenshots, "console-run.png"))
}
