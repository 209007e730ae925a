package side_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// outbox lists what was captured, oldest first, and forgets it.
func outbox(t *testing.T, s *pgx.Conn) []string {
	t.Helper()
	return testkit.Strings(t, s, `
		WITH gone AS (DELETE FROM backfill_maple_school.outbox RETURNING *)
		SELECT op::text || CASE WHEN op <> 'g' AND key IS NOT NULL THEN ' ' || (SELECT coalesce(string_agg(x, ',' ORDER BY i), '') FROM unnest(key) WITH ORDINALITY u (x, i) WHERE (i - 1) / (cardinality(key) / n) = k) ELSE '' END
		  FROM gone, generate_series(0, n - 1) k ORDER BY seq, k`)
}

func TestCaptureRecordsEveryKeyTouched(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `
		CREATE TABLE t (id int PRIMARY KEY, v int, parent int REFERENCES t ON DELETE CASCADE ON UPDATE CASCADE);
		CREATE TABLE other (id int PRIMARY KEY)`, "public.t", "public.other")
	for _, c := range []struct {
		sql  string
		want []string
	}{
		{`INSERT INTO t VALUES (1, 1), (2, 2)`, []string{"c 1", "c 2"}},
		{`UPDATE t SET v = 0 WHERE id = 1`, []string{"u 1"}},
		{`UPDATE t SET id = 3 WHERE id = 1`, []string{"u 1", "u 3"}},
		{`DELETE FROM t WHERE id = 3`, []string{"d 3"}},
		{`INSERT INTO t VALUES (2, 9), (4, 4) ON CONFLICT (id) DO UPDATE SET v = excluded.v`, []string{"c 4", "u 2"}},
		{`INSERT INTO t VALUES (2, 9) ON CONFLICT DO NOTHING`, nil},
		{`UPDATE t SET v = 0 WHERE false`, nil},
		{`WITH d AS (DELETE FROM t WHERE id = 4 RETURNING *) INSERT INTO t SELECT 5, v FROM d`, []string{"c 5", "d 4"}},
		{`MERGE INTO t USING (VALUES (2), (6), (5)) s (i) ON t.id = s.i WHEN MATCHED AND t.id = 5 THEN DELETE WHEN MATCHED THEN UPDATE SET v = 1 WHEN NOT MATCHED THEN INSERT VALUES (s.i, 0)`,
			[]string{"c 6", "d 5", "u 2"}},
		{`BEGIN; SAVEPOINT s; INSERT INTO t VALUES (7); ROLLBACK TO s; INSERT INTO t VALUES (8); COMMIT`, []string{"c 8"}},
		{`BEGIN; INSERT INTO t VALUES (9); ROLLBACK`, nil},
		{`INSERT INTO t VALUES (10, 0, 8), (11, 0, 10)`, []string{"c 10", "c 11"}},
		{`UPDATE t SET id = 80 WHERE id = 8`, []string{"u 10", "u 8", "u 80"}},
		{`DELETE FROM t WHERE id = 80`, []string{"d 10", "d 11", "d 80"}},
		{`SET session_replication_role = replica; INSERT INTO t VALUES (20); RESET session_replication_role`, []string{"c 20"}},
		{`TRUNCATE t`, []string{"t"}},
		{`COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'`, nil},
	} {
		testkit.Exec(t, p.S, c.sql)
		require.ElementsMatch(t, c.want, outbox(t, p.S), c.sql)
	}
	_, err := p.S.CopyFrom(t.Context(), pgx.Identifier{"t"}, []string{"id"}, pgx.CopyFromRows([][]any{{1}, {2}}))
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"c 1", "c 2"}, outbox(t, p.S))

	testkit.Exec(t, p.S, `BEGIN; INSERT INTO t VALUES (30); PREPARE TRANSACTION 'captured'`)
	require.Empty(t, outbox(t, p.S))
	testkit.Exec(t, p.S, `COMMIT PREPARED 'captured'`)
	require.Equal(t, []string{"c 30"}, outbox(t, p.S))
}

// Triggers of the application that write the same rows, before and after.
func TestCaptureBesideTheApplicationsTriggers(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `
		CREATE TABLE t (id int PRIMARY KEY, v int, u int);
		CREATE FUNCTION app() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF pg_trigger_depth() = 1 THEN UPDATE t SET id = id + 100 WHERE id = new.id; INSERT INTO t VALUES (new.id + 1000, 0, new.id + 1000); END IF; RETURN NULL; END $$;
		CREATE TRIGGER app AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION app();
		CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.v < 100 THEN UPDATE t SET v = v + 100 WHERE u = new.u; END IF; RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (new.v > 0) EXECUTE FUNCTION late()`, "public.t")
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (1, 0, 1)`)
	require.Subset(t, outbox(t, p.S), []string{"c 1", "u 1", "u 101", "c 1001"})
	testkit.Exec(t, p.S, `BEGIN; UPDATE t SET v = 1 WHERE id = 101; UPDATE t SET id = 7 WHERE id = 101; COMMIT`)
	require.Subset(t, outbox(t, p.S), []string{"u 101", "u 7"})
}

// A key is written as text under pinned settings, whatever the session has.
func TestGuarantee9_KeysAreSpelledTheSameUnderAnySettings(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (a timestamptz, b float8, c interval, d bytea, e money, PRIMARY KEY (a, b, c, d, e))`, "public.t")
	const row = `('2021-03-28 02:30:00.5+02', 0.1::float8 + 0.2, '1 day 02:03', '\x00ff', 1234.5)`
	testkit.Exec(t, p.S, `INSERT INTO t VALUES `+row)
	want := outbox(t, p.S)
	require.Equal(t, []string{`c 2021-03-28 00:30:00.5+00,0.30000000000000004,1 day 02:03:00,\x00ff,$1,234.50`}, want)
	for _, set := range []string{
		`timezone = 'America/New_York'`, `datestyle = 'German, DMY'`, `intervalstyle = 'iso_8601'`, `extra_float_digits = -15`, `bytea_output = 'escape'`, `lc_monetary = 'C'`,
		`search_path = ''`, `search_path = 'backfill_maple_school'`, `standard_conforming_strings = off`, `default_transaction_isolation = 'serializable'`, `client_encoding = 'LATIN1'`,
		`quote_all_identifiers = on`, `array_nulls = off`, `check_function_bodies = off`, `plpgsql.variable_conflict = 'use_column'`, `default_transaction_deferrable = on`,
	} {
		testkit.Exec(t, p.S, `SET `+set)
		testkit.Exec(t, p.S, `DELETE FROM public.t`)
		testkit.Exec(t, p.S, `RESET ALL`)
		require.Equal(t, []string{strings.Replace(want[0], "c", "d", 1)}, outbox(t, p.S), set)
		testkit.Exec(t, p.S, `INSERT INTO t VALUES `+row)
		outbox(t, p.S)
	}
}

// Nothing the application writes, and nothing that is done to its table, makes its
// statement fail because of the capture.
func TestGuarantee9_TheApplicationsWritesNeverFail(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY, v text, j json, b bytea, n int)`, "public.t")
	for _, sql := range []string{
		`INSERT INTO t (id, j) VALUES (1, '"\u0000"')`,
		`INSERT INTO t (id, b) SELECT 2, convert_to(repeat('x', 20000000), 'UTF8')`,
		`ALTER TABLE t DROP COLUMN v; UPDATE t SET n = 1`,
		`ALTER TABLE t ADD COLUMN w text DEFAULT 'w'; UPDATE t SET w = 'x' WHERE id = 1`,
		`ALTER TABLE t ALTER n TYPE text USING n::text; UPDATE t SET n = 'one'`,
		`ALTER TABLE t RENAME n TO m; UPDATE t SET m = 'two'`,
		`ALTER TABLE t ALTER id TYPE bigint; INSERT INTO t (id) VALUES (10000000000)`,
		`ALTER TABLE t RENAME TO t2; INSERT INTO t2 (id) VALUES (5); ALTER TABLE t2 RENAME TO t`,
		`ALTER TABLE t DROP CONSTRAINT t_pkey; INSERT INTO t (id) VALUES (6)`,
		`ALTER TABLE t ALTER id DROP NOT NULL; INSERT INTO t (id) VALUES (NULL)`,
		`CREATE SCHEMA s; ALTER TABLE t SET SCHEMA s; INSERT INTO s.t (id) VALUES (7); ALTER TABLE s.t SET SCHEMA public`,
	} {
		testkit.Exec(t, p.S, sql)
		require.NotEmpty(t, outbox(t, p.S), sql)
	}
	// When the key's column is gone, that keys could not be recorded is recorded.
	for _, sql := range []string{
		`ALTER TABLE t RENAME id TO number; INSERT INTO t (number) VALUES (8)`,
		`UPDATE t SET m = 'three' WHERE number = 8`,
		`DELETE FROM t WHERE number = 8`,
		`ALTER TABLE t DROP COLUMN number; INSERT INTO t (m) VALUES ('four')`,
	} {
		testkit.Exec(t, p.S, sql)
		require.Equal(t, []string{"g"}, outbox(t, p.S), sql)
	}
	testkit.Exec(t, p.S, `TRUNCATE t`)
	require.Equal(t, []string{"t"}, outbox(t, p.S))
}

// An application's role needs no rights on what is ours, and cannot lead the
// capture function astray.
func TestGuarantee9_AnApplicationWithNoRightsOnOurs(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY)`, "public.t")
	role := "app_" + p.S.Config().Database
	testkit.Exec(t, p.S, `CREATE ROLE `+role+` LOGIN PASSWORD 'app'; GRANT ALL ON t TO `+role+`; GRANT CREATE ON SCHEMA public TO `+role)
	t.Cleanup(func() { testkit.DropRole(t, p.SourceDSN, role) })
	app := testkit.Session(t, testkit.As(t, p.SourceDSN, role, "app"))
	testkit.Exec(t, app, `
		CREATE TEMP TABLE outbox (seq int, tbl text, op text, key text);
		CREATE TEMP TABLE pg_attribute (attrelid oid, attname name);
		CREATE FUNCTION public.count() RETURNS int LANGUAGE sql AS 'SELECT 1';
		SET search_path = pg_temp, public;
		SET ROLE NONE`)
	testkit.Exec(t, app, `SET search_path = pg_temp, public; INSERT INTO public.t VALUES (1)`)
	require.Equal(t, []string{"c 1"}, outbox(t, p.S))
	_, err := app.Exec(t.Context(), `SELECT * FROM backfill_maple_school.outbox`)
	require.Equal(t, "42501", side.SQLState(err))
	_, err = app.Exec(t.Context(), `SET backfill.applying = 'maple'; SET SESSION AUTHORIZATION postgres`)
	require.Error(t, err)
	testkit.Exec(t, app, `INSERT INTO public.t VALUES (2)`)
	require.Equal(t, []string{"c 2"}, outbox(t, p.S))
}

// Setting up again repairs what is broken and changes nothing else.
func TestSetupRepairsAndIsIdempotent(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)`, "public.t")
	capture := func() string {
		c, err := p.From.Count(t.Context(), side.Relation{Name: "public.t"}, true, time.Second)
		require.NoError(t, err)
		return c.Capture
	}
	require.Empty(t, capture())
	shape := func() []string {
		return testkit.Strings(t, p.S, `
			SELECT format('%s %s %s', tgrelid::regclass, tgname, tgenabled) FROM pg_trigger WHERE NOT tgisinternal
			UNION ALL SELECT format('%s %s', proname, md5(prosrc)) FROM pg_proc WHERE pronamespace = 'backfill_maple_school'::regnamespace
			UNION ALL SELECT format('%s %s', relname, relkind) FROM pg_class WHERE relnamespace = 'backfill_maple_school'::regnamespace
			UNION ALL SELECT batch || nonce FROM backfill_maple_school.pushed ORDER BY 1`)
	}
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (1)`)
	before := shape()
	p.Setup()
	require.Equal(t, before, shape())
	require.Equal(t, []string{"c 1"}, outbox(t, p.S), "captured keys stay")

	triggers := testkit.Strings(t, p.S, `SELECT tgname FROM pg_trigger WHERE tgrelid = 't'::regclass AND NOT tgisinternal ORDER BY 1`)
	require.Len(t, triggers, 4) // delete, insert, truncate, update
	function := "backfill_maple_school." + testkit.Value[string](t, p.S, `SELECT proname::text FROM pg_proc WHERE pronamespace = 'backfill_maple_school'::regnamespace`)
	testkit.Exec(t, p.S, `CREATE ROLE nobody_`+p.S.Config().Database)
	t.Cleanup(func() { testkit.DropRole(t, p.SourceDSN, "nobody_"+p.S.Config().Database) })
	for _, c := range []struct{ sql, problem string }{
		{`ALTER TABLE t DISABLE TRIGGER ALL`, "disabled"},
		{`ALTER TABLE t1 ENABLE TRIGGER ` + triggers[1], "was disabled"},
		{`DROP TRIGGER ` + triggers[0] + ` ON t`, "is missing on"},
		{`CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (100) TO (200)`, "t2"},
		{`CREATE FUNCTION mine() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE OR REPLACE TRIGGER ` + triggers[2] + ` AFTER TRUNCATE ON t EXECUTE FUNCTION mine(); ALTER TABLE t ENABLE ALWAYS TRIGGER ` + triggers[2], "another function"},
		{`ALTER TABLE t ENABLE REPLICA TRIGGER ` + triggers[0], "was disabled"},
		{`ALTER TABLE t ENABLE TRIGGER ` + triggers[3], "was disabled"},
		{`CREATE OR REPLACE TRIGGER ` + triggers[3] + ` AFTER UPDATE ON t REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT WHEN (false) EXECUTE FUNCTION ` + function + `('root');
			ALTER TABLE t ENABLE ALWAYS TRIGGER ` + triggers[3], "not as setup made it"},
		{`CREATE OR REPLACE TRIGGER ` + triggers[2] + ` AFTER TRUNCATE ON t FOR EACH STATEMENT EXECUTE FUNCTION ` + function + `('partition'); ALTER TABLE t ENABLE ALWAYS TRIGGER ` + triggers[2], "not as setup made it"},
		{`CREATE OR REPLACE FUNCTION ` + function + `() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS 'BEGIN RETURN NULL; END'`, "made for another key"},
		{`DO $$ BEGIN EXECUTE replace((SELECT pg_get_functiondef('` + function + `'::regproc)), 'TG_OP = ''DELETE''', 'false'); END $$`, "not as setup made it"},
		{`ALTER FUNCTION ` + function + `() SECURITY INVOKER`, "not as setup made it"},
		{`ALTER FUNCTION ` + function + `() SET datestyle = 'German'`, "not as setup made it"},
		{`ALTER FUNCTION ` + function + `() OWNER TO nobody_` + p.S.Config().Database, "may not write the outbox"},
	} {
		testkit.Exec(t, p.S, c.sql)
		require.Contains(t, capture(), c.problem, c.sql)
		p.Setup()
		require.Empty(t, capture(), c.sql)
		// What was written meanwhile is not known: the next push is told so.
		require.Contains(t, outbox(t, p.S), "g", c.sql)
		testkit.Exec(t, p.S, `INSERT INTO t VALUES (1) ON CONFLICT DO NOTHING; UPDATE t SET id = id; DELETE FROM t`)
		require.Contains(t, outbox(t, p.S), "d 1", c.sql)
	}

	// A table that is captured no longer loses its triggers.
	steps, err := p.From.SetupSteps(t.Context(), nil, side.Roles{})
	require.NoError(t, err)
	require.NoError(t, p.From.Setup(t.Context(), steps))
	require.Zero(t, testkit.Value[int](t, p.S, `SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal`))
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (2)`)
	require.Empty(t, outbox(t, p.S))
}

// Setup waits for writers a short while at a time, so that nobody queues behind it,
// and comes back; every write is captured or visible to what starts after it.
func TestGuarantee9_SetupDoesNotQueueWriters(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY)`)
	p.Tables["public.t"] = backfill.Table{Name: "public.t", CapturedFrom: []string{testkit.Source}}
	writer := testkit.Session(t, p.SourceDSN)
	testkit.Exec(t, writer, `BEGIN; INSERT INTO t VALUES (1)`)
	steps, err := p.From.SetupSteps(t.Context(), []backfill.Table{p.Tables["public.t"]}, side.Roles{})
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- p.From.Setup(t.Context(), steps) }()
	testkit.Eventually(t, "setup waits for the writer", func() bool { return testkit.LockWaiters(t, p.S) == 1 })
	// Another writer comes behind it, and gets through before the first one ends.
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (2)`)
	testkit.Exec(t, writer, `COMMIT`)
	require.NoError(t, <-done)
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (3)`)
	require.Equal(t, []string{"c 3"}, outbox(t, p.S))
}

// Two tables whose names are as long as names can be, and begin alike, and names
// that need quoting, are captured each under its own name.
func TestNamesThatAreLongOrOdd(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 62)
	names := []string{"public." + long + "1", "public." + long + "2", `public."Order Items"`, `"odd ""schema"".x"."select"`, `public."a.b"`}
	schema := `CREATE SCHEMA "odd ""schema"".x";`
	for _, n := range names {
		schema += fmt.Sprintf(`CREATE TABLE %s ("Id ""1""" int PRIMARY KEY);`, n)
	}
	p := testkit.NewPair(t, schema, names...)
	for i, n := range names {
		testkit.Exec(t, p.S, fmt.Sprintf(`INSERT INTO %s VALUES (%d)`, n, i))
	}
	got := testkit.Strings(t, p.S, `SELECT tbl || ' ' || key[1] FROM backfill_maple_school.outbox ORDER BY seq`)
	require.Len(t, got, len(names))
	for i, n := range names {
		require.Equal(t, fmt.Sprint(n, " ", i), got[i])
	}
	// Sites and sides with long names keep to themselves, too.
	a, b := side.SchemaName(strings.Repeat("s", 40), "school"), side.SchemaName(strings.Repeat("s", 40), "schoolyard-and-more-of-it")
	require.NotEqual(t, a, b)
	require.LessOrEqual(t, len(b), 63)
}

// Many keys of one statement share records, whatever their number.
func TestKeysOfOneStatementShareRecords(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (a text, b int, PRIMARY KEY (a, b))`, "public.t")
	for _, n := range []int{1, 149, 150, 151, 1000} {
		testkit.Exec(t, p.S, `INSERT INTO t SELECT 'k', g FROM generate_series(1, $1::int) g`, n)
		require.Equal(t, (n+149)/150, testkit.Value[int](t, p.S, `SELECT count(*) FROM backfill_maple_school.outbox`))
		require.Equal(t, n, testkit.Value[int](t, p.S, `SELECT sum(n) FROM backfill_maple_school.outbox`))
		var want []string
		for i := range n {
			want = append(want, fmt.Sprintf("c k,%d", i+1))
		}
		require.ElementsMatch(t, want, outbox(t, p.S))
		testkit.Exec(t, p.S, `DELETE FROM t`)
		require.Len(t, outbox(t, p.S), n)
	}
}
