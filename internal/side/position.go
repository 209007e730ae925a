package side

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Position estimates how many rows of a table lie up to a key, and how many between
// it and a last key, from the planner's histogram of the key's first column. known
// is false where PostgreSQL has no statistics of it: then the estimates mean nothing.
// It costs the planning of two queries; no row is read.
func (db *DB) Position(ctx context.Context, table string, l *row.Layout, at, last backfill.Key) (done, left float64, known bool, err error) {
	parsed, err := backfill.ParseTableName(table)
	if err != nil {
		return 0, 0, false, err
	}
	name := row.Ident(parsed.Schema, parsed.Name)
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, `
			SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_stats s ON s.schemaname = n.nspname AND s.tablename = c.relname
			                WHERE (c.oid = $1::text::regclass OR c.oid IN (SELECT relid FROM pg_partition_tree($1::text::regclass) WHERE isleaf))
			                  AND c.reltuples > 0 AND s.attname = $2)`, name, l.Key[0]).Scan(&known); err != nil || !known {
			return err
		}
		if done, err = planned(ctx, tx, name, l.KeyUpTo("t", at)); err != nil {
			return err
		}
		left, err = planned(ctx, tx, name, l.KeyAfter("t", at)+" AND "+l.KeyUpTo("t", last))
		return err
	})
	return done, left, known, err
}

// planned is how many rows the planner expects.
func planned(ctx context.Context, tx pgx.Tx, table, where string) (float64, error) {
	var text string
	if err := tx.QueryRow(ctx, fmt.Sprintf(`EXPLAIN (FORMAT JSON) SELECT FROM %s t WHERE %s`, table, where)).Scan(&text); err != nil {
		return 0, err
	}
	var plans []struct {
		Plan struct {
			Rows float64 `json:"Plan Rows"`
		}
	}
	if err := json.Unmarshal([]byte(text), &plans); err != nil || len(plans) != 1 {
		return 0, fmt.Errorf("the plan of a query cannot be read: %w", err)
	}
	return plans[0].Plan.Rows, nil
}
