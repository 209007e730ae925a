package control

import (
	"context"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Life is what is known of one row: every change of its key, and every time a
// backfill staged it.
type Life struct {
	Entries []Entry // newest first; dropped ones and truncates of the table too
	Staged  []Stay  // newest first
}

// Stay is one staging of a row.
type Stay struct {
	Request *backfill.Request
	Row     StagedRow
}

// Life returns the newest limit changes and stagings of a key of a table.
func (s *Store) Life(ctx context.Context, site, table string, key backfill.Key, limit int) (*Life, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+entryColumns+entryFrom+`
		 WHERE d.site = $1 AND t.site = $1 AND t.name = $2 AND (x.key = $3 OR x.op = 't')
		 ORDER BY x.seq DESC LIMIT $4`, site, table, key, limit)
	if err != nil {
		return nil, err
	}
	out := &Life{}
	if out.Entries, err = pgx.CollectRows(rows, scanEntry); err != nil {
		return nil, err
	}
	rows, err = s.pool.Query(ctx, `
		SELECT r.id, s.n FROM backfill_control.table_config t
		  JOIN backfill_control.request r ON r.table_id = t.id
		  JOIN backfill_control.staged s ON s.request_id = r.id AND `+keyIs("$3::text[]")+`
		 WHERE t.site = $1 AND t.name = $2 ORDER BY r.id DESC LIMIT $4`, site, table, key, limit)
	if err != nil {
		return nil, err
	}
	type place struct{ ID, N int64 }
	places, err := pgx.CollectRows(rows, pgx.RowToStructByPos[place])
	if err != nil {
		return nil, err
	}
	for _, p := range places {
		r, err := s.Request(ctx, p.ID)
		if err != nil {
			return nil, err
		}
		staged, err := s.StagedRows(ctx, p.ID, "", p.N-1, 1)
		if err != nil {
			return nil, err
		}
		if len(staged) == 1 {
			out.Staged = append(out.Staged, Stay{r, staged[0]})
		}
	}
	return out, nil
}
