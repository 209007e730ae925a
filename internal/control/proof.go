package control

import (
	"context"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Leaf is a key range of a request's table as its source holds it, to be compared
// by the receiver's agent.
type Leaf struct {
	N           int32
	After, UpTo backfill.Key
	Rows        int64
	Digest      string
	Seq         int64 // the receiver may be looked at once it has applied up to here
	Equal       *bool // nil until it was
}

// AskLeaves hands leaves to the receiver's agent, under the walk's lease. afresh
// drops those of an earlier attempt.
func (s *Store) AskLeaves(ctx context.Context, l *Lease, leaves []Leaf, afresh bool) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx, l); err != nil {
			return err
		}
		if afresh {
			if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.leaf WHERE request_id = $1`, l.RequestID); err != nil {
				return err
			}
		}
		for _, f := range leaves {
			if _, err := tx.Exec(ctx, `
				INSERT INTO backfill_control.leaf (request_id, n, after_key, upto_key, rows, digest, seq) VALUES ($1, $2, $3, $4, $5, $6, $7)`,
				l.RequestID, f.N, f.After, f.UpTo, f.Rows, f.Digest, f.Seq); err != nil {
				return err
			}
		}
		return notifyID(ctx, tx, "request", l.RequestID)
	})
}

// Leaves lists the leaves of a request by number; with open only those that the
// receiver's agent has not compared.
func (s *Store) Leaves(ctx context.Context, id int64, open bool) ([]Leaf, error) {
	rows, err := s.pool.Query(ctx, `SELECT n, after_key, upto_key, rows, digest, seq, equal FROM backfill_control.leaf
		WHERE request_id = $1 AND ($2 = false OR equal IS NULL) ORDER BY n`, id, open)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Leaf])
}

// AnswerLeaf stores whether the receiver holds just what a leaf holds; the leaf is
// given, so that an answer to an earlier question is none to a later one.
func (s *Store) AnswerLeaf(ctx context.Context, id int64, f Leaf, equal bool) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.leaf SET equal = $6
			WHERE request_id = $1 AND n = $2 AND rows = $3 AND digest = $4 AND seq = $5 AND equal IS NULL`,
			id, f.N, f.Rows, f.Digest, f.Seq, equal); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
}

// Proven settles where the walk begins: after a key up to which the receiver holds
// rows just as the source does, or nil for the beginning. It is settled once, before
// the first page.
func (s *Store) Proven(ctx context.Context, l *Lease, upTo backfill.Key, rows int64) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx, l); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.request SET proof_at = clock_timestamp(), proven_key = $2, proven_rows = $3, resume_key = $2
			 WHERE id = $1 AND proof_at IS NULL AND staged = 0 AND resume_key IS NULL`, l.RequestID, upTo, rows); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.leaf WHERE request_id = $1`, l.RequestID); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", l.RequestID)
	})
}
