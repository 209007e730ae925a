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
	State     string // waiting, stopped, held, quarantined, skipped, lost, dropped, applied
	Reason    string // PostgreSQL's message, for held and quarantined ones and those of stopped tables; to what a lost one lost
	AppliedAt *time.Time
	AsideAt   *time.Time // since when it is held, quarantined, skipped or lost
	Wish      string     // retry or skip: what somebody asked the receiving agent to do, and it has not done yet
	WishedBy  string
}

// EntryFilter narrows the queue or history of a site.
type EntryFilter struct {
	Site, Table, From string
	State             string
	Key               backfill.Key
	Origin            string // captured, or backfill (history)
	Before            int64  // seqs below, 0 from the newest (history)
	After             int64  // seqs above (queue)
	Limit             int
}

// opOf and stateOf name an entry x of a direction d, with q what is set aside of it, c the
// conflict it lost and st its table when that has stopped.
const (
	opOf    = `CASE x.op WHEN 'c' THEN 'create' WHEN 'd' THEN 'delete' WHEN 't' THEN 'truncate' ELSE 'update' END`
	stateOf = `CASE WHEN c.seq IS NOT NULL THEN 'lost' WHEN q.state IS NOT NULL THEN q.state WHEN x.dropped THEN 'dropped' WHEN st.seq IS NOT NULL THEN 'stopped' WHEN x.seq > d.applied_seq THEN 'waiting' ELSE 'applied' END`
)

// asideOf joins what is set aside of an entry, the conflict it lost, unless it waits
// to be decided on the other side as well, and its table when that has stopped before it.
const asideOf = `
	LEFT JOIN backfill_control.quarantine q ON q.direction = x.direction AND q.seq = x.seq
	LEFT JOIN backfill_control.conflict c ON c.direction = x.direction AND c.seq = x.seq AND coalesce(q.state, '') NOT IN ('held', 'quarantined')
	LEFT JOIN backfill_control.stopped st ON st.direction = x.direction AND st.table_id = x.table_id AND x.seq > st.seq `

const entryColumns = `x.seq, t.name, d.from_side, ` + opOf + `,
	x.key, x.row, coalesce(x.layout_id, 0), coalesce(x.request_id, 0), x.created_at, ` + stateOf + `,
	coalesce(CASE WHEN c.seq IS NOT NULL THEN CASE WHEN x.request_id IS NULL THEN 'lost a conflict to ' ELSE 'gave way to ' END || coalesce('change ' || c.to_seq || ' of ', 'a change of ') || d.to_side END, q.reason, CASE WHEN NOT x.dropped THEN st.reason END, ''),
	CASE WHEN q.state IS NULL AND st.seq IS NULL AND NOT x.dropped AND x.seq <= d.applied_seq
	     THEN (SELECT a.at FROM backfill_control.ack a WHERE a.direction = x.direction AND a.seq >= x.seq ORDER BY a.seq LIMIT 1) END,
	coalesce(c.at, q.since), CASE WHEN q.state IN ('held', 'quarantined') THEN coalesce(q.wish, '') ELSE '' END, coalesce(q.wished_by, '')`

const entryFrom = ` FROM backfill_control.direction d
	JOIN backfill_control.entry x ON x.direction = d.id
	JOIN backfill_control.table_config t ON t.id = x.table_id` + asideOf

func scanEntry(row pgx.CollectableRow) (e Entry, err error) {
	err = row.Scan(&e.Seq, &e.Table, &e.From, &e.Op, &e.Key, &e.Row, &e.LayoutID, &e.RequestID, &e.CreatedAt, &e.State, &e.Reason, &e.AppliedAt,
		&e.AsideAt, &e.Wish, &e.WishedBy)
	return e, err
}

// Queue lists the changes of a site that the receiver has not applied, oldest
// first: waiting ones, and those it has set aside.
func (s *Store) Queue(ctx context.Context, f EntryFilter) ([]Entry, error) {
	rows, err := s.pool.Query(ctx, `
		WITH due AS (
		    SELECT direction, seq FROM (
		        SELECT e.direction, e.seq FROM backfill_control.direction d JOIN backfill_control.entry e ON e.direction = d.id
		         WHERE d.site = $1 AND $4 IN ('', 'waiting', 'stopped') AND e.seq > $5 AND `+undelivered+` AND ($4 = '' OR `+isStopped+` = ($4 = 'stopped')) AND NOT e.dropped AND e.op <> 'm'
		         ORDER BY e.seq LIMIT CASE WHEN $2 = '' AND $3 = '' AND $6::text[] IS NULL THEN $7::int END) w
		    UNION
		    SELECT q.direction, q.seq FROM backfill_control.direction d JOIN backfill_control.quarantine q ON q.direction = d.id
		     WHERE d.site = $1 AND ($4 = '' AND q.state <> 'skipped' OR q.state = $4) AND q.seq > $5)
		SELECT `+entryColumns+entryFrom+`JOIN due ON due.direction = x.direction AND due.seq = x.seq
		 WHERE ($2 = '' OR t.name = $2) AND ($3 = '' OR d.from_side = $3) AND ($6::text[] IS NULL OR x.key = $6)
		 ORDER BY x.seq LIMIT $7`, f.Site, f.Table, f.From, f.State, f.After, f.Key, f.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanEntry)
}

// History lists the acknowledged changes of a site, newest first, and with state
// lost just those that lost a conflict. Staged rows and dropped changes are not in it,
// but for versions that lost a conflict before they were sent.
func (s *Store) History(ctx context.Context, f EntryFilter) ([]Entry, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+entryColumns+entryFrom+`
		 WHERE d.site = $1 AND (x.seq <= d.applied_seq AND st.seq IS NULL AND NOT x.dropped AND x.op <> 'm' AND $8 = ''
		        OR $8 IN ('', 'lost') AND c.seq IS NOT NULL)
		   AND ($2 = '' OR t.name = $2) AND ($3 = '' OR d.from_side = $3) AND ($4::text[] IS NULL OR x.key = $4) AND ($5 = 0 OR x.seq < $5)
		   AND ($7 = '' OR ($7 = 'backfill') = (x.request_id IS NOT NULL))
		 ORDER BY x.seq DESC LIMIT $6`, f.Site, f.Table, f.From, f.Key, f.Before, f.Limit, f.Origin, f.State)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanEntry)
}

// Wish asks the receiving agent to retry or skip a change it has set aside; to retry
// one of a stopped table is to try the table. It is a Conflict when the change is
// not set aside.
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
			err := tx.QueryRow(ctx, `
				UPDATE backfill_control.stopped st SET wished_by = CASE WHEN $3 = 'retry' THEN $4 ELSE wished_by END
				  FROM backfill_control.entry e, backfill_control.direction d, backfill_control.table_config t
				 WHERE d.site = $1 AND e.direction = d.id AND e.seq = $2 AND NOT e.dropped AND st.direction = d.id AND st.table_id = e.table_id AND e.seq > st.seq AND t.id = e.table_id
				RETURNING d.id, t.name`, site, seq, wish, by).Scan(&direction, &table)
			switch {
			case err == nil && wish == "retry":
				return wished(ctx, tx, site, table, direction, seq, wish, by)
			case err == nil:
				return backfill.Errorf(backfill.Conflict, "change %d waits because %s has stopped: mend what refuses its rows, then retry the change", seq, table)
			case err != pgx.ErrNoRows:
				return err
			}
			return backfill.Errorf(backfill.Conflict, "change %d is not held or quarantined: there is nothing to %s", seq, wish)
		}
		if err != nil {
			return err
		}
		return wished(ctx, tx, site, table, direction, seq, wish, by)
	})
}

// Aside counts the changes that a site's receivers have set aside.
type Aside struct{ Held, Quarantined, Skipped int64 }

// Aside counts the changes of a site that its receivers have set aside.
func (s *Store) Aside(ctx context.Context, site string) (a Aside, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE q.state = 'held'), count(*) FILTER (WHERE q.state = 'quarantined'), count(*) FILTER (WHERE q.state = 'skipped')
		  FROM backfill_control.direction d JOIN backfill_control.quarantine q ON q.direction = d.id
		 WHERE d.site = $1`, site).Scan(&a.Held, &a.Quarantined, &a.Skipped)
	return a, err
}

// Delivery is what is still under way, or stuck, of the rows that a request has released.
type Delivery struct{ Waiting, Held, Quarantined, Skipped int64 }

// countedDelivery is where counting rows that wait ends.
const countedDelivery = 100_000

// Delivery counts the released rows of a request that the receiver does not have
// yet; Waiting no further than 100,000.
func (s *Store) Delivery(ctx context.Context, id int64) (x Delivery, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM (SELECT FROM backfill_control.entry e
		                               WHERE e.direction = d.id AND `+undelivered+` AND e.request_id = $1 LIMIT $2) w),
		       coalesce(a.held, 0), coalesce(a.quarantined, 0), coalesce(a.skipped, 0)
		  FROM backfill_control.request r JOIN backfill_control.direction d ON d.id = r.direction,
		       LATERAL (SELECT count(*) FILTER (WHERE q.state = 'held') AS held, count(*) FILTER (WHERE q.state = 'quarantined') AS quarantined,
		                       count(*) FILTER (WHERE q.state = 'skipped') AS skipped
		                  FROM backfill_control.quarantine q JOIN backfill_control.entry e ON e.direction = q.direction AND e.seq = q.seq
		                 WHERE q.direction = d.id AND e.request_id = $1) a
		 WHERE r.id = $1`, id, countedDelivery).Scan(&x.Waiting, &x.Held, &x.Quarantined, &x.Skipped)
	return x, one(err, "request %d", id)
}

func wished(ctx context.Context, tx pgx.Tx, site, table string, direction, seq int64, wish, by string) error {
	if err := audit(ctx, tx, by, "queue."+wish, site, table, map[string]any{"seq": seq}); err != nil {
		return err
	}
	return notifyID(ctx, tx, "queue", direction)
}
