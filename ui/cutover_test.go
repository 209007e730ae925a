package ui_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
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
