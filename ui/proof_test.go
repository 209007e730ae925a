package ui_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// reconciled makes a finished reconciliation of public.students in which leaf 2 has
// differences, and returns its page.
func (w *world) reconciled() string {
	w.t.Helper()
	var id int64
	require.NoError(w.t, w.db.QueryRow(w.t.Context(), `
		INSERT INTO backfill_control.reconciliation (direction, table_id, mode, state, requested_by, started_at, closed_at, layout_id, receiver_layout, normaliser, cut, leaves, verdict, root)
		SELECT d.id, t.id, 'full', 'FINISHED', 'ada', now(), now(), s.layout_id, s.layout_id, 1, true, 3, 'DIFFERENT', 'cafe'
		  FROM backfill_control.table_config t JOIN backfill_control.direction d ON d.site = t.site AND d.from_side = ANY (t.captured_from)
		  JOIN backfill_control.table_side s ON s.table_id = t.id AND s.side = d.from_side WHERE t.name = 'public.students' RETURNING id`).Scan(&id))
	w.exec("reconciliation 1", `INSERT INTO backfill_control.run_leaf (run_id, n, state, upper, source_count) VALUES ($1, 1, 'equal', '{5}', 5), ($1, 2, 'different', '{9}', 4), ($1, 3, 'unknown', NULL, 1)`, id)
	w.exec("reconciliation 1", `
		WITH c AS (SELECT jsonb_array_length(definition->'columns') AS n FROM backfill_control.layout l JOIN backfill_control.reconciliation r ON r.layout_id = l.id WHERE r.id = $1)
		INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key, source, receiver, cause)
		SELECT $1, 2, 'different', true, ARRAY['6'], ARRAY['<b>old</b>'] || array_fill('x'::text, ARRAY[c.n - 1]), ARRAY[NULL] || array_fill('x'::text, ARRAY[c.n - 1]), 'never captured' FROM c
		UNION ALL SELECT $1, 2, 'surplus', true, ARRAY['7'], NULL::text[], array_fill('y'::text, ARRAY[c.n]), 'born on central' FROM c`, id)
	return fmt.Sprintf("/reconciliations/%d", id)
}

func TestProofPages(t *testing.T) {
	w := newWorld(t)
	res, body := w.get("/sites/maple/proof", adminToken)
	require.Equal(t, http.StatusOK, res.StatusCode)
	require.Contains(t, body, "none yet")
	require.Contains(t, body, `data-post="/api/v1/sites/maple/reconciliations"`)

	page := w.reconciled()
	_, body = w.get("/sites/maple/proof", adminToken)
	require.Contains(t, body, page)
	require.Contains(t, body, "Different")

	res, body = w.get(page, adminToken)
	require.Equal(t, http.StatusOK, res.StatusCode)
	for _, fill := range []string{"equal", "different", "unknown"} {
		require.Contains(t, body, `<rect class="fill-`+fill+`"`)
	}
	require.Contains(t, body, "leaf 2: different, 4 rows")
	require.Contains(t, body, "&lt;b&gt;old&lt;/b&gt;", "values are no markup")
	require.Contains(t, body, `<span class="null">NULL</span>`)
	require.Contains(t, body, "born on central")
	require.Contains(t, body, `data-dialog="repairing"`)
	// The console is another server, and a link to it no request.
	require.Empty(t, inline.FindString(strings.ReplaceAll(body, `href="http://127.0.0.1:8233/`, `href="/console/`)))

	_, body = w.get(page+"?kind=surplus", adminToken)
	require.NotContains(t, body, "never captured")

	_, body = w.get(page, viewerToken)
	require.NotContains(t, body, `data-dialog="repairing"`)
	require.Contains(t, body, "needs the role reviewer")

	res, _ = w.get("/reconciliations/999999", adminToken)
	require.Equal(t, http.StatusNotFound, res.StatusCode)
	res, _ = w.get("/reconciliations/none", adminToken)
	require.Equal(t, http.StatusNotFound, res.StatusCode)

	// All differences settled: the leaf is repaired.
	w.exec("reconciliation 1", `UPDATE backfill_control.difference SET state = 'repaired'`)
	_, body = w.get(page, adminToken)
	require.Contains(t, body, `<rect class="fill-repaired"`)
	require.NotContains(t, body, `data-dialog="repairing"`)
}
