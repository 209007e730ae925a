package side

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
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
	for _, s := range steps {
		fmt.Fprintf(&b, "-- %s\nBEGIN;\nSET LOCAL lock_timeout = '3s';\n%s\nCOMMIT;\n\n", s.Title, strings.TrimSpace(s.SQL))
	}
	return b.String()
}

// SetupSteps returns the SQL that prepares this side: schema and tables of ours,
// capture of the tables captured from here, rights for the agent's role. Running
// it again repairs what is there and changes nothing else. role is the role the
// agent signs in as; "" is the one connected now.
func (db *DB) SetupSteps(ctx context.Context, tables []backfill.Table, role string) ([]Step, error) {
	if role == "" {
		if err := db.pool.QueryRow(ctx, `SELECT session_user`).Scan(&role); err != nil {
			return nil, err
		}
	}
	steps := []Step{{fmt.Sprintf("Schema of side %s of site %s: outbox, position, held rows", db.Side, db.Site), db.baseSQL(role)}}
	for _, t := range tables {
		d, err := db.Describe(ctx, t.Name)
		if err != nil {
			return nil, err
		}
		if d.Problem != "" {
			return nil, backfill.Errorf(backfill.Refused, "side %s: %s", db.Side, d.Problem)
		}
		if t.Captures(db.Side) {
			steps = append(steps, Step{"Capture of " + t.Name, db.captureSQL(d, role)})
		}
		steps = append(steps, Step{"Rights on " + t.Name, grantSQL(d, role)})
	}
	stale, err := db.staleCapture(ctx, tables)
	if err != nil {
		return nil, err
	}
	return append(steps, stale...), nil
}

// baseSQL makes our own tables.
func (db *DB) baseSQL(role string) string {
	s := strings.NewReplacer("{schema}", db.schema, "{role}", row.Ident(role), "{label}", row.Literal(db.label()), "{quoted}", row.Literal(db.schema))
	return s.Replace(`
DO $check$
BEGIN
    IF coalesce(obj_description(to_regnamespace({quoted}), 'pg_namespace'), {label}) <> {label} THEN
        RAISE EXCEPTION 'schema % belongs to another site and side: %', {quoted}, obj_description(to_regnamespace({quoted}), 'pg_namespace');
    END IF;
END
$check$;
CREATE SCHEMA IF NOT EXISTS {schema};
COMMENT ON SCHEMA {schema} IS {label};

-- Keys touched here and not yet pushed; no row values.
CREATE TABLE IF NOT EXISTS {schema}.outbox (
    seq bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    tbl text NOT NULL,
    op  "char" NOT NULL, -- c create, u update, d delete, t truncate, g gap: keys that could not be recorded
    key text[]
);
-- The last push, stored with the outbox's deletion.
CREATE TABLE IF NOT EXISTS {schema}.pushed (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), epoch integer NOT NULL DEFAULT 1,
    batch bigint NOT NULL DEFAULT 0, nonce text NOT NULL DEFAULT ''
);
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
CREATE INDEX IF NOT EXISTS held_by_key ON {schema}.held (table_id, key);

GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};`)
}

func (db *DB) label() string { return "Backfill: site " + db.Site + ", side " + db.Side }

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
// Rows applied by the agent are not captured again: the setting alone could be
// set by anyone, so the session must also be the agent's role.
func (db *DB) captureBody(t *Table, role string) string {
	key := t.Layout.KeyText("r")
	var columns []string
	for _, name := range t.Layout.Key {
		columns = append(columns, row.Literal(name))
	}
	s := strings.NewReplacer("{outbox}", db.schema+".outbox", "{table}", row.Literal(t.Name.String()), "{key}", key,
		"{columns}", strings.Join(columns, ", "), "{n}", fmt.Sprint(len(columns)), "{site}", row.Literal(db.Site), "{role}", row.Literal(role))
	return s.Replace(`
BEGIN
    IF pg_catalog.current_setting('backfill.applying', true) = {site} AND session_user = {role} THEN
        RETURN NULL;
    ELSIF TG_OP <> 'TRUNCATE' AND {n} <> (SELECT pg_catalog.count(*) FROM pg_catalog.pg_attribute
                                           WHERE attrelid = TG_RELID AND attname IN ({columns})) THEN
        INSERT INTO {outbox} (tbl, op) VALUES ({table}, 'g');
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO {outbox} (tbl, op, key) SELECT {table}, 'c', {key} FROM new_rows r;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {outbox} (tbl, op, key)
        SELECT {table}, 'u', {key} COLLATE "C" FROM new_rows r UNION SELECT {table}, 'u', {key} COLLATE "C" FROM old_rows r;
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO {outbox} (tbl, op, key) SELECT {table}, 'd', {key} FROM old_rows r;
    ELSIF TG_ARGV[0] = 'root' THEN
        INSERT INTO {outbox} (tbl, op) VALUES ({table}, 't');
    ELSE
        INSERT INTO {outbox} (tbl, op) VALUES ({table}, 'g');
    END IF;
    RETURN NULL;
END
`)
}

// functionSettings are those that decide how a key is printed, pinned on the
// function because the writing session has its own.
const functionSettings = `
    SET search_path = pg_catalog, pg_temp
    SET datestyle = 'ISO, MDY'
    SET intervalstyle = 'postgres'
    SET timezone = 'UTC'
    SET extra_float_digits = 3
    SET bytea_output = 'hex'
    SET lc_monetary = 'C'`

func (db *DB) captureSQL(t *Table, role string) string {
	fn := db.schema + "." + row.Ident(functionName(t.Name))
	var b strings.Builder
	fmt.Fprintf(&b, "CREATE OR REPLACE FUNCTION %s() RETURNS trigger\n    LANGUAGE plpgsql SECURITY DEFINER%s\nAS $capture$%s$capture$;\n",
		fn, functionSettings, db.captureBody(t, role))
	fmt.Fprintf(&b, "REVOKE ALL ON FUNCTION %s() FROM PUBLIC;\n", fn)
	for i, rel := range t.Relations() {
		level := "root"
		if i > 0 {
			level = "partition"
		}
		for _, tr := range db.triggers() {
			fmt.Fprintf(&b, "CREATE OR REPLACE TRIGGER %s AFTER %s ON %s%s\n    FOR EACH STATEMENT EXECUTE FUNCTION %s(%s);\n",
				row.Ident(tr.name), tr.event, rel, tr.referencing, fn, row.Literal(level))
		}
	}
	// ALWAYS: a session in replica role is captured too.
	for _, rel := range t.Relations() {
		for _, tr := range db.triggers() {
			fmt.Fprintf(&b, "ALTER TABLE %s ENABLE ALWAYS TRIGGER %s;\n", rel, row.Ident(tr.name))
		}
	}
	return b.String()
}

type trigger struct{ name, event, referencing string }

func (db *DB) triggers() []trigger {
	name := func(event string) string { return bounded("backfill_" + db.Site + "_" + db.Side + "_" + event) }
	return []trigger{
		{name("insert"), "INSERT", "\n    REFERENCING NEW TABLE AS new_rows"},
		{name("update"), "UPDATE", "\n    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows"},
		{name("delete"), "DELETE", "\n    REFERENCING OLD TABLE AS old_rows"},
		{name("truncate"), "TRUNCATE", ""},
	}
}

func grantSQL(t *Table, role string) string {
	return fmt.Sprintf(`
DO $grant$
BEGIN
    IF NOT (has_table_privilege(%[1]s, %[2]s, 'SELECT') AND has_table_privilege(%[1]s, %[2]s, 'INSERT')
        AND has_table_privilege(%[1]s, %[2]s, 'UPDATE') AND has_table_privilege(%[1]s, %[2]s, 'DELETE')) THEN
        GRANT SELECT, INSERT, UPDATE, DELETE ON %[3]s TO %[4]s;
    END IF;
END
$grant$;`, row.Literal(role), row.Literal(t.SQL), t.SQL, row.Ident(role))
}

// staleCapture drops our triggers from relations that are captured no longer.
func (db *DB) staleCapture(ctx context.Context, tables []backfill.Table) ([]Step, error) {
	want := []string{} // not NULL: nothing is unequal to that
	for _, t := range tables {
		if name, err := backfill.ParseTableName(t.Name); err == nil && t.Captures(db.Side) {
			want = append(want, functionName(name))
		}
	}
	var drops []string
	err := db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
		SELECT format('DROP TRIGGER IF EXISTS %I ON %I.%I;', g.tgname, n.nspname, c.relname)
		  FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid JOIN pg_class c ON c.oid = g.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
		 WHERE p.pronamespace = to_regnamespace($1) AND NOT p.proname = ANY ($2) ORDER BY 1`, db.schema, want)
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
		if code := SQLState(err); code != "55P03" && code != "40P01" {
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

// captureProblem says what is wrong with a table's capture, or "". It looks at
// the table and every partition: statement triggers are not inherited by new ones.
func (db *DB) captureProblem(ctx context.Context, tx pgx.Tx, t *Table) (string, error) {
	var names []string
	for _, tr := range db.triggers() {
		names = append(names, tr.name)
	}
	rows, err := tx.Query(ctx, `
		SELECT r.rel, w.name, g.tgenabled::text, p.proname IS NOT DISTINCT FROM $4 AND p.pronamespace IS NOT DISTINCT FROM to_regnamespace($3)::oid, p.prosrc
		  FROM unnest($1::text[]) r (rel) CROSS JOIN unnest($2::text[]) w (name)
		  LEFT JOIN pg_trigger g ON g.tgrelid = to_regclass(r.rel) AND g.tgname = w.name
		  LEFT JOIN pg_proc p ON p.oid = g.tgfoid`, t.Relations(), names, db.schema, functionName(t.Name))
	if err != nil {
		return "", err
	}
	var problems []string
	var rel, name string
	var enabled, source *string
	var ours *bool
	_, err = pgx.ForEachRow(rows, []any{&rel, &name, &enabled, &ours, &source}, func() error {
		switch {
		case enabled == nil:
			problems = append(problems, fmt.Sprintf("trigger %s is missing on %s", name, rel))
		case *enabled != "A":
			problems = append(problems, fmt.Sprintf("trigger %s on %s is or was disabled", name, rel))
		case ours == nil || !*ours:
			problems = append(problems, fmt.Sprintf("trigger %s on %s calls another function", name, rel))
		case source != nil && !strings.Contains(*source, t.Layout.KeyText("r")):
			problems = append(problems, fmt.Sprintf("the capture function of %s was made for another key", t.Name))
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	slices.Sort(problems)
	problems = slices.Compact(problems)
	if n := len(problems); n > 3 {
		problems = append(problems[:3], fmt.Sprintf("and %d more", n-3))
	}
	return strings.Join(problems, "; "), nil
}

// LastPush is what a side remembers of its last push, and the epoch of that.
type LastPush struct {
	Epoch int
	Batch int64
	Nonce string
}

// LastPush reads what this side remembers of its last push; it fails when the side
// was not set up.
func (db *DB) LastPush(ctx context.Context) (l LastPush, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT epoch, batch, nonce FROM `+db.schema+`.pushed`).Scan(&l.Epoch, &l.Batch, &l.Nonce)
	})
	return l, db.orNotSetUp(err)
}

// Begin starts a new epoch on this side, unless it has begun: the number and nonce
// of the last push and the position are taken over, and what was set aside is
// forgotten. Captured keys stay in the outbox.
func (db *DB) Begin(ctx context.Context, epoch int, batch int64, nonce string, at Position) error {
	return db.in(ctx, writing, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+db.schema+`.pushed SET epoch = $1, batch = $2, nonce = $3 WHERE epoch < $1`, epoch, batch, nonce)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE `+db.schema+`.applied SET seq = $1, nonce = $2`, at.Seq, at.Nonce); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `DELETE FROM `+db.schema+`.held`)
		return err
	})
}
