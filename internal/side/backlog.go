package side

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Backlog is what waits in the outbox of one table.
type Backlog struct {
	Table       string
	Rows        int64 // keys
	First, Last int64 // the numbers of the oldest and the newest record
}

// Backlog counts what waits in the outbox by table, of the oldest records as many as
// limit.
func (db *DB) Backlog(ctx context.Context, limit int) (all []Backlog, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
			SELECT tbl, sum(n), min(seq), max(seq) FROM (SELECT tbl, seq, n FROM `+db.schema+`.outbox ORDER BY seq LIMIT $1::int) o GROUP BY tbl`, limit)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Backlog])
		return err
	})
	return all, db.orNotSetUp(err)
}

// Captured reports whether anything waits in the outbox, as cheaply as can be: an
// idle side is asked twice a second. When in doubt something does.
func (db *DB) Captured(ctx context.Context) bool {
	var any bool
	err := db.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+db.schema+`.outbox)`).Scan(&any)
	return err != nil || any
}
