package api

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
)

// agents answers trials as both sides' agents would, with one row; first is called when
// one is seen.
func (w *world) agents(first func()) {
	w.Helper()
	layout := &row.Layout{Columns: []row.Column{{Name: "id", Type: "bigint", Declared: "bigint"}}, Key: []string{"id"}}
	made := &row.Mapping{Key: []string{"nr"}, Columns: []row.Mapped{{Column: row.Column{Name: "nr", Type: "bigint", Declared: "bigint"}, From: "id"}}}
	rows, err := json.Marshal([]map[string]any{{"source": []string{"1"}, "result": []string{"1"}}})
	require.NoError(w, err)
	go func() {
		for w.Context().Err() == nil {
			for _, side := range []string{"school", "central"} {
				all, _ := w.store.Trials(w.Context(), "maple", side)
				for _, t := range all {
					first()
					t.Layout, t.Made, t.Rows, t.Agreed = layout, made, rows, true
					_ = w.store.PutTrial(w.Context(), t)
				}
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
}

// Trying a mapping shows rows of any table that the source's agent may read: it takes the
// role that could sync that table, and is in the audit.
func TestWhoMayTryAMapping(t *testing.T) {
	w := newWorld(t)
	w.agents(func() {})
	const path, body = "/api/v1/sites/maple/tables/public.secrets/mapping/try", `{"from":"school","mapping":{"source":"public.secrets","target":"public.other","columns":{"nr":"id"}}}`
	for _, role := range []control.Role{control.Viewer, control.Requester, control.Reviewer} {
		a := w.post(role, path, body)
		require.Equal(t, 403, a.status, "%s: %s", role, a.raw)
	}
	require.Equal(t, 401, w.post("", path, body).status)
	tries := func() []control.AuditEntry {
		all, err := w.store.Audit(t.Context(), control.AuditFilter{Action: "mapping.try", Limit: 10})
		require.NoError(t, err)
		return all
	}
	require.Empty(t, tries())
	a := w.post(control.Admin, path, body)
	require.Equal(t, 200, a.status, "%s", a.raw)
	require.Len(t, tries(), 1)
	e := tries()[0]
	require.Equal(t, []any{"admin", "maple", "public.secrets", "school", "public.other", "token"}, []any{e.Account, e.Site, e.Subject, e.Detail["from"], e.Detail["target"], e.Via})
	require.EqualValues(t, sampleRows, e.Detail["rows"])
	require.NotEmpty(t, e.Detail["mapping"])

	// Setting one reads no row, and is in the audit as that.
	require.Equal(t, 200, w.call(control.Admin, "PUT", "/api/v1/sites/maple/tables/public.orders", `{"mapping":{"target":"public.other","columns":{"nr":"id"}}}`).status)
	require.Len(t, tries(), 1)
}

// A mapping that was checked while another was set, or another side captured, is not stored.
func TestAMappingIsCheckedForWhatIsSet(t *testing.T) {
	w := newWorld(t)
	meanwhile := func() {}
	w.agents(func() { meanwhile() })
	put := func(body string) answer {
		return w.call(control.Admin, "PUT", "/api/v1/sites/maple/tables/public.orders", body)
	}
	const mapping = `{"mapping":{"target":"public.other","columns":{"nr":"id"}}}`
	meanwhile = func() {
		_, err := w.store.PutTable(t.Context(), "test", "maple", "public.orders", control.TableChange{CapturedFrom: []string{"central"}})
		require.NoError(t, err)
	}
	a := put(mapping)
	require.Equal(t, 409, a.status, "%s", a.raw)
	require.Contains(t, string(a.raw), "was configured otherwise while its mapping was checked")
	meanwhile = func() {
		_, err := w.store.PutTable(t.Context(), "test", "maple", "public.orders", control.TableChange{Mapping: &backfill.Mapping{Drop: []string{"note"}},
			Checked: &control.Checked{From: "central", Made: &row.Mapping{Key: []string{"id"}}}})
		require.NoError(t, err)
	}
	require.Equal(t, 409, put(mapping).status)
	meanwhile = func() {}
	require.Equal(t, 200, put(mapping).status)
	now, err := w.store.Table(t.Context(), "maple", "public.orders")
	require.NoError(t, err)
	require.Equal(t, 2, now.Version)
}
