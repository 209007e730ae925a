package control

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Limits say how many whole-table walks may go on at once.
type Limits struct {
	Side int // on one side
	All  int // on all sides of all sites
}

// NotYet is returned while others walk: the request stands in the queue for a place.
type NotYet struct{ Why string }

func (e *NotYet) Error() string { return e.Why }

// walkers counts walks that go on and those that wait for a place. Who waits and has
// not asked for a while is not there any more.
const walkers = `
	WITH w AS (
	    SELECT r.id, r.direction, coalesce(greatest(r.lease_until, r.admitted_until) > clock_timestamp(), false) AS walks,
	           CASE WHEN r.queued_seen > clock_timestamp() - interval '15 s' THEN r.queued_at END AS queued
	      FROM backfill_control.request r WHERE r.state IN ('PENDING', 'IN_PROGRESS') AND r.key IS NULL AND NOT r.paused)`

// Admit gives a request a place among the walks that may go on, for a few seconds in
// which it is to be claimed, or NotYet. Places are given in the order of asking; one
// row's backfill needs none.
func (s *Store) Admit(ctx context.Context, id int64, l Limits) error {
	var refused *NotYet
	err := s.in(ctx, func(tx pgx.Tx) error {
		// One at a time, or two could be given the last place.
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(20012)`); err != nil {
			return err
		}
		var side string
		if err := tx.QueryRow(ctx, `
			UPDATE backfill_control.request r SET queued_at = CASE WHEN queued_seen > clock_timestamp() - interval '15 s' THEN coalesce(queued_at, clock_timestamp()) ELSE clock_timestamp() END,
			       queued_seen = clock_timestamp()
			  FROM backfill_control.direction d WHERE r.id = $1 AND d.id = r.direction RETURNING d.from_side`, id).Scan(&side); err != nil {
			return one(err, "request %d", id)
		}
		var here, all, ahead, aheadAll int
		if err := tx.QueryRow(ctx, walkers+`,
			me AS (SELECT * FROM w WHERE id = $1),
			sides AS (
			    -- of those ahead only as many count as their own side has places for
			    SELECT w.direction, count(*) FILTER (WHERE w.walks AND w.id <> me.id) AS walk,
			           least(count(*) FILTER (WHERE NOT w.walks AND w.queued < me.queued),
			                 greatest($2::bigint - count(*) FILTER (WHERE w.walks AND w.id <> me.id), 0)) AS ahead
			      FROM w, me GROUP BY w.direction)
			SELECT coalesce(sum(walk) FILTER (WHERE s.direction = me.direction), 0), coalesce(sum(walk), 0),
			       coalesce(sum(ahead) FILTER (WHERE s.direction = me.direction), 0), coalesce(sum(ahead), 0)
			  FROM sides s, me`, id, l.Side).Scan(&here, &all, &ahead, &aheadAll); err != nil {
			return err
		}
		switch {
		case here+ahead >= l.Side:
			refused = &NotYet{fmt.Sprintf("its turn: %s walk on %s, %d wait before it", places(here, l.Side), side, ahead)}
		case all+aheadAll >= l.All:
			refused = &NotYet{fmt.Sprintf("its turn: %s walk on all sides, %d wait before it", places(all, l.All), aheadAll)}
		}
		if refused != nil {
			_, err := tx.Exec(ctx, `UPDATE backfill_control.request SET waiting = $2 WHERE id = $1 AND NOT paused AND waiting <> $2 AND state = ANY ($3)`, id, refused.Why, backfill.OpenStates())
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE backfill_control.request SET queued_at = NULL, queued_seen = NULL, admitted_until = clock_timestamp() + interval '5 s' WHERE id = $1`, id)
		return err
	})
	if err == nil && refused != nil {
		return refused
	}
	return err
}

func places(taken, of int) string { return fmt.Sprintf("%d of at most %d backfills", taken, of) }

// Wanted reports whether another request waits for the place of this one.
func (s *Store) Wanted(ctx context.Context, id int64, l Limits) (wanted bool, err error) {
	err = s.pool.QueryRow(ctx, walkers+`
		SELECT EXISTS (SELECT FROM w, w me WHERE me.id = $1 AND w.id <> me.id AND w.queued IS NOT NULL AND NOT w.walks
		                  AND (w.direction = me.direction AND (SELECT count(*) FROM w o WHERE o.walks AND o.direction = me.direction) >= $2
		                       OR (SELECT count(*) FROM w o WHERE o.walks) >= $3))`, id, l.Side, l.All).Scan(&wanted)
	return wanted, err
}

// Vacate gives a place back that was not used, or no longer is.
func (s *Store) Vacate(ctx context.Context, id int64) error {
	_, err := s.pool.Exec(ctx, `UPDATE backfill_control.request SET admitted_until = NULL WHERE id = $1`, id)
	return err
}

const admitAgain = 2 * time.Second

// AskAgain is when a request that got NotYet should ask again.
func (e *NotYet) AskAgain() time.Duration { return admitAgain }
