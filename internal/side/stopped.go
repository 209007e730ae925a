package side

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// A table whose rows are refused one after the other is stopped rather than let its
// changes fill the quarantine. The position goes on without it, so that other tables
// do; what of its changes was applied is remembered apart. It is tried again from
// there until it has caught up with the position, and then goes along as before.

// Stop is a table whose changes are not applied here for now.
type Stop struct {
	TableID int32
	Seq     int64  // its changes up to here were applied or set aside
	Reason  string // what refused the last of its rows
	Since   time.Time
}

// poison ends a batch in which too many rows of a table were refused in a row.
type poison struct {
	table  backfill.Table
	reason string
}

func (p *poison) Error() string {
	return fmt.Sprintf("%s: %s", p.table.Name, p.reason)
}

// streaks remembers how many rows of each table were refused since the last one
// that was not.
type streaks struct {
	limit   int64
	before  map[int32]int64
	now     map[int32]int64
	stopped []int32
}

func (b *batch) loadStreaks(ctx context.Context) error {
	b.refused = streaks{limit: b.feed.RefusedLimit, before: map[int32]int64{}, now: map[int32]int64{}}
	// What people have skipped or had retried since has made room for more.
	rows, err := b.tx.Query(ctx, `
		SELECT table_id, least(refused, (SELECT count(*) FROM `+b.db.schema+`.held h WHERE h.table_id = r.table_id)), stopped_at IS NOT NULL
		  FROM `+b.db.schema+`.refused r`)
	if err != nil {
		return err
	}
	var id int32
	var n int64
	var stopped bool
	_, err = pgx.ForEachRow(rows, []any{&id, &n, &stopped}, func() error {
		b.refused.before[id], b.refused.now[id] = n, n
		if stopped {
			b.refused.stopped = append(b.refused.stopped, id)
		}
		return nil
	})
	return err
}

func (b *batch) storeStreaks(ctx context.Context) error {
	for id, n := range b.refused.now {
		if n == b.refused.before[id] {
			continue
		}
		if _, err := b.tx.Exec(ctx, `
			INSERT INTO `+b.db.schema+`.refused (table_id, refused) VALUES ($1, $2)
			ON CONFLICT (table_id) DO UPDATE SET refused = excluded.refused`, id, n); err != nil {
			return err
		}
	}
	return nil
}

// refuse counts rows of a table that are refused. Rows tried again do not count:
// they are set aside already.
func (b *batch) refuse(tableID int32, rows int64, reason string) error {
	if b.retrying || rows == 0 {
		return nil
	}
	b.refused.now[tableID] += rows
	if b.refused.now[tableID] <= b.refused.limit {
		return nil
	}
	t, ok := b.tables[tableID]
	if !ok {
		t.ID = tableID
	}
	return &poison{t, reason}
}

// accept ends a table's streak: rows of it were applied.
func (b *batch) accept(g *group) {
	if b.refused.now[g.tableID] != 0 {
		b.refused.now[g.tableID] = 0
	}
}

// stop makes the position go on without a table.
func (db *DB) stop(ctx context.Context, p *poison) error {
	if len(p.table.CapturedFrom) > 1 {
		// Conflicts are told by the position, which says of every table what was applied.
		return backfill.Errorf(backfill.Refused, "changes to %s stand still: rows of %s are refused one after the other, the last with: %s; mend it there, and they go on by themselves",
			db.Side, p.table.Name, p.reason)
	}
	return db.do(ctx, `
		WITH at AS (SELECT seq FROM `+db.schema+`.applied FOR UPDATE)
		INSERT INTO `+db.schema+`.refused AS r (table_id, refused, stopped_at, reason, since)
		SELECT $1, 0, seq, $2, clock_timestamp() FROM at
		ON CONFLICT (table_id) DO UPDATE SET reason = excluded.reason,
		    stopped_at = coalesce(r.stopped_at, excluded.stopped_at), since = coalesce(r.since, excluded.since)`, p.table.ID, p.reason)
}

// Stops lists the tables that are stopped here.
func (db *DB) Stops(ctx context.Context) (all []Stop, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT table_id, stopped_at, reason, since FROM `+db.schema+`.refused WHERE stopped_at IS NOT NULL ORDER BY table_id`)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Stop])
		return err
	})
	return all, db.orNotSetUp(err)
}

// CatchUp tries one batch of each stopped table's changes, each in a transaction of
// its own. A table whose rows are still refused stays where it is; one that reaches
// the position is stopped no longer.
func (db *DB) CatchUp(ctx context.Context, f Feed) (a Applied, err error) {
	stops, err := db.Stops(ctx)
	if err != nil {
		return a, err
	}
	for _, s := range stops {
		b, err := db.catchUp(ctx, f, s.TableID)
		var p *poison
		if errors.As(err, &p) {
			err = db.stop(ctx, p) // for its reason
		}
		if err != nil {
			return a, err
		}
		a.Written += b.Written
		a.SetAside = a.SetAside || b.SetAside
	}
	return a, nil
}

func (db *DB) catchUp(ctx context.Context, f Feed, table int32) (a Applied, err error) {
	err = db.in(ctx, writing, func(tx pgx.Tx) error {
		b := newBatch(db, tx, f)
		if err := tx.QueryRow(ctx, `SELECT seq FROM `+db.schema+`.applied FOR UPDATE`).Scan(&a.To.Seq); err != nil {
			return err
		}
		var at *int64
		if err := tx.QueryRow(ctx, `SELECT stopped_at FROM `+db.schema+`.refused WHERE table_id = $1`, table).Scan(&at); err != nil || at == nil {
			return err
		}
		if err := b.begin(ctx); err != nil {
			return err
		}
		to, err := f.NextOf(ctx, table, *at, a.To.Seq)
		if err != nil {
			return err
		}
		if err := b.load(ctx, Part{After: *at, To: to, Only: table}); err != nil {
			return err
		}
		if err := b.apply(ctx); err != nil {
			return err
		}
		if err := b.storeStreaks(ctx); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			UPDATE `+db.schema+`.refused SET stopped_at = CASE WHEN $2::bigint < $3 THEN $2 END, since = CASE WHEN $2 < $3 THEN since END
			 WHERE table_id = $1`, table, to, a.To.Seq); err != nil {
			return err
		}
		a.Written, a.SetAside = b.written, true
		return nil
	})
	return a, err
}
