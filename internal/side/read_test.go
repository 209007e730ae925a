package side_test

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// read reads the outbox, and the rows of all its keys.
func read(t *testing.T, db *side.DB, tables ...string) (seqs []int64, bytesRead int, unread map[string]string, err error) {
	_, err = db.ReadOutbox(t.Context(), tables, 1000, func(o *side.Outbox) error {
		seqs, unread = o.Seqs, o.Unread
		for _, table := range o.Tables {
			var rows bytes.Buffer
			if err := o.CopyEntries(t.Context(), table, 1, 1, 1, side.Rules{Create: true, Update: true, Delete: true}, &rows); err != nil {
				return err
			}
			bytesRead += bytes.Count(rows.Bytes(), []byte("payload"))
		}
		return nil
	})
	return seqs, bytesRead, unread, err
}

// A snapshot older than a rewriting ALTER TABLE or a TRUNCATE reads no rows: it is
// taken only once the table is locked.
func TestGuarantee2_TheTableIsLockedBeforeTheSnapshot(t *testing.T) {
	for _, what := range []string{"push", "page"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY, v int, w text)`, "public.t")
			testkit.Exec(t, p.S, `INSERT INTO t SELECT g, g, 'payload' FROM generate_series(1, 10) g`)
			before, err := p.From.Describe(t.Context(), "public.t")
			require.NoError(t, err)
			ddl := testkit.Session(t, p.SourceDSN)
			testkit.Exec(t, ddl, `BEGIN; ALTER TABLE t ALTER v TYPE bigint`) // rewrites the table
			type answer struct {
				rows int
				err  error
			}
			done := make(chan answer, 1)
			go func() {
				var a answer
				if what == "push" {
					_, a.rows, _, a.err = read(t, p.From, "public.t")
				} else {
					var rows bytes.Buffer
					// The shape is another: what counts is that it is seen, not an empty page.
					_, a.err = p.From.CopyPage(t.Context(), side.Page{Table: "public.t", Layout: before.Layout, Shape: before.Shape, UpTo: backfill.Key{"10"}, Limit: 100}, &rows)
					a.rows = bytes.Count(rows.Bytes(), []byte("payload"))
				}
				done <- a
			}()
			testkit.Eventually(t, "the read waits for the table", func() bool { return testkit.LockWaiters(t, p.S) == 1 })
			testkit.Exec(t, ddl, `COMMIT`)
			a := <-done
			if what == "push" {
				require.NoError(t, a.err)
				require.Equal(t, 10, a.rows)
			} else {
				require.ErrorIs(t, a.err, side.ErrLayout)
			}
		})
	}
}

// Of a page that waited for a TRUNCATE and what was inserted in its transaction, the
// rows are those of after.
func TestGuarantee2_APageAfterATruncateItWaitedFor(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY, w text)`, "public.t")
	testkit.Exec(t, p.S, `INSERT INTO t SELECT g, 'before' FROM generate_series(1, 10) g`)
	d, err := p.From.Describe(t.Context(), "public.t")
	require.NoError(t, err)
	other := testkit.Session(t, p.SourceDSN)
	testkit.Exec(t, other, `BEGIN; TRUNCATE t; INSERT INTO t VALUES (3, 'payload')`)
	done := make(chan error, 1)
	var rows bytes.Buffer
	go func() {
		_, err := p.From.CopyPage(t.Context(), side.Page{Table: "public.t", Layout: d.Layout, Shape: d.Shape, UpTo: backfill.Key{"10"}, Limit: 100}, &rows)
		done <- err
	}()
	testkit.Eventually(t, "the page waits for the table", func() bool { return testkit.LockWaiters(t, p.S) == 1 })
	testkit.Exec(t, other, `COMMIT`)
	require.NoError(t, <-done)
	require.Equal(t, 1, bytes.Count(rows.Bytes(), []byte("payload")))
	require.NotContains(t, rows.String(), "before")
}

// A reading transaction owns no transaction id: a snapshot hides its own.
func TestReadsOwnNoTransactionID(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY)`, "public.t")
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (1)`)
	_, err := p.From.ReadOutbox(t.Context(), []string{"public.t"}, 10, func(o *side.Outbox) error {
		require.NoError(t, o.CopyEntries(t.Context(), o.Tables[0], 1, 1, 1, side.Rules{Create: true, Update: true, Delete: true}, io.Discard))
		require.Zero(t, testkit.Value[int](t, p.S, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'backfill-agent' AND datname = current_database() AND backend_xid IS NOT NULL`))
		require.Equal(t, 1, testkit.Value[int](t, p.S, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'backfill-agent' AND datname = current_database() AND xact_start IS NOT NULL AND state = 'idle in transaction'`))
		return nil
	})
	require.NoError(t, err)
}

// A push reads all of its tables' records up to a number, or all there are.
func TestAPushReadsAPrefix(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)`, "public.a", "public.b")
	// Numbers 1 and 2 become visible after 3 and 4.
	late := testkit.Session(t, p.SourceDSN)
	testkit.Exec(t, late, `BEGIN; INSERT INTO a VALUES (1); INSERT INTO a VALUES (2)`)
	testkit.Exec(t, p.S, `INSERT INTO a VALUES (3); INSERT INTO b VALUES (4)`)
	tables := []string{"public.a", "public.b"}
	seqs, _, unread, err := read(t, p.From, tables...)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 4}, seqs)
	require.Empty(t, unread)
	testkit.Exec(t, late, `COMMIT`)
	require.NoError(t, p.From.DeletePushed(t.Context(), seqs, 1, "n", nil))
	require.Equal(t, []string{"1", "2"}, testkit.Strings(t, p.S, `SELECT seq::text FROM backfill_maple_school.outbox ORDER BY seq`), "what was not read stays")

	testkit.Exec(t, p.S, `INSERT INTO b VALUES (5)`)
	_, err = p.From.ReadOutbox(t.Context(), tables, 2, func(o *side.Outbox) error {
		require.Equal(t, []int64{1, 2}, o.Seqs)
		require.Len(t, o.Unread, 2)
		return nil
	})
	require.NoError(t, err)
	pending, err := p.From.Pending(t.Context(), 10, nil)
	require.NoError(t, err)
	require.Equal(t, side.Pending{Tables: []string{"public.a", "public.b"}, Last: 5, All: true}, pending)
	pending, err = p.From.Pending(t.Context(), 2, []string{"public.b"})
	require.NoError(t, err)
	require.Equal(t, side.Pending{Tables: []string{"public.a"}, Last: 2, All: false}, pending)
}

// asRole opens the source as a role of its own that has just the rights that setup
// has given it.
func asRole(t *testing.T, p *testkit.Pair) (db *side.DB, role string) {
	t.Helper()
	role = "agent_" + p.S.Config().Database
	testkit.Exec(t, p.S, `CREATE ROLE `+role+` LOGIN PASSWORD 'agent'`)
	t.Cleanup(func() { testkit.DropRole(t, p.SourceDSN, role) })
	steps, err := p.From.SetupSteps(t.Context(), p.List(), side.Roles{Agent: role})
	require.NoError(t, err)
	require.NoError(t, p.From.Setup(t.Context(), steps))
	return testkit.OpenSide(t, testkit.Source, testkit.As(t, p.SourceDSN, role, "agent")), role
}

// Rows that row security would hide are an error, never deletes.
func TestGuarantee2_HiddenRowsAreNotTakenForDeletes(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY, v text)`, "public.t")
	db, role := asRole(t, p)
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (1, 'payload')`)
	seqs, rows, unread, err := read(t, db, "public.t")
	require.NoError(t, err)
	require.Len(t, seqs, 1)
	require.Equal(t, 1, rows)
	require.Empty(t, unread)

	testkit.Exec(t, p.S, `ALTER TABLE t ENABLE ROW LEVEL SECURITY`)
	seqs, _, unread, err = read(t, db, "public.t")
	require.NoError(t, err)
	require.Empty(t, seqs)
	require.Contains(t, unread["public.t"], "row security")
	_, _, _, _, err = db.Frozen(t.Context(), "public.t")
	require.ErrorContains(t, err, "row security")

	// Enabled between the description and the read, it is PostgreSQL that refuses.
	testkit.Exec(t, p.S, `ALTER TABLE t DISABLE ROW LEVEL SECURITY`)
	_, err = db.ReadOutbox(t.Context(), []string{"public.t"}, 10, func(o *side.Outbox) error {
		o.Tables[0].SQL = "public.hidden"
		return o.CopyEntries(t.Context(), o.Tables[0], 1, 1, 1, side.Rules{Create: true, Update: true, Delete: true}, io.Discard)
	})
	require.Error(t, err)
	testkit.Exec(t, p.S, `CREATE TABLE hidden (id int PRIMARY KEY, v text); ALTER TABLE hidden ENABLE ROW LEVEL SECURITY; GRANT SELECT ON hidden TO `+role)
	_, err = db.ReadOutbox(t.Context(), []string{"public.t"}, 10, func(o *side.Outbox) error {
		o.Tables[0].SQL = "public.hidden"
		return o.CopyEntries(t.Context(), o.Tables[0], 1, 1, 1, side.Rules{Create: true, Update: true, Delete: true}, io.Discard)
	})
	require.Equal(t, "42501", side.SQLState(err), "%v", err)
}

// A missing right is told for what it is, and keeps the changes.
func TestATableTheAgentMayNotRead(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY, v text)`, "public.t")
	db, role := asRole(t, p)
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (1, 'payload'); REVOKE SELECT ON t FROM `+role)
	seqs, _, unread, err := read(t, db, "public.t", "public.missing")
	require.NoError(t, err)
	require.Empty(t, seqs)
	require.Contains(t, unread["public.t"], "permission denied")
	require.Contains(t, unread["public.missing"], "does not exist")
}

func TestTablesThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `
		CREATE TABLE nokey (id int); CREATE TABLE nullable (id int UNIQUE); CREATE TABLE partial (id int NOT NULL); CREATE UNIQUE INDEX ON partial (id) WHERE id > 0;
		CREATE TABLE expression (id int NOT NULL); CREATE UNIQUE INDEX ON expression ((id + 1)); CREATE TABLE late (id int PRIMARY KEY DEFERRABLE);
		CREATE TABLE reg (id regclass PRIMARY KEY); CREATE TABLE base (id int PRIMARY KEY); CREATE TABLE heir () INHERITS (base); CREATE VIEW v AS SELECT * FROM base;
		CREATE MATERIALIZED VIEW mv AS SELECT * FROM base; CREATE TABLE good (a int NOT NULL, b int NOT NULL, c int, UNIQUE (a, b), UNIQUE (c)); CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
		CREATE DOMAIN named AS regclass; CREATE TYPE about AS (what named, n int); CREATE TABLE regs (id about PRIMARY KEY); CREATE TABLE reg_list (id regtype[] PRIMARY KEY);
		CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false); CREATE TABLE cased (id text COLLATE ci NOT NULL); CREATE UNIQUE INDEX ON cased (id COLLATE "C");
		CREATE TABLE made (id int, twice int GENERATED ALWAYS AS (id * 2) STORED UNIQUE NOT NULL); CREATE SEQUENCE seq; CREATE TEMP TABLE short (id int PRIMARY KEY);
		CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw; CREATE FOREIGN TABLE far (id int) SERVER files OPTIONS (filename '/dev/null');
		CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (9) PARTITION BY RANGE (id);
		CREATE TABLE leaf PARTITION OF parted_1 FOR VALUES FROM (0) TO (5); CREATE TABLE halves (id int) PARTITION BY RANGE (id); CREATE FOREIGN TABLE half PARTITION OF halves FOR VALUES FROM (0) TO (9) SERVER files OPTIONS (filename '/dev/null');
		CREATE TABLE ruled (id int PRIMARY KEY); CREATE RULE nothing AS ON INSERT TO ruled DO INSTEAD NOTHING`)
	for table, want := range map[string]string{
		"public.nokey": "no usable key: add a primary key", "public.nullable": "no usable key (public.nullable_id_key has column id, which may be NULL)", "public.partial": "public.partial_id_idx is partial",
		"public.expression": "public.expression_expr_idx is over an expression", "public.late": "public.late_pkey is deferrable", "public.reg": "reg* type", "public.regs": "reg* type", "public.reg_list": "reg* type",
		"public.cased": "under a collation that holds other values for equal", "public.made": "has column twice, which is generated", "public.base": "inheritance", "public.heir": "inheritance",
		"public.v": "is a view, no ordinary", "public.mv": "is a materialized view, no ordinary", "public.far": "is a foreign table, no ordinary", "public.seq": "is a sequence", "public.missing": "no table", "public.halves": "partition that is a foreign table",
		"pg_catalog.pg_class": "PostgreSQL's own", "information_schema.sql_features": "PostgreSQL's own", "backfill_maple_school.outbox": "Backfill's own", "public.good": "", "public.unlogged": "", "public.parted": "",
		testkit.Value[string](t, p.S, `SELECT pg_my_temp_schema()::regnamespace::text`) + ".short": "temporary",
	} {
		d, err := p.From.Describe(t.Context(), table)
		require.NoError(t, err)
		if want == "" {
			require.Empty(t, d.Problem)
			continue
		}
		require.Contains(t, d.Problem, want, table)
	}
	d, err := p.From.Describe(t.Context(), "public.good")
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, d.Layout.Key)

	// Some depend on what is asked of them, and on the tables beside them.
	at := func(id int32, name, from string) backfill.Table {
		return backfill.Table{ID: id, Name: "public." + name, CapturedFrom: []string{from}}
	}
	for _, c := range []struct {
		table  backfill.Table
		beside []backfill.Table
		want   string
	}{
		{at(1, "ruled", testkit.Source), nil, ""},
		{at(1, "ruled", testkit.Receiver), nil, "rules for INSERT or UPDATE"},
		{at(1, "leaf", testkit.Source), nil, "public.leaf is a partition of public.parted, and what is written through that is not captured here: configure public.parted"},
		{at(1, "leaf", testkit.Receiver), nil, ""},
		{at(2, "leaf", testkit.Source), []backfill.Table{at(1, "parted", testkit.Source)}, "public.leaf is a partition of public.parted, which is configured"},
		{at(2, "leaf", testkit.Receiver), []backfill.Table{at(1, "parted_1", testkit.Receiver)}, "public.leaf is a partition of public.parted_1, which is configured"},
		{at(2, "parted", testkit.Receiver), []backfill.Table{at(1, "leaf", testkit.Receiver)}, "public.leaf, a partition of public.parted, is configured: remove it first"},
		{at(1, "parted", testkit.Source), []backfill.Table{at(2, "leaf", testkit.Source)}, ""}, // the one that came later is in the way
	} {
		d, err := p.From.Describe(t.Context(), c.table.Name)
		require.NoError(t, err)
		problem := d.Unfit(c.table, testkit.Source, append(c.beside, c.table))
		if c.want == "" {
			require.Empty(t, problem)
		} else {
			require.Contains(t, problem, c.want)
		}
	}
}

// On another cluster or timeline than the one it was met on, or on one that was set
// back since, nothing is read, not even to be thrown away.
func TestReadsStopOnAnotherCluster(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY)`, "public.t")
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (1)`)
	now, err := p.From.Standing(t.Context())
	require.NoError(t, err)
	id := now.Identity
	p.From.Meet(id, now.Reads)
	table, upper, _, _, err := p.From.Frozen(t.Context(), "public.t")
	require.NoError(t, err)
	var page bytes.Buffer
	pushes := 0
	reads := map[string]func() error{
		"a push": func() error {
			_, err := p.From.ReadOutbox(t.Context(), []string{"public.t"}, 10, func(*side.Outbox) error { pushes++; return nil })
			return err
		},
		"a page": func() error {
			_, err := p.From.CopyPage(t.Context(), side.Page{RequestID: 1, Table: "public.t", Layout: table.Layout, Shape: table.Shape, UpTo: upper, Limit: 10}, &page)
			return err
		},
		"a walk's bounds": func() error { _, _, _, _, err := p.From.Frozen(t.Context(), "public.t"); return err },
		"a repair":        func() error { _, err := p.From.Touch(t.Context(), "public.t", []backfill.Key{{"1"}}); return err },
		"a snapshot":      func() error { _, err := p.From.Snapshot(t.Context()); return err },
	}
	for name, read := range reads {
		require.NoError(t, read(), name)
	}
	require.NotZero(t, page.Len())
	require.NotZero(t, pushes)
	page.Reset()
	pushes = 0
	for why, meet := range map[string]func(){
		"another cluster":        func() { p.From.Meet(side.Identity{System: "1", Timeline: id.Timeline}, 0) },
		"another timeline":       func() { p.From.Meet(side.Identity{System: id.System, Timeline: "00000009"}, 0) },
		"an earlier state of it": func() { p.From.Meet(id, 1_000_000) },
	} {
		meet()
		for name, read := range reads {
			require.Equal(t, backfill.Refused, backfill.CodeOf(read()), "%s on %s", name, why)
		}
	}
	require.Zero(t, page.Len())
	require.Zero(t, pushes)
}

func TestASideThatIsNotSetUpSaysHowTo(t *testing.T) {
	t.Parallel()
	db := testkit.OpenSide(t, testkit.Source, testkit.Database(t))
	_, err := db.Pending(t.Context(), 10, nil)
	require.ErrorContains(t, err, "backfill setup")
	_, err = db.SetAside(t.Context())
	require.ErrorContains(t, err, "backfill setup")
	_, err = db.Standing(t.Context())
	require.ErrorContains(t, err, "backfill setup")
	_, err = side.Open(t.Context(), "maple", "school", "postgres://u:secret@127.0.0.1:1/x")
	require.Error(t, err)
	require.False(t, strings.Contains(err.Error(), "secret"))
}

func TestAServerThatIsTooOldIsNamed(t *testing.T) {
	dsn := testkit.Database(t)
	side.RaiseOldest(t)
	_, err := side.Open(t.Context(), "maple", "school", dsn)
	require.ErrorContains(t, err, "database of maple/school: the server is of version ")
	require.ErrorContains(t, err, "at least 99 is needed: use a newer server")
}
