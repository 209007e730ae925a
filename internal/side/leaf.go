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
		err := tx.QueryRow(ctx, nextSQL(t, leaf, rows, 1)).Scan(&leaf.Upper)
		if err != nil && err != pgx.ErrNoRows {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&snapshot); err != nil {
			return err
		}
		return hashAlone(ctx, tx, t, t.Layout.RowText("t"), &leaf)
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
		return hashAlone(ctx, tx, t, text, &leaf)
	})
	return leaf, position, err
}

// hashAlone is hashLeaf of rows encoded as text[].
func hashAlone(ctx context.Context, tx pgx.Tx, t *Table, rows string, leaf *proof.Leaf) error {
	if _, err := tx.Exec(ctx, inOrder); err != nil {
		return err
	}
	return hashLeaf(ctx, tx, t, "array_send("+rows+")", leaf)
}

// short is the longest encoding of a row, in bytes, that is hashed as it is.
const short = 1024

// packed puts the encodings r of a query's rows together. An encoding delimits itself: it
// begins with how many columns it has. In place of a long one stands its SHA-256, behind a
// number of columns that no row has, so that the whole stays far below the largest value
// there can be.
var packed = fmt.Sprintf(`coalesce(string_agg(CASE WHEN octet_length(r) <= %d THEN r ELSE '\x00000000'::bytea || sha256(r) END, ''::bytea), ''::bytea)`, short)

// inOrder keeps parallel workers from mixing up the rows of a leaf.
const inOrder = `SET LOCAL max_parallel_workers_per_gather = 0`

// hashLeaf counts the rows of a range of keys, and hashes their encodings, given as
// the SQL of row t's, in the order of the keys. Under another order a leaf would look
// different, never equal.
func hashLeaf(ctx context.Context, tx pgx.Tx, t *Table, bytes string, leaf *proof.Leaf) error {
	return tx.QueryRow(ctx, leafSQL(t, bytes, *leaf)).Scan(&leaf.Count, &leaf.Digest)
}

func leafSQL(t *Table, bytes string, leaf proof.Leaf) string {
	return fmt.Sprintf(`SELECT count(*), encode(sha256(%s), 'hex') FROM (SELECT %s AS r FROM %s t WHERE %s ORDER BY %s) x`,
		packed, bytes, t.SQL, inRange(t.Layout, leaf), t.Layout.KeyRefs("t"))
}

// nextSQL selects the keys from the size-th of a range on, many of them. Those before it are
// not printed.
func nextSQL(t *Table, leaf proof.Leaf, size, many int) string {
	return fmt.Sprintf(`SELECT %s FROM (SELECT %s FROM %s t WHERE %s ORDER BY %s OFFSET %d LIMIT %d) t ORDER BY %[5]s`,
		t.Layout.KeyText("t"), t.Layout.KeyRefs("t"), t.SQL, inRange(t.Layout, leaf), t.Layout.KeyRefs("t"), size-1, many)
}

// countLeaf only counts the rows of a range of keys.
func countLeaf(ctx context.Context, tx pgx.Tx, t *Table, leaf *proof.Leaf) error {
	leaf.Digest = ""
	return tx.QueryRow(ctx, fmt.Sprintf(`SELECT count(*) FROM %s t WHERE %s`, t.SQL, inRange(t.Layout, *leaf))).Scan(&leaf.Count)
}
