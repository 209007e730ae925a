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
	Own        *row.Layout // as the table has it, where a mapping makes another of it
	Partitions []string    // quoted names of all partitions at all levels
	Ancestors  []string    // quoted names of the tables it is a partition of
	Ruled      bool        // it has rules for INSERT or UPDATE
	Unwritable string      // what the agent's role lacks to write it, and how it gets that; "" for nothing
	// Shape changes when rows may have changed, come or gone without an event of
	// theirs: a column was altered, a partition attached or detached, the table replaced.
	Shape   string
	Problem string // why it cannot be used and what to do; "" when it can
}

// kinds are the relations that are no tables, in the catalog's letters.
var kinds = map[string]string{"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence",
	"i": "an index", "I": "an index", "c": "a composite type", "t": "a TOAST table"}

// Unfit says why a table that is configured like this cannot be synced on a side, or
// "". all are the site's tables.
func (t *Table) Unfit(c backfill.Table, side string, all []backfill.Table) string {
	switch {
	case t.Problem != "":
		return t.Problem
	case t.Ruled && c.Receives(side):
		return fmt.Sprintf("%s has rules for INSERT or UPDATE, with which rows cannot be written here: drop or disable them, triggers do the same", t.Name)
	}
	if c.Receives(side) && t.Unwritable != "" {
		return t.Unwritable
	}
	// The one that was configured first stays.
	for _, other := range all {
		name := other.Relation(side)
		if other.ID < c.ID && slices.Contains(t.Ancestors, name) {
			return fmt.Sprintf("%s is a partition of %s, which is configured and sends the rows of all its partitions", t.Name, name)
		}
		if other.ID < c.ID && slices.Contains(t.Partitions, name) {
			return fmt.Sprintf("%s, a partition of %s, is configured: remove it first, the whole table sends its rows", name, t.Name)
		}
	}
	if len(t.Ancestors) > 0 && c.Captures(side) {
		root := t.Ancestors[len(t.Ancestors)-1]
		return fmt.Sprintf("%s is a partition of %s, and what is written through that is not captured here: configure %[2]s", t.Name, root)
	}
	return ""
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
	return describeKeyed(ctx, tx, name, nil)
}

// describeKeyed describes a table whose key are those columns, nil for the one it has.
func describeKeyed(ctx context.Context, tx pgx.Tx, name string, columns []string) (*Table, error) {
	parsed, err := backfill.ParseTableName(name)
	if err != nil {
		return nil, err
	}
	t := &Table{Name: parsed, SQL: row.Ident(parsed.Schema, parsed.Name)}
	var kind, persistence, role string
	var lacks []string
	var system, ours, inherits, foreign, readable, hidden bool
	err = tx.QueryRow(ctx, `
		SELECT c.oid, c.relkind::text, c.relpersistence::text,
		       n.nspname ~ '^(pg_catalog|pg_toast|information_schema)$', coalesce(obj_description(n.oid, 'pg_namespace') LIKE 'Backfill: site %', false),
		       EXISTS (SELECT FROM pg_inherits i JOIN pg_class k ON k.oid = i.inhrelid
		                WHERE (i.inhrelid = c.oid OR i.inhparent = c.oid) AND NOT k.relispartition),
		       EXISTS (SELECT FROM pg_partition_tree(c.oid) p JOIN pg_class k ON k.oid = p.relid WHERE k.relkind = 'f'),
		       ARRAY(SELECT format('%I.%I', s.nspname, k.relname) FROM pg_partition_ancestors(c.oid) p JOIN pg_class k ON k.oid = p.relid
		               JOIN pg_namespace s ON s.oid = k.relnamespace WHERE k.oid <> c.oid),
		       EXISTS (SELECT FROM pg_rewrite w WHERE w.ev_class = c.oid AND w.ev_type IN ('2', '3') AND w.ev_enabled <> 'D'),
		       quote_ident(current_user), has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),
		       ARRAY(SELECT p FROM unnest(ARRAY['INSERT', 'UPDATE', 'DELETE']) p WHERE NOT has_table_privilege(c.oid, p)),
		       CASE WHEN c.relrowsecurity THEN row_security_active_for_us.active ELSE false END
		  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace,
		       -- row_security is off here, so ask by rights: owner unless forced, superuser, BYPASSRLS
		       LATERAL (SELECT NOT (r.rolsuper OR r.rolbypassrls OR NOT c.relforcerowsecurity AND pg_has_role(c.relowner, 'USAGE')) AS active
		                  FROM pg_roles r WHERE r.rolname = current_user) row_security_active_for_us
		 WHERE n.nspname = $1 AND c.relname = $2`, parsed.Schema, parsed.Name).
		Scan(&t.OID, &kind, &persistence, &system, &ours, &inherits, &foreign, &t.Ancestors, &t.Ruled, &role, &readable, &lacks, &hidden)
	if errors.Is(err, pgx.ErrNoRows) {
		t.Problem = fmt.Sprintf("there is no table %s: create it, or check how its name is written", parsed)
		return t, nil
	}
	if err != nil {
		return nil, err
	}
	switch {
	case system:
		t.Problem = fmt.Sprintf("%s is one of PostgreSQL's own tables: they are not synced", parsed)
	case ours:
		t.Problem = fmt.Sprintf("%s is one of Backfill's own tables: they are not synced", parsed)
	case kind != "r" && kind != "p":
		t.Problem = fmt.Sprintf("%s is %s, no ordinary or partitioned table: name the table behind it", parsed, kinds[kind])
	case foreign:
		t.Problem = fmt.Sprintf("%s has a partition that is a foreign table, whose changes cannot be captured: detach it, or sync the other partitions' tables by themselves", parsed)
	case persistence == "t":
		t.Problem = fmt.Sprintf("%s is a temporary table", parsed)
	case inherits:
		t.Problem = fmt.Sprintf("%s takes part in inheritance, where a row can be in two tables: use partitioning, or sync each table by itself", parsed)
	case !readable:
		t.Problem = fmt.Sprintf("the agent's role %s may not read %s: as the owner run GRANT USAGE ON SCHEMA %s TO %s; GRANT SELECT ON %s TO %s (and INSERT, UPDATE, DELETE where it receives); or backfill setup with --table %s",
			role, parsed, row.Ident(parsed.Schema), role, t.SQL, role, parsed)
	case hidden:
		t.Problem = fmt.Sprintf("row security of %s hides rows from the agent's role: give the role BYPASSRLS, or let the table's owner run the agent", parsed)
	}
	if len(lacks) > 0 {
		t.Unwritable = fmt.Sprintf("the agent's role %s may not write %s: as the owner run GRANT %s ON %s TO %s; or run backfill setup again", role, parsed, strings.Join(lacks, ", "), t.SQL, role)
	}
	if t.Problem != "" {
		return t, nil
	}
	if t.Layout, err = layout(ctx, tx, t.OID); err != nil {
		return nil, err
	}
	t.Own = t.Layout
	unusable, err := key(ctx, tx, t.OID, t.Layout, columns)
	if err != nil {
		return nil, err
	}
	if t.Layout.Key == nil && columns != nil {
		t.Problem = fmt.Sprintf("%s has no usable key (%s)%s: add a unique index over these columns, NOT NULL, that is neither partial nor deferrable", parsed, strings.Join(columns, ", "), unusable)
		return t, nil
	}
	if t.Layout.Key == nil {
		t.Problem = fmt.Sprintf("%s has no usable key%s: add a primary key, or a unique index over NOT NULL columns that is neither partial, deferrable nor over expressions or reg* types", parsed, unusable)
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
		    SELECT b.attnum, t.typbasetype FROM base b JOIN pg_type t ON t.oid = b.typ WHERE t.typtype = 'd'),
		-- behind domains, and behind an array of them
		within (attnum, typ, many) AS (
		    SELECT b.attnum, b.typ, false FROM base b JOIN pg_type t ON t.oid = b.typ WHERE t.typtype <> 'd'
		    UNION ALL
		    SELECT w.attnum, CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.typelem END, true FROM within w JOIN pg_type t ON t.oid = w.typ
		     WHERE t.typtype = 'd' OR t.typinput = 'array_in'::regproc AND NOT w.many),
		cut (typ) AS (VALUES ('varchar'::regtype), ('bpchar'), ('bit'), ('varbit'))
		SELECT a.attname::text, format_type(a.atttypid, -1), format_type(a.atttypid, a.atttypmod),
		       a.attidentity = 'a',
		       coalesce((SELECT array_agg(e.enumlabel::text ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid), '{}'),
		       EXISTS (SELECT FROM pg_cast c WHERE c.castsource = t.oid AND c.casttarget = 'text'::regtype AND c.castmethod = 'f'),
		       -- the first of these that is not read by a function of its own
		       coalesce((SELECT nullif(v.via, 'text') FROM unnest(ARRAY['text', 'varchar', 'bpchar']) WITH ORDINALITY v (via, n)
		                  WHERE NOT EXISTS (SELECT FROM pg_cast c WHERE c.castsource = v.via::regtype AND c.casttarget = t.oid AND c.castmethod = 'f') ORDER BY v.n LIMIT 1), ''),
		       t.oid = '"char"'::regtype,
		       coalesce((SELECT quote_ident(n.nspname) || '.' || quote_ident(c.collname) FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
		                  WHERE c.oid = a.attcollation AND (c.collname <> 'default' OR a.attcollation <> d.typcollation)), ''),
		       coalesce(nullif(w.whole, format_type(a.atttypid, -1)), ''),
		       w.whole IS NULL AND (d.typtype <> 'b' OR d.typelem <> 0) AND EXISTS (
		           WITH RECURSIVE part (typ) AS (SELECT a.atttypid UNION SELECT u.typ FROM part p JOIN pg_type t ON t.oid = p.typ, LATERAL (
		               SELECT t.typbasetype UNION SELECT t.typelem UNION SELECT c.atttypid FROM pg_attribute c WHERE c.attrelid = t.typrelid AND c.attnum > 0) u (typ) WHERE u.typ <> 0)
		           SELECT FROM part JOIN cut USING (typ))
		  FROM pg_attribute a
		  JOIN pg_type d ON d.oid = a.atttypid
		  JOIN base b ON b.attnum = a.attnum JOIN pg_type t ON t.oid = b.typ AND t.typtype <> 'd'
		  LEFT JOIN (SELECT within.attnum, format_type(typ, -1) || CASE WHEN many THEN '[]' ELSE '' END AS whole FROM within JOIN cut USING (typ)) w ON w.attnum = a.attnum
		 WHERE a.attrelid = $1::oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
		 ORDER BY a.attnum`, oid)
	if err != nil {
		return nil, err
	}
	l.Columns, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (c row.Column, err error) {
		err = r.Scan(&c.Name, &c.Type, &c.Declared, &c.AlwaysIdentity, &c.Labels, &c.Function, &c.Via, &c.Byte, &c.Collation, &c.Whole, &c.Parts)
		if len(c.Labels) == 0 {
			c.Labels = nil
		}
		return c, err
	})
	return &l, err
}

// key finds the key of a table for its layout, over the columns wanted, if any: Key
// stays nil when there is none; unusable then says what keeps each unique index from
// being one.
func key(ctx context.Context, tx pgx.Tx, oid uint32, l *row.Layout, wanted []string) (unusable string, err error) {
	// A column's equality must be the index's own: else two rows that the index tells
	// apart could be one key, and a walk would skip one of them.
	rows, err := tx.Query(ctx, `
		SELECT i.indexrelid, i.indexrelid::regclass::text, coalesce(CASE
		           WHEN NOT i.indisvalid THEN 'is not valid' WHEN NOT i.indimmediate THEN 'is deferrable' WHEN i.indpred IS NOT NULL THEN 'is partial'
		           WHEN i.indexprs IS NOT NULL THEN 'is over an expression' ELSE (
		       SELECT format(CASE WHEN NOT a.attnotnull THEN 'has column %1$I, which may be NULL' WHEN a.attgenerated <> '' THEN 'has column %1$I, which is generated'
		                WHEN EXISTS (WITH RECURSIVE part (typ) AS (
		                        SELECT a.atttypid UNION SELECT u.typ FROM part p JOIN pg_type t ON t.oid = p.typ, LATERAL (
		                            SELECT t.typbasetype UNION SELECT t.typelem UNION SELECT c.atttypid FROM pg_attribute c WHERE c.attrelid = t.typrelid AND c.attnum > 0
		                            UNION SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)) u (typ) WHERE u.typ <> 0)
		                    SELECT FROM part p JOIN pg_type t ON t.oid = p.typ WHERE t.typname LIKE 'reg%' AND t.typnamespace = 'pg_catalog'::regnamespace)
		                THEN 'has column %1$I, whose reg* type is written as a name that can change'
		                WHEN i.indcollation[k] <> a.attcollation AND EXISTS (SELECT FROM pg_collation c WHERE c.oid IN (i.indcollation[k], a.attcollation) AND NOT c.collisdeterministic)
		                THEN 'has column %1$I under a collation that holds other values for equal than the column''s'
		                WHEN NOT EXISTS (SELECT FROM pg_opclass o JOIN pg_amop m ON m.amopfamily = o.opcfamily AND m.amoplefttype = o.opcintype AND m.amoprighttype = o.opcintype AND m.amopstrategy = 3
		                                   JOIN pg_opclass x ON x.oid = i.indclass[k] AND x.opcintype = o.opcintype AND x.opcmethod = o.opcmethod
		                                   JOIN pg_amop y ON y.amopfamily = x.opcfamily AND y.amopstrategy = 3 AND y.amopopr = m.amopopr WHERE o.opcdefault)
		                THEN 'has column %1$I with an equality that is not its type''s' END, a.attname) AS why
		         FROM generate_series(0, i.indnkeyatts - 1) k JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k]
		        ORDER BY why LIMIT 1) END, ''),
		       ARRAY(SELECT a.attname::text FROM generate_series(0, i.indnkeyatts - 1) k JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k] ORDER BY 1)
		  FROM pg_index i WHERE i.indrelid = $1::oid AND i.indisunique ORDER BY i.indisprimary DESC, i.indnkeyatts, i.indexrelid`, oid)
	if err != nil {
		return "", err
	}
	var index, best uint32
	var name, why string
	var columns []string
	_, err = pgx.ForEachRow(rows, []any{&index, &name, &why, &columns}, func() error {
		switch {
		case wanted != nil && !slices.Equal(columns, slices.Sorted(slices.Values(wanted))):
		case why != "":
			unusable += "; " + name + " " + why
		case best == 0:
			best = index
		}
		return nil
	})
	if err != nil || best == 0 {
		if unusable != "" {
			unusable = " (" + unusable[2:] + ")"
		}
		return unusable, err
	}
	rows, err = tx.Query(ctx, `
		SELECT a.attname::text,
		       CASE WHEN n.nspname <> 'pg_catalog' THEN quote_ident(n.nspname) ELSE '' END,
		       ARRAY(SELECT x.oprname::text FROM pg_amop y JOIN pg_operator x ON x.oid = y.amopopr
		              WHERE y.amopfamily = o.opcfamily AND y.amoplefttype = o.opcintype AND y.amoprighttype = o.opcintype AND y.amoppurpose = 's' ORDER BY y.amopstrategy)
		  FROM pg_index best CROSS JOIN generate_series(0, best.indnkeyatts - 1) k
		  JOIN pg_attribute a ON a.attrelid = best.indrelid AND a.attnum = best.indkey[k]
		  -- OFFSET 0: one after the other by index; all at once take longer than what is told
		  CROSS JOIN LATERAL (SELECT opcmethod, opcintype FROM pg_opclass WHERE oid = best.indclass[k] OFFSET 0) i
		  -- the type's default operators, which ORDER BY uses, be the index of another class
		  CROSS JOIN LATERAL (SELECT opcfamily, opcintype FROM pg_opclass WHERE opcmethod = i.opcmethod AND opcintype = i.opcintype AND opcdefault OFFSET 0) o
		  CROSS JOIN LATERAL (SELECT amopopr FROM pg_amop WHERE amopfamily = o.opcfamily AND amoplefttype = o.opcintype AND amoprighttype = o.opcintype AND amopstrategy = 3 OFFSET 0) m
		  JOIN pg_operator p ON p.oid = m.amopopr JOIN pg_namespace n ON n.oid = p.oprnamespace
		 WHERE best.indexrelid = $1::oid
		 ORDER BY k`, best)
	if err != nil {
		return "", err
	}
	var operators string
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
	if wanted != nil {
		l.Key = wanted
	}
	return "", err
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
func (t *Table) Relations() []string {
	return append([]string{row.Ident(t.Name.Schema, t.Name.Name)}, t.Partitions...)
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
