package control_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
	"backfill/internal/testkit"
)

func later(t *testing.T, conn *pgx.Conn, a, b string) bool {
	t.Helper()
	return testkit.Value[bool](t, conn, `SELECT backfill_control.later($1::text::pg_snapshot, $2::text::pg_snapshot)`, a, b)
}

func TestLater(t *testing.T) {
	t.Parallel()
	conn := testkit.Session(t, testkit.ControlDSN(t))
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"10:10:", "10:10:", false},
		{"10:11:", "10:10:", true},
		{"10:10:", "10:11:", false},
		{"10:12:", "10:12:10", true}, // a transaction ended in between
		{"10:12:10", "10:12:", false},
		{"10:12:10", "10:12:10,11", true},
		{"8:13:8,9,12", "10:12:10", true}, // the xmax decides
		{"10:4294967300:", "10:4294967299:", true},
	} {
		require.Equal(t, c.want, later(t, conn, c.a, c.b), "%s later than %s", c.a, c.b)
	}
}

// Snapshots taken one after the other on one primary, while transactions with
// subtransactions come and go, are never earlier than the one before, and a later
// one is told from an earlier one whenever what it sees differs.
func TestGuarantee4_SnapshotsAreTotallyOrdered(t *testing.T) {
	t.Parallel()
	dsn := testkit.ControlDSN(t)
	reader := testkit.Session(t, dsn)
	rng := rand.New(rand.NewPCG(rand.Uint64(), 0))
	testkit.Exec(t, reader, `CREATE TABLE public.seen (n int)`)
	writers := make([]*pgx.Conn, 6)
	open := make([]int, 6)
	for i := range writers {
		writers[i] = testkit.Session(t, dsn)
	}
	type read struct {
		snapshot string
		rows     int
	}
	var reads []read
	for range 400 {
		i := rng.IntN(len(writers))
		switch {
		case open[i] == 0:
			testkit.Exec(t, writers[i], `BEGIN; INSERT INTO public.seen VALUES (1)`)
			open[i] = 1
		case open[i] < 3 && rng.IntN(2) == 0:
			testkit.Exec(t, writers[i], []string{`SAVEPOINT s; INSERT INTO public.seen VALUES (2)`, `SAVEPOINT s; INSERT INTO public.seen VALUES (2); ROLLBACK TO s`}[rng.IntN(2)])
			open[i]++
		default:
			testkit.Exec(t, writers[i], []string{`COMMIT`, `COMMIT`, `ROLLBACK`}[rng.IntN(3)])
			open[i] = 0
		}
		var r read
		require.NoError(t, reader.QueryRow(t.Context(), `SELECT pg_current_snapshot()::text, (SELECT count(*) FROM public.seen)`).Scan(&r.snapshot, &r.rows))
		reads = append(reads, r)
	}
	for i := 1; i < len(reads); i++ {
		require.False(t, later(t, reader, reads[i-1].snapshot, reads[i].snapshot), "%v then %v", reads[i-1], reads[i])
		if reads[i-1].rows != reads[i].rows {
			require.True(t, later(t, reader, reads[i].snapshot, reads[i-1].snapshot), "%v then %v", reads[i-1], reads[i])
		}
	}
}

// world is a control database with a site and a table.
type world struct {
	*testing.T
	store *control.Store
	conn  *pgx.Conn
	out   backfill.Direction
	table *backfill.Table
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	dsn := testkit.ControlDSN(t)
	w := &world{T: t, store: testkit.Open(t, dsn), conn: testkit.Session(t, dsn)}
	require.NoError(t, w.store.CreateSite(t.Context(), "test", "maple", [2]string{"school", "central"}))
	var err error
	w.table, err = w.store.PutTable(t.Context(), "test", "maple", "public.orders", control.TableChange{CapturedFrom: []string{"school"}})
	require.NoError(t, err)
	w.out, err = w.store.Direction(t.Context(), "maple", "school")
	require.NoError(t, err)
	return w
}

// pushed adds entries as a push does.
func (w *world) pushed(keys ...string) (batch int64) {
	w.Helper()
	p, err := w.store.BeginPush(w.Context(), w.out)
	require.NoError(w, err)
	defer p.Rollback()
	for range keys {
		require.NoError(w, p.Truncate(w.Context(), w.table.ID, "1:1:", false))
	}
	batch, err = p.Commit(w.Context(), fmt.Sprint("nonce ", time.Now().UnixNano()), 0)
	require.NoError(w, err)
	return batch
}

func TestPushContinuesOneBehindAtMost(t *testing.T) {
	w := newWorld(t)
	type mark struct {
		batch int64
		nonce string
	}
	marks := []mark{{}}
	for range 3 {
		w.pushed("1")
		var m mark
		require.NoError(t, w.conn.QueryRow(t.Context(), `SELECT push_batch, push_nonce FROM backfill_control.direction WHERE id = $1`, w.out.ID).Scan(&m.batch, &m.nonce))
		marks = append(marks, m)
	}
	p, err := w.store.BeginPush(t.Context(), w.out)
	require.NoError(t, err)
	defer p.Rollback()
	for i, m := range marks {
		behind, err := p.Continues(t.Context(), 1, m.batch, m.nonce)
		require.Equal(t, i >= 2, err == nil, "%v: %v", m, err)
		require.Equal(t, i == 2, behind)
	}
	for _, m := range []mark{{3, "other"}, {2, "other"}, {4, marks[3].nonce}, {2, marks[3].nonce}} {
		_, err := p.Continues(t.Context(), 1, m.batch, m.nonce)
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", m)
	}
}

// Pushes of a direction take turns; those of another do not wait.
func TestDirectionsHaveLocksOfTheirOwn(t *testing.T) {
	w := newWorld(t)
	p, err := w.store.BeginPush(t.Context(), w.out)
	require.NoError(t, err)
	defer p.Rollback()
	back, err := w.store.Direction(t.Context(), "maple", "central")
	require.NoError(t, err)
	other, err := w.store.BeginPush(t.Context(), back)
	require.NoError(t, err)
	other.Rollback()
	got := make(chan struct{})
	go func() {
		q, err := w.store.BeginPush(t.Context(), w.out)
		if err == nil {
			q.Rollback()
		}
		close(got)
	}()
	testkit.Eventually(t, "the second push waits", func() bool { return testkit.LockWaiters(t, w.conn) == 1 })
	p.Rollback()
	<-got
}

func TestBatchesAreBoundedAndNeverEmptyHanded(t *testing.T) {
	w := newWorld(t)
	for i := range 10 {
		testkit.Exec(t, w.conn, `INSERT INTO backfill_control.entry (direction, table_id, snap, op, key, row, dropped) VALUES ($1, $2, '1:1:', 'u', $3, $4, $5)`,
			w.out.ID, w.table.ID, []string{strconv.Itoa(i)}, []string{strings.Repeat("x", 1000)}, i%5 == 4)
		w.pushed() // notes the batch
	}
	at := control.Position{}
	var sizes []int64
	for {
		b, err := w.store.Next(t.Context(), w.out, at, 4, 2500)
		require.NoError(t, err)
		if b.To == at {
			break
		}
		require.Greater(t, b.To.Seq, at.Seq)
		require.NotEmpty(t, b.To.Nonce)
		sizes = append(sizes, b.Rows)
		at = b.To
		require.NoError(t, w.store.Acknowledge(t.Context(), w.out, at.Seq))
	}
	total := int64(0)
	for _, n := range sizes {
		require.LessOrEqual(t, n, int64(4))
		total += n
	}
	require.Equal(t, int64(8), total, "all but the dropped ones")
	b, err := w.store.Next(t.Context(), w.out, control.Position{}, 1, 1)
	require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", b)
}

// An acknowledgement never goes back.
func TestAcknowledgementsOnlyGoForward(t *testing.T) {
	w := newWorld(t)
	w.pushed("1", "2", "3")
	last, err := w.store.LastSeq(t.Context(), w.out.ID)
	require.NoError(t, err)
	var all sync.WaitGroup
	for seq := last - 2; seq <= last; seq++ {
		all.Go(func() { require.NoError(t, w.store.Acknowledge(t.Context(), w.out, seq)) })
	}
	all.Wait()
	require.NoError(t, w.store.Acknowledge(t.Context(), w.out, 1))
	require.Equal(t, last, testkit.Value[int64](t, w.conn, `SELECT applied_seq FROM backfill_control.direction WHERE id = $1`, w.out.ID))
}

// Not having been able to look says nothing about capture; having found it broken does.
func TestCaptureIsUnbrokenSince(t *testing.T) {
	w := newWorld(t)
	since := func() *time.Time {
		p, err := w.store.Panel(t.Context(), "maple", "public.orders", "school")
		require.NoError(t, err)
		require.Equal(t, p.Source.CaptureOK, p.Source.CaptureSince != nil)
		return p.Source.CaptureSince
	}
	report := func(r control.SideReport) {
		r.TableID = w.table.ID
		require.NoError(t, w.store.ReportSide(t.Context(), "maple", "school", []control.SideReport{r}))
	}
	require.Nil(t, since())
	report(control.SideReport{CaptureOK: true, Shape: "a", Key: []string{"id"}})
	first := since()
	require.NotNil(t, first)
	report(control.SideReport{CaptureOK: true, Shape: "a"})
	require.Equal(t, first, since())
	report(control.SideReport{Unseen: true, Problem: "connection lost"})
	require.Equal(t, first, since())
	request := func() *backfill.Request {
		r, err := w.store.CreateRequest(t.Context(), control.NewRequest{Direction: w.out.ID, TableID: w.table.ID, Mode: backfill.ModeFull, By: "test"})
		require.NoError(t, err)
		return r
	}
	r := request()
	report(control.SideReport{CaptureOK: true, Shape: "a"})
	report(control.SideReport{Unseen: true, Problem: "connection lost"})
	require.Equal(t, backfill.Pending, w.now(r.ID).State)
	report(control.SideReport{Problem: "a trigger is missing"})
	require.Nil(t, since())
	require.Equal(t, backfill.Failed, w.now(r.ID).State)
	require.Contains(t, w.now(r.ID).Reason, "a trigger is missing")
	report(control.SideReport{CaptureOK: true, Shape: "b"})
	require.True(t, since().After(*first))

	// A request that has not begun yet has read nothing that could be doubtful.
	r = request()
	report(control.SideReport{CaptureOK: true, Shape: "c"})
	require.Equal(t, backfill.Pending, w.now(r.ID).State)
	l, _, err := w.store.Claim(t.Context(), r.ID, "agent", time.Minute)
	require.NoError(t, err)
	id, err := w.store.PutLayout(t.Context(), &row.Layout{Key: []string{"id"}})
	require.NoError(t, err)
	require.NoError(t, w.store.Freeze(t.Context(), l, control.Frozen{LayoutID: id, Floor: "1:1:", Shape: "c"}))
	report(control.SideReport{CaptureOK: true, Shape: "c"})
	require.Equal(t, backfill.InProgress, w.now(r.ID).State)
	report(control.SideReport{CaptureOK: true, Shape: "d"})
	require.Equal(t, backfill.Failed, w.now(r.ID).State)
}

func (w *world) now(id int64) *backfill.Request {
	w.Helper()
	r, err := w.store.Request(w.Context(), id)
	require.NoError(w, err)
	return r
}

// A process that was stopped in the middle of a push gives the direction back.
func TestALockDoesNotOutliveAStoppedProcess(t *testing.T) {
	w := newWorld(t)
	p, err := w.store.BeginPush(t.Context(), w.out)
	require.NoError(t, err)
	// What the timeout does, the server does at once here.
	testkit.Exec(t, w.conn, `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	w.pushed("1")
	_, err = p.Commit(t.Context(), "late", 0)
	require.Error(t, err)
	p.Rollback()
}

// While a push has the direction's lock, those that wait for it may have taken all
// other connections of the process: the push needs none of them.
func TestAPushNeedsNoOtherConnection(t *testing.T) {
	w := newWorld(t)
	p, err := w.store.BeginPush(t.Context(), w.out)
	require.NoError(t, err)
	var all sync.WaitGroup
	for range 40 {
		all.Go(func() {
			other, err := w.store.BeginPush(t.Context(), w.out)
			require.NoError(t, err)
			other.Rollback()
		})
	}
	defer all.Wait()
	defer p.Rollback()
	testkit.Eventually(t, "all connections wait", func() bool { return testkit.LockWaiters(t, w.conn) == 15 })
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err = p.PutLayout(ctx, &row.Layout{Key: []string{"id"}})
	require.NoError(t, err)
	_, err = p.Commit(ctx, "done", 0)
	require.NoError(t, err)
}

func TestLayoutsAreRecordedOnce(t *testing.T) {
	w := newWorld(t)
	l := &row.Layout{Columns: []row.Column{{Name: "id", Type: "integer", Declared: "integer"}}, Key: []string{"id"}}
	ids := make(chan int64, 8)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			id, err := w.store.PutLayout(t.Context(), l)
			require.NoError(t, err)
			ids <- id
		})
	}
	all.Wait()
	first := <-ids
	for range 7 {
		require.Equal(t, first, <-ids)
	}
	back, err := w.store.Layout(t.Context(), first)
	require.NoError(t, err)
	require.Equal(t, l.Fingerprint(), back.Fingerprint())
	_, err = w.store.Layout(t.Context(), 999)
	require.Equal(t, backfill.NotFound, backfill.CodeOf(err))
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	dsn := testkit.DatabaseWith(t, "")
	_, err := control.Open(t.Context(), dsn)
	require.ErrorContains(t, err, "backfill migrate")
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			_, err := control.Migrate(t.Context(), dsn)
			require.NoError(t, err)
		})
	}
	all.Wait()
	done, err := control.Migrate(t.Context(), dsn)
	require.NoError(t, err)
	require.Empty(t, done)
	store, err := control.Open(t.Context(), dsn)
	require.NoError(t, err)
	store.Disconnect()
	_, err = control.Open(t.Context(), "postgres://u:secret@host:bad/x")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

func TestAServerThatIsTooOldIsNamed(t *testing.T) {
	dsn := testkit.DatabaseWith(t, "")
	control.RaiseOldest(t)
	_, err := control.Migrate(t.Context(), dsn)
	require.ErrorContains(t, err, "the control database's server is of version ")
	require.ErrorContains(t, err, "at least 99 is needed: use a newer server")
}
