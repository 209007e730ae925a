package control

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// ShadowRead is what the old path served of a key.
type ShadowRead struct {
	N       int64         `json:"-"`
	TableID int32         `json:"table_id"`
	Key     backfill.Key  `json:"key"`
	Columns []string      `json:"columns"` // that were served
	Values  []*string     `json:"values"`  // and their texts
	Found   bool          `json:"found"`   // false: there was no such row
	Age     time.Duration `json:"age"`     // how long ago it was read at most
}

const (
	// pendingReads is how many reads of a table may wait to be judged; more are dropped.
	pendingReads = 20_000
	// readSlack is added to a read's age: the time on the way here.
	readSlack = 10 * time.Second
	// readsAtOnce is how many reads are judged by one run.
	readsAtOnce = 500
)

// ReportReads stores reads to be judged, and returns how many: those of a table of
// which too many wait already are dropped. sampled says that the agent made them.
func (s *Store) ReportReads(ctx context.Context, direction int32, reads []ShadowRead, sampled bool) (n int64, err error) {
	text, err := json.Marshal(reads)
	if err != nil {
		return 0, err
	}
	err = s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.cutover (direction, table_id) SELECT DISTINCT $1::int, (r->>'table_id')::int FROM json_array_elements($2::text::json) r ON CONFLICT DO NOTHING`, direction, string(text)); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			WITH given AS (SELECT (r->>'table_id')::int AS table_id, r, row_number() OVER (PARTITION BY r->>'table_id') AS i FROM json_array_elements($2::text::json) r),
			room AS (SELECT g.table_id, $4 - (SELECT count(*) FROM (SELECT FROM backfill_control.shadow_read s
			                                    WHERE s.direction = $1 AND s.table_id = g.table_id AND s.run_id IS NULL AND s.verdict IS NULL LIMIT $4) x) AS room
			           FROM given g GROUP BY 1)
			INSERT INTO backfill_control.shadow_read (direction, table_id, sampled, since_seq, key, columns, "values", found)
			SELECT $1, table_id, $3,
			       -- Everything in a batch made before the read was read before it.
			       coalesce((SELECT b.last_seq FROM backfill_control.batch b
			                  WHERE b.direction = $1 AND b.at < clock_timestamp() - $5::interval - (r->>'age')::bigint / 1000 * interval '1 microsecond' ORDER BY b.last_seq DESC LIMIT 1), 0),
			       ARRAY(SELECT json_array_elements_text(r->'key')), ARRAY(SELECT json_array_elements_text(r->'columns')), ARRAY(SELECT json_array_elements_text(r->'values')), (r->>'found')::boolean
			  FROM given JOIN room USING (table_id) WHERE i <= room`, direction, string(text), sampled, pendingReads, readSlack)
		if n = tag.RowsAffected(); err != nil || n == 0 {
			return err
		}
		return notifyID(ctx, tx, "shadow", int64(direction))
	})
	return n, err
}

// BeginShadow makes a run for each table of a direction that has reads to be judged,
// unless one is open, and clears away earlier ones that have found nothing.
func (s *Store) BeginShadow(ctx context.Context, direction int32) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
			INSERT INTO backfill_control.reconciliation (direction, table_id, mode, requested_by)
			SELECT $1, t.id, 'shadow', 'backfill' FROM backfill_control.table_config t
			 WHERE t.site = (SELECT site FROM backfill_control.direction WHERE id = $1)
			   AND EXISTS (SELECT FROM backfill_control.shadow_read s WHERE s.direction = $1 AND s.table_id = t.id AND s.run_id IS NULL AND s.verdict IS NULL)
			   AND NOT EXISTS (SELECT FROM backfill_control.reconciliation r WHERE r.direction = $1 AND r.table_id = t.id AND r.mode = 'shadow' AND r.state IN ('PENDING', 'RUNNING'))
			ON CONFLICT DO NOTHING RETURNING id, table_id`, direction)
		if err != nil {
			return err
		}
		type run struct {
			ID    int64
			Table int32
		}
		runs, err := pgx.CollectRows(rows, pgx.RowToStructByPos[run])
		if err != nil {
			return err
		}
		for _, r := range runs {
			if _, err := tx.Exec(ctx, `
				UPDATE backfill_control.shadow_read SET run_id = $3 WHERE n = ANY (ARRAY(
				    SELECT n FROM backfill_control.shadow_read WHERE direction = $1 AND table_id = $2 AND run_id IS NULL AND verdict IS NULL ORDER BY n LIMIT $4))`,
				direction, r.Table, r.ID, readsAtOnce); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `
				WITH gone AS (
				    DELETE FROM backfill_control.reconciliation r
				     WHERE r.direction = $1 AND r.table_id = $2 AND r.mode = 'shadow' AND r.state NOT IN ('PENDING', 'RUNNING')
				       AND NOT EXISTS (SELECT FROM backfill_control.difference d WHERE d.run_id = r.id)
				       AND NOT EXISTS (SELECT FROM backfill_control.reconciliation c WHERE c.parent = r.id) RETURNING id)
				DELETE FROM backfill_control.run_leaf l USING gone WHERE l.run_id = gone.id`, direction, r.Table); err != nil {
				return err
			}
			if err := notifyID(ctx, tx, "shadow", int64(direction)); err != nil {
				return err
			}
		}
		return nil
	})
}

// ShadowRuns lists the open runs that judge the reads of some directions.
func (s *Store) ShadowRuns(ctx context.Context, directions ...int32) ([]*backfill.Reconciliation, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+runColumns+runFrom+`WHERE r.direction = ANY ($1) AND r.mode = 'shadow' AND r.state IN ('PENDING', 'RUNNING') ORDER BY r.id`, directions)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*backfill.Reconciliation, error) {
		var r backfill.Reconciliation
		return &r, row.Scan(runFields(&r)...)
	})
}

// ShadowReads are the reads that a run judges.
func (s *Store) ShadowReads(ctx context.Context, run int64) ([]ShadowRead, error) {
	rows, err := s.pool.Query(ctx, `SELECT n, table_id, key, columns, "values", found FROM backfill_control.shadow_read WHERE run_id = $1 ORDER BY n`, run)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (r ShadowRead, err error) {
		return r, row.Scan(&r.N, &r.TableID, &r.Key, &r.Columns, &r.Values, &r.Found)
	})
}

// Served is a read as rows are compared.
type Served struct {
	N        int64        `json:"n"`
	Key      backfill.Key `json:"key"` // in the source's spelling
	Row      []*string    `json:"row"`
	Compared []int        `json:"compared"` // the places of the reported columns in Row, from 1
	Problem  string       `json:"problem"`  // why it cannot be read, "" when it can
}

// AddReads stores a run's reads in the form in which they are compared, and makes
// their keys its leaves, to be listed on the source. ErrFenced: another process was
// faster, or the run is closed.
func (s *Store) AddReads(ctx context.Context, run int64, served []Served) error {
	text, err := json.Marshal(served)
	if err != nil {
		return err
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE backfill_control.reconciliation SET cut = true WHERE id = $1 AND state = 'RUNNING' AND NOT cut`, run)
		if err := fenced(tag.RowsAffected() == 1, err); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.shadow_read s
			   SET key = CASE WHEN r->>'problem' = '' THEN ARRAY(SELECT json_array_elements_text(r->'key')) ELSE key END, served = CASE WHEN json_typeof(r->'row') = 'array' THEN ARRAY(SELECT json_array_elements_text(r->'row')) END,
			       compared = CASE WHEN json_typeof(r->'compared') = 'array' THEN ARRAY(SELECT json_array_elements_text(r->'compared')::int) ELSE '{}' END, problem = r->>'problem'
			  FROM json_array_elements($2::text::json) r WHERE s.n = (r->>'n')::bigint AND s.run_id = $1`, run, string(text)); err != nil {
			return err
		}
		// They are unsettled differences of leaves that were listed once: so they are looked
		// at key by key.
		if _, err := tx.Exec(ctx, `
			WITH k AS (SELECT key, row_number() OVER (ORDER BY key) AS n FROM (SELECT DISTINCT key FROM backfill_control.shadow_read WHERE run_id = $1 AND problem = '') x),
			leaf AS (INSERT INTO backfill_control.run_leaf (run_id, n, attempts, state, lower, upper) SELECT $1, n, 1, 'suspect', key, key FROM k)
			INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key) SELECT $1, n, 'different', false, key FROM k`, run); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.reconciliation SET leaves = (SELECT count(*) FROM backfill_control.run_leaf WHERE run_id = $1) WHERE id = $1`, run); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", run)
	})
}

// asServed notes which reads of a run served what the source holds, by the rows that
// it has just listed.
func asServed(ctx context.Context, tx pgx.Tx, run int64) error {
	_, err := tx.Exec(ctx, `
		UPDATE backfill_control.shadow_read s SET same = x.same, source = CASE WHEN NOT x.same THEN x."row" END
		  FROM (SELECT s.n, l."row", s.found = l.found AND NOT EXISTS (SELECT FROM unnest(s.compared) c WHERE s.served[c] IS DISTINCT FROM l."row"[c]) AS same
		          FROM backfill_control.shadow_read s JOIN backfill_control.leaf_row l ON l.run_id = s.run_id AND l.key = s.key WHERE s.run_id = $1) x
		 WHERE s.n = x.n`, run)
	return err
}

// JudgeReads closes a run whose keys are all judged, and with that the reads:
//
//   - mismatch: the receiver really differs from the source in the key, by the rules of a
//     reconciliation; or nothing else explains that the old path served something else
//     than the two hold;
//   - match: both hold what was served;
//   - stale: the key has changed since it was read;
//   - unknown: the key did not come to rest, or the read makes no sense.
//
// Keys that mismatch are set aside like those of a reconciliation, all of a table in
// one run. It reports whether the run was closed by this call.
func (s *Store) JudgeReads(ctx context.Context, id int64) (closed bool, err error) {
	err = s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT FROM backfill_control.reconciliation WHERE id = $1 FOR UPDATE`, id); err != nil {
			return err
		}
		run, err := s.tally(ctx, tx, id)
		if err != nil || run.State != backfill.RunRunning || !run.Cut || run.Counts.Pending > 0 {
			return err
		}
		closed = true
		if _, err := tx.Exec(ctx, `
			WITH doubtful AS MATERIALIZED (SELECT n, key, since_seq FROM backfill_control.shadow_read WHERE run_id = $1 AND NOT same),
			e AS MATERIALIZED (SELECT key, op, max(seq) AS seq FROM backfill_control.entry
			                    WHERE direction = $2 AND table_id = $3 AND request_id IS NULL AND seq > (SELECT min(since_seq) FROM doubtful) AND (op = 't' OR key IN (SELECT key FROM doubtful)) GROUP BY 1, 2),
			-- Where both sides write, what has come from the other one changes rows here too. It
			-- had come before the read only if it was acknowledged before the batch that was.
			back AS MATERIALIZED (SELECT e.direction, e.key, e.op, max(e.seq) AS seq FROM backfill_control.direction o JOIN backfill_control.entry e ON e.direction = o.id AND e.table_id = $3 AND NOT e.dropped
			                       WHERE $4 AND o.site = $5 AND o.from_side = $6 AND (e.op = 't' OR e.key IN (SELECT key FROM doubtful)) GROUP BY 1, 2, 3),
			changed AS (SELECT d.n FROM doubtful d JOIN e ON (e.op = 't' OR e.key = d.key) AND e.seq > d.since_seq
			            UNION SELECT d.n FROM doubtful d JOIN back e ON (e.op = 't' OR e.key = d.key) AND e.seq > coalesce((
			                  SELECT max(a.seq) FROM backfill_control.ack a WHERE a.direction = e.direction
			                     AND a.at < (SELECT b.at FROM backfill_control.batch b WHERE b.direction = $2 AND b.last_seq = d.since_seq)), 0))
			UPDATE backfill_control.shadow_read s SET verdict = CASE
			       WHEN s.problem <> '' THEN 'unknown' WHEN d.settled THEN 'mismatch' WHEN s.n IN (SELECT n FROM changed) THEN 'stale'
			       WHEN NOT d.settled OR s.same IS NULL THEN 'unknown' WHEN s.same THEN 'match' ELSE 'mismatch' END,
			       problem = CASE WHEN NOT d.settled THEN d.cause ELSE s.problem END
			  FROM backfill_control.shadow_read x LEFT JOIN backfill_control.difference d ON d.run_id = $1 AND d.key = x.key WHERE x.run_id = $1 AND s.n = x.n`,
			id, run.Direction.ID, run.TableID, run.Both, run.Site, run.To); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.difference WHERE run_id = $1 AND NOT settled`, id); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			WITH odd AS (
			    INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key, here, source, receiver, cause)
			    SELECT DISTINCT ON (s.key) $1, l.n, CASE WHEN NOT s.found THEN 'surplus' WHEN s.source IS NULL THEN 'missing' ELSE 'different' END, true, s.key, s.key,
			           CASE WHEN s.found THEN ARRAY(SELECT CASE WHEN i = ANY (s.compared) OR s.source IS NULL THEN s.served[i] ELSE s.source[i] END FROM generate_subscripts(s.served, 1) i ORDER BY i) END,
			           s.source, 'the old path served what ' || $2 || ' does not hold, and no change of it was captured since'
			      FROM backfill_control.shadow_read s JOIN backfill_control.run_leaf l ON l.run_id = $1 AND l.upper = s.key
			     WHERE s.run_id = $1 AND s.verdict = 'mismatch' AND NOT EXISTS (SELECT FROM backfill_control.difference d WHERE d.run_id = $1 AND d.key = s.key)
			     ORDER BY s.key, s.n DESC RETURNING leaf)
			UPDATE backfill_control.run_leaf l SET state = 'different' FROM odd WHERE l.run_id = $1 AND l.n = odd.leaf`, id, run.From); err != nil {
			return err
		}
		if err := causes(ctx, tx, run); err != nil {
			return err
		}
		if err := countReads(ctx, tx, run); err != nil {
			return err
		}
		return s.setAside(ctx, tx, run)
	})
	return closed, err
}

// unjudgedReads leaves the reads of a run that failed unknown. The keys it has found by
// then are none that could be repaired, and would keep the gate shut for good: what is
// wrong with them the next read of them finds, too.
func unjudgedReads(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation, why string) error {
	if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.difference WHERE run_id = $1`, run.ID); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `UPDATE backfill_control.shadow_read SET verdict = 'unknown', problem = $2 WHERE run_id = $1`, run.ID, why); err != nil {
		return err
	}
	return countReads(ctx, tx, run)
}

// countReads adds a run's verdicts to those of the minutes in which the reads were
// reported. Reads that match or are stale have told what they can.
func countReads(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation) error {
	if _, err := tx.Exec(ctx, `
		INSERT INTO backfill_control.shadow_count AS c (direction, table_id, at, match, stale, mismatch, "unknown")
		SELECT s.direction, s.table_id, greatest(date_trunc('minute', s.reported_at), CASE WHEN s.reported_at >= p.soak_since THEN p.soak_since END) AS at,
		       count(*) FILTER (WHERE verdict = 'match'), count(*) FILTER (WHERE verdict = 'stale'), count(*) FILTER (WHERE verdict = 'mismatch'), count(*) FILTER (WHERE verdict = 'unknown')
		  FROM backfill_control.shadow_read s JOIN backfill_control.cutover p ON p.direction = s.direction AND p.table_id = s.table_id WHERE s.run_id = $1 GROUP BY 1, 2, 3
		ON CONFLICT (direction, table_id, at) DO UPDATE SET match = c.match + excluded.match, stale = c.stale + excluded.stale,
		       mismatch = c.mismatch + excluded.mismatch, "unknown" = c."unknown" + excluded."unknown"`, run.ID); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `
		UPDATE backfill_control.cutover p SET mismatches = p.mismatches + (SELECT count(*) FROM backfill_control.shadow_read WHERE run_id = $1 AND verdict = 'mismatch')
		 WHERE p.direction = $2 AND p.table_id = $3`, run.ID, run.Direction.ID, run.TableID); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `DELETE FROM backfill_control.shadow_read WHERE run_id = $1 AND verdict IN ('match', 'stale')`, run.ID)
	return err
}

// setAside closes a run of shadow reads. The keys it has found go to the run that
// holds those of the table already, so that all of them are repaired as one; the
// first becomes that run.
func (s *Store) setAside(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation) error {
	var holder int64
	err := tx.QueryRow(ctx, `
		SELECT r.id FROM backfill_control.reconciliation r
		 WHERE r.direction = $1 AND r.table_id = $2 AND r.mode = 'shadow' AND r.state = 'FINISHED' AND r.layout_id = $3 AND r.receiver_layout = $4
		   AND EXISTS (SELECT FROM backfill_control.difference d WHERE d.run_id = r.id) ORDER BY r.id DESC LIMIT 1 FOR UPDATE`,
		run.Direction.ID, run.TableID, run.LayoutID, run.ReceiverLayoutID).Scan(&holder)
	if err != nil && err != pgx.ErrNoRows {
		return err
	}
	if holder != 0 {
		if _, err := tx.Exec(ctx, `
			WITH fresh AS MATERIALIZED (
			    SELECT d.n, d.key, (SELECT max(n) FROM backfill_control.run_leaf WHERE run_id = $2) + row_number() OVER (ORDER BY d.n) AS leaf FROM backfill_control.difference d
			     WHERE d.run_id = $1 AND NOT EXISTS (SELECT FROM backfill_control.difference k WHERE k.run_id = $2 AND k.key = d.key AND k.state IN ('open', 'waived'))),
			leaves AS (
			    INSERT INTO backfill_control.run_leaf (run_id, n, attempts, state, lower, upper, judged_at) SELECT $2, leaf, 1, 'different', key, key, clock_timestamp() FROM fresh),
			moved AS (UPDATE backfill_control.difference d SET run_id = $2, leaf = fresh.leaf FROM fresh WHERE d.run_id = $1 AND d.n = fresh.n)
			UPDATE backfill_control.reconciliation SET leaves = leaves + (SELECT count(*) FROM fresh), closed_at = clock_timestamp() WHERE id = $2 AND EXISTS (SELECT FROM fresh)`, run.ID, holder); err != nil {
			return err
		}
		for _, sql := range []string{`DELETE FROM backfill_control.difference WHERE run_id = $1`, `DELETE FROM backfill_control.run_leaf WHERE run_id = $1 AND state = 'different'`} {
			if _, err := tx.Exec(ctx, sql, run.ID); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.shadow_read SET run_id = $2 WHERE run_id = $1`, run.ID, holder); err != nil {
			return err
		}
	}
	if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.run_leaf l WHERE run_id = $1 AND state <> 'different'`, run.ID); err != nil {
		return err
	}
	now, err := s.tally(ctx, tx, run.ID)
	if err != nil {
		return err
	}
	if now.Counts.Different > 0 {
		return s.closeRun(ctx, tx, now, backfill.RunFinished, TallyOf(now).Judge(true), "", "")
	}
	if _, err := tx.Exec(ctx, `
		UPDATE backfill_control.reconciliation SET state = 'FINISHED', verdict = 'UNKNOWN', waiting = '', closed_at = clock_timestamp() WHERE id = $1`, run.ID); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.leaf_row WHERE run_id = $1`, run.ID); err != nil {
		return err
	}
	return notify(ctx, tx, "site", run.Site)
}

// soakAgain begins the soak of a table anew: what was read before rows were sent
// again tells nothing of what is there now.
func soakAgain(ctx context.Context, tx pgx.Tx, direction, table int32) error {
	_, err := tx.Exec(ctx, `UPDATE backfill_control.cutover SET soak_since = clock_timestamp() WHERE direction = $1 AND table_id = $2`, direction, table)
	return err
}

// RecentKeys are up to limit keys of a table that were sent last, deleted ones among them.
func (s *Store) RecentKeys(ctx context.Context, direction, table int32, limit int) (keys []backfill.Key, err error) {
	rows, err := s.pool.Query(ctx, `
		SELECT key FROM (SELECT key, max(seq) AS seq FROM (
		    SELECT * FROM backfill_control.entry WHERE direction = $1 ORDER BY seq DESC LIMIT 10000) e
		  WHERE table_id = $2 AND op IN ('c', 'u', 'd') AND NOT dropped GROUP BY key) k ORDER BY seq DESC LIMIT $3`, direction, table, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[backfill.Key])
}
