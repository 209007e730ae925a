package side

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Step is one transaction of the setup: what it is for and its SQL.
type Step struct {
	Title string
	SQL   string
}

// Script joins steps into one text a person can read and psql can run.
func Script(steps []Step) string {
	var b strings.Builder
	b.WriteString("-- Run it with psql -v ON_ERROR_STOP=1, as a role that may create schemas and triggers. It stops at what fails,\n" +
		"-- and may be run again: what is there already stays as it is.\n\n")
	for _, s := range steps {
		// Whoever may create functions in a schema of the session's search_path could have it call theirs.
		fmt.Fprintf(&b, "-- %s\nBEGIN;\nSET LOCAL search_path = pg_catalog, pg_temp;\nSET LOCAL lock_timeout = '3s';\n%s\nCOMMIT;\n\n", s.Title, strings.TrimSpace(s.SQL))
	}
	return b.String()
}

// Roles are those that setup gives rights to.
type Roles struct {
	// Agent is the role the agent signs in as; "" is the one connected now.
	Agent string
	// Owner is the role that owns what is ours, and as which keys are recorded; it
	// needs no login. "" is one named after the schema, which is made, where the one
	// connected now may make roles or is a member of it, else the one connected.
	Owner string
}

// known fills in the roles left out.
func (db *DB) known(ctx context.Context, r Roles) (Roles, error) {
	var connected string
	var owner, agent bool
	err := db.in(ctx, reading, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
			SELECT session_user, rolsuper OR CASE WHEN to_regrole($1) IS NULL THEN rolcreaterole ELSE pg_has_role(rolname, to_regrole($1), 'MEMBER') END,
			       $2 = '' OR to_regrole($2) IS NOT NULL
			  FROM pg_roles WHERE rolname = session_user`, row.Ident(cmp.Or(r.Owner, SchemaName(db.Site, db.Side))), quoted(r.Agent)).Scan(&connected, &owner, &agent)
	})
	switch {
	case err != nil:
		return r, err
	case !agent:
		return r, backfill.Errorf(backfill.Refused, "there is no role %s: CREATE ROLE %s LOGIN PASSWORD '…', and give it to side %[3]s's agent", r.Agent, row.Ident(r.Agent), db.Side)
	case !owner && r.Owner != "" && r.Owner != connected:
		return r, backfill.Errorf(backfill.Refused, "the role %s may not make the role %s, nor is it a member of it: as somebody who may, run CREATE ROLE %[3]s NOLOGIN; GRANT %[3]s TO %s", connected, r.Owner, row.Ident(r.Owner), row.Ident(connected))
	case owner:
		r.Owner = cmp.Or(r.Owner, SchemaName(db.Site, db.Side))
	}
	r.Owner, r.Agent = cmp.Or(r.Owner, connected), cmp.Or(r.Agent, connected)
	return r, nil
}

// quoted is a role's name quoted, "" for none.
func quoted(role string) string {
	if role == "" {
		return ""
	}
	return row.Ident(role)
}

// SetupSteps returns the SQL that prepares this side: schema and tables of ours,
// capture of the tables captured from here, rights for the agent's role. Running
// it again repairs what is there and changes nothing else.
func (db *DB) SetupSteps(ctx context.Context, tables []backfill.Table, roles Roles) ([]Step, error) {
	if err := db.Apart(ctx); err != nil {
		return nil, err
	}
	roles, err := db.known(ctx, roles)
	if err != nil {
		return nil, err
	}
	steps := []Step{{fmt.Sprintf("Schema of side %s of site %s, owned by %s: outbox, position, held rows", db.Side, db.Site, roles.Owner), db.baseSQL(roles)}}
	var captured []*Table
	for _, t := range tables {
		name := t.Relation(db.Side)
		d, err := db.Describe(ctx, name)
		if err != nil {
			return nil, err
		}
		if problem := d.Unfit(t, db.Side, tables); problem != "" {
			return nil, backfill.Errorf(backfill.Refused, "side %s: %s", db.Side, problem)
		}
		if !t.Captures(db.Side) {
			// What is not configured yet may come to receive here.
			steps = append(steps, Step{"Rights on " + name, grantSQL(d, roles.Agent, t.Receives(db.Side) || t.CapturedFrom == nil)})
			continue
		}
		// A table that is mapped to several is captured once.
		if !slices.ContainsFunc(captured, func(c *Table) bool { return c.Name == d.Name }) {
			mark, err := db.repairSQL(ctx, d)
			if err != nil {
				return nil, err
			}
			captured = append(captured, d)
			steps = append(steps, Step{"Capture of " + name, db.captureSQL(d, roles) + mark}, Step{"Rights on " + name, grantSQL(d, roles.Agent, t.Receives(db.Side))})
		}
	}
	stale, err := db.staleCapture(ctx, captured)
	if err != nil {
		return nil, err
	}
	return append(steps, stale...), nil
}

// baseSQL makes our own tables. They belong to a role that nobody signs in as: the
// capture functions, which run as their owner, can then do no more than record keys.
// What an earlier setup made as somebody else is taken over; a schema that somebody
// else has made is not, because they could have laid anything into it.
func (db *DB) baseSQL(roles Roles) string {
	s := strings.NewReplacer("{schema}", db.schema, "{role}", row.Ident(roles.Agent), "{label}", row.Literal(label(db.Site, db.Side)), "{quoted}", row.Literal(db.schema),
		"{owner}", row.Ident(roles.Owner), "{ownername}", row.Literal(row.Ident(roles.Owner)), "{rolename}", row.Literal(row.Ident(roles.Agent)))
	return s.Replace(`
DO $owner$
BEGIN
    IF to_regrole({ownername}) IS NULL THEN
        CREATE ROLE {owner} NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN -- made at the same moment for another database
END
$owner$;
DO $check$
DECLARE
    ours oid := to_regnamespace({quoted});
    its  name := (SELECT rolname FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner WHERE n.oid = ours);
    what text;
BEGIN
    IF NOT pg_has_role(to_regrole({ownername}), 'MEMBER') THEN
        GRANT {owner} TO CURRENT_USER;
    END IF;
    IF coalesce(obj_description(ours, 'pg_namespace'), {label}) <> {label} THEN
        RAISE EXCEPTION 'schema % belongs to another site and side: %', {quoted}, obj_description(ours, 'pg_namespace');
    ELSIF its <> ALL (ARRAY[session_user, to_regrole({ownername})::text, to_regrole({rolename})::text]) AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = its) THEN
        RAISE EXCEPTION 'schema % belongs to role %, who may have laid anything into it: if an earlier setup was run as that role, first run BEGIN; ALTER SCHEMA % OWNER TO %; GRANT USAGE ON SCHEMA % TO %; COMMIT; else drop it',
            {quoted}, its, {quoted}, quote_ident(session_user), {quoted}, quote_ident(its);
    ELSIF ours IS NULL THEN
        CREATE SCHEMA {schema} AUTHORIZATION {owner};
    END IF;
    FOR what IN
        SELECT format('ALTER SCHEMA %s OWNER TO %s', {quoted}, {ownername}) WHERE its <> to_regrole({ownername})::text
        UNION ALL SELECT format('ALTER TABLE %s OWNER TO %s', oid::regclass, {ownername}) FROM pg_class WHERE relnamespace = ours AND relkind = 'r' AND relowner <> to_regrole({ownername})
        UNION ALL SELECT format('ALTER FUNCTION %s OWNER TO %s', oid::regprocedure, {ownername}) FROM pg_proc WHERE pronamespace = ours AND proowner <> to_regrole({ownername})
        UNION ALL SELECT format('DROP TRIGGER %I ON %s', tgname, tgrelid::regclass) FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = ours AND NOT tgisinternal
        UNION ALL SELECT format('DROP RULE %I ON %s', rulename, ev_class::regclass) FROM pg_rewrite JOIN pg_class c ON c.oid = ev_class WHERE relnamespace = ours AND relkind = 'r'
    LOOP
        EXECUTE what;
    END LOOP;
END
$check$;
SET LOCAL ROLE {owner};
COMMENT ON SCHEMA {schema} IS {label};

-- Keys touched here and not yet pushed; no row values.
CREATE TABLE IF NOT EXISTS {schema}.outbox (
    seq bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    tbl text NOT NULL,
    op  "char" NOT NULL, -- c create, u update, d delete, t truncate, g gap: keys that could not be recorded
    key text[],          -- n keys, one after the other; of a gap its transaction
    n   integer NOT NULL DEFAULT 1
);
ALTER TABLE {schema}.outbox ADD COLUMN IF NOT EXISTS n integer NOT NULL DEFAULT 1;
-- The last push, stored with the outbox's deletion.
CREATE TABLE IF NOT EXISTS {schema}.pushed (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), epoch integer NOT NULL DEFAULT 1,
    batch bigint NOT NULL DEFAULT 0, nonce text NOT NULL DEFAULT '', reads bigint NOT NULL DEFAULT 0
);
-- How many reads were made safe by a write here: a side that knows of fewer than it once did was restored.
ALTER TABLE {schema}.pushed ADD COLUMN IF NOT EXISTS reads bigint NOT NULL DEFAULT 0;
INSERT INTO {schema}.pushed DEFAULT VALUES ON CONFLICT DO NOTHING;
-- How far the other side's changes have been applied here, stored with the rows.
CREATE TABLE IF NOT EXISTS {schema}.applied (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), seq bigint NOT NULL DEFAULT 0, nonce text NOT NULL DEFAULT ''
);
INSERT INTO {schema}.applied DEFAULT VALUES ON CONFLICT DO NOTHING;
-- Changes set aside here: waiting for a parent row, or refused.
CREATE TABLE IF NOT EXISTS {schema}.held (
    seq       bigint NOT NULL,
    table_id  integer NOT NULL,
    layout_id bigint,
    op        "char" NOT NULL,
    key       text[] COLLATE "C" NOT NULL,
    "row"     text[] COLLATE "C",
    state     text NOT NULL CHECK (state IN ('held', 'quarantined')),
    reason    text NOT NULL,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    tried     timestamptz, -- again, last
    PRIMARY KEY (seq, key) -- a truncate can leave the deletes of many keys
);
ALTER TABLE {schema}.held ADD COLUMN IF NOT EXISTS tried timestamptz;
-- Of a table captured on both sides: what the change had seen of this side's when it
-- was read, whether a backfill sent it, the first of its key set aside since the last
-- that was applied, and whether it is in conflict with a change of this side.
ALTER TABLE {schema}.held ADD COLUMN IF NOT EXISTS stamp bigint, ADD COLUMN IF NOT EXISTS released boolean NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS unseen bigint, ADD COLUMN IF NOT EXISTS conflict boolean NOT NULL DEFAULT false;
-- Keys of two-way tables changed here and pushed, with the last number each got, until
-- nothing on its way from the other side can have been read without them. Since says by
-- which policy: a change in conflict with one of an earlier policy is also here with that.
CREATE TABLE IF NOT EXISTS {schema}.own (
    table_id integer NOT NULL, key text[] COLLATE "C" NOT NULL, seq bigint NOT NULL, since bigint NOT NULL DEFAULT 0, PRIMARY KEY (table_id, key, since)
);
DO $own$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = '{schema}.own'::regclass AND attname = 'since') THEN
        ALTER TABLE {schema}.own ADD COLUMN since bigint NOT NULL DEFAULT 0, DROP CONSTRAINT own_pkey, ADD PRIMARY KEY (table_id, key, since);
    END IF;
END
$own$;
CREATE INDEX IF NOT EXISTS own_by_seq ON {schema}.own (table_id, seq);
-- Since when the own changes of a table are known.
CREATE TABLE IF NOT EXISTS {schema}.two_way (table_id integer PRIMARY KEY, since bigint NOT NULL);
-- Versions that lost a conflict, until they are in history.
CREATE TABLE IF NOT EXISTS {schema}.lost (
    note      uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    table_id  integer NOT NULL,
    own       boolean NOT NULL, -- changed here, else on the other side
    seq       bigint, -- NULL: it was never pushed
    to_seq    bigint, -- NULL: to a change not pushed then
    op        "char" NOT NULL DEFAULT 'u',
    key       text[] NOT NULL,
    layout    jsonb,
    "row"     text[]
);
CREATE INDEX IF NOT EXISTS held_by_key ON {schema}.held (table_id, key);
-- Tables of which rows were refused one after the other: how many, and when that were too many, how far the table's
-- changes have been applied while the position goes on without it.
CREATE TABLE IF NOT EXISTS {schema}.refused (
    table_id   integer PRIMARY KEY,
    refused    bigint NOT NULL DEFAULT 0, -- in a row
    stopped_at bigint,
    reason     text NOT NULL DEFAULT '',
    since      timestamptz
);

GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};
RESET ROLE;`)
}

// label marks a schema of ours with whose it is; of side "" it is what the labels
// of all sides of a site begin with.
func label(site, side string) string { return "Backfill: site " + site + ", side " + side }

// functionName cannot collide for two tables, whatever the length of their names.
func functionName(table backfill.TableName) string {
	sum := sha256.Sum256([]byte(table.String()))
	return "capture_" + hex.EncodeToString(sum[:8])
}

// captureBody is the capture function of a table. It records keys and nothing
// else, so that no value and no later change of the table's shape can make the
// application's statement fail. An update records the old and the new keys: a key
// has changed when its text has, byte by byte, whatever the column's collation holds
// for equal. When a key column was dropped or renamed, keys
// cannot be recorded, which is recorded; a truncate of one partition likewise.
//
// A record of the outbox costs the application as much as a row of its own, so the keys
// of a statement share some. Of a key of one column they are collected as texts, which
// takes half as long as arrays.
//
// Rows applied by the agent are not captured again: the setting alone could be
// set by anyone, so the session must also be the agent's role.
func (db *DB) captureBody(t *Table, role string) string {
	return db.bodyOf(t, role, stillBytes(t), row.Column.Printed, keyRecorded(t), `
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO {outbox} (tbl, op, key, n)
        SELECT {table}, 'c', pg_catalog.array_agg(key), pg_catalog.count(*)
          FROM (SELECT {key} AS key, (pg_catalog.row_number() OVER () - 1) / {many} AS part FROM new_rows r) k GROUP BY part;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {outbox} (tbl, op, key, n)
        SELECT {table}, 'u', pg_catalog.array_agg(key), pg_catalog.count(*)
          FROM (SELECT key, (pg_catalog.row_number() OVER () - 1) / {many} AS part
                  FROM (SELECT {key} AS key FROM new_rows r
                        UNION ALL
                        SELECT {oldkey} FROM old_rows o WHERE NOT EXISTS (SELECT FROM new_rows r WHERE {same})) b) k GROUP BY part;
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO {outbox} (tbl, op, key, n)
        SELECT {table}, 'd', pg_catalog.array_agg(key), pg_catalog.count(*)
          FROM (SELECT {key} AS key, (pg_catalog.row_number() OVER () - 1) / {many} AS part FROM old_rows r) k GROUP BY part;`)
}

// keyRecorded is the SQL of a row's key as the capture function of a table collects it.
func keyRecorded(t *Table) func(source string) string {
	if columns := t.Layout.KeyColumns(); len(columns) == 1 {
		return columns[0].Printed
	}
	return t.Layout.KeyPrinted
}

// keysInRecord is how many keys a record of the outbox has at most. What a record costs
// is spread thin by then: with 500 a large update took no less time.
const keysInRecord = 150

// earlierBodies are the capture functions of versions before this one, the last first.
// They recorded as well, but each key by itself, and the first one called casts that the
// owner of a key's type may have made.
func (db *DB) earlierBodies(t *Table, role string) []string {
	const records = `
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO {outbox} (tbl, op, key) SELECT {table}, 'c', {key} FROM new_rows r;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {outbox} (tbl, op, key)
        SELECT {table}, 'u', {key} FROM new_rows r
        UNION ALL
        SELECT {table}, 'u', {oldkey} FROM old_rows o WHERE NOT EXISTS (SELECT FROM new_rows r WHERE {same});
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO {outbox} (tbl, op, key) SELECT {table}, 'd', {key} FROM old_rows r;`
	return []string{
		db.bodyOf(t, role, stillBytes(t), row.Column.Printed, t.Layout.KeyPrinted, records),
		db.bodyOf(t, role, "", row.Column.Text, t.Layout.KeyText, records),
	}
}

// stillBytes is the SQL that a key's columns of type "char" still are: what prints one
// would call casts of another type's.
func stillBytes(t *Table) string {
	var bytes []string
	for _, c := range t.Layout.KeyColumns() {
		if c.Byte {
			bytes = append(bytes, row.Literal(c.Name))
		}
	}
	if len(bytes) == 0 {
		return ""
	}
	return fmt.Sprintf(` AND (attname NOT IN (%s) OR atttypid = 18)`, strings.Join(bytes, ", "))
}

func (db *DB) bodyOf(t *Table, role, still string, text func(row.Column, string) string, key func(source string) string, records string) string {
	var same, columns []string
	for _, c := range t.Layout.KeyColumns() {
		same = append(same, fmt.Sprintf(`(%s) COLLATE "C" = (%s) COLLATE "C"`, text(c, "r"), text(c, "o")))
		columns = append(columns, row.Literal(c.Name))
	}
	s := strings.NewReplacer("{outbox}", db.schema+".outbox", "{table}", row.Literal(t.Name.String()), "{key}", key("r"), "{oldkey}", key("o"), "{same}", strings.Join(same, " AND "),
		"{columns}", strings.Join(columns, ", "), "{still}", still, "{n}", fmt.Sprint(len(columns)), "{site}", row.Literal(db.Site), "{role}", row.Literal(role), "{many}", fmt.Sprint(keysInRecord))
	return s.Replace(`
BEGIN
    IF pg_catalog.current_setting('backfill.applying', true) = {site} AND session_user = {role} THEN
        RETURN NULL;
    ELSIF TG_OP <> 'TRUNCATE' AND {n} <> (SELECT pg_catalog.count(*) FROM pg_catalog.pg_attribute
                                           WHERE attrelid = TG_RELID AND attname IN ({columns}){still}) THEN
        INSERT INTO {outbox} (tbl, op, key) VALUES ({table}, 'g', ARRAY[pg_catalog.pg_current_xact_id()::pg_catalog.text]);` + records + `
    ELSIF TG_ARGV[0] = 'root' THEN
        INSERT INTO {outbox} (tbl, op) VALUES ({table}, 't');
    ELSE
        INSERT INTO {outbox} (tbl, op, key) VALUES ({table}, 'g', ARRAY[pg_catalog.pg_current_xact_id()::pg_catalog.text]);
    END IF;
    RETURN NULL;
END
`)
}

// functionSettings are those that decide how a key is printed, pinned on the
// function because the writing session has its own. And an update's old and new keys are
// never compared one by one: a session keeps the plan it made for a few rows.
const functionSettings = `
    SET search_path = pg_catalog, pg_temp
    SET datestyle = 'ISO, MDY'
    SET intervalstyle = 'postgres'
    SET timezone = 'UTC'
    SET extra_float_digits = 3
    SET bytea_output = 'hex'
    SET lc_monetary = 'C'
    SET enable_nestloop = off`

func (db *DB) captureSQL(t *Table, roles Roles) string {
	fn := db.schema + "." + row.Ident(functionName(t.Name))
	var b strings.Builder
	fmt.Fprintf(&b, "SET LOCAL ROLE %s;\nCREATE OR REPLACE FUNCTION %s() RETURNS trigger\n    LANGUAGE plpgsql SECURITY DEFINER%s\nAS $capture$%s$capture$;\n",
		row.Ident(roles.Owner), fn, functionSettings, db.captureBody(t, roles.Agent))
	fmt.Fprintf(&b, "REVOKE ALL ON FUNCTION %s() FROM PUBLIC;\nRESET ROLE;\n", fn)
	for i, rel := range t.Relations() {
		level := "root"
		if i > 0 {
			level = "partition"
		}
		for _, tr := range db.triggers() {
			fmt.Fprintf(&b, "CREATE OR REPLACE TRIGGER %s AFTER %s ON %s%s\n    FOR EACH STATEMENT EXECUTE FUNCTION %s(%s);\n",
				row.Ident(tr.name), tr.event, rel, tr.referencing(), fn, row.Literal(level))
		}
	}
	// ALWAYS: a session in replica role is captured too.
	for _, rel := range t.Relations() {
		for _, tr := range db.triggers() {
			fmt.Fprintf(&b, "ALTER TABLE %s ENABLE ALWAYS TRIGGER %s;\n", rel, row.Ident(tr.name))
		}
	}
	// A trigger that is disabled and enabled again has another version of its catalog row.
	fmt.Fprintf(&b, "SET LOCAL ROLE %s;\nDO $made$ BEGIN EXECUTE format('COMMENT ON FUNCTION %s() IS %%L', (SELECT %s FROM pg_trigger g WHERE tgfoid = '%[2]s'::regproc)); END $made$;\nRESET ROLE;\n",
		row.Ident(roles.Owner), strings.ReplaceAll(fn, "'", "''"), "("+placeSQL+") || coalesce(string_agg(' ' || "+versionSQL+", '' ORDER BY g.oid), '')")
	return b.String()
}

// placeSQL names the database, and versionSQL the version of a trigger g in it: what
// setup notes as the comment of the capture function, which only its owner can change.
const (
	placeSQL   = `SELECT 'triggers of ' || system_identifier || '/' || (SELECT oid FROM pg_database WHERE datname = current_database()) || ':' FROM pg_control_system()`
	versionSQL = `g.oid || ':' || g.xmin`
)

// repairSQL is run with the triggers where capture was there before and was not
// whole: what went unrecorded until then is recorded as a gap. Keys of another key
// than the table has now mean nothing any more.
func (db *DB) repairSQL(ctx context.Context, t *Table) (sql string, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		var before bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_proc WHERE pronamespace = to_regnamespace($1)::oid AND proname = $2)`,
			db.schema, functionName(t.Name)).Scan(&before); err != nil || !before {
			return err
		}
		problem, otherKey, err := db.captureProblem(ctx, tx, t)
		if err != nil || problem == "" {
			return err
		}
		if otherKey {
			sql += fmt.Sprintf("DELETE FROM %s.outbox WHERE tbl = %s;\n", db.schema, row.Literal(t.Name.String()))
		}
		sql += fmt.Sprintf("INSERT INTO %s.outbox (tbl, op, key) VALUES (%s, 'g', ARRAY[pg_current_xact_id()::text]); -- %s\n", db.schema, row.Literal(t.Name.String()), strings.ReplaceAll(problem, "\n", " "))
		return nil
	})
	return sql, err
}

type trigger struct {
	name, event string
	typ         int16  // as pg_trigger has it: AFTER, FOR EACH STATEMENT
	old, new    string // the transition tables
}

func (t trigger) referencing() string {
	s := ""
	if t.old != "" {
		s += " OLD TABLE AS " + t.old
	}
	if t.new != "" {
		s += " NEW TABLE AS " + t.new
	}
	if s == "" {
		return ""
	}
	return "\n    REFERENCING" + s
}

func (db *DB) triggers() []trigger {
	name := func(event string) string { return bounded("backfill_" + db.Site + "_" + db.Side + "_" + event) }
	return []trigger{
		{name("insert"), "INSERT", 1 << 2, "", "new_rows"},
		{name("update"), "UPDATE", 1 << 4, "old_rows", "new_rows"},
		{name("delete"), "DELETE", 1 << 3, "old_rows", ""},
		{name("truncate"), "TRUNCATE", 1 << 5, "", ""},
	}
}

// grantSQL gives the agent's role what it lacks: to read a table, and where it
// receives to write it, to take numbers from the sequences of its columns' defaults, and
// to see where those stand.
func grantSQL(t *Table, role string, receives bool) string {
	sql := fmt.Sprintf(`
    IF NOT has_schema_privilege(%[1]s, %[2]s, 'USAGE') THEN
        GRANT USAGE ON SCHEMA %[3]s TO %[4]s;
    END IF;`, row.Literal(role), row.Literal(t.Name.Schema), row.Ident(t.Name.Schema), row.Ident(role))
	rights := []string{"SELECT"}
	if receives {
		rights = append(rights, "INSERT", "UPDATE", "DELETE")
	}
	var lacks []string
	for _, r := range rights {
		lacks = append(lacks, fmt.Sprintf("NOT has_table_privilege(%s, %s, '%s')", row.Literal(role), row.Literal(t.SQL), r))
	}
	sql += fmt.Sprintf(`
    IF %s THEN
        GRANT %s ON %s TO %s;
    END IF;`, strings.Join(lacks, " OR "), strings.Join(rights, ", "), t.SQL, row.Ident(role))
	if receives {
		sql += fmt.Sprintf(`
    FOR own IN
        SELECT objid FROM pg_depend WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_class'::regclass AND refobjid = %[1]s::regclass AND deptype IN ('a', 'i')
        UNION SELECT d.refobjid FROM pg_attrdef f JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid AND d.refclassid = 'pg_class'::regclass WHERE f.adrelid = %[1]s::regclass
    LOOP
        IF EXISTS (SELECT FROM pg_class WHERE oid = own AND relkind = 'S') AND NOT (has_sequence_privilege(%[2]s, own, 'USAGE') AND has_sequence_privilege(%[2]s, own, 'SELECT')) THEN
            EXECUTE format('GRANT USAGE, SELECT ON SEQUENCE %%s TO %[3]s', own);
        END IF;
    END LOOP;`, row.Literal(t.SQL), row.Literal(role), strings.ReplaceAll(row.Ident(role), "'", "''"))
	}
	return "\nDO $grant$\nDECLARE\n    own regclass;\nBEGIN" + sql + "\nEND\n$grant$;"
}

// staleCapture drops our triggers from relations that are captured no longer: those
// of tables configured away, partitions that were detached, tables swapped for others.
func (db *DB) staleCapture(ctx context.Context, captured []*Table) ([]Step, error) {
	want := []string{} // not NULL: nothing is unequal to that
	for _, t := range captured {
		want = append(want, t.Relations()...)
	}
	var drops []string
	err := db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
		SELECT format('DROP TRIGGER IF EXISTS %I ON %I.%I;', g.tgname, n.nspname, c.relname)
		  FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid JOIN pg_class c ON c.oid = g.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
		 WHERE p.pronamespace = to_regnamespace($1) AND NOT EXISTS (SELECT FROM unnest($2::text[]) r WHERE to_regclass(r) = g.tgrelid) ORDER BY 1`, db.schema, want)
		if err != nil {
			return err
		}
		drops, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err != nil || len(drops) == 0 {
		return nil, err
	}
	return []Step{{"Tables that are captured no longer", strings.Join(drops, "\n")}}, nil
}

// Setup runs the steps, each in a transaction of its own. A table's triggers need
// a moment without writers: each try waits at most 3 s, so that the application's
// writers never queue behind it for longer, and is made again with growing pauses
// for up to a minute. Every write is then either visible to a walk that starts
// after it, or captured.
func (db *DB) Setup(ctx context.Context, steps []Step) error {
	for _, s := range steps {
		if err := db.setupStep(ctx, s); err != nil {
			return fmt.Errorf("side %s: %s: %w", db.Side, strings.ToLower(s.Title[:1])+s.Title[1:], err)
		}
	}
	return nil
}

func (db *DB) setupStep(ctx context.Context, s Step) error {
	pause := 100 * time.Millisecond
	for deadline := time.Now().Add(time.Minute); ; {
		err := db.in(ctx, writing, func(tx pgx.Tx) error {
			_, err := tx.Conn().PgConn().Exec(ctx, s.SQL).ReadAll()
			return err
		})
		switch SQLState(err) {
		case "55P03", "40P01":
		case "42501":
			return fmt.Errorf("%w: run it as a role that owns the tables and may create a schema in the database", err)
		default:
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%w; held by %s: end it or try in a quieter moment", err, db.blockers(ctx))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(pause*2, 5*time.Second)
	}
}

// blockers names the oldest sessions with a transaction open.
func (db *DB) blockers(ctx context.Context) string {
	rows, err := db.pool.Query(ctx, `
		SELECT format('pid %s (%s, %s, open for %s)', pid, usename, coalesce(nullif(application_name, ''), 'unnamed'), date_trunc('second', clock_timestamp() - xact_start))
		  FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND datname = current_database()
		 ORDER BY xact_start LIMIT 3`)
	if err != nil {
		return "an unknown session"
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(names) == 0 {
		return "an unknown session"
	}
	return strings.Join(names, ", ")
}

// captureProblem says what is wrong with a table's capture, or "", and whether the
// keys that were recorded are those of another key than the table has now. It looks
// at the table and every partition: statement triggers are not inherited by new ones.
func (db *DB) captureProblem(ctx context.Context, tx pgx.Tx, t *Table) (problem string, otherKey bool, err error) {
	var names, old, new []string
	var types []int16
	for _, tr := range db.triggers() {
		names, types = append(names, tr.name), append(types, tr.typ)
		old, new = append(old, tr.old), append(new, tr.new)
	}
	rows, err := tx.Query(ctx, `
		SELECT r.rel, w.name, g.tgenabled::text,
		       coalesce(p.proname = $7 AND p.pronamespace = to_regnamespace($6)::oid, false),
		       coalesce(g.tgtype = w.typ AND g.tgqual IS NULL AND g.tgattr::text = '' AND coalesce(g.tgoldtable, '') = w.old AND coalesce(g.tgnewtable, '') = w.new
		                AND encode(g.tgargs, 'escape') = CASE r.n WHEN 1 THEN 'root' ELSE 'partition' END || '\000', false),
		       coalesce(p.prosrc, ''),
		       coalesce(p.prosecdef AND (SELECT array_agg(lower(split_part(c, '=', 1)) || '=' || split_part(c, '=', 2) ORDER BY lower(c) COLLATE "C") FROM unnest(p.proconfig) c) = $8::text[], false),
		       coalesce(has_schema_privilege(p.proowner, to_regnamespace($6)::oid, 'USAGE') AND has_table_privilege(p.proowner, to_regclass($6 || '.outbox')::oid, 'INSERT'), false),
		       -- by an earlier version, or in another database before this was made of its dump, nothing was noted
		       coalesce(NOT starts_with(made.note, made.here) OR made.note || ' ' LIKE '% ' || `+versionSQL+` || ' %', true),
		       EXISTS (SELECT FROM pg_subscription_rel s WHERE s.srrelid = to_regclass(r.rel))
		  FROM unnest($1::text[]) WITH ORDINALITY r (rel, n) CROSS JOIN unnest($2::text[], $3::int2[], $4::text[], $5::text[]) w (name, typ, old, new)
		  LEFT JOIN pg_trigger g ON g.tgrelid = to_regclass(r.rel) AND g.tgname = w.name
		  LEFT JOIN pg_proc p ON p.oid = g.tgfoid
		  LEFT JOIN LATERAL (SELECT obj_description(p.oid, 'pg_proc') AS note, (`+placeSQL+`) AS here) made ON true`, t.Relations(), names, types, old, new, db.schema, functionName(t.Name), functionConfig())
	if err != nil {
		return "", false, err
	}
	ours := db.bodyPatterns(t)
	var problems []string
	var rel, name, source string
	var enabled *string
	var function, asMade, settings, rights, untouched, subscribed bool
	_, err = pgx.ForEachRow(rows, []any{&rel, &name, &enabled, &function, &asMade, &source, &settings, &rights, &untouched, &subscribed}, func() error {
		switch {
		case subscribed:
			problems = append(problems, fmt.Sprintf("a subscription writes %s, and its writes fire no statement trigger: drop it, or sync from where it publishes", rel))
		case enabled == nil:
			problems = append(problems, fmt.Sprintf("trigger %s is missing on %s", name, rel))
		case *enabled != "A":
			problems = append(problems, fmt.Sprintf("trigger %s on %s is or was disabled", name, rel))
		case !function:
			problems = append(problems, fmt.Sprintf("trigger %s on %s calls another function", name, rel))
		case !asMade:
			problems = append(problems, fmt.Sprintf("trigger %s on %s is not as setup made it", name, rel))
		case !strings.Contains(source, "(SELECT "+keyRecorded(t)("r")+" AS key") && !strings.Contains(source, t.Layout.KeyPrinted("r")) && !strings.Contains(source, t.Layout.KeyText("r")):
			otherKey = true
			problems = append(problems, fmt.Sprintf("the capture function of %s was made for another key", t.Name))
		case !settings || !slices.ContainsFunc(ours, func(p *regexp.Regexp) bool { return p.MatchString(source) }):
			problems = append(problems, fmt.Sprintf("the capture function of %s is not as setup made it", t.Name))
		case !rights:
			problems = append(problems, fmt.Sprintf("the owner of the capture function of %s may not write the outbox, so that statements on the table fail", t.Name))
		case !untouched:
			problems = append(problems, fmt.Sprintf("trigger %s on %s was disabled, changed or made anew since setup", name, rel))
		}
		return nil
	})
	if err != nil {
		return "", false, err
	}
	slices.Sort(problems)
	problems = slices.Compact(problems)
	if n := len(problems); n > 3 {
		problems = append(problems[:3], fmt.Sprintf("and %d more", n-3))
	}
	return strings.Join(problems, "; "), otherKey, nil
}

// bodyPatterns match the capture function of a table as this version and earlier ones
// make it, whatever the agent's role.
func (db *DB) bodyPatterns(t *Table) (all []*regexp.Regexp) {
	const anyone = "any role"
	for _, body := range append(db.earlierBodies(t, anyone), db.captureBody(t, anyone)) {
		all = append(all, regexp.MustCompile(`^`+strings.ReplaceAll(regexp.QuoteMeta(body), regexp.QuoteMeta(row.Literal(anyone)), `'(?:[^']|'')*'`)+`$`))
	}
	return all
}

// functionConfig is functionSettings as pg_proc has them.
func functionConfig() []string {
	var out []string
	for _, line := range strings.Split(strings.TrimSpace(functionSettings), "\n") {
		name, value, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "SET "), " = ")
		out = append(out, name+"="+strings.Trim(value, "'"))
	}
	slices.Sort(out)
	return out
}
