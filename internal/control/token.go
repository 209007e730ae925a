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

// Role is what an account may do; each includes the ones before it.
type Role string

// The roles, smallest first.
const (
	Viewer    Role = "viewer"
	Requester Role = "requester"
	Reviewer  Role = "reviewer"
	Admin     Role = "admin"
)

var roleRank = map[Role]int{Viewer: 1, Requester: 2, Reviewer: 3, Admin: 4}

// Covers reports whether r may do what needs need.
func (r Role) Covers(need Role) bool { return roleRank[r] >= roleRank[need] }

// Token is an API token without its secret, which is stored as a hash only.
type Token struct {
	Name      string     `json:"name"`
	Role      Role       `json:"role"`
	CreatedAt time.Time  `json:"created_at"`
	UsedAt    *time.Time `json:"used_at"`
	RevokedAt *time.Time `json:"revoked_at"`
}

// NewSecret makes a token's secret: 256 random bits.
func NewSecret() string {
	b := make([]byte, 32)
	rand.Read(b) // never fails
	return "bf_" + base64.RawURLEncoding.EncodeToString(b)
}

// PutToken records a token under a name; the same name again replaces it.
func (s *Store) PutToken(ctx context.Context, by, name string, role Role, secret string) error {
	if roleRank[role] == 0 {
		return backfill.Errorf(backfill.Invalid, "role %q: use viewer, requester, reviewer or admin", role)
	}
	if name == "" || len(name) > 100 {
		return backfill.Errorf(backfill.Invalid, "a token needs a name of 1 to 100 bytes: it stands in every record of what is done with it")
	}
	if len(secret) < 16 {
		return backfill.Errorf(backfill.Invalid, "a token needs at least 16 characters")
	}
	hash := sha256.Sum256([]byte(secret))
	return s.in(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.token (name, role, sha256) VALUES ($1, $2, $3)
			ON CONFLICT (name) DO UPDATE SET role = excluded.role, sha256 = excluded.sha256, revoked_at = NULL, created_at = clock_timestamp()`,
			name, role, hash[:])
		if sqlState(err) == "23505" {
			return backfill.Errorf(backfill.Conflict, "the same token exists under another name")
		}
		if err != nil {
			return err
		}
		return audit(ctx, tx, by, "token.put", "", name, map[string]any{"role": role})
	})
}

// RevokeToken ends a token at once.
func (s *Store) RevokeToken(ctx context.Context, by, name string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE backfill_control.token SET revoked_at = clock_timestamp() WHERE name = $1 AND revoked_at IS NULL`, name)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return backfill.Errorf(backfill.NotFound, "no valid token %q", name)
		}
		return audit(ctx, tx, by, "token.revoke", "", name, nil)
	})
}

// Tokens lists all tokens, revoked ones too.
func (s *Store) Tokens(ctx context.Context) ([]Token, error) {
	rows, err := s.pool.Query(ctx, `SELECT name, role, created_at, used_at, revoked_at FROM backfill_control.token ORDER BY name`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Token])
}

// Account returns the name and role a secret stands for, or Unauthorized.
func (s *Store) Account(ctx context.Context, secret string) (name string, role Role, err error) {
	hash := sha256.Sum256([]byte(secret))
	// used_at is kept to the minute, so that reading does not write.
	err = s.pool.QueryRow(ctx, `
		WITH t AS (SELECT id, name, role, used_at FROM backfill_control.token WHERE sha256 = $1 AND revoked_at IS NULL),
		     u AS (UPDATE backfill_control.token SET used_at = clock_timestamp()
		            WHERE id IN (SELECT id FROM t WHERE used_at IS NULL OR used_at < clock_timestamp() - interval '1 minute'))
		SELECT name, role FROM t`, hash[:]).Scan(&name, &role)
	if one(err, "token") != err {
		return "", "", backfill.Errorf(backfill.Unauthorized, "the token is wrong or revoked")
	}
	return name, role, err
}
