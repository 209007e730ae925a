package activities

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// history is a world whose orders are older than their capture: the receiver has none.
func history(t *testing.T, rows int) *world {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`ALTER TABLE orders DISABLE TRIGGER ALL`)
	w.onSource(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(1, $1::int) g`, rows)
	w.Setup()
	return w
}

func (w *world) receiver() map[string]string {
	out := map[string]string{}
	for _, r := range testkit.Strings(w, w.R, `SELECT id || '=' || note FROM orders`) {
		var k, v string
		for i := range r {
			if r[i] == '=' {
				k, v = r[:i], r[i+1:]
			}
		}
		out[k] = v
	}
	return out
}

func TestGuarantee1_NothingOfABackfillIsVisibleBeforeApproval(t *testing.T) {
	for _, outcome := range []string{"approved", "rejected", "cancelled"} {
		t.Run(outcome, func(t *testing.T) {
			w := history(t, 20)
			id := w.Request("public.orders").ID
			hidden := func() {
				w.applyAll()
				require.Empty(t, w.receiver())
				lag, err := w.Store.Lag(t.Context(), testkit.Site)
				require.NoError(t, err)
				for _, l := range lag {
					require.Zero(t, l.Waiting)
					require.Nil(t, l.Oldest)
				}
				panels, err := w.Store.Panels(t.Context(), testkit.Site)
				require.NoError(t, err)
				require.Zero(t, panels[0].Waiting)
				queue, err := w.Store.Queue(t.Context(), control.EntryFilter{Site: testkit.Site, Limit: 10})
				require.NoError(t, err)
				require.Empty(t, queue)
				past, err := w.Store.History(t.Context(), control.EntryFilter{Site: testkit.Site, Limit: 10})
				require.NoError(t, err)
				require.Empty(t, past)
			}
			hidden()
			k := w.claim(w.from, id)
			w.from.PageRows = 7
			require.NoError(t, k.freeze(t.Context()))
			_, err := k.page(t.Context())
			require.NoError(t, err)
			hidden()
			w.finish(k)
			w.classify(id)
			hidden()
			// Not released by asking for it.
			_, _, err = w.Store.ReleaseBatch(t.Context(), id, 100)
			require.ErrorIs(t, err, control.ErrFenced)
			hidden()
			switch outcome {
			case "approved":
				w.Approve(id)
				w.release(id, 6)
				w.drain()
				w.Equal("orders")
				require.Len(t, w.receiver(), 20)
				return
			case "rejected":
				w.Reject(id)
			case "cancelled":
				_, err = w.Store.Close(t.Context(), id, "test", backfill.Cancelled, "enough")
				require.NoError(t, err)
			}
			_, _, err = w.Store.ReleaseBatch(t.Context(), id, 100)
			require.ErrorIs(t, err, control.ErrFenced)
			hidden()
			require.Len(t, w.staged(id), 20, "staged rows stay readable")
		})
	}
}

// Whatever happens to a key after its row was staged, the receiver ends up with
// what the source has, and the staged row never wins over anything newer.
func TestGuarantee4_WhatOvertakesAStagedRow(t *testing.T) {
	off := control.TableChange{Update: ptr(false), Delete: ptr(false)}
	on := control.TableChange{Update: ptr(true), Delete: ptr(true)}
	for name, c := range map[string]struct {
		then       func(w *world) // after the walk, before the approval
		superseded int64
		unsent     int64
		differs    bool // the receiver cannot have it yet: it was dropped
	}{
		"nothing":         {then: func(w *world) {}},
		"an update":       {then: func(w *world) { w.onSource(`UPDATE orders SET note = 'new' WHERE id = 1`); w.push() }, superseded: 1},
		"an update, sent": {then: func(w *world) { w.onSource(`UPDATE orders SET note = 'new' WHERE id = 1`); w.drain() }, superseded: 1},
		"an update not pushed yet": {then: func(w *world) {
			w.onSource(`UPDATE orders SET note = 'new' WHERE id = 1`)
		}},
		"a delete":                {then: func(w *world) { w.onSource(`DELETE FROM orders WHERE id = 1`); w.push() }, superseded: 1},
		"a delete, sent":          {then: func(w *world) { w.onSource(`DELETE FROM orders WHERE id = 1`); w.drain() }, superseded: 1},
		"a delete not pushed yet": {then: func(w *world) { w.onSource(`DELETE FROM orders WHERE id = 1`) }},
		"a truncate":              {then: func(w *world) { w.onSource(`TRUNCATE orders`); w.push() }, superseded: 5},
		"a truncate, sent":        {then: func(w *world) { w.onSource(`TRUNCATE orders; INSERT INTO orders VALUES (3, 'again')`); w.drain() }, superseded: 5},
		"another spelling":        {then: func(w *world) { w.onSource(`UPDATE orders SET id = 1.00 WHERE id = 1`); w.drain() }, superseded: 1},
		"another key":             {then: func(w *world) { w.onSource(`UPDATE orders SET id = 100 WHERE id = 1`); w.drain() }, superseded: 1},
		"delete and insert": {then: func(w *world) {
			w.onSource(`DELETE FROM orders WHERE id = 1; INSERT INTO orders VALUES (1, 're')`)
			w.drain()
		}, superseded: 1},
		"a dropped update": {then: func(w *world) {
			w.Configure("public.orders", off)
			w.onSource(`UPDATE orders SET note = 'new' WHERE id = 1`)
			w.drain()
			w.Configure("public.orders", on)
		}, superseded: 1, unsent: 1, differs: true},
		"a dropped delete": {then: func(w *world) {
			w.Configure("public.orders", off)
			w.onSource(`DELETE FROM orders WHERE id = 1`)
			w.drain()
			w.Configure("public.orders", on)
		}, superseded: 1, unsent: 1},
		"a dropped truncate": {then: func(w *world) {
			w.Configure("public.orders", off)
			w.onSource(`TRUNCATE orders`)
			w.drain()
			w.Configure("public.orders", on)
		}, superseded: 5, unsent: 5},
		"another request, released": {then: func(w *world) {
			// Hidden from capture, and no gap in it: as if the agent had applied it.
			w.onSource(`BEGIN; SET LOCAL backfill.applying = 'maple'; UPDATE orders SET note = 'unseen' WHERE id = 1; COMMIT`)
			id := w.Request("public.orders", "1").ID
			w.walk(id)
			w.Approve(id)
			w.release(id, 10)
		}, superseded: 1},
		"another request, released and sent": {then: func(w *world) {
			// Hidden from capture, and no gap in it: as if the agent had applied it.
			w.onSource(`BEGIN; SET LOCAL backfill.applying = 'maple'; UPDATE orders SET note = 'unseen' WHERE id = 1; COMMIT`)
			id := w.Request("public.orders", "1").ID
			w.walk(id)
			w.Approve(id)
			w.release(id, 10)
			w.drain()
		}, superseded: 1},
	} {
		t.Run(name, func(t *testing.T) {
			w := history(t, 5)
			id := w.Request("public.orders").ID
			w.walk(id)
			c.then(w)
			w.Approve(id)
			r := w.release(id, 2)
			require.Equal(t, c.superseded, r.Superseded)
			require.Equal(t, c.unsent, r.SupersededUndelivered)
			require.Equal(t, 5-c.superseded, r.Released)
			w.drain()
			if c.differs {
				require.NotContains(t, w.receiver(), "1", "the staged row is older than the source's")
				id = w.Request("public.orders", "1").ID
				w.walk(id)
				w.Approve(id)
				w.release(id, 10)
				w.drain()
			}
			w.Equal("orders")
		})
	}
}

// A row that changes while its page is under way is staged as it was, under the
// snapshot of that: what is pushed meanwhile has overtaken it.
func TestGuarantee4_ARowThatChangesWhileItsPageIsUnderWay(t *testing.T) {
	w := history(t, 5)
	other := w.agent(testkit.Source)
	id := w.Request("public.orders").ID
	meanwhile(w.from, "page: read", func() {
		w.onSource(`UPDATE orders SET note = 'new' WHERE id = 1; DELETE FROM orders WHERE id = 2`)
		_, err := other.push(t.Context())
		require.NoError(t, err)
		w.applyAll()
	})
	w.walk(id)
	w.Approve(id)
	require.Equal(t, int64(2), w.release(id, 10).Superseded)
	w.drain()
	w.Equal("orders")
}

// What was read before the page, delivered or not, is no newer than the row: it must
// not keep the row from being sent.
func TestGuarantee2_WhatWasPushedBeforeThePageOvertakesNothing(t *testing.T) {
	w := history(t, 5)
	w.onSource(`UPDATE orders SET note = 'changed' WHERE id = 1`)
	w.push()
	id := w.Request("public.orders").ID
	k := w.claim(w.from, id)
	require.NoError(t, k.freeze(t.Context()))
	w.Configure("public.orders", control.TableChange{Update: ptr(false)})
	w.onSource(`UPDATE orders SET note = 'dropped' WHERE id < 3`)
	w.push()
	w.Configure("public.orders", control.TableChange{Update: ptr(true)})
	w.finish(k)
	w.Approve(id)
	require.Zero(t, w.release(id, 10).Superseded)
	w.drain()
	w.Equal("orders")
}

// Release looks at what overtakes after it has the direction's lock, not before.
func TestGuarantee4_ReleaseChecksUnderTheLock(t *testing.T) {
	w := history(t, 5)
	id := w.Request("public.orders").ID
	w.walk(id)
	w.Approve(id)
	w.onSource(`UPDATE orders SET note = 'new' WHERE id = 1`)
	reached, resume := w.stopAt(w.from, "push: durable")
	push := async(func() (pushed, error) { return w.from.push(t.Context()) })
	<-reached
	ended := make(chan struct{})
	release := async(func() (bool, error) {
		defer close(ended)
		done, _, err := w.Store.ReleaseBatch(t.Context(), id, 10)
		return done, err
	})
	testkit.Eventually(t, "the release waits or ends", func() bool {
		select {
		case <-ended:
			return true
		default:
			return testkit.LockWaiters(t, w.C) > 0
		}
	})
	resume(nil)
	_, err := push()
	require.NoError(t, err)
	done, err := release()
	require.NoError(t, err)
	require.True(t, done)
	require.Equal(t, int64(1), w.Now(id).Superseded)
	w.drain()
	w.Equal("orders")
}

func TestGuarantee5_EachRowIsReleasedOnce(t *testing.T) {
	w := history(t, 200)
	id := w.Request("public.orders").ID
	w.walk(id)
	w.Approve(id)
	var all sync.WaitGroup
	for i := range 6 {
		all.Go(func() {
			for {
				done, _, err := w.Store.ReleaseBatch(t.Context(), id, 5+i)
				if done || err != nil {
					require.True(t, done || err == control.ErrFenced, "%v", err)
					return
				}
			}
		})
	}
	all.Wait()
	r := w.Now(id)
	require.Equal(t, backfill.Finished, r.State)
	require.Equal(t, int64(200), r.Released)
	require.Equal(t, 200, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.entry WHERE request_id = $1`, id))
	require.Equal(t, 200, testkit.Value[int](t, w.C, `SELECT count(DISTINCT key) FROM backfill_control.entry WHERE request_id = $1`, id))
	w.drain()
	w.Equal("orders")
}

// What was released stays and is counted; the rest is not sent.
func TestReleaseStopsWhenPausedOrCancelled(t *testing.T) {
	w := history(t, 20)
	id := w.Request("public.orders").ID
	w.walk(id)
	w.Approve(id)
	_, _, err := w.Store.ReleaseBatch(t.Context(), id, 8)
	require.NoError(t, err)
	_, err = w.Store.Pause(t.Context(), id, "someone", "", true)
	require.NoError(t, err)
	_, _, err = w.Store.ReleaseBatch(t.Context(), id, 8)
	require.ErrorIs(t, err, control.ErrPaused)
	_, err = w.Store.Pause(t.Context(), id, "someone", "", false)
	require.NoError(t, err)
	_, _, err = w.Store.ReleaseBatch(t.Context(), id, 8)
	require.NoError(t, err)
	_, err = w.Store.Close(t.Context(), id, "someone", backfill.Cancelled, "enough")
	require.NoError(t, err)
	_, _, err = w.Store.ReleaseBatch(t.Context(), id, 8)
	require.ErrorIs(t, err, control.ErrFenced)
	require.Equal(t, int64(16), w.Now(id).Released)
	w.drain()
	require.Len(t, w.receiver(), 16)
}

func TestReleaseAsAnActivity(t *testing.T) {
	w := history(t, 20)
	id := w.Request("public.orders").ID
	w.walk(id)
	c := &Control{Store: w.Store, ReleaseRows: 6}
	value, err := runActivity(c.Release, id)
	require.NoError(t, err)
	var s Snapshot
	require.NoError(t, value.Get(&s))
	require.Equal(t, backfill.AwaitingReview, s.State, "not approved, so nothing was released")
	require.Zero(t, s.Released)
	w.Approve(id)
	value, err = runActivity(c.Release, id)
	require.NoError(t, err)
	require.NoError(t, value.Get(&s))
	require.Equal(t, backfill.Finished, s.State)
	require.Equal(t, int64(20), s.Released)
}

// A live change waits for a bounded number of released rows, however many there are;
// a receiver that is away holds no release up.
func TestAReleaseFollowsTheReceiver(t *testing.T) {
	w := history(t, 300)
	w.to.BatchRows = 20
	id := w.Request("public.orders").ID
	w.walk(id)
	w.Approve(id)
	c := &Control{Store: w.Store, ReleaseRows: 20, Lead: 30}
	release := t.Name()
	ended := make(chan error, 1)
	go labelled(release, func() {
		_, err := runActivity(c.Release, id)
		ended <- err
	})
	queued := func() int64 {
		n, err := w.Store.QueueDepth(t.Context(), w.Out.ID, 1000)
		require.NoError(t, err)
		return n
	}
	for w.Now(id).Released < 240 {
		testkit.Eventually(t, "the release is ahead, and waits or has ended", func() bool {
			return queued() >= 30 && (parked(release, "(*Control).follow") == 1 || len(ended) == 1)
		})
		require.Less(t, queued(), int64(30+20))
		w.apply()
	}
	require.NoError(t, <-ended, "it does not wait for ever")
	require.Equal(t, backfill.Finished, w.Now(id).State)
}

// Releases that were approved at once wait for each other without a connection, and
// a push for one batch at most.
func TestReleasesOfADirectionTakeTurns(t *testing.T) {
	w := newWorld(t, orders+`; `+measures+`; CREATE TABLE third (id int PRIMARY KEY)`, "public.orders", "public.measures", "public.third")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 5) g; INSERT INTO measures VALUES (1, 1, 1); INSERT INTO third VALUES (1)`)
	w.drain()
	p, err := w.Store.BeginPush(t.Context(), w.Out)
	require.NoError(t, err)
	c := &Control{Store: w.Store, ReleaseRows: 100}
	var all sync.WaitGroup
	var ids []int64
	defer all.Wait()
	defer p.Rollback()
	for _, table := range []string{"public.orders", "public.measures", "public.third"} {
		id := w.Request(table).ID
		ids = append(ids, id)
		testkit.Exec(t, w.C, `UPDATE backfill_control.request SET state = 'RELEASING' WHERE id = $1`, id)
		all.Go(func() {
			labelled(t.Name(), func() {
				_, err := runActivity(c.Release, id)
				assert.NoError(t, err)
			})
		})
	}
	testkit.Eventually(t, "all releases wait", func() bool {
		return testkit.LockWaiters(t, w.C)+parked(t.Name(), "(*Store).ReleaseTurn") == len(ids)
	})
	require.Equal(t, 1, testkit.LockWaiters(t, w.C), "one of them at the lock")
	p.Rollback()
	all.Wait()
	for _, id := range ids {
		require.Equal(t, backfill.Finished, w.Now(id).State)
	}
}

func TestIdenticalRowsAreLeftOutAtTheApproversWish(t *testing.T) {
	w := history(t, 6)
	w.onReceiver(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(1, 4) g; UPDATE orders SET note = 'other' WHERE id = 4`)
	id := w.Request("public.orders").ID
	w.walk(id)
	w.classify(id)
	r := w.Now(id)
	require.Equal(t, map[backfill.Effect]int64{backfill.Identical: 3, backfill.Overwrite: 1, backfill.Insert: 2, backfill.Unknown: 0}, r.Effects)
	w.ApproveDiffering(id)
	r = w.release(id, 2)
	require.Equal(t, int64(3), r.Skipped)
	require.Equal(t, int64(3), r.Released)
	w.drain()
	w.Equal("orders")
}

// A row was judged identical while a change of its key was still on its way: the
// row is sent, although nothing read later than it has come.
func TestGuarantee2_IdenticalRowsThatAChangeOnItsWayAlters(t *testing.T) {
	for name, sql := range map[string]string{
		"an update":  `UPDATE orders SET note = 'passing' WHERE id = 1`,
		"a delete":   `DELETE FROM orders WHERE id = 1`,
		"a truncate": `TRUNCATE orders`,
	} {
		t.Run(name, func(t *testing.T) {
			w := history(t, 3)
			w.onReceiver(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(1, 3) g`)
			w.onSource(sql)
			w.push() // waits in the queue
			w.Configure("public.orders", control.TableChange{Create: ptr(false), Update: ptr(false)})
			w.onSource(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(1, 3) g ON CONFLICT (id) DO UPDATE SET note = 'history'`)
			w.push() // dropped
			w.Configure("public.orders", control.TableChange{Create: ptr(true), Update: ptr(true)})
			id := w.Request("public.orders").ID
			w.walk(id)
			w.classify(id)
			require.Equal(t, int64(3), w.Now(id).Effects[backfill.Identical])
			w.applyAll()
			w.ApproveDiffering(id)
			r := w.release(id, 1)
			require.Equal(t, int64(3), r.Released+r.Skipped)
			w.drain()
			w.Equal("orders")
		})
	}
	t.Run("a change set aside", func(t *testing.T) {
		w := history(t, 3)
		w.onReceiver(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(1, 3) g; ALTER TABLE orders ADD CHECK (note <> 'refused')`)
		w.onSource(`UPDATE orders SET note = 'refused' WHERE id = 1`)
		w.drain()
		require.Len(t, w.setAside(), 1)
		w.Configure("public.orders", control.TableChange{Update: ptr(false)})
		w.onSource(`UPDATE orders SET note = 'history' WHERE id = 1`)
		w.drain()
		w.Configure("public.orders", control.TableChange{Update: ptr(true)})
		id := w.Request("public.orders").ID
		w.walk(id)
		w.classify(id)
		require.Equal(t, int64(2), w.Now(id).Effects[backfill.Identical])
		w.ApproveDiffering(id)
		require.Equal(t, int64(1), w.release(id, 10).Released)
		w.drain()
		w.onReceiver(`ALTER TABLE orders DROP CONSTRAINT orders_note_check`)
		w.retryAll()
		w.Equal("orders")
	})
}

// An effect found after the decision was not read by whoever decided.
func TestEffectsAreNotStoredAfterTheDecision(t *testing.T) {
	w := history(t, 3)
	w.onReceiver(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(1, 3) g`)
	id := w.Request("public.orders").ID
	w.walk(id)
	w.ApproveDiffering(id)
	require.NoError(t, w.to.classify(t.Context(), w.Now(id), 0, 3))
	require.Equal(t, int64(3), w.Now(id).Effects[backfill.Unknown])
	require.Equal(t, int64(3), w.release(id, 10).Released)
	_, err := runActivity(w.to.Classify, id)
	require.NoError(t, err)
}

// A decision counts for the set that was read, and the first one wins.
func TestGuarantee12_TheFirstDecisionWinsAndHasANameAndATime(t *testing.T) {
	w := history(t, 3)
	id := w.Request("public.orders").ID
	_, err := w.Store.Approve(t.Context(), id, control.Decision{By: "early", Revision: 0})
	require.Equal(t, backfill.Conflict, backfill.CodeOf(err))
	w.walk(id)
	_, err = w.Store.Approve(t.Context(), id, control.Decision{By: "blind", Revision: 7})
	require.Equal(t, backfill.Conflict, backfill.CodeOf(err))
	_, err = w.Store.Reject(t.Context(), id, control.Decision{By: "mute", Revision: 1})
	require.Equal(t, backfill.Invalid, backfill.CodeOf(err))

	var wins sync.Map
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			d := control.Decision{By: fmt.Sprint("account ", i), Revision: 1, Note: "n"}
			decide := w.Store.Approve
			if i%2 == 1 {
				decide = w.Store.Reject
			}
			if _, err := decide(t.Context(), id, d); err == nil {
				wins.Store(d.By, i%2 == 0)
			} else {
				require.Equal(t, backfill.Conflict, backfill.CodeOf(err))
			}
		})
	}
	all.Wait()
	n := 0
	wins.Range(func(by, approved any) bool {
		n++
		r := w.Now(id)
		require.Equal(t, by, r.ReviewedBy)
		require.NotNil(t, r.ReviewedAt)
		require.Equal(t, approved, r.State == backfill.Releasing)
		return true
	})
	require.Equal(t, 1, n)
	log, err := w.Store.Audit(t.Context(), control.AuditFilter{Site: testkit.Site, Limit: 100})
	require.NoError(t, err)
	decisions := 0
	for _, e := range log {
		if e.Action == "backfill.approve" || e.Action == "backfill.reject" {
			decisions++
			require.NotEmpty(t, e.Account)
			require.False(t, e.At.IsZero())
		}
	}
	require.Equal(t, 1, decisions)
}

func TestGuarantee7_OneOpenRequestWhateverTheRace(t *testing.T) {
	w := history(t, 3)
	open := func(key ...string) int {
		var won sync.Map
		var all sync.WaitGroup
		for i := range 12 {
			all.Go(func() {
				n := control.NewRequest{Direction: w.Out.ID, TableID: w.Tables["public.orders"].ID, Mode: backfill.ModeFull, By: fmt.Sprint(i)}
				if len(key) > 0 {
					n.Mode, n.Key = backfill.ModeRow, key
				}
				r, err := w.Store.CreateRequest(t.Context(), n)
				if err == nil {
					won.Store(r.ID, true)
					return
				}
				require.Equal(t, backfill.Conflict, backfill.CodeOf(err))
			})
		}
		all.Wait()
		n := 0
		won.Range(func(any, any) bool { n++; return true })
		return n
	}
	require.Equal(t, 1, open())
	require.Equal(t, 0, open())
	require.Equal(t, 1, open("1"))
	require.Equal(t, 1, open("2"))
	require.Equal(t, 0, open("2"))
	first, err := w.Store.Requests(t.Context(), control.RequestFilter{Limit: 10})
	require.NoError(t, err)
	for _, r := range first {
		_, err := w.Store.Close(t.Context(), r.ID, "test", backfill.Cancelled, "enough")
		require.NoError(t, err)
	}
	require.Equal(t, 1, open())
	require.Equal(t, 1, open("2"))
}

// A batch's size follows from how long others wait for it, not from how long it waits for
// them: beside many pushes it would come down to a few rows.
func TestABatchIsNotBlamedForItsWaitAtTheLock(t *testing.T) {
	w := history(t, 50)
	id := w.Request("public.orders").ID
	w.walk(id)
	w.Approve(id)
	other := testkit.Session(t, w.ControlDSN)
	testkit.Exec(t, other, `BEGIN; SELECT pg_advisory_xact_lock(20011, `+fmt.Sprint(w.from.Out.ID)+`)`)
	var held time.Duration
	began := time.Now()
	release := async(func() (done bool, err error) {
		done, held, err = w.Store.ReleaseBatch(t.Context(), id, 10)
		return done, err
	})
	testkit.Eventually(t, "the release waits", func() bool { return testkit.LockWaiters(t, w.C) == 1 && time.Since(began) > time.Second })
	waited := time.Since(began)
	testkit.Exec(t, other, `COMMIT`)
	_, err := release()
	require.NoError(t, err)
	require.LessOrEqual(t, held, time.Since(began)-waited)
	require.Positive(t, held)
}
