package control

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"runtime"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"golang.org/x/crypto/argon2"

	"backfill/internal/backfill"
)

// User is a person who signs in with a password, without that.
type User struct {
	Name string `json:"name"`
	Rights
	CreatedAt  time.Time  `json:"created_at"`
	SignedInAt *time.Time `json:"signed_in_at"`
}

// The cost of a password's hash: the least that OWASP's cheat sheet on password
// storage names for argon2id.
const (
	hashPasses = 2
	hashMemory = 19 << 10 // KiB
	hashBytes  = 32
	saltBytes  = 16
)

const (
	minPassword = 12   // characters
	maxPassword = 1000 // bytes
)

// hashing bounds how many hashes are made at once, and so what they take of memory.
var hashing = make(chan struct{}, max(2, runtime.NumCPU()))

func hashPassword(password string, salt []byte) string {
	hashing <- struct{}{}
	defer func() { <-hashing }()
	sum := argon2.IDKey([]byte(password), salt, hashPasses, hashMemory, 1, hashBytes)
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=1$%s$%s", argon2.Version, hashMemory, hashPasses,
		base64.RawStdEncoding.EncodeToString(salt), base64.RawStdEncoding.EncodeToString(sum))
}

func newHash(password string) string {
	salt := make([]byte, saltBytes)
	rand.Read(salt) // never fails
	return hashPassword(password, salt)
}

// isPassword reports whether a hash is one of a password. A hash of other costs than
// today's is none: the password has to be set again.
func isPassword(hash, password string) bool {
	parts := strings.Split(hash, "$")
	if len(parts) != 6 {
		return false
	}
	salt, err := base64.RawStdEncoding.DecodeString(parts[4])
	return err == nil && subtle.ConstantTimeCompare([]byte(hashPassword(password, salt)), []byte(hash)) == 1
}

func checkPassword(name, password string) error {
	switch {
	case utf8.RuneCountInString(password) < minPassword || len(password) > maxPassword:
		return backfill.Errorf(backfill.Invalid, "a password has %d characters at least, and %d bytes at most", minPassword, maxPassword)
	case strings.Contains(strings.ToLower(password), strings.ToLower(name)):
		return backfill.Errorf(backfill.Invalid, "a password that holds the name is too easy to guess")
	}
	return nil
}

// CreateUser records a person with rights and a password; without one, "", they are
// only known by what a proxy says.
func (s *Store) CreateUser(ctx context.Context, by, name string, rights Rights, password string) error {
	if err := rights.given(); err != nil {
		return err
	}
	return s.in(ctx, func(tx pgx.Tx) error { return createUser(ctx, tx, by, name, rights, password) })
}

func createUser(ctx context.Context, tx pgx.Tx, by, name string, rights Rights, password string) error {
	if err := backfill.CheckPerson(name); err != nil {
		return backfill.Errorf(backfill.Invalid, "the name %q is nobody's: it stands in every record of what is done with it", name)
	}
	if name != strings.TrimSpace(name) || len(name) > 100 || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' }) {
		return backfill.Errorf(backfill.Invalid, "a name has 1 to 100 bytes, no blanks around it and no control characters")
	}
	hash := ""
	if password != "" {
		if err := checkPassword(name, password); err != nil {
			return err
		}
		hash = newHash(password)
	}
	if err := rights.check(ctx, tx); err != nil {
		return err
	}
	if err := unnamed(ctx, tx, "token", name); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `INSERT INTO backfill_control.account (name, role, sites, password) VALUES ($1, nullif($2, ''), $3, $4)`,
		name, rights.Role, rights.Sites, hash)
	if sqlState(err) == "23505" {
		return backfill.Errorf(backfill.Conflict, "user %s exists already", name)
	}
	if err != nil {
		return err
	}
	return audit(ctx, tx, by, "user.create", "", name, map[string]any{"before": nil, "after": rights})
}

// unnamed is a Conflict when a token (or an account) has a name already: what is
// recorded must tell one from the other. Case does not, as with people.
func unnamed(ctx context.Context, tx pgx.Tx, kind, name string) error {
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtext('backfill_control.name'))`); err != nil {
		return err
	}
	taken := `SELECT EXISTS (SELECT FROM backfill_control.account WHERE lower(name) = lower($1))`
	if kind == "token" {
		taken = `SELECT EXISTS (SELECT FROM backfill_control.token WHERE lower(name) = lower($1) AND revoked_at IS NULL)`
	}
	var found bool
	err := tx.QueryRow(ctx, taken, name).Scan(&found)
	if err == nil && found {
		err = backfill.Errorf(backfill.Conflict, "there is a %s of the name %s: choose another name", map[string]string{"token": "token", "account": "user"}[kind], name)
	}
	return err
}

// SetUser gives a person other rights, or another password, which ends their
// sessions; nil leaves either as it is.
func (s *Store) SetUser(ctx context.Context, by, name string, rights *Rights, password *string) error {
	hash := ""
	if password != nil {
		if err := checkPassword(name, *password); err != nil {
			return err
		}
		hash = newHash(*password)
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		var before Rights
		if err := tx.QueryRow(ctx, `SELECT coalesce(role, ''), sites FROM backfill_control.account WHERE name = $1 FOR UPDATE`, name).Scan(&before.Role, &before.Sites); err != nil {
			return one(err, "user %q", name)
		}
		after := before
		if rights != nil {
			if err := rights.given(); err != nil {
				return err
			}
			if err := rights.check(ctx, tx); err != nil {
				return err
			}
			after = *rights
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.account SET role = nullif($2, ''), sites = $3, password = coalesce(nullif($4, ''), password) WHERE name = $1`,
			name, after.Role, after.Sites, hash); err != nil {
			return err
		}
		if password != nil {
			if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.session WHERE account = $1`, name); err != nil {
				return err
			}
		}
		return audit(ctx, tx, by, "user.set", "", name, map[string]any{"before": before, "after": after, "password": map[bool]string{true: "changed", false: "kept"}[password != nil]})
	})
}

// RemoveUser ends a person's account and sessions. What they did stays on record.
func (s *Store) RemoveUser(ctx context.Context, by, name string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		var before Rights
		if err := tx.QueryRow(ctx, `DELETE FROM backfill_control.account WHERE name = $1 RETURNING coalesce(role, ''), sites`, name).Scan(&before.Role, &before.Sites); err != nil {
			return one(err, "user %q", name)
		}
		return audit(ctx, tx, by, "user.remove", "", name, map[string]any{"before": before, "after": nil})
	})
}

// User returns the person of a name, which a proxy has vouched for, or Unauthorized.
func (s *Store) User(ctx context.Context, name string) (i Identity, err error) {
	err = s.pool.QueryRow(ctx, `SELECT name, coalesce(role, ''), sites FROM backfill_control.account WHERE lower(name) = lower($1)`, name).Scan(&i.Name, &i.Role, &i.Sites)
	if one(err, "user") != err {
		return i, backfill.Errorf(backfill.Unauthorized, "the proxy names %.100q, who is no user here", name)
	}
	i.Via = ViaHeader
	return i, err
}

// Users lists all people by name.
func (s *Store) Users(ctx context.Context) ([]User, error) {
	rows, err := s.pool.Query(ctx, `SELECT name, coalesce(role, ''), sites, created_at, signed_in_at FROM backfill_control.account ORDER BY name`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (u User, err error) {
		return u, r.Scan(&u.Name, &u.Role, &u.Sites, &u.CreatedAt, &u.SignedInAt)
	})
}
