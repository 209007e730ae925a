package side

import (
	"context"
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

// Page asks for the next rows of a walk in key order.
type Page struct {
	RequestID int64
	Table     string
	Layout    *row.Layout  // the walk's; the table must still have it
	Shape     string       // and this shape
	After     backfill.Key // the resume key, nil at the beginning
	UpTo      backfill.Key // the frozen upper key, or the one row of a row backfill
	Numbered  int64        // the number of the last row staged so far
	Limit     int
	OneRow    bool // only the row of UpTo
}

// Frozen reads where a walk of a table will end: the last key there is now, nil
// for an empty table, with the layout and the snapshot of that moment.
func (db *DB) Frozen(ctx context.Context, table string) (t *Table, upper backfill.Key, snapshot string, err error) {
	err = db.read(ctx, table, func(tx pgx.Tx, d *Table) error {
		t = d
		err := tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text, (SELECT `+d.Layout.KeyText("t")+` FROM `+d.SQL+` t ORDER BY `+descending(d.Layout)+` LIMIT 1)`).
			Scan(&snapshot, &upper)
		return err
	})
	return t, upper, snapshot, err
}

func descending(l *row.Layout) string {
	return strings.ReplaceAll(l.KeyRefs("t"), ", ", " DESC, ") + " DESC"
}

// Unchanged fails with ErrLayout unless a table still has the layout and the shape
// it had when a walk began.
func (db *DB) Unchanged(ctx context.Context, table string, l *row.Layout, shape string) error {
	return db.read(ctx, table, func(_ pgx.Tx, t *Table) error { return t.unchanged(l, shape) })
}

func (t *Table) unchanged(l *row.Layout, shape string) error {
	diff := l.Difference(t.Layout)
	if diff == "" && shape != t.Shape {
		diff = "a column was altered, a partition attached or detached, or the table replaced"
	}
	if diff == "" {
		return nil
	}
	return fmt.Errorf("%w since the walk began: %s", ErrLayout, diff)
}

// read runs fn in a reading transaction with the table locked against changes of
// its shape before the snapshot, and described as it is. When it returns without
// error, no crash of the server can take back what fn has read.
func (db *DB) read(ctx context.Context, table string, fn func(pgx.Tx, *Table) error) error {
	parsed, err := backfill.ParseTableName(table)
	if err != nil {
		return err
	}
	return db.in(ctx, reading, func(tx pgx.Tx) error {
		if err := lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name)); err != nil {
			return err
		}
		if err := db.same(ctx, tx); err != nil {
			return err
		}
		t, err := describe(ctx, tx, table)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		if err := fn(tx, t); err != nil {
			return err
		}
		return db.beat(ctx)
	})
}

// CopyPage writes one page in COPY's binary form to w, in the columns of the
// control database's staged rows: request_id, n, snap, key, row. Rows carry the
// snapshot they were read under, taken with them.
//
// The rows are ordered by the key columns themselves: an output column named id
// holding id::text would sort by text.
func (db *DB) CopyPage(ctx context.Context, p Page, w io.Writer) error {
	return db.read(ctx, p.Table, func(tx pgx.Tx, t *Table) error {
		if err := t.unchanged(p.Layout, p.Shape); err != nil {
			return err
		}
		where := []string{t.Layout.KeyUpTo("t", p.UpTo)}
		switch {
		case p.OneRow:
			where = []string{t.Layout.KeyIs("t", p.UpTo)}
		case p.After != nil:
			where = append(where, t.Layout.KeyAfter("t", p.After))
		}
		sql := fmt.Sprintf(`COPY (
			SELECT %d::bigint, %d + row_number() OVER (), pg_current_snapshot(), p.k, p.r
			  FROM (SELECT %s AS k, %s AS r FROM %s t WHERE %s ORDER BY %s LIMIT %d) p
			) TO STDOUT (FORMAT binary)`,
			p.RequestID, p.Numbered, t.Layout.KeyText("t"), t.Layout.RowText("t"), t.SQL, strings.Join(where, " AND "), t.Layout.KeyRefs("t"), p.Limit)
		_, err := tx.Conn().PgConn().CopyTo(ctx, w, sql)
		return err
	})
}

// CheckKey asks PostgreSQL whether the text of a key can be read as the types of
// the table's key columns.
func (db *DB) CheckKey(ctx context.Context, t *Table, key backfill.Key) error {
	return db.in(ctx, reading, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT `+t.Layout.KeyConstants(key))
		return err
	})
}
