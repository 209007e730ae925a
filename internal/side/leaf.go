package side

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Leaf is a key range, half open, with what proves what it holds: how many rows, and
// the sums of two 64-bit words of a SHA-256 over each row's text, which do not depend
// on order. A row's text is the output of its text[]: NULL, the empty text and
// commas in values are told apart. Two leaves with equal counts and sums hold equal rows.
type Leaf struct {
	After, UpTo backfill.Key // After nil: from the beginning
	Rows        int64
	Sum1, Sum2  string // numeric
}

// Equal reports whether two leaves hold the same rows, whatever their ranges.
func (l Leaf) Equal(o Leaf) bool { return l.Rows == o.Rows && l.Sum1 == o.Sum1 && l.Sum2 == o.Sum2 }

// NextLeaf reads the leaf of up to rows rows after a key and not beyond last, as they
// are on the source, and the snapshot it was read under. The table must still have
// the layout and shape given. A leaf without rows says that there are no more.
func (db *DB) NextLeaf(ctx context.Context, table string, l *row.Layout, shape string, after, last backfill.Key, rows int) (leaf Leaf, snapshot string, err error) {
	_, err = db.read(ctx, table, func(tx pgx.Tx, t *Table) error {
		if err := t.unchanged(l, shape); err != nil {
			return err
		}
		where := t.Layout.KeyUpTo("t", last)
		if after != nil {
			where += " AND " + t.Layout.KeyAfter("t", after)
		}
		upTo := last
		err := tx.QueryRow(ctx, fmt.Sprintf(`SELECT %s FROM %s t WHERE %s ORDER BY %s OFFSET %d LIMIT 1`,
			t.Layout.KeyText("t"), t.SQL, where, t.Layout.KeyRefs("t"), rows-1)).Scan(&upTo)
		if err != nil && err != pgx.ErrNoRows {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&snapshot); err != nil {
			return err
		}
		leaf, err = hash(ctx, tx, t, t.Layout.RowText("t"), after, upTo)
		return err
	})
	return leaf, snapshot, err
}

// LeafHere reads the leaf of a key range as it is on the receiver, in the columns of a
// layout of the source, and the position up to which the source's changes had then
// been applied: both in one snapshot.
func (db *DB) LeafHere(ctx context.Context, table string, staged *row.Layout, after, upTo backfill.Key) (leaf Leaf, position int64, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		parsed, err := backfill.ParseTableName(table)
		if err != nil {
			return err
		}
		if err := lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name)); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT seq FROM `+db.schema+`.applied`).Scan(&position); err != nil {
			return db.orNotSetUp(err)
		}
		t, err := describe(ctx, tx, table)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		text, err := asStaged(staged, t.Layout)
		if err != nil {
			return err
		}
		leaf, err = hash(ctx, tx, t, text, after, upTo)
		return err
	})
	return leaf, position, err
}

func hash(ctx context.Context, tx pgx.Tx, t *Table, text string, after, upTo backfill.Key) (Leaf, error) {
	leaf := Leaf{After: after, UpTo: upTo}
	where := []string{t.Layout.KeyUpTo("t", upTo)}
	if after != nil {
		where = append(where, t.Layout.KeyAfter("t", after))
	}
	// The bytes hashed are UTF-8 whatever the database's encoding.
	err := tx.QueryRow(ctx, fmt.Sprintf(`
		SELECT count(*), coalesce(sum(('x' || substr(h, 1, 16))::bit(64)::bigint), 0)::text, coalesce(sum(('x' || substr(h, 17, 16))::bit(64)::bigint), 0)::text
		  FROM (SELECT encode(sha256(convert_to((%s)::text, 'UTF8')), 'hex') AS h FROM %s t WHERE %s OFFSET 0) r`,
		text, t.SQL, strings.Join(where, " AND "))).Scan(&leaf.Rows, &leaf.Sum1, &leaf.Sum2)
	return leaf, err
}
