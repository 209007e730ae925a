package ui_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
)

// cell is the text of what stands for a table's backfill.
func (b *tab) cell(table string) string {
	b.t.Helper()
	return eval[string](b, fmt.Sprintf(`[...document.querySelectorAll("tr.item")].find((r) => r.querySelector("th").innerText.includes(%q))?.lastElementChild.innerText ?? "no such table"`, table))
}

func TestButtonShowsEveryState(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple")
	for table, want := range map[string]string{
		"public.students": "Review 100,000", "public.attendance": "In progress 43 %", "public.teachers": "Releasing 64 %", "public.rooms": "Pending",
		"public.enrollments": "Backfill",
	} {
		require.Equal(t, want, strings.TrimSpace(b.cell(table)), table)
	}
	for table, want := range map[string][]string{
		"public.guardians": {"school must report more rows than central", "row 48211 · Review 1"}, "public.grades": {"not active", "enable update"},
		"select": {"capture is not installed"}, "public.messages": {"has not looked at the table yet", "not been counted"},
	} {
		got := b.cell(table)
		require.Contains(t, got, "Backfill")
		for _, part := range want {
			require.Contains(t, got, part, "%s: the reason stands beside the button, without pointing at it", table)
		}
	}
	require.Equal(t, 4, eval[int](b, `document.querySelectorAll("tr.item button[disabled][aria-describedby]").length`))
	for table, state := range map[string]backfill.State{"public.students": backfill.AwaitingReview, "public.rooms": backfill.Pending} {
		id := w.request(table, state)
		require.True(t, eval[bool](b, fmt.Sprintf(`document.querySelector('a.btn[href="/backfills/%d"]') !== null`, id)), "the button leads to the request")
	}

	w.exec("request "+fmt.Sprint(w.request("public.attendance", backfill.InProgress)), `
		UPDATE backfill_control.request SET paused = true WHERE state = 'IN_PROGRESS'`)
	b.until(`document.body.innerText.includes("In progress 43 %, paused")`)
	b.clean()
}

func TestAskingForABackfill(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple")
	ask := `[data-dialog="ask"][data-table="public.enrollments"]`
	b.click(ask)
	require.Contains(t, b.text("#ask"), "Backfill public.enrollments")
	require.Contains(t, b.text("#ask"), "school reports 223,327 rows more than central")
	b.keys(kb.Escape)
	require.False(t, eval[bool](b, `document.getElementById("ask").open`))
	require.True(t, eval[bool](b, `document.activeElement.matches(`+"`"+ask+"`"+`)`), "focus goes back to the button")

	// What no longer holds is said in the dialog, condition by condition.
	b.click(ask)
	_, err := w.db.Exec(t.Context(), `UPDATE backfill_control.table_config SET active = false, op_update = false WHERE name = 'public.enrollments'`)
	require.NoError(t, err)
	b.click("#ask .primary")
	b.until(`document.querySelector("#ask .problem").innerText.includes("operations")`)
	require.Contains(t, b.text("#ask .problem"), "the table is not active")

	_, err = w.db.Exec(t.Context(), `UPDATE backfill_control.table_config SET active = true, op_update = true WHERE name = 'public.enrollments'`)
	require.NoError(t, err)
	b.typed("#ask-note", "history before <b>March</b>")
	b.click("#ask .primary")
	b.until(`location.pathname.startsWith("/backfills/") && document.querySelector(".steps")`)
	require.Contains(t, b.text("main"), "history before <b>March</b>")
	require.Contains(t, b.text(".pill"), "Pending")

	// Somebody who still sees the button is led to the request that is open now.
	var open int64
	require.NoError(t, w.db.QueryRow(t.Context(), `SELECT max(id) FROM backfill_control.request`).Scan(&open))
	late := w.open(adminToken, "/sites/maple")
	require.Contains(t, late.cell("public.enrollments"), "Pending")
	eval[any](late, `Object.assign(document.querySelector('[data-dialog="ask"]') ?? document.querySelector("tr.item .expand"), {}), (() => {
		const button = document.createElement("button");
		Object.assign(button.dataset, { dialog: "ask", table: "public.enrollments", from: "school", to: "central" });
		document.querySelector("#main").append(button); button.click(); })(), null`)
	late.click("#ask .primary")
	late.until(`document.querySelector("#ask .problem a")?.pathname === "/backfills/` + fmt.Sprint(open) + `"`)
}

func TestOpenRowSurvivesUpdatesAndReloads(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple")
	b.click(`button[aria-controls="3-school-detail"]`)
	b.until(`document.querySelector("#\\33 -school-detail").innerText.includes("Apply order")`)
	detail := b.text(`[id="3-school-detail"]`)
	for _, part := range []string{"create, update, delete", "bigint", "enrolled_at timestamp with time zone", "counted", "Finished", "Failed", "Rejected", "801,200 staged, 790,311 released"} {
		require.Contains(t, detail, part)
	}
	require.Equal(t, "true", eval[string](b, `document.activeElement.getAttribute("aria-expanded")`), "focus stays on the button")
	w.exec("site maple", `UPDATE backfill_control.table_side SET row_count = 1204400 WHERE row_count = 1204331`)
	b.until(`document.body.innerText.includes("1,204,400")`)
	require.Contains(t, b.text(`[id="3-school-detail"]`), "Apply order")
	require.True(t, eval[bool](b, `document.activeElement.id === "3-school-toggle"`))
	b.do(chromedp.Reload())
	require.Contains(t, b.text(`[id="3-school-detail"]`), "Apply order")
	b.click(`button[aria-controls="3-school-detail"]`)
	b.until(`document.querySelector("#\\33 -school-detail").hidden && location.search === ""`)
	b.clean()
}

func TestLiveProgress(t *testing.T) {
	w := newWorld(t)
	id := w.request("public.attendance", backfill.InProgress)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", id))
	b.click("#console summary")
	b.click("#cancel")
	b.typed("#cancel-note", "half a wo")
	for _, n := range []int{4000000, 5000000} {
		w.exec(fmt.Sprintf("request %d", id), `UPDATE backfill_control.request SET staged = $2, resume_key = '{1,2026-01-01}' WHERE id = $1`, id, n)
		b.until(fmt.Sprintf(`document.querySelector(".going").innerText.includes("%d,000,000")`, n/1000000))
	}
	require.True(t, eval[bool](b, `document.getElementById("cancelling").open`), "an open dialog stays")
	require.Equal(t, "half a wo", eval[string](b, `document.getElementById("cancel-note").value`))
	require.True(t, eval[bool](b, `document.activeElement.id === "cancel-note"`))
	require.True(t, eval[bool](b, `document.getElementById("console").open`))
	require.Equal(t, "In progress 50 %", b.text("#announce"), "progress is announced, a tenth at a time")
	b.keys(kb.Escape)

	w.exec(fmt.Sprintf("request %d", id), `
		UPDATE backfill_control.request SET state = 'AWAITING_REVIEW', walked_at = now(), staged = 1000, waiting = '', revision = revision + 1 WHERE id = $1`, id)
	b.until(`document.querySelector("#approve") && document.title.includes("awaiting review")`)
	require.Contains(t, b.text(".decide"), "1,000 rows staged")
	b.clean()
}

func TestPauseAndResume(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", w.request("public.teachers", backfill.Releasing)))
	b.click("#pause")
	b.until(`document.querySelector("#resume") && document.body.innerText.includes("Paused by ada")`)
	b.click("#resume")
	b.until(`document.querySelector("#pause")`)
	b.click("#cancel")
	require.Contains(t, b.text("#cancelling"), "What was released stays at school")
	b.click("#cancelling .danger")
	b.until(`document.body.innerText.includes("cancelled by ada")`)
	require.Contains(t, b.text("main"), "not sent")
	b.clean()
}

func TestStreamAwayIsSaidAndMended(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple")
	b.until(`document.documentElement.dataset.connection !== "away"`)
	address := strings.TrimPrefix(w.url, "http://")
	w.stop()
	b.until(`document.querySelector("#connection").innerText.includes("may be old")`)
	require.Equal(t, "status", eval[string](b, `document.querySelector("#connection").getAttribute("role")`))
	w.exec("site maple", `UPDATE backfill_control.table_side SET row_count = 1204777 WHERE row_count = 1204331`)
	listener, err := net.Listen("tcp", address)
	require.NoError(t, err)
	w.serve(listener)
	b.until(`document.querySelector("#connection").innerText === "" && document.body.innerText.includes("1,204,777")`)
}

func TestSignOutEndsOpenPages(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple")
	b.click(".who button")
	b.until(`location.pathname === "/signin"`)
	b.do(chromedp.Navigate(w.url + "/sites/maple"))
	require.Equal(t, "/signin", eval[string](b, `location.pathname`))
	b.typed("#token", adminToken+kb.Enter)
	b.until(`location.pathname === "/sites/maple"`)
}

func TestLinksFromElsewhereFindTheSession(t *testing.T) {
	w := newWorld(t)
	// For cookies localhost is another site than 127.0.0.1.
	chat := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(out, `<a id="link" href="%s/sites/maple?open=3-school">look at this</a> <a id="trap" href="%s/signin?token=%s">free rows</a>`, w.url, w.url, viewerToken)
	}))
	defer chat.Close()
	elsewhere := strings.Replace(chat.URL, "127.0.0.1", "localhost", 1)
	b := w.open(adminToken, "/")
	b.do(chromedp.Navigate(elsewhere))
	b.click("#link")
	b.until(`location.pathname === "/sites/maple" && document.body.innerText.includes("Apply order")`)
	b.do(chromedp.Navigate(elsewhere))
	b.click("#trap")
	b.until(`location.pathname === "/signin" && document.body.innerText.includes("another site cannot sign you in")`)
	b.do(chromedp.Navigate(w.url + "/"))
	require.Contains(t, b.text(".account"), "ada")
}

func TestQueueActions(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple/queue")
	b.click("#q371-retry")
	b.until(`document.querySelector("#toast").innerText.includes("retry change 371")`)
	b.until(`document.querySelector("#q371").innerText.includes("Retry asked for by ada") && !document.querySelector("#q371-retry")`)
	wish := func(seq int) (wish string) {
		require.NoError(t, w.db.QueryRow(t.Context(), `SELECT coalesce(wish, '') FROM backfill_control.quarantine WHERE seq = $1`, seq).Scan(&wish))
		return wish
	}
	require.Equal(t, "retry", wish(371))
	b.click("#q372-skip")
	require.Contains(t, b.text("#skip"), "Skip change 372?")
	require.Empty(t, wish(372), "nothing happens before it is confirmed")
	b.click("#skip .danger")
	b.until(`document.querySelector("#toast").innerText.includes("Asked to skip")`)
	require.Equal(t, "skip", wish(372))

	b.do(chromedp.Navigate(w.url + "/sites/maple/queue?state=skipped"))
	b.click(`[id$="-backfill"]`)
	b.until(`location.pathname.startsWith("/backfills/") && document.querySelector(".steps")`)
	require.Contains(t, b.text("h1"), "public.students row")
	b.do(chromedp.Navigate(w.url + "/sites/maple"))
	require.Contains(t, b.cell("public.students"), "Review 100,000")
	require.Regexp(t, `row \d+ · Pending`, b.cell("public.students"))
	b.clean()
}

func TestStoredMarkupIsInert(t *testing.T) {
	w := newWorld(t)
	review := w.request("public.students", backfill.AwaitingReview)
	b := w.open(adminToken, "/")
	for _, path := range []string{"/", "/sites/maple?open=3-school", "/sites/maple/queue", "/sites/maple/queue?state=skipped", "/sites/maple/history", "/sites/maple/audit",
		fmt.Sprintf("/backfills/%d", review), fmt.Sprintf("/backfills/%d", w.request("public.enrollments", backfill.Rejected))} {
		b.do(chromedp.Navigate(w.url + path))
		if strings.HasPrefix(path, "/backfills") {
			b.until(`document.querySelectorAll(".window .r .swatch").length > 2`)
			eval[any](b, `document.querySelectorAll(".window .r")[2].focus(), null`)
			b.until(`document.querySelector("#panel").innerText.includes("<img src=x")`)
		}
		require.NotContains(t, eval[string](b, `document.title`), "owned", path)
		require.Zero(t, eval[int](b, `document.querySelectorAll("#main img, #main script, #panel img").length`), path)
		b.clean()
	}
}

func TestDarkAndLightAreReadable(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple")
	background := map[string]string{}
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		background[scheme] = eval[string](b, `getComputedStyle(document.documentElement).backgroundColor`)
		// Text colours against what they stand on, by the formula of WCAG 2.
		poor := eval[[]string](b, `(() => {
			const style = getComputedStyle(document.documentElement);
			const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
			const probe = document.body.appendChild(document.createElement("i"));
			const light = (name) => {
				probe.style.color = "var(" + name + ")";
				canvas.fillStyle = getComputedStyle(probe).color;
				canvas.fillRect(0, 0, 1, 1);
				const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
				return 0.2126 * r + 0.7152 * g + 0.0722 * b;
			};
			const poor = [];
			for (const [text, under] of [["text", "bg"], ["text", "surface"], ["muted", "bg"], ["muted", "surface"], ["muted", "sunken"], ["muted", "raised"],
				["accent", "surface"], ["accent", "accent-soft"], ["on-accent", "accent-fill"], ["good", "surface"], ["good", "good-soft"], ["warn", "surface"], ["warn", "warn-soft"],
				["bad", "surface"], ["bad", "bad-soft"], ["on-accent", "bad-fill"]]) {
				const [a, b] = [light("--" + text), light("--" + under)].sort((x, y) => y - x);
				const ratio = (a + 0.05) / (b + 0.05);
				if (ratio < 4.5) poor.push(text + " on " + under + ": " + ratio.toFixed(2));
			}
			probe.remove();
			return poor;
		})()`)
		require.Empty(t, poor, scheme)
	}
	require.NotEqual(t, background["light"], background["dark"])
}

func TestNothingScrollsSideways(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/")
	for _, path := range w.everyPage() {
		b.do(chromedp.Navigate(w.url + path))
		b.until(`!document.querySelector(".rowgrid + .tail") || document.querySelector(".rowgrid + .tail").innerText.includes("ow")`)
		for _, width := range []int64{360, 768, 1024, 1261, 1920} {
			b.do(chromedp.EmulateViewport(width, 800))
			require.LessOrEqual(t, eval[int](b, `document.documentElement.scrollWidth - innerWidth`), 0, "%s at %d", path, width)
			require.LessOrEqual(t, eval[int](b, `Math.max(0, ...[...document.querySelectorAll(".scroll")].map((s) => s.scrollWidth - s.clientWidth))`), 0, "the table of %s at %d", path, width)
		}
	}
}

// TestEverythingHasANameAndARole asks Chromium's accessibility tree, which is
// what screen readers are given.
func TestEverythingHasANameAndARole(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/")
	command(b, accessibility.Enable, cdp.Empty{})
	for _, path := range append(w.everyPage(), "/signin") {
		if path == "/signin" {
			b = w.open("", path)
		} else {
			b.do(chromedp.Navigate(w.url + path))
			b.until(`!document.querySelector(".rowgrid + .tail") || document.querySelector(".rowgrid + .tail").innerText.includes("ow")`)
		}
		nodes := b.tree()
		roles := map[string]int{}
		for _, n := range nodes {
			roles[n.role]++
			switch n.role {
			case "button", "link", "textbox", "searchbox", "combobox", "checkbox", "dialog", "grid", "table", "navigation", "progressbar", "columnheader":
				require.NotEmpty(t, strings.TrimSpace(n.name), "%s: a %s without a name", path, n.role)
			}
		}
		require.Equal(t, 1, roles["main"], path)
		if path == "/signin" {
			continue
		}
		require.GreaterOrEqual(t, roles["heading"], 1, path)
		if path == "/sites/maple" {
			require.Equal(t, 2, roles["table"], "the tables, and the gates")
			require.Equal(t, 9+6, roles["columnheader"])
			require.Equal(t, 9+3, roles["rowheader"])
		}
	}
}

type node struct{ role, name string }

func (b *tab) tree() (out []node) {
	b.t.Helper()
	b.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		res, err := cdp.Call(ctx, target, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
		for _, n := range res.Nodes {
			if !n.Ignored {
				out = append(out, node{text(n.Role), text(n.Name)})
			}
		}
		return err
	}))
	return out
}

func text(v *accessibility.Value) string {
	if v == nil {
		return ""
	}
	return strings.Trim(string(v.Value), `"`)
}

// A part that goes away moves nothing that stands behind it: an open dialog stays what
// it is, and the focus where it is.
func TestAPartThatGoesMovesNothing(t *testing.T) {
	w := newWorld(t)
	w.exec("site maple", `UPDATE backfill_control.side SET problem = 'the disk is full' WHERE site = 'maple'`)
	b := w.open(adminToken, "/sites/maple")
	b.until(`document.querySelector("#notices")?.innerText.includes("the disk is full")`)
	b.click("[data-dialog=table]")
	b.typed("#table [name=table]", "public.rooms")
	w.exec("site maple", `UPDATE backfill_control.side SET problem = NULL, agent_seen_at = now() WHERE site = 'maple'`)
	b.until(`!document.querySelector("#notices")?.innerText.includes("the disk is full")`)
	require.True(t, eval[bool](b, `document.getElementById("table").matches(":modal")`), "the dialog is still in front")
	require.Equal(t, "public.rooms", eval[string](b, `document.activeElement.value`))
	require.Empty(t, b.text("#toast"))
}
