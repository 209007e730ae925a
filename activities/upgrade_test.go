package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

// further gives every table of a schema a column that this version does not know, as a
// later version's migration or setup might.
func further(t *testing.T, w *world, dsn, schema string) {
	t.Helper()
	conn := testkit.Session(t, dsn)
	tables := testkit.Strings(t, conn, `SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = $1 AND tablename <> 'schema_version'`, schema)
	require.NotEmpty(t, tables)
	for _, table := range tables {
		testkit.Exec(t, conn, `ALTER TABLE `+table+` ADD COLUMN of_a_later_version text NOT NULL DEFAULT 'later'`)
	}
}

// Processes that run when the control database and the sides are brought to a later
// version, one that adds to what is there, go on as before.
func TestProcessesGoOnWhileTheSchemaIsBroughtForward(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g, 'old' FROM generate_series(1, 3000) g`)
	stop := w.sync()
	defer stop()
	w.from.PageRows = 300
	k := w.claim(w.from, w.Request("public.orders").ID)
	require.NoError(t, k.freeze(t.Context()))
	_, err := k.page(t.Context())
	require.NoError(t, err)
	write := func() {
		w.onSource(`UPDATE orders SET note = note || '.' WHERE id % 3 = 0; DELETE FROM orders WHERE id % 97 = 1; INSERT INTO orders SELECT max(id) + 1 FROM orders`)
	}
	write()
	further(t, w, w.ControlDSN, "backfill_control")
	write()
	stop()
	further(t, w, w.SourceDSN, "backfill_maple_school")
	further(t, w, w.ReceiverDSN, "backfill_maple_central")
	write()
	testkit.Exec(t, w.C, `CREATE TABLE backfill_control.later (id int); INSERT INTO backfill_control.schema_version (version_id, is_applied) VALUES (9000, true)`)
	w.finish(k)
	id := k.req.ID
	w.classify(id)
	w.Approve(id)
	w.release(id, 200)
	w.drain()
	w.Equal("orders")
	require.Empty(t, w.setAside())
	require.Equal(t, "EQUAL", w.reconcile("public.orders").Verdict)
	w.count()
	require.Empty(t, w.panel().Source.Problem)
	again := w.agent(testkit.Source) // a process of the same version that is started now
	require.Empty(t, again.problem(t.Context()))
	require.Equal(t, backfill.Finished, w.Now(id).State)
}
