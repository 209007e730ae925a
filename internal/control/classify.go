package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// CopyStagedKeys writes the keys of the staged rows numbered in (after, to] in COPY's
// binary form: n, key.
func (s *Store) CopyStagedKeys(ctx context.Context, id, after, to int64, w io.Writer) error {
	return s.copyInOrder(ctx, w, fmt.Sprintf(`COPY (
		SELECT n, key FROM backfill_control.staged WHERE request_id = %d AND n > %d AND n <= %d ORDER BY n) TO STDOUT (FORMAT binary)`, id, after, to))
}

// StagedBounds returns the keys of the first and the last staged row numbered from
// first to last.
func (s *Store) StagedBounds(ctx context.Context, id, first, last int64) (low, high backfill.Key, err error) {
	err = s.inOrder(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
			SELECT (SELECT key FROM backfill_control.staged WHERE request_id = $1 AND n >= $2 ORDER BY n LIMIT 1),
			       (SELECT key FROM backfill_control.staged WHERE request_id = $1 AND n <= $3 ORDER BY n DESC LIMIT 1)`,
			id, first, last).Scan(&low, &high)
	})
	return low, high, err
}

// CopyStagedRows writes the staged rows of those numbers, of which there must be some,
// in COPY's binary form: n, key, row.
func (s *Store) CopyStagedRows(ctx context.Context, id int64, numbers []int64, w io.Writer) error {
	list, err := json.Marshal(numbers)
	if err != nil {
		return err
	}
	// Bounded too: a planner that takes a long list for most of the request would read all of it.
	return s.copyInOrder(ctx, w, fmt.Sprintf(`COPY (
		SELECT n, key, row FROM backfill_control.staged WHERE request_id = %d AND n BETWEEN %d AND %d AND n = ANY ('{%s}') ORDER BY n) TO STDOUT (FORMAT binary)`,
		id, slices.Min(numbers), slices.Max(numbers), bytes.Trim(list, "[]")))
}

// ClassifyFrom tells where the classifying of a request's staged rows stands: the
// last row judged, the last row staged, and the request's state.
func (s *Store) ClassifyFrom(ctx context.Context, id int64) (after, staged int64, state backfill.State, err error) {
	err = s.pool.QueryRow(ctx, `SELECT classified, staged, state FROM backfill_control.request WHERE id = $1`, id).Scan(&after, &staged, &state)
	return after, staged, state, one(err, "request %d", id)
}

// StoreEffects stores the effects of the staged rows numbered in (after, to], in
// COPY's binary form: request_id, n, effect, receiver, result, problem. They were judged for a
// revision, when at least the changes up to at had been applied; layout is that of the
// rows which a mapping makes, 0 without one. When another agent
// was faster, or the request was decided or is to be judged again meanwhile, nothing
// is stored: a decision counts for what could be read.
func (s *Store) StoreEffects(ctx context.Context, id, revision, after, to, at int64, layout int64, r io.Reader) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		// Copied aside first, so that the request is not locked meanwhile.
		if _, err := tx.Exec(ctx, `
			CREATE TEMP TABLE judged ON COMMIT DROP AS SELECT request_id, n, effect, receiver, result, problem FROM backfill_control.effect WHERE false`); err != nil {
			return err
		}
		if _, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY pg_temp.judged (request_id, n, effect, receiver, result, problem) FROM STDIN (FORMAT binary)`); err != nil {
			return err
		}
		var uniform bool
		err := tx.QueryRow(ctx, `
			WITH c AS (SELECT count(*) FILTER (WHERE effect = 'i') AS i, count(*) FILTER (WHERE effect = 'o') AS o, count(*) FILTER (WHERE effect = '=') AS s FROM pg_temp.judged)
			`+countEffects, id, after, to, at, revision, layout).Scan(&uniform)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		if !uniform {
			if _, err := tx.Exec(ctx, `INSERT INTO backfill_control.effect (request_id, n, effect, receiver, result, problem) SELECT request_id, n, effect, receiver, result, problem FROM pg_temp.judged`); err != nil {
				return err
			}
		}
		return notifyID(ctx, tx, "request", id)
	})
}

// countEffects adds the counts of a chunk, in c, to the request's, and reports whether all
// rows of it are inserts or all identical; no row when nothing is to be stored.
const countEffects = `,
	u AS (UPDATE backfill_control.request r
	   SET classified = $3, n_insert = n_insert + c.i, n_overwrite = n_overwrite + c.o, n_identical = n_identical + c.s, judged_seq = least(judged_seq, $4), result_layout = nullif($6::bigint, 0)
	  FROM c WHERE r.id = $1 AND r.classified = $2 AND r.revision = $5 AND r.state IN ('PENDING', 'IN_PROGRESS', 'AWAITING_REVIEW') RETURNING r.id)
	INSERT INTO backfill_control.judged (request_id, upto, n_insert, n_overwrite, n_identical, uniform)
	SELECT u.id, $3, c.i, c.o, c.s, (CASE WHEN $6 = 0 THEN CASE $3 - $2 WHEN c.i THEN 'i' WHEN c.s THEN '=' END END)::"char" FROM u, c RETURNING uniform IS NOT NULL`

// StoreInserts is StoreEffects where all rows of the chunk would be inserts.
func (s *Store) StoreInserts(ctx context.Context, id, revision, after, to, at int64) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `WITH c AS (SELECT $3::bigint - $2::bigint AS i, 0 AS o, 0 AS s)`+countEffects, id, after, to, at, revision, 0)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
}

// Rejudge forgets the effects of a request's staged rows, so that the receiver's
// agent judges them as its rows are now. The staged set gets a new revision: a
// decision on what was read before no longer counts.
func (s *Store) Rejudge(ctx context.Context, id int64, by string) (*backfill.Request, error) {
	err := s.in(ctx, func(tx pgx.Tx) error {
		n, err := unjudged(ctx, tx, `id = $1 AND state = 'AWAITING_REVIEW'`, id)
		if err != nil {
			return err
		}
		if n == 0 {
			return whyUndecided(ctx, tx, id, 0)
		}
		if err := auditRequest(ctx, tx, id, by, "backfill.judge", nil); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
	if err != nil {
		return nil, err
	}
	return s.Request(ctx, id)
}

// unjudged forgets the effects of the staged rows of requests.
func unjudged(ctx context.Context, tx pgx.Tx, where string, args ...any) (requests int, err error) {
	rows, err := tx.Query(ctx, `
		UPDATE backfill_control.request SET revision = revision + 1, classified = 0, n_insert = 0, n_overwrite = 0, n_identical = 0, judged_seq = NULL
		 WHERE `+where+` RETURNING id`, args...)
	if err != nil {
		return 0, err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return 0, err
	}
	for _, sql := range []string{`DELETE FROM backfill_control.effect WHERE request_id = ANY ($1)`, `DELETE FROM backfill_control.judged WHERE request_id = ANY ($1)`} {
		if _, err := tx.Exec(ctx, sql, ids); err != nil {
			return 0, err
		}
	}
	return len(ids), nil
}
