package api

import (
	"context"

	"backfill/internal/backfill"
)

// Alternative is one SQL statement that would do what a backfill does.
type Alternative struct {
	Statement string  `json:"statement"`
	Rows      int64   `json:"rows"`
	Seconds   float64 `json:"seconds"` // about how long it takes, and writers of the source wait
}

// A statement is suggested for tables up to that many rows, for which it takes about as
// long as people take to read this; and how many rows of a mapping a second it makes.
const statementRows, statementRate = 500_000, 50_000

// Alternative returns the statement that would be the better tool for a request: the
// table and its target are in one database, and it is small. Nil when there is none.
func (s *Service) Alternative(ctx context.Context, r *backfill.Request) (*Alternative, error) {
	if r.Mode != backfill.ModeFull || r.State != backfill.Pending && r.State != backfill.InProgress && r.State != backfill.AwaitingReview {
		return nil, nil
	}
	site, err := s.Store.Site(ctx, r.Site)
	if err != nil || !site.OneDatabase {
		return nil, err
	}
	p, err := s.Store.Panel(ctx, r.Site, r.Table, r.From)
	if err != nil || p.Source.Rows == nil || *p.Source.Rows > statementRows {
		return nil, err
	}
	t, err := s.Store.MappedTable(ctx, r.Site, r.Table)
	if err != nil || t.Made == nil {
		return nil, err
	}
	return &Alternative{t.Made.Statement(t.Relation(r.From), t.Relation(r.To)), *p.Source.Rows, float64(*p.Source.Rows) / statementRate}, nil
}
