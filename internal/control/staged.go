package control

import (
	"context"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// StagedRow is one row a walk has read. Row and Receiver follow the columns of
// the request's layout; nil is SQL NULL.
type StagedRow struct {
	N            int64
	Key          backfill.Key
	Row          []*string
	Effect       backfill.Effect
	Receiver     []*string // what the receiver holds, for an overwrite
	SupersededBy *int64
}

// StagedRows returns up to limit staged rows of a request after position after,
// in key order; effect "" means all.
func (s *Store) StagedRows(ctx context.Context, id int64, effect backfill.Effect, after int64, limit int) ([]StagedRow, error) {
	const columns = `SELECT s.n, s.key, s.row, e.effect, e.receiver, s.superseded_by `
	var sql string
	switch effect {
	case "", backfill.Unknown:
		sql = columns + `FROM backfill_control.staged s LEFT JOIN backfill_control.effect e USING (request_id, n)
			WHERE s.request_id = $1 AND s.n > $2 AND ($4::"char" IS NULL OR e.n IS NULL) ORDER BY s.n LIMIT $3`
	default:
		// Through the index by effect, so that a rare effect is found without reading the others.
		sql = columns + `FROM backfill_control.effect e JOIN backfill_control.staged s USING (request_id, n)
			WHERE e.request_id = $1 AND e.n > $2 AND e.effect = $4::"char" ORDER BY e.n LIMIT $3`
	}
	rows, err := s.pool.Query(ctx, sql, id, after, limit, effectCode(effect))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (x StagedRow, err error) {
		var code *string
		err = r.Scan(&x.N, &x.Key, &x.Row, &code, &x.Receiver, &x.SupersededBy)
		x.Effect = effectOf(code)
		return x, err
	})
}

// effectCode is how an effect is stored; unknown is the absence of a row.
func effectCode(e backfill.Effect) *string {
	codes := map[backfill.Effect]string{backfill.Insert: "i", backfill.Overwrite: "o", backfill.Identical: "=", backfill.Unknown: "?"}
	if c, ok := codes[e]; ok {
		return &c
	}
	return nil
}

func effectOf(code *string) backfill.Effect {
	if code == nil {
		return backfill.Unknown
	}
	return map[string]backfill.Effect{"i": backfill.Insert, "o": backfill.Overwrite, "=": backfill.Identical}[*code]
}
