package ui_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

func TestZZWalk(t *testing.T) {
	url, token, console := os.Getenv("WALK_URL"), os.Getenv("WALK_TOKEN"), os.Getenv("WALK_CONSOLE")
	if url == "" {
		t.Skip()
	}
	dir := "/tmp/walk"
	os.MkdirAll(dir, 0o755)
	w := &world{t: t, url: url}
	n := 0
	var b *tab
	shot := func(name string) {
		n++
		b.until(`document.getAnimations().length === 0`)
		b.picture(filepath.Join(dir, fmt.Sprintf("%02d-%s.png", n, name)))
	}
	b = w.open("", "/signin?token="+token)
	b.until(`location.pathname === "/"`)
	b.until(`document.querySelector("#card-maple")`)
	shot("sites")
	b.click(`#site-maple a`)
	b.until(`location.pathname === "/sites/maple"`)
	b.until(`document.querySelector('[data-table="public.students"][data-dialog=ask]')`)
	shot("tables")
	b.click(`[data-table="public.students"][data-dialog=ask]`)
	shot("ask")
	b.click("#ask .primary")
	b.until(`location.pathname.startsWith("/backfills/")`)
	shot("asked")
	b.until(`document.querySelector("#approve")`)
	b.until(`document.querySelector(".window .r:not(.loading)")`)
	shot("review")
	time.Sleep(2 * time.Second)
	shot("review-later")
	b.click(`a[data-effect=overwrite]`)
	b.until(`document.querySelector(".window .r .fill-overwrite")`)
	eval[any](b, `document.querySelectorAll(".window .r")[0].focus(), null`)
	shot("overwrite")
	b.click("#reject")
	shot("rejecting")
	b.click("#rejecting .danger")
	shot("rejecting-empty")
	b.typed("#reject-note", "These overwrites need a look by the registry first.")
	b.click("#rejecting .danger")
	b.until(`document.querySelector(".pill").innerText.includes("Rejected")`)
	shot("rejected")
	b.do(chromedp.Navigate(url + "/sites/maple/queue"))
	time.Sleep(time.Second)
	shot("queue")
	held := eval[string](b, `[...document.querySelectorAll("tr.item")].find((r) => r.innerText.includes("Held"))?.id ?? ""`)
	fmt.Println("held", held)
	if held != "" {
		b.click(fmt.Sprintf(`[id="%s-skip"]`, held))
		shot("skip")
		b.click("#skip .danger")
		time.Sleep(3 * time.Second)
		shot("skip-asked")
		b.do(chromedp.Navigate(url + "/sites/maple/queue?state=skipped"))
		time.Sleep(time.Second)
		shot("skipped")
	}
	b.do(chromedp.Navigate(url + "/sites/maple"))
	b.click(`[data-table="public.students"][data-dialog=ask]`)
	b.click("#ask .primary")
	b.until(`document.querySelector("#approve")`)
	b.until(`document.querySelector(".window .r:not(.loading)")`)
	b.until(`Number(document.querySelector('a[data-effect=unknown]').dataset.rows) === 0`)
	b.click("#approve")
	shot("approving")
	b.click("#approving .primary")
	time.Sleep(200 * time.Millisecond)
	shot("releasing")
	b.until(`document.querySelector(".pill").innerText.includes("Finished")`)
	shot("finished")
	b.until(`document.querySelector("#outcome").innerText.includes("all have arrived")`)
	shot("arrived")
	b.do(chromedp.Navigate(url + "/sites/maple"))
	shot("tables-after")
	b.do(chromedp.Navigate(url + "/sites/maple/queue"))
	shot("queue-after")
	var key string
	if held != "" {
		b.do(chromedp.Navigate(url + "/sites/maple/queue?state=skipped"))
		b.click(`[id$="-backfill"]`)
		b.until(`location.pathname.startsWith("/backfills/")`)
		b.until(`document.querySelector("#approve")`)
		b.until(`document.querySelector(".window .r:not(.loading)")`)
		shot("row-review")
		b.click("#approve")
		b.click("#approving .primary")
		b.until(`document.querySelector("#outcome")?.innerText.includes("arrived")`)
		shot("row-arrived")
		key = strings.TrimSpace(b.text("h1 .mono"))
		fmt.Println("key", key)
		b.until(`document.querySelector("#panel a")`)
		b.click("#panel a")
		b.until(`location.pathname.endsWith("/row")`)
		shot("row-life")
	}
	b.do(chromedp.Navigate(url + "/sites/maple/history"))
	shot("history")
	if key != "" {
		eval[any](b, `document.querySelector(".filters [name=key]").focus(), null`)
		b.do(chromedp.KeyEvent(key))
		b.click(".filters .btn")
		time.Sleep(time.Second)
		shot("history-key")
	}
	b.do(chromedp.Navigate(url + "/sites/maple/audit"))
	shot("audit")
	b.do(chromedp.Navigate(url + "/sites/maple"))
	b.click(`[data-table="public.enrollments"][data-dialog=ask]`)
	b.click("#ask .primary")
	b.until(`document.querySelector("#approve")`)
	link := eval[string](b, `document.querySelector(".line a").href`)
	fmt.Println("link", link, console)
	b.do(chromedp.Navigate(strings.TrimSuffix(console, "/") + "/namespaces/default/workflows"))
	b.until(`document.body.innerText.includes("backfill/maple")`)
	time.Sleep(2 * time.Second)
	b.picture(filepath.Join(dir, "console-list.png"))
	b.do(chromedp.Navigate(link))
	b.until(`document.body.innerText.includes("Backfill")`)
	time.Sleep(4 * time.Second)
	b.picture(filepath.Join(dir, "console-run.png"))
	fmt.Println(eval[string](b, `location.href`))
	require.NotEmpty(t, link)
}
