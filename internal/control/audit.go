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

// AuditFilter narrows the audit; zero fields do not narrow.
type AuditFilter struct {
	Site, Account string
	Action        string // itself, or what stands before the dot: backfill is all of backfill.approve and so on
	Request       int64
	Before        int64 // ids below
	Limit         int
}

// Audit lists entries newest first.
func (s *Store) Audit(ctx context.Context, f AuditFilter) ([]AuditEntry, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT id, at, account, action, coalesce(site, ''), subject, detail
		  FROM backfill_control.audit
		 WHERE ($1 = '' OR site = $1) AND ($2 = 0 OR id < $2) AND ($3 = '' OR account = $3)
		   AND ($4 = '' OR action = $4 OR split_part(action, '.', 1) = $4) AND ($5 = 0 OR subject LIKE 'request ' || $5::bigint || ' of %')
		 ORDER BY id DESC LIMIT $6`, f.Site, f.Before, f.Account, f.Action, f.Request, f.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[AuditEntry])
}
