package side

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/proof"
	"backfill/internal/row"
)

// NextLeaf reads the leaf of up to rows rows after a key and not beyond last, as they
// are on the source, and the snapshot it was read under. The table must still have
// the layout and shape given. A leaf without rows says that there are no more.
func (db *DB) NextLeaf(ctx context.Context, table string, l *row.Layout, shape string, after, last backfill.Key, rows int) (leaf proof.Leaf, snapshot string, err error) {
	_, err = db.read(ctx, Relation{Name: table}, func(tx pgx.Tx, t *Table) error {
		if err := t.unchanged(l, shape); err != nil {
			return err
		}
		leaf = proof.Leaf{Lower: after, Upper: last}
		err := tx.QueryRow(ctx, fmt.Sprintf(`SELECT %s FROM %s t WHERE %s ORDER BY %s OFFSET %d LIMIT 1`,
			t.Layout.KeyText("t"), t.SQL, inRange(t.Layout, leaf), t.Layout.KeyRefs("t"), rows-1)).Scan(&leaf.Upper)
		if err != nil && err != pgx.ErrNoRows {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&snapshot); err != nil {
			return err
		}
		return hashLeaf(ctx, tx, t, digest(t.Layout.RowText("t")), &leaf)
	})
	return leaf, snapshot, err
}

// LeafHere reads the leaf of a key range as it is on the receiver, in the columns of a
// layout of the source, and the position up to which the source's changes had then
// been applied: both in one snapshot.
func (db *DB) LeafHere(ctx context.Context, table string, staged *row.Layout, after, upTo backfill.Key) (leaf proof.Leaf, position int64, err error) {
	leaf = proof.Leaf{Lower: after, Upper: upTo}
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
		return hashLeaf(ctx, tx, t, digest(text), &leaf)
	})
	return leaf, position, err
}

// hashLeaf counts the rows of a range of keys, and adds up their digests, given as
// the SQL of row t's.
func hashLeaf(ctx context.Context, tx pgx.Tx, t *Table, digest string, leaf *proof.Leaf) error {
	return tx.QueryRow(ctx, fmt.Sprintf(`SELECT %s FROM (SELECT %s AS h FROM %s t WHERE %s OFFSET 0) x`,
		sums, digest, t.SQL, inRange(t.Layout, *leaf))).Scan(&leaf.Count, &leaf.Sums[0], &leaf.Sums[1])
}
