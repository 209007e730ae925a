package activities

import (
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// refusals are the clauses that do not hold, and why.
func (w *world) refusals() map[string]string {
	w.Helper()
	out := map[string]string{}
	for _, no := range backfill.Unmet(w.cutover().Clauses()) {
		out[no.Name] = no.Message
	}
	return out
}

func clauses(no map[string]string) (names []string) {
	for name := range no {
		names = append(names, name)
	}
	return names
}

// look has both agents tell what they tell every few seconds.
func (w *world) look() {
	w.Helper()
	w.count()
	for _, a := range []*Agent{w.from, w.to} {
		require.NoError(w, a.store.AgentSeen(w.Context(), a.db.Site, a.db.Side, a.ID, a.db.Where(), a.problem(w.Context())))
		require.NoError(w, (&outboxWatch{Agent: a}).report(w.Context()))
		require.NoError(w, (&shadowing{Agent: a}).lookAtSequences(w.Context()))
	}
}

// Counts are equal, chunk 44 differs, shadow reads mismatch more often than allowed:
// reads may not move before the keys are found and repaired, the table is proven
// again and the soak was gone through again.
func TestReadsMoveOnlyWithProof(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, `CREATE TABLE orders (id serial PRIMARY KEY, note text, total int, paid boolean NOT NULL DEFAULT true);
		INSERT INTO orders SELECT n, 'x', n FROM generate_series(1, 500) n`, "public.orders"), small(10))
	table := w.Tables["public.orders"]
	w.onReceiver(`UPDATE orders SET paid = false WHERE id IN (433, 437)`)
	stop := w.sync()
	defer stop()
	w.look()
	require.NoError(t, w.Store.PutPolicy(t.Context(), "ann", w.Out, &table, control.PolicyChange{Soak: ptr(time.Hour)}))
	run := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
	require.Equal(t, "DIFFERENT", run.Verdict)
	require.Equal(t, run.Counts.Rows, run.ReceiverRows, "the counts are equal")
	require.EqualValues(t, 44, testkit.Value[int64](t, w.C, `SELECT n FROM backfill_control.run_leaf WHERE run_id = $1 AND state = 'different'`, run.ID))
	read := func(from, to int) (n backfill.ShadowCounts) {
		var reads []control.ShadowRead
		for id := from; id <= to; id++ {
			r := w.served(fmt.Sprint(id), "x", id)
			r.Columns, r.Values = append(r.Columns, "paid"), append(r.Values, ptr("true"))
			reads = append(reads, r)
		}
		w.report(reads...)
		w.judgeReads()
		return w.cutover().Soak.ShadowCounts
	}
	require.Equal(t, backfill.ShadowCounts{Match: 249, Mismatch: 1}, read(186, 435), "0.4 %")

	no := w.refusals()
	require.ElementsMatch(t, []string{"proof", "quarantine", "shadow", "sequences"}, clauses(no), "%v", no)
	require.Contains(t, no["proof"], "1 of 50 leaves different, 2 keys are open")
	require.Contains(t, no["shadow"], "0.4 % of the shadow reads mismatch, the objective is 0.01 %")
	// The message says what to run.
	w.onReceiver(regexp.MustCompile(`SELECT setval\(.*\)$`).FindString(no["sequences"]))
	w.look()
	require.NotContains(t, w.refusals(), "sequences")

	require.Equal(t, []string{"different 433 paid", "different 437 paid"}, w.differences(run))
	all, err := w.Store.Reconciliations(t.Context(), control.RunFilter{Limit: 10})
	require.NoError(t, err)
	require.Equal(t, backfill.RunShadow, all[0].Mode)
	require.Equal(t, []string{"different 433 paid"}, w.differences(all[0]))
	for _, r := range []*backfill.Reconciliation{run, all[0]} {
		repair := w.judge(w.newRun("public.orders", control.NewReconciliation{Mode: backfill.RunRepair, Parent: r.ID}))
		require.Equal(t, "EQUAL", repair.Verdict, "hashed again")
	}
	no = w.refusals()
	require.ElementsMatch(t, []string{"proof", "shadow"}, clauses(no), "%v", no)
	require.Contains(t, no["proof"], "a later one has not found the table equal")
	require.Contains(t, no["shadow"], "no shadow read was judged", "the soak begins again")
	require.True(t, w.judge(w.newRun("public.orders", control.NewReconciliation{})).Clean())
	require.Equal(t, backfill.ShadowCounts{Match: 250}, read(186, 435))
	require.Contains(t, w.refusals()["shadow"], "about 30,000 are needed")
	// Two hours and as many reads later.
	testkit.Exec(t, w.C, `DELETE FROM backfill_control.shadow_count WHERE at < (SELECT soak_since FROM backfill_control.cutover)`)
	testkit.Exec(t, w.C, `UPDATE backfill_control.cutover SET soak_since = now() - interval '2 h'`)
	testkit.Exec(t, w.C, `INSERT INTO backfill_control.shadow_count SELECT direction, table_id, at, 600, 3, 0, 0
		FROM backfill_control.cutover, generate_series(now() - interval '119 min', now() - interval '1 min', interval '1 min') at ON CONFLICT DO NOTHING`)
	w.look()
	require.Empty(t, w.refusals())
	stop()

	// What breaks a clause turns yes into no, and what mends it no into yes.
	ids := fmt.Sprintf("%d, %d", w.Out.ID, table.ID)
	for _, c := range []struct{ clause, spoil, mend string }{
		{"backfill", `INSERT INTO backfill_control.request (direction, table_id, mode, requested_by) VALUES (` + ids + `, 'full', 'x')`, `DELETE FROM backfill_control.request`},
		{"backfill", `INSERT INTO backfill_control.request (direction, table_id, mode, requested_by, state) VALUES (` + ids + `, 'full', 'x', 'REJECTED')`, `DELETE FROM backfill_control.request`},
		{"capture", `UPDATE backfill_control.table_side SET capture_ok = false, problem = 'disabled' WHERE side = 'school'`, `UPDATE backfill_control.table_side SET capture_ok = true, problem = NULL`},
		{"capture", `UPDATE backfill_control.table_side SET gap = 'g', gap_last = now() WHERE side = 'school'`, `UPDATE backfill_control.table_side SET gap = NULL, gap_last = NULL`},
		{"capture", `INSERT INTO backfill_control.entry (direction, table_id, snap, op, dropped, key) VALUES (` + ids + `, '1:1:', 'd', true, '{1}')`, `DELETE FROM backfill_control.entry WHERE dropped`},
		{"proof", `INSERT INTO backfill_control.reconciliation (direction, table_id, mode, requested_by) VALUES (` + ids + `, 'repair', 'x')`, `DELETE FROM backfill_control.reconciliation WHERE state = 'PENDING'`},
		{"proof", `INSERT INTO backfill_control.reconciliation (direction, table_id, mode, requested_by, state, touched, closed_at) VALUES (` + ids + `, 'repair', 'x', 'FINISHED', true, now())`, `DELETE FROM backfill_control.reconciliation WHERE requested_by = 'x'`},
		{"proof", `INSERT INTO backfill_control.request (direction, table_id, mode, requested_by, state, released, closed_at) VALUES (` + ids + `, 'full', 'x', 'FINISHED', 5, now())`, `DELETE FROM backfill_control.request`},
		{"proof", `INSERT INTO backfill_control.request (direction, table_id, mode, key, requested_by, state) VALUES (` + ids + `, 'row', '{1}', 'x', 'RELEASING')`, `DELETE FROM backfill_control.request`},
		{"proof", `UPDATE backfill_control.reconciliation SET closed_at = closed_at - interval '2 d' WHERE mode = 'full'`, `UPDATE backfill_control.reconciliation SET closed_at = closed_at + interval '2 d' WHERE mode = 'full'`},
		{"proof", `UPDATE backfill_control.table_side SET shape = shape || '!' WHERE side = 'central'`, `UPDATE backfill_control.table_side SET shape = rtrim(shape, '!')`},
		{"quarantine", `UPDATE backfill_control.difference SET state = 'open' WHERE run_id IN (SELECT id FROM backfill_control.reconciliation WHERE mode = 'shadow')`, `UPDATE backfill_control.difference SET state = 'waived', decided_by = 'ann', note = 'known' WHERE state = 'open'`},
		{"quarantine", `WITH r AS (INSERT INTO backfill_control.reconciliation (direction, table_id, mode, requested_by, state, verdict, closed_at) VALUES (` + ids + `, 'sampled', 'x', 'FINISHED', 'DIFFERENT', now()) RETURNING id)
			INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key) SELECT id, 1, 'missing', true, '{1}' FROM r`,
			`DELETE FROM backfill_control.difference WHERE kind = 'missing'; DELETE FROM backfill_control.reconciliation WHERE requested_by = 'x'`},
		{"quarantine", `INSERT INTO backfill_control.quarantine (direction, seq, table_id, state, reason, since) VALUES (` + fmt.Sprintf("%d, 1, %d", w.Out.ID, table.ID) + `, 'quarantined', 'r', now())`, `DELETE FROM backfill_control.quarantine`},
		{"quarantine", `INSERT INTO backfill_control.quarantine (direction, seq, table_id, state, reason, since) VALUES (` + fmt.Sprintf("%d, 1, %d", w.Out.ID, table.ID) + `, 'skipped', 'r', now())`, `DELETE FROM backfill_control.quarantine`},
		{"shadow", `UPDATE backfill_control.shadow_count SET mismatch = 8 WHERE at > now() - interval '2 min'`, `UPDATE backfill_control.shadow_count SET mismatch = 0`},
		{"shadow", `UPDATE backfill_control.shadow_count SET "unknown" = 8 WHERE at > now() - interval '2 min'`, `UPDATE backfill_control.shadow_count SET "unknown" = 0`},
		{"shadow", `INSERT INTO backfill_control.shadow_read (direction, table_id, sampled, since_seq, key, columns, "values", found, reported_at) VALUES (` + ids + `, false, 0, '{1}', '{}', '{}', true, now() - interval '11 min')`, `DELETE FROM backfill_control.shadow_read WHERE verdict IS NULL`},
		{"shadow", `UPDATE backfill_control.shadow_count SET match = 6000, at = at - CASE WHEN at > now() - interval '20 min' THEN interval '1 d' ELSE '0' END`,
			`UPDATE backfill_control.shadow_count SET match = 600, at = at + CASE WHEN at < now() - interval '1 d' THEN interval '1 d' ELSE '0' END`},
		{"shadow", `UPDATE backfill_control.cutover SET soak_since = now() - interval '50 min'`, `UPDATE backfill_control.cutover SET soak_since = now() - interval '2 h'`},
		{"lag", `UPDATE backfill_control.side SET agent_seen_at = now() - interval '1 h' WHERE name = 'central'`, `UPDATE backfill_control.side SET agent_seen_at = now()`},
		{"lag", `UPDATE backfill_control.side SET problem = 'x' WHERE name = 'central'`, `UPDATE backfill_control.side SET problem = NULL`},
		{"lag", `UPDATE backfill_control.side SET halted = 'x' WHERE name = 'school'`, `UPDATE backfill_control.side SET halted = NULL`},
		{"lag", `UPDATE backfill_control.table_side SET outbox = 5, outbox_oldest = now() - interval '1 min' WHERE side = 'school'`, `UPDATE backfill_control.table_side SET outbox = 0, outbox_oldest = NULL`},
		{"sequences", `UPDATE backfill_control.table_side SET sequences_at = NULL WHERE side = 'central'`, `UPDATE backfill_control.table_side SET sequences_at = now()`},
	} {
		testkit.Exec(t, w.C, `UPDATE backfill_control.side SET agent_seen_at = now(), outbox_at = now()`)
		testkit.Exec(t, w.C, `UPDATE backfill_control.table_side SET sequences_at = now()`)
		testkit.Exec(t, w.C, c.spoil)
		require.Equal(t, []string{c.clause}, clauses(w.refusals()), c.spoil)
		testkit.Exec(t, w.C, c.mend)
		require.Empty(t, w.refusals(), c.mend)
	}
	for _, by := range []string{"ann", "bob", "ann", "bob"} {
		require.NoError(t, w.Store.Answered(t.Context(), by, w.cutover()))
	}
	log, err := w.Store.Audit(t.Context(), control.AuditFilter{Action: "cutover.answer", Limit: 10})
	require.NoError(t, err)
	require.Len(t, log, 2, "once for each who asked")
	require.Equal(t, "bob", log[0].Account)
	require.Equal(t, "ann", log[1].Account)
	require.Equal(t, true, log[0].Detail["read_new"])
}
