package control

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"backfill/internal/row"
)

// PutLayout records a layout and returns its id; the same layout has one id.
func (s *Store) PutLayout(ctx context.Context, l *row.Layout) (id int64, err error) {
	return putLayout(ctx, s.pool, l)
}

// PutLayouts records layouts and returns their ids, in their order.
func (s *Store) PutLayouts(ctx context.Context, all []*row.Layout) ([]int64, error) {
	prints, ids := make([]string, len(all)), make([]int64, len(all))
	for i, l := range all {
		prints[i] = l.Fingerprint()
	}
	rows, err := s.pool.Query(ctx, `SELECT p.n - 1, l.id FROM unnest($1::text[]) WITH ORDINALITY p (fingerprint, n) JOIN backfill_control.layout l USING (fingerprint)`, prints)
	if err != nil {
		return nil, err
	}
	var n, id int64
	if _, err := pgx.ForEachRow(rows, []any{&n, &id}, func() error { ids[n] = id; return nil }); err != nil {
		return nil, err
	}
	for i, l := range all {
		if ids[i] == 0 {
			if ids[i], err = s.PutLayout(ctx, l); err != nil {
				return nil, err
			}
		}
	}
	return ids, nil
}

// PutLayout records a layout with the push's entries.
func (p *Push) PutLayout(ctx context.Context, l *row.Layout) (id int64, err error) {
	return putLayout(ctx, p.tx, l)
}

func putLayout(ctx context.Context, in interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}, l *row.Layout) (id int64, err error) {
	const known = `SELECT id FROM backfill_control.layout WHERE fingerprint = $1`
	if err := in.QueryRow(ctx, known, l.Fingerprint()).Scan(&id); !errors.Is(err, pgx.ErrNoRows) {
		return id, err
	}
	// Two steps: an insert that conflicts returns nothing, and does not see the row
	// of a transaction that committed after this one began.
	if _, err := in.Exec(ctx, `INSERT INTO backfill_control.layout (fingerprint, definition) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		l.Fingerprint(), l); err != nil {
		return 0, err
	}
	err = in.QueryRow(ctx, known, l.Fingerprint()).Scan(&id)
	return id, err
}

// Layout returns a recorded layout, or NotFound.
func (s *Store) Layout(ctx context.Context, id int64) (*row.Layout, error) {
	var l row.Layout
	err := s.pool.QueryRow(ctx, `SELECT definition FROM backfill_control.layout WHERE id = $1`, id).Scan(&l)
	if err = one(err, "layout %d", id); err != nil {
		return nil, err
	}
	return &l, nil
}
