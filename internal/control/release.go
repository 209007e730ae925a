package control

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// ReleaseBatch copies up to limit of a request's staged rows into the queue, each
// once, and reports whether it was the last batch. It may run again at any time,
// also beside itself: the direction's lock and the position stored with the rows
// keep each row from being sent twice. ErrPaused and ErrFenced end it without
// having sent anything.
//
// Within the lock it first marks the staged rows that something has overtaken: an
// entry of the same key, or a truncate of the table, read later than the row's
// page, whether pushed, released or dropped, acknowledged or not. An entry read
// later than a page got its seq after the request noted its start, so only entries
// above that, and each only once, are looked at. A row of a table captured on both
// sides also gives way to entries of the reverse direction above its stamp; both
// directions are locked then, so that of two releases one sees the other's rows.
//
// held is for how long it had the lock, that is, how long others waited for it; not how
// long it waited itself.
func (s *Store) ReleaseBatch(ctx context.Context, id int64, limit int) (done bool, held time.Duration, err error) {
	d, site := int32(0), ""
	const twoWay = `SELECT r.direction, t.site, cardinality(t.captured_from) > 1
		FROM backfill_control.request r JOIN backfill_control.table_config t ON t.id = r.table_id WHERE r.id = $1`
	var both, still bool
	if err := s.pool.QueryRow(ctx, twoWay, id).Scan(&d, &site, &both); err != nil {
		return false, 0, one(err, "request %d", id)
	}
	var locked time.Time
	err = s.inOrder(ctx, func(tx pgx.Tx) error {
		if both {
			err = lockSite(ctx, tx, site)
		} else {
			err = lockDirection(ctx, tx, d)
		}
		if err != nil {
			return err
		}
		locked = time.Now()
		if err := tx.QueryRow(ctx, twoWay, id).Scan(&d, &site, &still); err != nil {
			return err
		}
		if still && !both {
			return nil // configured meanwhile: again, under both locks
		}
		var state backfill.State
		var paused, skip bool
		var table int32
		var from, staged, checked, last int64
		if err := tx.QueryRow(ctx, `
			SELECT state, paused, skip_identical, table_id, released_up_to, staged, coalesce(checked_seq, 0),
			       coalesce((`+lastSeq("$2")+`), 0)
			  FROM backfill_control.request WHERE id = $1 FOR UPDATE`, id, d).Scan(&state, &paused, &skip, &table, &from, &staged, &checked, &last); err != nil {
			return err
		}
		switch {
		case state != backfill.Releasing:
			return ErrFenced
		case paused:
			return ErrPaused
		}
		if err := mayRelease(ctx, tx, d); err != nil {
			return err
		}
		if skip {
			if err := unjudge(ctx, tx, id, d, table, from, last); err != nil {
				return err
			}
		}
		if last > checked {
			if err := markOvertaken(ctx, tx, id, d, table, from, checked, last); err != nil {
				return err
			}
		}
		if still {
			if err := giveWay(ctx, tx, id, d, table, from); err != nil {
				return err
			}
		}
		to := min(from+int64(limit), staged)
		tag, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.entry (direction, table_id, layout_id, request_id, snap, op, key, row, stamp)
			SELECT $2, $3, r.layout_id, r.id, s.snap, 'u', s.key, s.row, s.stamp
			  FROM backfill_control.request r JOIN backfill_control.staged s ON s.request_id = r.id
			 WHERE r.id = $1 AND s.n > $4 AND s.n <= $5 AND s.superseded_by IS NULL
			   AND NOT ($6 AND (EXISTS (SELECT FROM backfill_control.effect e WHERE e.request_id = s.request_id AND e.n = s.n AND e.effect = '=')
			                    OR '=' IS NOT DISTINCT FROM (SELECT j.uniform FROM backfill_control.judged j WHERE j.request_id = s.request_id AND j.upto >= s.n ORDER BY j.upto LIMIT 1)))
			 ORDER BY s.n`, id, d, table, from, to, skip)
		if err != nil {
			return err
		}
		if tag.RowsAffected() > 0 {
			if err := endBatch(ctx, tx, d, rand.Text()); err != nil {
				return err
			}
			if err := notifyID(ctx, tx, "queue", int64(d)); err != nil {
				return err
			}
		}
		done = to == staged
		if _, err := tx.Exec(ctx, `
			WITH passed AS (SELECT count(*) AS superseded FROM backfill_control.staged WHERE request_id = $1 AND n > $2 AND n <= $3 AND superseded_by IS NOT NULL)
			UPDATE backfill_control.request r
			   SET released_up_to = $3, released = r.released + $4, superseded = r.superseded + p.superseded,
			       skipped = r.skipped + ($3 - $2 - $4 - p.superseded), 
			       -- what this batch has added overtakes none of its own request's rows
			       checked_seq = greatest($5, (`+lastSeq("$6")+`))
			  FROM passed p WHERE r.id = $1`, id, from, to, tag.RowsAffected(), last, d); err != nil {
			return err
		}
		if done {
			if err := finish(ctx, tx, id, d); err != nil {
				return err
			}
		}
		return notifyID(ctx, tx, "request", id)
	})
	return done, time.Since(locked), err
}

// ReleaseTurn waits until no other release of this process is at the direction's
// lock. So a push finds one batch before it, however many requests were approved at
// once, and those that wait hold no connection.
func (s *Store) ReleaseTurn(ctx context.Context, direction int32) (end func(), err error) {
	v, _ := s.releases.LoadOrStore(direction, make(chan struct{}, 1))
	taken := v.(chan struct{})
	select {
	case taken <- struct{}{}:
		return func() { <-taken }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// mayRelease is Refused while the source may not go on: what was read from it may
// be what it has lost.
func mayRelease(ctx context.Context, tx pgx.Tx, direction int32) error {
	var side string
	var halted *string
	if err := tx.QueryRow(ctx, `
		SELECT n.name, n.halted FROM backfill_control.direction d JOIN backfill_control.side n ON n.site = d.site AND n.name = d.from_side WHERE d.id = $1`, direction).
		Scan(&side, &halted); err != nil || halted == nil {
		return err
	}
	return backfill.Errorf(backfill.Refused, "rows of %s are not released while it may not go on: %s", side, *halted)
}

// markOvertaken marks the rows not yet released that entries in (checked, last]
// have overtaken. It goes from the few new entries to the staged rows by their key.
func markOvertaken(ctx context.Context, tx pgx.Tx, id int64, direction, table int32, from, checked, last int64) error {
	_, err := tx.Exec(ctx, `
		WITH e AS MATERIALIZED (
		    SELECT seq, key, snap FROM backfill_control.entry WHERE direction = $2 AND table_id = $3 AND seq > $5 AND seq <= $6),
		o AS MATERIALIZED (
		    SELECT s.ctid, max(e.seq) AS seq FROM e CROSS JOIN LATERAL (`+stagedOf("e.key")+`) s
		     WHERE s.n > $4 AND backfill_control.later(e.snap, s.snap) GROUP BY 1)
		UPDATE backfill_control.staged s SET superseded_by = o.seq FROM o WHERE s.ctid = o.ctid`, id, direction, table, from, checked, last)
	if err != nil {
		return err
	}
	var seq int64
	var snap string
	err = tx.QueryRow(ctx, `
		SELECT seq, snap::text FROM backfill_control.entry WHERE direction = $1 AND table_id = $2 AND op = 't' AND seq > $3 AND seq <= $4 ORDER BY seq DESC LIMIT 1`,
		direction, table, checked, last).Scan(&seq, &snap)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		UPDATE backfill_control.staged SET superseded_by = greatest(superseded_by, $3)
		 WHERE request_id = $1 AND n > $2 AND backfill_control.later($4::text::pg_snapshot, snap)`, id, from, seq, snap)
	return err
}

// stagedOf is the SELECT of request $1's staged row of a key. The planner may know nothing
// of the request, and take it for a single row: OFFSET 0 has it start from the keys all
// the same, and only the key is given, so that no other index serves.
func stagedOf(key string) string {
	return `SELECT s.ctid, s.n, s.snap, s.stamp FROM backfill_control.staged s WHERE s.request_id = $1 AND ` + keyIs(key) + ` OFFSET 0`
}

// giveWay marks the rows not yet released that an entry of the reverse direction,
// which the source had not seen when it read them, has overtaken. Each entry is
// looked at once.
func giveWay(ctx context.Context, tx pgx.Tx, id int64, direction, table int32, from int64) error {
	_, err := tx.Exec(ctx, `
		WITH r AS (
		    SELECT r.id, v.id AS reverse, coalesce(r.reverse_seq, 0) AS after,
		           (`+lastSeq("v.id")+`) AS last
		      FROM backfill_control.request r
		      JOIN backfill_control.direction d ON d.id = r.direction
		      JOIN backfill_control.direction v ON v.site = d.site AND v.id <> d.id
		     WHERE r.id = $1 AND d.id = $2),
		looked AS (UPDATE backfill_control.request q SET reverse_seq = greatest(r.after, r.last) FROM r WHERE q.id = r.id),
		e AS MATERIALIZED (
		    SELECT e.seq, e.key FROM r JOIN backfill_control.entry e ON e.direction = r.reverse AND e.seq > r.after WHERE e.table_id = $3),
		o AS MATERIALIZED (
		    SELECT s.ctid, max(e.seq) AS seq FROM e CROSS JOIN LATERAL (`+stagedOf("e.key")+`) s
		     WHERE s.n > $4 AND e.seq > coalesce(s.stamp, 0) GROUP BY 1)
		UPDATE backfill_control.staged s SET superseded_by = coalesce(s.superseded_by, o.seq) FROM o WHERE s.ctid = o.ctid`, id, direction, table, from)
	return err
}

// unjudge takes back that rows not yet released are identical on the receiver where
// a deliverable change of the key, or a truncate, had not been applied when they
// were judged: it may have changed the receiver's row since, without having
// overtaken the staged one. Such rows are sent.
func unjudge(ctx context.Context, tx pgx.Tx, id int64, direction, table int32, from, last int64) error {
	touched := `
		WITH later AS MATERIALIZED (
		    SELECT e.op, e.key FROM backfill_control.request r JOIN backfill_control.entry e
		        ON e.direction = $2 AND e.seq > CASE WHEN r.released_up_to = 0 THEN r.judged_seq ELSE r.checked_seq END
		     WHERE r.id = $1 AND e.table_id = $3 AND e.seq <= $5 AND NOT e.dropped),
		touched AS (
		    SELECT s.n FROM later CROSS JOIN LATERAL (` + stagedOf("later.key") + `) s WHERE s.n > $4
		    UNION
		    SELECT s.n FROM backfill_control.staged s WHERE s.request_id = $1 AND s.n > $4 AND EXISTS (SELECT FROM later WHERE op = 't')),`
	// Chunks that are identical as a whole come to be spelled out row by row.
	if _, err := tx.Exec(ctx, touched+`
		chunk AS (SELECT coalesce(lag(upto) OVER (ORDER BY upto), 0) AS start, upto, uniform FROM backfill_control.judged WHERE request_id = $1),
		spelled AS (
		    UPDATE backfill_control.judged j SET uniform = NULL FROM chunk c
		     WHERE j.request_id = $1 AND j.upto = c.upto AND c.uniform = '=' AND EXISTS (SELECT FROM touched WHERE touched.n > c.start AND touched.n <= c.upto)
		    RETURNING c.start, c.upto)
		INSERT INTO backfill_control.effect (request_id, n, effect) SELECT $1, n, '=' FROM spelled, generate_series(spelled.start + 1, spelled.upto) n`,
		id, direction, table, from, last); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, touched+`
		gone AS (
		    UPDATE backfill_control.effect e SET effect = '?' FROM touched
		     WHERE e.request_id = $1 AND e.n = touched.n AND e.n > $4 AND e.effect = '=' RETURNING e.n),
		chunks AS (
		    UPDATE backfill_control.judged j SET n_identical = j.n_identical - g.rows
		      FROM (SELECT (SELECT min(upto) FROM backfill_control.judged WHERE request_id = $1 AND upto >= gone.n) AS upto, count(*) AS rows FROM gone GROUP BY 1) g
		     WHERE j.request_id = $1 AND j.upto = g.upto)
		UPDATE backfill_control.request SET n_identical = n_identical - (SELECT count(*) FROM gone) WHERE id = $1 AND EXISTS (SELECT FROM gone)`,
		id, direction, table, from, last)
	return err
}

// finish closes a released request, and the gap in capture that it has filled when
// it began after that. It counts the superseded rows whose overtaking
// change never reached the receiver: those need another backfill.
func finish(ctx context.Context, tx pgx.Tx, id int64, direction int32) error {
	if _, err := tx.Exec(ctx, `
		UPDATE backfill_control.request
		   SET state = 'FINISHED', closed_at = clock_timestamp(), waiting = '',
		       superseded_undelivered = (
		           SELECT count(*) FROM backfill_control.staged s
		             JOIN backfill_control.entry e ON e.direction = $2 AND e.seq = s.superseded_by
		            WHERE s.request_id = $1 AND s.superseded_by IS NOT NULL
		              AND (e.dropped OR EXISTS (SELECT FROM backfill_control.quarantine q
		                                         WHERE q.direction = $2 AND q.seq = e.seq AND q.state IN ('quarantined', 'skipped'))))
		 WHERE id = $1`, id, direction); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `
		UPDATE backfill_control.table_side s SET gap = NULL, gap_since = NULL, gap_last = NULL, gap_xid = NULL
		  FROM backfill_control.request r JOIN backfill_control.direction d ON d.id = r.direction
		 WHERE r.id = $1 AND r.key IS NULL AND s.table_id = r.table_id AND s.side = d.from_side
		   AND s.capture_ok AND r.started_at > coalesce(s.gap_last, '-infinity') AND (s.gap_xid IS NULL OR pg_visible_in_snapshot(s.gap_xid, r.floor))`, id); err != nil {
		return err
	}
	var table int32
	if err := tx.QueryRow(ctx, `SELECT table_id FROM backfill_control.request WHERE id = $1`, id).Scan(&table); err != nil {
		return err
	}
	if err := soakAgain(ctx, tx, direction, table); err != nil {
		return err
	}
	return auditRequest(ctx, tx, id, "backfill", "backfill.finished", nil)
}
