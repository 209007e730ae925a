package control

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Token is an API token without its secret, which is stored as a hash only.
type Token struct {
	Name string `json:"name"`
	Rights
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt *time.Time `json:"expires_at"`
	UsedAt    *time.Time `json:"used_at"` // to the minute
	RevokedAt *time.Time `json:"revoked_at"`
}

// NewSecret makes a token's secret: 256 random bits.
func NewSecret() string {
	b := make([]byte, 32)
	rand.Read(b) // never fails
	return "bf_" + base64.RawURLEncoding.EncodeToString(b)
}

// PutToken records a token with a role on every site, which does not expire; the same
// name again replaces it.
func (s *Store) PutToken(ctx context.Context, by, name string, role Role, secret string) error {
	return s.CreateToken(ctx, by, Token{Name: name, Rights: Rights{Role: role}}, secret)
}

// CreateToken records a token: its name, rights and expiry. The same name again
// replaces it.
func (s *Store) CreateToken(ctx context.Context, by string, t Token, secret string) error {
	if t.Name == "" || len(t.Name) > 100 {
		return backfill.Errorf(backfill.Invalid, "a token needs a name of 1 to 100 bytes: it stands in every record of what is done with it")
	}
	if len(secret) < 16 {
		return backfill.Errorf(backfill.Invalid, "a token needs at least 16 characters")
	}
	if err := t.given(); err != nil {
		return err
	}
	hash := sha256.Sum256([]byte(secret))
	return s.in(ctx, func(tx pgx.Tx) error {
		if err := t.check(ctx, tx); err != nil {
			return err
		}
		if err := unnamed(ctx, tx, "account", t.Name); err != nil {
			return err
		}
		var before *Rights
		var old Rights
		switch err := tx.QueryRow(ctx, `SELECT coalesce(role, ''), sites FROM backfill_control.token WHERE name = $1 AND revoked_at IS NULL FOR UPDATE`, t.Name).Scan(&old.Role, &old.Sites); {
		case err == nil:
			before = &old
		case one(err, "") == err:
			return err
		}
		_, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.token (name, role, sites, expires_at, sha256) VALUES ($1, nullif($2, ''), $3, $4, $5)
			ON CONFLICT (name) DO UPDATE SET role = excluded.role, sites = excluded.sites, expires_at = excluded.expires_at,
			       sha256 = excluded.sha256, revoked_at = NULL, created_at = clock_timestamp()`,
			t.Name, t.Role, t.Sites, t.ExpiresAt, hash[:])
		if sqlState(err) == "23505" {
			return backfill.Errorf(backfill.Conflict, "the same token exists under another name: a token is for one, so take another value for this")
		}
		if err != nil {
			return err
		}
		return audit(ctx, tx, by, "token.put", "", t.Name, map[string]any{"before": before, "after": t.Rights, "expires_at": t.ExpiresAt})
	})
}

// RevokeToken ends a token at once.
func (s *Store) RevokeToken(ctx context.Context, by, name string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		var before Rights
		err := tx.QueryRow(ctx, `UPDATE backfill_control.token SET revoked_at = clock_timestamp() WHERE name = $1 AND revoked_at IS NULL RETURNING coalesce(role, ''), sites`, name).
			Scan(&before.Role, &before.Sites)
		if err != nil {
			return one(err, "valid token %q", name)
		}
		return audit(ctx, tx, by, "token.revoke", "", name, map[string]any{"before": before})
	})
}

// Tokens lists all tokens, revoked and expired ones too.
func (s *Store) Tokens(ctx context.Context) ([]Token, error) {
	rows, err := s.pool.Query(ctx, `SELECT name, coalesce(role, ''), sites, created_at, expires_at, used_at, revoked_at FROM backfill_control.token ORDER BY name`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (t Token, err error) {
		return t, r.Scan(&t.Name, &t.Role, &t.Sites, &t.CreatedAt, &t.ExpiresAt, &t.UsedAt, &t.RevokedAt)
	})
}

// Account returns whom a token's secret stands for, or Unauthorized.
func (s *Store) Account(ctx context.Context, secret string) (i Identity, err error) {
	hash := sha256.Sum256([]byte(secret))
	// used_at is kept to the minute, so that reading does not write.
	err = s.pool.QueryRow(ctx, `
		WITH t AS (SELECT id, name, role, sites, used_at FROM backfill_control.token
		            WHERE sha256 = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())),
		     u AS (UPDATE backfill_control.token SET used_at = clock_timestamp()
		            WHERE id IN (SELECT id FROM t WHERE used_at IS NULL OR used_at < clock_timestamp() - interval '1 minute'))
		SELECT name, coalesce(role, ''), sites FROM t`, hash[:]).Scan(&i.Name, &i.Role, &i.Sites)
	if one(err, "token") != err {
		return i, backfill.Errorf(backfill.Unauthorized, "the token is wrong, revoked or expired")
	}
	i.Via = ViaToken
	return i, err
}
