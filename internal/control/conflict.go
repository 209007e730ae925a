package control

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// LastPush is the number and nonce of a direction's last push.
func (s *Store) LastPush(ctx context.Context, direction int32) (batch int64, nonce string, err error) {
	err = s.pool.QueryRow(ctx, `SELECT push_batch, push_nonce FROM backfill_control.direction WHERE id = $1`, direction).Scan(&batch, &nonce)
	return batch, nonce, err
}

// since is the SQL of the policy that was in force when an entry e was pushed: the
// number since which it was, 0 for before the first.
const since = `coalesce((SELECT max(p.since) FROM backfill_control.conflict_policy p WHERE p.table_id = e.table_id AND p.since < e.seq), 0)`

// CopySent writes what a push has added of tables captured on both sides in COPY's
// binary form: table_id, key, seq, since, of each key the last.
func (s *Store) CopySent(ctx context.Context, direction int32, nonce string, w io.Writer) error {
	return s.copyTo(ctx, w, fmt.Sprintf(`COPY (
		SELECT e.table_id, e.key, e.seq, `+since+` FROM (
		    SELECT e.table_id, e.key, max(e.seq) AS seq FROM backfill_control.batch b
		      JOIN backfill_control.entry e ON e.direction = b.direction AND e.seq BETWEEN b.first_seq AND b.last_seq
		      JOIN backfill_control.table_config t ON t.id = e.table_id AND cardinality(t.captured_from) > 1
		     WHERE b.direction = %d AND b.nonce = '%s' AND e.key IS NOT NULL GROUP BY 1, 2) e) TO STDOUT (FORMAT binary)`,
		direction, nonce))
}

// CopyUnseen writes what of a table its receiver has not applied, or has set aside,
// in the same form.
func (s *Store) CopyUnseen(ctx context.Context, direction, table int32, w io.Writer) error {
	return s.copyTo(ctx, w, fmt.Sprintf(`COPY (
		SELECT e.table_id, e.key, max(e.seq), `+since+` FROM backfill_control.direction d JOIN backfill_control.entry e ON e.direction = d.id
		 WHERE d.id = %d AND e.table_id = %d AND e.key IS NOT NULL AND e.request_id IS NULL
		   AND (e.seq > d.applied_seq OR e.seq IN (SELECT seq FROM backfill_control.quarantine WHERE direction = d.id AND state <> 'skipped'))
		 GROUP BY 1, 2, 4) TO STDOUT (FORMAT binary)`, direction, table))
}

// Reached records up to where a receiver has seen every change of two-way tables.
func (s *Store) Reached(ctx context.Context, direction int32, seq int64) error {
	_, err := s.pool.Exec(ctx, `UPDATE backfill_control.direction SET reach = $2 WHERE id = $1 AND reach < $2`, direction, seq)
	return err
}

// Settled returns up to which of its own changes, sent in the direction out, a side
// may forget once it has applied the direction in up to a seq: whatever comes after
// that, pushed or released, was read with those changes seen. It looks under the lock
// of in, because a push under way has read already; ok is false when that is taken.
func (s *Store) Settled(ctx context.Context, out, in backfill.Direction) (upTo, at int64, ok bool, err error) {
	err = s.inOrder(ctx, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, `SELECT pg_try_advisory_xact_lock(20011, $1)`, in.ID).Scan(&ok); err != nil || !ok {
			return err
		}
		return tx.QueryRow(ctx, `
			SELECT least(d.reach, (SELECT min(floor_stamp) FROM backfill_control.request WHERE direction = $2 AND state = ANY ($3))),
			       coalesce((`+lastSeq("$2")+`), 0)
			  FROM backfill_control.direction d WHERE d.id = $1`, out.ID, in.ID, backfill.OpenStates()).Scan(&upTo, &at)
	})
	return upTo, at, ok, err
}

// Lost is a version that a side has seen lose a conflict.
type Lost struct {
	Note     string // of the side, a UUID
	TableID  int32
	Own      bool   // a change of that side, else one that came in
	Seq      *int64 // nil: it had not been sent
	ToSeq    *int64 // the change it lost to, nil when that had not been sent
	Op       string
	Key      backfill.Key
	Row      []*string
	LayoutID int64
}

// RecordLost keeps what a side has seen lose. A version that was never sent enters
// history under a number of its own, with the snapshot given, which is asked for
// under the lock of the side's direction; it is not delivered. A released row that gave
// way on the receiver counts as superseded. It may run again.
func (s *Store) RecordLost(ctx context.Context, out, in backfill.Direction, lost []Lost, snapshot func(context.Context) (string, error)) error {
	return s.inOrder(ctx, func(tx pgx.Tx) error {
		if err := lockDirection(ctx, tx, out.ID); err != nil {
			return err
		}
		snap, err := snapshot(ctx)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			CREATE TEMP TABLE lost (note text, table_id integer, own boolean, seq bigint, to_seq bigint, op text, key text[], layout_id bigint, "row" text[],
			    unsent boolean NOT NULL DEFAULT false) ON COMMIT DROP`); err != nil {
			return err
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"pg_temp", "lost"}, []string{"note", "table_id", "own", "seq", "to_seq", "op", "key", "layout_id", "row"},
			pgx.CopyFromSlice(len(lost), func(i int) ([]any, error) {
				l := lost[i]
				return []any{l.Note, l.TableID, l.Own, l.Seq, l.ToSeq, l.Op, l.Key, l.LayoutID, l.Row}, nil
			})); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			DELETE FROM pg_temp.lost l USING backfill_control.conflict c WHERE c.note = l.note::uuid;
			UPDATE pg_temp.lost SET seq = nextval(pg_get_serial_sequence('backfill_control.entry', 'seq')), unsent = true WHERE seq IS NULL`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.entry (seq, direction, table_id, layout_id, snap, op, dropped, key, row) OVERRIDING SYSTEM VALUE
			SELECT seq, $1, table_id, nullif(layout_id, 0), $2::text::pg_snapshot, op::"char", true, key, "row" FROM pg_temp.lost WHERE unsent`, out.ID, snap); err != nil {
			return err
		}
		if err := endBatch(ctx, tx, out.ID, rand.Text()); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			WITH noted AS (
			    INSERT INTO backfill_control.conflict (direction, seq, to_seq, note)
			    SELECT CASE WHEN own THEN $1::int ELSE $2 END, seq, to_seq, note::uuid FROM pg_temp.lost
			    ON CONFLICT DO NOTHING RETURNING *),
			gave AS (
			    UPDATE backfill_control.staged s SET superseded_by = coalesce(n.to_seq, 0)
			      FROM noted n JOIN backfill_control.entry e ON e.direction = n.direction AND e.seq = n.seq
			     WHERE s.request_id = e.request_id AND s.key = e.key RETURNING s.request_id),
			counted AS (
			    UPDATE backfill_control.request r SET released = released - g.rows, superseded = superseded + g.rows
			      FROM (SELECT request_id, count(*) AS rows FROM gave GROUP BY 1) g WHERE r.id = g.request_id)
			SELECT t.name, count(*) FROM noted JOIN pg_temp.lost l ON l.note::uuid = noted.note JOIN backfill_control.table_config t ON t.id = l.table_id GROUP BY 1`, out.ID, in.ID)
		if err != nil {
			return err
		}
		type noticed struct {
			Table    string
			Versions int
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[noticed])
		if err != nil {
			return err
		}
		for _, n := range all {
			if err := audit(ctx, tx, "backfill", "conflict", out.Site, n.Table, map[string]any{"versions": n.Versions, "noticed_by": out.From}); err != nil {
				return err
			}
		}
		return notify(ctx, tx, "site", out.Site)
	})
}
