package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Person is somebody as a sign-in provider knows them: by issuer and subject, which
// stay, and under a name, which may change.
type Person struct{ Issuer, Subject, Name string }

// SignInAs begins a session of whom a sign-in provider vouches for, with the rights it
// gives them now. The first time it makes an account of that name: a Conflict when
// somebody else has it, since a name from elsewhere must not open an account here.
// Without rights it is Forbidden, and sessions they still have end.
func (s *Store) SignInAs(ctx context.Context, who Person, rights Rights, address string, lasts time.Duration) (id string, err error) {
	refused := false
	err = s.in(ctx, func(tx pgx.Tx) error {
		var name string
		var before Rights
		err := tx.QueryRow(ctx, `
			SELECT a.name, coalesce(a.role, ''), a.sites FROM backfill_control.person p JOIN backfill_control.account a ON a.name = p.account
			 WHERE p.issuer = $1 AND p.subject = $2 FOR UPDATE OF a`, who.Issuer, who.Subject).Scan(&name, &before.Role, &before.Sites)
		missing := one(err, "user") != err
		if err != nil && !missing {
			return err
		}
		if refused = rights.Role == "" && len(rights.Sites) == 0; refused {
			_, err := tx.Exec(ctx, `DELETE FROM backfill_control.session WHERE account = $1`, name)
			return err
		}
		switch {
		case missing:
			name = who.Name
			if err := createUser(ctx, tx, name, name, rights, ""); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `INSERT INTO backfill_control.person (issuer, subject, account) VALUES ($1, $2, $3)`, who.Issuer, who.Subject, name); err != nil {
				return err
			}
		case !before.Equal(rights):
			if err := rights.check(ctx, tx); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `UPDATE backfill_control.account SET role = nullif($2, ''), sites = $3 WHERE name = $1`, name, rights.Role, rights.Sites); err != nil {
				return err
			}
			if err := audit(ctx, tx, name, "user.set", "", name, map[string]any{"before": before, "after": rights, "password": "kept"}); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.account SET signed_in_at = clock_timestamp() WHERE name = $1`, name); err != nil {
			return err
		}
		id, err = session(ctx, tx, "provider", name, nil, address, lasts)
		return err
	})
	if err == nil && refused {
		err = backfill.Errorf(backfill.Forbidden, "none of your groups has a role here")
	}
	return id, err
}
