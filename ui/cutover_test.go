package ui_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

func TestCutoverPage(t *testing.T) {
	w := newWorld(t)
	const page = "/sites/maple/cutover?table=public.students&from=school"
	_, body := w.get("/sites/maple/proof", viewerToken)
	require.Contains(t, body, `href="/sites/maple/cutover?from=school&amp;table=public.students"`)
	res, body := w.get(page, viewerToken)
	require.Equal(t, http.StatusOK, res.StatusCode)
	require.Contains(t, body, "Reads may not move")
	for _, clause := range []string{"backfill", "capture", "proof", "quarantine", "shadow", "lag", "sequences"} {
		require.Contains(t, body, `id="clause-`+clause+`"`)
	}
	require.Contains(t, body, "Every row was never compared")
	require.NotContains(t, body, `id="chart-shadow"`, "there is nothing to draw")
	require.Contains(t, body, "these are the defaults")

	w.exec("shadow 1", `INSERT INTO backfill_control.cutover (direction, table_id, soak_since, mismatches, set_by)
		SELECT d.id, t.id, now() - interval '3 h', 4, '<b>ann</b>' FROM backfill_control.table_config t JOIN backfill_control.direction d ON d.site = t.site AND d.from_side = 'school' WHERE t.name = 'public.students'`)
	w.exec("shadow 1", `INSERT INTO backfill_control.shadow_count SELECT direction, table_id, now() - x.ago, x.match, 2, x.mismatch, 0
		FROM backfill_control.cutover, (VALUES (interval '2 h', 996, 4), (interval '1 h', 1000, 0)) x (ago, match, mismatch)`)
	w.exec("shadow 1", `INSERT INTO backfill_control.shadow_read (direction, table_id, sampled, since_seq, key, columns, "values", found, verdict, problem)
		SELECT direction, table_id, false, 0, '{<i>44</i>}', '{}', '{}', true, 'mismatch', '' FROM backfill_control.cutover`)
	_, body = w.get(page, viewerToken)
	require.Contains(t, body, `id="chart-shadow"`)
	require.Contains(t, body, `class="dot-bad"`)
	require.Contains(t, body, `class="dot-good"`)
	require.Contains(t, body, "4 of 2,000 reads mismatched")
	require.Contains(t, body, "0.2 % of the shadow reads mismatch, the objective is 0.01 %")
	require.Contains(t, body, "&lt;i&gt;44&lt;/i&gt;", "keys are no markup")
	require.Contains(t, body, "&lt;b&gt;ann&lt;/b&gt;")
	require.Empty(t, inline.FindString(body))

	res, _ = w.get("/sites/maple/cutover?table=public.none&from=school", viewerToken)
	require.Equal(t, http.StatusNotFound, res.StatusCode)
	res, _ = w.get("/sites/maple/cutover", viewerToken)
	require.NotEqual(t, http.StatusInternalServerError, res.StatusCode)
}

// ready makes public.guardians a table whose reads may move, and keeps it one for an hour.
func (w *world) ready() {
	w.t.Helper()
	const table = `(SELECT id FROM backfill_control.table_config WHERE name = 'public.guardians')`
	const direction = `(SELECT id FROM backfill_control.direction WHERE site = 'maple' AND from_side = 'school')`
	for _, sql := range []string{
		`INSERT INTO backfill_control.reconciliation (direction, table_id, mode, state, requested_by, started_at, closed_at, layout_id, receiver_layout, normaliser, cut, leaves, verdict, root)
		 SELECT ` + direction + `, table_id, 'full', 'FINISHED', 'ada', now() - interval '1 h', now() - interval '30 min', layout_id, layout_id, 1, true, 1, 'EQUAL', 'cafe'
		   FROM backfill_control.table_side WHERE table_id = ` + table + ` AND side = 'school'`,
		`INSERT INTO backfill_control.run_leaf (run_id, n, state, source_count) SELECT id, 1, 'equal', 48210 FROM backfill_control.reconciliation`,
		`INSERT INTO backfill_control.cutover (direction, table_id, soak_since) VALUES (` + direction + `, ` + table + `, now() - interval '26 h')`,
		`INSERT INTO backfill_control.shadow_count SELECT direction, table_id, at, 300, 1, 0, 0 FROM backfill_control.cutover, generate_series(now() - interval '25 h', now(), interval '10 min') at`,
		`UPDATE backfill_control.table_side SET sequences = '[]', sequences_at = now() + interval '1 h' WHERE table_id = ` + table,
		`UPDATE backfill_control.side SET agent_seen_at = now() + interval '1 h', outbox_at = now() + interval '1 h'`,
	} {
		w.exec("site maple", sql)
	}
}

func TestCutoverPageSaysWhatToDoAboutEachClause(t *testing.T) {
	w := newWorld(t)
	w.ready()
	b := w.open(adminToken, "/sites/maple/cutover?table=public.guardians&from=school")
	yes := func() {
		b.until(`document.querySelector("#head").innerText.includes("Reads may move") && document.querySelectorAll("#clauses .tone-bad").length === 0`)
	}
	yes()
	const guardians = ` WHERE table_id = (SELECT id FROM backfill_control.table_config WHERE name = 'public.guardians')`
	for _, c := range []struct{ clause, spoil, mend, says string }{
		{"backfill", `INSERT INTO backfill_control.request (direction, table_id, mode, requested_by) SELECT direction, table_id, 'full', 'grace' FROM backfill_control.cutover`,
			`DELETE FROM backfill_control.request WHERE state = 'PENDING' AND requested_by = 'grace'`, "PENDING: wait for its end, or decide it"},
		{"capture", `UPDATE backfill_control.table_side SET capture_ok = false, problem = 'trigger is disabled'` + guardians + ` AND side = 'school'`,
			`UPDATE backfill_control.table_side SET capture_ok = true, problem = NULL` + guardians, "run backfill setup"},
		{"proof", `UPDATE backfill_control.reconciliation SET closed_at = closed_at - interval '2 d'`, `UPDATE backfill_control.reconciliation SET closed_at = closed_at + interval '2 d'`,
			"is older than 24h0m0s: reconcile the whole table"},
		{"quarantine", `INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key) SELECT id, 1, 'missing', true, '{7}' FROM backfill_control.reconciliation`, `DELETE FROM backfill_control.difference`,
			"repair them, or waive them with a reason"},
		{"shadow", `UPDATE backfill_control.shadow_count SET mismatch = 1`, `UPDATE backfill_control.shadow_count SET mismatch = 0`, "see which (backfill cutover shadow --site"},
		{"lag", `UPDATE backfill_control.side SET agent_seen_at = now() - interval '2 h' WHERE site = 'maple' AND name = 'central'`,
			`UPDATE backfill_control.side SET agent_seen_at = now() + interval '1 h'`, "the agent of central was last seen"},
		{"sequences", `UPDATE backfill_control.table_side SET sequences = '[{"column":"id","name":"public.guardians_id_seq","next":5,"highest":9,"step":1}]'` + guardians + ` AND side = 'central'`,
			`UPDATE backfill_control.table_side SET sequences = '[]'` + guardians, "SELECT setval('public.guardians_id_seq', 10009)"},
	} {
		w.exec("site maple", c.spoil)
		b.until(fmt.Sprintf(`document.querySelector("#clause-%s .tone-bad")`, c.clause))
		require.Contains(t, b.text("#clause-"+c.clause), c.says)
		require.Contains(t, b.text("#head"), "Reads may not move", c.clause)
		require.Equal(t, 1, eval[int](b, `document.querySelectorAll("#clauses .tone-bad").length`), c.clause)
		w.exec("site maple", c.mend)
		yes()
	}
	b.clean()

	// Looking is not on record, asking is, and the page of the audit has it.
	log := func() []control.AuditEntry {
		all, err := w.store.Audit(t.Context(), control.AuditFilter{Action: "cutover.answer", Limit: 10})
		require.NoError(t, err)
		return all
	}
	require.Empty(t, log())
	b.click("#ask")
	b.until(`document.querySelector("#toast").innerText.includes("The answer is in the audit")`)
	require.Len(t, log(), 1)
	require.Equal(t, "ada", log()[0].Account)
	require.Equal(t, true, log()[0].Detail["read_new"])
	_, body := w.get("/sites/maple/audit", viewerToken)
	require.Contains(t, body, "cutover.answer")
}

func TestCutoverPolicyIsSetOnItsPage(t *testing.T) {
	w := newWorld(t)
	w.ready()
	const page = "/sites/maple/cutover?table=public.guardians&from=school"
	b := w.open(viewerToken, page)
	require.Zero(t, eval[int](b, `document.querySelectorAll("#set, #policy").length`))
	b.click("#ask")
	b.until(`document.querySelector("#toast").innerText.includes("The answer is in the audit")`)

	b = w.open(adminToken, page)
	b.tabTo("#set")
	b.keys(kb.Enter)
	b.until(`document.querySelector("#policy").open`)
	values := func() string {
		return eval[string](b, `[...document.querySelectorAll("#policy input")].map((f) => f.name + " " + f.value).join(", ")`)
	}
	require.Equal(t, "objective 0.01, soak_seconds 24, proof_age_seconds 24, max_lag_seconds 30, sample_per_minute 0", values())
	b.typed("#policy-soak", "0"+kb.Enter)
	b.until(`document.querySelector("#policy-soak-wrong")`)
	require.Equal(t, "policy-soak", eval[string](b, `document.activeElement.id`))
	b.typed("#policy-soak", "30.6")
	b.typed("#policy-objective", "0.007")
	b.typed("#policy-lag", "5")
	b.typed("#policy-sample", "60"+kb.Enter)
	b.until(`!document.querySelector("#policy").open && document.querySelector("#shadow .facts").innerText.includes("under 0.007 %")`)
	now, err := w.store.Cutover(t.Context(), "maple", "public.guardians", "school")
	require.NoError(t, err)
	require.Equal(t, backfill.CutoverPolicy{Objective: 0.00007, Soak: 30*time.Hour + 36*time.Minute, ProofAge: 24 * time.Hour, MaxLag: 5 * time.Second, Sample: 60, SetBy: "ada"}, now.Policy)
	b.until(`document.querySelector("#clause-shadow").innerText.includes("goes on until")`)
	b.click("#set")
	require.Equal(t, "objective 0.007, soak_seconds 30.6, proof_age_seconds 24, max_lag_seconds 5, sample_per_minute 60", values())
	b.clean()
}
