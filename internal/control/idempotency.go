package control

import (
	"bytes"
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Call is one request that carries an idempotency key.
type Call struct {
	Account, Key string
	Method, Path string
	BodyHash     []byte
}

// Answer is what a call was answered with.
type Answer struct {
	Status   int
	Location string
	Body     []byte
}

// BeginCall claims a call's key for a day. It returns the stored answer when the
// same call was answered before, and nil when the caller is to go on and then to
// end or drop the call. Another call under the same key is Invalid, and one that
// is still under way a Conflict.
func (s *Store) BeginCall(ctx context.Context, c Call) (*Answer, error) {
	var earlier Call
	var status *int
	var answer Answer
	err := s.in(ctx, func(tx pgx.Tx) error {
		// A call that has not ended after two minutes never will: its process is gone.
		if _, err := tx.Exec(ctx, `
			DELETE FROM backfill_control.idempotency
			 WHERE created_at < clock_timestamp() - CASE WHEN status IS NULL THEN interval '2 minutes' ELSE interval '1 day' END`); err != nil {
			return err
		}
		// DO UPDATE waits for, and then sees, a call that another process has just begun.
		return tx.QueryRow(ctx, `
			WITH mine AS (INSERT INTO backfill_control.idempotency AS i (account, key, method, path, body_hash) VALUES ($1, $2, $3, $4, $5)
			    ON CONFLICT (account, key) DO UPDATE SET key = i.key
			    RETURNING i.method, i.path, i.body_hash, i.status, i.location, i.body, i.xmax = 0 AS fresh)
			SELECT method, path, body_hash, CASE WHEN fresh THEN 0 ELSE status END, coalesce(location, ''), body FROM mine`,
			c.Account, c.Key, c.Method, c.Path, c.BodyHash).
			Scan(&earlier.Method, &earlier.Path, &earlier.BodyHash, &status, &answer.Location, &answer.Body)
	})
	switch {
	case err != nil:
		return nil, err
	case status != nil && *status == 0:
		return nil, nil
	case earlier.Method != c.Method || earlier.Path != c.Path || !bytes.Equal(earlier.BodyHash, c.BodyHash):
		return nil, &backfill.Error{Code: backfill.Invalid, Message: "the idempotency key was used for another request: make a new one for each",
			Fields: []backfill.FieldError{{Field: "Idempotency-Key", Message: "was used for another request"}}}
	case status == nil:
		return nil, backfill.Errorf(backfill.Conflict, "the request with this idempotency key is still under way: ask again later")
	}
	answer.Status = *status
	return &answer, nil
}

// EndCall stores what a call was answered with.
func (s *Store) EndCall(ctx context.Context, c Call, a Answer) error {
	tag, err := s.pool.Exec(ctx, `
		UPDATE backfill_control.idempotency SET status = $3, location = $4, body = $5 WHERE account = $1 AND key = $2 AND status IS NULL`,
		c.Account, c.Key, a.Status, a.Location, a.Body)
	if err == nil && tag.RowsAffected() == 0 {
		err = errors.New("the claim of the idempotency key is gone")
	}
	return err
}

// DropCall gives a key free whose call changed nothing.
func (s *Store) DropCall(ctx context.Context, c Call) error {
	_, err := s.pool.Exec(ctx, `DELETE FROM backfill_control.idempotency WHERE account = $1 AND key = $2 AND status IS NULL`, c.Account, c.Key)
	return err
}
