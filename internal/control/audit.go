package control

import (
	"context"
	"errors"
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
	Via     string         `json:"via"`     // token, session, header, temporal; "" for the command line and what went by itself
	Address string         `json:"address"` // of whoever asked, "" when nobody did over the network
	Detail  map[string]any `json:"detail"`
}

func audit(ctx context.Context, tx pgx.Tx, account, action, site, subject string, detail map[string]any) error {
	if detail == nil {
		detail = map[string]any{}
	}
	from := OriginOf(ctx)
	_, err := tx.Exec(ctx, `INSERT INTO backfill_control.audit (account, action, site, subject, detail, via, address) VALUES ($1, $2, nullif($3, ''), $4, $5, $6, $7)`,
		account, action, site, subject, detail, from.Via, from.Address)
	return err
}

// standing is a row of configuration as the audit shows it before a change, nil when
// there is none. The query selects its columns by the names to show.
func standing(ctx context.Context, tx pgx.Tx, query string, args ...any) (row map[string]any, err error) {
	err = tx.QueryRow(ctx, `SELECT to_jsonb(x) FROM (`+query+`) x`, args...).Scan(&row)
	if one(err, "") != err {
		return nil, nil
	}
	return row, err
}

// AuditFilter narrows the audit; zero fields do not narrow.
type AuditFilter struct {
	Site, Account string
	Sites         []string // any of these, nil for all
	Action        string   // itself, or what stands before the dot: backfill is all of backfill.approve and so on
	Request       int64
	Before        int64 // ids below
	Limit         int
}

// Audit lists entries newest first.
func (s *Store) Audit(ctx context.Context, f AuditFilter) ([]AuditEntry, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT id, at, account, action, coalesce(site, ''), subject, via, address, detail
		  FROM backfill_control.audit
		 WHERE ($1 = '' OR site = $1) AND ($2 = 0 OR id < $2) AND ($3 = '' OR account = $3)
		   AND ($4 = '' OR action = $4 OR split_part(action, '.', 1) = $4) AND ($5 = 0 OR subject LIKE 'request ' || $5::bigint || ' of %')
		   AND ($7::text[] IS NULL OR site = ANY ($7))
		 ORDER BY id DESC LIMIT $6`, f.Site, f.Before, f.Account, f.Action, f.Request, f.Limit, f.Sites)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[AuditEntry])
}

// LastRecord is when the newest entry was made, zero when there is none.
func (s *Store) LastRecord(ctx context.Context) (at time.Time, err error) {
	err = s.pool.QueryRow(ctx, `SELECT max(at) FROM backfill_control.audit HAVING max(at) IS NOT NULL`).Scan(&at)
	if errors.Is(err, pgx.ErrNoRows) {
		return at, nil
	}
	return at, err
}
