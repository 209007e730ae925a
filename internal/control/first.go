package control

import (
	"context"
	"crypto/sha256"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// firstFor is how long a link to the first account is good.
const firstFor = time.Hour

// FirstLink makes the secret of a link with which the first account is made, once,
// within an hour. It is "" when somebody can sign in already.
func (s *Store) FirstLink(ctx context.Context) (secret string, err error) {
	secret = NewSecret()
	hash := sha256.Sum256([]byte(secret))
	tag, err := s.pool.Exec(ctx, `
		INSERT INTO backfill_control.sign_in_link (sha256, expires_at) SELECT $1, clock_timestamp() + $2::interval
		 WHERE NOT EXISTS (SELECT FROM backfill_control.account)
		   AND NOT EXISTS (SELECT FROM backfill_control.token WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp()))`, hash[:], firstFor)
	if err != nil || tag.RowsAffected() == 0 {
		return "", err
	}
	return secret, nil
}

// FirstUser makes the first account, an admin of every site, with the secret of a
// link. It is Unauthorized when the link was used, is past its hour, or when there is
// an account by now.
func (s *Store) FirstUser(ctx context.Context, secret, name, password string) error {
	// Looked at first, so that nobody has passwords hashed without a link.
	hash := sha256.Sum256([]byte(secret))
	const good = `SELECT FROM backfill_control.sign_in_link WHERE sha256 = $1 AND used_at IS NULL AND expires_at > clock_timestamp() AND NOT EXISTS (SELECT FROM backfill_control.account)`
	wrong := backfill.Errorf(backfill.Unauthorized, "the link was used, or is past its hour: start backfill api again for another, or use backfill user create")
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtext('backfill_control.first'))`); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, good, hash[:]).Scan(); one(err, "link") != err {
			return wrong
		} else if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.sign_in_link SET used_at = clock_timestamp()`); err != nil {
			return err
		}
		if err := checkPassword(name, password); err != nil {
			return err
		}
		return createUser(ctx, tx, "first sign-in link", name, Rights{Role: Admin}, password)
	})
}
