package side

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// ErrLayout says that a table is not as it was when its rows began to be read.
var ErrLayout = errors.New("the table has changed")

// ErrNotThere says that a receiver has not applied yet what it is asked about.
var ErrNotThere = errors.New("the changes asked about are not applied yet")

// Page asks for the next rows of a walk in key order.
type Page struct {
	RequestID int64
	Table     string
	TableID   int32
	Layout    *row.Layout  // the walk's; the table must still have it
	Shape     string       // and this shape
	After     backfill.Key // the resume key, nil at the beginning
	UpTo      backfill.Key // the frozen upper key, or the one row of a row backfill
	Numbered  int64        // the number of the last row staged so far
	Limit     int
	Bytes     int64 // the most bytes of a page, beyond one row
	OneRow    bool  // only the row of UpTo
	// Keys are the only rows wanted, whatever After and UpTo; nil for all between those.
	Keys []backfill.Key
}

// Frozen reads where a walk of a table will end: the last key there is now, nil
// for an empty table, with the layout and the snapshot of that moment, and up to
// which of the other side's changes all have been seen here.
func (db *DB) Frozen(ctx context.Context, table string) (t *Table, upper backfill.Key, snapshot string, seen int64, err error) {
	_, err = db.read(ctx, Relation{Name: table}, func(tx pgx.Tx, d *Table) error {
		t = d
		err := tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text, (SELECT `+d.Layout.KeyText("t")+` FROM `+d.SQL+` t ORDER BY `+descending(d.Layout)+` LIMIT 1), `+db.seen()).
			Scan(&snapshot, &upper, &seen)
		return db.orNotSetUp(err)
	})
	return t, upper, snapshot, seen, err
}

func descending(l *row.Layout) string {
	return strings.ReplaceAll(l.KeyRefs("t"), ", ", " DESC, ") + " DESC"
}

// Unchanged fails with ErrLayout unless a table still has the layout and the shape
// it had when a walk began.
func (db *DB) Unchanged(ctx context.Context, table string, l *row.Layout, shape string) error {
	_, err := db.read(ctx, Relation{Name: table}, func(_ pgx.Tx, t *Table) error { return t.unchanged(l, shape) })
	return err
}

func (t *Table) unchanged(l *row.Layout, shape string) error {
	return t.unchangedSince(l, shape, "the walk began")
}

func (t *Table) unchangedSince(l *row.Layout, shape, when string) error {
	diff := l.Difference(t.Layout)
	if diff == "" && shape != t.Shape {
		diff = "a column was altered, a partition attached or detached, or the table replaced"
	}
	if diff == "" {
		return nil
	}
	return fmt.Errorf("%w since %s: %s", ErrLayout, when, diff)
}

// read runs fn in a reading transaction with the table locked against changes of
// its shape before the snapshot, and described as it is. When it returns without
// error, no crash of the server can take back what fn has read; reads is the number
// of that read.
func (db *DB) read(ctx context.Context, r Relation, fn func(pgx.Tx, *Table) error) (reads int64, err error) {
	parsed, err := backfill.ParseTableName(r.Name)
	if err != nil {
		return 0, err
	}
	as := db.met.Load()
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if err := lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name)); err != nil {
			return err
		}
		if err := db.same(ctx, tx, as); err != nil {
			return err
		}
		t, err := describeRelation(ctx, tx, r)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		if err := fn(tx, t); err != nil {
			return err
		}
		reads, err = db.beat(ctx, as)
		return err
	})
	return reads, err
}

// CopyPage writes one page in COPY's binary form to w, in the columns of the
// control database's staged rows: request_id, n, snap, key, row, stamp. Rows carry the
// snapshot they were read under, taken with them, and with it how far the other
// side's changes of them had been seen; reads is the number of the read.
//
// The rows are ordered by the key columns themselves: an output column named id
// holding id::text would sort by text.
func (db *DB) CopyPage(ctx context.Context, p Page, w io.Writer) (reads int64, err error) {
	return db.read(ctx, Relation{Name: p.Table}, func(tx pgx.Tx, t *Table) error {
		if err := t.unchanged(p.Layout, p.Shape); err != nil {
			return err
		}
		from, where := t.SQL+" t", []string{t.Layout.KeyUpTo("t", p.UpTo)}
		switch {
		case p.Keys != nil:
			text, err := json.Marshal(p.Keys)
			if err != nil {
				return err
			}
			from, where = fmt.Sprintf("%s k JOIN %s t ON %s", listedKeys(string(text)), t.SQL, t.Layout.KeyEquals("t", "k.key")), []string{"true"}
		case p.OneRow:
			where = []string{t.Layout.KeyIs("t", p.UpTo)}
		case p.After != nil:
			where = append(where, t.Layout.KeyAfter("t", p.After))
		}
		stamp, err := db.stampOfRows(ctx, tx, t, p.TableID, "p.k")
		if err != nil {
			return err
		}
		rows := fmt.Sprintf(`%s WHERE %s ORDER BY %s LIMIT %d`, from, strings.Join(where, " AND "), t.Layout.KeyRefs("t"), p.Limit)
		if p.Bytes > 0 && p.Limit > 1 {
			large, err := stored(ctx, tx, t)
			if err != nil {
				return err
			}
			if large {
				rows = within(t.Layout, rows, p.Bytes)
			}
		}
		sql := fmt.Sprintf(`COPY (
			SELECT %d::bigint, %d + row_number() OVER (), pg_current_snapshot(), p.k, p.r, %s
			  FROM (SELECT %s AS k, %s AS r FROM %s) p
			) TO STDOUT (FORMAT binary)`,
			p.RequestID, p.Numbered, stamp, t.Layout.KeyText("t"), t.Layout.RowText("t"), rows)
		_, err = tx.Conn().PgConn().CopyTo(ctx, w, sql)
		return err
	})
}

// stored reports whether a table stores values outside its rows. If it does not, a
// row has a few kilobytes at most, and the page's bound on rows bounds its bytes.
func stored(ctx context.Context, tx pgx.Tx, t *Table) (large bool, err error) {
	err = tx.QueryRow(ctx, `
		SELECT EXISTS (SELECT FROM pg_class c WHERE (c.oid = $1 OR c.oid IN (SELECT relid FROM pg_partition_tree($1::oid::regclass) WHERE isleaf))
		                  AND c.reltoastrelid <> 0 AND pg_relation_size(c.reltoastrelid) > 0)`, t.OID).Scan(&large)
	return large, err
}

// within cuts a page where its rows pass a number of bytes; the first row stays,
// however large. The lengths of values are looked up, the values are not read.
func within(l *row.Layout, rows string, bytes int64) string {
	return fmt.Sprintf(`(SELECT t.*, sum(%s) OVER (ORDER BY %s ROWS UNBOUNDED PRECEDING) AS backfill$bytes, row_number() OVER (ORDER BY %[2]s) AS backfill$n
		FROM %[3]s) t WHERE t.backfill$bytes <= %[4]d OR t.backfill$n = 1`, l.Sizes("t"), l.KeyRefs("t"), rows, bytes)
}

// CheckKey asks PostgreSQL whether the text of a key can be read as the types of
// the table's key columns.
func (db *DB) CheckKey(ctx context.Context, t *Table, key backfill.Key) error {
	return db.in(ctx, reading, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT `+t.Layout.KeyConstants(key))
		return err
	})
}
