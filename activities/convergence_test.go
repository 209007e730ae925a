package activities

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
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
	seeds = flag.Int("seeds", 0, "how many random schedules TestGuarantee2_Convergence and TestGuarantee2_TwoWayConvergence try; 0: BACKFILL_SEEDS, else as many as 20 s allow")
	seed  = flag.Int64("seed", 0, "the first of them; 0: BACKFILL_SEED, else by the clock")
)

// TestGuarantee2_Convergence lets writers change the source in every way there is,
// while pushes, walks, releases and applies of several agents run beside each other,
// crash, are held up and come back late. When all is quiet the sides must be equal
// key by key, and the queue must show that no older read went behind a newer one.
//
// A seed decides what everybody does, though not who comes first; a failing one is
// printed, and fails again with -seed more often than not.
func TestGuarantee2_Convergence(t *testing.T) { random(t, 20*time.Second, converge) }

// random tries schedules, as many as are asked for or the time allows: at first those
// that once went wrong.
func random(t *testing.T, most time.Duration, try func(t *testing.T, seed int64, count *tally), wrong ...int64) {
	count, first := *seeds, *seed
	if count == 0 {
		count, _ = strconv.Atoi(os.Getenv("BACKFILL_SEEDS"))
	}
	if first == 0 {
		first, _ = strconv.ParseInt(os.Getenv("BACKFILL_SEED"), 10, 64)
	}
	enough := time.Now().Add(most)
	if testing.Short() {
		enough = time.Now()
	}
	if first == 0 {
		first = time.Now().Unix() % 1_000_000_000
	}
	totals := &tally{}
	for i := int64(0); i < int64(count) || count == 0 && (i == 0 || time.Now().Before(enough)); i++ {
		n := first + i
		if count == 0 && i < int64(len(wrong)) {
			n = wrong[i]
		}
		t.Run(fmt.Sprintf("seed=%d", n), func(t *testing.T) { try(t, n, totals) })
	}
	t.Log(totals)
}

// tally counts what the schedules came to.
type tally struct {
	statements, pushed, staged, lived, released, superseded, skipped, crashes, fenced, requests atomic.Int64
}

func (c *tally) String() string {
	return fmt.Sprintf("%d statements, %d entries pushed, %d rows staged in %d requests, %d released, %d superseded, %d left out as identical, %d keys compared with those that lived, %d crashes, %d holders fenced out",
		c.statements.Load(), c.pushed.Load(), c.staged.Load(), c.requests.Load(), c.released.Load(), c.superseded.Load(), c.skipped.Load(), c.lived.Load(), c.crashes.Load(), c.fenced.Load())
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
	workers map[string]string // numbers by the name in leases
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
		-- from when to when each key lived, as far as it was committed
		CREATE TABLE life (n bigint GENERATED ALWAYS AS IDENTITY, tx xid8 DEFAULT pg_current_xact_id(), tbl text, what "char", key text);
		CREATE INDEX ON life (tbl, what, key, n);
		CREATE FUNCTION live() RETURNS trigger LANGUAGE plpgsql AS $$
			DECLARE was text; is_now text; BEGIN
			IF tg_op = 'TRUNCATE' THEN INSERT INTO life (tbl, what) VALUES (tg_argv[0], 't'); RETURN NULL; END IF;
			IF tg_op <> 'INSERT' THEN was = CASE WHEN tg_argv[0] = 'm' THEN to_jsonb(old)->>'region' || ',' ELSE '' END || old.id; END IF;
			IF tg_op <> 'DELETE' THEN is_now = CASE WHEN tg_argv[0] = 'm' THEN to_jsonb(new)->>'region' || ',' ELSE '' END || new.id; END IF;
			IF was IS DISTINCT FROM is_now THEN
				INSERT INTO life (tbl, what, key) SELECT tg_argv[0], 'd', was WHERE was IS NOT NULL;
				INSERT INTO life (tbl, what, key) SELECT tg_argv[0], 'b', is_now WHERE is_now IS NOT NULL;
			END IF; RETURN NULL; END $$;
		CREATE TRIGGER live AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION live('t'); CREATE TRIGGER gone AFTER TRUNCATE ON t EXECUTE FUNCTION live('t');
		CREATE TRIGGER live AFTER INSERT OR UPDATE OR DELETE ON c FOR EACH ROW EXECUTE FUNCTION live('c'); CREATE TRIGGER gone AFTER TRUNCATE ON c EXECUTE FUNCTION live('c');
		CREATE TRIGGER live AFTER INSERT OR UPDATE OR DELETE ON s FOR EACH ROW EXECUTE FUNCTION live('s'); CREATE TRIGGER gone AFTER TRUNCATE ON s EXECUTE FUNCTION live('s');
		CREATE TRIGGER live AFTER INSERT OR UPDATE OR DELETE ON m FOR EACH ROW EXECUTE FUNCTION live('m'); CREATE TRIGGER gone AFTER TRUNCATE ON m EXECUTE FUNCTION live('m');
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
		CREATE INDEX ON c (tid); CREATE INDEX ON s (par);
		-- versions of a key that went backwards here
		CREATE TABLE backwards (tbl text, was bigint, became bigint);
		CREATE FUNCTION onwards() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS $$ BEGIN
			IF new.ver < old.ver THEN INSERT INTO backwards VALUES (tg_table_name, old.ver, new.ver); END IF; RETURN NULL; END $$;
		CREATE TRIGGER onwards AFTER UPDATE ON t FOR EACH ROW EXECUTE FUNCTION onwards();
		CREATE TRIGGER onwards AFTER UPDATE ON c FOR EACH ROW EXECUTE FUNCTION onwards();
		CREATE TRIGGER onwards AFTER UPDATE ON s FOR EACH ROW EXECUTE FUNCTION onwards();
		CREATE TRIGGER onwards AFTER UPDATE ON m FOR EACH ROW EXECUTE FUNCTION onwards()`
)

func converge(t *testing.T, seed int64, count *tally) {
	rng := rand.New(rand.NewPCG(uint64(seed), 0))
	fks := [][]any{{"", ""}, {"REFERENCES t", "REFERENCES s"}, {"REFERENCES t ON DELETE CASCADE ON UPDATE CASCADE", "REFERENCES s ON DELETE CASCADE ON UPDATE CASCADE"}}[rng.IntN(3)]
	p := testkit.NewPairOf(t, stormSource, fmt.Sprintf(stormReceiver, fks...), stormTables...)
	s := &storm{world: worldOf(p, Settings{LeaseTTL: 120 * time.Millisecond}), seed: uint64(seed), count: count, workers: map[string]string{},
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
		CREATE TRIGGER forward BEFORE UPDATE ON backfill_control.direction FOR EACH ROW EXECUTE FUNCTION forward();
		-- who has written each page, and who held the lease then
		CREATE TABLE pages (request bigint, epoch bigint, holder text, writer text);
		CREATE FUNCTION page() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			INSERT INTO public.pages VALUES (new.id, new.epoch, new.holder, current_setting('storm.worker', true)); RETURN NULL; END $$;
		CREATE TRIGGER page AFTER UPDATE ON backfill_control.request FOR EACH ROW WHEN (new.staged <> old.staged) EXECUTE FUNCTION page()`)
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
	for _, dsn := range []string{under(s, s.ControlDSN, fmt.Sprintf("storm.worker=%d", n)), map[string]string{testkit.Source: s.SourceDSN, testkit.Receiver: s.ReceiverDSN}[name]} {
		k.proxies = append(k.proxies, testkit.NewProxy(s, dsn))
	}
	k.agent = s.agentAt(name, k.proxies[0].DSN, k.proxies[1].DSN)
	k.agent.faults = k.fault
	s.workers[k.agent.ID] = strconv.Itoa(n)
	return k
}

// under is a connection string whose sessions begin under settings.
func under(t testing.TB, dsn string, settings ...string) string {
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	q := u.Query()
	q.Set("options", "-c "+strings.Join(settings, " -c "))
	u.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20")
	return u.String()
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
		if done, _, err := k.agent.store.ReleaseBatch(ctx, r.ID, 1+k.rng.IntN(16)); err != nil || done {
			return err
		}
		if err := k.fault("release: batch committed"); err != nil {
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
		if time.Since(*r.WalkedAt) < time.Duration(k.rng.IntN(700))*time.Millisecond {
			return nil // it is still being read
		}
		if k.rng.IntN(8) == 0 {
			_, err = store.Rejudge(ctx, r.ID, "storm")
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
			_, err = store.Pause(ctx, r.ID, "storm", "", !r.Paused)
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
		r = s.Now(r.ID) // what was pushed may have failed it
		if !r.State.Open() {
			continue
		}
		if r.Paused {
			_, err := s.Store.Pause(ctx, r.ID, "storm", "", false)
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
		"entries of requests that nobody approved, or from before that": `
			SELECT count(*) FROM backfill_control.entry e JOIN backfill_control.request r ON r.id = e.request_id
			 WHERE r.reviewed_at IS NULL OR r.state = 'REJECTED' OR e.created_at < r.reviewed_at`,
		"requests beside an open one of the same rows": `
			SELECT count(*) FROM backfill_control.request a JOIN backfill_control.request b
			    ON b.direction = a.direction AND b.table_id = a.table_id AND b.key IS NOT DISTINCT FROM a.key AND b.id > a.id
			 WHERE a.closed_at IS NULL OR b.requested_at < a.closed_at - interval '1 s'`,
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
	if n := testkit.Value[int](s, s.R, `SELECT count(*) FROM backwards`); n > 0 {
		s.complain("%d rows of the receiver went back to an older version", n)
	}
	s.checkWriters()
	s.checkLives()
	add := func(to *atomic.Int64, sql string) { to.Add(testkit.Value[int64](s, s.C, sql)) }
	add(&s.count.released, `SELECT coalesce(sum(released), 0) FROM backfill_control.request`)
	add(&s.count.superseded, `SELECT coalesce(sum(superseded), 0) FROM backfill_control.request`)
	add(&s.count.skipped, `SELECT coalesce(sum(skipped), 0) FROM backfill_control.request`)
	add(&s.count.staged, `SELECT coalesce(sum(staged), 0) FROM backfill_control.request`)
	add(&s.count.requests, `SELECT count(*) FROM backfill_control.request`)
	add(&s.count.pushed, `SELECT count(*) FROM backfill_control.entry WHERE request_id IS NULL`)
}

// checkWriters looks whether each page was written by whoever held the lease.
func (s *storm) checkWriters() {
	for _, p := range testkit.Strings(s, s.C, `SELECT DISTINCT format('%s/%s', holder, coalesce(writer, '')) FROM pages`) {
		holder, writer, _ := strings.Cut(p, "/")
		if s.workers[holder] != writer { // nobody's are those of the end
			s.complain("a page was written by worker %q while %s held the lease", writer, holder)
		}
	}
}

// checkLives looks whether every key that lived from a walk's start to the read of
// its page was staged.
func (s *storm) checkLives() {
	typed := map[string]string{"t": "(%s)::numeric", "c": "(%s)::numeric", "s": "(%s)::int", "m": "string_to_array(%s, ',')::int[]"}
	rows, err := s.C.Query(s.Context(), `
		SELECT r.id, split_part(t.name, '.', 2), r.floor::text, array_to_string(r.resume_key, ','), x.keys,
		       (SELECT snap::text FROM backfill_control.staged s WHERE s.request_id = r.id
		         ORDER BY pg_snapshot_xmax(snap) DESC, (SELECT count(*) FROM pg_snapshot_xip(snap)) LIMIT 1)
		  FROM backfill_control.request r JOIN backfill_control.table_config t ON t.id = r.table_id,
		       LATERAL (SELECT array_agg(array_to_string(key, ',')) AS keys FROM backfill_control.staged s WHERE s.request_id = r.id) x
		 WHERE r.key IS NULL AND r.staged > 0`)
	require.NoError(s, err)
	type walked struct {
		ID                   int64
		Table, Floor, Resume string
		Keys                 []string
		End                  string
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[walked])
	require.NoError(s, err)
	for _, w := range all {
		key := func(x string) string { return fmt.Sprintf(typed[w.Table], x) }
		for _, k := range testkit.Strings(s, s.S, `
			SELECT b.key FROM life b LEFT JOIN LATERAL (
			    SELECT tx FROM ((SELECT n, tx FROM life d WHERE d.tbl = b.tbl AND d.what = 'd' AND d.key = b.key AND d.n > b.n ORDER BY n LIMIT 1)
			         UNION ALL (SELECT n, tx FROM life d WHERE d.tbl = b.tbl AND d.what = 't' AND d.n > b.n ORDER BY n LIMIT 1)) x ORDER BY n LIMIT 1) died ON true
			 WHERE b.tbl = $1 AND b.what = 'b' AND pg_visible_in_snapshot(b.tx, $2::text::pg_snapshot)
			   AND (died.tx IS NULL OR NOT pg_visible_in_snapshot(died.tx, $3::text::pg_snapshot))
			   AND `+key("b.key")+` <= `+key("$4::text")+` AND b.key <> ALL ($5::text[])`, w.Table, w.Floor, w.End, w.Resume, w.Keys) {
			s.complain("request %d has skipped key %s of %s", w.ID, k, w.Table)
		}
		s.count.lived.Add(int64(len(w.Keys)))
	}
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
