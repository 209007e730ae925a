package ui_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// agents answers the trials of mappings as the agents of both sides would, with what is
// wrong, or with one row.
func (w *world) agents(wrong func(backfill.Mapping) []backfill.FieldError) {
	column := row.Column{Name: "email", Type: "text", Declared: "text"}
	layout := &row.Layout{Columns: []row.Column{{Name: "id", Type: "bigint", Declared: "bigint"}, column}, Key: []string{"id"}}
	made := &row.Mapping{Key: []string{"id"}, Columns: []row.Mapped{{Column: layout.Columns[0], From: "id"}, {Column: column, Expr: "lower(email)", Uses: []string{"email"}}}}
	rows, _ := json.Marshal([]map[string]any{{"source": []string{"1", "A@B"}, "result": []string{"1", "a@b"}}})
	go func() {
		for w.t.Context().Err() == nil {
			all, _ := w.store.Trials(w.t.Context(), "maple", "school")
			for _, t := range all {
				t.Layout, t.Made, t.Rows, t.Fields = layout, made, rows, wrong(t.Mapping)
				t.Agreed = len(t.Fields) == 0
				_ = w.store.PutTrial(w.t.Context(), t)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
}

// noMail is what is wrong with a mapping unless it takes email from email.
func noMail(m backfill.Mapping) []backfill.FieldError {
	if m.Columns["email"] == "lower(email)" {
		return nil
	}
	return []backfill.FieldError{{Field: "mapping.columns.email", Message: "on central: column \"mail\" does not exist"}}
}

func TestAMappingIsTriedAndSetInThePage(t *testing.T) {
	w := newWorld(t)
	w.agents(noMail)
	b := w.open(adminToken, "/sites/maple?open=1-school")
	b.tabTo(`[id="1-school-mapping"]`)
	b.keys(kb.Enter)
	b.until(`document.querySelector("#mapping").open`)
	b.typed("#mapping-columns", "email = lower(mail)")
	b.click("#mapping-try")
	b.until(`document.querySelector("#mapping-columns-wrong")?.innerText.includes('email: on central: column "mail" does not exist')`)
	b.typed("#mapping-columns", "email = lower(email)")
	b.typed("#mapping-drop", "legacy, other")
	b.typed("#mapping-prove", "whole: name::text => first || last")
	b.click("#mapping-try")
	b.until(`document.querySelector("#mapping .tried")?.innerText.includes("email: a@b")`)
	require.Contains(t, b.text("#mapping .tried"), "email: A@B")
	require.Nil(t, w.table().Mapping, "nothing is set by trying it")

	b.tabTo("#mapping .primary")
	b.keys(kb.Enter)
	b.until(`!document.querySelector("#mapping").open && document.body.innerText.includes("by mapping 1")`)
	require.Equal(t, &backfill.Mapping{Columns: map[string]string{"email": "lower(email)"}, Drop: []string{"legacy", "other"},
		Prove: map[string]backfill.Claim{"whole": {Source: "name::text", Target: "first || last"}}}, w.table().Mapping)
	require.Contains(t, b.text(`[id="1-school-detail"]`), "email = lower(email)")

	// It is changed from what it is, and an empty one removes it.
	b.click(`[id="1-school-mapping"]`)
	b.until(`document.querySelector("#mapping-drop").value === "legacy, other" && document.querySelector("#mapping-prove").value === "whole: name::text => first || last"`)
	b.typed("#mapping-prove", kb.Delete)
	b.typed("#mapping-columns", kb.Delete)
	b.typed("#mapping-drop", kb.Delete)
	b.click("#mapping .primary")
	b.until(`!document.querySelector("#mapping").open && !document.body.innerText.includes("by mapping")`)
	require.Nil(t, w.table().Mapping)
}

// A table of another shape is added in one go.
func TestATableIsAddedWithItsMapping(t *testing.T) {
	w := newWorld(t)
	w.agents(noMail)
	b := w.open(adminToken, "/sites/maple")
	b.click("#table-add")
	b.typed("#table-name", "public.people")
	b.click("#table summary")
	b.typed("#table-mapping-target", "public.people_v2")
	b.typed("#table-mapping-columns", "email = lower(mail)")
	b.click("#table .primary")
	b.until(`document.querySelector("#table-mapping-columns-wrong")?.innerText.includes('column "mail" does not exist')`)
	b.typed("#table-mapping-columns", "email = lower(email)")
	b.click("#table .primary")
	b.until(`!document.querySelector("#table").open && document.querySelector("#monitor").innerText.includes("public.people")`)
	added, err := w.store.Table(t.Context(), "maple", "public.people")
	require.NoError(t, err)
	require.Equal(t, &backfill.Mapping{Target: "public.people_v2", Columns: map[string]string{"email": "lower(email)"}}, added.Mapping)

	// What is folded away is not sent.
	b.click("#table-add")
	b.typed("#table-name", "public.corridors")
	b.typed("#table-mapping-target", "public.halls")
	b.click("#table summary")
	b.click("#table .primary")
	b.until(`!document.querySelector("#table").open && document.querySelector("#monitor").innerText.includes("public.corridors")`)
	added, err = w.store.Table(t.Context(), "maple", "public.corridors")
	require.NoError(t, err)
	require.Nil(t, added.Mapping)
}

func (w *world) table() *backfill.Table {
	w.t.Helper()
	t, err := w.store.Table(w.t.Context(), "maple", "public.students")
	require.NoError(w.t, err)
	return t
}

func TestAReviewShowsWhatAMappingMakes(t *testing.T) {
	w := newWorld(t)
	id := w.request("public.students", backfill.AwaitingReview)
	layout, err := w.store.PutLayout(t.Context(), &row.Layout{Columns: []row.Column{{Name: "nr", Type: "bigint"}, {Name: "last_name", Type: "text"}}, Key: []string{"nr"}})
	require.NoError(t, err)
	w.exec("site maple", `UPDATE backfill_control.request SET result_layout = $2 WHERE id = $1`, id, layout)
	w.exec("site maple", `DELETE FROM backfill_control.effect WHERE request_id = $1 AND n <= 2`, id)
	w.exec("site maple", `
		INSERT INTO backfill_control.effect (request_id, n, effect, receiver, result, problem)
		SELECT request_id, n, CASE n WHEN 1 THEN 'o' ELSE '?' END::"char", CASE n WHEN 1 THEN ARRAY[key[1], 'Old'] END, CASE n WHEN 1 THEN ARRAY[key[1], 'New'] END, CASE n WHEN 2 THEN 'division by zero' END
		  FROM backfill_control.staged WHERE request_id = $1 AND n <= 2`, id)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", id))
	b.until(`document.querySelector(".window .r .swatch")`)
	b.click(`.window .r[aria-rowindex="2"]`)
	b.until(`document.querySelector("#panel table tr.changed")?.innerText.includes("last_name")`)
	require.Contains(t, b.text("#panel"), "Old")
	require.Contains(t, b.text("#panel"), "New")
	require.Contains(t, b.text("#panel"), "what the mapping makes")
	require.Contains(t, b.text("#panel"), "Read on school")
	require.Contains(t, b.text("#panel"), "enrolled_at", "the row that was read stands below")
	b.click(`.window .r[aria-rowindex="3"]`)
	b.until(`document.querySelector("#panel .verdict").innerText.includes("The mapping makes nothing of this row: division by zero.")`)
}

func TestOneStatementIsSuggestedWhereItWouldDo(t *testing.T) {
	w := newWorld(t)
	id := w.request("public.students", backfill.AwaitingReview)
	w.exec("site maple", `UPDATE backfill_control.site SET one_database = true WHERE name = 'maple'`)
	w.exec("site maple", `UPDATE backfill_control.table_config SET mapping = '{"target":"public.pupils"}', made = '{"key":["id"],"columns":[{"name":"id","type":"bigint","from":"id"}]}' WHERE site = 'maple' AND name = 'public.students'`)
	b := w.open(adminToken, fmt.Sprintf("/backfills/%d", id))
	b.until(`document.querySelector("#alternative summary")?.innerText.includes("One SQL statement would do the same in about 3 seconds")`)
	b.click("#alternative summary")
	require.Contains(t, b.text("#statement"), "INSERT INTO public.pupils (\"id\")")
	require.Contains(t, b.text("#alternative"), "whoever writes public.students waits meanwhile")
}
