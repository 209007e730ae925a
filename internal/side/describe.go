package side

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Table is a table as the catalog describes it now.
type Table struct {
	Name       backfill.TableName
	SQL        string // the name quoted
	OID        uint32
	Layout     *row.Layout
	Partitions []string // quoted names of all partitions at all levels
	// Shape changes when rows may have changed, come or gone without an event of
	// theirs: a column was altered, a partition attached or detached, the table replaced.
	Shape   string
	Problem string // why it cannot be used and what to do; "" when it can
}

// Describe reads a table's shape. A table that cannot be used, or is not there,
// is no error: Problem says why.
func (db *DB) Describe(ctx context.Context, name string) (t *Table, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		t, err = describe(ctx, tx, name)
		return err
	})
	return t, err
}

func describe(ctx context.Context, tx pgx.Tx, name string) (*Table, error) {
	parsed, err := backfill.ParseTableName(name)
	if err != nil {
		return nil, err
	}
	t := &Table{Name: parsed, SQL: row.Ident(parsed.Schema, parsed.Name)}
	var kind, persistence string
	var inherits, readable, hidden bool
	err = tx.QueryRow(ctx, `
		SELECT c.oid, c.relkind::text, c.relpersistence::text,
		       EXISTS (SELECT FROM pg_inherits i JOIN pg_class k ON k.oid = i.inhrelid
		                WHERE (i.inhrelid = c.oid OR i.inhparent = c.oid) AND NOT k.relispartition),
		       has_table_privilege(c.oid, 'SELECT'),
		       CASE WHEN c.relrowsecurity THEN row_security_active_for_us.active ELSE false END
		  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace,
		       -- row_security is off here, so ask by rights: owner unless forced, superuser, BYPASSRLS
		       LATERAL (SELECT NOT (r.rolsuper OR r.rolbypassrls OR NOT c.relforcerowsecurity AND pg_has_role(c.relowner, 'USAGE')) AS active
		                  FROM pg_roles r WHERE r.rolname = current_user) row_security_active_for_us
		 WHERE n.nspname = $1 AND c.relname = $2`, parsed.Schema, parsed.Name).
		Scan(&t.OID, &kind, &persistence, &inherits, &readable, &hidden)
	if errors.Is(err, pgx.ErrNoRows) {
		t.Problem = fmt.Sprintf("there is no table %s: create it, or check how its name is written", parsed)
		return t, nil
	}
	if err != nil {
		return nil, err
	}
	switch {
	case kind != "r" && kind != "p":
		t.Problem = fmt.Sprintf("%s is no ordinary or partitioned table: name the table behind it", parsed)
	case persistence == "t":
		t.Problem = fmt.Sprintf("%s is a temporary table", parsed)
	case inherits:
		t.Problem = fmt.Sprintf("%s takes part in inheritance, where a row can be in two tables: use partitioning, or sync each table by itself", parsed)
	case !readable:
		t.Problem = fmt.Sprintf("the agent's role may not read %s: grant it SELECT, or run backfill setup as the owner", parsed)
	case hidden:
		t.Problem = fmt.Sprintf("row security of %s hides rows from the agent's role: give the role BYPASSRLS, or let the table's owner run the agent", parsed)
	}
	if t.Problem != "" {
		return t, nil
	}
	if t.Layout, err = layout(ctx, tx, t.OID); err != nil {
		return nil, err
	}
	if t.Layout.Key == nil {
		t.Problem = fmt.Sprintf("%s has no usable key: add a primary key, or a unique index over NOT NULL columns that is neither partial, deferrable nor over expressions or reg* types", parsed)
		return t, nil
	}
	if kind == "p" {
		rows, err := tx.Query(ctx, `
			SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname)
			  FROM pg_partition_tree($1::oid::regclass) p JOIN pg_class c ON c.oid = p.relid JOIN pg_namespace n ON n.oid = c.relnamespace
			 WHERE p.level > 0 ORDER BY 1`, t.OID)
		if err != nil {
			return nil, err
		}
		if t.Partitions, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return nil, err
		}
	}
	// ALTER COLUMN writes the column's catalog row anew, also when USING changes the
	// values and not the type; VACUUM FULL and TRUNCATE do not. Under another version
	// of a collation keys may be in another order.
	err = tx.QueryRow(ctx, `
		SELECT md5(concat_ws(' ',
		    (SELECT string_agg(concat_ws(':', a.attnum, a.xmin, pg_collation_actual_version(nullif(a.attcollation, 0))), ',' ORDER BY a.attnum) FROM pg_attribute a WHERE a.attrelid = $1::oid AND a.attnum > 0),
		    (SELECT string_agg(relid::oid::text, ',' ORDER BY relid::oid) FROM pg_partition_tree($1::oid::regclass)), $1::oid::text))`, t.OID).Scan(&t.Shape)
	return t, err
}

func layout(ctx context.Context, tx pgx.Tx, oid uint32) (*row.Layout, error) {
	var l row.Layout
	// Domains count as their base type for the cast, enum labels as part of the shape.
	rows, err := tx.Query(ctx, `
		WITH RECURSIVE base AS (
		    SELECT a.attnum, a.atttypid AS typ FROM pg_attribute a WHERE a.attrelid = $1::oid AND a.attnum > 0 AND NOT a.attisdropped
		    UNION ALL
		    SELECT b.attnum, t.typbasetype FROM base b JOIN pg_type t ON t.oid = b.typ WHERE t.typtype = 'd')
		SELECT a.attname::text, format_type(a.atttypid, -1), format_type(a.atttypid, a.atttypmod),
		       a.attidentity = 'a',
		       coalesce((SELECT array_agg(e.enumlabel::text ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid), '{}'),
		       EXISTS (SELECT FROM pg_cast c WHERE c.castsource = t.oid AND c.casttarget = 'text'::regtype AND c.castmethod = 'f'),
		       coalesce((SELECT quote_ident(n.nspname) || '.' || quote_ident(c.collname) FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
		                  WHERE c.oid = a.attcollation AND c.collname <> 'default'), '')
		  FROM pg_attribute a
		  JOIN base b ON b.attnum = a.attnum JOIN pg_type t ON t.oid = b.typ AND t.typtype <> 'd'
		 WHERE a.attrelid = $1::oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
		 ORDER BY a.attnum`, oid)
	if err != nil {
		return nil, err
	}
	l.Columns, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (c row.Column, err error) {
		err = r.Scan(&c.Name, &c.Type, &c.Declared, &c.AlwaysIdentity, &c.Labels, &c.Function, &c.Collation)
		if len(c.Labels) == 0 {
			c.Labels = nil
		}
		return c, err
	})
	if err != nil {
		return nil, err
	}
	rows, err = tx.Query(ctx, `
		WITH best AS (
		    SELECT i.indexrelid, i.indkey, i.indclass, i.indnkeyatts FROM pg_index i
		     WHERE i.indrelid = $1::oid AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL
		       AND NOT EXISTS (SELECT FROM generate_series(0, i.indnkeyatts - 1) k
		                         JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k] JOIN pg_type t ON t.oid = a.atttypid
		                        WHERE NOT a.attnotnull OR a.attgenerated <> '' OR t.typname LIKE 'reg%' AND t.typnamespace = 'pg_catalog'::regnamespace)
		     ORDER BY i.indisprimary DESC, i.indnkeyatts, i.indexrelid LIMIT 1)
		SELECT a.attname::text,
		       CASE WHEN n.nspname <> 'pg_catalog' THEN quote_ident(n.nspname) ELSE '' END,
		       ARRAY(SELECT x.oprname::text FROM pg_amop y JOIN pg_operator x ON x.oid = y.amopopr
		              WHERE y.amopfamily = o.opcfamily AND y.amoplefttype = o.opcintype AND y.amoprighttype = o.opcintype AND y.amoppurpose = 's' ORDER BY y.amopstrategy)
		  FROM best CROSS JOIN generate_series(0, best.indnkeyatts - 1) k
		  JOIN pg_attribute a ON a.attrelid = $1::oid AND a.attnum = best.indkey[k]
		  JOIN pg_opclass i ON i.oid = best.indclass[k]
		  -- the type's default operators, which ORDER BY uses, be the index of another class
		  JOIN pg_opclass o ON o.opcmethod = i.opcmethod AND o.opcintype = i.opcintype AND o.opcdefault
		  JOIN pg_amop m ON m.amopfamily = o.opcfamily AND m.amoplefttype = o.opcintype AND m.amoprighttype = o.opcintype AND m.amopstrategy = 3
		  JOIN pg_operator p ON p.oid = m.amopopr JOIN pg_namespace n ON n.oid = p.oprnamespace
		 ORDER BY k`, oid)
	if err != nil {
		return nil, err
	}
	var name, operators string
	var comparisons []string
	_, err = pgx.ForEachRow(rows, []any{&name, &operators, &comparisons}, func() error {
		l.Key = append(l.Key, name)
		for i := range l.Columns {
			if l.Columns[i].Name == name {
				l.Columns[i].Operators = operators
				if !slices.Equal(comparisons, row.Comparisons) {
					l.Columns[i].Comparisons = comparisons
				}
			}
		}
		return nil
	})
	return &l, err
}

// KeyTypes lists the declared types of a layout's key columns.
func KeyTypes(l *row.Layout) []string {
	var out []string
	for _, c := range l.KeyColumns() {
		out = append(out, c.Declared)
	}
	return out
}

// Relations is the table and its partitions, quoted.
func (t *Table) Relations() []string { return append([]string{t.SQL}, t.Partitions...) }

// Identity is the cluster and timeline a side runs on.
type Identity struct{ System, Timeline string }

// Identity reads the cluster's system identifier, which a failover keeps, and the
// timeline, which it changes; the timeline comes from the WAL's present position,
// because the last checkpoint lags behind a promotion.
func (db *DB) Identity(ctx context.Context) (id Identity, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		id, err = identity(ctx, tx)
		return err
	})
	return id, err
}

func identity(ctx context.Context, tx pgx.Tx) (id Identity, err error) {
	err = tx.QueryRow(ctx, `
		SELECT (SELECT system_identifier::text FROM pg_control_system()), substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)`).
		Scan(&id.System, &id.Timeline)
	return id, err
}

// Meet says which cluster and timeline the side was found on, and found right. From
// then on nothing is read on another: a new connection can lead elsewhere.
func (db *DB) Meet(id Identity) { db.met.Store(&id) }

// same fails when a transaction runs elsewhere than where the side was met.
func (db *DB) same(ctx context.Context, tx pgx.Tx) error {
	met := db.met.Load()
	if met == nil {
		return nil
	}
	now, err := identity(ctx, tx)
	if err != nil {
		return err
	}
	if now != *met {
		return backfill.Errorf(backfill.Refused, "%s has become another cluster or timeline (system %s timeline %s, was %s timeline %s)",
			db.Side, now.System, now.Timeline, met.System, met.Timeline)
	}
	return nil
}

// ProposeOrder sorts tables so that parents come before children by the foreign
// keys between them; tables of a cycle keep the order given.
func (db *DB) ProposeOrder(ctx context.Context, tables []string) (map[string]int, error) {
	oids := map[uint32]string{}
	order := map[string]int{}
	for i, name := range tables {
		t, err := db.Describe(ctx, name)
		if err != nil {
			return nil, err
		}
		if t.Problem != "" {
			return nil, errors.New(t.Problem)
		}
		oids[t.OID] = name
		order[name] = i
	}
	parents := map[string][]string{}
	if err := db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT conrelid, confrelid FROM pg_constraint WHERE contype = 'f' AND conrelid <> confrelid`)
		if err != nil {
			return err
		}
		var child, parent uint32
		_, err = pgx.ForEachRow(rows, []any{&child, &parent}, func() error {
			if oids[child] != "" && oids[parent] != "" {
				parents[oids[child]] = append(parents[oids[child]], oids[parent])
			}
			return nil
		})
		return err
	}); err != nil {
		return nil, err
	}
	depth := map[string]int{}
	var visit func(string, []string) int
	visit = func(name string, path []string) int {
		if d, ok := depth[name]; ok {
			return d
		}
		d := 0
		for _, p := range parents[name] {
			if !strings.Contains("\x00"+strings.Join(path, "\x00")+"\x00", "\x00"+p+"\x00") {
				d = max(d, 1+visit(p, append(path, name)))
			}
		}
		depth[name] = d
		return d
	}
	out := map[string]int{}
	for _, name := range tables {
		out[name] = visit(name, []string{name})*10 + 10
	}
	return out, nil
}
