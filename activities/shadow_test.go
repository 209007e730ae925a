package activities

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// served is a read of an order as an application reports it.
func (w *world) served(id, note string, total any) control.ShadowRead {
	return control.ShadowRead{TableID: w.Tables["public.orders"].ID, Key: backfill.Key{id}, Found: true,
		Columns: []string{"note", "total"}, Values: []*string{&note, ptr(fmt.Sprint(total))}}
}

func (w *world) report(reads ...control.ShadowRead) {
	w.Helper()
	n, err := w.Store.ReportReads(w.Context(), w.Out.ID, reads, false)
	require.NoError(w, err)
	require.EqualValues(w, len(reads), n)
}

// judgeReads lets both agents judge what was reported, in turns.
func (w *world) judgeReads() {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
	defer cancel()
	parts := []*shadowing{{Agent: w.from, parts: map[int64]judging{}}, {Agent: w.to, parts: map[int64]judging{}}}
	for {
		for _, p := range parts {
			_, err := p.step(ctx)
			require.NoError(w, err)
		}
		sleep(ctx, 2*time.Millisecond)
		if !testkit.Value[bool](w, w.C, `SELECT EXISTS (SELECT FROM backfill_control.shadow_read WHERE verdict IS NULL)`) {
			return
		}
	}
}

// verdicts reports reads, judges them, and returns what they came to since the last time.
func (w *world) verdicts(reads ...control.ShadowRead) (n backfill.ShadowCounts) {
	w.Helper()
	testkit.Exec(w, w.C, `DELETE FROM backfill_control.shadow_count`)
	w.report(reads...)
	w.judgeReads()
	require.NoError(w, w.C.QueryRow(w.Context(), `
		SELECT coalesce(sum(match), 0)::bigint, coalesce(sum(stale), 0)::bigint, coalesce(sum(mismatch), 0)::bigint, coalesce(sum("unknown"), 0)::bigint FROM backfill_control.shadow_count`).
		Scan(&n.Match, &n.Stale, &n.Mismatch, &n.Unknown))
	return n
}

func (w *world) cutover() *backfill.Cutover {
	w.Helper()
	c, err := w.Store.Cutover(w.Context(), testkit.Site, "public.orders", testkit.Source)
	require.NoError(w, err)
	return c
}

func shadowWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	return worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x', n FROM generate_series(1, 60) n`, "public.orders"), small(10))
}

func TestShadowReadsAreJudged(t *testing.T) {
	w := shadowWorld(t)
	stop := w.sync()
	defer stop()
	gone := control.ShadowRead{TableID: w.Tables["public.orders"].ID, Key: backfill.Key{"99"}, Columns: []string{}, Values: []*string{}}

	require.Equal(t, backfill.ShadowCounts{Match: 4}, w.verdicts(w.served("1", "x", 1), w.served("2.0", "x", "+2"), gone,
		control.ShadowRead{TableID: gone.TableID, Key: backfill.Key{"3"}, Found: true, Columns: []string{"total"}, Values: []*string{ptr("3")}}),
		"spelling is no matter, nor what was not served")
	require.Zero(t, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.shadow_read`), "what matches goes")

	w.onSource(`UPDATE orders SET note = 'new' WHERE id = 4; DELETE FROM orders WHERE id = 5; INSERT INTO orders VALUES (99)`)
	require.Equal(t, backfill.ShadowCounts{Stale: 3, Match: 1}, w.verdicts(w.served("4", "x", 4), w.served("5", "x", 5), gone, w.served("4", "new", 4)), "the rows have changed since")

	w.onReceiver(`UPDATE orders SET total = 0 WHERE id IN (10, 11); DELETE FROM orders WHERE id = 12; INSERT INTO orders VALUES (70)`)
	gone.Key = backfill.Key{"70"}
	require.Equal(t, backfill.ShadowCounts{Mismatch: 4, Match: 1}, w.verdicts(w.served("10", "x", 10), w.served("10.0", "x", 10), w.served("12", "x", 12), gone, w.served("13", "x", 13)))
	require.Equal(t, backfill.ShadowCounts{Unknown: 1, Match: 1}, w.verdicts(w.served("14", "x", "many"), w.served("13", "x", 13)), "one that cannot be read leaves the others")
	require.Equal(t, backfill.ShadowCounts{Mismatch: 1}, w.verdicts(w.served("15", "another", 15)), "nothing explains what was served")

	all, err := w.Store.Reconciliations(w.Context(), control.RunFilter{Site: testkit.Site, Limit: 10})
	require.NoError(t, err)
	require.Len(t, all, 1, "keys that mismatch are set aside in one run")
	require.ElementsMatch(t, []string{"different 10 total", "missing 12", "surplus 70", "different 15 note"}, w.differences(all[0]))
	require.EqualValues(t, 5, testkit.Value[int64](t, w.C, `SELECT mismatches FROM backfill_control.cutover`))
	require.EqualValues(t, 4, w.cutover().Open)

	// Just those keys are sent again, and the soak begins anew.
	before := testkit.Value[time.Time](t, w.C, `SELECT soak_since FROM backfill_control.cutover`)
	repair := w.judge(w.newRun("public.orders", control.NewReconciliation{Mode: backfill.RunRepair, Parent: all[0].ID}))
	require.Equal(t, "EQUAL", repair.Verdict, "%s", w.differences(repair))
	require.EqualValues(t, 3, repair.LeafCount)
	require.True(t, testkit.Value[time.Time](t, w.C, `SELECT soak_since FROM backfill_control.cutover`).After(before))
	require.EqualValues(t, 1, w.cutover().Open, "a surplus row stays until somebody waives it")
	require.EqualValues(t, 0, testkit.Value[int](t, w.R, `SELECT total FROM orders WHERE id = 11`), "what no read has found is not repaired")
	require.Nil(t, w.cutover().Soak.Began)
	require.Equal(t, backfill.ShadowCounts{Match: 1, Mismatch: 1}, w.verdicts(w.served("10", "x", 10), w.served("11", "x", 11)))
	require.EqualValues(t, 2, w.cutover().Open)
}

// What the read could have seen is applied before it is judged.
func TestShadowReadsWaitForWhatTheySaw(t *testing.T) {
	w := shadowWorld(t)
	w.onSource(`UPDATE orders SET note = 'seen' WHERE id = 7`)
	w.report(w.served("7", "seen", 7))
	parts := []*shadowing{{Agent: w.from, parts: map[int64]judging{}}, {Agent: w.to, parts: map[int64]judging{}}}
	for range 12 {
		for _, p := range parts {
			_, err := p.step(w.Context())
			require.NoError(t, err)
		}
	}
	require.Positive(t, testkit.Value[int64](t, w.C, `SELECT wait_seq FROM backfill_control.run_leaf`))
	require.Zero(t, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.shadow_count`), "the receiver has not applied it")
	w.applyAll()
	w.judgeReads()
	require.EqualValues(t, 1, testkit.Value[int64](t, w.C, `SELECT match FROM backfill_control.shadow_count`))
}

// A key that is changed again and again matches or is stale, and is no mismatch.
func TestShadowReadsOfRowsInFlightAreNoMismatch(t *testing.T) {
	w := shadowWorld(t)
	stop := w.sync()
	defer stop()
	w.from.faults = func(p string) error {
		if p == "leaf: listed" {
			w.onSource(`UPDATE orders SET total = total + 1 WHERE id <= 30`)
		}
		return nil
	}
	var reads []control.ShadowRead
	for n := range 40 {
		reads = append(reads, w.served(fmt.Sprint(n+1), "x", n+1))
	}
	got := w.verdicts(reads...)
	require.Zero(t, got.Mismatch)
	require.EqualValues(t, 10, got.Match)
	require.EqualValues(t, 30, got.Stale+got.Unknown)
	require.NotZero(t, got.Stale)
}

// Only what has changed since a read explains that it served something else: how long ago it was made is told by its age.
func TestOnlyChangesSinceAReadExcuseIt(t *testing.T) {
	w := shadowWorld(t)
	stop := w.sync()
	defer stop()
	w.onSource(`UPDATE orders SET note = 'new' WHERE id IN (1, 2)`)
	testkit.Eventually(t, "the change has arrived", func() bool {
		return testkit.Value[int](t, w.R, `SELECT count(*) FROM orders WHERE note = 'new'`) == 2
	})
	testkit.Exec(t, w.C, `UPDATE backfill_control.batch SET at = at - interval '1 h'`)
	late, early := w.served("1", "x", 1), w.served("2", "x", 2)
	late.Age, early.Age = time.Minute, 2*time.Hour
	require.Equal(t, backfill.ShadowCounts{Mismatch: 1, Stale: 1}, w.verdicts(late, early))
}

// Reads that nobody judges do not pile up: more than so many of a table are dropped, and it is said how many were taken.
func TestReadsDoNotPileUp(t *testing.T) {
	w := shadowWorld(t)
	report := func(n int) int64 {
		reads := make([]control.ShadowRead, n)
		for i := range reads {
			reads[i] = w.served("1", "x", 1)
		}
		taken, err := w.Store.ReportReads(t.Context(), w.Out.ID, reads, false)
		require.NoError(t, err)
		return taken
	}
	require.EqualValues(t, 19_990, report(19_990))
	require.EqualValues(t, 10, report(25))
	require.Zero(t, report(1))
}

func TestReadsAreSampled(t *testing.T) {
	w := shadowWorld(t)
	w.count()
	require.NoError(t, w.Store.PutPolicy(w.Context(), "ann", w.Out, ptr(w.Tables["public.orders"]), control.PolicyChange{Sample: ptr(120)}))
	w.onSource(`UPDATE orders SET note = 'changed' WHERE id IN (1, 2, 3); DELETE FROM orders WHERE id = 4`)
	w.drain()
	w.onReceiver(`UPDATE orders SET note = 'planted' WHERE id = 3`)
	stop := w.sync()
	defer stop()
	require.NoError(t, (&shadowing{Agent: w.from}).sample(w.Context(), 10*time.Second))
	require.Subset(t, testkit.Strings(t, w.C, `SELECT key[1] FROM backfill_control.shadow_read`), []string{"1", "2", "3", "4"})
	require.Equal(t, 20, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.shadow_read`))
	w.judgeReads()
	require.Positive(t, testkit.Value[int64](t, w.C, `SELECT mismatches FROM backfill_control.cutover`), "the key that was planted")
	require.Positive(t, testkit.Value[int64](t, w.C, `SELECT sum(match)::bigint FROM backfill_control.shadow_count`))
}

// Of a table that both sides write a read is stale as well once a change of the other
// side has come, and unknown while one is on its way.
func TestShadowReadsOfATableThatBothSidesWrite(t *testing.T) {
	w := twoWayOf(shadowWorld(t), testkit.Source, "public.orders")
	w.rest()
	require.Equal(t, backfill.ShadowCounts{Match: 1}, w.verdicts(w.served("1", "x", 1)))

	w.onReceiver(`UPDATE orders SET note = 'theirs' WHERE id = 1; DELETE FROM orders WHERE id = 2; INSERT INTO orders VALUES (70, 'born there', 7)`)
	born := control.ShadowRead{TableID: w.Tables["public.orders"].ID, Key: backfill.Key{"70"}, Columns: []string{}, Values: []*string{}}
	before := []control.ShadowRead{w.served("1", "x", 1), w.served("2", "x", 2), w.served("3", "x", 3), born}
	require.Equal(t, backfill.ShadowCounts{Unknown: 3, Match: 1}, w.verdicts(before...), "the receiver has not sent it yet")
	w.pushOf(w.to)
	require.Equal(t, backfill.ShadowCounts{Unknown: 3, Match: 1}, w.verdicts(before...), "the source has not applied it yet")
	w.rest()
	w.Equal("orders")
	require.Equal(t, backfill.ShadowCounts{Stale: 3, Match: 1}, w.verdicts(before...), "it has come since they were read")
	require.Equal(t, backfill.ShadowCounts{Match: 2}, w.verdicts(w.served("1", "theirs", 1), w.served("70", "born there", 7)))

	// What nobody has captured is no excuse.
	w.onReceiver(`UPDATE orders SET note = 'planted' WHERE id IN (1, 5); DELETE FROM backfill_maple_central.outbox`)
	require.Equal(t, backfill.ShadowCounts{Mismatch: 2, Match: 1}, w.verdicts(w.served("1", "theirs", 1), w.served("5", "x", 5), w.served("6", "x", 6)))
	require.Equal(t, backfill.ShadowCounts{Mismatch: 1}, w.verdicts(w.served("7", "another", 7)), "nothing explains what was served")
	require.EqualValues(t, 3, w.cutover().Open)
}

// Keys that a run of reads has found before it fails can be repaired by nobody: they do
// not keep the gate shut, and the reads count as unknown.
func TestAFailedRunOfReadsLeavesNoKeysOpen(t *testing.T) {
	w := shadowWorld(t)
	w.report(w.served("10", "another", 10))
	parts := []*shadowing{{Agent: w.to, parts: map[int64]judging{}}, {Agent: w.from, parts: map[int64]judging{}}}
	testkit.Eventually(t, "the read's key to be looked at", func() bool {
		for _, p := range parts {
			_, err := p.step(t.Context())
			require.NoError(t, err)
			if testkit.Value[bool](t, w.C, `SELECT EXISTS (SELECT FROM backfill_control.difference)`) {
				return true
			}
		}
		return false
	})
	testkit.Exec(t, w.C, `UPDATE backfill_control.difference SET settled = true`)
	require.EqualValues(t, 1, w.cutover().Open, "found so far")
	run := testkit.Value[int64](t, w.C, `SELECT id FROM backfill_control.reconciliation WHERE state = 'RUNNING'`)
	_, err := w.Store.EndRun(t.Context(), run, "test", backfill.RunFailed, "the table was altered")
	require.NoError(t, err)
	require.Zero(t, w.cutover().Open)
	require.EqualValues(t, 1, testkit.Value[int64](t, w.C, `SELECT sum("unknown") FROM backfill_control.shadow_count`))
}
