package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// ProvenTable is what reconciliations have come to for a table and direction.
type ProvenTable struct {
	Site, Table, From string
	CleanAt           *time.Time // the end of the last run that found the whole table equal
	Coverage          float64    // of the last finished run of the whole table, 0 to 1
	Mismatches        int64      // leaves found to differ, in all runs ever
	Open              int64      // keys that differ, neither repaired nor waived
}

// ProvenTables lists what reconciliations have come to, of every table that had one.
func (s *Store) ProvenTables(ctx context.Context) ([]ProvenTable, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT d.site, t.name, d.from_side,
		       (SELECT max(r.closed_at) FROM backfill_control.reconciliation r
		         WHERE r.direction = x.direction AND r.table_id = x.table_id AND r.mode = 'full' AND r.state = 'FINISHED' AND r.verdict = 'EQUAL'),
		       coalesce(l.covered::float8 / nullif(l.rows, 0), CASE WHEN l.rows = 0 AND l.equal > 0 THEN 1 ELSE 0 END),
		       (SELECT count(*) FROM backfill_control.reconciliation r JOIN backfill_control.run_leaf f ON f.run_id = r.id AND f.state = 'different'
		         WHERE r.direction = x.direction AND r.table_id = x.table_id AND r.mode <> 'shadow')
		       + coalesce((SELECT y.value::bigint FROM backfill_control.tally y WHERE y.direction = x.direction AND y.table_id = x.table_id AND y.what = 'leaves different'), 0),
		       (SELECT count(*) FROM backfill_control.difference f WHERE f.run_id = x.last AND f.settled AND f.state = 'open')
		  FROM (SELECT direction, table_id, max(id) FILTER (WHERE state = 'FINISHED' AND mode IN ('full', 'sampled')) AS last
		          FROM backfill_control.reconciliation WHERE mode <> 'shadow' GROUP BY 1, 2) x
		  JOIN backfill_control.direction d ON d.id = x.direction JOIN backfill_control.table_config t ON t.id = x.table_id AND t.removed_at IS NULL,
		       LATERAL (SELECT sum(source_count) AS rows, sum(source_count) FILTER (WHERE state IN ('equal', 'different')) AS covered, count(*) FILTER (WHERE state = 'equal') AS equal
		                  FROM backfill_control.run_leaf WHERE run_id = x.last) l
		 ORDER BY 1, 2, 3`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[ProvenTable])
}

// retainRuns removes the leaves and keys of the oldest closed reconciliation past its
// window, and the run once nothing is left of it. The last finished run of a whole
// table stays: it says what is proven. found is false when there is none to remove.
func (s *Store) retainRuns(ctx context.Context, keep time.Duration, limit int) (runs int64, found bool, err error) {
	err = s.in(ctx, func(tx pgx.Tx) error {
		var id int64
		err := tx.QueryRow(ctx, `
			SELECT r.id FROM backfill_control.reconciliation r
			 WHERE r.closed_at < clock_timestamp() - $1::interval
			   AND NOT EXISTS (SELECT FROM backfill_control.reconciliation c WHERE c.parent = r.id)
			   AND NOT EXISTS (SELECT FROM backfill_control.request q WHERE q.run_id = r.id)
			   AND NOT (r.mode = 'shadow' AND EXISTS (SELECT FROM backfill_control.difference f WHERE f.run_id = r.id AND f.settled AND f.state = 'open'))
			   AND r.id <> coalesce((SELECT max(l.id) FROM backfill_control.reconciliation l
			                          WHERE l.direction = r.direction AND l.table_id = r.table_id AND l.state = 'FINISHED' AND l.mode IN ('full', 'sampled')), 0)
			 ORDER BY r.closed_at LIMIT 1 FOR UPDATE SKIP LOCKED`, keep).Scan(&id)
		if err == pgx.ErrNoRows {
			return nil
		}
		if err != nil {
			return err
		}
		found = true
		tag, err := tx.Exec(ctx, `
			DELETE FROM backfill_control.difference WHERE run_id = $1 AND n = ANY (ARRAY(SELECT n FROM backfill_control.difference WHERE run_id = $1 ORDER BY n LIMIT $2))`, id, limit)
		if err != nil || tag.RowsAffected() >= int64(limit) {
			return err
		}
		// How many leaves have differed is counted for ever.
		var leaves int64
		if err := tx.QueryRow(ctx, `
			WITH gone AS (
			    DELETE FROM backfill_control.run_leaf WHERE run_id = $1 AND n = ANY (ARRAY(SELECT n FROM backfill_control.run_leaf WHERE run_id = $1 ORDER BY n LIMIT $2)) RETURNING state),
			told AS (
			    INSERT INTO backfill_control.tally AS t (direction, table_id, what, value)
			    SELECT r.direction, r.table_id, 'leaves different', d.n
			      FROM backfill_control.reconciliation r, (SELECT count(*) AS n FROM gone WHERE state = 'different') d WHERE r.id = $1 AND r.mode <> 'shadow' AND d.n > 0
			    ON CONFLICT (direction, table_id, what) DO UPDATE SET value = t.value + excluded.value)
			SELECT count(*) FROM gone`, id, limit).Scan(&leaves); err != nil || leaves >= int64(limit) {
			return err
		}
		runs = 1
		_, err = tx.Exec(ctx, `DELETE FROM backfill_control.reconciliation WHERE id = $1`, id)
		return err
	})
	return runs, found, err
}
