package side

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"backfill/internal/proof"
)

// LeafPlan is how PostgreSQL hashes a leaf.
func (db *DB) LeafPlan(ctx context.Context, c Compared, leaf proof.Leaf) (plan []string, err error) {
	_, err = db.compare(ctx, c, func(tx pgx.Tx, t *Table) error {
		rows, err := tx.Query(ctx, "EXPLAIN (COSTS off) "+leafSQL(t, c.Bytes, leaf))
		if err != nil {
			return err
		}
		plan, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	return plan, err
}

// LeafSize is how many bytes PostgreSQL puts together to hash a leaf.
func (db *DB) LeafSize(ctx context.Context, c Compared, leaf proof.Leaf) (size int64, err error) {
	_, err = db.compare(ctx, c, func(tx pgx.Tx, t *Table) error {
		return tx.QueryRow(ctx, fmt.Sprintf(`SELECT octet_length(%s) FROM (SELECT %s AS r FROM %s t) x`, packed, c.Bytes, t.SQL)).Scan(&size)
	})
	return size, err
}
