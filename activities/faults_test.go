package activities

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/log"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
	"backfill/internal/testkit"
)

// Each point is named in the code, and each that the code names is listed: a new
// one is tried by TestGuarantee5_ACrashAtAnyPoint.
func TestEveryPointIsListed(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var named []string
	look := func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		for _, a := range call.Args {
			if l, ok := a.(*ast.BasicLit); ok && l.Kind == token.STRING {
				if s, err := strconv.Unquote(l.Value); err == nil && (slices.Contains(Points, s) || isAt(call)) {
					named = append(named, s)
				}
			}
		}
		return true
	}
	for _, name := range files {
		if !strings.HasSuffix(name, "_test.go") {
			file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
			require.NoError(t, err)
			ast.Inspect(file, look)
		}
	}
	slices.Sort(named)
	listed := slices.Sorted(slices.Values(slices.Concat(Points, RunPoints, TwoWayPoints)))
	require.Equal(t, listed, slices.Compact(named))
	require.Len(t, slices.Compact(listed), len(Points)+len(RunPoints)+len(TwoWayPoints), "a point is listed twice")
}

func isAt(call *ast.CallExpr) bool {
	f, ok := call.Fun.(*ast.SelectorExpr)
	return ok && f.Sel.Name == "at"
}

// Whatever dies at whatever point, and is run again by the same process or by
// another one: the sides end up equal, and every count as if nothing had happened.
// One run dies at several points, never at two that follow on each other; with
// BACKFILL_SOAK at one only.
func TestGuarantee5_ACrashAtAnyPoint(t *testing.T) {
	t.Parallel()
	runs := 4
	if os.Getenv("BACKFILL_SOAK") != "" {
		runs = len(Points)
	}
	for i := range runs {
		var deaths []string
		for n := i; n < len(Points); n += runs {
			deaths = append(deaths, Points[n])
		}
		for _, by := range []string{"the same process", "another process"} {
			t.Run(fmt.Sprintf("%d of %d, then %s", i+1, runs, by), func(t *testing.T) {
				t.Parallel()
				t.Log("dies at " + strings.Join(deaths, ", "))
				j := newJourney(t, deaths, by == "another process")
				j.run()
				require.Empty(t, j.deaths, "not on the way")
			})
		}
	}
}

// journey does once everything that agents and control workers do, and dies at some
// points of it.
type journey struct {
	*world
	control *Control
	engine  engine
	restart bool // another process takes over; else the same one tries again

	mu     sync.Mutex
	deaths []string // still to be died
	dead   bool     // nothing passes any point until the restart
}

func newJourney(t *testing.T, deaths []string, restart bool) *journey {
	j := &journey{deaths: slices.Clone(deaths), restart: restart, engine: engine{running: map[string]bool{}, syncs: map[string]bool{}, refreshed: map[string]bool{}}}
	j.world = worldOf(testkit.NewPair(t, `
		CREATE TABLE orders (id numeric PRIMARY KEY, note text, total int NOT NULL DEFAULT 0);
		CREATE TABLE parents (id int PRIMARY KEY);
		CREATE TABLE children (id int PRIMARY KEY, parent int);
		CREATE TABLE strangers (id int PRIMARY KEY)`, "public.orders", "public.parents", "public.children", "public.strangers"),
		Settings{PageRows: 4, ChunkRows: 8, BatchRows: 7, LeaseTTL: time.Minute, Cycle: 5 * time.Millisecond})
	j.start()
	return j
}

// start starts the processes.
func (j *journey) start() {
	j.from, j.to = j.agent(testkit.Source), j.agent(testkit.Receiver)
	j.control = &Control{Store: testkit.Open(j, j.ControlDSN), Log: zap.NewNop(), ReleaseRows: 6, Keep: control.Keep{Requests: time.Nanosecond, History: time.Nanosecond},
		StartBackfill: j.engine.startBackfill, StartSync: j.engine.startSync, Running: j.engine.list, Refresh: j.engine.refresh,
		StartReconcile: func(context.Context, *backfill.Reconciliation) error { return nil }}
	j.from.faults, j.to.faults, j.control.faults = j.fault, j.fault, j.fault
}

func (j *journey) fault(point string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if n := slices.Index(j.deaths, point); n >= 0 && !j.dead {
		j.deaths, j.dead = slices.Delete(j.deaths, n, n+1), j.restart
		return errCrash
	}
	if j.dead {
		return errCrash
	}
	return nil
}

// do does a step until it succeeds.
func (j *journey) do(step func() error) {
	j.Helper()
	for err := step(); err != nil; err = step() {
		j.recover(err)
	}
}

// recover lets time pass after a crash, and another process begin.
func (j *journey) recover(err error) {
	j.Helper()
	require.ErrorContains(j, err, errCrash.Error())
	testkit.Exec(j, j.C, `UPDATE backfill_control.request SET lease_until = clock_timestamp() - interval '1 s' WHERE lease_until IS NOT NULL`)
	if j.restart {
		j.start()
		j.mu.Lock()
		defer j.mu.Unlock()
		j.dead = false
	}
}

// activity runs an activity as the workflow engine does: when an attempt dies, the
// next one is made by who is there then.
func (j *journey) activity(run func(context.Context) error) {
	j.Helper()
	var suite testsuite.WorkflowTestSuite
	suite.SetLogger(log.NewStructuredLogger(slog.New(slog.DiscardHandler)))
	env := suite.NewTestWorkflowEnvironment()
	env.SetTestTimeout(time.Minute)
	env.RegisterActivityWithOptions(func(ctx context.Context) error {
		err := run(ctx)
		if err != nil {
			j.recover(err)
		}
		return err
	}, activity.RegisterOptions{Name: "activity"})
	env.ExecuteWorkflow(func(ctx workflow.Context) error {
		ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: time.Hour, HeartbeatTimeout: time.Minute,
			RetryPolicy: &temporal.RetryPolicy{MaximumAttempts: 50}})
		return workflow.ExecuteActivity(ctx, "activity").Get(ctx, nil)
	})
	require.NoError(j, env.GetWorkflowError())
}

// engine stands for the workflow engine, as the sweep sees it.
type engine struct {
	mu        sync.Mutex
	running   map[string]bool
	syncs     map[string]bool
	refreshed map[string]bool
}

func (e *engine) start(where map[string]bool, name string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	where[name] = true
	return nil
}

func (e *engine) startBackfill(_ context.Context, r *backfill.Request) error {
	return e.start(e.running, r.WorkflowID())
}
func (e *engine) startSync(_ context.Context, site, side string) error {
	return e.start(e.syncs, site+"/"+side)
}
func (e *engine) refresh(_ context.Context, id string) error { return e.start(e.refreshed, id) }
func (e *engine) list(context.Context) ([]string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.running)), nil
}

func (j *journey) pushAll() {
	j.Helper()
	j.do(func() error {
		for {
			p, err := j.from.push(j.Context())
			if err != nil || p.all && p.rows == 0 {
				return err
			}
		}
	})
}

func (j *journey) applyAll() {
	j.Helper()
	j.do(func() error {
		l := &applier{Agent: j.to}
		for {
			busy, err := l.apply(j.Context())
			if err != nil || !busy {
				return err
			}
		}
	})
}

func (j *journey) run() {
	t, ctx := j.TB, j.Context()
	j.onSource(`ALTER TABLE orders DISABLE TRIGGER ALL; INSERT INTO orders SELECT g, 'history' FROM generate_series(1, 12) g`)
	j.onReceiver(`INSERT INTO orders SELECT g, 'history' FROM generate_series(1, 3) g; INSERT INTO orders VALUES (4, 'other');
		ALTER TABLE orders ADD CONSTRAINT few CHECK (total < 1000); ALTER TABLE children ADD FOREIGN KEY (parent) REFERENCES parents`)
	j.Setup()
	testkit.Exec(t, j.C, `UPDATE backfill_control.table_config SET captured_from = '{}' WHERE name = 'public.strangers'`)

	// Changes: one push has died before it told the source, and some are nobody's.
	j.onSource(`INSERT INTO orders SELECT g, 'new' FROM generate_series(21, 25) g`)
	lost := j.agent(testkit.Source)
	failAt(lost, "push: committed")
	_, err := lost.push(ctx)
	require.ErrorIs(t, err, errCrash)
	j.onSource(`INSERT INTO strangers VALUES (1); INSERT INTO children VALUES (1, 1); UPDATE orders SET note = 'newer' WHERE id = 21`)
	j.pushAll()
	j.applyAll()
	require.Len(t, j.setAside(), 1)
	j.onSource(`INSERT INTO parents VALUES (1)`)
	j.pushAll()
	j.applyAll()
	j.do(func() error { return j.from.CountNow(ctx) })
	j.do(func() error { return j.to.CountNow(ctx) })

	// A backfill.
	j.engine.running["backfill/of a closed request"] = true
	id := j.Request("public.orders").ID
	j.do(func() error { return j.control.sweep(ctx) })
	require.True(t, j.engine.running[j.Now(id).WorkflowID()])
	require.Len(t, j.engine.syncs, 2)
	require.Len(t, j.engine.refreshed, 1)
	for _, paused := range []bool{true, false} {
		j.activity(func(ctx context.Context) error {
			s, err := j.control.Pause(ctx, Hold{RequestID: id, By: "ana", Paused: paused})
			require.True(t, err != nil || s.Paused == paused)
			return err
		})
	}
	// A gate holds it back, another slows it down.
	j.onSource(`CREATE TABLE load (v int); INSERT INTO load VALUES (11)`)
	j.gates(pace.Gate{Name: "load", Side: testkit.Source, Kind: pace.SQL, Query: "SELECT v FROM public.load", Limit: 10, MaxAge: 3600},
		pace.Gate{Name: "speed", Side: testkit.Source, Kind: pace.RowsPerSecond, Limit: 500})
	measure := func() error { _, err := (&meter{Agent: j.from}).measure(ctx); return err }
	j.do(measure)
	j.do(func() error {
		lease, req, err := j.from.store.Claim(ctx, id, j.from.ID, j.from.LeaseTTL)
		if err != nil {
			return err
		}
		k := j.from.walkUnder(lease, req)
		k.keeper.patience = time.Nanosecond
		if pass, err := k.keeper.pass(ctx, nil); pass || err != nil {
			return err
		}
		return j.from.store.Hand(ctx, lease)
	})
	require.Contains(t, j.Now(id).Waiting, "load is over the limit")
	j.onSource(`UPDATE load SET v = 0`)
	j.do(measure)
	j.activity(func(ctx context.Context) error { _, err := j.from.Walk(ctx, id); return err })
	require.Empty(t, j.Now(id).Waiting)
	require.Equal(t, backfill.AwaitingReview, j.Now(id).State)
	require.Len(t, j.staged(id), 17)
	j.activity(func(ctx context.Context) error { return j.to.Classify(ctx, id) })
	j.activity(func(ctx context.Context) error {
		s, err := j.control.Rejudge(ctx, Judgement{RequestID: id, Revision: 1, By: "ana"})
		require.True(t, err != nil || s.Revision == 2)
		return err
	})
	j.activity(func(ctx context.Context) error { return j.to.Classify(ctx, id) })
	j.onSource(`UPDATE orders SET note = 'changed' WHERE id = 5; DELETE FROM orders WHERE id = 6`)
	j.pushAll()
	j.activity(func(ctx context.Context) error {
		s, err := j.control.Decide(ctx, Verdict{RequestID: id, Approve: true, Decision: control.Decision{By: "ana", Revision: 2, SkipIdentical: true, Note: "read it"}})
		require.True(t, err != nil || s.State == backfill.Releasing)
		return err
	})
	j.activity(func(ctx context.Context) error { _, err := j.control.Release(ctx, id); return err })
	j.applyAll()
	j.Equal("orders", "parents", "children")
	r := j.Now(id)
	require.Equal(t, []int64{17, 8, 2, 7}, []int64{r.Staged, r.Skipped, r.Superseded, r.Released})
	require.Equal(t, map[backfill.Effect]int64{backfill.Identical: 8, backfill.Overwrite: 1, backfill.Insert: 8, backfill.Unknown: 0}, r.Effects)
	require.Equal(t, 7, testkit.Value[int](t, j.C, `SELECT count(*) FROM backfill_control.entry WHERE request_id = $1`, id))
	require.Equal(t, 7, testkit.Value[int](t, j.C, `SELECT count(DISTINCT key) FROM backfill_control.entry WHERE request_id = $1`, id))

	// One that is given up.
	other := j.Request("public.orders", "7").ID
	j.activity(func(ctx context.Context) error {
		s, err := j.control.Close(ctx, Closing{RequestID: other, By: "ana", To: backfill.Cancelled, Reason: "cancelled by ana"})
		require.True(t, err != nil || s.State == backfill.Cancelled)
		return err
	})

	// Changes that are set aside: one is tried again, one is skipped.
	j.onSource(`INSERT INTO orders VALUES (31, 'many', 5000), (32, 'many', 5000)`)
	j.pushAll()
	j.applyAll()
	aside, err := j.to.db.SetAside(ctx)
	require.NoError(t, err)
	require.Len(t, aside, 2)
	j.onReceiver(`ALTER TABLE orders DROP CONSTRAINT few`)
	require.NoError(t, j.Store.Wish(ctx, testkit.Site, aside[0].Seq, "skip", "ana"))
	require.NoError(t, j.Store.Wish(ctx, testkit.Site, aside[1].Seq, "retry", "ana"))
	j.applyAll()
	require.Empty(t, j.setAside())
	require.Equal(t, []string{"31"}, testkit.Strings(t, j.C, `SELECT key[1] FROM backfill_control.quarantine WHERE state = 'skipped' AND wish IS NULL`))
	require.Equal(t, 1, testkit.Value[int](t, j.R, `SELECT count(*) FROM orders WHERE id > 30`))

	// A source that may not go on, for a while: nothing of it is pushed or applied.
	testkit.Exec(t, j.C, `UPDATE backfill_control.side SET timeline = 'another' WHERE name = $1`, testkit.Source)
	j.onSource(`UPDATE orders SET note = 'while halted' WHERE id = 2`)
	refused := func(step func() error) {
		j.do(func() error {
			err := step()
			if backfill.CodeOf(err) == backfill.Refused {
				return nil
			}
			require.Error(t, err)
			return err
		})
	}
	refused(func() error { _, err := j.from.push(ctx); return err })
	refused(func() error { _, err := (&applier{Agent: j.to}).apply(ctx); return err })
	testkit.Exec(t, j.C, `UPDATE backfill_control.side s SET timeline = o.timeline FROM backfill_control.side o WHERE s.name = $1 AND o.name = $2`, testkit.Source, testkit.Receiver)
	require.Equal(t, "history", testkit.Value[string](t, j.R, `SELECT note FROM orders WHERE id = 2`))
	j.pushAll()
	j.applyAll()
	require.Equal(t, "while halted", testkit.Value[string](t, j.R, `SELECT note FROM orders WHERE id = 2`))

	// A new beginning, which one agent of the source has begun and not told of.
	require.NoError(t, j.Store.NewEpoch(ctx, "ana", testkit.Site, "restored"))
	lost = j.agent(testkit.Source)
	failAt(lost, "epoch: begun")
	require.ErrorIs(t, lost.ready(ctx), errCrash)
	j.onSource(`UPDATE orders SET note = 'of the new epoch' WHERE id IN (1, 31)`)
	j.pushAll()
	j.applyAll()
	j.Equal("orders", "parents", "children")
	require.Zero(t, testkit.Value[int](t, j.S, `SELECT count(*) FROM backfill_maple_school.outbox`))
	last, err := j.Store.LastSeq(ctx, j.Out.ID)
	require.NoError(t, err)
	require.Equal(t, last, testkit.Value[int64](t, j.C, `SELECT applied_seq FROM backfill_control.direction WHERE id = $1`, j.Out.ID))
	require.Equal(t, last, testkit.Value[int64](t, j.R, `SELECT seq FROM backfill_maple_central.applied`))
	require.Equal(t, []string{"backfill.approve 1", "backfill.cancelled 1", "backfill.finished 1", "backfill.judge 1", "backfill.pause 1", "backfill.request 2", "backfill.resume 1"},
		testkit.Strings(t, j.C, `SELECT action || ' ' || count(*) FROM backfill_control.audit WHERE action LIKE 'backfill.%' GROUP BY action ORDER BY 1`))

	// All that is closed is past its window; what is not is not touched.
	open := j.Request("public.orders", "8").ID
	j.onSource(`UPDATE orders SET note = 'kept' WHERE id = 3`)
	j.pushAll()
	j.activity(func(ctx context.Context) error { _, err := j.control.Retain(ctx); return err })
	require.Equal(t, []string{fmt.Sprint(open)}, testkit.Strings(t, j.C, `SELECT id::text FROM backfill_control.request`))
	require.Zero(t, testkit.Value[int](t, j.C, `SELECT count(*) FROM backfill_control.staged`))
	j.applyAll()
	j.Equal("orders", "parents", "children")
}
