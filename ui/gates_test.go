package ui_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/pace"
)

// choose picks an option as a person does: with the keyboard.
func (b *tab) choose(selector, option string) {
	b.t.Helper()
	eval[any](b, fmt.Sprintf(`document.querySelector(%q).focus(), null`, selector))
	b.do(chromedp.KeyEvent(option))
}

// mine is the gate of that name, with the filled ones left out.
func (w *world) mine() (out []pace.Gate) {
	w.t.Helper()
	all, err := w.store.Gates(w.t.Context(), "maple")
	require.NoError(w.t, err)
	for _, g := range all {
		if g.Name == "mine" {
			out = append(out, g.Gate)
		}
	}
	return out
}

func TestGatesAreAddedChangedAndRemoved(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple?open=1-school")
	b.tabTo(`[id="1-school-gate"]`)
	b.keys(kb.Enter)
	b.until(`document.querySelector("#gate").open`)
	require.Contains(t, b.text("#gate"), "Add a gate for public.students")
	require.Equal(t, "public.students", eval[string](b, `document.querySelector("#gate-table").value`))
	require.Equal(t, "false true true", eval[string](b, `["limit", "url", "query"].map((n) => !document.querySelector("#gate-" + n).checkVisibility()).join(" ")`))

	// What is wrong stands beside the field, and the focus goes to the first.
	b.typed("#gate-name", "Load!"+kb.Enter)
	b.until(`document.querySelector("#gate-name-wrong")?.innerText.includes("a to z") && document.querySelector("#gate-limit-wrong")`)
	require.Equal(t, "gate-name", eval[string](b, `document.activeElement.id`))
	require.Equal(t, "gate-name-wrong", eval[string](b, `document.activeElement.getAttribute("aria-describedby")`))
	b.typed("#gate-name", "mine")
	require.Empty(t, b.text("#gate-name-wrong"))
	b.choose("#gate-kind", "An addr")
	b.typed("#gate-url", "db1"+kb.Enter)
	b.until(`document.querySelector("#gate-url-wrong")?.innerText.includes("Write it like http://host:port/path")`)
	require.Empty(t, b.text("#gate .problem"))
	require.Empty(t, w.mine())

	b.choose("#gate-kind", "Fixed")
	require.False(t, eval[bool](b, `document.querySelector("#gate-side").checkVisibility()`))
	b.typed("#gate-limit", "2000")
	b.tabTo("#gate .primary")
	b.keys(kb.Enter)
	b.until(`!document.querySelector("#gate").open && document.getElementById("g:mine")?.innerText.includes("2000 rows a second")`)
	require.Equal(t, []pace.Gate{{Name: "mine", Side: "school", Table: "public.students", Kind: pace.RowsPerSecond, Limit: 2000}}, w.mine())
	require.Contains(t, b.text(`[id="1-school-detail"]`), "mine at most 2000 rows a second")

	// Changed by somebody who keeps the form open while the page updates.
	b.click(`[id="g:mine:change"]`)
	require.True(t, eval[bool](b, `document.querySelector("#gate-name").readOnly`))
	require.Equal(t, "2000", eval[string](b, `document.querySelector("#gate-limit").value`))
	b.choose("#gate-kind", "A number from SQL")
	b.typed("#gate-query", "SELECT 1")
	w.exec("site maple", `UPDATE backfill_control.table_side SET row_count = 164300 WHERE row_count = 164230`)
	b.until(`document.body.innerText.includes("164,300")`)
	require.Equal(t, "SELECT 1", eval[string](b, `document.querySelector("#gate-query").value`))
	require.True(t, eval[bool](b, `document.querySelector("#gate-name").readOnly && !document.querySelector("#gate-url").checkVisibility()`))
	b.typed("#gate-limit", "0.5")
	b.choose("#gate-side", "central")
	b.choose("#gate-table", "all tables")
	b.click("#gate .primary")
	b.until(`!document.querySelector("#gate").open && document.getElementById("g:mine")?.innerText.includes("has not been measured yet")`)
	require.Equal(t, []pace.Gate{{Name: "mine", Side: "central", Kind: pace.SQL, Limit: 0.5, Query: "SELECT 1"}}, w.mine())

	b.click(`[id="g:mine:remove"]`)
	require.Contains(t, b.text("#ungate"), "Remove gate mine?")
	b.click("#ungate .danger")
	b.until(`!document.getElementById("g:mine")`)
	require.Empty(t, w.mine())
}

func TestOnlyAdminsConfigure(t *testing.T) {
	w := newWorld(t)
	const buttons = `document.querySelectorAll('[data-dialog="gate"], [data-dialog="ungate"], [data-dialog="untable"], [data-dialog="table"]').length`
	b := w.open(viewerToken, "/sites/maple?open=1-school")
	require.Contains(t, b.text("#gates"), "Number of running sessions on school is over the limit of 20: it is 31")
	require.Zero(t, eval[int](b, buttons))
	require.Equal(t, 10, eval[int](w.open(adminToken, "/sites/maple?open=1-school"), buttons))
}

func TestTablesAreAdded(t *testing.T) {
	w := newWorld(t)
	w.exec("site maple", `UPDATE backfill_control.side SET agent_seen_at = now() + interval '1 h'`) // they are waited for
	b := w.open(adminToken, "/sites/maple")
	b.tabTo("#table-add")
	b.keys(kb.Enter)
	b.until(`document.querySelector("#table").open`)
	require.False(t, eval[bool](b, `document.querySelector("#table-conflict").checkVisibility()`), "one side sends: there is nothing to decide")

	// What is wrong with the name stands beside it.
	wrong := func(name, why string) {
		t.Helper()
		b.typed("#table-name", name+kb.Enter)
		b.until(fmt.Sprintf(`document.querySelector("#table-name-wrong")?.innerText.includes(%q)`, why))
		require.Equal(t, "table-name", eval[string](b, `document.activeElement.id`))
		require.Empty(t, b.text("#table .problem"))
	}
	wrong("orders", "write schema.table")
	wrong("public.students", "The site has this table already")
	b.typed("#table-name", "public.nope"+kb.Enter)
	require.Eventually(t, func() bool {
		tag, err := w.db.Exec(t.Context(), `UPDATE backfill_control.table_side SET problem = 'there is no table public.nope' WHERE table_id = (SELECT id FROM backfill_control.table_config WHERE name = 'public.nope') AND side = 'school'`)
		return err == nil && tag.RowsAffected() == 1
	}, time.Minute, 5*time.Millisecond)
	b.until(`document.querySelector("#table-name-wrong")?.innerText.includes("there is no table public.nope")`)
	_, err := w.store.Table(t.Context(), "maple", "public.nope")
	require.Equal(t, backfill.NotFound, backfill.CodeOf(err), "what was refused is not kept")

	b.typed("#table-name", `public."Späte Züge"`)
	b.choose("#table-from", "both")
	b.until(`document.querySelector("#table-conflict").checkVisibility()`)
	b.choose("#table-conflict", "a person")
	b.typed("#table-order", "7"+kb.Enter)
	b.until(`!document.querySelector("#table").open && document.querySelector("#monitor").innerText.includes("Späte Züge")`)
	require.Equal(t, "table-add", eval[string](b, `document.activeElement.id`))
	got, err := w.store.Table(t.Context(), "maple", `public."Späte Züge"`)
	require.NoError(t, err)
	require.Equal(t, []string{"central", "school"}, got.CapturedFrom)
	require.Equal(t, backfill.Quarantine, got.Conflicts())
	require.Equal(t, 7, got.ApplyOrder)
	students, err := w.store.Table(t.Context(), "maple", "public.students")
	require.NoError(t, err)
	require.Equal(t, 1, students.ApplyOrder, "a table that is there stays as it is")
}

// What had the focus may go with an update: it goes on beside it, not to the top of the page.
func TestTheFocusStaysNearWhatIsRemoved(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple?open=8-school")
	focus := func(id string) {
		t.Helper()
		b.until(fmt.Sprintf(`document.activeElement.id === %q`, id))
	}
	// Acted on: the row goes, the next one has the focus.
	b.click(`[id="8-school-remove"]`)
	b.until(`document.querySelector("#untable").open`)
	b.click("#untable .danger")
	b.until(`!document.getElementById("8-school")`)
	focus("9-school-toggle")
	// By somebody else, and the last of its list: the one before.
	eval[any](b, `document.getElementById("g:slow:change").focus(), null`)
	require.NoError(t, w.store.DeleteGate(t.Context(), "ada", "maple", "slow"))
	focus("g:load:change")
	// None is left: the part of the page it was in.
	for _, name := range []string{"lag", "load"} {
		require.NoError(t, w.store.DeleteGate(t.Context(), "ada", "maple", name))
	}
	focus("gate-add")
	// An update that takes nothing away takes the focus nowhere.
	eval[any](b, `document.getElementById("1-school-toggle").focus(), null`)
	w.exec("site maple", `UPDATE backfill_control.table_side SET row_count = 164300 WHERE row_count = 164230`)
	b.until(`document.body.innerText.includes("164,300")`)
	focus("1-school-toggle")
	b.clean()

	// A change that was retried has no button any more.
	b = w.open(adminToken, "/sites/maple/queue?state=quarantined")
	b.until(`document.querySelector("button[data-post$='/retry']")`)
	row := eval[string](b, `(b => { b.focus(); return b.closest("tr").id })(document.querySelector("button[data-post$='/retry']"))`)
	b.keys(kb.Enter)
	b.until(fmt.Sprintf(`!document.getElementById(%q)?.querySelector("button[data-post$='/retry']")`, row))
	require.NotEqual(t, "BODY", eval[string](b, `document.activeElement.tagName`))
}

func TestTablesAreRemoved(t *testing.T) {
	w := newWorld(t)
	b := w.open(adminToken, "/sites/maple?open=1-school&open=8-school")
	remove := func(id string) {
		b.click(`[id="` + id + `-remove"]`)
		b.click("#untable .danger")
	}
	remove("1-school")
	b.until(`document.querySelector("#untable .problem").innerText.includes("decide or cancel it first")`)
	require.Equal(t, fmt.Sprintf("/backfills/%d", w.request("public.students", backfill.AwaitingReview)), eval[string](b, `document.querySelector("#untable .problem a").pathname`))
	b.keys(kb.Escape)
	b.click(`[id="8-school-remove"]`)
	require.Contains(t, b.text("#untable h2"), `Remove "Order Items"."select" from maple?`)
	b.click("#untable [data-close]")
	require.Equal(t, 9, eval[int](b, `document.querySelectorAll("tr.item .expand").length`), "nothing happens before it is confirmed")
	remove("8-school")
	b.until(`document.querySelectorAll("tr.item .expand").length === 8`)
	require.NotContains(t, b.text("#monitor"), "Order Items")
	_, err := w.store.Table(t.Context(), "maple", `"Order Items"."select"`)
	require.Equal(t, backfill.NotFound, backfill.CodeOf(err))
}
