package side_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
	"backfill/internal/local"
	"backfill/internal/row"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// hostile is a pair whose table, and the schema it is in, belong to a role that is up
// to no good, with a session of that role.
func hostile(t *testing.T, schema string, tables ...string) (p *testkit.Pair, them *pgx.Conn) {
	t.Helper()
	t.Parallel()
	p = testkit.NewPair(t, schema)
	role := "hostile_" + p.S.Config().Database
	testkit.Exec(t, p.S, `CREATE ROLE `+role+` LOGIN PASSWORD 'hostile'`)
	t.Cleanup(func() { testkit.DropRole(t, p.SourceDSN, role) })
	testkit.Exec(t, p.S, `ALTER SCHEMA public OWNER TO `+role)
	for _, sql := range testkit.Strings(t, p.S, `
		SELECT format('ALTER TABLE %s OWNER TO `+role+`', oid::regclass) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
		UNION ALL SELECT format('ALTER TYPE %s OWNER TO `+role+`', oid::regtype) FROM pg_type WHERE typnamespace = 'public'::regnamespace AND typtype IN ('e', 'd')`) {
		testkit.Exec(t, p.S, sql)
	}
	for _, name := range tables {
		order := 10
		p.Configure(name, control.TableChange{CapturedFrom: []string{testkit.Source}, ApplyOrder: &order})
	}
	p.Setup()
	return p, testkit.Session(t, testkit.As(t, p.SourceDSN, role, "hostile"))
}

// capture is what is wrong with the capture of a table, "" when nothing is.
func capture(t *testing.T, p *testkit.Pair, table string) string {
	t.Helper()
	c, err := p.From.Count(t.Context(), side.Relation{Name: table}, true, time.Second)
	require.NoError(t, err)
	return c.Capture
}

func refused(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql)
	require.Contains(t, []string{"42501", "42P01"}, side.SQLState(err), "%s: %v", sql, err)
	_, err = conn.Exec(t.Context(), `ROLLBACK`)
	require.NoError(t, err)
}

// spy makes a function that writes down as whom it is called, and lets nobody notice.
const spy = `
	CREATE TABLE IF NOT EXISTS public.seen (as_whom text); GRANT ALL ON public.seen TO PUBLIC;
	CREATE OR REPLACE FUNCTION public.spy() RETURNS text LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.seen VALUES (current_user); RETURN 'spied'; END $$;`

// The owner of a table and its schema gets nothing called as anybody else by what
// names its functions, operators, tables and types have.
func TestGuarantee12_ATableOwnerCannotLeadTheCaptureAstray(t *testing.T) {
	p, them := hostile(t, `CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE moods (m mood PRIMARY KEY)`, "public.t", "public.moods")
	testkit.Exec(t, them, spy+`
		CREATE FUNCTION public.concat(int) RETURNS text LANGUAGE sql AS 'SELECT public.spy()';
		CREATE FUNCTION public.current_setting(text, bool) RETURNS text LANGUAGE sql AS $$ SELECT public.spy() $$;
		CREATE FUNCTION public.count() RETURNS bigint LANGUAGE sql AS $$ SELECT length(public.spy())::bigint $$;
		CREATE FUNCTION public.same(text, text) RETURNS bool LANGUAGE sql AS $$ SELECT public.spy() IS NULL $$;
		CREATE OPERATOR public.= (LEFTARG = text, RIGHTARG = text, FUNCTION = public.same);
		CREATE FUNCTION public.of(mood) RETURNS text LANGUAGE sql AS $$ SELECT public.spy() $$;
		CREATE CAST (mood AS text) WITH FUNCTION public.of(mood) AS IMPLICIT;
		CREATE TEMP TABLE outbox (tbl text, op text, key text[]); CREATE TEMP TABLE new_rows (id int); CREATE TEMP TABLE old_rows (id int); CREATE TEMP TABLE pg_attribute (attrelid oid);
		SET search_path = pg_temp, public, pg_catalog`)
	testkit.Exec(t, them, `INSERT INTO public.t VALUES (1, 'x'); UPDATE public.t SET id = 2; DELETE FROM public.t; INSERT INTO public.moods VALUES ('good')`)
	require.Equal(t, []string{"c 1", "u 2", "u 1", "d 2", "c good"}, outbox(t, p.S))
	require.Empty(t, testkit.Strings(t, p.S, `SELECT as_whom FROM public.seen`))
	testkit.Exec(t, them, `SET search_path = public; SELECT m::text FROM moods`)
	require.Len(t, testkit.Strings(t, p.S, `SELECT as_whom FROM public.seen`), 1, "the cast is a trap")

	// Nor when the key becomes one of theirs afterwards.
	testkit.Exec(t, them, `TRUNCATE seen; ALTER TABLE t ALTER id TYPE mood USING 'bad'; INSERT INTO t VALUES ('bad')`)
	require.Equal(t, []string{"c bad"}, outbox(t, p.S))
	require.Empty(t, testkit.Strings(t, p.S, `SELECT as_whom FROM public.seen`))
}

// A key of the type "char" is printed by other means, which another type's casts could get into.
func TestGuarantee12_AKeyOfBytesThatBecomesAnotherType(t *testing.T) {
	p, them := hostile(t, `CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE TABLE t (id "char" PRIMARY KEY)`, "public.t")
	testkit.Exec(t, them, spy+`
		INSERT INTO t VALUES ('a');
		CREATE FUNCTION public.of(mood) RETURNS "char" LANGUAGE sql AS $$ SELECT public.spy()::"char" $$;
		CREATE CAST (mood AS "char") WITH FUNCTION public.of(mood) AS IMPLICIT;
		CREATE FUNCTION public.number(mood) RETURNS int LANGUAGE sql AS $$ SELECT length(public.spy()) $$;
		CREATE CAST (mood AS int) WITH FUNCTION public.number(mood) AS IMPLICIT;
		ALTER TABLE t ALTER id TYPE mood USING 'bad'; INSERT INTO t VALUES ('good')`)
	require.Equal(t, []string{"c a", "g"}, outbox(t, p.S), "that keys could not be recorded is recorded")
	require.Empty(t, testkit.Strings(t, p.S, `SELECT as_whom FROM public.seen`))
}

// What is ours belongs to a role that nobody signs in as, and that may do nothing else;
// the owner of a captured table can neither read nor forge what is recorded.
func TestGuarantee12_TheOutboxIsNobodyElses(t *testing.T) {
	p, them := hostile(t, `CREATE TABLE t (id int PRIMARY KEY)`, "public.t")
	require.Equal(t, []string{"backfill_maple_school f f f f"}, testkit.Strings(t, p.S, `
		SELECT DISTINCT concat_ws(' ', rolname, rolsuper, rolcanlogin, rolcreaterole, rolbypassrls) FROM pg_roles WHERE oid IN (
			SELECT nspowner FROM pg_namespace WHERE nspname = 'backfill_maple_school' UNION SELECT relowner FROM pg_class WHERE relnamespace = 'backfill_maple_school'::regnamespace
			UNION SELECT proowner FROM pg_proc WHERE pronamespace = 'backfill_maple_school'::regnamespace)`))
	require.False(t, testkit.Value[bool](t, p.S, `SELECT has_table_privilege('backfill_maple_school', 'public.t', 'SELECT')`))
	function := "backfill_maple_school." + testkit.Value[string](t, p.S, `SELECT proname::text FROM pg_proc WHERE pronamespace = 'backfill_maple_school'::regnamespace`)
	for _, sql := range []string{
		`SELECT FROM backfill_maple_school.outbox`,
		`INSERT INTO backfill_maple_school.outbox (tbl, op) VALUES ('public.t', 't')`,
		`DELETE FROM backfill_maple_school.outbox`,
		`UPDATE backfill_maple_school.applied SET seq = 0`,
		`CREATE TRIGGER mine BEFORE INSERT ON backfill_maple_school.outbox EXECUTE FUNCTION ` + function + `()`,
		`CREATE TABLE mine (id int); CREATE TRIGGER forged AFTER INSERT ON mine REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION ` + function + `('root')`,
		`CREATE OR REPLACE FUNCTION ` + function + `() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`,
		`ALTER FUNCTION ` + function + `() RESET search_path`,
		`COMMENT ON FUNCTION ` + function + `() IS NULL`,
		`DROP SCHEMA backfill_maple_school CASCADE`,
		`CREATE FUNCTION backfill_maple_school.concat(int) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'`,
		`SET ROLE backfill_maple_school`,
		`SET SESSION AUTHORIZATION postgres`,
		`SET session_replication_role = replica`,
		`SELECT pg_replication_origin_create('mine')`,
	} {
		refused(t, them, sql)
	}
	testkit.Exec(t, them, `SET backfill.applying = 'maple'; INSERT INTO t VALUES (1)`)
	require.Equal(t, []string{"c 1"}, outbox(t, p.S))
}

// What the owner of a table writes past its triggers is not captured, but that they did
// is noticed, although all is as it was when somebody looks.
func TestGuarantee2_WritesPastTheTriggersAreNoticed(t *testing.T) {
	p, them := hostile(t, `CREATE TABLE t (id int) PARTITION BY RANGE (id); CREATE TABLE t1 PARTITION OF t (PRIMARY KEY (id)) FOR VALUES FROM (0) TO (100); ALTER TABLE t ADD PRIMARY KEY (id)`, "public.t")
	triggers := testkit.Strings(t, p.S, `SELECT tgname::text FROM pg_trigger WHERE tgrelid = 't1'::regclass AND NOT tgisinternal ORDER BY 1`)
	require.Len(t, triggers, 4)
	always := ""
	for _, name := range triggers {
		always += `ALTER TABLE t1 ENABLE ALWAYS TRIGGER ` + name + `;`
	}
	for _, c := range []struct {
		sql, says string
		asAdmin   bool
	}{
		{sql: `BEGIN; ALTER TABLE t1 DISABLE TRIGGER USER; INSERT INTO t1 VALUES (1); ` + always + ` COMMIT`, says: "was disabled, changed or made anew since setup"},
		{sql: `BEGIN; ALTER TABLE t1 DISABLE TRIGGER ` + triggers[1] + `; INSERT INTO t1 VALUES (2); ALTER TABLE t1 ENABLE ALWAYS TRIGGER ` + triggers[1] + `; COMMIT`, says: "was disabled, changed or made anew since setup"},
		{sql: `DO $$ DECLARE d text := pg_get_triggerdef((SELECT oid FROM pg_trigger WHERE tgrelid = 't1'::regclass AND tgname = '` + triggers[1] + `'));
			BEGIN DROP TRIGGER ` + triggers[1] + ` ON t1; INSERT INTO t1 VALUES (3); EXECUTE d; ALTER TABLE t1 ENABLE ALWAYS TRIGGER ` + triggers[1] + `; END $$`, says: "was disabled, changed or made anew since setup", asAdmin: true},
	} {
		require.Empty(t, capture(t, p, "public.t"))
		session := them
		if c.asAdmin { // the owner of the table may not make the trigger again
			session = p.S
		}
		testkit.Exec(t, session, c.sql)
		require.NotContains(t, strings.Join(outbox(t, p.S), " "), "c ", c.sql)
		require.Contains(t, capture(t, p, "public.t"), c.says, c.sql)
		p.Setup()
		require.Equal(t, []string{"g"}, outbox(t, p.S), c.sql)
	}
	// A table is vacuumed, rebuilt and loses a partition without that.
	testkit.Exec(t, p.S, `VACUUM FULL pg_trigger`)
	testkit.Exec(t, p.S, `VACUUM FREEZE pg_trigger`)
	testkit.Exec(t, p.S, `CLUSTER t1 USING t1_pkey`)
	require.Empty(t, capture(t, p, "public.t"))
}

// A subscription's worker fires no statement trigger, so what it writes is not captured:
// that is said. (It writes in replica role, and ENABLE ALWAYS is of no help.)
func TestGuarantee2_ASubscriptionIsNoticed(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "backfill-test-")
	require.NoError(t, err)
	pg, err := local.StartPostgres(t.Context(), local.PostgresOptions{Dir: filepath.Join(dir, "pg"), Fast: true, Settings: map[string]string{"wal_level": "logical"}})
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = pg.Kill(), os.RemoveAll(dir) })
	require.NoError(t, pg.CreateDatabase(t.Context(), "publisher"))
	p := testkit.NewPairAt(t, pg.DSN("postgres"), `CREATE TABLE t (id int PRIMARY KEY)`, `CREATE TABLE t (id int PRIMARY KEY)`, "public.t")
	publisher := testkit.Session(t, pg.DSN("publisher"))
	testkit.Exec(t, publisher, `CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t`)
	testkit.Exec(t, publisher, `SELECT pg_create_logical_replication_slot('s', 'pgoutput')`)
	require.Empty(t, capture(t, p, "public.t"))
	testkit.Exec(t, p.S, `CREATE SUBSCRIPTION s CONNECTION '`+pg.DSN("publisher")+`' PUBLICATION p WITH (create_slot = false, copy_data = false)`)
	require.Contains(t, capture(t, p, "public.t"), `a subscription writes "public"."t"`)
	testkit.Exec(t, publisher, `INSERT INTO t VALUES (1)`)
	testkit.Eventually(t, "the subscription writes", func() bool { return testkit.Value[bool](t, p.S, `SELECT EXISTS (SELECT FROM t)`) })
	require.Empty(t, outbox(t, p.S))
	testkit.Exec(t, p.S, `DROP SUBSCRIPTION s`)
	require.Empty(t, capture(t, p, "public.t"))
}

// What an earlier setup made, owned by whoever ran it and with the body of its time,
// records on, and is taken over by the next setup without a gap.
func TestAnEarlierSetupGoesOnAndIsTakenOver(t *testing.T) {
	for n := range 2 {
		t.Run(fmt.Sprint("version ", n), func(t *testing.T) {
			t.Parallel()
			p := testkit.NewPair(t, `CREATE TABLE t (id int, b "char", PRIMARY KEY (id, b))`, "public.t")
			table, err := p.From.Describe(t.Context(), "public.t")
			require.NoError(t, err)
			body := p.From.EarlierBodies(table, "postgres")[n]
			function := "backfill_maple_school." + testkit.Value[string](t, p.S, `SELECT proname::text FROM pg_proc WHERE pronamespace = 'backfill_maple_school'::regnamespace`)
			testkit.Exec(t, p.S, `
		DO $$ BEGIN EXECUTE replace(pg_get_functiondef('`+function+`'::regproc), (SELECT prosrc FROM pg_proc WHERE oid = '`+function+`'::regproc), `+row.Literal(body)+`); END $$;
		COMMENT ON FUNCTION `+function+`() IS NULL; REASSIGN OWNED BY backfill_maple_school TO postgres;
		CREATE FUNCTION public.nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
		CREATE TRIGGER theirs BEFORE INSERT ON backfill_maple_school.outbox FOR EACH ROW WHEN (new.op = 'u') EXECUTE FUNCTION public.nothing()`)
			require.Equal(t, "postgres", testkit.Value[string](t, p.S, `SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'backfill_maple_school'`))
			require.Empty(t, capture(t, p, "public.t"))
			testkit.Exec(t, p.S, `INSERT INTO t VALUES (1, 'a'); UPDATE t SET id = 2`)
			require.Equal(t, []string{"c 1,a"}, outbox(t, p.S), "what others have laid there")
			p.Setup()
			require.Empty(t, capture(t, p, "public.t"))
			testkit.Exec(t, p.S, `UPDATE t SET id = 3`)
			require.Equal(t, []string{"u 3,a", "u 2,a"}, outbox(t, p.S), "no gap, and nothing of others' any more")
			require.Equal(t, []string{"backfill_maple_school"}, testkit.Strings(t, p.S, `
		SELECT DISTINCT o::regrole::text FROM (SELECT nspowner FROM pg_namespace WHERE nspname = 'backfill_maple_school' UNION SELECT relowner FROM pg_class WHERE relnamespace = 'backfill_maple_school'::regnamespace
			UNION SELECT proowner FROM pg_proc WHERE pronamespace = 'backfill_maple_school'::regnamespace) x (o)`))
		})
	}
}

// A schema of our name that somebody else has made is not ours.
func TestGuarantee12_ASchemaMadeBeforehandIsRefused(t *testing.T) {
	p, them := hostile(t, `CREATE TABLE t (id int PRIMARY KEY)`)
	testkit.Exec(t, p.S, `DROP SCHEMA backfill_maple_school CASCADE; GRANT CREATE ON DATABASE `+p.S.Config().Database+` TO `+them.Config().User)
	testkit.Exec(t, them, `CREATE SCHEMA backfill_maple_school; COMMENT ON SCHEMA backfill_maple_school IS 'Backfill: site maple, side school'`)
	steps, err := p.From.SetupSteps(t.Context(), nil, side.Roles{})
	require.NoError(t, err)
	err = p.From.Setup(t.Context(), steps)
	require.ErrorContains(t, err, "belongs to role "+them.Config().User+", who may have laid anything into it")
	require.ErrorContains(t, err, `ALTER SCHEMA "backfill_maple_school" OWNER TO postgres`)
	testkit.Exec(t, p.S, `ALTER SCHEMA backfill_maple_school OWNER TO postgres`)
	p.Setup()
}

// The script is as safe in a session whose search_path leads through others' schemas.
func TestGuarantee12_TheScriptCallsNothingOfOthers(t *testing.T) {
	p, them := hostile(t, `CREATE TABLE t (id serial PRIMARY KEY)`, "public.t")
	testkit.Exec(t, them, spy+`
		CREATE FUNCTION public.obj_description(regnamespace, text) RETURNS text LANGUAGE sql AS 'SELECT public.spy()';
		CREATE FUNCTION public.to_regrole(varchar) RETURNS regrole LANGUAGE sql AS 'SELECT public.spy()::regrole';
		CREATE FUNCTION public.has_schema_privilege(varchar, varchar, varchar) RETURNS bool LANGUAGE sql AS 'SELECT public.spy() IS NULL';
		CREATE VIEW public.pg_trigger AS SELECT public.spy()`)
	steps, err := p.From.SetupSteps(t.Context(), p.List(), side.Roles{})
	require.NoError(t, err)
	testkit.Exec(t, p.S, `SET search_path = public, pg_catalog`)
	testkit.Exec(t, p.S, side.Script(steps))
	require.Empty(t, testkit.Strings(t, p.S, `SELECT as_whom FROM public.seen`))
}

// Setup needs no superuser: a role that may make roles makes the owner, one that may not
// is told what to ask for, or owns all itself as before.
func TestSetupByRolesThatMayLess(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY)`)
	database := p.S.Config().Database
	order := 10
	p.Configure("public.t", control.TableChange{CapturedFrom: []string{testkit.Source}, ApplyOrder: &order})
	testkit.Exec(t, p.S, `DROP SCHEMA backfill_maple_school CASCADE`)
	as := func(name, options string) *side.DB {
		role := name + "_" + database
		testkit.Exec(t, p.S, `CREATE ROLE `+role+` LOGIN PASSWORD 'x' `+options+`; GRANT CREATE ON DATABASE `+database+` TO `+role+`; ALTER TABLE t OWNER TO `+role)
		t.Cleanup(func() { testkit.DropRole(t, p.SourceDSN, role) })
		return testkit.OpenSide(t, testkit.Source, testkit.As(t, p.SourceDSN, role, "x"))
	}
	setup := func(db *side.DB, r side.Roles) error {
		steps, err := db.SetupSteps(t.Context(), p.List(), r)
		if err != nil {
			return err
		}
		return db.Setup(t.Context(), steps)
	}
	owner := func() string {
		return testkit.Value[string](t, p.S, `SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'backfill_maple_school'`)
	}
	few := as("few", "")
	require.NoError(t, setup(few, side.Roles{}))
	require.Equal(t, "few_"+database, owner())
	err := setup(few, side.Roles{Owner: "owner_" + database})
	require.ErrorContains(t, err, "CREATE ROLE \"owner_"+database+"\" NOLOGIN; GRANT")
	require.ErrorContains(t, setup(few, side.Roles{Agent: "nobody"}), `there is no role nobody: CREATE ROLE "nobody" LOGIN`)
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (1)`)

	some := as("some", "CREATEROLE IN ROLE few_"+database)
	t.Cleanup(func() { testkit.DropRole(t, p.SourceDSN, "owner_"+database) })
	testkit.Exec(t, p.S, `BEGIN; ALTER SCHEMA backfill_maple_school OWNER TO some_`+database+`; GRANT USAGE ON SCHEMA backfill_maple_school TO few_`+database+`; COMMIT`)
	require.NoError(t, setup(some, side.Roles{Owner: "owner_" + database}))
	require.Equal(t, "owner_"+database, owner())
	require.Empty(t, capture(t, p, "public.t"))
	testkit.Exec(t, p.S, `INSERT INTO t VALUES (2)`)
	require.Equal(t, []string{"c 1", "c 2"}, outbox(t, p.S))
	require.NoError(t, setup(some, side.Roles{Owner: "owner_" + database}), "again")
}
