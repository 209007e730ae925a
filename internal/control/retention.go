package control

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Keep says how long things are kept that nothing needs any more. 0 keeps them for ever.
type Keep struct {
	Requests time.Duration // closed requests with their staged rows, and reconciliations, since they were closed
	History  time.Duration // changes, since the receiver acknowledged them
	Audit    time.Duration // who did what
}

const (
	keepIdempotency = 48 * time.Hour
	keepAttendance  = 24 * time.Hour
)

// Removed counts what retention removed, by kind.
type Removed map[string]int64

// Retain removes up to about limit of each kind of thing that is past its window,
// each in a transaction of its own, and reports whether there may be more. It never
// touches what is in flight, or what an open request may still need. between, unless
// nil, is called after each transaction, and an error of it ends Retain.
func (s *Store) Retain(ctx context.Context, keep Keep, limit int, between func() error) (removed Removed, more bool, err error) {
	removed = Removed{}
	count := func(kind string, n int64) {
		if n > 0 {
			removed[kind] += n
			more = more || n >= int64(limit)
		}
	}
	if between == nil {
		between = func() error { return nil }
	}
	if keep.History > 0 {
		rows, err := s.pool.Query(ctx, `SELECT id FROM backfill_control.direction ORDER BY id`)
		if err != nil {
			return removed, false, err
		}
		directions, err := pgx.CollectRows(rows, pgx.RowTo[int32])
		if err != nil {
			return removed, false, err
		}
		for _, d := range directions {
			n, err := s.retainHistory(ctx, d, keep.History, limit)
			if err != nil {
				return removed, more, err
			}
			count("changes", n)
			if err := between(); err != nil {
				return removed, more, err
			}
		}
	}
	if keep.Requests > 0 {
		n, rows, found, err := s.retainRequests(ctx, keep.Requests, limit)
		if err != nil {
			return removed, more, err
		}
		count("requests", n)
		count("staged rows", rows)
		more = more || found
		if err := between(); err != nil {
			return removed, more, err
		}
	}
	if keep.Requests > 0 {
		n, found, err := s.retainRuns(ctx, keep.Requests, limit)
		if err != nil {
			return removed, more, err
		}
		count("reconciliations", n)
		more = more || found
		if err := between(); err != nil {
			return removed, more, err
		}
	}
	for _, k := range []struct {
		kind, table, at string
		keep            time.Duration
	}{
		{"audit entries", "audit", "at", keep.Audit},
		{"shadow reads", "shadow_read", "reported_at", keep.Requests},
		{"shadow counts", "shadow_count", "at", keep.Requests},
		{"idempotency keys", "idempotency", "created_at", keepIdempotency},
		{"workers", "attendance", "seen_at", keepAttendance},
	} {
		if k.keep == 0 {
			continue
		}
		tag, err := s.pool.Exec(ctx, fmt.Sprintf(`
			DELETE FROM backfill_control.%[1]s WHERE ctid = ANY (ARRAY(
			    SELECT ctid FROM backfill_control.%[1]s WHERE %[2]s < clock_timestamp() - $1::interval LIMIT $2))`, k.table, k.at), k.keep, limit)
		if err != nil {
			return removed, more, err
		}
		count(k.kind, tag.RowsAffected())
		if err := between(); err != nil {
			return removed, more, err
		}
	}
	return removed, more, nil
}

// retainHistory removes old history of a direction. What goes ends at the end of a
// batch below the last acknowledged change, and the batch goes before its changes: a
// receiver that was restored to a position there is then told that history no longer
// reaches it, rather than going on with a gap. Nothing acknowledged since the oldest
// open request of the site was started goes, so that the changes that overtake its
// rows, of either direction, are all there; nor what waits for a stopped table.
func (s *Store) retainHistory(ctx context.Context, direction int32, keep time.Duration, limit int) (n int64, err error) {
	err = s.in(ctx, func(tx pgx.Tx) error {
		var end *int64
		if err := tx.QueryRow(ctx, `
			WITH open AS (
			    SELECT least(min(coalesce(r.started_at, r.requested_at)),
			                 -- what excuses the rows in flight of a reconciliation that runs
			                 (SELECT min(x.requested_at) FROM backfill_control.reconciliation x JOIN backfill_control.direction y ON y.id = x.direction
			                   WHERE y.site = (SELECT site FROM backfill_control.direction WHERE id = $1) AND x.state IN ('PENDING', 'RUNNING'))) AS since, min(r.start_seq) FILTER (WHERE r.direction = $1) AS start_seq
			      FROM backfill_control.direction d JOIN backfill_control.direction o ON o.site = d.site JOIN backfill_control.request r ON r.direction = o.id
			     WHERE d.id = $1 AND r.state = ANY ($3)),
			c AS (
			    SELECT least((SELECT max(a.seq) FROM backfill_control.ack a
			                   WHERE a.direction = d.id AND a.at < least(clock_timestamp() - $2::interval, open.since)), open.start_seq, d.applied_seq - 1,
			                 (SELECT min(x.seq) FROM backfill_control.stopped x WHERE x.direction = d.id)) AS seq
			      FROM backfill_control.direction d, open
			     WHERE d.id = $1 AND EXISTS (SELECT FROM backfill_control.ack a WHERE a.direction = d.id AND a.at < least(clock_timestamp() - $2::interval, open.since)))
			SELECT coalesce((SELECT max(b.last_seq) FROM backfill_control.batch b WHERE b.direction = $1 AND b.last_seq <= c.seq),
			                least(c.seq, (SELECT min(b.first_seq) - 1 FROM backfill_control.batch b WHERE b.direction = $1))) FROM c`,
			direction, keep, backfill.OpenStates()).Scan(&end); err != nil && err != pgx.ErrNoRows {
			return err
		}
		if end == nil {
			return nil
		}
		if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.batch WHERE direction = $1 AND last_seq <= $2`, direction, *end); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			DELETE FROM backfill_control.entry WHERE direction = $1 AND seq = ANY (ARRAY(
			    SELECT e.seq FROM backfill_control.entry e
			     WHERE e.direction = $1 AND e.seq <= $2
			       AND NOT EXISTS (SELECT FROM backfill_control.quarantine q WHERE q.direction = $1 AND q.seq = e.seq AND q.state <> 'skipped')
			     ORDER BY e.seq LIMIT $3))`, direction, *end, limit)
		if err != nil {
			return err
		}
		if n = tag.RowsAffected(); n >= int64(limit) {
			return nil
		}
		if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.quarantine WHERE direction = $1 AND seq <= $2 AND state = 'skipped'`, direction, *end); err != nil {
			return err
		}
		for _, table := range []string{"ack", "conflict"} {
			if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.`+table+` WHERE direction = $1 AND seq <= $2`, direction, *end); err != nil {
				return err
			}
		}
		return nil
	})
	return n, err
}

// retainRequests removes rows of the oldest closed request past its window, and the
// request once no row is left. found is false when there is none.
func (s *Store) retainRequests(ctx context.Context, keep time.Duration, limit int) (requests, rows int64, found bool, err error) {
	err = s.in(ctx, func(tx pgx.Tx) error {
		var id int64
		err := tx.QueryRow(ctx, `
			SELECT id FROM backfill_control.request WHERE closed_at < clock_timestamp() - $1::interval AND state <> ALL ($2)
			 ORDER BY closed_at LIMIT 1 FOR UPDATE SKIP LOCKED`, keep, backfill.OpenStates()).Scan(&id)
		if err == pgx.ErrNoRows {
			return nil
		}
		if err != nil {
			return err
		}
		found = true
		for _, table := range []string{"staged", "effect"} {
			tag, err := tx.Exec(ctx, fmt.Sprintf(`
				DELETE FROM backfill_control.%[1]s WHERE request_id = $1 AND n = ANY (ARRAY(
				    SELECT n FROM backfill_control.%[1]s WHERE request_id = $1 ORDER BY n LIMIT $2))`, table), id, limit)
			if err != nil {
				return err
			}
			if table == "staged" {
				rows = tag.RowsAffected()
			}
			if tag.RowsAffected() >= int64(limit) {
				return nil
			}
		}
		requests = 1
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.tally AS t (direction, table_id, what, value)
			SELECT r.direction, r.table_id, x.what, sum(x.value)
			  FROM backfill_control.request r, LATERAL (
			       VALUES ('staged', r.staged::float8), ('released', r.released::float8)
			       UNION ALL SELECT 'throttled ' || h.kind, h.seconds FROM backfill_control.throttled h WHERE h.request_id = r.id) x (what, value)
			 WHERE r.id = $1 GROUP BY 1, 2, 3
			ON CONFLICT (direction, table_id, what) DO UPDATE SET value = t.value + excluded.value`, id); err != nil {
			return err
		}
		for _, table := range []string{"throttled", "progress", "judged", "leaf"} {
			if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.`+table+` WHERE request_id = $1`, id); err != nil {
				return err
			}
		}
		_, err = tx.Exec(ctx, `DELETE FROM backfill_control.request WHERE id = $1`, id)
		return err
	})
	return requests, rows, found, err
}

// Retained puts on record what a run of retention has removed, if anything.
func (s *Store) Retained(ctx context.Context, removed Removed) error {
	if len(removed) == 0 {
		return nil
	}
	detail := map[string]any{}
	for kind, n := range removed {
		detail[kind] = n
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		return audit(ctx, tx, "backfill", "retention.removed", "", "what was past its window", detail)
	})
}

// Disagreed puts on record that a request and its workflow disagreed and what was
// done about it.
func (s *Store) Disagreed(ctx context.Context, site, subject, what string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		return audit(ctx, tx, "backfill", "sweep.disagreement", site, subject, map[string]any{"what": what})
	})
}
