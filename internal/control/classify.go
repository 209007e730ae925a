package control

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// CopyStaged writes the staged rows numbered in (after, to] in COPY's binary form:
// n, key, row.
func (s *Store) CopyStaged(ctx context.Context, id, after, to int64, w io.Writer) error {
	return s.copyTo(ctx, w, fmt.Sprintf(`COPY (
		SELECT n, key, row FROM backfill_control.staged WHERE request_id = %d AND n > %d AND n <= %d ORDER BY n) TO STDOUT (FORMAT binary)`, id, after, to))
}

// ClassifyFrom tells where the classifying of a request's staged rows stands: the
// last row judged, the last row staged, and the request's state.
func (s *Store) ClassifyFrom(ctx context.Context, id int64) (after, staged int64, state backfill.State, err error) {
	err = s.pool.QueryRow(ctx, `SELECT classified, staged, state FROM backfill_control.request WHERE id = $1`, id).Scan(&after, &staged, &state)
	return after, staged, state, one(err, "request %d", id)
}

// StoreEffects stores the effects of the staged rows numbered in (after, to], in
// COPY's binary form: request_id, n, effect, receiver. They were judged when at
// least the changes up to at had been applied. When another agent was faster, or
// the request was decided meanwhile, nothing is stored: a decision counts for what
// could be read.
func (s *Store) StoreEffects(ctx context.Context, id, after, to, at int64, r io.Reader) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		// Copied aside first, so that the request is not locked meanwhile.
		if _, err := tx.Exec(ctx, `CREATE TEMP TABLE judged (LIKE backfill_control.effect) ON COMMIT DROP`); err != nil {
			return err
		}
		if _, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY pg_temp.judged (request_id, n, effect, receiver) FROM STDIN (FORMAT binary)`); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			WITH c AS (SELECT count(*) FILTER (WHERE effect = 'i') AS i, count(*) FILTER (WHERE effect = 'o') AS o, count(*) FILTER (WHERE effect = '=') AS s FROM pg_temp.judged)
			UPDATE backfill_control.request r
			   SET classified = $3, n_insert = n_insert + c.i, n_overwrite = n_overwrite + c.o, n_identical = n_identical + c.s, judged_seq = least(judged_seq, $4)
			  FROM c WHERE r.id = $1 AND r.classified = $2 AND r.state IN ('PENDING', 'IN_PROGRESS', 'AWAITING_REVIEW')`, id, after, to, at)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO backfill_control.effect SELECT * FROM pg_temp.judged`); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
}
