package ui_test

import (
	"fmt"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
)

// review opens the request of 100,000 rows.
func (w *world) review() *tab {
	w.t.Helper()
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", w.request("public.students", backfill.AwaitingReview)))
	b.until(`document.querySelectorAll(".window .r .swatch").length > 10`)
	return b
}

const focusedRow = `document.activeElement.closest(".window .r")?.getAttribute("aria-rowindex")`

// The list is as tall as its rows, and any place of it is read at once.
func TestStagedRowsComeAsOneScrolls(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	b.until(`document.querySelector("#place").innerText.endsWith("of 100,000")`)
	require.Equal(t, "All 100,000 rows", eval[string](b, `document.querySelector(".tail").textContent`))
	most := 0
	for _, row := range []int{40, 700, 5000, 52345, 99990, 12, 30000} {
		eval[any](b, fmt.Sprintf(`document.querySelector(".window").scrollIntoView(), scrollBy(0, 34 * %d - 200), null`, row))
		b.until(fmt.Sprintf(`document.querySelector('.window .r[aria-rowindex="%d"]:not(.loading)')?.innerText.includes("%d")`, row+1, 64230+row))
		order := eval[[]int](b, `[...document.querySelectorAll(".window .r")].map((r) => Number(r.getAttribute("aria-rowindex")))`)
		for i := 1; i < len(order); i++ {
			require.Equal(t, order[i-1]+1, order[i], "rows stand in reading order, none left out: %v", order)
		}
		most = max(most, len(order))
	}
	require.Less(t, most, 100, "only rows near the window are in the document")
	eval[any](b, `scrollTo(0, document.documentElement.scrollHeight), null`)
	b.until(`document.querySelector('.window .r[aria-rowindex="100001"]:not(.loading)')?.innerText.includes("164230")`)
	b.clean()
}

// A million rows are taller than a document may be.
func TestAMillionRowsScrollToTheirEnd(t *testing.T) {
	w := newWorld(t)
	const rows = 1_000_000
	id := w.request("public.students", backfill.AwaitingReview)
	// Only the rows near where one looks are there; the list knows how many there are.
	_, err := w.db.Exec(t.Context(), `
		INSERT INTO backfill_control.staged (request_id, n, snap, key, row)
		SELECT s.request_id, g.n, '10:10:', ARRAY['k' || g.n], ARRAY['k' || g.n] || s.row[2:] FROM backfill_control.staged s,
		       LATERAL (SELECT n FROM generate_series(499000, 501000) n UNION ALL SELECT n FROM generate_series(999000, 1000000) n) g (n)
		 WHERE s.request_id = $1 AND s.n = 1`, id)
	require.NoError(t, err)
	_, err = w.db.Exec(t.Context(), `UPDATE backfill_control.request SET staged = $2 WHERE id = $1`, id, rows)
	require.NoError(t, err)
	b := w.review()
	height := eval[float64](b, `document.querySelector(".window").getBoundingClientRect().height`)
	require.Equal(t, 4e6, height)

	eval[any](b, `scrollTo(0, document.documentElement.scrollHeight), null`)
	b.until(`document.querySelector('.window .r[aria-rowindex="1000001"]:not(.loading)')?.innerText.includes("k1000000")`)
	require.True(t, eval[bool](b, `(() => { const r = document.querySelector('.window .r[aria-rowindex="1000001"]').getBoundingClientRect(), t = document.querySelector(".tail").getBoundingClientRect(); return Math.abs(r.bottom - t.top) < 2; })()`),
		"the last row stands at the list's end")
	// The middle of the bar is the middle of the rows; from there small steps are small.
	eval[any](b, `document.querySelector(".window").scrollIntoView(), scrollBy(0, 2000000 - innerHeight / 2), null`)
	b.until(`document.querySelector('.window .r[aria-rowindex="500002"]:not(.loading)')?.innerText.includes("k500001")`)
	b.until(`Math.abs(document.querySelector('.window .r[aria-rowindex="500002"]').getBoundingClientRect().top - innerHeight / 2) < 100`)
	eval[any](b, `scrollBy(0, 34 * 5), null`)
	b.until(`Math.abs(document.querySelector('.window .r[aria-rowindex="500007"]').getBoundingClientRect().top - innerHeight / 2) < 100`)
	// By keyboard from one end to the other.
	eval[any](b, `document.querySelector('.window .r[aria-rowindex="500007"]').focus(), null`)
	b.keys(kb.End)
	b.until(focusedRow + ` === "1000001"`)
	b.keys(kb.Home)
	b.until(focusedRow + ` === "2" && document.activeElement.innerText.includes("64231")`)
	b.clean()
}

func TestGoingToAKey(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	find := func(key string) {
		b.typed("#find", key+kb.Enter)
	}
	find("131072")
	b.until(focusedRow + ` === "66843" && document.querySelector("#panel").innerText.includes("131072")`)
	require.Empty(t, b.text("#find-problem"))
	find("9")
	b.until(`document.querySelector("#find-problem").innerText.includes("the next is 64231")`)
	find("999999")
	b.until(`document.querySelector("#find-problem").innerText.includes("its end")`)
	b.until(focusedRow + ` === "100001"`)
	find("abc")
	b.until(`document.querySelector("#find-problem").innerText.includes("no value of the key's type")`)

	// Within one effect it is the first such row from there.
	eval[any](b, `document.querySelector('a[data-effect="overwrite"]').click(), null`)
	b.until(`document.querySelector("#place").innerText.endsWith("of 6,000")`)
	find("131072")
	b.until(`document.querySelector("#find-problem").innerText.includes("the next is 131121")`)
	b.until(focusedRow + ` !== null && document.activeElement.innerText.includes("131121")`)
}

func TestJudgingAgain(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	b.click("#approve")
	b.keys(kb.Escape)
	b.click("#judge")
	b.until(`document.querySelector(".decide").innerText.includes("100,000 unknown")`)
	b.click("#approve")
	require.Contains(t, b.text("#approving"), "100,000 rows are not judged yet")
	b.clean()
}

func TestWholeRowOnHoverFocusAndTap(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	require.Contains(t, b.text("#panel"), "64231", "the first row stands there from the start")

	// Pointing at a row.
	x, y := eval[float64](b, `document.querySelector('.window .r[aria-rowindex="6"]').getBoundingClientRect().x + 200`), eval[float64](b, `document.querySelector('.window .r[aria-rowindex="6"]').getBoundingClientRect().y + 10`)
	b.do(chromedp.MouseEvent(chromedp.MouseMoved, x, y))
	b.until(`document.querySelector("#panel").innerText.includes("64235")`)
	for _, column := range []string{"enrolled_at", "balance", "notes", "active"} {
		require.Contains(t, b.text("#panel"), column, "columns that are not in the list are in the panel")
	}

	// Focus.
	eval[any](b, `document.querySelector('.window .r[aria-rowindex="4"]').focus(), null`)
	b.until(`document.querySelector("#panel").innerText.includes("64233")`)

	// A long value, then all of it.
	eval[any](b, `document.querySelector('.window .r[aria-rowindex="3"]').focus(), null`)
	b.until(`document.querySelector("#panel .all")`)
	b.click("#panel .all")
	require.Greater(t, eval[int](b, `document.querySelector("#panel").innerText.length`), 10000)

	// Both values of an overwrite, the changed columns marked.
	b.click(`a[data-effect="overwrite"]`)
	b.until(`document.querySelector(".window .r .effect")?.innerText.includes("Overwrite")`)
	eval[any](b, `document.querySelector('.window .r[aria-rowindex="2"]').focus(), null`)
	b.until(`document.querySelectorAll("#panel tr.changed").length === 2`)
	require.Contains(t, b.text("#panel tr.changed"), "class")
	require.Contains(t, b.text("#panel thead"), "central now")
	require.Equal(t, []string{"6A", "8D"}, eval[[]string](b, `[...document.querySelector("#panel tr.changed").querySelectorAll("td")].map((d) => d.innerText)`))

	// On a narrow screen a tap opens it as a sheet, and Escape closes it.
	b.do(chromedp.EmulateViewport(360, 740, chromedp.EmulateTouch))
	command(b, emulation.SetTouchEmulationEnabled, emulation.SetTouchEmulationEnabledParams{Enabled: true})
	b.do(chromedp.Reload())
	b.until(`document.querySelectorAll(".window .r .swatch").length > 5`)
	require.False(t, eval[bool](b, `document.querySelector("#panel").classList.contains("shown")`))
	eval[any](b, `document.querySelector('.window .r[aria-rowindex="5"]').scrollIntoView({ block: "center" }), null`)
	b.do(chromedp.Tap(chromedp.CSS(`.window .r[aria-rowindex="5"]`)))
	b.until(`document.querySelector("#panel.shown") && getComputedStyle(document.querySelector("#panel")).visibility === "visible"`)
	w.exec(fmt.Sprintf("request %d", w.request("public.students", backfill.AwaitingReview)), `UPDATE backfill_control.request SET n_insert = n_insert + 1 WHERE state = 'AWAITING_REVIEW' AND staged > 1`)
	b.until(`document.querySelector(".decide").innerText.includes("91,001")`)
	require.True(t, eval[bool](b, `document.querySelector("#panel.shown") !== null`), "an update leaves the sheet open")
	b.click("#panel .close")
	b.until(`!document.querySelector("#panel.shown")`)
	b.clean()
}

func TestRowsByKeyboard(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	// Tab reaches the list once, and leaves it at once.
	eval[any](b, `document.querySelector('a[data-effect="unknown"]').focus(), null`)
	b.keys(kb.Tab, kb.Tab, kb.Tab) // past the key's field and its button
	require.Equal(t, "2", eval[string](b, focusedRow))
	b.keys(kb.ArrowDown, kb.ArrowDown, kb.ArrowUp)
	require.Equal(t, "3", eval[string](b, focusedRow))
	b.until(`document.querySelector("#panel").innerText.includes("64232")`)
	for range 30 {
		b.keys(kb.ArrowDown)
	}
	require.Equal(t, "33", eval[string](b, focusedRow))
	require.True(t, eval[bool](b, `(() => { const r = document.activeElement.getBoundingClientRect(); return r.top > 49 && r.bottom <= document.querySelector(".decide").getBoundingClientRect().top; })()`),
		"the focused row is not under the header or the bar")
	b.keys(kb.End)
	b.until(focusedRow + ` === "100001"`)
	b.keys(kb.ArrowUp)
	b.until(focusedRow + ` === "100000"`)
	b.keys(kb.Enter)
	require.True(t, eval[bool](b, `document.querySelector("#panel").contains(document.activeElement)`))
	b.keys(kb.Escape)
	require.NotEmpty(t, eval[string](b, focusedRow), "Escape goes back to the row")
	b.keys(kb.Home)
	require.Equal(t, "2", eval[string](b, focusedRow))

	// The filter, by key.
	eval[any](b, `document.querySelector('a[data-effect="identical"]').focus(), null`)
	b.keys(kb.Enter)
	b.until(`document.querySelector(".window .r .effect")?.innerText.includes("Identical") && location.search === "?effect=identical"`)
	b.until(`document.querySelector('#effects [aria-current]').dataset.effect === "identical"`)
	require.Contains(t, b.text("#place"), "of 2,000")
	b.clean()
}

func TestApproving(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	b.click("#approve")
	dialog := b.text("#approving")
	for _, part := range []string{"Release 100,000 rows to central?", "91,000", "6,000", "2,000", "91,000 rows will be inserted, 6,000 rows of central will be overwritten", "1,000 rows are not judged yet", "Approving sends 100,000 rows to central"} {
		require.Contains(t, dialog, part)
	}
	b.click("#approving [name=skip_identical]")
	require.Contains(t, b.text("#approving"), "Approving sends 98,000 rows to central")
	b.typed("#approve-note", "read the overwrites")
	b.click("#approving .primary")
	b.until(`document.querySelector(".pill").innerText.includes("Releasing")`)
	require.Contains(t, b.text("main"), "read the overwrites")
	require.Contains(t, b.text("#outcome"), "still to be released")
	require.Greater(t, eval[int](b, `document.querySelectorAll(".window .r .swatch").length`), 10, "the rows stay readable")
	require.False(t, eval[bool](b, `document.querySelector(".decide") !== null`))
	r, err := w.store.Request(t.Context(), w.request("public.students", backfill.Releasing))
	require.NoError(t, err)
	require.True(t, r.SkipIdentical)
	require.Equal(t, "ada", r.ReviewedBy)
	b.clean()
}

func TestRejectingNeedsANote(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	b.click("#reject")
	b.click("#rejecting .danger")
	require.True(t, eval[bool](b, `document.getElementById("rejecting").open && document.querySelector("#reject-note:invalid") !== null`))
	b.typed("#reject-note", "   ")
	b.click("#rejecting .danger")
	b.until(`document.querySelector("#reject-note-wrong")?.innerText.startsWith("Is empty")`)
	id := w.request("public.students", backfill.AwaitingReview)
	w.exec(fmt.Sprintf("request %d", id), `UPDATE backfill_control.request SET note = 'asked on the phone' WHERE id = $1`, id)
	b.until(`document.querySelector("main").innerText.includes("asked on the phone")`)
	require.Contains(t, b.text("#reject-note-wrong"), "Is empty", "what is said beside a field outlives an update of the page")
	require.True(t, eval[bool](b, `document.querySelector("#reject-note").matches("[aria-invalid][aria-describedby=reject-note-wrong]")`))
	b.typed("#reject-note", "not these")
	b.click("#rejecting .danger")
	b.until(`document.querySelector(".pill").innerText.includes("Rejected")`)
	require.Contains(t, b.text("main"), "not these")
	require.Contains(t, b.text("#panel"), "When it was judged, central lacked this row.", "nothing will be released any more")
	require.Greater(t, eval[int](b, `document.querySelectorAll(".window .r .swatch").length`), 10, "the rows stay readable")
}

func TestTwoPeopleDeciding(t *testing.T) {
	w := newWorld(t)
	a, b := w.review(), w.review()
	id := w.request("public.students", backfill.AwaitingReview)

	// The rows change while somebody has the dialog open.
	a.click("#approve")
	w.exec(fmt.Sprintf("request %d", id), `UPDATE backfill_control.request SET revision = revision + 1, n_insert = n_insert - 5, n_overwrite = n_overwrite + 5 WHERE id = $1`, id)
	a.until(`document.querySelector("#approving .problem").innerText.includes("have changed") && document.querySelector("#approving .primary").disabled`)
	a.keys(kb.Escape)
	a.click("#approve")
	require.False(t, eval[bool](a, `document.querySelector("#approving .primary").disabled`), "who has gone back and looked may go on")
	require.Contains(t, a.text("#approving"), "6,005")

	// The other decides meanwhile.
	b.until(`document.querySelector(".decide").innerText.includes("6,005")`)
	b.click("#reject")
	b.typed("#reject-note", "no")
	b.click("#rejecting .danger")
	a.until(`!document.querySelector("#approving") && document.querySelector("#toast").innerText.includes("takes no decision now")`)
	require.Contains(t, a.text(".pill"), "Rejected")
}

// What is typed and ticked stays when the last row is judged meanwhile.
func TestADecisionSurvivesTheLastJudgement(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	b.click("#approve")
	b.click("#approving [name=skip_identical]")
	b.typed("#approve-note", "all but these")
	id := w.request("public.students", backfill.AwaitingReview)
	w.exec(fmt.Sprintf("request %d", id), `UPDATE backfill_control.request SET n_insert = n_insert + 1000 WHERE id = $1`, id)
	b.until(`document.querySelector("#approving").innerText.includes("92,000") && !document.querySelector("#approving").innerText.includes("not judged yet")`)
	require.Equal(t, "all but these", eval[string](b, `document.querySelector("#approve-note").value`))
	require.Contains(t, b.text("#approving"), "Approving sends 98,000 rows to central")
	require.True(t, eval[bool](b, `document.activeElement === document.querySelector("#approve-note")`))
}

// holdPosts has the page's POSTs wait until window.go lets the last one go.
const holdPosts = `(now => { window.fetch = (a, o) => o?.method === "POST" ? new Promise(go => { window.go = () => go(now(a, o)) }) : now(a, o); return null })(window.fetch)`

// An answer that comes when its dialog has been closed is said all the same, and does
// nothing to what the dialog is open for by then.
func TestAnAnswerFindsItsDialogClosed(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	eval[any](b, holdPosts)
	b.click("#approve")
	b.click("#approving .primary")
	b.until(`window.go !== undefined`)
	b.keys(kb.Escape)
	b.until(`!document.getElementById("approving").open`)
	b.click("#approve")
	id := w.request("public.students", backfill.AwaitingReview)
	_, err := w.db.Exec(t.Context(), `UPDATE backfill_control.request SET revision = revision + 1 WHERE id = $1`, id)
	require.NoError(t, err)
	eval[any](b, `(window.go(), null)`)
	b.until(`document.querySelector("#toast").innerText.includes("stands at revision")`)
	require.True(t, eval[bool](b, `document.getElementById("approving").matches(":modal") && !document.querySelector("#approving .problem").innerText.includes("stands at revision")`))
}

// A decision that is refused because the rows have changed cannot be pressed again, nor
// does its dialog send another revision than the one it was opened for.
func TestADecisionIsForTheRowsThatWereRead(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	eval[any](b, holdPosts)
	b.click("#approve")
	b.click("#approving .primary")
	b.until(`window.go !== undefined`)
	id := w.request("public.students", backfill.AwaitingReview)
	w.exec(fmt.Sprintf("request %d", id), `UPDATE backfill_control.request SET revision = revision + 1 WHERE id = $1`, id)
	b.until(`document.querySelector("#approving .problem").innerText.includes("have changed")`)
	eval[any](b, `(window.go(), null)`)
	b.until(`document.querySelector("#approving .problem").innerText.includes("stands at revision")`)
	require.True(t, eval[bool](b, `document.querySelector("#approving .primary").disabled`))
	eval[any](b, `(window.go = undefined, document.querySelector("#approving form").requestSubmit(), null)`)
	b.until(`window.go !== undefined`)
	eval[any](b, `(window.go(), null)`)
	b.until(`document.querySelector("#approving .problem").innerText.includes("stands at revision")`)
	r, err := w.store.Request(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, backfill.AwaitingReview, r.State)
}

func TestSignalsForTheConsole(t *testing.T) {
	w := newWorld(t)
	b := w.review()
	b.click("#console summary")
	require.JSONEq(t, `{"by": "ada", "revision": 3, "note": ""}`, b.text("#payload-approve"))
	require.Contains(t, b.text("#console"), "backfill/maple/public.students/school")
	require.Equal(t, "http://127.0.0.1:8233/namespaces/default/workflows/backfill%2Fmaple%2Fpublic.students%2Fschool",
		eval[string](b, `document.querySelector('.line a').href`))
}

func TestSupersededRowsAreMarked(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", w.request("public.teachers", backfill.Releasing)))
	b.until(`document.querySelector(".window .r.superseded")`)
	require.Regexp(t, `update \d+`, b.text(".window .r.superseded"))
	eval[any](b, `document.querySelector(".window .r.superseded").focus(), null`)
	b.until(`document.querySelector("#panel").innerText.includes("a newer change of this key overtook it")`)
	require.Contains(t, b.text("#panel"), "That was update")
	require.Contains(t, b.text("main"), "a newer change overtook them")
	b.click(`a[data-effect="superseded"]`)
	b.until(`document.querySelector("#place").innerText.endsWith("of 8") && document.querySelectorAll(".window .r.superseded").length === 8`)
	require.Regexp(t, `update \d+`, b.text(".window .r"))
	eval[any](b, `document.querySelector(".window .r").focus(), null`)
	b.click("#panel .verdict a")
	b.until(`document.querySelector("#life")?.innerText.includes("Superseded")`)
	require.Contains(t, b.text("#life"), "Staged")
	b.clean()
}

func TestNoRowAndOneRow(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", w.request("public.rooms", backfill.Pending)))
	b.until(`document.querySelector(".tail").innerText.includes("No rows staged so far")`)
	b = w.open(adminToken, fmt.Sprintf("/backfills/%d", w.request("public.guardians", backfill.AwaitingReview)))
	b.until(`document.querySelector(".tail").innerText === "1 row"`)
	require.Contains(t, b.text(".decide"), "1 row staged")
	b.click("#approve")
	require.Contains(t, b.text("#approving"), "Release 1 row to central?")
}
