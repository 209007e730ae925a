package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// AuditEntry is one decision or change of configuration.
type AuditEntry struct {
	ID      int64          `json:"id"`
	At      time.Time      `json:"at"`
	Account string         `json:"account"`
	Action  string         `json:"action"`
	Site    string         `json:"site,omitempty"`
	Subject string         `json:"subject"`
	Detail  map[string]any `json:"detail"`
}

func audit(ctx context.Context, tx pgx.Tx, account, action, site, subject string, detail map[string]any) error {
	if detail == nil {
		detail = map[string]any{}
	}
	_, err := tx.Exec(ctx, `INSERT INTO backfill_control.audit (account, action, site, subject, detail) VALUES ($1, $2, nullif($3, ''), $4, $5)`,
		account, action, site, subject, detail)
	return err
}

// Audit lists entries newest first, those with an id below before (0 = from the newest).
func (s *Store) Audit(ctx context.Context, site string, before int64, limit int) ([]AuditEntry, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT id, at, account, action, coalesce(site, ''), subject, detail
		  FROM backfill_control.audit
		 WHERE ($1 = '' OR site = $1) AND ($2 = 0 OR id < $2)
		 ORDER BY id DESC LIMIT $3`, site, before, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[AuditEntry])
}
