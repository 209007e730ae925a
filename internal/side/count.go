package side

import (
	"context"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// Count is what an agent finds out about a table on the slow clock.
type Count struct {
	Table     *Table
	Rows      *int64 // nil when it could not be counted
	Estimated bool
	At        time.Time
	Capture   string // what is wrong with capture, "" when it is healthy
}

// Count counts a table exactly, or, when that takes longer than limit, estimates
// it from the planner's statistics and says so. captured asks for an audit of the
// table's triggers too.
func (db *DB) Count(ctx context.Context, r Relation, captured bool, limit time.Duration) (c Count, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if c.Table, err = describeRelation(ctx, tx, r); err != nil || c.Table.Problem != "" {
			return err
		}
		if captured {
			if c.Capture, _, err = db.captureProblem(ctx, tx, c.Table); err != nil {
				return err
			}
		}
		return db.countRows(ctx, tx, &c, limit)
	})
	return c, err
}

func (db *DB) countRows(ctx context.Context, tx pgx.Tx, c *Count, limit time.Duration) error {
	if _, err := tx.Exec(ctx, `SELECT set_config('statement_timeout', $1, true)`, strconv.FormatInt(limit.Milliseconds(), 10)); err != nil {
		return err
	}
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT count(*), clock_timestamp() FROM `+c.Table.SQL).Scan(&c.Rows, &c.At)
	})
	if SQLState(err) != queryCanceled {
		return err
	}
	c.Estimated = true
	return tx.QueryRow(ctx, `
		SELECT sum(greatest(c.reltuples, 0))::bigint, clock_timestamp() FROM pg_class c
		 WHERE c.oid = $1 OR c.oid IN (SELECT relid FROM pg_partition_tree($1::oid::regclass) WHERE isleaf)`, c.Table.OID).Scan(&c.Rows, &c.At)
}
