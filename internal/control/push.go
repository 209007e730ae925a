package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Push adds one batch of captured changes to a direction's queue. It holds the
// direction's lock from Begin to Commit or Rollback, and works in one transaction:
// whoever waits for the lock may have taken every other connection.
type Push struct {
	tx        pgx.Tx
	direction backfill.Direction
	epoch     int // the site's
	batch     int64
	nonce     string
	prev      string
	rows      int64
}

// lockDirection makes pushes and releases of a direction take turns, so that the
// order of seqs is the order of reads and of commits. It must be the transaction's
// first statement with a snapshot, alone, under READ COMMITTED: a statement that locks and checks
// at once checks what was there before the lock.
func lockDirection(ctx context.Context, tx pgx.Tx, direction int32) error {
	_, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(20011, $1)`, direction)
	return err
}

// BeginPush takes the direction's lock. Everything the push reads, on the source
// too, must be read after this returns.
func (s *Store) BeginPush(ctx context.Context, d backfill.Direction) (*Push, error) {
	tx, err := s.pool.BeginTx(ctx, ordered)
	if err != nil {
		return nil, err
	}
	p := &Push{tx: tx, direction: d}
	if err := lockDirection(ctx, tx, d.ID); err != nil {
		p.Rollback()
		return nil, err
	}
	if err := tx.QueryRow(ctx, `
		SELECT s.epoch, d.push_batch, d.push_nonce, d.prev_nonce FROM backfill_control.direction d JOIN backfill_control.site s ON s.name = d.site WHERE d.id = $1`, d.ID).
		Scan(&p.epoch, &p.batch, &p.nonce, &p.prev); err != nil {
		p.Rollback()
		return nil, one(err, "direction %s", d)
	}
	return p, nil
}

// Continues checks that the source's last push is the one remembered here, or the
// one before it: then a crash came between the two commits, and the source is
// behind. Otherwise one of the two databases was restored, and going on would send,
// or forget, the wrong changes.
func (p *Push) Continues(ctx context.Context, epoch int, batch int64, nonce string) (behind bool, err error) {
	switch {
	case epoch == p.epoch && batch == p.batch && nonce == p.nonce:
		return false, nil
	case epoch == p.epoch && batch == p.batch-1 && nonce == p.prev:
		return true, nil
	}
	// Whoever has lost its session, and the lock with it, sees another's push here.
	if _, err := p.tx.Exec(ctx, `SELECT`); err != nil {
		return false, err
	}
	if epoch != p.epoch {
		return false, backfill.Errorf(backfill.Refused, "%s is in epoch %d, the site in %d: this push began in another epoch", p.direction.From, epoch, p.epoch)
	}
	return false, backfill.Errorf(backfill.Refused,
		"%s remembers push %d as its last, the control database push %d: one of them was restored or set up anew; %s",
		p.direction.From, batch, p.batch, backfill.NewEpoch(p.direction.Site))
}

// Last is the direction's last push: its number and nonce.
func (p *Push) Last() (batch int64, nonce string) { return p.batch, p.nonce }

// Tables returns the configuration of the tables that the direction sends, as it is under
// the lock, by the name they have on its source: one may go to several.
func (p *Push) Tables(ctx context.Context) (map[string][]backfill.Table, error) {
	rows, err := p.tx.Query(ctx, `SELECT `+tableColumns+` FROM backfill_control.table_config t WHERE t.site = $1 AND t.removed_at IS NULL AND $2 = ANY (t.captured_from) ORDER BY t.id`, p.direction.Site, p.direction.From)
	if err != nil {
		return nil, err
	}
	out := map[string][]backfill.Table{}
	_, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (t backfill.Table, err error) {
		err = r.Scan(tableFields(&t)...)
		name := t.Relation(p.direction.From)
		out[name] = append(out[name], t)
		return t, err
	})
	return out, err
}

// Truncate adds a truncate of a whole table. It goes before the rows of the same read.
func (p *Push) Truncate(ctx context.Context, tableID int32, snapshot string, dropped bool) error {
	p.rows++
	_, err := p.tx.Exec(ctx, `
		INSERT INTO backfill_control.entry (direction, table_id, snap, op, dropped) VALUES ($1, $2, $3::text::pg_snapshot, 't', $4)`,
		p.direction.ID, tableID, snapshot, dropped)
	return err
}

// Copy adds entries in COPY's binary form: direction, table_id, layout_id, snap,
// op, dropped, key, row, stamp.
func (p *Push) Copy(ctx context.Context, r io.Reader) error {
	tag, err := p.tx.Conn().PgConn().CopyFrom(ctx, r, `
		COPY backfill_control.entry (direction, table_id, layout_id, snap, op, dropped, key, row, stamp) FROM STDIN (FORMAT binary)`)
	p.rows += tag.RowsAffected()
	return err
}

// Gap records that rows of a table changed, came or went unrecorded: capture is
// unbroken only since now, and an open request of the table cannot go on, unless its
// walk began when that transaction of the source could be seen; 0 is an unknown one.
func (p *Push) Gap(ctx context.Context, tableID int32, xid uint64, reason string) error {
	if err := gap(ctx, p.tx, tableID, p.direction.From, reason, xid); err != nil {
		return err
	}
	return fail(ctx, p.tx, reason, fromSide+` AND ($3 = '0' OR NOT pg_visible_in_snapshot($3::text::xid8, floor))`, tableID, p.direction.From, strconv.FormatUint(xid, 10))
}

// Broken records what is wrong with a table's capture: until it is repaired rows
// can change unrecorded.
func (p *Push) Broken(ctx context.Context, tableID int32, problem string) error {
	return broken(ctx, p.tx, tableID, p.direction.From, problem)
}

// Shape tells what a table is made of: when it was made of something else, rows may
// have changed, and requests that read it then cannot go on.
func (p *Push) Shape(ctx context.Context, tableID int32, shape string) error {
	return reshaped(ctx, p.tx, tableID, p.direction.From, shape)
}

// gap keeps that the other side may differ in ways no captured change will mend,
// until a backfill that began later has finished. Capture is unbroken only since now.
// With the source's transaction, later is what could see that; else by the clock.
func gap(ctx context.Context, tx pgx.Tx, tableID int32, side, reason string, xid uint64) error {
	_, err := tx.Exec(ctx, `
		UPDATE backfill_control.table_side
		   SET capture_since = CASE WHEN capture_ok THEN clock_timestamp() END,
		       gap = $3, gap_since = coalesce(gap_since, capture_seen, clock_timestamp()),
		       gap_last = CASE WHEN $4 = '0' THEN clock_timestamp() ELSE gap_last END,
		       gap_xid = CASE WHEN $4 <> '0' THEN greatest(gap_xid, $4::text::xid8) ELSE gap_xid END
		 WHERE table_id = $1 AND side = $2`, tableID, side, reason, strconv.FormatUint(xid, 10))
	return err
}

// fromSide is the SQL for "the request is for table $1 from side $2".
const fromSide = `table_id = $1 AND direction IN (SELECT id FROM backfill_control.direction WHERE from_side = $2)`

func broken(ctx context.Context, tx pgx.Tx, tableID int32, side, problem string) error {
	// It is a gap only where capture was whole before.
	var whole bool
	if err := tx.QueryRow(ctx, `
		UPDATE backfill_control.table_side n SET capture_ok = false, capture_since = NULL, problem = nullif($3, '')
		  FROM backfill_control.table_side o WHERE n.table_id = $1 AND n.side = $2 AND o.table_id = n.table_id AND o.side = n.side
		RETURNING o.capture_since IS NOT NULL`, tableID, side, problem).Scan(&whole); errors.Is(err, pgx.ErrNoRows) {
		return nil // the table was taken out of the site meanwhile
	} else if err != nil {
		return err
	}
	if problem == "" {
		problem = "the table was not captured from " + side
	}
	reason := "changes may have gone unrecorded while this was so: " + problem
	if whole {
		if err := gap(ctx, tx, tableID, side, reason, 0); err != nil {
			return err
		}
	}
	return fail(ctx, tx, reason, fromSide, tableID, side)
}

func reshaped(ctx context.Context, tx pgx.Tx, tableID int32, side, shape string) error {
	const what = "a column of the table was altered, a partition attached or detached, or the table replaced: rows may have changed unrecorded"
	var another bool
	// Nearly always it is as it was: then nothing is written, and nobody waits.
	err := tx.QueryRow(ctx, `
		UPDATE backfill_control.table_side n SET shape = $3
		  FROM backfill_control.table_side o WHERE n.table_id = $1 AND n.side = $2 AND o.table_id = n.table_id AND o.side = n.side AND n.shape IS DISTINCT FROM $3
		RETURNING o.capture_since IS NOT NULL AND o.shape IS NOT NULL AND o.shape <> $3`, tableID, side, shape).Scan(&another)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	if another {
		if err := gap(ctx, tx, tableID, side, what, 0); err != nil {
			return err
		}
	}
	return fail(ctx, tx, "since the walk began "+what, fromSide+` AND shape <> $3`, tableID, side, shape)
}

// fail ends open requests: their staged rows are doubtful, and are not released.
func fail(ctx context.Context, tx pgx.Tx, reason, where string, args ...any) error {
	n := len(args)
	rows, err := tx.Query(ctx, fmt.Sprintf(`
		UPDATE backfill_control.request SET state = 'FAILED', reason = $%d, closed_at = clock_timestamp(), paused = false, waiting = ''
		 WHERE state = ANY ($%d) AND %s RETURNING id`, n+1, n+2, where), append(args, reason, backfill.Before(backfill.Failed))...)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := auditRequest(ctx, tx, id, "backfill", "backfill.failed", map[string]any{"reason": reason}); err != nil {
			return err
		}
		if err := notifyID(ctx, tx, "request", id); err != nil {
			return err
		}
	}
	return nil
}

// Rows is the number of entries added so far.
func (p *Push) Rows() int64 { return p.rows }

// Commit makes the batch visible under a new number and the nonce given, and
// returns the number. reads is the number of the read it came from.
func (p *Push) Commit(ctx context.Context, nonce string, reads int64) (int64, error) {
	if err := endBatch(ctx, p.tx, p.direction.ID, nonce); err != nil {
		return 0, err
	}
	if _, err := p.tx.Exec(ctx, `
		UPDATE backfill_control.direction SET push_batch = push_batch + 1, prev_nonce = push_nonce, push_nonce = $2, reads = greatest(reads, $3) WHERE id = $1`,
		p.direction.ID, nonce, reads); err != nil {
		return 0, err
	}
	// Rows that were not sent can be had by a backfill; what was deleted cannot.
	if _, err := p.tx.Exec(ctx, `
		UPDATE backfill_control.table_side s SET dropped = s.dropped + n.dropped,
		       gap = CASE WHEN n.rows THEN 'changes were dropped while the table, create or update was turned off' ELSE gap END,
		       gap_since = CASE WHEN n.rows THEN coalesce(gap_since, clock_timestamp()) ELSE gap_since END,
		       gap_last = CASE WHEN n.rows THEN clock_timestamp() ELSE gap_last END
		  FROM (SELECT table_id, count(*) AS dropped, bool_or(op IN ('c', 'u')) AS rows FROM backfill_control.entry e
		         WHERE e.direction = $1 AND e.dropped
		           AND e.seq >= (SELECT first_seq FROM backfill_control.batch b WHERE b.direction = $1 AND b.nonce = $3 ORDER BY last_seq DESC LIMIT 1)
		         GROUP BY 1) n
		 WHERE s.table_id = n.table_id AND s.side = $2`, p.direction.ID, p.direction.From, nonce); err != nil {
		return 0, err
	}
	if err := notifyID(ctx, p.tx, "queue", int64(p.direction.ID)); err != nil {
		return 0, err
	}
	if err := notify(ctx, p.tx, "site", p.direction.Site); err != nil {
		return 0, err
	}
	if err := p.tx.Commit(ctx); err != nil {
		return 0, fmt.Errorf("commit push %d of %s: %w", p.batch+1, p.direction, err)
	}
	return p.batch + 1, nil
}

// endBatch notes which seqs the transaction has added to a direction, with the
// nonce by which the receiver recognises them. The direction's lock is held, so
// everything above the last batch is of this one.
func endBatch(ctx context.Context, tx pgx.Tx, direction int32, nonce string) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO backfill_control.batch (direction, first_seq, last_seq, nonce)
		SELECT $1, e.first, e.last, $2
		  FROM (SELECT seq AS first, (`+lastSeq("$1")+`) AS last FROM backfill_control.entry
		         WHERE direction = $1 AND seq > coalesce((SELECT last_seq FROM backfill_control.batch WHERE direction = $1 ORDER BY last_seq DESC LIMIT 1), 0)
		         ORDER BY seq LIMIT 1) e`, direction, nonce)
	return err
}

// Rollback gives the lock back and adds nothing. After Commit it does nothing.
func (p *Push) Rollback() { _ = p.tx.Rollback(context.Background()) }
