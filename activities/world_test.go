package activities

import (
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// world is a pair of sides with an agent beside each, whose steps a test takes one
// by one.
type world struct {
	*testkit.Pair
	from, to *Agent
	settings Settings
}

// orders is a small table of the tests.
const orders = `CREATE TABLE orders (id numeric PRIMARY KEY, note text, total int NOT NULL DEFAULT 0)`

func newWorld(t *testing.T, schema string, tables ...string) *world {
	t.Helper()
	t.Parallel()
	return worldOf(testkit.NewPair(t, schema, tables...), Settings{})
}

func worldOf(p *testkit.Pair, s Settings) *world {
	p.Helper()
	w := &world{Pair: p, settings: s}
	w.from, w.to = w.agentWith(p.Store, p.From), w.agentWith(p.Store, p.To)
	return w
}

// agent makes a further agent of a side, a process of its own as far as the
// databases can tell.
func (w *world) agent(name string) *Agent {
	w.Helper()
	return w.agentAt(name, w.ControlDSN, map[string]string{testkit.Source: w.SourceDSN, testkit.Receiver: w.ReceiverDSN}[name])
}

func (w *world) agentAt(name, controlDSN, dsn string) *Agent {
	w.Helper()
	return w.agentWith(testkit.Open(w, controlDSN), testkit.OpenSide(w, name, dsn))
}

func (w *world) agentWith(store *control.Store, db *side.DB) *Agent {
	w.Helper()
	a, err := NewAgent(w.Context(), store, db, fmt.Sprintf("agent %d", agents.Add(1)), w.settings)
	require.NoError(w, err)
	return a
}

var agents atomic.Int64

// stopAt makes an agent wait at the first pass of a point. The test is told on
// reached, and lets it go on, or fail there, through resume.
func (w *world) stopAt(a *Agent, point string) (reached <-chan struct{}, resume func(error)) {
	at, on := make(chan struct{}), make(chan error, 2)
	stopped := false
	a.faults = func(p string) error {
		if p != point || stopped {
			return nil
		}
		stopped = true
		close(at)
		return <-on
	}
	w.Cleanup(func() { on <- errCrash }) // a test that fails meanwhile must end
	return at, func(err error) { on <- err }
}

// failAt makes an agent fail once at a point, as a crash would.
func failAt(a *Agent, point string) {
	failed := false
	a.faults = func(p string) error {
		if p != point || failed {
			return nil
		}
		failed = true
		return errCrash
	}
}

// meanwhile makes an agent do something else first at the first pass of a point.
func meanwhile(a *Agent, point string, fn func()) {
	done := false
	a.faults = func(p string) error {
		if p == point && !done {
			done = true
			fn()
		}
		return nil
	}
}

var errCrash = errors.New("crashed here")

// async runs fn beside the test.
func async[T any](fn func() (T, error)) (wait func() (T, error)) {
	type answer struct {
		v   T
		err error
	}
	c := make(chan answer, 1)
	go func() {
		v, err := fn()
		c <- answer{v, err}
	}()
	return func() (T, error) { a := <-c; return a.v, a.err }
}

// labelled runs fn in a goroutine that parked finds by a label, with those it starts.
func labelled(label string, fn func()) {
	pprof.Do(context.Background(), pprof.Labels("test", label), func(context.Context) { fn() })
}

// parked counts the goroutines of a label that wait in a function itself, not in what
// it calls: so a test can wait until something waits.
func parked(label, function string) (n int) {
	var profile strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&profile, 1)
	for _, same := range strings.Split(profile.String(), "\n\n") {
		// "2 @ …", "# labels: {…}", then a frame a line: address, name+offset, place.
		lines := strings.Split(same, "\n")
		if i := slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, strconv.Quote(label)) }); i < 0 {
			continue
		}
		for _, l := range lines {
			frame := strings.Split(l, "\t")
			if len(frame) < 3 || strings.HasPrefix(frame[2], "runtime.") {
				continue
			}
			if name, _, _ := strings.Cut(frame[2], "+0x"); strings.HasSuffix(name, function) {
				of := 0
				_, _ = fmt.Sscan(lines[0], &of)
				n += of
			}
			break
		}
	}
	return n
}

func (w *world) push() pushed {
	w.Helper()
	p, err := w.from.push(w.Context())
	require.NoError(w, err)
	return p
}

// pushAll pushes until the outbox is empty.
func (w *world) pushAll() {
	w.Helper()
	for range 1000 {
		if p := w.push(); p.all && len(p.left) == 0 && p.rows == 0 {
			return
		}
	}
	w.Fatal("the outbox does not become empty")
}

// apply applies one batch on the receiver, held rows included.
func (w *world) apply() {
	w.Helper()
	_, err := (&applier{Agent: w.to}).apply(w.Context())
	require.NoError(w, err)
}

// applyAll applies until the receiver stands at the end of the queue.
func (w *world) applyAll() {
	w.Helper()
	for range 1000 {
		w.apply()
		last, err := w.Store.LastSeq(w.Context(), w.Out.ID)
		require.NoError(w, err)
		if testkit.Value[int64](w, w.C, `SELECT applied_seq FROM backfill_control.direction WHERE id = $1`, w.Out.ID) == last {
			w.apply() // for what was held
			return
		}
	}
	w.Fatal("the receiver does not come to the end of the queue")
}

// drain pushes and applies everything.
func (w *world) drain() {
	w.Helper()
	w.pushAll()
	w.applyAll()
}

// claim takes a request's lease for an agent.
func (w *world) claim(a *Agent, id int64) *walk {
	w.Helper()
	lease, req, err := a.store.Claim(w.Context(), id, a.ID, a.LeaseTTL)
	require.NoError(w, err)
	return a.walkUnder(lease, req)
}

// expire lets the lease of a request run out.
func (w *world) expire(id int64) {
	w.Helper()
	testkit.Exec(w, w.C, `UPDATE backfill_control.request SET lease_until = clock_timestamp() - interval '1 s' WHERE id = $1`, id)
}

// to the end walks what is left of a walk, and settles it.
func (w *world) finish(k *walk) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), time.Minute) // a walk that does not end is a failure, not a hang
	defer cancel()
	require.NoError(w, toTheEnd(ctx, k))
}

func toTheEnd(ctx context.Context, k *walk) error {
	if err := k.freeze(ctx); err != nil {
		return err
	}
	for {
		if _, err := k.push(ctx); err != nil {
			return err
		}
		done, err := k.chunk(ctx, nil)
		if err != nil {
			return err
		}
		if done {
			return k.settle(ctx)
		}
	}
}

// walk walks a whole request and returns it as it then awaits review.
func (w *world) walk(id int64) *backfill.Request {
	w.Helper()
	w.finish(w.claim(w.from, id))
	r := w.Now(id)
	require.Equal(w, backfill.AwaitingReview, r.State)
	return r
}

// release releases a request in batches and returns it when it is finished.
func (w *world) release(id int64, batch int) *backfill.Request {
	w.Helper()
	for {
		done, _, err := w.Store.ReleaseBatch(w.Context(), id, batch)
		require.NoError(w, err)
		if done {
			break
		}
	}
	r := w.Now(id)
	require.Equal(w, backfill.Finished, r.State)
	return r
}

// classify judges all staged rows of a request on the receiver.
func (w *world) classify(id int64) {
	w.Helper()
	for {
		after, staged, _, err := w.Store.ClassifyFrom(w.Context(), id)
		require.NoError(w, err)
		if after == staged {
			return
		}
		require.NoError(w, w.to.classify(w.Context(), w.Now(id), after, min(after+classifyRows, staged)))
	}
}

// onSource and onReceiver run statements of the application.
func (w *world) onSource(sql string, args ...any) {
	w.Helper()
	testkit.Exec(w, w.S, sql, args...)
}

func (w *world) onReceiver(sql string, args ...any) {
	w.Helper()
	testkit.Exec(w, w.R, sql, args...)
}

// staged checks that the rows of a request are numbered without gap and hold each
// key once, and returns their keys in order.
func (w *world) staged(id int64) []string {
	w.Helper()
	keys := testkit.Strings(w, w.C, `SELECT array_to_string(key, ',') FROM backfill_control.staged WHERE request_id = $1 ORDER BY n`, id)
	require.Equal(w, int64(len(keys)), w.Now(id).Staged)
	require.True(w, testkit.Value[bool](w, w.C, `
		SELECT coalesce(min(n) = 1 AND max(n) = count(*) AND count(DISTINCT key) = count(*), true) FROM backfill_control.staged WHERE request_id = $1`, id))
	return keys
}

// setAside lists what is set aside on the receiver.
func (w *world) setAside() []string {
	w.Helper()
	rows, err := w.to.db.SetAside(w.Context())
	require.NoError(w, err)
	out := []string{}
	for _, r := range rows {
		out = append(out, fmt.Sprintf("%s (%s): %s", r.State, r.Key, r.Reason))
	}
	return out
}

// waiting counts the sessions of the control database that wait for a lock.
func (w *world) waits(n int) {
	w.Helper()
	testkit.Eventually(w, fmt.Sprintf("%d sessions wait for a lock on the control database", n), func() bool { return testkit.LockWaiters(w, w.C) == n })
}

// count has both agents count and describe their tables, and audit capture.
func (w *world) count() {
	w.Helper()
	require.NoError(w, w.from.CountNow(w.Context()))
	require.NoError(w, w.to.CountNow(w.Context()))
}

// panel is what is known of the first table.
func (w *world) panel() *backfill.Panel {
	w.Helper()
	p, err := w.Store.Panel(w.Context(), testkit.Site, "public.orders", testkit.Source)
	require.NoError(w, err)
	return p
}

func ptr[T any](v T) *T { return &v }

// retryAll asks for everything quarantined to be tried again, and does so.
func (w *world) retryAll() {
	w.Helper()
	w.wish("retry")
	w.applyAll()
}

// wish asks for something to be done with all changes set aside.
func (w *world) wish(what string) {
	w.Helper()
	rows, err := w.to.db.SetAside(w.Context())
	require.NoError(w, err)
	for _, r := range rows {
		require.NoError(w, w.Store.Wish(w.Context(), testkit.Site, r.Seq, what, "someone"))
	}
}

func (w *world) positionOf(nonce string) side.Position { return side.Position{Seq: 1, Nonce: nonce} }

// page stages a page and commits it.
func (w *walk) page(ctx context.Context) (int64, error) {
	p, err := w.stage(ctx, w.committed())
	if err != nil {
		return 0, err
	}
	return p.rows, w.commit(p)
}
