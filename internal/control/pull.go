package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Position is how far a receiver has applied a direction, with the nonce of the
// batch that entry came in. It is stored by the receiver with the rows.
type Position struct {
	Seq   int64
	Nonce string
}

// Batch is what a receiver applies next: entries above its position, up to To.
type Batch struct {
	To   Position
	Rows int64 // to be applied; 0 when all of them are dropped

	// Of rows that a backfill has sent: the request's table and layout.
	Released bool
	TableID  int32
	LayoutID int64
}

// Next returns the batch after a position: at most limit entries and about
// maxBytes of them, either many rows of one request or anything else; To equals the
// position when there is nothing. It is a Refused
// error when the position is not one this control database has given out: then
// the receiver or the control database was restored; and while the source may not
// go on.
func (s *Store) Next(ctx context.Context, d backfill.Direction, at Position, limit int, maxBytes int64) (Batch, error) {
	b := Batch{To: at}
	if err := s.verify(ctx, d, at); err != nil {
		return b, err
	}
	const ahead = `
		WITH e AS (
		    SELECT seq, dropped, request_id, table_id, layout_id, coalesce(pg_column_size(row), 0) + coalesce(pg_column_size(key), 0) AS size
		      FROM backfill_control.entry WHERE direction = $1 AND seq > $2 ORDER BY seq LIMIT $3)`
	const found = ` max(seq), count(*) FILTER (WHERE NOT dropped), coalesce(max(table_id), 0), max(layout_id)`
	var to, layout *int64
	var whole bool
	err := s.inOrder(ctx, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, ahead+`
			SELECT`+found+`, count(request_id) > 0,
			       coalesce(sum(size) <= $4 AND (count(request_id) = 0 OR count(request_id) = count(*) AND min(request_id) = max(request_id)), true) FROM e`,
			d.ID, at.Seq, limit, maxBytes).Scan(&to, &b.Rows, &b.TableID, &layout, &b.Released, &whole)
		if err == nil && !whole {
			// A few rows of a request, such as a row backfill's, go along with what is beside them.
			err = tx.QueryRow(ctx, ahead+`,
				r AS (SELECT e.*, CASE WHEN request_id IS NOT NULL AND count(*) OVER (PARTITION BY request_id) * 20 >= $3 THEN request_id END AS run FROM e),
				-- once: it is read for each row of w
				others AS MATERIALIZED (SELECT min(seq) AS other FROM r WHERE run IS DISTINCT FROM (SELECT run FROM r ORDER BY seq LIMIT 1)),
				w AS (SELECT r.*, row_number() OVER (ORDER BY seq) AS n, sum(size) OVER (ORDER BY seq) AS bytes FROM r)
				SELECT`+found+`, count(run) > 0 FROM w, others WHERE (n = 1 OR bytes <= $4) AND (other IS NULL OR seq < other)`,
				d.ID, at.Seq, limit, maxBytes).Scan(&to, &b.Rows, &b.TableID, &layout, &b.Released)
		}
		if err != nil || to == nil {
			return err
		}
		b.To.Seq = *to
		if b.Released {
			b.LayoutID = *layout
		}
		return tx.QueryRow(ctx, `
			SELECT nonce FROM backfill_control.batch WHERE direction = $1 AND last_seq >= $2 AND first_seq <= $2 ORDER BY last_seq LIMIT 1`, d.ID, b.To.Seq).Scan(&b.To.Nonce)
	})
	return b, err
}

// verify checks that a position is one that was given out here. One below what was
// acknowledged is too: the receiver was restored, and what it has lost of the
// changes is in history and delivered again.
func (s *Store) verify(ctx context.Context, d backfill.Direction, at Position) error {
	var halted *string
	if err := s.pool.QueryRow(ctx, `SELECT halted FROM backfill_control.side WHERE site = $1 AND name = $2`, d.Site, d.From).Scan(&halted); err != nil {
		return one(err, "direction %s", d)
	}
	if halted != nil {
		return backfill.Errorf(backfill.Refused, "changes of %s are not applied while it may not go on: %s", d.From, *halted)
	}
	applied, err := s.GivenOut(ctx, d, at)
	if err != nil || at.Seq >= applied {
		return err
	}
	return s.setBack(ctx, d, at.Seq)
}

// GivenOut checks that a receiver's position is one that this control database has
// given out, and returns the one it has acknowledged last. It changes nothing.
func (s *Store) GivenOut(ctx context.Context, d backfill.Direction, at Position) (applied int64, err error) {
	var nonce *string
	var begins int64
	if err := s.pool.QueryRow(ctx, `
		SELECT d.applied_seq, d.epoch_seq,
		       (SELECT nonce FROM backfill_control.batch b WHERE b.direction = d.id AND last_seq >= $2 AND first_seq <= $2 ORDER BY last_seq LIMIT 1)
		  FROM backfill_control.direction d WHERE d.id = $1`, d.ID, at.Seq).
		Scan(&applied, &begins, &nonce); err != nil {
		return 0, one(err, "direction %s", d)
	}
	switch {
	case at.Seq < begins:
		return applied, backfill.Errorf(backfill.Refused, "%s: %s stands at change %d, the site's present epoch begins at %d", d, d.To, at.Seq, begins)
	case at.Seq == 0 && at.Nonce == "" && applied > 0:
		return applied, lost(d, "has no position, although changes up to %d were acknowledged", applied)
	case at.Seq != 0 && (nonce == nil || *nonce != at.Nonce):
		return applied, lost(d, "stands at change %d, which this control database did not give out", at.Seq)
	}
	return applied, nil
}

func lost(d backfill.Direction, format string, args ...any) error {
	return backfill.Errorf(backfill.Refused, "%s: %s %s: one of the two databases was restored; %s",
		d, d.To, fmt.Sprintf(format, args...), backfill.NewEpoch(d.Site))
}

// setBack makes history above a position queue again. Rows of the direction's open
// requests are judged anew: what the receiver held then it may not hold now.
func (s *Store) setBack(ctx context.Context, d backfill.Direction, to int64) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := unjudged(ctx, tx, `direction = $1 AND state IN ('PENDING', 'IN_PROGRESS', 'AWAITING_REVIEW')`, d.ID); err != nil {
			return err
		}
		var from int64
		err := tx.QueryRow(ctx, `
			UPDATE backfill_control.direction n SET applied_seq = $2 FROM backfill_control.direction o
			 WHERE n.id = $1 AND o.id = n.id AND n.applied_seq > $2 RETURNING o.applied_seq`, d.ID, to).Scan(&from)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := audit(ctx, tx, "backfill", "receiver.restored", d.Site, d.To, map[string]any{"acknowledged": from, "position": to}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", d.Site)
	})
}

// Part is what of the entries above After and up to To is wanted: those of one
// table, or, with Only 0, those of all tables but some.
type Part struct {
	After, To int64
	Only      int32
	Except    []int32
}

// CopyBatch writes deliverable entries in COPY's binary form: seq, table_id,
// layout_id, op, key, row, stamp, released.
func (s *Store) CopyBatch(ctx context.Context, direction int32, p Part, w io.Writer) error {
	of := ""
	if p.Only != 0 {
		of = fmt.Sprintf(" AND table_id = %d", p.Only)
	}
	for _, id := range p.Except {
		of += fmt.Sprintf(" AND table_id <> %d", id)
	}
	return s.copyInOrder(ctx, w, fmt.Sprintf(`COPY (
		SELECT seq, table_id, layout_id, op, key, row, stamp, request_id IS NOT NULL FROM backfill_control.entry
		 WHERE direction = %d AND seq > %d AND seq <= %d%s AND NOT dropped ORDER BY seq) TO STDOUT (FORMAT binary)`, direction, p.After, p.To, of))
}

// CopyValues writes the values of a batch of released rows, of that many columns, in
// COPY's text form.
func (s *Store) CopyValues(ctx context.Context, direction int32, p Part, columns int, w io.Writer) error {
	values := make([]string, columns)
	for i := range values {
		values[i] = fmt.Sprintf("row[%d]", i+1)
	}
	return s.copyInOrder(ctx, w, fmt.Sprintf(`COPY (
		SELECT %s FROM backfill_control.entry WHERE direction = %d AND seq > %d AND seq <= %d AND NOT dropped ORDER BY seq) TO STDOUT`,
		strings.Join(values, ", "), direction, p.After, p.To))
}

// BareEntry is a change without its row.
type BareEntry struct {
	TableID  int32
	LayoutID *int64
	Op       string
	Key      backfill.Key
}

// Entry returns one change of a direction.
func (s *Store) Entry(ctx context.Context, direction int32, seq int64) (e BareEntry, err error) {
	err = s.pool.QueryRow(ctx, `SELECT table_id, layout_id, op::text, key FROM backfill_control.entry WHERE direction = $1 AND seq = $2`, direction, seq).
		Scan(&e.TableID, &e.LayoutID, &e.Op, &e.Key)
	return e, one(err, "change %d", seq)
}

func (s *Store) copyTo(ctx context.Context, w io.Writer, sql string) error {
	c, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	_, err = c.Conn().PgConn().CopyTo(ctx, w, sql)
	return err
}

// copyInOrder is copyTo inOrder.
func (s *Store) copyInOrder(ctx context.Context, w io.Writer, sql string) error {
	return s.inOrder(ctx, func(tx pgx.Tx) error {
		_, err := tx.Conn().PgConn().CopyTo(ctx, w, sql)
		return err
	})
}

// Acknowledge records that a receiver has applied everything up to a seq.
func (s *Store) Acknowledge(ctx context.Context, d backfill.Direction, seq int64) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.direction SET applied_seq = $2, applied_at = clock_timestamp() WHERE id = $1 AND applied_seq < $2`, d.ID, seq)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO backfill_control.ack (direction, seq) VALUES ($1, $2) ON CONFLICT DO NOTHING`, d.ID, seq); err != nil {
			return err
		}
		return notify(ctx, tx, "site", d.Site)
	})
}

// SetAside is a change that a receiver holds or has quarantined.
type SetAside struct {
	Seq     int64
	TableID int32
	Key     backfill.Key
	State   string
	Reason  string
	Since   time.Time
}

// MirrorSetAside makes the control database show just the changes a receiver has
// set aside. Skipped ones, of which the receiver no longer knows, stay.
func (s *Store) MirrorSetAside(ctx context.Context, d backfill.Direction, all []SetAside) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `CREATE TEMP TABLE aside (seq bigint PRIMARY KEY, table_id integer, key text[], state text, reason text, since timestamptz) ON COMMIT DROP`); err != nil {
			return err
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"pg_temp", "aside"}, []string{"seq", "table_id", "key", "state", "reason", "since"},
			pgx.CopyFromSlice(len(all), func(i int) ([]any, error) {
				a := all[i]
				return []any{a.Seq, a.TableID, a.Key, a.State, a.Reason, a.Since}, nil
			})); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			DELETE FROM backfill_control.quarantine q WHERE q.direction = $1 AND q.state <> 'skipped'
			   AND NOT EXISTS (SELECT FROM pg_temp.aside a WHERE a.seq = q.seq)`, d.ID); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.quarantine AS q (direction, seq, table_id, key, state, reason, since)
			SELECT $1, seq, table_id, key, state, reason, since FROM pg_temp.aside
			ON CONFLICT (direction, seq) DO UPDATE SET state = excluded.state, reason = excluded.reason
			 WHERE q.state <> 'skipped' AND (q.state, q.reason) IS DISTINCT FROM (excluded.state, excluded.reason)`, d.ID); err != nil {
			return err
		}
		return notify(ctx, tx, "site", d.Site)
	})
}

// Wishes are what people asked a receiver to do with changes it has set aside, and
// whether with those of tables that it has stopped.
type Wishes struct {
	Retry, Skip []int64
	CatchUp     bool
}

// Wishes reads what is asked for in a direction.
func (s *Store) Wishes(ctx context.Context, direction int32) (w Wishes, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT coalesce(array_agg(seq) FILTER (WHERE wish = 'retry'), '{}'), coalesce(array_agg(seq) FILTER (WHERE wish = 'skip'), '{}'),
		       EXISTS (SELECT FROM backfill_control.stopped WHERE direction = $1 AND wished_by IS NOT NULL)
		  FROM backfill_control.quarantine WHERE direction = $1 AND wish IS NOT NULL`, direction).Scan(&w.Retry, &w.Skip, &w.CatchUp)
	return w, err
}

// Skipped marks changes as skipped, before the receiver forgets them: a crash in
// between is mended by asking it again, because the wish stays.
func (s *Store) Skipped(ctx context.Context, direction int32, seqs []int64) error {
	_, err := s.pool.Exec(ctx, `UPDATE backfill_control.quarantine SET state = 'skipped' WHERE direction = $1 AND seq = ANY ($2)`, direction, seqs)
	return err
}

// WishesDone clears the wishes a receiver has fulfilled.
func (s *Store) WishesDone(ctx context.Context, direction int32, seqs []int64) error {
	_, err := s.pool.Exec(ctx, `
		WITH caught AS (UPDATE backfill_control.stopped SET wished_by = NULL WHERE direction = $1 AND wished_by IS NOT NULL)
		UPDATE backfill_control.quarantine SET wish = NULL WHERE direction = $1 AND seq = ANY ($2)`, direction, seqs)
	return err
}
