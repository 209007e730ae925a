package activities

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/proof"
	"backfill/internal/testkit"
)

// sync pushes and applies beside a test until it is told to stop.
func (w *world) sync() (stop func()) {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	var all sync.WaitGroup
	loop := func(step func() (bool, error)) {
		all.Add(1)
		go func() {
			defer all.Done()
			for ctx.Err() == nil {
				busy, err := step()
				if err != nil && ctx.Err() == nil {
					w.Errorf("sync: %v", err)
					return
				}
				if !busy {
					sleep(ctx, 5*time.Millisecond)
				}
			}
		}()
	}
	pusher, applying := w.agent(testkit.Source), &applier{Agent: w.agent(testkit.Receiver)}
	loop(func() (bool, error) { p, err := pusher.push(ctx); return p.rows > 0, err })
	loop(func() (bool, error) { return applying.apply(ctx) })
	return sync.OnceFunc(func() { cancel(); all.Wait() })
}

// judge lets both agents do their part of a run, in turns of whole steps, until every
// leaf is judged, and concludes it.
func (w *world) judge(id int64) *backfill.Reconciliation {
	w.Helper()
	require.NoError(w, w.tryJudge(id))
	r, err := w.Store.Conclude(w.Context(), id)
	require.NoError(w, err)
	return r
}

func (w *world) tryJudge(id int64) error {
	ctx, cancel := context.WithTimeout(w.Context(), 2*time.Minute)
	defer cancel()
	parts := make(chan error, 2)
	go w.from.listen(ctx)
	go w.to.listen(ctx)
	h := &hashing{comparison{Agent: w.from, id: id}}
	c := &comparing{comparison: comparison{Agent: w.to, id: id}}
	go func() { parts <- w.from.untilJudged(ctx, id, h.step, nil) }()
	go func() { parts <- w.to.untilJudged(ctx, id, c.step, nil) }()
	for range 2 {
		if err := <-parts; err != nil {
			cancel()
			return err
		}
	}
	return nil
}

func (w *world) newRun(table string, n control.NewReconciliation) int64 {
	w.Helper()
	n.Direction, n.TableID, n.By = w.Out.ID, w.Tables[table].ID, "test"
	if n.Mode == "" {
		n.Mode = backfill.RunFull
	}
	r, err := w.Store.CreateReconciliation(w.Context(), n)
	require.NoError(w, err)
	return r.ID
}

// reconcile compares a table as a whole, with changes being pushed and applied meanwhile.
func (w *world) reconcile(table string) *backfill.Reconciliation {
	w.Helper()
	stop := w.sync()
	defer stop()
	return w.judge(w.newRun(table, control.NewReconciliation{}))
}

// differences are the keys of a run that differ: kind, key and, where both sides have
// the row, the columns.
func (w *world) differences(r *backfill.Reconciliation) []string {
	w.Helper()
	all, err := w.Store.Differences(w.Context(), r.ID, control.DifferenceFilter{Limit: 100_000})
	require.NoError(w, err)
	layout, err := w.Store.Layout(w.Context(), r.LayoutID)
	require.NoError(w, err)
	var names []string
	for _, c := range layout.Columns {
		if !slices.Contains(r.Excluded, c.Name) {
			names = append(names, c.Name)
		}
	}
	out := []string{}
	for _, d := range all {
		text := string(d.Kind) + " " + d.Key.String()
		if !d.Settled {
			text = "unsettled " + text
		}
		for i := range d.Source {
			if d.Receiver != nil && (d.Source[i] == nil || d.Receiver[i] == nil || *d.Source[i] != *d.Receiver[i]) && (d.Source[i] != nil || d.Receiver[i] != nil) {
				text += " " + names[i]
			}
		}
		out = append(out, text)
	}
	return out
}

// small makes leaves of a few rows.
func small(rows int) Settings { return Settings{ProofRows: rows, PageRows: 4 * rows} }

// ledger is a table whose two sides are of different types, equal by the mapping.
const ledger = `CREATE TABLE ledger (id bigint PRIMARY KEY, secret text, flag boolean, settled boolean, note text, at timestamptz, amount numeric, price %s, name %s, doc json, facts %s, ratio float8, small %s, seen %s);
	INSERT INTO ledger SELECT n * 10, 'secret', n %% 2 = 0, false, CASE WHEN n %% 3 = 0 THEN NULL ELSE 'note ' || n END, '2024-03-31 01:30+00'::timestamptz + n * interval '1 h',
	       1.0, n + 0.50, 'name ' || n, '{"b": 1, "a": 2}', '{"b": 1,  "a": 2}', 0, n, '2024-01-01 00:00:00.1239'::timestamp(3) FROM generate_series(1, 200) n;`

// faults are the ways in which two sides were seen to differ while their counts agreed
// or nearly so. Each is planted on the receiver.
var plantedFaults = []struct {
	name, sql string
	found     []string // nil: not to be found
}{
	{"a flipped boolean", `UPDATE ledger SET flag = NOT flag WHERE id = 200`, []string{"different 200 flag"}},
	{"NULL for false", `UPDATE ledger SET settled = NULL WHERE id = 210`, []string{"different 210 settled"}},
	{"the empty text for NULL", `UPDATE ledger SET note = '' WHERE id = 300`, []string{"different 300 note"}},
	{"a truncated time zone", `UPDATE ledger SET at = at AT TIME ZONE 'UTC' AT TIME ZONE 'Europe/Berlin' WHERE id = 310`, []string{"different 310 at"}},
	{"1.00 for 1.0 of one type", `UPDATE ledger SET amount = 1.00 WHERE id = 320`, []string{"different 320 amount"}},
	{"1.500 for 1.50 of two types", `UPDATE ledger SET price = price + 0.000 WHERE id = 330`, nil},
	{"another order in a json column that is jsonb on the other side", `UPDATE ledger SET facts = '{"a": 2, "b": 1}' WHERE id = 340`, nil},
	{"another case", `UPDATE ledger SET name = upper(name) WHERE id = 400`, []string{"different 400 name"}},
	{"a trailing blank", `UPDATE ledger SET name = name || ' ' WHERE id = 410`, []string{"different 410 name"}},
	{"values of two rows swapped", `UPDATE ledger l SET name = o.name FROM ledger o WHERE l.id IN (500, 510) AND o.id = 1010 - l.id`, []string{"different 500 name", "different 510 name"}},
	{"four rows later by as much", `UPDATE ledger SET at = at + interval '10 min' WHERE id IN (600, 610, 620, 630)`,
		[]string{"different 600 at", "different 610 at", "different 620 at", "different 630 at"}},
	{"a row missing", `DELETE FROM ledger WHERE id = 700`, []string{"missing 700"}},
	{"a row surplus", `INSERT INTO ledger (id) VALUES (805)`, []string{"surplus 805"}},
	{"a key moved", `UPDATE ledger SET id = 901 WHERE id = 900`, []string{"missing 900", "surplus 901"}},
	{"another order of json", `UPDATE ledger SET doc = '{"a": 2, "b": 1}' WHERE id = 1000`, []string{"different 1000 doc"}},
	{"minus zero", `UPDATE ledger SET ratio = '-0' WHERE id = 1100`, []string{"different 1100 ratio"}},
	{"the first row", `UPDATE ledger SET small = -1 WHERE id = 10`, []string{"different 10 small"}},
	{"the last row", `DELETE FROM ledger WHERE id = 2000`, []string{"missing 2000"}},
	{"a row before the first", `INSERT INTO ledger (id) VALUES (-5)`, []string{"surplus -5"}},
	{"a row after the last", `INSERT INTO ledger (id) VALUES (5000)`, []string{"surplus 5000"}},
	{"a row between the keys of two leaves", `INSERT INTO ledger (id) VALUES (1405)`, []string{"surplus 1405"}},
	{"a value of an excluded column", `UPDATE ledger SET secret = 'changed' WHERE id = 1500`, nil},
}

func newLedger(t *testing.T) *world {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, fmt.Sprintf(ledger, "numeric(12,2)", "varchar(40)", "json", "int", "timestamp(3)"),
		fmt.Sprintf(ledger, "numeric", "text", "jsonb", "bigint", "timestamp(6)"), "public.ledger"), small(7))
	testkit.Exec(w, w.C, `UPDATE backfill_control.table_config SET excluded = '{secret}'`)
	return w
}

func TestGuarantee10_EveryPlantedFaultIsFound(t *testing.T) {
	w := newLedger(t)
	r := w.reconcile("public.ledger")
	require.Equal(w, "EQUAL", r.Verdict, "%s", w.differences(r))
	require.True(w, r.Clean())
	require.EqualValues(w, 200, r.Counts.Covered)
	require.EqualValues(w, 29, r.Counts.Equal, "leaves of 7 rows")
	require.Equal(w, []string{"secret"}, r.Excluded, "what is left out is said")
	require.NotEmpty(w, r.Root)

	var want []string
	for _, f := range plantedFaults {
		w.onReceiver(f.sql)
		want = append(want, f.found...)
	}
	r = w.reconcile("public.ledger")
	require.Equal(w, "DIFFERENT", r.Verdict)
	require.False(w, r.Clean())
	require.ElementsMatch(w, want, w.differences(r))
	require.Zero(w, r.Counts.Pending+r.Counts.Unknown)

	// Leaves in which nothing to be found was planted stayed equal.
	require.NotZero(w, r.Counts.Equal)
	require.Equal(w, r.Counts.Rows, r.Counts.Covered)
}

func TestDifferencesAreRepairedThroughTheQueue(t *testing.T) {
	w := newLedger(t)
	for _, f := range plantedFaults {
		w.onReceiver(f.sql)
	}
	r := w.reconcile("public.ledger")
	surplus := r.Counts.Surplus
	stop := w.sync()
	defer stop()
	child := w.newRun("public.ledger", control.NewReconciliation{Mode: backfill.RunRepair, Parent: r.ID, Note: "as read"})
	repair := w.judge(child)
	require.Equal(w, "DIFFERENT", repair.Verdict, "surplus rows are never deleted")
	require.False(w, repair.Clean())
	r, err := w.Store.Reconciliation(w.Context(), r.ID)
	require.NoError(w, err)
	require.Equal(w, surplus, r.Counts.Open)
	require.Equal(w, r.Counts.Missing+r.Counts.DifferentValues, r.Counts.Repaired)
	_, err = w.Store.CreateReconciliation(w.Context(), control.NewReconciliation{Direction: w.Out.ID, TableID: w.Tables["public.ledger"].ID, Mode: backfill.RunRepair, Parent: r.ID, By: "test"})
	require.Equal(w, backfill.Refused, backfill.CodeOf(err), "surplus rows cannot be sent")

	n, err := w.Store.Waive(w.Context(), r.ID, nil, "someone", "they were put there by hand")
	require.NoError(w, err)
	require.Equal(w, surplus, n)
	all, err := w.Store.Differences(w.Context(), r.ID, control.DifferenceFilter{Kind: "surplus", Limit: 100})
	require.NoError(w, err)
	for _, d := range all {
		require.Equal(w, "waived", d.State)
		require.Equal(w, "someone", d.DecidedBy)
		require.Contains(w, d.Cause, "central")
	}
	w.onReceiver(`DELETE FROM ledger WHERE id % 10 <> 0 OR id > 2000 OR id < 0`)
	r = w.judge(w.newRun("public.ledger", control.NewReconciliation{}))
	require.Equal(w, "EQUAL", r.Verdict, "%s", w.differences(r))
	require.True(w, r.Clean())
}

func TestCausesAreNamed(t *testing.T) {
	w := newWorld(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 9) n`, "public.orders")
	w.onSource(`UPDATE orders SET note = 'y' WHERE id IN (1, 2, 3)`)
	w.drain()
	w.Configure("public.orders", control.TableChange{Delete: ptr(false), Update: ptr(false)})
	w.onSource(`DELETE FROM orders WHERE id = 1; UPDATE orders SET note = 'off' WHERE id = 2`)
	w.onReceiver(`UPDATE orders SET note = 'here' WHERE id = 3; UPDATE orders SET note = 'here' WHERE id = 4; INSERT INTO orders VALUES (77)`)
	r := w.reconcile("public.orders")
	require.Equal(w, "DIFFERENT", r.Verdict)
	all, err := w.Store.Differences(w.Context(), r.ID, control.DifferenceFilter{Limit: 100})
	require.NoError(w, err)
	got := map[string]string{}
	for _, d := range all {
		got[d.Key.String()] = string(d.Kind) + ": " + d.Cause
	}
	require.Equal(w, map[string]string{
		"1":  "surplus: deleted while deletes were not sent",
		"2":  "different: its last change was not sent: the table or the operation was off",
		"3":  "different: changed on central since its last change arrived, or on school while capture was interrupted",
		"4":  "different: never captured: older than capture, or changed while it was interrupted",
		"77": "surplus: born on central, or deleted on school before capture began",
	}, got)
}

func TestKeysThatTheSidesSortDifferentlyAreComparedInBuckets(t *testing.T) {
	t.Parallel()
	rows := `; INSERT INTO words SELECT chr(64 + n %% 60) || n, n FROM generate_series(1, 300) n`
	w := worldOf(testkit.NewPairOf(t, fmt.Sprintf(`CREATE TABLE words (word text COLLATE %s PRIMARY KEY, n int)`+rows, `"C"`),
		fmt.Sprintf(`CREATE TABLE words (word text COLLATE %s PRIMARY KEY, n int)`+rows, `"und-x-icu"`), "public.words"), small(10))
	require.NoError(w, w.from.CountNow(w.Context()))
	w.onSource(`UPDATE words SET n = -1 WHERE n = 150`) // on its way when the run begins
	r := w.reconcile("public.words")
	require.Equal(w, "EQUAL", r.Verdict, "%s", w.differences(r))
	require.EqualValues(w, 31, r.Buckets)
	w.onReceiver(`UPDATE words SET n = 0 WHERE n = 17; DELETE FROM words WHERE n = 18; INSERT INTO words VALUES ('~', 1)`)
	r = w.reconcile("public.words")
	require.Equal(w, "DIFFERENT", r.Verdict)
	require.ElementsMatch(w, []string{"different Q17 n", "missing R18", "surplus ~"}, w.differences(r))
}

func TestMuchThatDiffersIsListedAtOnce(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 200) n`,
		orders+`; INSERT INTO orders SELECT n, 'y' FROM generate_series(1, 200) n WHERE n % 5 > 0`, "public.orders"), Settings{ProofRows: 2, PageRows: 8})
	r := w.reconcile("public.orders")
	require.EqualValues(w, 40, r.Counts.Missing)
	require.EqualValues(w, 160, r.Counts.DifferentValues)
	require.NotZero(w, testkit.Value[int](w, w.C, `SELECT count(*) FROM backfill_control.run_leaf WHERE state = 'different' AND receiver_digest IS NULL`),
		"hashes of the receiver were no longer asked for")
	require.Zero(w, testkit.Value[int](w, w.C, `SELECT count(*) FROM backfill_control.leaf_row`))
}

// What differs at the beginning of a table does not have all the rest of it listed.
func TestRowsAreListedOnlyWhileMostLeavesDiffer(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 400) n`,
		orders+`; INSERT INTO orders SELECT n, CASE WHEN n <= 80 THEN 'y' ELSE 'x' END FROM generate_series(1, 400) n`, "public.orders"), Settings{ProofRows: 2, PageRows: 8})
	r := w.reconcile("public.orders")
	require.EqualValues(w, 80, r.Counts.DifferentValues)
	require.EqualValues(w, 160, r.Counts.Equal)
	require.Less(w, testkit.Value[int](w, w.C, `SELECT count(*) FROM backfill_control.run_leaf WHERE attempts > 0`), 150, "of 200 leaves, 40 of which differ")
}

func TestASampleComparesSomeLeavesAndCountsTheOthers(t *testing.T) {
	w := newLedger(t)
	stop := w.sync()
	defer stop()
	r := w.judge(w.newRun("public.ledger", control.NewReconciliation{Mode: backfill.RunSampled, Sample: 5}))
	require.Equal(w, "EQUAL", r.Verdict)
	require.EqualValues(w, 5, r.Counts.Equal)
	require.EqualValues(w, 24, r.Counts.Counted)
	require.False(w, r.Clean(), "a sample proves no table")
	w.onReceiver(`CREATE TABLE kept AS SELECT * FROM ledger WHERE id = 700; DELETE FROM ledger WHERE id = 700`)
	r = w.judge(w.newRun("public.ledger", control.NewReconciliation{Mode: backfill.RunSampled, Sample: 1}))
	require.Equal(w, "DIFFERENT", r.Verdict)
	require.Equal(w, []string{"missing 700"}, w.differences(r), "a count is enough to find a missing row")

	leaf := testkit.Value[int64](w, w.C, `SELECT n FROM backfill_control.run_leaf WHERE run_id = $1 AND state = 'different'`, r.ID)
	w.onReceiver(`INSERT INTO ledger SELECT * FROM kept`)
	again := w.judge(w.newRun("public.ledger", control.NewReconciliation{Mode: backfill.RunLeaves, Parent: r.ID, Leaf: leaf}))
	require.Equal(w, "EQUAL", again.Verdict, "%s", w.differences(again))
	require.EqualValues(w, 7, again.Counts.Rows)
}

// A change that is captured and not yet sent when a leaf is read is waited for.
func TestGuarantee10_WhatIsOnItsWayIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 50) n`, "public.orders"), small(10))
	w.onSource(`UPDATE orders SET note = 'later'; DELETE FROM orders WHERE id = 3; INSERT INTO orders VALUES (51)`)
	id := w.newRun("public.orders", control.NewReconciliation{})
	wait := async(func() (*backfill.Reconciliation, error) { return nil, w.tryJudge(id) })
	testkit.Eventually(w, "the receiver has something to wait for", func() bool {
		return testkit.Value[int](w, w.C, `SELECT count(*) FROM backfill_control.run_leaf WHERE run_id = $1 AND wait_seq > 0`, id) > 0
	})
	require.Zero(w, testkit.Value[int](w, w.C, `SELECT count(*) FROM backfill_control.run_leaf WHERE judged_at IS NOT NULL`), "nothing is judged before its time")
	r, err := w.Store.Conclude(w.Context(), id)
	require.NoError(w, err)
	require.True(w, r.State.Open(), "a run is not concluded before its leaves are judged")
	w.applyAll()
	_, err = wait()
	require.NoError(w, err)
	r, err = w.Store.Conclude(w.Context(), id)
	require.NoError(w, err)
	require.Equal(w, "EQUAL", r.Verdict)
	require.Zero(w, testkit.Value[int](w, w.C, `SELECT count(*) FROM backfill_control.run_leaf WHERE attempts > 0`), "no leaf looked different for a moment")
}

// A row that changes between the two reads of its leaf is looked at again, and is no
// difference; one that was planted beside it is.
func TestGuarantee10_RowsInFlightAreNoDifference(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 30) n`, "public.orders"), small(10))
	w.onReceiver(`UPDATE orders SET note = 'planted' WHERE id = 15`)
	other := w.agent(testkit.Source)
	applying := &applier{Agent: w.agent(testkit.Receiver)}
	meanwhile(w.from, "leaf: listed", func() {
		w.onSource(`UPDATE orders SET note = 'new' WHERE id = 14; DELETE FROM orders WHERE id = 16; INSERT INTO orders VALUES (15.5)`)
		_, err := other.push(w.Context())
		require.NoError(w, err)
		_, err = applying.apply(w.Context())
		require.NoError(w, err)
	})
	r := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
	require.Equal(w, "DIFFERENT", r.Verdict)
	require.Equal(w, []string{"different 15 note"}, w.differences(r))
	require.Equal(w, 2, testkit.Value[int](w, w.C, `SELECT max(attempts) FROM backfill_control.run_leaf`), "the keys in flight were looked at again")
}

// Entries that were not delivered excuse nothing.
func TestGuarantee10_DroppedChangesExcuseNothing(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 30) n`, "public.orders"), small(10))
	w.onReceiver(`UPDATE orders SET note = 'planted' WHERE id = 15`)
	w.Configure("public.orders", control.TableChange{Update: ptr(false)})
	other, applying := w.agent(testkit.Source), &applier{Agent: w.agent(testkit.Receiver)}
	w.from.faults = func(p string) error { // again and again
		if p == "leaf: listed" {
			w.onSource(`UPDATE orders SET total = total + 1 WHERE id = 15`)
			if _, err := other.push(w.Context()); err != nil {
				return err
			}
			_, err := applying.apply(w.Context())
			return err
		}
		return nil
	}
	r := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
	require.Equal(w, "DIFFERENT", r.Verdict)
	require.Len(w, w.differences(r), 1)
}

// Nor do changes that the receiver has refused, however often the key is written.
func TestGuarantee10_RefusedChangesExcuseNothing(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x', n FROM generate_series(1, 30) n`, "public.orders"), small(10))
	w.onReceiver(`ALTER TABLE orders ADD CHECK (total < 100)`)
	other, applying := w.agent(testkit.Source), &applier{Agent: w.agent(testkit.Receiver)}
	w.onSource(`UPDATE orders SET total = 100 WHERE id = 15`)
	w.drain()
	w.from.faults = func(p string) error { // again and again
		if p == "leaf: listed" {
			w.onSource(`UPDATE orders SET total = total + 1 WHERE id = 15`)
			if _, err := other.push(w.Context()); err != nil {
				return err
			}
			_, err := applying.apply(w.Context())
			return err
		}
		return nil
	}
	r := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
	require.Equal(t, "DIFFERENT", r.Verdict)
	require.Equal(t, []string{"different 15 total"}, w.differences(r))
}

// A truncate that comes between the two reads is about every key of its table.
func TestGuarantee10_ATruncateInFlightIsNoDifference(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 30) n`, "public.orders"), small(10))
	w.onReceiver(`UPDATE orders SET note = 'planted' WHERE id = 15`)
	other, applying := w.agent(testkit.Source), &applier{Agent: w.agent(testkit.Receiver)}
	meanwhile(w.from, "leaf: listed", func() {
		w.onSource(`TRUNCATE orders; INSERT INTO orders VALUES (14, 'x'), (40, 'x')`)
		_, err := other.push(w.Context())
		require.NoError(w, err)
		_, err = applying.apply(w.Context())
		require.NoError(w, err)
	})
	r := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
	require.Empty(t, w.differences(r))
	require.Equal(t, "EQUAL", r.Verdict)
}

// A row that waits on the receiver for its parent has arrived there, as it were: that it
// is not in its table yet is no difference, and it is named.
func TestGuarantee10_AHeldRowIsUnknown(t *testing.T) {
	t.Parallel()
	const lines = `CREATE TABLE parents (id int PRIMARY KEY); CREATE TABLE orders (id int PRIMARY KEY, parent int REFERENCES parents)`
	w := worldOf(testkit.NewPair(t, lines, "public.orders"), small(10))
	w.onSource(`INSERT INTO parents VALUES (1); INSERT INTO orders VALUES (1, 1), (2, NULL)`)
	w.drain()
	require.Len(t, w.setAside(), 1)
	w.atOnce()
	r := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
	require.Equal(t, "UNKNOWN", r.Verdict)
	require.Equal(t, []string{"unsettled missing 1"}, w.differences(r))
	w.onReceiver(`INSERT INTO parents VALUES (1)`)
	w.retryAll()
	require.Equal(t, "EQUAL", w.judge(w.newRun("public.orders", control.NewReconciliation{})).Verdict)
}

// atOnce has leaves looked at again without a pause.
func (w *world) atOnce() {
	w.Helper()
	testkit.Exec(w, w.C, `CREATE FUNCTION public.at_once() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.not_before := NULL; RETURN NEW; END';
		CREATE TRIGGER at_once BEFORE UPDATE ON backfill_control.run_leaf FOR EACH ROW EXECUTE FUNCTION public.at_once()`)
	w.Cleanup(func() {
		c := testkit.Connect(w, w.ControlDSN)
		defer c.Close(context.Background())
		_, _ = c.Exec(context.Background(), `DROP FUNCTION public.at_once CASCADE`)
	})
}

// A key that changes whenever it is looked at is unknown, and named.
func TestAKeyThatNeverRestsIsUnknown(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 30) n`, "public.orders"), small(10))
	other, applying := w.agent(testkit.Source), &applier{Agent: w.agent(testkit.Receiver)}
	w.from.faults = func(p string) error {
		if p == "leaf: listed" || p == "leaf: read" {
			w.onSource(`UPDATE orders SET total = total + 1 WHERE id = 15`)
			if _, err := other.push(w.Context()); err != nil {
				return err
			}
			_, err := applying.apply(w.Context())
			return err
		}
		return nil
	}
	w.atOnce()
	r := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
	require.Equal(w, "UNKNOWN", r.Verdict)
	require.Equal(w, []string{"unsettled different 15 total"}, w.differences(r))
	require.EqualValues(w, 2, r.Counts.Equal)
	require.EqualValues(w, 20, r.Counts.Covered)
}

// Steps that fail are taken again with the same result: those of a run and its
// verdict, of the repair of what it has found, of a sample, and of one that is ended.
func TestReconciliationGoesOnAfterACrashAnywhere(t *testing.T) {
	w := newLedger(t)
	w.onReceiver(`UPDATE ledger SET flag = NOT flag WHERE id = 200; DELETE FROM ledger WHERE id = 1990`)
	stop := w.sync()
	defer stop()
	left := slices.Clone(RunPoints)
	passed := func(at string) {
		require.Contains(w, RunPoints, at)
		left = slices.DeleteFunc(left, func(p string) bool { return p == at })
	}
	crash := func(id int64, points ...string) {
		for _, at := range points {
			failAt(w.from, at)
			failAt(w.to, at)
			require.ErrorIs(w, w.tryJudge(id), errCrash, at)
			w.from, w.to = w.agent(testkit.Source), w.agent(testkit.Receiver)
			passed(at)
		}
	}
	crashing := func(at string) *Control {
		return &Control{Store: w.Store, faults: func(p string) error {
			if p == at {
				passed(p)
				return errCrash
			}
			return nil
		}}
	}

	id := w.newRun("public.ledger", control.NewReconciliation{})
	crash(id, "run: introduced", "run: begun", "leaf: read", "leaf: cut", "leaf: unsent", "leaf: sent", "leaf: compared", "leaf: answered",
		"leaf: listed", "leaf: rows stored", "leaf: rows compared", "leaf: judged")
	require.NoError(w, w.tryJudge(id))
	_, err := crashing("run: concluded").Conclude(w.Context(), id)
	require.ErrorIs(w, err, errCrash)
	r := w.judge(id)
	require.Equal(w, "DIFFERENT", r.Verdict)
	require.Equal(w, []string{"different 200 flag", "missing 1990"}, w.differences(r))
	require.EqualValues(w, 29, r.LeafCount)
	require.True(w, testkit.Value[bool](w, w.C, `
		SELECT bool_and(lower IS NOT DISTINCT FROM before) AND count(*) FILTER (WHERE upper IS NULL) = 1 AND sum(source_count) = 200
		  FROM (SELECT *, lag(upper) OVER (ORDER BY n) AS before FROM backfill_control.run_leaf WHERE run_id = $1) l`, id), "leaves without gap or overlap")

	repair := w.newRun("public.ledger", control.NewReconciliation{Mode: backfill.RunRepair, Parent: id})
	crash(repair, "repair: touched", "repair: noted")
	require.Equal(w, "EQUAL", w.judge(repair).Verdict)
	r, err = w.Store.Reconciliation(w.Context(), id)
	require.NoError(w, err)
	require.EqualValues(w, 2, r.Counts.Repaired)
	require.Zero(w, r.Counts.Open)

	sample := w.newRun("public.ledger", control.NewReconciliation{Mode: backfill.RunSampled, Sample: 5})
	crash(sample, "leaf: hashed")
	require.Equal(w, "EQUAL", w.judge(sample).Verdict)

	ended := w.newRun("public.ledger", control.NewReconciliation{})
	e := RunEnding{ID: ended, By: "ana", To: backfill.RunCancelled, Reason: "cancelled by ana"}
	_, err = crashing("run: ended").EndRun(w.Context(), e)
	require.ErrorIs(w, err, errCrash)
	s, err := (&Control{Store: w.Store}).EndRun(w.Context(), e)
	require.NoError(w, err)
	require.Equal(w, backfill.RunCancelled, s.State)
	require.Empty(w, left, "not on the way")
}

// A run that fails has proved nothing, however equal the leaves it has seen.
func TestGuarantee10_AFailedRunIsNeverEqual(t *testing.T) {
	for name, spoil := range map[string]func(*world){
		"the source's table is altered":   func(w *world) { w.onSource(`ALTER TABLE ledger ADD COLUMN extra int`) },
		"the receiver's table is altered": func(w *world) { w.onReceiver(`ALTER TABLE ledger ALTER COLUMN note TYPE varchar(99)`) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newLedger(t)
			w.from.PageRows = 7
			id := w.newRun("public.ledger", control.NewReconciliation{})
			stop := w.sync()
			defer stop()
			reads := 0
			w.from.faults = func(p string) error {
				if p == "leaf: unsent" {
					if reads++; reads == 4 {
						spoil(w)
					}
				}
				return nil
			}
			require.ErrorContains(w, w.tryJudge(id), "since the reconciliation began")
			r, err := w.Store.Conclude(w.Context(), id)
			require.NoError(w, err)
			require.True(w, r.State.Open())
			r, err = w.Store.EndRun(w.Context(), id, "test", backfill.RunFailed, "the table has changed")
			require.NoError(w, err)
			require.Equal(w, "UNKNOWN", r.Verdict)
			require.NotZero(w, r.Counts.Equal, "leaves were found equal before")
			require.False(w, r.Clean())
			require.Empty(w, r.Root)
		})
	}
}

// Nor is one that is cancelled when every leaf has been found equal.
func TestGuarantee10_ACancelledRunIsNeverEqual(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 30) n`, "public.orders"), small(10))
	id := w.newRun("public.orders", control.NewReconciliation{})
	require.NoError(t, w.tryJudge(id))
	r, err := w.Store.EndRun(t.Context(), id, "ann", backfill.RunCancelled, "enough")
	require.NoError(t, err)
	require.EqualValues(t, 3, r.Counts.Equal)
	require.Zero(t, r.Counts.Pending)
	require.Equal(t, "UNKNOWN", r.Verdict)
	require.False(t, r.Clean())
}

// A process that comes back late finds its leaves judged by another, and adds nothing.
func TestGuarantee5_ALeafIsJudgedOnce(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 30) n`, "public.orders"), small(10))
	w.onReceiver(`UPDATE orders SET note = 'planted' WHERE id = 15`)
	id := w.newRun("public.orders", control.NewReconciliation{})
	late := w.agent(testkit.Receiver)
	reached, resume := w.stopAt(late, "leaf: rows compared")
	first := w.to
	w.to = late
	wait := async(func() (*backfill.Reconciliation, error) { return nil, w.tryJudge(id) })
	<-reached
	c := &comparing{comparison: comparison{Agent: first, id: id}}
	require.NoError(t, first.untilJudged(t.Context(), id, c.step, nil))
	resume(nil)
	_, err := wait()
	require.NoError(t, err)
	old := []proof.Leaf{{N: 1, Count: 10, Digest: "of an earlier read"}}
	require.ErrorIs(t, w.Store.Hashed(t.Context(), id, old, control.Evidence{Snapshot: "1:1:"}), control.ErrFenced)
	require.ErrorIs(t, w.Store.Compared(t.Context(), id, old), control.ErrFenced)
	r, err := w.Store.Conclude(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, "DIFFERENT", r.Verdict)
	require.Equal(t, []string{"different 15 note"}, w.differences(r))
}

// Under a writer on the very keys, equal sides are found equal and a planted fault is
// found, each time.
func TestGuarantee10_NoFalseAlarmUnderAWriter(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 400) n`, "public.orders"), small(40))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	stop := w.sync()
	defer stop()
	ctx, cancel := context.WithCancel(t.Context())
	var writes atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := pgx.Connect(ctx, w.SourceDSN)
		if err != nil {
			return
		}
		defer conn.Close(context.Background())
		random := rand.New(rand.NewPCG(seed, 1))
		for ctx.Err() == nil {
			key := random.IntN(400) + 1
			if key == 200 {
				continue
			}
			sql := fmt.Sprintf(`UPDATE orders SET total = total + 1, note = md5(random()::text) WHERE id = %d`, key)
			switch random.IntN(10) {
			case 0:
				sql = fmt.Sprintf(`DELETE FROM orders WHERE id = %d`, key)
			case 1, 2:
				sql = fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'again') ON CONFLICT DO NOTHING`, key)
			case 3:
				sql = fmt.Sprintf(`BEGIN; UPDATE orders SET id = id + 1000 WHERE id = %[1]d; UPDATE orders SET id = id - 1000 WHERE id > 1000; COMMIT`, key)
			}
			if _, err := conn.Exec(ctx, sql); err != nil && ctx.Err() == nil {
				t.Errorf("writer: %v", err)
				return
			}
			writes.Add(1)
			sleep(ctx, time.Millisecond)
		}
	}()
	defer func() { cancel(); <-done }()
	for round := range 3 {
		before := writes.Load()
		r := w.judge(w.newRun("public.orders", control.NewReconciliation{}))
		require.Equal(t, "EQUAL", r.Verdict, "round %d: %s", round, w.differences(r))
		w.onReceiver(`UPDATE orders SET note = 'planted' WHERE id = 200`)
		r = w.judge(w.newRun("public.orders", control.NewReconciliation{}))
		require.Equal(t, "DIFFERENT", r.Verdict)
		require.Equal(t, "different 200 note", strings.Join(w.differences(r), "; "))
		w.onReceiver(`UPDATE orders SET note = 'x' WHERE id = 200`)
		require.Greater(t, writes.Load(), before, "the writer was at work")
	}
}

// A backfill of the differences stages just the keys that were found, goes on where
// it was interrupted, and makes the sides equal.
func TestDifferencesAreBackfilled(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, orders+`; INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 100) n`,
		orders+`; INSERT INTO orders SELECT n, CASE WHEN n % 10 = 0 THEN 'y' ELSE 'x' END FROM generate_series(1, 100) n WHERE n % 7 > 0; INSERT INTO orders VALUES (1000)`, "public.orders"),
		Settings{ProofRows: 9, PageRows: 5})
	r := w.reconcile("public.orders")
	require.EqualValues(w, 14+9, r.Counts.Missing+r.Counts.DifferentValues)
	require.NoError(w, w.from.CountNow(w.Context()))
	require.NoError(w, w.to.CountNow(w.Context()))
	panel, err := w.Store.Panel(w.Context(), testkit.Site, "public.orders", testkit.Source)
	require.NoError(w, err)
	require.EqualValues(w, 23, panel.Proof.Unequal)
	w.onSource(`DELETE FROM orders WHERE id IN (7, 14, 21, 28, 35, 42)`) // a page of keys whose rows are gone

	id, err := w.Store.CreateRequest(w.Context(), control.NewRequest{Direction: w.Out.ID, TableID: w.Tables["public.orders"].ID, Mode: backfill.ModeDifferences, Proof: r.ID, By: "test"})
	require.NoError(w, err)
	k := w.claim(w.from, id.ID)
	require.NoError(w, k.freeze(w.Context()))
	for range 2 {
		_, err := k.page(w.Context())
		require.NoError(w, err)
	}
	w.expire(id.ID)
	w.walk(id.ID)
	require.Len(w, w.staged(id.ID), 17)
	w.Approve(id.ID)
	w.release(id.ID, 100)
	w.drain()
	w.onReceiver(`DELETE FROM orders WHERE id = 1000`)
	w.Equal("orders")
	r = w.reconcile("public.orders")
	require.True(w, r.Clean())
}
