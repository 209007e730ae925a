package ui_test

import (
	"fmt"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
)

// tabTo presses Tab until the focus is on what a selector names.
func (b *tab) tabTo(selector string) {
	b.t.Helper()
	for range 120 {
		if eval[bool](b, fmt.Sprintf("!!document.activeElement?.matches(%q)", selector)) {
			require.NotEqual(b.t, "none", eval[string](b, `getComputedStyle(document.activeElement).outlineStyle`), "the focus on %s can be seen", selector)
			return
		}
		b.keys(kb.Tab)
	}
	require.FailNow(b.t, "Tab does not reach "+selector)
}

// From the first page to a decision without a pointer, with a reload in the middle.
func TestTheWholePathByKeyboard(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/")
	b.keys(kb.Tab, kb.Enter) // the skip link
	require.Equal(t, "main", eval[string](b, `document.activeElement.id`))
	b.tabTo(`#site-maple a`)
	b.keys(kb.Enter)
	b.until(`location.pathname === "/sites/maple" && document.querySelector("#monitor")`)
	b.tabTo(`[data-dialog="ask"][data-table="public.enrollments"]`)
	b.keys(kb.Enter)
	b.until(`document.querySelector("#ask").open`)
	b.tabTo(`#ask-note`)
	b.do(chromedp.KeyEvent("by keyboard"))
	b.tabTo(`#ask .primary`)
	b.keys(kb.Enter)
	b.until(`location.pathname.startsWith("/backfills/") && document.querySelector(".steps")`)
	path := eval[string](b, `location.pathname`)
	var id int64
	_, err := fmt.Sscanf(path, "/backfills/%d", &id)
	require.NoError(t, err)

	// The agent walks; somebody reloads in the middle.
	w.exec(fmt.Sprintf("request %d", id), `
		UPDATE backfill_control.request SET state = 'IN_PROGRESS', started_at = now(), expected = 3, staged = 1, layout_id = (SELECT min(id) FROM backfill_control.layout) WHERE id = $1`, id)
	_, err = w.db.Exec(t.Context(), `INSERT INTO backfill_control.staged (request_id, n, snap, key, row)
		SELECT $1, n, '10:10:', ARRAY[n::text], ARRAY[n::text, 'Ada', '7A', '2010-01-01', NULL, '2024-08-20', '1.00', NULL, 't'] FROM generate_series(1, 3) n`, id)
	require.NoError(t, err)
	b.until(`document.querySelector(".pill").innerText.includes("In progress")`)
	b.do(chromedp.Reload())
	b.until(`document.querySelector(".going")?.innerText.includes("1 of 3") || document.querySelector(".going")?.innerText.includes("33 %")`)
	w.exec(fmt.Sprintf("request %d", id), `UPDATE backfill_control.request SET state = 'AWAITING_REVIEW', walked_at = now(), staged = 3, revision = 1 WHERE id = $1`, id)
	b.until(`document.querySelector("#approve") && document.querySelector('.window .r[aria-rowindex="4"]:not(.loading)')`)

	b.tabTo(`.window .r`)
	b.keys(kb.End)
	b.until(focusedRow + ` === "4"`)
	b.keys(kb.Enter)
	require.Contains(t, b.text("#panel"), "2024-08-20")
	b.keys(kb.Escape)
	b.tabTo(`#approve`)
	b.keys(kb.Enter)
	b.until(`document.querySelector("#approving").open`)
	require.Contains(t, b.text("#approving"), "3 rows are not judged yet")
	b.tabTo(`#approving .primary`)
	b.keys(kb.Enter)
	b.until(`document.querySelector(".pill").innerText.includes("Releasing")`)
	b.do(chromedp.Reload())
	b.until(`document.querySelector("#outcome")`)
	require.Contains(t, b.text(".steps"), "by ada")
	b.clean()
}

func TestASecondPersonIsRequired(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple")
	require.Contains(t, b.text("#sides"), "may approve it too")
	b.click("#second")
	b.until(`document.querySelector("#sides").innerText.includes("may not approve it")`)
	_, err := w.db.Exec(t.Context(), `UPDATE backfill_control.request SET requested_by = 'ada' WHERE state = 'AWAITING_REVIEW'`)
	require.NoError(t, err)
	b.do(chromedp.Navigate(w.url + fmt.Sprintf("/backfills/%d", w.request("public.students", backfill.AwaitingReview))))
	require.Contains(t, b.text(".decide"), "another reviewer has to approve it")
	require.True(t, eval[bool](b, `document.querySelector("#approve").disabled && !document.querySelector("#reject").disabled`))
	_, body := w.get("/sites/maple", viewerToken)
	require.NotContains(t, body, `id="second"`)
	b.clean()
}

// What came by a signal is told from what an account did.
func TestDecisionsViaTemporalAreMarked(t *testing.T) {
	w := newWorld(t)
	id := w.request("public.guardians", backfill.AwaitingReview)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", id))
	_, err := w.store.Reject(t.Context(), id, decision("bo", 1))
	require.NoError(t, err)
	b.until(`document.querySelector(".steps").innerText.includes("by bo via Temporal")`)
	b.do(chromedp.Navigate(w.url + "/sites/maple/audit?account=bo"))
	require.Contains(t, b.text("#list"), "temporal")
	require.Equal(t, 1, eval[int](b, `document.querySelectorAll("tr.item").length`))
	b.do(chromedp.Navigate(w.url + "/sites/maple/audit?account=nobody"))
	require.Contains(t, b.text("main"), "No such entry")
}

func TestOneRowsLife(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple/history?table=public.students&origin=captured")
	require.Zero(t, eval[int](b, `[...document.querySelectorAll("tr.item")].filter((r) => r.innerText.includes("backfill ")).length`))
	b.click("tr.item .mono a")
	b.until(`document.querySelector("#life li")`)
	life := b.text("#life")
	require.Contains(t, life, "Captured and pushed")
	require.Contains(t, life, "Applied")
	b.do(chromedp.Navigate(w.url + "/sites/maple/row?table=public.students&key=64232"))
	require.Contains(t, b.text("#life"), "Staged")
	b.do(chromedp.Navigate(w.url + "/sites/maple/row?table=public.students&key=nobody"))
	require.Contains(t, b.text("main"), "Nothing is known of this row")
	b.clean()
}

// What was released has not arrived before the receiver says so.
func TestReleasedIsNotArrived(t *testing.T) {
	w := newWorld(t)
	id := w.request("public.enrollments", backfill.Finished)
	_, err := w.db.Exec(t.Context(), `UPDATE backfill_control.entry SET request_id = $1 WHERE request_id IS NOT NULL`, id)
	require.NoError(t, err)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", id))
	require.Regexp(t, `\d+ on the way to central`, b.text("#outcome"))
	require.Contains(t, b.text("#outcome"), "quarantined")
	w.exec("site maple", `UPDATE backfill_control.direction SET applied_seq = (SELECT max(seq) FROM backfill_control.entry)`)
	_, err = w.db.Exec(t.Context(), `DELETE FROM backfill_control.quarantine`)
	require.NoError(t, err)
	w.exec("site maple", `SELECT 1`)
	b.until(`document.querySelector("#outcome").innerText.includes("all have arrived at central")`)
}

// A paused walk has no rate and no end in sight.
func TestPausedHasNoForecast(t *testing.T) {
	w := newWorld(t)
	id := w.request("public.attendance", backfill.InProgress)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", id))
	require.Contains(t, b.text(".going"), "rows/s")
	require.Contains(t, b.text(".going"), "left")
	_, err := w.store.Pause(t.Context(), id, "grace", "the replica is behind", true)
	require.NoError(t, err)
	b.until(`document.querySelector("#waiting").innerText.includes("Paused by grace: the replica is behind")`)
	require.NotContains(t, b.text(".going"), "rows/s")
	require.NotContains(t, b.text(".going"), "left")
}

// The course of a walk is drawn, and stands in a table too.
func TestTheCourseOfAWalk(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", w.request("public.attendance", backfill.InProgress)))
	require.Regexp(t, `Walk: rows over time\. .* rows in 20 min 0 s, of which gates held it back for 3 min 20 s`, eval[string](b, `document.querySelector("#chart-walk title").textContent`))
	require.Equal(t, 8, eval[int](b, `document.querySelectorAll("#chart-walk .held").length`))
	require.Contains(t, b.text(".meta"), "replica (replica_lag) for 3 min 20 s")
	b.click("#chart-walk summary")
	require.GreaterOrEqual(t, eval[int](b, `document.querySelectorAll("#chart-walk tbody tr").length`), 10)
	b.clean()
}

func TestWhatIsAwayIsSaidFirst(t *testing.T) {
	w := newWorld(t)
	_, err := w.db.Exec(t.Context(), `UPDATE backfill_control.attendance SET seen_at = now() - interval '1 hour'`)
	require.NoError(t, err)
	for _, path := range []string{"/", "/sites/maple", fmt.Sprintf("/backfills/%d", w.request("public.rooms", backfill.Pending))} {
		_, body := w.get(path, viewerToken)
		require.Contains(t, body, "o control worker", path)
	}
}
