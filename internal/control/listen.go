package control

import (
	"context"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Event tells that something of a kind has changed; what, is read afresh.
type Event struct {
	Kind string // "queue" and "shadow" (ID is the direction), "request" (ID is the request), "reconciliation" (ID is the run), "site" (Name)
	ID   int64
	Name string
}

// channel carries every event. Senders are the transactions that change
// something, so an event is never ahead of what it tells of.
const channel = "backfill_control"

func notify(ctx context.Context, tx pgx.Tx, kind string, what string) error {
	_, err := tx.Exec(ctx, `SELECT pg_notify($1, $2)`, channel, kind+" "+what)
	return err
}

func notifyID(ctx context.Context, tx pgx.Tx, kind string, id int64) error {
	return notify(ctx, tx, kind, strconv.FormatInt(id, 10))
}

// Listen calls fn for every event until ctx ends or the connection breaks. It
// calls ready once it listens: what happens after that is not missed.
func (s *Store) Listen(ctx context.Context, ready func(), fn func(Event)) error {
	c, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	// A listening connection does not go back to the pool.
	conn := c.Hijack()
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, `LISTEN `+channel); err != nil {
		return err
	}
	ready()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		fn(parseEvent(n))
	}
}

func parseEvent(n *pgconn.Notification) Event {
	kind, what, _ := strings.Cut(n.Payload, " ")
	e := Event{Kind: kind, Name: what}
	if id, err := strconv.ParseInt(what, 10, 64); err == nil {
		e.ID = id
	}
	return e
}
