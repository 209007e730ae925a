package control

import (
	"context"
	"crypto/sha256"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

const (
	// SessionIdle is after how long without a request a session ends.
	SessionIdle = 24 * time.Hour
	// Within triesFor, signing in may fail so often under a name, and from an address.
	// Counted in the control database, they hold for all API processes together.
	triesFor       = 15 * time.Minute
	triesOfName    = 10
	triesOfAddress = 50
)

// nobody's password is what an unknown name is checked against, so that it takes as
// long as a known one.
var nobody = sync.OnceValue(func() string { return newHash(NewSecret()) })

// SignIn checks a name and a password and begins a session, which lasts for at most
// lasts; id is what to keep in the cookie. It is Unauthorized for a wrong name as for
// a wrong password, in the same time, and TooMany after too many of either.
func (s *Store) SignIn(ctx context.Context, name, password, address string, lasts time.Duration) (id string, err error) {
	subjects := []string{"name " + strings.ToLower(name), "address " + network(address)}
	// Counted before the password is looked at: tries that come at once count, too.
	var over bool
	if err := s.pool.QueryRow(ctx, `
		WITH tried AS (
			INSERT INTO backfill_control.sign_in AS t (subject, tries) SELECT x, 1 FROM unnest($1::text[]) x ORDER BY x
			ON CONFLICT (subject) DO UPDATE SET tries = CASE WHEN t.since < clock_timestamp() - $2::interval THEN 1 ELSE t.tries + 1 END,
			       since = CASE WHEN t.since < clock_timestamp() - $2::interval THEN clock_timestamp() ELSE t.since END
			RETURNING subject, tries)
		SELECT bool_or(tries > CASE WHEN subject LIKE 'name %' THEN $3::int ELSE $4::int END) FROM tried`,
		subjects, triesFor, triesOfName, triesOfAddress).Scan(&over); err != nil {
		return "", err
	}
	if over {
		return "", backfill.Errorf(backfill.TooMany, "too many failed tries to sign in: wait %d minutes", int(triesFor.Minutes()))
	}
	var known, hash string
	err = s.pool.QueryRow(ctx, `SELECT name, password FROM backfill_control.account WHERE lower(name) = lower($1)`, name).Scan(&known, &hash)
	missing := one(err, "user") != err
	if err != nil && !missing {
		return "", err
	}
	if missing {
		hash = nobody()
	}
	if good := isPassword(hash, password); !good || missing {
		return "", backfill.Errorf(backfill.Unauthorized, "the name or the password is wrong")
	}
	err = s.in(ctx, func(tx pgx.Tx) error {
		// The right password takes back what was counted before it.
		if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.sign_in WHERE subject = $1 OR since < clock_timestamp() - $2::interval`, subjects[0], triesFor); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.sign_in SET tries = tries - 1 WHERE subject = $1`, subjects[1]); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.account SET signed_in_at = clock_timestamp() WHERE name = $1`, known); err != nil {
			return err
		}
		id, err = session(ctx, tx, "password", known, nil, address, lasts)
		return err
	})
	return id, err
}

// SignInByToken begins a session of a token's account. It ends with the token.
func (s *Store) SignInByToken(ctx context.Context, secret, address string, lasts time.Duration) (id string, err error) {
	i, err := s.Account(ctx, secret)
	if err != nil {
		return "", err
	}
	hash := sha256.Sum256([]byte(secret))
	err = s.in(ctx, func(tx pgx.Tx) error {
		id, err = session(ctx, tx, "token", i.Name, hash[:], address, lasts)
		return err
	})
	return id, err
}

func session(ctx context.Context, tx pgx.Tx, by, name string, token []byte, address string, lasts time.Duration) (string, error) {
	id := NewSecret()
	hash := sha256.Sum256([]byte(id))
	_, err := tx.Exec(ctx, `
		WITH old AS (DELETE FROM backfill_control.session WHERE expires_at < clock_timestamp())
		INSERT INTO backfill_control.session (sha256, account, token, expires_at, address)
		VALUES ($1, CASE WHEN $3::bytea IS NULL THEN $2 END, $3, clock_timestamp() + $4::interval, $5)`, hash[:], name, token, lasts, address)
	if err != nil {
		return "", err
	}
	ctx = WithOrigin(ctx, Origin{ViaSession, address})
	return id, audit(ctx, tx, name, "session.start", "", name, map[string]any{"by": by})
}

// Session returns whose session an id is, or Unauthorized when it has ended: by
// signing out, by time, or with the account or token it is of.
func (s *Store) Session(ctx context.Context, id string) (i Identity, err error) {
	hash := sha256.Sum256([]byte(id))
	// seen_at is kept to the minute, so that reading does not write.
	err = s.pool.QueryRow(ctx, `
		WITH x AS (SELECT s.sha256, s.seen_at, coalesce(a.name, t.name) AS name, coalesce(a.role, t.role, '') AS role, coalesce(a.sites, t.sites) AS sites
		             FROM backfill_control.session s LEFT JOIN backfill_control.account a ON a.name = s.account
		             LEFT JOIN backfill_control.token t ON t.sha256 = s.token AND t.revoked_at IS NULL
		                   AND (t.expires_at IS NULL OR t.expires_at > clock_timestamp())
		            WHERE s.sha256 = $1 AND s.expires_at > clock_timestamp() AND s.seen_at > clock_timestamp() - $2::interval
		              AND (a.name IS NOT NULL OR t.name IS NOT NULL)),
		     u AS (UPDATE backfill_control.session SET seen_at = clock_timestamp()
		            WHERE sha256 IN (SELECT sha256 FROM x WHERE seen_at < clock_timestamp() - interval '1 minute'))
		SELECT name, role, sites FROM x`, hash[:], SessionIdle).Scan(&i.Name, &i.Role, &i.Sites)
	if one(err, "session") != err {
		return i, backfill.Errorf(backfill.Unauthorized, "the session has ended: sign in again")
	}
	i.Via = ViaSession
	return i, err
}

// EndSession ends a session; one that has ended already is no error.
func (s *Store) EndSession(ctx context.Context, id string) error {
	hash := sha256.Sum256([]byte(id))
	_, err := s.pool.Exec(ctx, `DELETE FROM backfill_control.session WHERE sha256 = $1`, hash[:])
	return err
}

// network is what counts as one address: of IPv6, whoever has one has the other
// addresses of its /64 too.
func network(address string) string {
	a, err := netip.ParseAddr(address)
	if err != nil || a.Unmap().Is4() {
		return address
	}
	p, err := a.WithZone("").Prefix(64)
	if err != nil {
		return address
	}
	return p.String()
}
