package activities

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

// schedule is what applications do to tables, step by step in sessions of their own.
type schedule struct {
	tables string // on both sides, with the rows there are before capture
	app    string // on the source only
	names  string
	steps  []string // "session: statements", with & before it when it may have to wait
}

var schedules = map[string]schedule{
	"a BEFORE trigger updates another row of the same statement": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 4) g`,
		`CREATE FUNCTION bu() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF pg_trigger_depth() = 1 AND new.id = 1 THEN UPDATE t SET v = v + 1000 WHERE id = 3; END IF; RETURN new; END $$;
		 CREATE TRIGGER bu BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION bu()`, "t",
		[]string{`A: UPDATE t SET v = v + 1 WHERE id IN (1, 2)`, `A: UPDATE t SET v = v + 1 WHERE id = 1`, `A: UPDATE t SET v = v + 1 WHERE id <> 3`}},
	"an AFTER DELETE trigger inserts the row again": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 4) g`,
		`CREATE FUNCTION ad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF old.id < 3 THEN INSERT INTO t VALUES (old.id, old.v + 500); END IF; RETURN NULL; END $$;
		 CREATE TRIGGER ad AFTER DELETE ON t FOR EACH ROW EXECUTE FUNCTION ad()`, "t",
		[]string{`A: DELETE FROM t WHERE id = 1`, `A: DELETE FROM t`, `A: INSERT INTO t VALUES (3, 3)`, `A: UPDATE t SET id = id + 10`}},
	"an AFTER ROW trigger updates the same row": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 4) g`,
		`CREATE FUNCTION au() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF pg_trigger_depth() < 3 THEN UPDATE t SET v = v * 2, id = CASE WHEN id = 2 THEN 22 ELSE id END WHERE id = new.id; END IF; RETURN NULL; END $$;
		 CREATE TRIGGER au AFTER INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION au()`, "t",
		[]string{`A: UPDATE t SET v = v + 1`, `A: INSERT INTO t VALUES (9, 9)`, `A: BEGIN`, `A: UPDATE t SET v = 7 WHERE id = 3`, `A: SAVEPOINT s`, `A: UPDATE t SET v = 8 WHERE id = 3`, `A: ROLLBACK TO s`, `A: COMMIT`}},
	"a chain of cascades, and one to itself": {
		`CREATE TABLE p (id int PRIMARY KEY, v int);
		 CREATE TABLE q (id int PRIMARY KEY, pid int REFERENCES p ON UPDATE CASCADE ON DELETE CASCADE);
		 CREATE TABLE r (id int PRIMARY KEY, qid int REFERENCES q ON UPDATE CASCADE ON DELETE CASCADE, up int REFERENCES r ON DELETE CASCADE);
		 INSERT INTO p SELECT g, g FROM generate_series(1, 4) g; INSERT INTO q SELECT g * 10 + h, g FROM generate_series(1, 4) g, generate_series(1, 3) h;
		 INSERT INTO r SELECT id * 10, id, NULL FROM q; INSERT INTO r SELECT id * 10 + 1, id, id * 10 FROM q; INSERT INTO r SELECT id * 10 + 2, NULL, id * 10 + 1 FROM q`, ``, "p q r",
		[]string{`A: UPDATE p SET id = id + 100 WHERE id < 3`, `A: UPDATE q SET id = id + 1000 WHERE id < 30`, `A: DELETE FROM p WHERE id = 101`, `A: BEGIN`, `A: DELETE FROM p WHERE id = 3`,
			`A: INSERT INTO p VALUES (3, 33)`, `A: COMMIT`, `A: DELETE FROM r WHERE up IS NULL AND id < 400`, `A: DELETE FROM p`}},
	"the key is the foreign key": {
		`CREATE TABLE p (id int PRIMARY KEY); CREATE TABLE q (pid int PRIMARY KEY REFERENCES p ON UPDATE CASCADE ON DELETE CASCADE, v int);
		 INSERT INTO p SELECT generate_series(1, 5); INSERT INTO q SELECT id, id FROM p`, ``, "p q",
		[]string{`A: UPDATE p SET id = id + 10`, `A: DELETE FROM p WHERE id IN (11, 12)`, `A: WITH x AS (DELETE FROM p WHERE id = 13 RETURNING *) INSERT INTO p SELECT 33 FROM x`}},
	"rows move between partitions": {
		`CREATE TABLE t (reg int, id int, v int, extra text, PRIMARY KEY (reg, id)) PARTITION BY LIST (reg); CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1);
		 CREATE TABLE t2 (dummy int, extra text, v int, id int NOT NULL, reg int NOT NULL); ALTER TABLE t2 DROP COLUMN dummy; ALTER TABLE t ATTACH PARTITION t2 FOR VALUES IN (2);
		 CREATE TABLE t3 PARTITION OF t FOR VALUES IN (3, 4) PARTITION BY LIST (reg); CREATE TABLE t3a PARTITION OF t3 FOR VALUES IN (3); CREATE TABLE t3b PARTITION OF t3 FOR VALUES IN (4);
		 INSERT INTO t SELECT r, g, g, 'x' FROM generate_series(1, 4) r, generate_series(1, 3) g`, ``, "t",
		[]string{`A: UPDATE t SET id = id + 20 WHERE reg = 2 AND id = 1`, `A: UPDATE t SET reg = 2, v = v + 1 WHERE reg = 1 AND id = 1`,
			`A: UPDATE t SET reg = CASE reg WHEN 1 THEN 3 WHEN 2 THEN 1 WHEN 3 THEN 4 ELSE 2 END, id = id + 100 * reg`, `A: INSERT INTO t2 (reg, id, v) VALUES (2, 77, 7)`, `A: UPDATE t3 SET reg = 4 WHERE reg = 3`,
			`A: DELETE FROM t3b WHERE id % 2 = 0`, `A: INSERT INTO t VALUES (1, 5, 5, 'y'), (2, 5, 5, 'y'), (3, 5, 5, 'y') ON CONFLICT (reg, id) DO UPDATE SET v = excluded.v + 1`,
			`A: MERGE INTO t USING (VALUES (1, 5), (2, 6), (4, 7)) s (r, i) ON t.reg = s.r AND t.id = s.i WHEN MATCHED THEN UPDATE SET v = 99 WHEN NOT MATCHED THEN INSERT VALUES (s.r, s.i, 1, 'm')`,
			`A: BEGIN; TRUNCATE t; INSERT INTO t VALUES (1, 1, 1, 'z'), (4, 2, 2, 'z'); COMMIT`, `A: UPDATE t1 SET id = id + 1`}},
	"COPY, ON CONFLICT, WITH, MERGE": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 6) g`, ``, "t",
		[]string{`A: COPY t FROM PROGRAM 'printf "11\t1\n12\t2\n"'`, `A: INSERT INTO t VALUES (1, 100), (20, 1) ON CONFLICT (id) DO UPDATE SET v = excluded.v, id = t.id + 200`,
			`A: INSERT INTO t VALUES (2, 100), (21, 1) ON CONFLICT DO NOTHING`,
			`A: WITH x AS (UPDATE t SET v = v + 1 WHERE id = 2 RETURNING *), y AS (INSERT INTO t VALUES (30, 0) RETURNING *), z AS (DELETE FROM t WHERE id = 3 RETURNING *), w AS (INSERT INTO t SELECT id, 777 FROM z WHERE false RETURNING *) UPDATE t SET v = v + 10 WHERE id = 4`,
			`A: WITH x AS (UPDATE t SET id = id + 50 WHERE id IN (5, 6) RETURNING *) INSERT INTO t SELECT id - 100, v FROM x`,
			`A: MERGE INTO t USING (VALUES (2, 1), (4, 2), (40, 3), (41, 4)) s (i, x) ON t.id = s.i WHEN MATCHED AND x = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET v = s.x, id = t.id + 60
				WHEN NOT MATCHED AND x = 3 THEN INSERT VALUES (s.i, s.x) WHEN NOT MATCHED THEN DO NOTHING`,
			`A: BEGIN; TRUNCATE t; INSERT INTO t VALUES (1, 1), (2, 2); COMMIT`}},
	"truncates in every order": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 6) g`, ``, "t",
		[]string{`A: BEGIN`, `A: INSERT INTO t VALUES (10, 1), (11, 1)`, `A: TRUNCATE t`, `A: INSERT INTO t VALUES (11, 2), (12, 2)`, `A: UPDATE t SET v = v + 1`, `A: COMMIT`, `A: INSERT INTO t VALUES (13, 1)`,
			`A: BEGIN`, `A: SAVEPOINT s`, `A: TRUNCATE t`, `A: ROLLBACK TO s`, `A: INSERT INTO t VALUES (14, 1)`, `A: COMMIT`, `A: BEGIN`, `A: TRUNCATE t`, `A: INSERT INTO t VALUES (13, 9)`,
			`A: PREPARE TRANSACTION 'GID'`, `A: COMMIT PREPARED 'GID'`, `A: UPDATE t SET v = v + 1`}},
	"a truncate beside inserts": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 3) g`, ``, "t",
		[]string{`A: BEGIN`, `A: INSERT INTO t VALUES (4, 4)`, `&B: BEGIN; TRUNCATE t; INSERT INTO t VALUES (5, 5)`, `A: COMMIT`, `&C: INSERT INTO t VALUES (6, 6)`, `B: COMMIT`, `C: UPDATE t SET v = v + 1`}},
	"statement triggers of the application": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 4) g`,
		`CREATE FUNCTION sa() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF pg_trigger_depth() = 1 THEN UPDATE t SET v = v + 1 WHERE id < 3; DELETE FROM t WHERE id = 4; INSERT INTO t VALUES (4, (random() * 1000)::int); END IF; RETURN NULL; END $$;
		 CREATE TRIGGER zzz AFTER UPDATE ON t FOR EACH STATEMENT EXECUTE FUNCTION sa(); CREATE TRIGGER aaa AFTER INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION sa()`, "t",
		[]string{`A: UPDATE t SET v = v + 1`, `A: INSERT INTO t VALUES (7, 7)`, `A: UPDATE t SET v = 0 WHERE false`, `A: UPDATE t SET id = id + 5 WHERE id = 7`}},
	"a deferred constraint trigger writes at the commit": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 4) g`,
		`CREATE FUNCTION ct() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.v < 100 THEN UPDATE t SET v = v + 100, id = id + 1000 WHERE id = new.id; END IF; RETURN NULL; END $$;
		 CREATE CONSTRAINT TRIGGER ct AFTER INSERT OR UPDATE ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION ct()`, "t",
		[]string{`A: BEGIN`, `A: UPDATE t SET v = v + 1 WHERE id < 3`, `A: COMMIT`, `A: BEGIN`, `A: INSERT INTO t VALUES (9, 9)`, `A: SAVEPOINT s`, `A: DELETE FROM t WHERE id = 9`, `A: ROLLBACK TO s`, `A: COMMIT`}},
	"a view, and BEFORE triggers that change or swallow": {
		`CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 4) g`,
		`CREATE VIEW w AS SELECT * FROM t;
		 CREATE FUNCTION bi() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN new.id = new.id * 2; RETURN new; END $$; CREATE TRIGGER bi BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION bi();
		 CREATE FUNCTION bd() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF old.id = 2 THEN RETURN NULL; END IF; IF old.id = 3 THEN UPDATE t SET v = 0 WHERE id = 1; END IF; RETURN old; END $$;
		 CREATE TRIGGER bd BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION bd()`, "t",
		[]string{`A: INSERT INTO w VALUES (50, 1)`, `A: UPDATE w SET id = id + 1 WHERE id = 100`, `A: DELETE FROM w WHERE id < 4 AND id <> 1`, `A: INSERT INTO t VALUES (1, 1) ON CONFLICT DO NOTHING`}},
	"keys that change places, one transaction each": {
		`CREATE TABLE t (id numeric PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 4) g`, ``, "t",
		[]string{`A: BEGIN; UPDATE t SET id = -1 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2; UPDATE t SET id = 2 WHERE id = -1; COMMIT`, `A: BEGIN`, `A: DELETE FROM t WHERE id = 3`,
			`&B: INSERT INTO t VALUES (3.0, 100)`, `A: COMMIT`, `B: UPDATE t SET id = 3.00 WHERE id = 3`, `A: UPDATE t SET id = id + 10`}},
}

// Whatever applications do, step by step, and wherever pushes, pages, releases and
// applies come in between: the sides end up equal. With BACKFILL_SOAK more often.
func TestGuarantee2_Schedules(t *testing.T) {
	t.Parallel()
	times := 1
	if os.Getenv("BACKFILL_SOAK") != "" {
		times = 30
	}
	for name, s := range schedules {
		for range times {
			seed := rand.Uint64()
			t.Run(fmt.Sprintf("%s, seed %d", name, seed), func(t *testing.T) {
				t.Parallel()
				s.run(t, rand.New(rand.NewPCG(seed, 0)))
			})
		}
	}
}

func (s schedule) run(t *testing.T, rng *rand.Rand) {
	names := strings.Fields(s.names)
	var tables []string
	for _, n := range names {
		tables = append(tables, "public."+n)
	}
	w := worldOf(testkit.NewPairOf(t, s.tables+";"+s.app, s.tables, tables...), Settings{LeaseTTL: time.Hour}) // a walk goes on between the steps, however slow the machine is
	a := &agency{world: w, rng: rng, tables: tables, staged: map[string]int64{}}
	sessions := map[string]*session{}
	for _, step := range s.steps {
		later := strings.HasPrefix(step, "&")
		name, sql, _ := strings.Cut(strings.TrimPrefix(step, "&"), ": ")
		c := sessions[name]
		if c == nil {
			c = &session{conn: testkit.Session(t, w.SourceDSN)}
			sessions[name] = c
		}
		c.wait(t)
		c.do(t, strings.ReplaceAll(sql, "GID", w.S.Config().Database), later)
		// Nobody can look at a table that is being truncated.
		if testkit.Value[int](t, w.S, `SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == 0 {
			a.work()
		}
	}
	for _, c := range sessions {
		c.wait(t)
	}
	a.end()
	w.Equal(names...)
	require.Empty(t, w.setAside())
}

// session is one of an application's.
type session struct {
	conn  *pgx.Conn
	ended chan error
}

func (s *session) do(t *testing.T, sql string, later bool) {
	s.ended = make(chan error, 1)
	pid := s.conn.PgConn().PID()
	go func() {
		_, err := s.conn.Exec(t.Context(), sql)
		s.ended <- err
	}()
	if !later {
		s.wait(t)
		return
	}
	watch := testkit.Session(t, s.conn.Config().ConnString())
	testkit.Eventually(t, "the statement ends or waits", func() bool {
		return len(s.ended) > 0 || testkit.Value[bool](t, watch, `SELECT coalesce(wait_event_type, '') = 'Lock' FROM pg_stat_activity WHERE pid = $1`, pid)
	})
}

func (s *session) wait(t *testing.T) {
	t.Helper()
	if s.ended != nil {
		require.NoError(t, <-s.ended)
		s.ended = nil
	}
}

// agency does what agents and control workers do, in an order that a seed decides.
type agency struct {
	*world
	rng    *rand.Rand
	tables []string
	walk   *walk
	staged map[string]int64 // requests that are walked and not yet released, by table
}

func (a *agency) work() {
	a.Helper()
	for a.rng.IntN(4) > 0 {
		a.from.BatchRows, a.to.BatchRows, a.from.PageRows, a.from.ChunkRows = 1+a.rng.IntN(8), 1+a.rng.IntN(8), 1+a.rng.IntN(5), 1
		switch a.rng.IntN(8) {
		case 0, 1:
			a.pushAll()
		case 2, 3:
			a.push()
		case 4:
			a.apply()
		case 5:
			a.page()
		case 6:
			a.walked()
		case 7:
			a.released(a.tables[a.rng.IntN(len(a.tables))])
		}
	}
}

func (a *agency) page() {
	a.Helper()
	if a.walk == nil {
		table := a.tables[a.rng.IntN(len(a.tables))]
		a.released(table)
		a.walk = a.claim(a.from, a.Request(table).ID)
		require.NoError(a, a.walk.freeze(a.Context()))
	}
	_, err := a.walk.chunk(a.Context(), nil)
	r := a.Now(a.walk.req.ID)
	require.NoError(a, err, "the request is %s %s, held by %q", r.State, r.Reason, r.LeaseHolder)
}

func (a *agency) walked() {
	a.Helper()
	if a.walk == nil {
		return
	}
	ctx, cancel := context.WithTimeout(a.Context(), time.Minute)
	defer cancel()
	err := toTheEnd(ctx, a.walk)
	r := a.Now(a.walk.req.ID)
	require.NoError(a, err, "the request is %s %s, held by %q", r.State, r.Reason, r.LeaseHolder)
	require.Equal(a, backfill.AwaitingReview, r.State)
	a.staged[a.walk.req.Table], a.walk = a.walk.req.ID, nil
}

func (a *agency) released(table string) {
	a.Helper()
	if id := a.staged[table]; id != 0 {
		r := a.Now(id)
		require.Equal(a, backfill.AwaitingReview, r.State, "%s", r.Reason)
		a.Approve(id)
		a.release(id, 1+a.rng.IntN(4))
		delete(a.staged, table)
	}
}

func (a *agency) end() {
	a.Helper()
	a.walked()
	for _, table := range a.tables {
		a.released(table)
	}
	a.drain()
	for range 10 {
		a.apply() // for what was held
	}
}
