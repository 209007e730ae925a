package control

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Away reports whether err means that the control database could not be asked,
// so that asking again later may work.
func Away(err error) bool {
	var refused *pgconn.ConnectError
	var network net.Error
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return false
	case errors.As(err, &refused), errors.As(err, &network), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), pgconn.SafeToRetry(err):
		return true
	}
	// Connection lost, too many connections, shutting down or starting up.
	state := sqlState(err)
	return strings.HasPrefix(state, "08") || strings.HasPrefix(state, "53") || strings.HasPrefix(state, "57P")
}

// SiteOf returns the site an event tells of, or NotFound.
func (s *Store) SiteOf(ctx context.Context, e Event) (site string, err error) {
	switch e.Kind {
	case "site":
		return e.Name, nil
	case "request":
		err = s.pool.QueryRow(ctx, `SELECT d.site FROM backfill_control.request r JOIN backfill_control.direction d ON d.id = r.direction WHERE r.id = $1`, e.ID).Scan(&site)
	case "reconciliation":
		err = s.pool.QueryRow(ctx, `SELECT d.site FROM backfill_control.reconciliation r JOIN backfill_control.direction d ON d.id = r.direction WHERE r.id = $1`, e.ID).Scan(&site)
	default:
		err = s.pool.QueryRow(ctx, `SELECT site FROM backfill_control.direction WHERE id = $1`, e.ID).Scan(&site)
	}
	return site, one(err, "%s %d", e.Kind, e.ID)
}
