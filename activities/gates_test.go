package activities

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
	"backfill/internal/testkit"
)

func (w *world) gates(gates ...pace.Gate) {
	w.Helper()
	require.NoError(w, w.Store.PutGates(w.Context(), "admin", testkit.Site, gates, true))
}

// measures measures the gates of an agent's side once.
func (m *meter) once(w *world) {
	w.Helper()
	_, err := m.measure(w.Context())
	require.NoError(w, err)
}

// verdict is what a gate says now.
func (w *world) verdict(name string) pace.Verdict {
	w.Helper()
	all, err := w.Store.Gates(w.Context(), testkit.Site)
	require.NoError(w, err)
	for _, g := range all {
		if g.Name == name {
			return g.Judge()
		}
	}
	w.Fatalf("no gate %s", name)
	return pace.Verdict{}
}

// A closed gate holds the walk at its key and writes nothing; the request says
// why; the time counts by reason; it goes on by itself.
func TestAClosedGateHoldsTheWalkAtItsKey(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 300) n`)
	w.drain()
	w.onSource(`CREATE TABLE load (v int); INSERT INTO load VALUES (0)`)
	w.from.PageRows = 100
	w.gates(pace.Gate{Name: "load", Side: testkit.Source, Kind: pace.SQL, Query: "SELECT v FROM public.load -- of the moment", Limit: 10, MaxAge: 3600})
	m := &meter{Agent: w.from}
	r := w.Request("public.orders")
	k := w.claim(w.from, r.ID)
	k.keeper.patience = time.Second
	require.NoError(t, k.freeze(t.Context()))

	before := time.Now()
	pass, err := k.keeper.pass(t.Context(), nil)
	require.NoError(t, err)
	require.False(t, pass, "a gate that nobody has measured is closed")
	m.once(w)
	pass, err = k.keeper.pass(t.Context(), nil)
	require.NoError(t, err)
	require.True(t, pass)
	_, err = k.page(t.Context())
	require.NoError(t, err)

	w.onSource(`UPDATE load SET v = 11`)
	m.once(w)
	rows := k.keeper.size.Rows()
	done, err := k.chunk(t.Context(), nil)
	require.NoError(t, err)
	require.False(t, done)
	now := w.Now(r.ID)
	require.Equal(t, int64(50), now.Staged, "half of the largest page, after the gate was closed first")
	require.Equal(t, backfill.Key{"50"}, now.ResumeKey)
	require.Equal(t, "gate load: gate load is over the limit of 10", now.Waiting)
	require.NotNil(t, now.WaitingSince)
	require.Len(t, w.staged(r.ID), 50)
	require.LessOrEqual(t, k.keeper.size.Rows(), (rows+1)/2, "pages shrink when a gate closes")
	held, err := w.Store.Throttles(t.Context(), r.ID)
	require.NoError(t, err)
	require.Len(t, held, 1)
	require.Equal(t, pace.SQL, held[0].Kind)
	require.InDelta(t, now.Throttled.Seconds(), held[0].Seconds, 0.001)
	require.Greater(t, held[0].Seconds, 1.0)
	require.Less(t, held[0].Seconds, time.Since(before).Seconds())

	w.onSource(`UPDATE load SET v = 10`)
	m.once(w)
	w.finish(k)
	now = w.Now(r.ID)
	require.Equal(t, int64(300), now.Staged)
	require.Empty(t, now.Waiting)
	require.Nil(t, now.WaitingSince)
}

// The release asks the same gates before each batch.
func TestAClosedGateHoldsTheRelease(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 50) n`)
	w.drain()
	r := w.Request("public.orders")
	w.walk(r.ID)
	w.Approve(r.ID)
	w.gates(pace.Gate{Name: "queue", Side: testkit.Source, Kind: pace.QueueDepth, Limit: 15, MaxAge: 3600})
	m := &meter{Agent: w.from}
	c := &Control{Store: w.Store, ReleaseRows: 20}
	keeper := gatekeeper{store: w.Store, req: w.Now(r.ID), patience: 10 * time.Millisecond, size: pace.PageSize{Target: time.Minute, Min: 20, Max: 20, MaxBytes: 1 << 40}}
	m.once(w)
	_, err := c.releaseBatch(t.Context(), &keeper, nil)
	require.NoError(t, err)
	require.Equal(t, int64(20), w.Now(r.ID).Released)
	m.once(w)
	_, err = c.releaseBatch(t.Context(), &keeper, nil)
	require.NoError(t, err)
	require.Equal(t, int64(20), w.Now(r.ID).Released, "released against a closed gate")
	require.Contains(t, w.Now(r.ID).Waiting, "queue of changes from school is over the limit")

	// A person need not wait for the gate.
	_, err = w.Store.Pause(t.Context(), r.ID, "ann", "", true)
	require.NoError(t, err)
	_, err = c.releaseBatch(t.Context(), &keeper, nil)
	require.ErrorIs(t, err, control.ErrPaused)
	_, err = w.Store.Pause(t.Context(), r.ID, "ann", "", false)
	require.NoError(t, err)

	for done := false; !done; {
		w.applyAll()
		m.once(w)
		done, err = c.releaseBatch(t.Context(), &keeper, nil)
		require.NoError(t, err)
	}
	require.Equal(t, backfill.Finished, w.Now(r.ID).State)
}

// Whatever makes a gate unknown closes it.
func TestUnknownStaleAndFailingGatesAreClosed(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`CREATE TABLE load (v int)`)
	var status atomic.Int64
	status.Store(200)
	web := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(int(status.Load())) }))
	defer web.Close()
	gate := func(name, query string) pace.Gate {
		return pace.Gate{Name: name, Side: testkit.Source, Kind: pace.SQL, Query: query, Limit: 1, MaxAge: 600}
	}
	w.gates(gate("good", "SELECT 1"), gate("over", "VALUES (1.5)"), gate("none", "SELECT v FROM public.load"), gate("null", "SELECT NULL::int"), gate("nan", "SELECT 'NaN'::float8"),
		gate("wrong", "SELECT nonsense"), gate("writes", "INSERT INTO public.load VALUES (1) RETURNING v"), gate("two", "SELECT 1; SELECT 1"), gate("slow", "SELECT 1 FROM pg_sleep(60)"),
		pace.Gate{Name: "sessions", Side: testkit.Source, Kind: pace.Sessions, Limit: 1000, MaxAge: 600},
		pace.Gate{Name: "archiver", Side: testkit.Source, Kind: pace.Archiver, Limit: 1000, MaxAge: 600},
		pace.Gate{Name: "slots", Side: testkit.Source, Kind: pace.SlotWAL, Limit: 1 << 40, MaxAge: 600},
		pace.Gate{Name: "lag", Side: testkit.Source, Kind: pace.ReplicaLag, Limit: 1000, MaxAge: 600},
		pace.Gate{Name: "web", Side: testkit.Source, Kind: pace.HTTP, URL: web.URL, MaxAge: 600})
	m := &meter{Agent: w.from}
	m.once(w)
	for _, open := range []string{"good", "sessions", "archiver", "slots", "web"} {
		require.True(t, w.verdict(open).Open, "%s: %s", open, w.verdict(open).Why)
	}
	for closed, why := range map[string]string{"over": "over the limit", "none": "returns no row", "null": "returns NULL", "nan": "not a number",
		"wrong": "nonsense", "writes": "syntax error", "two": "syntax error", "slow": "longer than", "lag": "no replica is connected"} {
		require.False(t, w.verdict(closed).Open, closed)
		require.Contains(t, w.verdict(closed).Why, why)
	}
	status.Store(503)
	m.once(w)
	require.False(t, w.verdict("web").Open)
	testkit.Exec(t, w.C, `UPDATE backfill_control.gate SET measured_at = clock_timestamp() - interval '601 s'`)
	require.False(t, w.verdict("good").Open, "a stale reading")
	w.gates(pace.Gate{Name: "good", Side: testkit.Source, Kind: pace.SQL, Query: "SELECT 1", Limit: 2})
	require.False(t, w.verdict("good").Open, "a changed gate has to be measured anew")
}

// A closed gate holds a reconciliation: neither side reads a leaf, the run says why, and
// goes on where it was once the gate is open.
func TestAClosedGateHoldsAReconciliation(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x', n FROM generate_series(1, 400) n; CREATE TABLE load (v int); INSERT INTO load VALUES (0)`, "public.orders"), small(5))
	w.onReceiver(`UPDATE orders SET total = 0 WHERE id IN (7, 390)`)
	gate := func(query string) pace.Gate {
		return pace.Gate{Name: "load", Side: testkit.Source, Kind: pace.SQL, Query: query, Limit: 10, MaxAge: 3600}
	}
	m := &meter{Agent: w.from}
	load := func(v int) {
		w.onSource(`UPDATE load SET v = $1`, v)
		m.once(w)
	}
	// Every leaf with everything that is known of it, and what is listed or found.
	written := func() []string {
		return testkit.Strings(t, w.C, `SELECT l::text FROM backfill_control.run_leaf l UNION ALL SELECT r::text FROM backfill_control.leaf_row r UNION ALL SELECT d::text FROM backfill_control.difference d ORDER BY 1`)
	}
	leaves := func(state string) int {
		return testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.run_leaf WHERE state = $1`, state)
	}
	id := w.newRun("public.orders", control.NewReconciliation{})
	h := &hashing{comparison{Agent: w.from, id: id}}
	c := &comparing{comparison: comparison{Agent: w.to, id: id}}
	parts := map[string]func(context.Context, *backfill.Reconciliation) (progress, error){testkit.Source: h.step, testkit.Receiver: c.step}
	step := func(side string) progress {
		t.Helper()
		run, err := w.Store.Run(t.Context(), id)
		require.NoError(t, err)
		did, err := parts[side](t.Context(), run)
		require.NoError(t, err)
		return did
	}
	// held closes the gate, sees both sides stand still, and opens it again.
	held := func(what string) {
		t.Helper()
		load(11)
		before := written()
		for range 3 {
			step(testkit.Source)
			step(testkit.Receiver)
		}
		require.Equal(t, before, written(), what)
		run, err := w.Store.Run(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, "gate load: gate load is over the limit of 10", run.Waiting, what)
		require.True(t, run.State.Open())
		load(10)
	}

	w.gates(gate("SELECT v FROM public.load"))
	require.Equal(t, busy, step(testkit.Receiver))
	require.Equal(t, busy, step(testkit.Source), "how the tables are made is told, which reads no row")
	require.Equal(t, shut, step(testkit.Source), "a gate that nobody has measured is closed")
	held("no leaf is cut")
	duty, err := w.Store.Duty(t.Context(), testkit.Site, testkit.Source)
	require.NoError(t, err)
	require.True(t, duty.Busy, "the gates of a reconciliation are measured all the time")

	require.Equal(t, busy, step(testkit.Source))
	require.Equal(t, 4, leaves("hashed"))
	run, err := w.Store.Run(t.Context(), id)
	require.NoError(t, err)
	require.Empty(t, run.Waiting)
	require.Equal(t, busy, step(testkit.Source), "what was captured before a leaf was read is pushed, whatever the gates say")
	held("no leaf is hashed on the receiver, nor cut")
	require.Equal(t, 4, leaves("hashed"))
	require.Equal(t, busy, step(testkit.Receiver))
	require.Equal(t, 1, leaves("suspect"))
	held("no rows are listed")
	require.Equal(t, busy, step(testkit.Source))
	require.Equal(t, busy, step(testkit.Source))
	require.Equal(t, 1, leaves("listed"))
	held("no rows are compared")
	require.Equal(t, 1, leaves("listed"))

	found := w.judge(id)
	require.Equal(t, "DIFFERENT", found.Verdict)
	require.Equal(t, []string{"different 7 total", "different 390 total"}, w.differences(found))
	require.Empty(t, found.Waiting)

	// Nor is anything sent again.
	id = w.newRun("public.orders", control.NewReconciliation{Mode: backfill.RunRepair, Parent: found.ID})
	h, c = &hashing{comparison{Agent: w.from, id: id}}, &comparing{comparison: comparison{Agent: w.to, id: id}}
	parts = map[string]func(context.Context, *backfill.Reconciliation) (progress, error){testkit.Source: h.step, testkit.Receiver: c.step}
	step(testkit.Receiver)
	step(testkit.Source)
	held("nothing is repaired")
	require.Zero(t, testkit.Value[int](t, w.S, `SELECT count(*) FROM backfill_maple_school.outbox`))
	stop := w.sync()
	defer stop()
	require.Equal(t, "EQUAL", w.judge(id).Verdict)
}

// When the source waits for a gate and the receiver for changes, one of it is said, and
// they do not wake each other over it.
func TestAClosedGateIsSaidBeforeWhatElseIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, orders+`; INSERT INTO orders SELECT n, 'x', n FROM generate_series(1, 60) n; CREATE TABLE load (v int); INSERT INTO load VALUES (0)`, "public.orders"), small(5))
	w.gates(pace.Gate{Name: "load", Side: testkit.Source, Kind: pace.SQL, Query: "SELECT v FROM public.load", Limit: 10, MaxAge: 3600})
	m := &meter{Agent: w.from}
	m.once(w)
	w.onSource(`UPDATE orders SET note = 'new' WHERE id = 1`)
	id := w.newRun("public.orders", control.NewReconciliation{})
	h := &hashing{comparison{Agent: w.from, id: id}}
	c := &comparing{comparison: comparison{Agent: w.to, id: id}}
	waiting := func(step func(context.Context, *backfill.Reconciliation) (progress, error)) string {
		t.Helper()
		run, err := w.Store.Run(t.Context(), id)
		require.NoError(t, err)
		_, err = step(t.Context(), run)
		require.NoError(t, err)
		run, err = w.Store.Run(t.Context(), id)
		require.NoError(t, err)
		return run.Waiting
	}
	for _, step := range []func(context.Context, *backfill.Reconciliation) (progress, error){c.step, h.step, h.step, h.step, c.step} {
		require.Empty(t, waiting(step))
	}
	c.since = time.Now().Add(-time.Minute)
	require.Contains(t, waiting(c.step), "have to be applied on central")
	w.onSource(`UPDATE load SET v = 11`)
	m.once(w)
	for range 3 {
		require.Contains(t, waiting(h.step), "gate load")
		require.Contains(t, waiting(c.step), "gate load")
	}
	w.onSource(`UPDATE load SET v = 0`)
	m.once(w)
	require.Empty(t, waiting(h.step))
	require.Contains(t, waiting(c.step), "have to be applied on central")
	w.applyAll()
	require.Equal(t, "EQUAL", w.judge(id).Verdict)
}

// The keys of shadow reads are compared while they are fresh.
func TestAClosedGateDoesNotHoldShadowReads(t *testing.T) {
	w := shadowWorld(t)
	w.gates(pace.Gate{Name: "never", Side: testkit.Source, Kind: pace.SQL, Query: "SELECT 1"})
	stop := w.sync()
	defer stop()
	require.Equal(t, backfill.ShadowCounts{Match: 1}, w.verdicts(w.served("1", "x", 1)))
	duty, err := w.Store.Duty(t.Context(), testkit.Site, testkit.Source)
	require.NoError(t, err)
	require.False(t, duty.Busy)
}

// A gate of another table does not hold this one, and rows per second do.
func TestGatesOfATableAndALimitOfRows(t *testing.T) {
	w := newWorld(t, orders+`; CREATE TABLE other (id int PRIMARY KEY)`, "public.orders", "public.other")
	w.onSource(`INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 60) n`)
	w.gates(pace.Gate{Name: "never", Side: testkit.Receiver, Kind: pace.SQL, Query: "SELECT 1", Table: "public.other"},
		pace.Gate{Name: "slow", Side: testkit.Source, Kind: pace.RowsPerSecond, Limit: 20})
	r := w.Request("public.orders")
	began := time.Now()
	w.walk(r.ID)
	require.Greater(t, time.Since(began), 1900*time.Millisecond, "60 rows at 20 rows a second")
	require.Greater(t, w.Now(r.ID).Throttled, time.Second)
	require.Equal(t, int64(60), w.Now(r.ID).Staged)
}

// A walk stands still while the replay of a real streaming replica is paused, be it
// the source's or the receiver's, and goes on by itself.
func TestAReplicaThatIsBehindHoldsTheWalk(t *testing.T) {
	if testing.Short() {
		t.Skip("starts two servers")
	}
	t.Parallel()
	primary := testkit.StartReplicated(t)
	for _, side := range []string{testkit.Source, testkit.Receiver} {
		t.Run(side, func(t *testing.T) { replicaGate(t, primary, side) })
	}
}

func replicaGate(t *testing.T, servers *testkit.Replicated, side string) {
	primary, replica := servers.Database(t), testkit.Session(t, servers.ReplicaDSN)
	source, receiver := primary, testkit.Database(t)
	if side == testkit.Receiver {
		source, receiver = receiver, primary
	}
	w := worldOf(testkit.NewPairIn(t, testkit.Places{Source: source, Receiver: receiver}, orders, orders, "public.orders"), Settings{PageRows: 50})
	w.onSource(`INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 200) n`)
	w.gates(pace.Gate{Name: "lag", Side: side, Kind: pace.ReplicaLag, Limit: 2, MaxAge: 60})
	ctx, cancel := context.WithCancel(t.Context())
	measured := make(chan struct{})
	m := &meter{Agent: map[string]*Agent{testkit.Source: w.from, testkit.Receiver: w.to}[side]}
	go func() {
		defer close(measured)
		for ctx.Err() == nil {
			_, _ = m.measure(ctx)
			sleep(ctx, 100*time.Millisecond)
		}
	}()
	defer func() { cancel(); <-measured }()
	becomes := func(open bool) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("the gate is open: %v", open), func() bool { return w.verdict("lag").Open == open })
	}
	becomes(true)
	r := w.Request("public.orders")
	k := w.claim(w.from, r.ID)
	k.keeper.patience = time.Second
	require.NoError(t, k.freeze(ctx))
	testkit.Eventually(t, "the first page may be read", func() bool {
		pass, err := k.keeper.pass(ctx, nil)
		require.NoError(t, err)
		return pass
	})
	_, err := k.page(ctx)
	require.NoError(t, err)

	testkit.Exec(t, replica, `SELECT pg_wal_replay_pause()`)
	testkit.Exec(t, testkit.Session(t, primary), `CREATE TABLE noise (n int); INSERT INTO noise SELECT generate_series(1, 1000)`)
	becomes(false)
	before := w.Now(r.ID)
	done, err := k.chunk(ctx, nil)
	require.NoError(t, err)
	require.False(t, done)
	now := w.Now(r.ID)
	require.Equal(t, before.ResumeKey, now.ResumeKey)
	require.Equal(t, before.Staged, now.Staged)
	require.Contains(t, now.Waiting, "replica lag of "+side+" is over the limit of 2.0 s")
	require.False(t, w.verdict("lag").Open, "it grows while the replay is paused")

	testkit.Exec(t, replica, `SELECT pg_wal_replay_resume()`)
	w.finish(k)
	require.Equal(t, int64(200), w.Now(r.ID).Staged)
	require.Empty(t, w.Now(r.ID).Waiting)
}
