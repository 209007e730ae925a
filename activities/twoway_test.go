package activities

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// pairOfWriters is a world whose tables are captured on both sides.
type pairOfWriters struct {
	*world
	apply0, apply1 *applier
}

func newTwoWay(t *testing.T, policy, schema string, tables ...string) *pairOfWriters {
	t.Helper()
	return twoWayOf(newWorld(t, schema, tables...), policy, tables...)
}

func twoWayOf(w *world, policy string, tables ...string) *pairOfWriters {
	w.Helper()
	for _, table := range tables {
		w.Configure(table, control.TableChange{CapturedFrom: []string{testkit.Source, testkit.Receiver}, Conflict: &policy})
	}
	w.Setup()
	return &pairOfWriters{world: w, apply0: &applier{Agent: w.from}, apply1: &applier{Agent: w.to}}
}

// pushOf pushes all of one side's outbox.
func (w *pairOfWriters) pushOf(a *Agent) {
	w.Helper()
	for range 1000 {
		p, err := a.push(w.Context())
		require.NoError(w, err)
		if p.all && len(p.left) == 0 && p.rows == 0 {
			return
		}
	}
	w.Fatal("the outbox does not become empty")
}

// applyOn applies everything there is on one side, held rows included.
func (w *pairOfWriters) applyOn(l *applier) {
	w.Helper()
	for range 1000 {
		l.started, l.settleAt = false, l.settleAt.AddDate(-1, 0, 0)
		busy, err := l.apply(w.Context())
		require.NoError(w, err)
		if !busy {
			return
		}
	}
	w.Fatal("the receiver does not come to the end of the queue")
}

// rest pushes and applies on both sides until nothing moves any more.
func (w *pairOfWriters) rest() {
	w.Helper()
	entries := func() int64 {
		return testkit.Value[int64](w, w.C, `SELECT count(*) FROM backfill_control.entry`) + testkit.Value[int64](w, w.S, `SELECT count(*) FROM backfill_maple_school.outbox`) +
			testkit.Value[int64](w, w.R, `SELECT count(*) FROM backfill_maple_central.outbox`)
	}
	for range 20 {
		w.pushOf(w.from)
		w.pushOf(w.to)
		before := entries()
		w.applyOn(w.apply0)
		w.applyOn(w.apply1)
		if entries() == before {
			return
		}
	}
	w.Fatal("it does not come to rest: changes go to and fro")
}

// both are what the sides hold.
func (w *pairOfWriters) both(table string) (source, receiver []string) {
	w.Helper()
	return testkit.Rows(w, w.S, table), testkit.Rows(w, w.R, table)
}

// lost lists the versions in history that lost a conflict, oldest first.
func (w *pairOfWriters) lost() []string {
	w.Helper()
	all, err := w.Store.History(w.Context(), control.EntryFilter{Site: testkit.Site, State: "lost", Limit: 1000})
	require.NoError(w, err)
	out := []string{}
	for i := len(all) - 1; i >= 0; i-- {
		e, row := all[i], "-"
		if e.Row != nil {
			row = ""
			for n, v := range e.Row {
				if n > 0 {
					row += ","
				}
				if v != nil {
					row += *v
				}
			}
		}
		require.Equal(w, "lost", e.State)
		require.Contains(w, e.Reason, " of ")
		out = append(out, fmt.Sprintf("%s %s %s", e.From, e.Op, row))
	}
	return out
}

// forgotten waits until own changes are known no longer.
func (w *pairOfWriters) forgotten() {
	w.Helper()
	for range 4 {
		w.applyOn(w.apply0)
		w.applyOn(w.apply1)
	}
	require.Zero(w, testkit.Value[int](w, w.S, `SELECT count(*) FROM backfill_maple_school.own`), "own changes of the source")
	require.Zero(w, testkit.Value[int](w, w.R, `SELECT count(*) FROM backfill_maple_central.own`), "own changes of the receiver")
}

const seats = `CREATE TABLE seats (id numeric PRIMARY KEY, who text)`

// Both sides write the same keys and push before either applies.
func TestGuarantee2_TwoWayConflictsAreDecidedAlikeOnBothSides(t *testing.T) {
	for _, winner := range []string{testkit.Source, testkit.Receiver} {
		t.Run(winner, func(t *testing.T) {
			w := newTwoWay(t, winner, seats, "public.seats")
			w.onSource(`INSERT INTO seats SELECT g, 'old' FROM generate_series(1, 8) g`)
			w.rest()
			w.Equal("seats")
			require.Empty(t, w.lost())

			w.onSource(`UPDATE seats SET who = 'school' WHERE id IN (1, 2, 3, 5, 8); DELETE FROM seats WHERE id = 4; INSERT INTO seats VALUES (9, 'same'), (10, 'school')`)
			w.onReceiver(`UPDATE seats SET who = 'central' WHERE id IN (1, 2, 4, 6, 8); DELETE FROM seats WHERE id = 3; INSERT INTO seats VALUES (9, 'same')`)
			w.pushOf(w.from)
			w.pushOf(w.to)
			// One more on top that is not pushed when the other side's change comes.
			w.onReceiver(`UPDATE seats SET who = 'central, later' WHERE id = 2`)
			w.applyOn(w.apply1)
			w.rest()
			w.Equal("seats")
			source, _ := w.both("seats")
			if winner == testkit.Source {
				require.Equal(t, []string{"(1,school)", "(10,school)", "(2,school)", "(3,school)", "(5,school)", "(6,central)", "(7,old)", "(8,school)", "(9,same)"}, source)
				require.Subset(t, w.lost(), []string{"central update 1,central", "central update 2,central, later", "central delete -", "central update 4,central", "central update 8,central"})
			} else {
				require.Equal(t, []string{"(1,central)", "(10,school)", `(2,"central, later")`, "(4,central)", "(5,school)", "(6,central)", "(7,old)", "(8,central)", "(9,same)"}, source)
				require.ElementsMatch(t, []string{"school update 1,school", "school update 2,school", "school update 3,school", "school delete -", "school update 8,school"}, w.lost())
			}
			w.forgotten()
			// What is written with the decision known is no conflict.
			w.onReceiver(`UPDATE seats SET who = 'after' WHERE id IN (1, 2)`)
			n := len(w.lost())
			w.rest()
			w.Equal("seats")
			require.Len(t, w.lost(), n)
		})
	}
}

// A version that was lost is in history once, whoever dies when.
func TestTwoWayWhatLostIsRecordedOnce(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats VALUES (1, 'school'), (2, 'school')`)
	w.pushOf(w.from)
	w.onReceiver(`INSERT INTO seats VALUES (1, 'central'), (2, 'central')`)
	for _, at := range TwoWayPoints {
		failAt(w.to, at)
		_, err := w.apply1.apply(t.Context())
		require.ErrorIs(t, err, errCrash, at)
	}
	w.apply1 = &applier{Agent: w.agent(testkit.Receiver)}
	w.rest()
	w.Equal("seats")
	require.ElementsMatch(t, []string{"central update 1,central", "central update 2,central"}, w.lost())
	require.Zero(t, testkit.Value[int](t, w.R, `SELECT count(*) FROM backfill_maple_central.lost`))
	require.Equal(t, 2, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.entry WHERE dropped`))
}

// What was written on one side is applied over a change of the other that its writer
// had seen, although that is still remembered there.
func TestTwoWayChangesThatSawEachOtherAreNoConflict(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats VALUES (1, 'a')`)
	w.pushOf(w.from)
	w.applyOn(w.apply1)
	w.onReceiver(`UPDATE seats SET who = 'b'`)
	w.pushOf(w.to)
	w.applyOn(w.apply0)
	require.Equal(t, []string{"(1,b)"}, testkit.Rows(t, w.S, "seats"))
	w.onSource(`UPDATE seats SET who = 'c'`)
	w.rest()
	require.Equal(t, []string{"(1,c)"}, testkit.Rows(t, w.R, "seats"))
	require.Empty(t, w.lost())
	require.Equal(t, int64(3), testkit.Value[int64](t, w.C, `SELECT count(*) FROM backfill_control.entry`), "applied rows are not captured again")
}

// A side remembers what it has pushed until the other has seen it, and until it has
// applied what the other had pushed by then.
func TestTwoWayOwnChangesAreRememberedLongEnough(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats SELECT g, 'old' FROM generate_series(1, 5) g`)
	w.rest()
	w.forgotten()
	w.onSource(`UPDATE seats SET who = 'school' WHERE id = 1`)
	w.pushOf(w.from)
	settle := func() {
		for range 3 {
			w.applyOn(w.apply0)
		}
	}
	settle() // the other side has not seen it
	for id := 5; id > 0; id-- {
		w.onReceiver(fmt.Sprintf(`UPDATE seats SET who = 'central' WHERE id = %d`, id))
	}
	w.to.BatchRows, w.from.BatchRows = 1, 1
	w.pushOf(w.to)
	w.applyOn(w.apply1) // now it has, but its own changes are on their way
	settle()
	w.rest()
	w.Equal("seats")
	require.Equal(t, []string{"(1,school)", "(2,central)", "(3,central)", "(4,central)", "(5,central)"}, testkit.Rows(t, w.S, "seats"))
	require.Equal(t, []string{"central update 1,central"}, w.lost())
	w.forgotten()
}

// The application commits its row while an apply waits for it.
func TestTwoWayAWriteDuringAnApplyIsSeen(t *testing.T) {
	for _, winner := range []string{testkit.Source, testkit.Receiver} {
		t.Run(winner, func(t *testing.T) {
			w := newTwoWay(t, winner, seats, "public.seats")
			w.onSource(`INSERT INTO seats VALUES (1, 'school')`)
			w.pushOf(w.from)
			app := testkit.Session(t, w.ReceiverDSN)
			testkit.Exec(t, app, `BEGIN; INSERT INTO seats VALUES (1, 'central')`)
			wait := async(func() (bool, error) { return w.apply1.apply(t.Context()) })
			testkit.Eventually(t, "the apply waits for the application", func() bool { return testkit.LockWaiters(t, w.R) == 1 })
			testkit.Exec(t, app, `COMMIT`)
			_, err := wait()
			require.NoError(t, err)
			w.rest()
			w.Equal("seats")
			require.Equal(t, []string{"(1," + winner + ")"}, testkit.Rows(t, w.S, "seats"))
			require.Len(t, w.lost(), 1)
		})
	}
}

// A push that crashed after its commit, or was held up, does not make what it sent
// look unsent, or known too late.
func TestTwoWayPushesThatComeBackLate(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats VALUES (1, 'a')`)
	other := w.agent(testkit.Source)
	reached, resume := w.stopAt(other, "push: committed")
	wait := async(func() (pushed, error) { return other.push(t.Context()) })
	<-reached
	w.applyOn(w.apply1)
	w.onReceiver(`UPDATE seats SET who = 'b'`)
	w.pushOf(w.to)
	w.applyOn(w.apply0) // the source does not know yet that it has sent its change
	resume(nil)
	_, err := wait()
	require.NoError(t, err)
	w.rest()
	w.Equal("seats")
}

// A released row gives way to what the other side has changed since it was read,
// whether the release sees that or only the receiver does.
func TestGuarantee4_TwoWayReleasedRowsGiveWay(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats SELECT g, 'old' FROM generate_series(1, 4) g; DELETE FROM backfill_maple_school.outbox`)
	id := w.Request("public.seats").ID
	w.walk(id)
	w.onReceiver(`INSERT INTO seats VALUES (1, 'new')`)
	w.pushOf(w.to) // known to the release
	w.Approve(id)
	require.Equal(t, int64(1), w.release(id, 2).Superseded)
	w.onReceiver(`INSERT INTO seats VALUES (2, 'newer')`) // known on the receiver alone
	w.rest()
	w.Equal("seats")
	source, _ := w.both("seats")
	require.Equal(t, []string{"(1,new)", "(2,newer)", "(3,old)", "(4,old)"}, source)
	r := w.Now(id)
	require.Equal(t, []int64{2, 2}, []int64{r.Released, r.Superseded})
	w.forgotten()
}

// Backfills of both directions are open at once: rows do not change places.
func TestGuarantee4_TwoWayBackfillsOfBothDirections(t *testing.T) {
	w := newTwoWay(t, backfill.Quarantine, seats, "public.seats")
	w.onSource(`INSERT INTO seats SELECT g, 'school' FROM generate_series(1, 6) g; DELETE FROM backfill_maple_school.outbox`)
	w.onReceiver(`INSERT INTO seats SELECT g, 'central' FROM generate_series(3, 9) g; DELETE FROM backfill_maple_central.outbox`)
	out := w.Request("public.seats").ID
	back, err := w.Store.CreateRequest(t.Context(), control.NewRequest{Direction: w.to.Out.ID, TableID: w.Tables["public.seats"].ID, Mode: backfill.ModeFull, By: "test"})
	require.NoError(t, err)
	w.walk(out)
	w.finish(w.claim(w.to, back.ID))
	w.Approve(out)
	w.Approve(back.ID)
	_, _, err = w.Store.ReleaseBatch(t.Context(), out, 4) // 1 to 4 go out, 5 and 6 are overtaken
	require.NoError(t, err)
	require.Equal(t, int64(2), w.release(back.ID, 100).Superseded)
	require.Equal(t, int64(2), w.release(out, 100).Superseded)
	w.rest()
	w.Equal("seats")
	source, _ := w.both("seats")
	require.Equal(t, []string{"(1,school)", "(2,school)", "(3,school)", "(4,school)", "(5,central)", "(6,central)", "(7,central)", "(8,central)", "(9,central)"}, source)
}

// Two releases of the same key, one each way, must not both find the way free.
func TestGuarantee4_TwoWayReleasesTakeTurns(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats VALUES (1, 'school')`)
	w.rest()
	id := w.Request("public.seats").ID
	w.walk(id)
	w.Approve(id)
	other := testkit.Session(t, w.ControlDSN)
	testkit.Exec(t, other, `BEGIN; SELECT pg_advisory_xact_lock(20011, `+fmt.Sprint(w.to.Out.ID)+`)`)
	wait := async(func() (bool, error) { done, _, err := w.Store.ReleaseBatch(t.Context(), id, 10); return done, err })
	testkit.Eventually(t, "the release waits for one of the other direction", func() bool { return testkit.LockWaiters(t, w.C) == 1 })
	testkit.Exec(t, other, `COMMIT`)
	_, err := wait()
	require.NoError(t, err)
}

// With quarantine the key is set aside on both sides until a person decides on one.
func TestTwoWayQuarantineIsDecidedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		wish, where string
		want        []string
	}{
		"retry on the receiver": {"retry", testkit.Receiver, []string{"(1,school)", "(2,school)"}},
		"skip on the receiver":  {"skip", testkit.Receiver, []string{"(1,central)"}},
		"retry on the source":   {"retry", testkit.Source, []string{"(1,central)"}},
		"skip on the source":    {"skip", testkit.Source, []string{"(1,school)", "(2,school)"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTwoWay(t, backfill.Quarantine, seats, "public.seats")
			w.onSource(`INSERT INTO seats VALUES (1, 'old'), (2, 'old')`)
			w.rest()
			w.onSource(`UPDATE seats SET who = 'first'`)
			w.onReceiver(`UPDATE seats SET who = 'central'; DELETE FROM seats WHERE id = 2`)
			w.rest()
			// More of the same while it is undecided.
			w.onSource(`UPDATE seats SET who = 'school'`)
			w.rest()
			source, receiver := w.both("seats")
			require.Equal(t, []string{"(1,school)", "(2,school)"}, source)
			require.Equal(t, []string{"(1,central)"}, receiver)
			aside := func() []string {
				return testkit.Strings(t, w.C, `SELECT d.from_side || ' ' || q.key[1] FROM backfill_control.quarantine q JOIN backfill_control.direction d ON d.id = q.direction
					WHERE q.state = 'quarantined' ORDER BY 1`)
			}
			require.Equal(t, []string{"central 1", "central 2", "school 1", "school 2"}, aside())

			in := map[string]*Agent{testkit.Source: w.from, testkit.Receiver: w.to}[c.where].In.ID
			for _, seq := range testkit.Strings(t, w.C, `SELECT seq::text FROM backfill_control.quarantine WHERE direction = $1`, in) {
				var n int64
				_, err := fmt.Sscan(seq, &n)
				require.NoError(t, err)
				require.NoError(t, w.Store.Wish(t.Context(), testkit.Site, n, c.wish, "someone"))
			}
			w.rest()
			w.Equal("seats")
			source, _ = w.both("seats")
			require.Equal(t, c.want, source)
			require.Empty(t, aside())
			require.NotEmpty(t, w.lost())
			w.forgotten()
		})
	}
}

// A key is the same however it is spelled.
func TestTwoWayRespelledKeys(t *testing.T) {
	w := newTwoWay(t, testkit.Receiver, seats, "public.seats")
	w.onSource(`INSERT INTO seats VALUES (1, 'old'), (2, 'old')`)
	w.rest()
	w.onSource(`UPDATE seats SET id = 1.0, who = 'school' WHERE id = 1; UPDATE seats SET who = 'school' WHERE id = 2`)
	w.onReceiver(`UPDATE seats SET who = 'central' WHERE id = 1; UPDATE seats SET id = 2.00, who = 'central' WHERE id = 2`)
	w.rest()
	w.Equal("seats")
	source, _ := w.both("seats")
	require.Equal(t, []string{"(1,central)", "(2.00,central)"}, source)
}

// A truncate is not sent of a table captured on both sides: the gap is told.
func TestTwoWayTruncateIsAGap(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats VALUES (1, 'old')`)
	w.rest()
	require.NoError(t, w.from.CountNow(t.Context()))
	id := w.Request("public.seats").ID
	w.walk(id)
	w.onSource(`TRUNCATE seats; INSERT INTO seats VALUES (2, 'new')`)
	w.rest()
	_, receiver := w.both("seats")
	require.Equal(t, []string{"(1,old)", "(2,new)"}, receiver)
	require.Equal(t, backfill.Failed, w.Now(id).State)
	require.Contains(t, w.Now(id).Reason, "truncated")
}

// A table becomes captured on both sides while changes are on their way.
func TestTwoWayBeginsWithChangesOnTheirWay(t *testing.T) {
	for _, winner := range []string{testkit.Source, testkit.Receiver} {
		t.Run(winner, func(t *testing.T) {
			w := newWorld(t, seats, "public.seats")
			w.onSource(`INSERT INTO seats VALUES (1, 'old'), (2, 'old')`)
			w.drain()
			w.onSource(`UPDATE seats SET who = 'school'`)
			w.pushAll()
			two := twoWayOf(w, winner, "public.seats")
			w.onReceiver(`UPDATE seats SET who = 'central' WHERE id = 1`)
			two.pushOf(w.to)
			two.applyOn(two.apply0)
			two.rest()
			w.Equal("seats")
			source, _ := two.both("seats")
			require.Equal(t, []string{"(1," + winner + ")", "(2,school)"}, source)
			require.Len(t, two.lost(), 1)
			two.forgotten()
		})
	}
}

// The policy changes while changes are on their way: both sides judge by the one that
// was in force when the earlier was pushed.
func TestTwoWayPolicyChangesInBetween(t *testing.T) {
	w := newTwoWay(t, testkit.Source, seats, "public.seats")
	w.onSource(`INSERT INTO seats VALUES (1, 'school')`)
	w.pushOf(w.from)
	w.onReceiver(`INSERT INTO seats VALUES (1, 'central')`)
	w.pushOf(w.to)
	w.applyOn(w.apply1)
	w.Configure("public.seats", control.TableChange{Conflict: ptr(testkit.Receiver)})
	w.rest()
	w.Equal("seats")
	source, _ := w.both("seats")
	require.Equal(t, []string{"(1,school)"}, source)
	w.onSource(`UPDATE seats SET who = 'school 2'`)
	w.onReceiver(`UPDATE seats SET who = 'central 2'`)
	w.rest()
	w.Equal("seats")
	source, _ = w.both("seats")
	require.Equal(t, []string{"(1,\"central 2\")"}, source)
}

// Held rows are judged again when they are tried again.
func TestTwoWayHeldRows(t *testing.T) {
	const schema = `CREATE TABLE desks (id int PRIMARY KEY); CREATE TABLE seats (id int PRIMARY KEY, desk int REFERENCES desks DEFERRABLE, who text)`
	for _, winner := range []string{testkit.Source, testkit.Receiver} {
		t.Run(winner, func(t *testing.T) {
			w := newTwoWay(t, winner, schema, "public.desks", "public.seats")
			w.onSource(`INSERT INTO desks VALUES (1); INSERT INTO seats VALUES (1, 1, 'old')`)
			w.rest()
			// The parent stays behind.
			w.onSource(`INSERT INTO desks VALUES (2); DELETE FROM backfill_maple_school.outbox; UPDATE seats SET desk = 2, who = 'school'`)
			w.pushOf(w.from)
			w.applyOn(w.apply1)
			require.Len(t, w.setAside(), 1)
			w.onReceiver(`UPDATE seats SET who = 'central'`)
			w.rest()
			w.onSource(`UPDATE desks SET id = id`)
			w.rest()
			w.Equal("desks", "seats")
			require.Empty(t, w.setAside())
			require.Len(t, w.lost(), 1)
			w.forgotten()
		})
	}
}

// Two sites over the same two databases, in opposite directions, would hand a change
// to each other for ever.
func TestATableCannotGoRoundThroughTwoSites(t *testing.T) {
	w := newWorld(t, seats, "public.seats")
	require.NoError(t, w.Store.CreateSite(t.Context(), "test", "oak", [2]string{"east", "west"}))
	var oak []*Agent
	for name, dsn := range map[string]string{"east": w.ReceiverDSN, "west": w.SourceDSN} {
		db, err := side.Open(t.Context(), "oak", name, dsn)
		require.NoError(t, err)
		t.Cleanup(db.Close)
		steps, err := db.SetupSteps(t.Context(), nil, side.Roles{})
		require.NoError(t, err)
		require.NoError(t, db.Setup(t.Context(), steps))
		a, err := NewAgent(t.Context(), w.Store, db, "agent of "+name, Settings{})
		require.NoError(t, err)
		oak = append(oak, a)
	}
	put := func(from string) error {
		_, err := w.Store.PutTable(t.Context(), "test", "oak", "public.seats", control.TableChange{CapturedFrom: []string{from}})
		return err
	}
	remove := func() {
		_, err := w.Store.RemoveTable(t.Context(), "test", "oak", "public.seats")
		require.NoError(t, err)
	}
	look := func() (err error) {
		for _, a := range append([]*Agent{w.from, w.to}, oak...) {
			err = errors.Join(err, a.ready(t.Context()))
		}
		return err
	}
	const round = "comes back to where it was in site maple: its changes would go round for ever"

	// Nobody has looked where the databases are: the agents notice, until it is mended.
	require.NoError(t, put("east"))
	require.ErrorContains(t, look(), round)
	require.ErrorContains(t, look(), round)
	require.Equal(t, 1, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.side WHERE halted LIKE '%go round for ever%'`))
	remove()
	require.NoError(t, look())
	// Now it is known.
	require.Equal(t, backfill.Refused, backfill.CodeOf(put("east")))
	require.NoError(t, put("west"), "the same way twice is no circle")
	require.NoError(t, look())
}

// The policy changes between two pushes of a key, or between one that was cut off and
// its repeat, while the other side's change of it is on its way: the sides decide
// alike, whatever comes in one batch.
func TestTwoWayPolicyChangesBetweenPushesOfAKey(t *testing.T) {
	for _, p := range []struct {
		was, is string
		batch   int
	}{
		{testkit.Source, testkit.Receiver, 1}, {testkit.Receiver, testkit.Source, 100}, {testkit.Source, backfill.Quarantine, 100}, {backfill.Quarantine, testkit.Receiver, 1},
	} {
		for name, c := range map[string]struct {
			cut   bool                                // the first push does not come to remove its records
			again func(w *pairOfWriters, push func()) // what happens between the other side's push and the applies
		}{
			"pushed twice":          {false, func(w *pairOfWriters, push func()) { push() }},
			"applied between":       {false, func(w *pairOfWriters, push func()) { w.applyOn(w.apply1); push() }},
			"cut off":               {true, func(*pairOfWriters, func()) {}},
			"cut off, then applied": {true, func(w *pairOfWriters, push func()) { w.applyOn(w.apply1); push() }},
			"cut off, and repeated": {true, func(w *pairOfWriters, push func()) { push() }},
		} {
			t.Run(fmt.Sprintf("%s, then %s, %d at a time, %s", p.was, p.is, p.batch, name), func(t *testing.T) {
				w := newTwoWay(t, p.was, seats, "public.seats")
				w.from.BatchRows, w.to.BatchRows = p.batch, p.batch
				w.onSource(`INSERT INTO seats VALUES (1, 'old')`)
				w.rest()
				w.onSource(`UPDATE seats SET who = 'school'`)
				if c.cut {
					cut := w.agent(testkit.Source)
					failAt(cut, "push: committed")
					_, err := cut.push(t.Context())
					require.ErrorIs(t, err, errCrash)
				} else {
					w.pushOf(w.from)
				}
				w.onReceiver(`UPDATE seats SET who = 'central'`)
				w.Configure("public.seats", control.TableChange{Conflict: &p.is})
				w.pushOf(w.to)
				c.again(w, func() {
					w.onSource(`UPDATE seats SET who = 'school, later'`)
					w.pushOf(w.from)
				})
				w.rest()
				aside := testkit.Strings(t, w.C, `SELECT d.from_side FROM backfill_control.quarantine q JOIN backfill_control.direction d ON d.id = q.direction WHERE q.state = 'quarantined' ORDER BY 1`)
				if p.was == backfill.Quarantine {
					require.Equal(t, []string{testkit.Receiver, testkit.Source}, aside, "the policy of the earlier change counts")
					w.wish("retry")
					w.rest()
				} else {
					require.Empty(t, aside, "the policy of the earlier change counts")
					require.Contains(t, testkit.Rows(t, w.S, "seats")[0], p.was)
				}
				w.Equal("seats")
				w.forgotten()
			})
		}
	}
}

// So they do where the earlier change is set aside on one side, and a later one stands
// for it there.
func TestTwoWayPolicyChangesWhileAChangeIsHeld(t *testing.T) {
	for _, winner := range []string{testkit.Source, testkit.Receiver} {
		t.Run(winner, func(t *testing.T) {
			w := newTwoWay(t, winner, `CREATE TABLE desks (id int PRIMARY KEY); CREATE TABLE seats (id int PRIMARY KEY, desk int REFERENCES desks, who text)`, "public.desks", "public.seats")
			w.onSource(`INSERT INTO desks VALUES (1); INSERT INTO seats VALUES (1, 1, 'old')`)
			w.rest()
			// The parent stays behind.
			w.onSource(`INSERT INTO desks VALUES (2); DELETE FROM backfill_maple_school.outbox; UPDATE seats SET desk = 2, who = 'school'`)
			w.pushOf(w.from)
			w.applyOn(w.apply1)
			require.Len(t, w.setAside(), 1)
			w.onReceiver(`UPDATE seats SET who = 'central'`)
			other := map[string]string{testkit.Source: testkit.Receiver, testkit.Receiver: testkit.Source}[winner]
			w.Configure("public.seats", control.TableChange{Conflict: &other})
			w.pushOf(w.to)
			w.onSource(`UPDATE seats SET desk = 1, who = 'school'`)
			w.pushOf(w.from)
			w.rest()
			w.Equal("seats")
			require.Equal(t, []string{"(1,1," + winner + ")"}, testkit.Rows(t, w.S, "seats"), "the policy of the earlier change counts")
			require.Empty(t, w.setAside())
			w.forgotten()
		})
	}
}

// A key that loses is not pushed; those that were captured with it by one statement are.
func TestGuarantee4_TwoWayKeysOfOneStatementAreDecidedOneByOne(t *testing.T) {
	w := newTwoWay(t, testkit.Receiver, seats, "public.seats")
	w.onSource(`INSERT INTO seats SELECT g, 'old' FROM generate_series(1, 400) g`)
	w.rest()
	w.onSource(`UPDATE seats SET who = 'school'`)
	w.onReceiver(`UPDATE seats SET who = 'central' WHERE id IN (2, 3, 200)`)
	w.pushOf(w.to)
	w.applyOn(w.apply0)
	require.Equal(t, 3, testkit.Value[int](t, w.S, `SELECT count(*) FROM seats WHERE who = 'central'`))
	require.Equal(t, 397, testkit.Value[int](t, w.S, `SELECT sum(n) FROM backfill_maple_school.outbox`))
	w.rest()
	w.Equal("seats")
	require.Equal(t, []string{"central 3", "school 397"}, testkit.Strings(t, w.S, `SELECT who || ' ' || count(*) FROM seats GROUP BY who ORDER BY who`))
}
