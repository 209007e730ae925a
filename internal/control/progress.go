package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/pace"
)

// Point is one point of a request's course.
type Point struct {
	pace.Sample
	Releasing bool
	Position  *float64 // part of the keys the walk has passed, 0 to 1; nil when unknown
}

// maxPoints bounds the course of a request: beyond it every second point goes.
const maxPoints = 400

// Sample stores where a request stands and what is to be expected from there. It
// does nothing unless the request is in the phase of the point.
func (s *Store) Sample(ctx context.Context, id int64, p Point, f pace.Forecast) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		var p50, p90 *float64
		if f.Rate > 0 {
			a, b := f.P50.Seconds(), f.P90.Seconds()
			p50, p90 = &a, &b
		}
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.request
			   SET position = coalesce($3, position), forecast_at = clock_timestamp(), rate = $4, duty = $5, left_p50 = $6, left_p90 = $7
			 WHERE id = $1 AND state = CASE WHEN $2 THEN 'RELEASING' ELSE 'IN_PROGRESS' END`, id, p.Releasing, p.Position, f.Rate, f.Duty, p50, p90)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.progress (request_id, releasing, rows, throttled, position) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING`,
			id, p.Releasing, p.Rows, p.Throttled.Seconds(), p.Position); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `
			DELETE FROM backfill_control.progress p USING (
			    SELECT at, row_number() OVER (ORDER BY at) AS n, count(*) OVER () AS points FROM backfill_control.progress WHERE request_id = $1) o
			 WHERE p.request_id = $1 AND p.at = o.at AND o.points > $2 AND o.n % 2 = 0`, id, maxPoints)
		return err
	})
}

// Course returns the stored points of a request, oldest first.
func (s *Store) Course(ctx context.Context, id int64) ([]Point, error) {
	rows, err := s.pool.Query(ctx, `SELECT at, releasing, rows, throttled, position FROM backfill_control.progress WHERE request_id = $1 ORDER BY at`, id)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (p Point, err error) {
		var throttled float64
		err = r.Scan(&p.At, &p.Releasing, &p.Rows, &throttled, &p.Position)
		p.Throttled = time.Duration(throttled * float64(time.Second))
		return p, err
	})
}
