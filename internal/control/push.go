package control

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Push adds one batch of captured changes to a direction's queue. It holds the
// direction's lock from Begin to Commit or Rollback.
type Push struct {
	tx        pgx.Tx
	direction backfill.Direction
	batch     int64
	nonce     string
	prev      string
	rows      int64
}

// lockDirection makes pushes and releases of a direction take turns, so that the
// order of seqs is the order of reads and of commits. It must be the transaction's
// first statement, alone, under READ COMMITTED: a statement that locks and checks
// at once checks what was there before the lock.
func lockDirection(ctx context.Context, tx pgx.Tx, direction int32) error {
	_, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(20011, $1)`, direction)
	return err
}

// BeginPush takes the direction's lock. Everything the push reads, on the source
// too, must be read after this returns.
func (s *Store) BeginPush(ctx context.Context, d backfill.Direction) (*Push, error) {
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return nil, err
	}
	p := &Push{tx: tx, direction: d}
	if err := lockDirection(ctx, tx, d.ID); err != nil {
		p.Rollback()
		return nil, err
	}
	if err := tx.QueryRow(ctx, `SELECT push_batch, push_nonce, prev_nonce FROM backfill_control.direction WHERE id = $1`, d.ID).
		Scan(&p.batch, &p.nonce, &p.prev); err != nil {
		p.Rollback()
		return nil, one(err, "direction %s", d)
	}
	return p, nil
}

// Continues checks that the source's last push is the one remembered here, or the
// one before it: then a crash came between the two commits, and the source is
// behind. Otherwise one of the two databases was restored, and going on would send,
// or forget, the wrong changes.
func (p *Push) Continues(batch int64, nonce string) (behind bool, err error) {
	switch {
	case batch == p.batch && nonce == p.nonce:
		return false, nil
	case batch == p.batch-1 && nonce == p.prev:
		return true, nil
	}
	return false, backfill.Errorf(backfill.Refused,
		"%s remembers push %d as its last, the control database push %d: one of them was restored or set up anew; open a new epoch with backfill site new-epoch %s",
		p.direction.From, batch, p.batch, p.direction.Site)
}

// Last is the direction's last push: its number and nonce.
func (p *Push) Last() (batch int64, nonce string) { return p.batch, p.nonce }

// Tables returns the configuration of the site's tables as it is under the lock.
func (p *Push) Tables(ctx context.Context) (map[string]backfill.Table, error) {
	rows, err := p.tx.Query(ctx, `SELECT `+tableColumns+` FROM backfill_control.table_config t WHERE t.site = $1`, p.direction.Site)
	if err != nil {
		return nil, err
	}
	out := map[string]backfill.Table{}
	_, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (t backfill.Table, err error) {
		err = r.Scan(tableFields(&t)...)
		out[t.Name] = t
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
// op, dropped, key, row.
func (p *Push) Copy(ctx context.Context, r io.Reader) error {
	tag, err := p.tx.Conn().PgConn().CopyFrom(ctx, r, `
		COPY backfill_control.entry (direction, table_id, layout_id, snap, op, dropped, key, row) FROM STDIN (FORMAT binary)`)
	p.rows += tag.RowsAffected()
	return err
}

// Gap records that rows of a table changed, came or went unrecorded: capture is
// unbroken only since now, and an open request of the table cannot go on.
func (p *Push) Gap(ctx context.Context, tableID int32, reason string) error {
	if _, err := p.tx.Exec(ctx, `UPDATE backfill_control.table_side SET capture_since = clock_timestamp() WHERE table_id = $1 AND side = $2 AND capture_ok`,
		tableID, p.direction.From); err != nil {
		return err
	}
	return fail(ctx, p.tx, reason, `direction = $1 AND table_id = $2`, p.direction.ID, tableID)
}

// Broken records what is wrong with a table's capture: until it is repaired rows
// can change unrecorded.
func (p *Push) Broken(ctx context.Context, tableID int32, problem string) error {
	return broken(ctx, p.tx, p.direction.Site, p.direction.From, tableID, problem)
}

func broken(ctx context.Context, tx pgx.Tx, site, side string, tableID int32, problem string) error {
	if _, err := tx.Exec(ctx, `
		UPDATE backfill_control.table_side SET capture_ok = false, capture_since = NULL, problem = nullif($3, '')
		 WHERE table_id = $1 AND side = $2`, tableID, side, problem); err != nil {
		return err
	}
	return fail(ctx, tx, "changes may have gone unrecorded while this was so: "+problem,
		`table_id = $1 AND direction = (SELECT id FROM backfill_control.direction WHERE site = $2 AND from_side = $3)`, tableID, site, side)
}

// Shape tells what a table is made of: requests that read it when it was made of
// something else cannot go on.
func (p *Push) Shape(ctx context.Context, tableID int32, shape string) error {
	return reshaped(ctx, p.tx, p.direction.Site, p.direction.From, tableID, shape)
}

func reshaped(ctx context.Context, tx pgx.Tx, site, side string, tableID int32, shape string) error {
	return fail(ctx, tx, "since the walk began a column of the table was altered, a partition attached or detached, or the table replaced: rows may have changed unrecorded",
		`table_id = $1 AND shape <> $4 AND direction = (SELECT id FROM backfill_control.direction WHERE site = $2 AND from_side = $3)`, tableID, site, side, shape)
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
// returns the number.
func (p *Push) Commit(ctx context.Context, nonce string) (int64, error) {
	if err := endBatch(ctx, p.tx, p.direction.ID, nonce); err != nil {
		return 0, err
	}
	if _, err := p.tx.Exec(ctx, `
		UPDATE backfill_control.direction SET push_batch = push_batch + 1, prev_nonce = push_nonce, push_nonce = $2 WHERE id = $1`,
		p.direction.ID, nonce); err != nil {
		return 0, err
	}
	if _, err := p.tx.Exec(ctx, `
		UPDATE backfill_control.table_side s SET dropped = s.dropped + n.dropped
		  FROM (SELECT table_id, count(*) AS dropped FROM backfill_control.entry e
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
		  FROM (SELECT min(seq) AS first, max(seq) AS last FROM backfill_control.entry
		         WHERE direction = $1 AND seq > coalesce((SELECT last_seq FROM backfill_control.batch WHERE direction = $1 ORDER BY last_seq DESC LIMIT 1), 0)) e
		 WHERE e.last IS NOT NULL`, direction, nonce)
	return err
}

// Rollback gives the lock back and adds nothing. After Commit it does nothing.
func (p *Push) Rollback() { _ = p.tx.Rollback(context.Background()) }
