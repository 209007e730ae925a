package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Attend records that a control worker lives.
func (s *Store) Attend(ctx context.Context, name string) error {
	_, err := s.pool.Exec(ctx, `
		INSERT INTO backfill_control.attendance (name) VALUES ($1) ON CONFLICT (name) DO UPDATE SET seen_at = clock_timestamp()`, name)
	return err
}

// ControlSeen is when a control worker was last known to live, nil when none ever was.
func (s *Store) ControlSeen(ctx context.Context) (at *time.Time, err error) {
	err = s.pool.QueryRow(ctx, `SELECT max(seen_at) FROM backfill_control.attendance`).Scan(&at)
	return at, err
}

// Backlog is what waits in a side's outbox of one table.
type Backlog struct {
	Table  string
	Rows   int64
	First  int64         // the oldest record's number
	Waited time.Duration // for how long at least that has waited
}

// skipBusy ends a SELECT of rows s of table_side that are to be written, and leaves out
// those that somebody writes just now. What an agent reports of all its tables comes
// again within the minute; waiting for one while holding another would be a deadlock
// with a push or a report that goes through them in another order.
const skipBusy = ` FOR NO KEY UPDATE OF s SKIP LOCKED`

// ReportOutbox records what waits in the outbox of a side.
func (s *Store) ReportOutbox(ctx context.Context, site, side string, all []Backlog) error {
	tables, rows, firsts, waited := []string{}, []int64{}, []int64{}, []float64{}
	for _, b := range all {
		tables, rows, firsts, waited = append(tables, b.Table), append(rows, b.Rows), append(firsts, b.First), append(waited, b.Waited.Seconds())
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		// An agent that has just been started does not know for how long a record it meets
		// has waited; one that was reported before is known by its number.
		tag, err := tx.Exec(ctx, `
			WITH now AS MATERIALIZED (
			    SELECT t.id AS table_id, coalesce(b.rows, 0) AS rows, b.first, b.waited
			      FROM backfill_control.table_config t
			      LEFT JOIN unnest($3::text[], $4::bigint[], $5::bigint[], $6::float8[]) b (tbl, rows, first, waited) ON b.tbl = coalesce(t.mapping ->> 'source', t.name)
			     WHERE t.site = $1),
			free AS MATERIALIZED (
			    SELECT s.table_id FROM backfill_control.table_side s JOIN now USING (table_id)
			     WHERE s.side = $2 AND (s.outbox, s.outbox_first) IS DISTINCT FROM (now.rows, now.first)`+skipBusy+`)
			UPDATE backfill_control.table_side s
			   SET outbox = now.rows, outbox_first = now.first,
			       outbox_oldest = least(clock_timestamp() - now.waited * interval '1 s', CASE WHEN s.outbox_first = now.first THEN s.outbox_oldest END)
			  FROM now JOIN free USING (table_id) WHERE s.table_id = now.table_id AND s.side = $2`,
			site, side, tables, rows, firsts, waited)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.side SET outbox_at = clock_timestamp() WHERE site = $1 AND name = $2`, site, side); err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return notify(ctx, tx, "site", site)
	})
}
