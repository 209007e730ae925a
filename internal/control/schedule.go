package control

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Schedule says how often a table is reconciled by the clock.
type Schedule struct {
	Every  time.Duration
	Mode   backfill.RunMode // full or sampled
	Sample int
	SetBy  string
}

// PutSchedule makes a table be reconciled by the clock; nil ends that.
func (s *Store) PutSchedule(ctx context.Context, by string, d backfill.Direction, table *backfill.Table, c *Schedule) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		before, err := standing(ctx, tx, `SELECT every::text AS every, mode, sample FROM backfill_control.reconcile_schedule WHERE direction = $1 AND table_id = $2 FOR UPDATE`, d.ID, table.ID)
		if err != nil {
			return err
		}
		if c == nil {
			if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.reconcile_schedule WHERE direction = $1 AND table_id = $2`, d.ID, table.ID); err != nil {
				return err
			}
			return audit(ctx, tx, by, "schedule.end", table.Site, table.Name, map[string]any{"from": d.From, "before": before})
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.reconcile_schedule (direction, table_id, every, mode, sample, set_by) VALUES ($1, $2, $3, $4, nullif($5::int, 0), $6)
			ON CONFLICT (direction, table_id) DO UPDATE SET every = excluded.every, mode = excluded.mode, sample = excluded.sample, set_by = excluded.set_by`,
			d.ID, table.ID, c.Every, c.Mode, c.Sample, by); err != nil {
			return err
		}
		return audit(ctx, tx, by, "schedule.put", table.Site, table.Name, map[string]any{"from": d.From, "every": c.Every.String(), "mode": c.Mode, "sample": c.Sample, "before": before})
	})
}

// Schedule returns how often a table is reconciled by the clock, nil when it is not.
func (s *Store) Schedule(ctx context.Context, d backfill.Direction, tableID int32) (*Schedule, error) {
	var c Schedule
	err := s.pool.QueryRow(ctx, `SELECT every, mode, coalesce(sample, 0), set_by FROM backfill_control.reconcile_schedule WHERE direction = $1 AND table_id = $2`, d.ID, tableID).
		Scan(&c.Every, &c.Mode, &c.Sample, &c.SetBy)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &c, err
}

// StartDue records the runs that are due by the clock: none of the table is open,
// and the last one of the whole table was asked for long enough ago. It may be
// called by many at once.
func (s *Store) StartDue(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, `
		SELECT c.direction, c.table_id, c.mode, coalesce(c.sample, 0), c.set_by
		  FROM backfill_control.reconcile_schedule c JOIN backfill_control.table_config t ON t.id = c.table_id AND t.active
		 WHERE NOT EXISTS (SELECT FROM backfill_control.reconciliation r
		                    WHERE r.direction = c.direction AND r.table_id = c.table_id
		                      AND (r.state IN ('PENDING', 'RUNNING') AND r.mode <> 'shadow' OR r.mode IN ('full', 'sampled') AND r.requested_at > clock_timestamp() - c.every))`)
	if err != nil {
		return err
	}
	due, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (n NewReconciliation, err error) {
		err = r.Scan(&n.Direction, &n.TableID, &n.Mode, &n.Sample, &n.By)
		n.Note = "by the clock"
		return n, err
	})
	if err != nil {
		return err
	}
	for _, n := range due {
		if _, err := s.CreateReconciliation(ctx, n); err != nil && backfill.CodeOf(err) != backfill.Conflict {
			return err
		}
	}
	return nil
}
