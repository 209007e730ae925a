package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Lease is the time-limited, numbered claim of one agent on a walk. Its epoch
// fences out an older holder: every write of the walk names it.
type Lease struct {
	RequestID int64
	Epoch     int64
	ttl       time.Duration
}

// ErrFenced says that the lease was taken over, or that the request no longer
// walks: the holder must stop and has written nothing.
var ErrFenced = errors.New("the lease is no longer held or the request no longer walks")

// LeaseHeld is returned while another agent's lease has not run out.
type LeaseHeld struct {
	Holder string
	For    time.Duration
}

func (e *LeaseHeld) Error() string {
	return fmt.Sprintf("agent %s holds the lease for another %s", e.Holder, e.For.Round(time.Millisecond))
}

// Claim takes the lease of a request's walk for an agent and returns the request
// as it stands. A lease that has not run out is not taken: LeaseHeld. A request
// that no longer walks: ErrFenced.
func (s *Store) Claim(ctx context.Context, id int64, holder string, ttl time.Duration) (*Lease, *backfill.Request, error) {
	l := &Lease{RequestID: id, ttl: ttl}
	// A holder that was stopped in the middle of a page still has its transaction
	// open, with rows and locks in the taker's way.
	if _, err := s.pool.Exec(ctx, `
		SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a, backfill_control.request r
		 WHERE r.id = $1 AND r.lease_until < clock_timestamp() AND a.application_name = $2 AND a.datname = current_database()`, id, walkName(id)); err != nil {
		return nil, nil, err
	}
	err := s.in(ctx, func(tx pgx.Tx) error {
		var state backfill.State
		var other string
		var left *time.Duration
		err := tx.QueryRow(ctx, `
			SELECT state, holder, CASE WHEN lease_until > clock_timestamp() THEN lease_until - clock_timestamp() END
			  FROM backfill_control.request WHERE id = $1 FOR UPDATE`, id).Scan(&state, &other, &left)
		if err != nil {
			return one(err, "request %d", id)
		}
		if state != backfill.Pending && state != backfill.InProgress {
			return ErrFenced
		}
		if left != nil {
			return &LeaseHeld{Holder: other, For: *left}
		}
		if err := tx.QueryRow(ctx, `
			UPDATE backfill_control.request r
			   SET state = 'IN_PROGRESS', epoch = epoch + 1, holder = $2, lease_until = clock_timestamp() + $3::interval,
			       started_at = coalesce(started_at, clock_timestamp()), waiting = CASE WHEN paused THEN waiting ELSE '' END
			 WHERE id = $1 RETURNING epoch`, id, holder, ttl).Scan(&l.Epoch); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
	if err != nil {
		return nil, nil, err
	}
	r, err := s.Request(ctx, id)
	return l, r, err
}

// walkName marks the session of a page's transaction.
func walkName(id int64) string { return fmt.Sprintf("backfill walk %d", id) }

// fence locks the request, renews the lease and fails unless it is still held and
// the walk may go on.
func (s *Store) fence(ctx context.Context, tx pgx.Tx, l *Lease) error {
	tag, err := tx.Exec(ctx, `
		UPDATE backfill_control.request SET lease_until = clock_timestamp() + $3::interval
		 WHERE id = $1 AND epoch = $2 AND state = 'IN_PROGRESS'`, l.RequestID, l.Epoch, l.ttl)
	if err == nil && tag.RowsAffected() == 0 {
		err = ErrFenced
	}
	return err
}

// Renew extends the lease; ErrFenced when it is lost.
func (s *Store) Renew(ctx context.Context, l *Lease) error {
	return s.in(ctx, func(tx pgx.Tx) error { return s.fence(ctx, tx, l) })
}

// Hand gives the lease back, so that another agent need not wait for its end.
func (s *Store) Hand(ctx context.Context, l *Lease) error {
	_, err := s.pool.Exec(ctx, `UPDATE backfill_control.request SET lease_until = NULL WHERE id = $1 AND epoch = $2`, l.RequestID, l.Epoch)
	return err
}

// LastSeq is the highest seq of a direction's queue and history so far. Every
// entry read after this call gets a higher one.
func (s *Store) LastSeq(ctx context.Context, direction int32) (seq int64, err error) {
	err = s.inOrder(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT coalesce((`+lastSeq("$1")+`), 0)`, direction).Scan(&seq)
	})
	return seq, err
}

// Frozen is where and how a walk will end, fixed before its first page.
type Frozen struct {
	LayoutID int64
	StartSeq int64        // LastSeq before the floor was taken
	Floor    string       // a snapshot before the first page's
	Upper    backfill.Key // nil: there is nothing to walk
	Shape    string       // what the source table is made of
	Expected int64
	Stamp    int64 // how far the source had seen the reverse direction
}

// Freeze stores the bounds of a walk. Once frozen they stay, whoever asks again.
func (s *Store) Freeze(ctx context.Context, l *Lease, f Frozen) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx, l); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `
			UPDATE backfill_control.request SET layout_id = $2, start_seq = $3, checked_seq = $3, floor = $4::text::pg_snapshot, upper_key = $5, expected = $6, shape = $7,
			       floor_stamp = $8, reverse_seq = $8
			 WHERE id = $1 AND floor IS NULL`, l.RequestID, f.LayoutID, f.StartSeq, f.Floor, f.Upper, f.Expected, f.Shape, f.Stamp)
		return err
	})
}

// StagePage commits one page: its rows, the resume key and the counters in one
// transaction under the lease's epoch. copyRows writes the rows in COPY's binary form
// (request_id, n, snap, key, row, stamp), the first of which has the number after, and
// returns after making what it read durable on the source, with the number of that read,
// and after the page before is committed.
// copied is told how many rows there are, and the last one's key, before they are
// committed: the next page may be begun then.
func (s *Store) StagePage(ctx context.Context, l *Lease, after int64, copyRows func(load func(io.Reader) error) (reads int64, err error), copied func(rows int64, last backfill.Key)) error {
	return s.inOrder(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('application_name', $1, true)`, walkName(l.RequestID)); err != nil {
			return err
		}
		if err := mayWalk(ctx, tx, l); err != nil {
			return err
		}
		var rows int64
		reads, err := copyRows(func(r io.Reader) error {
			tag, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY backfill_control.staged (request_id, n, snap, key, row, stamp) FROM STDIN (FORMAT binary)`)
			rows = tag.RowsAffected()
			return err
		})
		if err != nil {
			return err
		}
		var last backfill.Key
		if err := tx.QueryRow(ctx, `SELECT (SELECT key FROM backfill_control.staged WHERE request_id = $1 AND n >= $2::bigint ORDER BY n LIMIT 1)`, l.RequestID, after+rows).Scan(&last); err != nil {
			return err
		}
		copied(rows, last)
		// The request is locked only now, so that nobody waits for a slow page.
		if err := s.fence(ctx, tx, l); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.request SET staged = $2, resume_key = coalesce($3, resume_key) WHERE id = $1`, l.RequestID, after+rows, last); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.direction d SET reads = $2 FROM backfill_control.request r WHERE r.id = $1 AND d.id = r.direction AND d.reads < $2`, l.RequestID, reads); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", l.RequestID)
	})
}

// mayWalk spares the work of a page that the fence would refuse at its end.
func mayWalk(ctx context.Context, tx pgx.Tx, l *Lease) error {
	var walks, paused bool
	if err := tx.QueryRow(ctx, `SELECT epoch = $2 AND state = 'IN_PROGRESS', paused FROM backfill_control.request WHERE id = $1`, l.RequestID, l.Epoch).
		Scan(&walks, &paused); err != nil {
		return err
	}
	switch {
	case !walks:
		return ErrFenced
	case paused:
		return ErrPaused
	}
	return nil
}

// ErrPaused says that a person holds the walk or release.
var ErrPaused = errors.New("the request is paused")

// Reviewable ends a walk: its last key was reached and nothing captured before its
// last page is left in the outbox. From now on a decision may be made.
func (s *Store) Reviewable(ctx context.Context, l *Lease) error {
	var staged int64
	err := s.in(ctx, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx, l); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `
			UPDATE backfill_control.request
			   SET state = 'AWAITING_REVIEW', revision = revision + 1, walked_at = clock_timestamp(), lease_until = NULL, waiting = ''
			 WHERE id = $1 RETURNING staged`, l.RequestID).Scan(&staged); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", l.RequestID)
	})
	if err == nil && staged >= known {
		s.learn(ctx)
	}
	return err
}

// known is how many staged rows of a request the planner should know of.
const known = 10_000

// learn tells the planner that a request has many staged rows, none of them superseded. It would else take it
// for one, and look through all of them for each of its keys. It takes a few rows to
// tell that; when it cannot be done now, autovacuum will do it.
func (s *Store) learn(ctx context.Context) {
	_ = s.in(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '2s'; SET LOCAL default_statistics_target = 10; ANALYZE backfill_control.staged (request_id, n, superseded_by)`)
		return err
	})
}

// Waiting says what a request waits for, for people to read; "" when nothing.
func (s *Store) Waiting(ctx context.Context, id int64, why string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE backfill_control.request SET waiting = $2 WHERE id = $1 AND waiting <> $2 AND state = ANY ($3)`,
			id, why, backfill.OpenStates())
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
}
