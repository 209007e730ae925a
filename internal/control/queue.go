package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Entry is one change as people see it, in the queue or in history.
type Entry struct {
	Seq       int64
	Table     string
	From      string
	Op        string // create, update, delete, truncate
	Key       backfill.Key
	Row       []*string
	LayoutID  int64
	RequestID int64 // the backfill it came from, 0 when it was captured
	CreatedAt time.Time
	State     string // waiting, held, quarantined, skipped, dropped, applied
	Reason    string // PostgreSQL's message, for held and quarantined ones
	AppliedAt *time.Time
}

// EntryFilter narrows the queue or history of a site.
type EntryFilter struct {
	Site, Table, From string
	State             string
	Key               backfill.Key
	Before            int64 // seqs below, 0 from the newest (history)
	After             int64 // seqs above (queue)
	Limit             int
}

const entryColumns = `e.seq, t.name, d.from_side,
	CASE e.op WHEN 'c' THEN 'create' WHEN 'd' THEN 'delete' WHEN 't' THEN 'truncate' ELSE 'update' END,
	e.key, e.row, coalesce(e.layout_id, 0), coalesce(e.request_id, 0), e.created_at,
	CASE WHEN q.state IS NOT NULL THEN q.state WHEN e.dropped THEN 'dropped' WHEN e.seq > d.applied_seq THEN 'waiting' ELSE 'applied' END, coalesce(q.reason, ''),
	CASE WHEN q.state IS NULL AND NOT e.dropped AND e.seq <= d.applied_seq
	     THEN (SELECT a.at FROM backfill_control.ack a WHERE a.direction = e.direction AND a.seq >= e.seq ORDER BY a.seq LIMIT 1) END`

const entryFrom = ` FROM backfill_control.direction d
	JOIN backfill_control.entry e ON e.direction = d.id
	JOIN backfill_control.table_config t ON t.id = e.table_id
	LEFT JOIN backfill_control.quarantine q ON q.direction = e.direction AND q.seq = e.seq `

func scanEntry(row pgx.CollectableRow) (e Entry, err error) {
	err = row.Scan(&e.Seq, &e.Table, &e.From, &e.Op, &e.Key, &e.Row, &e.LayoutID, &e.RequestID, &e.CreatedAt, &e.State, &e.Reason, &e.AppliedAt)
	return e, err
}

// Queue lists the changes of a site that the receiver has not applied, oldest
// first: waiting ones, and those it has set aside.
func (s *Store) Queue(ctx context.Context, f EntryFilter) ([]Entry, error) {
	rows, err := s.pool.Query(ctx, `
		WITH due AS (
		    SELECT direction, seq FROM (
		        SELECT e.direction, e.seq FROM backfill_control.direction d JOIN backfill_control.entry e ON e.direction = d.id
		         WHERE d.site = $1 AND $4 IN ('', 'waiting') AND e.seq > greatest(d.applied_seq, $5) AND NOT e.dropped AND e.op <> 'm'
		         ORDER BY e.seq LIMIT CASE WHEN $2 = '' AND $3 = '' AND $6::text[] IS NULL THEN $7::int END) w
		    UNION
		    SELECT q.direction, q.seq FROM backfill_control.direction d JOIN backfill_control.quarantine q ON q.direction = d.id
		     WHERE d.site = $1 AND ($4 = '' AND q.state <> 'skipped' OR q.state = $4) AND q.seq > $5)
		SELECT `+entryColumns+entryFrom+`JOIN due ON due.direction = e.direction AND due.seq = e.seq
		 WHERE ($2 = '' OR t.name = $2) AND ($3 = '' OR d.from_side = $3) AND ($6::text[] IS NULL OR e.key = $6)
		 ORDER BY e.seq LIMIT $7`, f.Site, f.Table, f.From, f.State, f.After, f.Key, f.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanEntry)
}

// History lists the acknowledged changes of a site, newest first. Staged rows
// and dropped changes are not in it.
func (s *Store) History(ctx context.Context, f EntryFilter) ([]Entry, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+entryColumns+entryFrom+`
		 WHERE d.site = $1 AND e.seq <= d.applied_seq AND NOT e.dropped AND e.op <> 'm'
		   AND ($2 = '' OR t.name = $2) AND ($3 = '' OR d.from_side = $3) AND ($4::text[] IS NULL OR e.key = $4) AND ($5 = 0 OR e.seq < $5)
		 ORDER BY e.seq DESC LIMIT $6`, f.Site, f.Table, f.From, f.Key, f.Before, f.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanEntry)
}

// Wish asks the receiving agent to retry or skip a change it has set aside. It is
// a Conflict when the change is not set aside.
func (s *Store) Wish(ctx context.Context, site string, seq int64, wish, by string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		var direction int64
		var table string
		err := tx.QueryRow(ctx, `
			UPDATE backfill_control.quarantine q SET wish = $3, wished_by = $4
			  FROM backfill_control.direction d, backfill_control.table_config t
			 WHERE d.id = q.direction AND t.id = q.table_id AND d.site = $1 AND q.seq = $2 AND q.state IN ('held', 'quarantined')
			RETURNING q.direction, t.name`, site, seq, wish, by).Scan(&direction, &table)
		if err == pgx.ErrNoRows {
			var known bool
			if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM backfill_control.entry e JOIN backfill_control.direction d ON d.id = e.direction
				WHERE d.site = $1 AND e.seq = $2)`, site, seq).Scan(&known); err != nil {
				return err
			}
			if !known {
				return backfill.Errorf(backfill.NotFound, "no change %d in the queue of site %q", seq, site)
			}
			return backfill.Errorf(backfill.Conflict, "change %d is not held or quarantined: there is nothing to %s", seq, wish)
		}
		if err != nil {
			return err
		}
		if err := audit(ctx, tx, by, "queue."+wish, site, table, map[string]any{"seq": seq}); err != nil {
			return err
		}
		return notifyID(ctx, tx, "queue", direction)
	})
}
