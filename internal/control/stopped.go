package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Stopped is a table whose changes a receiver does not apply for now.
type Stopped struct {
	TableID int32
	Seq     int64 // its changes above this wait
	Reason  string
	Since   time.Time
}

// isStopped is the SQL for "entry e belongs to a stopped table and was not applied".
const isStopped = `EXISTS (SELECT FROM backfill_control.stopped st WHERE st.direction = e.direction AND st.table_id = e.table_id AND e.seq > st.seq)`

// undelivered is the SQL for "entry e of direction d was not applied": above the
// position, or of a stopped table.
const undelivered = `e.seq > least(d.applied_seq, (SELECT min(st.seq) FROM backfill_control.stopped st WHERE st.direction = d.id)) AND (e.seq > d.applied_seq OR ` + isStopped + `)`

// Stops lists the tables that a receiver has stopped, by name.
func (s *Store) Stops(ctx context.Context, direction int32) ([]Stop, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT t.name, st.reason, st.since FROM backfill_control.stopped st JOIN backfill_control.table_config t ON t.id = st.table_id
		 WHERE st.direction = $1 ORDER BY 1`, direction)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Stop])
}

// Stop is a stopped table as people see it.
type Stop struct {
	Table, Reason string
	Since         time.Time
}

// MirrorStopped makes the control database show just the tables a receiver has stopped.
func (s *Store) MirrorStopped(ctx context.Context, d backfill.Direction, all []Stopped) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		ids := make([]int32, 0, len(all))
		for _, x := range all {
			ids = append(ids, x.TableID)
			if _, err := tx.Exec(ctx, `
				INSERT INTO backfill_control.stopped (direction, table_id, seq, reason, since) VALUES ($1, $2, $3, $4, $5)
				ON CONFLICT (direction, table_id) DO UPDATE SET seq = excluded.seq, reason = excluded.reason, since = excluded.since`,
				d.ID, x.TableID, x.Seq, x.Reason, x.Since); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, `DELETE FROM backfill_control.stopped WHERE direction = $1 AND table_id <> ALL ($2)`, d.ID, ids)
		if err != nil {
			return err
		}
		return notify(ctx, tx, "site", d.Site)
	})
}

// NextOf says how far the next batch of one table's deliverable entries goes: at
// most limit of them and about maxBytes, above after; upTo when no more come before it.
func (s *Store) NextOf(ctx context.Context, direction, tableID int32, after, upTo int64, limit int, maxBytes int64) (to int64, err error) {
	err = s.inOrder(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
			WITH e AS (
			    SELECT seq, coalesce(pg_column_size(row), 0) + coalesce(pg_column_size(key), 0) AS size FROM backfill_control.entry
			     WHERE direction = $1 AND table_id = $2 AND seq > $3 AND seq <= $4 AND NOT dropped ORDER BY seq LIMIT $5),
			w AS (SELECT seq, row_number() OVER (ORDER BY seq) AS n, sum(size) OVER (ORDER BY seq) AS bytes FROM e),
			fit AS (SELECT max(seq) AS last, count(*) AS rows FROM w WHERE n = 1 OR bytes <= $6)
			SELECT CASE WHEN fit.rows < (SELECT count(*) FROM e) OR fit.rows = $5 THEN fit.last ELSE $4 END FROM fit`,
			direction, tableID, after, upTo, limit, maxBytes).Scan(&to)
	})
	return to, err
}
