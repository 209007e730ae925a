package activities

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

var (
	seeds = flag.Int("seeds", 0, "how many random schedules TestGuarantee2_Convergence tries; 0: BACKFILL_SEEDS, else as many as 20 s allow")
	seed  = flag.Int64("seed", 0, "the first of them; 0: BACKFILL_SEED, else by the clock")
)

// TestGuarantee2_Convergence lets writers change the source in every way there is,
// while pushes, walks, releases and applies of several agents run beside each other,
// crash, are held up and come back late. When all is quiet the sides must be equal
// key by key, and the queue must show that no older read went behind a newer one.
//
// A seed decides what everybody does, though not who comes first; a failing one is
// printed, and fails again with -seed more often than not.
func TestGuarantee2_Convergence(t *testing.T) {
	count, first := *seeds, *seed
	if count == 0 {
		count, _ = strconv.Atoi(os.Getenv("BACKFILL_SEEDS"))
	}
	if first == 0 {
		first, _ = strconv.ParseInt(os.Getenv("BACKFILL_SEED"), 10, 64)
	}
	enough := time.Now().Add(20 * time.Second)
	if testing.Short() {
		enough = time.Now()
	}
	if first == 0 {
		first = time.Now().Unix() % 1_000_000_000
	}
	totals := &tally{}
	for i := int64(0); i < int64(count) || count == 0 && (i == 0 || time.Now().Before(enough)); i++ {
		t.Run(fmt.Sprintf("seed=%d", first+i), func(t *testing.T) { converge(t, first+i, totals) })
	}
	t.Log(totals)
}

// tally counts what the schedules came to.
type tally struct {
	statements, pushed, staged, released, superseded, skipped, crashes, fenced, requests atomic.Int64
}

func (c *tally) String() string {
	return fmt.Sprintf("%d statements, %d entries pushed, %d rows staged in %d requests, %d released, %d superseded, %d left out as identical, %d crashes, %d holders fenced out",
		c.statements.Load(), c.pushed.Load(), c.staged.Load(), c.requests.Load(), c.released.Load(), c.superseded.Load(), c.skipped.Load(), c.crashes.Load(), c.fenced.Load())
}

// storm is one schedule.
type storm struct {
	*world
	seed  uint64
	count *tally
	// what this seed tries
	drops   bool // operations are turned off and on
	synced  bool // the receiver begins with all rows, else with some that are stale
	rewrite bool // columns are rewritten: requests fail and are made again

	writing atomic.Bool
	working atomic.Bool
	mu      sync.Mutex
	wrong   []string
}

var stormTables = []string{"public.t", "public.c", "public.s", "public.m"}

const (
	stormSource = `
		CREATE SEQUENCE versions;
		CREATE TABLE t (id numeric PRIMARY KEY, val int, ver bigint, note text);
		CREATE TABLE c (id numeric PRIMARY KEY, tid numeric REFERENCES t ON DELETE CASCADE ON UPDATE CASCADE DEFERRABLE, val int, ver bigint);
		CREATE TABLE s (id int PRIMARY KEY, par int REFERENCES s ON DELETE CASCADE ON UPDATE CASCADE DEFERRABLE INITIALLY DEFERRED, val int, ver bigint);
		CREATE TABLE m (region int, id int, val int, ver bigint, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
		CREATE TABLE m0 PARTITION OF m FOR VALUES IN (0); CREATE TABLE m1 PARTITION OF m FOR VALUES IN (1); CREATE TABLE m2 PARTITION OF m DEFAULT;
		CREATE INDEX ON c (tid); CREATE INDEX ON s (par);
		CREATE FUNCTION setver() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN new.ver = nextval('versions'); RETURN new; END $$;
		CREATE TRIGGER sv BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION setver();
		CREATE TRIGGER sv BEFORE INSERT OR UPDATE ON c FOR EACH ROW EXECUTE FUNCTION setver();
		CREATE TRIGGER sv BEFORE INSERT OR UPDATE ON s FOR EACH ROW EXECUTE FUNCTION setver();
		CREATE TRIGGER sv BEFORE INSERT OR UPDATE ON m FOR EACH ROW EXECUTE FUNCTION setver();
		-- the application writes the same rows from a trigger of its own
		CREATE FUNCTION app() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF pg_trigger_depth() = 1 AND new.val % 7 = 0 THEN UPDATE t SET val = val + 1 WHERE id IN (new.id, (SELECT id FROM t ORDER BY random() LIMIT 1)); END IF; RETURN NULL; END $$;
		CREATE TRIGGER app AFTER UPDATE ON t FOR EACH ROW EXECUTE FUNCTION app();
		INSERT INTO t SELECT g, g * 10, 0, 'old' FROM generate_series(1, 40) g;
		INSERT INTO c SELECT g, 1 + g % 40, g FROM generate_series(1, 40) g;
		INSERT INTO s SELECT g, nullif(g / 2, 0), g FROM generate_series(1, 40) g;
		INSERT INTO m SELECT g % 4, g, g FROM generate_series(1, 40) g`
	// Foreign keys of the receiver: none, those that refuse, those that cascade.
	stormReceiver = `
		CREATE TABLE t (id numeric PRIMARY KEY, val int, ver bigint, note text);
		CREATE TABLE c (id numeric PRIMARY KEY, tid numeric %[1]s, val int, ver bigint);
		CREATE TABLE s (id int PRIMARY KEY, par int %[2]s, val int, ver bigint);
		CREATE TABLE m (region int, id int, val int, ver bigint, PRIMARY KEY (region, id));
		CREATE INDEX ON c (tid); CREATE INDEX ON s (par)`
)

func converge(t *testing.T, seed int64, count *tally) {
	rng := rand.New(rand.NewPCG(uint64(seed), 0))
	fks := [][]any{{"", ""}, {"REFERENCES t", "REFERENCES s"}, {"REFERENCES t ON DELETE CASCADE ON UPDATE CASCADE", "REFERENCES s ON DELETE CASCADE ON UPDATE CASCADE"}}[rng.IntN(3)]
	p := testkit.NewPairOf(t, stormSource, fmt.Sprintf(stormReceiver, fks...), stormTables...)
	s := &storm{world: worldOf(p, Settings{LeaseTTL: 120 * time.Millisecond}), seed: uint64(seed), count: count,
		drops: rng.IntN(4) == 0, synced: rng.IntN(2) == 0, rewrite: rng.IntN(4) == 0}
	s.begin()

	var writers, workers sync.WaitGroup
	s.writing.Store(true)
	s.working.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for i := range 5 {
		writers.Go(func() { s.write(i) })
	}
	for i, w := range []struct {
		side string
		work func(*worker, context.Context) error
	}{
		{testkit.Source, (*worker).push}, {testkit.Source, (*worker).push}, {testkit.Source, (*worker).walk}, {testkit.Source, (*worker).walk},
		{testkit.Source, (*worker).release}, {testkit.Source, (*worker).release}, {testkit.Receiver, (*worker).apply}, {testkit.Receiver, (*worker).apply},
		{testkit.Receiver, (*worker).classify}, {testkit.Source, (*worker).count}, {testkit.Source, (*worker).decide}, {testkit.Receiver, (*worker).decide},
	} {
		k := s.worker(i, w.side)
		workers.Go(func() { k.loop(ctx, w.work) })
		if i < 9 {
			workers.Go(k.trouble)
		}
	}
	time.Sleep(2*time.Second + time.Duration(rng.IntN(1000))*time.Millisecond)
	s.writing.Store(false)
	writers.Wait()
	s.working.Store(false)
	stop()
	workers.Wait()

	s.settle()
	s.check()
	if len(s.wrong) > 0 {
		t.Errorf("seed %d (drops %v, synced %v, rewrite %v, foreign keys %q) went wrong; run it again with -run 'TestGuarantee2_Convergence' -seeds 1 -seed %d\n%s",
			seed, s.drops, s.synced, s.rewrite, fks[0], seed, strings.Join(s.wrong[:min(len(s.wrong), 20)], "\n"))
	}
}

func (s *storm) complain(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wrong = append(s.wrong, fmt.Sprintf(format, args...))
}

// begin brings the receiver to where it starts, and lets every step backwards of a
// position be an error.
func (s *storm) begin() {
	rows := map[string]string{"t": "id, val, ver, note", "c": "id, tid, val, ver", "s": "id, par, val, ver", "m": "region, id, val, ver"}
	for _, table := range []string{"t", "c", "s", "m"} {
		columns := rows[table]
		stale := strings.Replace(columns, "val", "-1", 1)
		where := ""
		if s.synced {
			stale = columns
		} else {
			where = " WHERE id % 3 = 1 "
			stale = strings.NewReplacer(" tid", " NULL", " par", " NULL").Replace(stale)
		}
		for _, r := range testkit.Strings(s, s.S, `SELECT quote_literal(ROW(`+stale+`)::text) FROM `+table+where) {
			s.onReceiver(`INSERT INTO ` + table + ` SELECT (` + r + `::` + table + `).*`)
		}
	}
	s.onReceiver(`
		CREATE FUNCTION forward() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.seq < old.seq THEN RAISE 'the position went back'; END IF; RETURN new; END $$;
		CREATE TRIGGER forward BEFORE UPDATE ON backfill_maple_central.applied FOR EACH ROW EXECUTE FUNCTION forward()`)
	testkit.Exec(s, s.C, `
		CREATE FUNCTION forward() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.applied_seq < old.applied_seq THEN RAISE 'the acknowledgement went back'; END IF; RETURN new; END $$;
		CREATE TRIGGER forward BEFORE UPDATE ON backfill_control.direction FOR EACH ROW EXECUTE FUNCTION forward()`)
	for _, table := range stormTables {
		s.Request(table)
	}
}

// ---- the application

func (s *storm) write(n int) {
	rng := rand.New(rand.NewPCG(s.seed, uint64(1000+n)))
	conn, err := pgx.Connect(context.Background(), s.SourceDSN)
	if err != nil {
		s.complain("writer: %v", err)
		return
	}
	defer func() { _ = conn.Close(context.Background()) }()
	w := &writer{storm: s, rng: rng, conn: conn, n: n}
	w.exec(`SET deadlock_timeout = '50ms'; SET lock_timeout = '2s'`)
	for i := 0; s.writing.Load(); i++ {
		w.transaction(i)
		nap(rng, 6*time.Millisecond)
	}
}

type writer struct {
	*storm
	rng  *rand.Rand
	conn *pgx.Conn
	n    int
}

func (w *writer) exec(sql string) error {
	w.storm.count.statements.Add(1)
	_, err := w.conn.Exec(context.Background(), sql)
	return err
}

func (w *writer) transaction(i int) {
	rng := w.rng
	err := w.exec(`BEGIN` + []string{``, ``, ``, ``, ` ISOLATION LEVEL REPEATABLE READ`, ` ISOLATION LEVEL SERIALIZABLE`}[rng.IntN(6)])
	if rng.IntN(2) == 0 {
		err = errors.Join(err, w.exec(`SET CONSTRAINTS ALL DEFERRED`))
	}
	if rng.IntN(5) == 0 {
		err = errors.Join(err, w.exec(`SET LOCAL synchronous_commit = off`))
	}
	long, savepoint := rng.IntN(8) == 0, false
	for range 1 + rng.IntN(5) {
		if err != nil {
			break
		}
		if !savepoint && rng.IntN(6) == 0 {
			err, savepoint = w.exec(`SAVEPOINT s`), true
			continue
		}
		err = w.exec(w.statement())
		if savepoint && (err != nil && rng.IntN(3) > 0 || err == nil && rng.IntN(8) == 0) {
			err = w.exec(`ROLLBACK TO s`)
		}
		if long {
			nap(rng, 40*time.Millisecond)
		}
	}
	switch {
	case err != nil || rng.IntN(10) == 0:
		err = w.exec(`ROLLBACK`)
	case rng.IntN(12) == 0:
		gid := fmt.Sprintf("'%s %d %d'", w.S.Config().Database, w.n, i)
		if w.exec(`PREPARE TRANSACTION `+gid) != nil {
			err = w.exec(`ROLLBACK`)
			break
		}
		nap(rng, 50*time.Millisecond)
		err = w.exec([]string{`COMMIT`, `COMMIT`, `ROLLBACK`}[rng.IntN(3)] + ` PREPARED ` + gid)
	default:
		if w.exec(`COMMIT`) != nil {
			err = w.exec(`ROLLBACK`)
		}
	}
	if err != nil {
		w.complain("writer: %v", err)
	}
}

// key is a key of t in one of several spellings.
func (w *writer) key() string {
	return fmt.Sprint(1+w.rng.IntN(45), []string{"", "", ".0", ".00"}[w.rng.IntN(4)])
}

func (w *writer) statement() string {
	n := func(max int) string { return fmt.Sprint(1 + w.rng.IntN(max)) }
	k, k2, val := w.key(), w.key(), n(100_000)
	c, s, s2 := n(45), n(45), n(45)
	switch x := w.rng.IntN(100); {
	case x < 14:
		return `UPDATE t SET val = ` + val + ` WHERE id = ` + k
	case x < 19:
		return `UPDATE t SET val = ` + val + ` WHERE id BETWEEN ` + k + ` AND ` + k + ` + 3`
	case x < 27:
		return `INSERT INTO t VALUES (` + k + `, ` + val + `, 0, 'ins') ON CONFLICT (id) DO UPDATE SET id = excluded.id, val = excluded.val`
	case x < 33:
		return `DELETE FROM t WHERE id = ` + k
	case x < 37:
		return `DELETE FROM t WHERE id = ` + k + `; INSERT INTO t VALUES (` + k2 + `, ` + val + `, 0, 'again')`
	case x < 41:
		return `UPDATE t SET id = ` + k2 + ` WHERE id = ` + k
	case x < 46: // the same key spelled otherwise
		return `UPDATE t SET id = round(id, ` + fmt.Sprint(w.rng.IntN(3)) + `) WHERE id = ` + k
	case x < 49: // two keys change places
		return `UPDATE t SET id = -` + n(3) + ` WHERE id = ` + k + `; UPDATE t SET id = ` + k + ` WHERE id = ` + k2 + `; UPDATE t SET id = ` + k2 + ` WHERE id < 0`
	case x < 52:
		return `WITH d AS (DELETE FROM t WHERE id = ` + k + ` RETURNING *) INSERT INTO t SELECT id + 0.00, val + 1, 0, 'moved' FROM d`
	case x < 55:
		return `MERGE INTO t USING (VALUES (` + k + `::numeric, ` + val + `), (` + k2 + `::numeric + 50, ` + val + `)) v (i, n) ON t.id = v.i
			WHEN MATCHED AND n % 3 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET val = v.n WHEN NOT MATCHED THEN INSERT VALUES (v.i, v.n, 0, 'merged')`
	case x < 60:
		return `INSERT INTO c SELECT ` + c + `, id, ` + val + ` FROM t WHERE id = ` + k + ` ON CONFLICT (id) DO UPDATE SET tid = excluded.tid, val = excluded.val`
	case x < 64:
		return `UPDATE c SET val = ` + val + ` WHERE id = ` + c
	case x < 66:
		return `UPDATE c SET id = id + 100 WHERE id = ` + c
	case x < 68:
		return `DELETE FROM c WHERE id = ` + c
	case x < 72:
		return `INSERT INTO s VALUES (` + s + `, (SELECT id FROM s WHERE id = ` + s2 + `), ` + val + `) ON CONFLICT (id) DO UPDATE SET par = excluded.par, val = excluded.val`
	case x < 75:
		return `DELETE FROM s WHERE id = ` + s + ` AND id > ` + s2
	case x < 78: // circles and references ahead
		return `INSERT INTO s VALUES (5` + n(9) + `, 8` + n(9) + `, 1), (8` + n(9) + `, 5` + n(9) + `, 1), (5` + n(9) + `, NULL, 1), (8` + n(9) + `, NULL, 1) ON CONFLICT DO NOTHING`
	case x < 80:
		return `UPDATE s SET par = ` + s2 + ` WHERE id = ` + s + ` AND EXISTS (SELECT FROM s WHERE id = ` + s2 + `)`
	case x < 82:
		return `UPDATE s SET id = id + 200 WHERE id = ` + s
	case x < 86:
		return `INSERT INTO m VALUES (` + fmt.Sprint(w.rng.IntN(4)) + `, ` + c + `, ` + val + `) ON CONFLICT (region, id) DO UPDATE SET val = excluded.val`
	case x < 89:
		return `UPDATE m SET region = (region + 1) % 4, id = id + 100 WHERE id = ` + c
	case x < 91:
		return `DELETE FROM m1 WHERE id = ` + c + `; UPDATE m2 SET val = ` + val + ` WHERE id % 7 = 0`
	case x < 93:
		return `SELECT 1 FROM t WHERE id = ` + k + ` FOR UPDATE`
	case x < 95:
		return `UPDATE t SET note = 'n` + val + `'`
	case x < 97:
		return `SELECT pg_sleep(0.004)`
	}
	switch w.rng.IntN(14) {
	case 0:
		return `TRUNCATE t CASCADE`
	case 1:
		return `TRUNCATE s`
	case 2:
		return `TRUNCATE m; INSERT INTO m SELECT g % 4, g, g FROM generate_series(1, 20) g`
	case 3:
		if w.rewrite {
			return `ALTER TABLE t ALTER val TYPE int USING val + 0`
		}
	}
	return `UPDATE m SET val = val + 1`
}

// ---- the agents

// worker is one process: an agent of a side behind connections that can fail.
type worker struct {
	*storm
	n       int
	rng     *rand.Rand
	agent   *Agent
	proxies []*testkit.Proxy
}

func (s *storm) worker(n int, name string) *worker {
	k := &worker{storm: s, n: n, rng: rand.New(rand.NewPCG(s.seed, uint64(n)))}
	for _, dsn := range []string{s.ControlDSN, map[string]string{testkit.Source: s.SourceDSN, testkit.Receiver: s.ReceiverDSN}[name]} {
		k.proxies = append(k.proxies, testkit.NewProxy(s, dsn))
	}
	k.agent = s.agentAt(name, k.proxies[0].DSN, k.proxies[1].DSN)
	k.agent.faults = k.fault
	return k
}

// fault is a crash, or a delay, between two steps.
func (k *worker) fault(string) error {
	switch x := k.rng.IntN(100); {
	case !k.working.Load():
	case x < 4:
		k.storm.count.crashes.Add(1)
		return errCrash
	case x < 14:
		nap(k.rng, 50*time.Millisecond)
	case x < 15: // long enough for a lease to run out
		time.Sleep(200 * time.Millisecond)
	}
	return nil
}

// trouble cuts or stops a process's connections now and then.
func (k *worker) trouble() {
	rng := rand.New(rand.NewPCG(k.seed, ^uint64(0))) // its own: the worker's is in use beside it
	for k.working.Load() {
		nap(rng, 600*time.Millisecond)
		p := k.proxies[rng.IntN(len(k.proxies))]
		switch rng.IntN(3) {
		case 0:
			k.storm.count.crashes.Add(1)
			p.Cut()
		case 1:
			thaw := p.Freeze()
			nap(rng, 250*time.Millisecond)
			thaw()
		}
	}
}

func (k *worker) loop(ctx context.Context, work func(*worker, context.Context) error) {
	for k.working.Load() {
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		err := work(k, ctx)
		cancel()
		if err != nil && !expected(err) {
			k.complain("%v", err)
		}
		nap(k.rng, 20*time.Millisecond)
	}
}

// expected says that an error is what crashes, delays and takeovers bring about.
func expected(err error) bool {
	var held *control.LeaseHeld
	var network net.Error
	var pg *pgconn.PgError
	switch {
	case errors.Is(err, errCrash), errors.Is(err, control.ErrFenced), errors.Is(err, control.ErrPaused), errors.Is(err, side.ErrLayout),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.As(err, &held), errors.As(err, &network), errors.Is(err, pgx.ErrNoRows), backfill.CodeOf(err) == backfill.Conflict:
		return true
	case errors.As(err, &pg):
		switch pg.Code {
		case "40P01", "40001", "55P03", "57P01", "57014":
			return true
		case "23505": // two holders of a walk, of whom one is about to be fenced out
			return pg.TableName == "staged"
		}
		return false
	}
	return slices.ContainsFunc([]string{"conn closed", "conn busy", "connection reset", "broken pipe", "closed pool", "unexpected EOF"}, func(s string) bool {
		return strings.Contains(err.Error(), s)
	})
}

func (k *worker) push(ctx context.Context) error {
	k.agent.BatchRows = 1 + k.rng.IntN(60)
	_, err := k.agent.push(ctx)
	return err
}

func (k *worker) pick(ctx context.Context, states ...backfill.State) (*backfill.Request, error) {
	var names []string
	for _, s := range states {
		names = append(names, string(s))
	}
	all, err := k.agent.store.Requests(ctx, control.RequestFilter{States: names, Limit: 100})
	if err != nil || len(all) == 0 {
		return nil, errors.Join(err, pgx.ErrNoRows)
	}
	return all[k.rng.IntN(len(all))], nil
}

func (k *worker) walk(ctx context.Context) error {
	r, err := k.pick(ctx, backfill.Pending, backfill.InProgress)
	if err != nil {
		return err
	}
	a := k.agent
	a.BatchRows, a.PageRows, a.ChunkRows = 1+k.rng.IntN(60), 1+k.rng.IntN(12), int64(1+k.rng.IntN(30))
	lease, req, err := a.store.Claim(ctx, r.ID, a.ID, a.LeaseTTL)
	if err != nil {
		return err
	}
	w := a.walkUnder(lease, req)
	if err := w.freeze(ctx); err != nil {
		return k.closed(ctx, r.ID, err)
	}
	for range 1 + k.rng.IntN(4) {
		if k.rng.IntN(3) > 0 {
			if _, err := w.push(ctx); err != nil {
				return err
			}
		}
		done, err := w.chunk(ctx, nil)
		if err == nil && done {
			err = w.settle(ctx)
		}
		if errors.Is(err, control.ErrFenced) {
			k.storm.count.fenced.Add(1)
		}
		if err != nil || done {
			return k.closed(ctx, r.ID, err)
		}
	}
	if k.rng.IntN(2) == 0 {
		return nil // gone without a word
	}
	return a.store.Hand(ctx, lease)
}

// closed fails a request that cannot go on, as the workflow would.
func (k *worker) closed(ctx context.Context, id int64, err error) error {
	if errors.Is(err, side.ErrLayout) {
		_, err = k.agent.store.Close(ctx, id, "storm", backfill.Failed, err.Error())
	}
	return err
}

func (k *worker) release(ctx context.Context) error {
	r, err := k.pick(ctx, backfill.Releasing)
	if err != nil {
		return err
	}
	for range 1 + k.rng.IntN(3) {
		if done, err := k.agent.store.ReleaseBatch(ctx, r.ID, 1+k.rng.IntN(16)); err != nil || done {
			return err
		}
		if err := k.fault(""); err != nil {
			return err
		}
	}
	return nil
}

func (k *worker) apply(ctx context.Context) error {
	k.agent.BatchRows = 1 + k.rng.IntN(60)
	l := &applier{Agent: k.agent, started: k.rng.IntN(3) > 0}
	_, err := l.apply(ctx)
	return err
}

func (k *worker) classify(ctx context.Context) error {
	r, err := k.pick(ctx, backfill.InProgress, backfill.AwaitingReview, backfill.Releasing)
	if err != nil {
		return err
	}
	after, staged, _, err := k.agent.store.ClassifyFrom(ctx, r.ID)
	if err != nil || after == staged {
		return err
	}
	return k.agent.classify(ctx, r, after, min(after+int64(1+k.rng.IntN(20)), staged))
}

func (k *worker) count(ctx context.Context) error {
	nap(k.rng, 100*time.Millisecond)
	return k.agent.CountNow(ctx)
}

// decide is what people do.
func (k *worker) decide(ctx context.Context) error {
	store := k.agent.store
	switch x := k.rng.IntN(100); {
	case x < 25:
		n := control.NewRequest{Direction: k.Out.ID, TableID: k.Tables[stormTables[k.rng.IntN(4)]].ID, Mode: backfill.ModeFull, By: "storm"}
		if k.rng.IntN(2) == 0 {
			n.TableID, n.Mode, n.Key = k.Tables["public.t"].ID, backfill.ModeRow, backfill.Key{fmt.Sprint(1 + k.rng.IntN(45))}
		}
		_, err := store.CreateRequest(ctx, n)
		return err
	case x < 75:
		r, err := k.pick(ctx, backfill.AwaitingReview)
		if err != nil {
			return err
		}
		d := control.Decision{By: "storm", Revision: r.Revision, SkipIdentical: k.rng.IntN(2) == 0, Note: "storm"}
		if k.rng.IntN(5) == 0 {
			_, err = store.Reject(ctx, r.ID, d)
		} else {
			_, err = store.Approve(ctx, r.ID, d)
		}
		return err
	case x < 80:
		r, err := k.pick(ctx, backfill.Pending, backfill.InProgress, backfill.AwaitingReview, backfill.Releasing)
		if err == nil {
			_, err = store.Close(ctx, r.ID, "storm", backfill.Cancelled, "storm")
		}
		return err
	case x < 85:
		r, err := k.pick(ctx, backfill.InProgress, backfill.Releasing)
		if err == nil {
			_, err = store.Pause(ctx, r.ID, "storm", !r.Paused)
		}
		return err
	case x < 90 && k.drops:
		on := func() *bool { return ptr(k.rng.IntN(4) > 0) }
		_, err := store.PutTable(ctx, "storm", testkit.Site, stormTables[k.rng.IntN(4)], control.TableChange{Active: on(), Create: on(), Update: on(), Delete: on()})
		return err
	}
	return nil
}

// nap sleeps for up to d.
func nap(rng *rand.Rand, d time.Duration) { time.Sleep(time.Duration(rng.Int64N(int64(d)))) }

// ---- the end

// settle lets fresh agents finish what is under way: every table has one backfill
// of the whole of it, released and drained.
func (s *storm) settle() {
	ctx := s.Context()
	for _, table := range stormTables {
		s.Configure(table, control.TableChange{Active: ptr(true), Create: ptr(true), Update: ptr(true), Delete: ptr(true)})
	}
	s.from, s.to = s.agent(testkit.Source), s.agent(testkit.Receiver)
	whole := map[string]bool{} // a backfill of all of it was finished
	if s.synced && !s.drops {
		for _, table := range stormTables {
			whole[table] = true
		}
	}
	all, err := s.Store.Requests(ctx, control.RequestFilter{Limit: 10_000})
	require.NoError(s, err)
	for _, r := range all {
		if r.State == backfill.Finished && r.Key == nil && !s.drops {
			whole[r.Table] = true
		}
	}
	s.pushAll()
	for _, r := range all {
		if !r.State.Open() {
			continue
		}
		if r.Paused {
			_, err := s.Store.Pause(ctx, r.ID, "storm", false)
			require.NoError(s, err)
		}
		s.complete(r.ID)
		whole[r.Table] = whole[r.Table] || r.Key == nil && s.Now(r.ID).State == backfill.Finished && !s.drops
	}
	for _, table := range stormTables {
		for !whole[table] {
			id := s.Request(table).ID
			s.complete(id)
			whole[table] = s.Now(id).State == backfill.Finished
		}
	}
	s.drain()
	for range 20 {
		s.apply()
	}
}

// complete sees a request through.
func (s *storm) complete(id int64) {
	if st := s.Now(id).State; st == backfill.Pending || st == backfill.InProgress {
		s.expire(id)
		k := s.claim(s.from, id)
		if err := toTheEnd(s.Context(), k); errors.Is(err, side.ErrLayout) {
			_, err = s.Store.Close(s.Context(), id, "storm", backfill.Failed, "altered")
			require.NoError(s, err)
			return
		} else if errors.Is(err, control.ErrFenced) {
			require.Equal(s, backfill.Failed, s.Now(id).State) // its push saw that the table was altered
			return
		} else {
			require.NoError(s, err)
		}
	}
	if s.Now(id).State == backfill.AwaitingReview {
		s.classify(id)
		s.ApproveDiffering(id)
	}
	if s.Now(id).State == backfill.Releasing {
		s.release(id, 13)
	}
}

func (s *storm) check() {
	for _, table := range []string{"t", "c", "s", "m"} {
		source, receiver := rowsByKey(s, s.S, table), rowsByKey(s, s.R, table)
		for key, row := range source {
			if receiver[key] != row {
				s.complain("%s: source %s, receiver %q", table, row, receiver[key])
			}
		}
		for key, row := range receiver {
			// Deletes that were dropped leave rows behind.
			if source[key] == "" && !s.drops {
				s.complain("%s: only the receiver has %s", table, row)
			}
		}
	}
	if aside := s.setAside(); len(aside) > 0 && !s.drops {
		s.complain("set aside at the end: %v", aside)
	}
	if n := testkit.Value[int](s, s.S, `SELECT count(*) FROM backfill_maple_school.outbox`); n > 0 {
		s.complain("%d records are left in the outbox", n)
	}
	for what, sql := range map[string]string{
		"requests whose staged rows are not numbered without gap, or hold a key twice": `
			SELECT count(*) FROM backfill_control.request r, LATERAL (SELECT count(*) AS n, count(DISTINCT key) AS keys, coalesce(min(n), 1) AS low, coalesce(max(n), 0) AS high
			  FROM backfill_control.staged s WHERE s.request_id = r.id) x WHERE x.n <> r.staged OR x.keys <> x.n OR x.low <> 1 OR x.high <> x.n`,
		"entries of requests that nobody approved": `
			SELECT count(*) FROM backfill_control.entry e JOIN backfill_control.request r ON r.id = e.request_id WHERE r.reviewed_at IS NULL OR r.state = 'REJECTED'`,
		"entries behind one of their key that was read later": `
			SELECT count(*) FROM (SELECT snap, lag(snap) OVER (PARTITION BY table_id, key ORDER BY seq) AS before FROM backfill_control.entry WHERE op <> 't') e WHERE backfill_control.later(before, snap)`,
		"rows released behind a newer version": `
			SELECT count(*) FROM released r WHERE EXISTS (SELECT FROM versions q WHERE q.table_id = r.table_id AND q.key = r.key AND q.seq < r.seq AND q.ver > r.ver
			   AND NOT EXISTS (SELECT FROM versions z WHERE z.table_id = r.table_id AND z.key = r.key AND z.seq > q.seq AND z.seq < r.seq AND z.op = 'd'))`,
		"rows released behind the delete of that very version": `
			SELECT count(*) FROM released r WHERE EXISTS (SELECT FROM versions q WHERE q.table_id = r.table_id AND q.key = r.key AND q.seq < r.seq AND q.op = 'd'
			   AND EXISTS (SELECT FROM versions z WHERE z.table_id = r.table_id AND z.key = r.key AND z.seq < q.seq AND z.ver = r.ver))`,
		"rows released twice": `SELECT count(*) FROM (SELECT FROM released GROUP BY request_id, key HAVING count(*) > 1) x`,
		"requests whose counts do not add up": `
			SELECT count(*) FROM backfill_control.request r WHERE state = 'FINISHED' AND (released + superseded + skipped <> staged
			   OR released <> (SELECT count(*) FROM backfill_control.entry e WHERE e.request_id = r.id))`,
	} {
		const views = `WITH versions AS (SELECT e.*, (e.row[CASE WHEN t.name = 'public.t' THEN 3 ELSE 4 END])::bigint AS ver
			FROM backfill_control.entry e JOIN backfill_control.table_config t ON t.id = e.table_id), released AS (SELECT * FROM versions WHERE request_id IS NOT NULL) `
		if n := testkit.Value[int](s, s.C, views+sql); n > 0 {
			s.complain("%d %s", n, what)
		}
	}
	add := func(to *atomic.Int64, sql string) { to.Add(testkit.Value[int64](s, s.C, sql)) }
	add(&s.count.released, `SELECT coalesce(sum(released), 0) FROM backfill_control.request`)
	add(&s.count.superseded, `SELECT coalesce(sum(superseded), 0) FROM backfill_control.request`)
	add(&s.count.skipped, `SELECT coalesce(sum(skipped), 0) FROM backfill_control.request`)
	add(&s.count.staged, `SELECT coalesce(sum(staged), 0) FROM backfill_control.request`)
	add(&s.count.requests, `SELECT count(*) FROM backfill_control.request`)
	add(&s.count.pushed, `SELECT count(*) FROM backfill_control.entry WHERE request_id IS NULL`)
}

func rowsByKey(t testing.TB, conn *pgx.Conn, table string) map[string]string {
	out := map[string]string{}
	key := "id::text"
	if table == "m" {
		key = "region || ',' || id"
	}
	for _, r := range testkit.Strings(t, conn, `SELECT `+key+` || '=' || r::text FROM `+table+` r`) {
		k, v, _ := strings.Cut(r, "=")
		out[k] = v
	}
	return out
}
