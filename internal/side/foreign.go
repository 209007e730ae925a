package side

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/row"
)

// foreignKey is a foreign key between two tables of the receiver.
type foreignKey struct {
	Name          string
	Child, Parent uint32
	ParentSQL     string
	ChildSQL      string
	Columns       []string // of the child
	Refs          []string // of the parent, in the same order
	Operators     []string // parent = child, as OPERATOR(schema.name)
	OnDelete      string
}

func (b *batch) foreignKeys(ctx context.Context, tx pgx.Tx, where string, oid uint32) ([]foreignKey, error) {
	rows, err := tx.Query(ctx, `
		SELECT c.conname::text, c.conrelid, c.confrelid,
		       (SELECT quote_ident(n.nspname) || '.' || quote_ident(k.relname) FROM pg_class k JOIN pg_namespace n ON n.oid = k.relnamespace WHERE k.oid = c.confrelid),
		       (SELECT quote_ident(n.nspname) || '.' || quote_ident(k.relname) FROM pg_class k JOIN pg_namespace n ON n.oid = k.relnamespace WHERE k.oid = c.conrelid),
		       ARRAY(SELECT a.attname::text FROM unnest(c.conkey) WITH ORDINALITY u (n, o) JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = u.n ORDER BY u.o),
		       ARRAY(SELECT a.attname::text FROM unnest(c.confkey) WITH ORDINALITY u (n, o) JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = u.n ORDER BY u.o),
		       ARRAY(SELECT format('OPERATOR(%I.%s)', n.nspname, p.oprname) FROM unnest(c.conpfeqop) WITH ORDINALITY u (op, o)
		               JOIN pg_operator p ON p.oid = u.op JOIN pg_namespace n ON n.oid = p.oprnamespace ORDER BY u.o),
		       c.confdeltype::text
		  FROM pg_constraint c WHERE c.contype = 'f' AND c.conparentid = 0 AND `+where, oid)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[foreignKey])
}

// holdOrphans sets aside the upserts whose parent is neither in the receiver's
// table nor among the upserts beside them, and returns how many. It is set-based:
// a backfill of children before their parents can bring a great many.
func (b *batch) holdOrphans(ctx context.Context, groups []group) (int64, error) {
	total := int64(0)
	for {
		// A row that was a parent may now be held itself: go on until a round finds none.
		n, err := b.holdOrphansOnce(ctx, groups)
		total += n
		if err != nil || n == 0 {
			b.setAside = b.setAside || total > 0
			return total, err
		}
	}
}

func (b *batch) holdOrphansOnce(ctx context.Context, groups []group) (int64, error) {
	total := int64(0)
	for i := range groups {
		g := &groups[i]
		if g.upserts == 0 {
			continue
		}
		keys, err := b.foreignKeys(ctx, b.tx, `c.conrelid = $1`, g.target.OID)
		if err != nil {
			return 0, err
		}
		for _, fk := range keys {
			n, err := b.holdOrphansOf(ctx, groups, g, fk)
			if err != nil {
				return 0, err
			}
			total += n
			g.upserts -= n
		}
	}
	return total, nil
}

func (b *batch) holdOrphansOf(ctx context.Context, groups []group, g *group, fk foreignKey) (int64, error) {
	var values, missing, inTable []string
	for n, column := range fk.Columns {
		at := indexOf(g.layout, column)
		if at == 0 {
			return 0, nil // not sent, so its value is the receiver's own
		}
		t, _ := g.target.Layout.Column(column)
		value := fmt.Sprintf(`(i."row")[%d]`, at)
		missing = append(missing, value+" IS NOT NULL")
		values = append(values, t.Read(value))
		inTable = append(inTable, "p."+row.Ident(fk.Refs[n])+" "+fk.Operators[n]+" "+values[n])
	}
	missing = append(missing, fmt.Sprintf("NOT EXISTS (SELECT FROM %s p WHERE %s)", fk.ParentSQL, strings.Join(inTable, " AND ")))
	for _, parent := range groups {
		if parent.target.OID != fk.Parent {
			continue
		}
		beside := []string{fmt.Sprintf("j.table_id = %d AND j.layout_id = %d AND j.op IN ('c', 'u')", parent.tableID, parent.layoutID)}
		for n, ref := range fk.Refs {
			t, ok := parent.target.Layout.Column(ref)
			at := indexOf(parent.layout, ref)
			if !ok || at == 0 {
				beside = append(beside, "false")
				break
			}
			beside = append(beside, t.Read(fmt.Sprintf(`(j."row")[%d]`, at))+" "+fk.Operators[n]+" "+values[n])
		}
		missing = append(missing, "NOT EXISTS (SELECT FROM pg_temp.incoming j WHERE "+strings.Join(beside, " AND ")+")")
	}
	reason := fmt.Sprintf("waits for its row in %s (foreign key %s)", fk.ParentSQL, fk.Name)
	held := int64(0)
	err := pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
		WITH o AS (SELECT i.id FROM pg_temp.incoming i WHERE i.table_id = $1 AND i.layout_id = $2 AND i.op IN ('c', 'u') AND `+strings.Join(missing, " AND ")+`),
		     i AS (DELETE FROM pg_temp.incoming i USING o WHERE i.id = o.id RETURNING i.*)
		INSERT INTO `+b.db.schema+`.held AS h (`+asideColumns+`, state, reason) SELECT `+asideValues+`, 'held', $3 FROM i
		ON CONFLICT (seq, key) DO UPDATE SET reason = excluded.reason, unseen = excluded.unseen`, g.tableID, g.layoutID, reason)
		held = tag.RowsAffected()
		return err
	})
	if err != nil && refusesRows(err) {
		return 0, nil // a value that cannot be read is found by halving
	}
	return held, err
}

// indexOf is a column's position in a layout counted from 1, 0 when it is not in it.
func indexOf(l *row.Layout, name string) int {
	for i, c := range l.Columns {
		if c.Name == name {
			return i + 1
		}
	}
	return 0
}

// holdReferred holds the deletes of rows to which rows of a synced table will still
// refer, where deleting would cascade. What the source deleted there comes, or came,
// as deletes of its own; a row that stays here may have moved to another parent
// meanwhile, in a change that has not come yet, and the cascade would take along
// what nobody has touched.
func (b *batch) holdReferred(ctx context.Context, tx pgx.Tx, groups []group) error {
	for {
		// A row whose delete is held stays, and so may refer to another: go on until a
		// round finds none.
		held := int64(0)
		for i := range groups {
			if groups[i].deletes == 0 {
				continue
			}
			keys, err := b.foreignKeys(ctx, tx, `c.confdeltype = 'c' AND c.confrelid = $1`, groups[i].target.OID)
			if err != nil {
				return err
			}
			for _, fk := range keys {
				n, err := b.holdReferredBy(ctx, tx, groups, &groups[i], fk)
				if err != nil {
					return err
				}
				held += n
			}
		}
		if held == 0 {
			return nil
		}
		b.setAside = true
	}
}

func (b *batch) holdReferredBy(ctx context.Context, tx pgx.Tx, groups []group, g *group, fk foreignKey) (int64, error) {
	if synced, err := b.syncs(ctx, fk.Child); err != nil || !synced {
		return 0, err
	}
	stays := []string{fk.refersTo("c", "t")}
	for _, child := range groups {
		if child.target.OID == fk.Child {
			stays = append(stays, fmt.Sprintf(`NOT EXISTS (SELECT FROM pg_temp.incoming j WHERE j.table_id = %d AND j.op = 'd' AND %s)`,
				child.tableID, child.target.Layout.KeyEquals("c", "j.key")))
			break
		}
	}
	tag, err := tx.Exec(ctx, fmt.Sprintf(`
		WITH o AS (SELECT i.id FROM pg_temp.incoming i JOIN %s t ON %s
		            WHERE i.table_id = $1 AND i.layout_id IS NOT DISTINCT FROM nullif($2::bigint, 0) AND i.op = 'd' AND EXISTS (SELECT FROM %s c WHERE %s)),
		     i AS (DELETE FROM pg_temp.incoming i USING o WHERE i.id = o.id RETURNING i.*)
		INSERT INTO %s.held AS h (%s, state, reason) SELECT %s, 'held', $3 FROM i
		ON CONFLICT (seq, key) DO UPDATE SET reason = excluded.reason, unseen = excluded.unseen`,
		g.target.SQL, g.target.Layout.KeyEquals("t", "i.key"), fk.ChildSQL, strings.Join(stays, " AND "), b.db.schema, asideColumns, asideValues),
		g.tableID, g.layoutID, fmt.Sprintf("waits until no row in %s refers to it (foreign key %s)", fk.ChildSQL, fk.Name))
	return tag.RowsAffected(), err
}

// cascading is the SQL for "deleting t would delete rows of another synced table".
func (b *batch) cascading(ctx context.Context, g *group) (string, error) {
	keys, err := b.foreignKeys(ctx, b.tx, `c.confdeltype = 'c' AND c.confrelid <> c.conrelid AND c.confrelid = $1`, g.target.OID)
	if err != nil {
		return "", err
	}
	parts := []string{"false"}
	for _, fk := range keys {
		synced, err := b.syncs(ctx, fk.Child)
		if err != nil {
			return "", err
		}
		if synced {
			parts = append(parts, fmt.Sprintf("EXISTS (SELECT FROM %s c WHERE %s)", fk.ChildSQL, fk.refersTo("c", "t")))
		}
	}
	return strings.Join(parts, " OR "), nil
}

// syncs reports whether deletes of a table's rows come from the other side.
func (b *batch) syncs(ctx context.Context, oid uint32) (bool, error) {
	if b.synced == nil {
		var names []string
		for _, t := range b.tables {
			if t.Active && t.Delete && len(t.CapturedFrom) > 0 && !t.Captures(b.db.Side) {
				names = append(names, t.Relation(b.db.Side))
			}
		}
		rows, err := b.tx.Query(ctx, `SELECT to_regclass(name)::oid FROM unnest($1::text[]) name WHERE to_regclass(name) IS NOT NULL`, names)
		if err != nil {
			return false, err
		}
		oids, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
		if err != nil {
			return false, err
		}
		b.synced = map[uint32]bool{}
		for _, oid := range oids {
			b.synced[oid] = true
		}
	}
	return b.synced[oid], nil
}

// refersTo is the SQL for "row child refers to row parent".
func (fk foreignKey) refersTo(child, parent string) string {
	var on []string
	for n, column := range fk.Columns {
		on = append(on, parent+"."+row.Ident(fk.Refs[n])+" "+fk.Operators[n]+" "+child+"."+row.Ident(column))
	}
	return strings.Join(on, " AND ")
}

// cascades reports whether deleting rows of a table could change other rows.
func (b *batch) cascades(ctx context.Context, tx pgx.Tx, g *group) (bool, error) {
	keys, err := b.foreignKeys(ctx, tx, `c.confdeltype IN ('c', 'n', 'd') AND c.confrelid = $1`, g.target.OID)
	return len(keys) > 0, err
}

// referenced is the SQL for "another row refers to t".
func (b *batch) referenced(ctx context.Context, g *group) (string, error) {
	keys, err := b.foreignKeys(ctx, b.tx, `c.confrelid = $1`, g.target.OID)
	if err != nil {
		return "", err
	}
	parts := []string{"false"}
	for _, fk := range keys {
		parts = append(parts, fmt.Sprintf("EXISTS (SELECT FROM %s c WHERE %s)", fk.ChildSQL, fk.refersTo("c", "t")))
	}
	return strings.Join(parts, " OR "), nil
}
