package side

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/copypipe"
	"backfill/internal/row"
)

// Position is how far the other side's changes have been applied here.
type Position struct {
	Seq   int64
	Nonce string
}

// Feed is where a batch comes from.
type Feed struct {
	// Next says how far the batch after a position goes and how many rows it has.
	Next func(context.Context, Position) (to Position, rows int64, err error)
	// NextOf says how far the next batch of one table's rows goes, which ends at upTo
	// at the latest; it is upTo when there is no row before it.
	NextOf func(ctx context.Context, tableID int32, after, upTo int64) (to int64, err error)
	// Copy writes rows in COPY's binary form: seq, table_id, layout_id, op, key, row,
	// stamp, and whether a backfill has sent it.
	Copy func(context.Context, Part, io.Writer) error
	// Released says of the batch that Next gave whether it is rows of one backfill, and
	// then of which table and layout. CopyValues writes the values of such a batch, of
	// that many columns, in COPY's text form. Both may be nil.
	Released   func() (tableID int32, layoutID int64, ok bool)
	CopyValues func(ctx context.Context, p Part, columns int, w io.Writer) error
	// Entry returns one of the changes without its row.
	Entry func(ctx context.Context, seq int64) (Entry, error)
	// Layout returns the layout rows were read under.
	Layout func(ctx context.Context, id int64) (*row.Layout, error)
	// Tables returns the site's tables by id, whose apply order is heeded, and how the
	// rows are made of those that have another shape here. It is asked after Next, so that
	// it knows by which policy what comes was pushed.
	Tables func(context.Context) (map[int32]backfill.Table, map[int32]*row.Mapping, error)
	// Sent is the last push of this side that the control database knows, and what it
	// has sent of tables captured on both sides, see DB.Fence; asked only where there are.
	Sent func(context.Context) (batch int64, nonce string, own func(io.Writer) error, err error)
	// Retry asks for the held rows to be tried again too.
	Retry bool
	// HoldLimit is how long a row may be held before it is quarantined.
	HoldLimit time.Duration
	// RefusedLimit is how many rows of a table may be refused in a row before the
	// table is stopped.
	RefusedLimit int64
}

// Part is what of the rows above After and up to To is wanted: those of one table,
// or, with Only 0, those of all tables but some.
type Part struct {
	After, To int64
	Only      int32
	Except    []int32
}

// Entry is a change without its row.
type Entry struct {
	TableID  int32
	LayoutID *int64
	Op       string
	Key      backfill.Key
}

// Applied is what a batch came to.
type Applied struct {
	To       Position
	Written  int64 // rows written or deleted
	SetAside bool  // the set of held or quarantined rows, or of stopped tables, has changed
	Held     bool  // rows are held; not looked at when there was nothing to do
	Stopped  int   // tables that were left out; not looked at then either
	Lost     bool  // a version lost a conflict, see DB.Lost
	TwoWay   bool  // tables are captured on both sides; then
	Reach    int64 // all their changes up to here have been seen
}

// Apply applies the next batch in one transaction, together with the position it
// reaches. It may run again at any time, also beside itself: the position's row
// makes applies take turns.
//
// Of several entries of a key the newest counts. Upserts go parents first, then
// deletes children first; each is one statement a table, with deferrable
// constraints deferred. What cannot be applied is set aside, and the rest goes on:
// rows that violate a foreign key or a unique constraint are held and tried again,
// others are quarantined with PostgreSQL's message. A row set aside is replaced by
// any later entry of its key, so a retry never applies an older read after a newer.
//
// A table of which too many rows are refused in a row is stopped, and the batch
// applied without it.
func (db *DB) Apply(ctx context.Context, f Feed) (a Applied, err error) {
	for stopped := false; ; stopped = true {
		a, err = db.applyOnce(ctx, f)
		a.SetAside = a.SetAside || stopped
		var p *poison
		if !errors.As(err, &p) {
			return a, err
		}
		if err := db.stop(ctx, p); err != nil {
			return Applied{}, err
		}
	}
}

func newBatch(db *DB, tx pgx.Tx, f Feed) *batch {
	return &batch{db: db, tx: tx, feed: f, targets: map[int32]*Table{}, layouts: map[int64]*row.Layout{}}
}

func (db *DB) applyOnce(ctx context.Context, f Feed) (a Applied, err error) {
	err = db.in(ctx, writing, func(tx pgx.Tx) error {
		b := newBatch(db, tx, f)
		if err := tx.QueryRow(ctx, `SELECT seq, nonce FROM `+db.schema+`.applied FOR UPDATE`).Scan(&a.To.Seq, &a.To.Nonce); err != nil {
			return db.orNotSetUp(err)
		}
		from := a.To
		to, rows, err := f.Next(ctx, from)
		if err != nil {
			return err
		}
		if to.Seq == from.Seq && !f.Retry {
			return nil
		}
		if err := b.begin(ctx); err != nil {
			return err
		}
		if b.twoWay {
			// A push that was committed and has not removed its records yet must not do so
			// once they have been judged as unsent: then they are pushed again.
			batch, nonce, own, err := f.Sent(ctx)
			if err != nil {
				return err
			}
			if err := db.Fence(ctx, batch, nonce, own); err != nil {
				return err
			}
		}
		if rows > 0 {
			part := Part{After: from.Seq, To: to.Seq, Except: b.refused.stopped}
			straight, err := b.straight(ctx, part, rows)
			if err != nil {
				return err
			}
			if !straight {
				if err := b.load(ctx, part); err != nil {
					return err
				}
				if err := b.apply(ctx); err != nil {
					return err
				}
			}
			if err := b.storeStreaks(ctx); err != nil {
				return err
			}
		}
		if f.Retry {
			if err := b.retry(ctx); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, `UPDATE `+db.schema+`.applied SET seq = $1, nonce = $2`, to.Seq, to.Nonce); err != nil {
			return err
		}
		a = Applied{To: to, Written: b.written, SetAside: b.setAside, Stopped: len(b.refused.stopped), Lost: b.lost, TwoWay: b.twoWay}
		if b.twoWay {
			if err := tx.QueryRow(ctx, `SELECT `+db.seen()).Scan(&a.Reach); err != nil {
				return err
			}
		}
		return tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+db.schema+`.held WHERE state = 'held')`).Scan(&a.Held)
	})
	return a, err
}

// batch is one apply transaction. The rows to be applied are in pg_temp.incoming;
// what is applied or set aside leaves it.
type batch struct {
	db       *DB
	tx       pgx.Tx
	feed     Feed
	tables   map[int32]backfill.Table
	twoWay   bool // one of them is captured on both sides
	targets  map[int32]*Table
	mappings map[int32]*row.Mapping
	layouts  map[int64]*row.Layout
	synced   map[uint32]bool // see syncs
	refused  streaks
	retrying bool // the held rows are tried again
	keysOnly bool // what is being halved are keys
	written  int64
	setAside bool
	lost     bool
}

// group is the rows of one table read under one layout.
type group struct {
	tableID  int32
	layoutID int64
	order    int
	upserts  int64
	deletes  int64
	target   *Table
	layout   *row.Layout
	// mapping makes the rows, which were read under the layout sent, of the layout.
	mapping *row.Mapping
	sent    *row.Layout
}

func (b *batch) begin(ctx context.Context) error {
	if _, err := b.tx.Exec(ctx, `SELECT set_config('backfill.applying', $1, true)`, b.db.Site); err != nil {
		return err
	}
	_, err := b.tx.Exec(ctx, `
		CREATE TEMP TABLE IF NOT EXISTS incoming (
		    id bigint GENERATED ALWAYS AS IDENTITY, seq bigint, table_id integer, layout_id bigint,
		    op "char", key text[] COLLATE "C", "row" text[] COLLATE "C", stamp bigint, released boolean,
		    sent text[], -- the row as it was sent, once a mapping has made another of it
		    -- of two-way tables, see held and own: a person decides, or has decided for it
		    unseen bigint, since bigint, quarantine boolean NOT NULL DEFAULT false, decided boolean NOT NULL DEFAULT false) ON COMMIT DELETE ROWS;
		CREATE TEMP TABLE IF NOT EXISTS judged (
		    id bigint PRIMARY KEY, verdict "char", unsent boolean, own bigint, records bigint[],
		    there boolean, was text[], same boolean) ON COMMIT DELETE ROWS;
		SET CONSTRAINTS ALL DEFERRED`)
	if err != nil {
		return err
	}
	if b.tables, b.mappings, err = b.feed.Tables(ctx); err != nil {
		return err
	}
	for _, t := range b.tables {
		b.twoWay = b.twoWay || t.TwoWay()
	}
	return b.loadStreaks(ctx)
}

// load brings entries into incoming. Where this database's encoding lacks a
// character, COPY refuses all of them: by halves, those that have it are set aside,
// and the rest goes on.
func (b *batch) load(ctx context.Context, part Part) error { return b.loadPart(ctx, part, false) }

func (b *batch) loadPart(ctx context.Context, part Part, halved bool) error {
	var rows int64
	err := pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error {
		return copypipe.Run(func(w io.Writer) error { return b.feed.Copy(ctx, part, w) }, func(r io.Reader) error {
			tag, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY pg_temp.incoming (seq, table_id, layout_id, op, key, "row", stamp, released) FROM STDIN (FORMAT binary)`)
			rows = tag.RowsAffected()
			return err
		})
	})
	switch {
	case err == nil && halved:
		// What could be loaded ends a table's streak of refused rows.
		tables, err := b.tx.Query(ctx, `SELECT DISTINCT table_id FROM pg_temp.incoming WHERE seq > $1 AND seq <= $2`, part.After, part.To)
		if err != nil {
			return err
		}
		var table int32
		_, err = pgx.ForEachRow(tables, []any{&table}, func() error {
			b.accept(&group{tableID: table})
			return nil
		})
		return err
	case err == nil:
		return b.analyze(ctx, rows)
	case !Unconvertible(err):
		return err
	case part.To-part.After == 1:
		return b.unloadable(ctx, part.To, err)
	}
	low, high := part, part
	low.To = part.After + (part.To-part.After)/2
	high.After = low.To
	if err := b.loadPart(ctx, low, true); err != nil {
		return err
	}
	return b.loadPart(ctx, high, true)
}

// Unconvertible reports whether text has a character that a database's encoding lacks.
func Unconvertible(err error) bool {
	code := SQLState(err)
	return code == "22P05" || code == "22021"
}

// unloadable sets an entry aside that this database cannot even hold, without its
// row. A key that it cannot hold is written in ASCII; there is no row of it here, so
// that its deletes have nothing to do.
func (b *batch) unloadable(ctx context.Context, seq int64, why error) error {
	e, err := b.feed.Entry(ctx, seq)
	if err != nil {
		return err
	}
	key := []string(e.Key)
	err = pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT $1::text[]`, key)
		return err
	})
	foreign := Unconvertible(err)
	if err != nil && !foreign {
		return err
	}
	if foreign {
		key = slices.Clone(key)
		for i, part := range key {
			quoted := strconv.QuoteToASCII(part)
			key[i] = quoted[1 : len(quoted)-1]
		}
	}
	if err := b.refuse(e.TableID, 1, brief(why)); err != nil {
		return err
	}
	b.setAside = true
	if _, err := b.tx.Exec(ctx, `DELETE FROM `+b.db.schema+`.held WHERE table_id = $1 AND key = $2 AND seq < $3`, e.TableID, key, seq); err != nil {
		return err
	}
	if foreign && e.Op != "c" && e.Op != "u" {
		return nil
	}
	_, err = b.tx.Exec(ctx, `
		INSERT INTO `+b.db.schema+`.held (seq, table_id, layout_id, op, key, state, reason) VALUES ($1, $2, $3, $4::text::"char", $5, 'quarantined', $6)
		ON CONFLICT (seq, key) DO UPDATE SET state = 'quarantined', reason = excluded.reason`, seq, e.TableID, e.LayoutID, e.Op, key, Message(why))
	return err
}

// reload tries to load entries again that were set aside without their rows.
func (b *batch) reload(ctx context.Context) error {
	rows, err := b.tx.Query(ctx, `DELETE FROM `+b.db.schema+`.held WHERE state = 'held' AND op IN ('c', 'u') AND "row" IS NULL RETURNING seq`)
	if err != nil {
		return err
	}
	seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	for _, seq := range seqs {
		if err := b.loadPart(ctx, Part{After: seq - 1, To: seq}, true); err != nil {
			return err
		}
	}
	return nil
}

// analyze tells the planner how many rows are in incoming, when they are many: it
// would otherwise compare them one by one with each other and with the held rows.
func (b *batch) analyze(ctx context.Context, rows int64) error {
	if rows < 500 {
		return nil
	}
	// Their number is what is wanted: a few of them tell it as well as all.
	_, err := b.tx.Exec(ctx, `SET LOCAL default_statistics_target = 1; ANALYZE pg_temp.incoming (table_id, layout_id, op)`)
	return err
}

// apply goes from truncate to truncate: what was read before one is applied
// before it.
func (b *batch) apply(ctx context.Context) error {
	rows, err := b.tx.Query(ctx, `SELECT seq, table_id FROM pg_temp.incoming WHERE op = 't' ORDER BY seq`)
	if err != nil {
		return err
	}
	type truncate struct {
		Seq     int64
		TableID int32
	}
	truncates, err := pgx.CollectRows(rows, pgx.RowToStructByPos[truncate])
	if err != nil {
		return err
	}
	if len(truncates) == 0 {
		return b.segment(ctx, false)
	}
	// Later segments wait in a second table, so that each statement sees just its own.
	if _, err := b.tx.Exec(ctx, `
		CREATE TEMP TABLE later ON COMMIT DROP AS SELECT * FROM pg_temp.incoming WHERE op <> 't';
		DELETE FROM pg_temp.incoming`); err != nil {
		return err
	}
	bring := func(to any) error {
		_, err := b.tx.Exec(ctx, `
			WITH moved AS (DELETE FROM pg_temp.later WHERE $1::bigint IS NULL OR seq < $1 RETURNING *)
			INSERT INTO pg_temp.incoming (seq, table_id, layout_id, op, key, "row", stamp, released)
			SELECT seq, table_id, layout_id, op, key, "row", stamp, released FROM moved ORDER BY seq`, to)
		return err
	}
	for _, t := range truncates {
		if err := bring(t.Seq); err != nil {
			return err
		}
		if err := b.segment(ctx, false); err != nil {
			return err
		}
		if err := b.truncate(ctx, t.TableID, t.Seq); err != nil {
			return err
		}
	}
	if err := bring(nil); err != nil {
		return err
	}
	return b.segment(ctx, false)
}

// retryRows is how many held rows are tried again in one transaction.
const retryRows = 10_000

// retry tries the held rows again, in the same multi-row statements, after those
// whose parents are still missing were left out.
func (b *batch) retry(ctx context.Context) error {
	b.retrying = true
	if err := b.reload(ctx); err != nil {
		return err
	}
	// Bounded, so that live changes are not held up by a great many held rows; those
	// not tried for longest come first, so that each gets its turn.
	tag, err := b.tx.Exec(ctx, `
		WITH turn AS (
		    SELECT seq, key FROM `+b.db.schema+`.held WHERE state = 'held' AND op <> 't' ORDER BY tried NULLS FIRST, seq LIMIT $1),
		tried AS (
		    UPDATE `+b.db.schema+`.held h SET tried = clock_timestamp() FROM turn WHERE h.seq = turn.seq AND h.key = turn.key RETURNING h.*)
		INSERT INTO pg_temp.incoming (seq, table_id, layout_id, op, key, "row", stamp, released, unseen, decided)
		SELECT seq, table_id, layout_id, op, key, "row", stamp, released, unseen, conflict FROM tried ORDER BY seq`, retryRows)
	if err != nil {
		return err
	}
	if err := b.analyze(ctx, tag.RowsAffected()); err != nil {
		return err
	}
	if err := b.segment(ctx, true); err != nil {
		return err
	}
	tag, err = b.tx.Exec(ctx, `UPDATE `+b.db.schema+`.held SET state = 'quarantined' WHERE state = 'held' AND since < clock_timestamp() - $1::interval`, b.feed.HoldLimit)
	b.setAside = b.setAside || tag.RowsAffected() > 0
	return err
}

// segment applies the rows in incoming and empties it.
func (b *batch) segment(ctx context.Context, held bool) error {
	if b.twoWay {
		return b.contested(ctx, held)
	}
	return b.segmentOnce(ctx, held)
}

func (b *batch) segmentOnce(ctx context.Context, held bool) error {
	groups, err := b.groups(ctx)
	if err != nil {
		return err
	}
	contested := false
	for i, judged := 0, map[int32]bool{}; i < len(groups); i++ {
		if t := b.tables[groups[i].tableID]; t.TwoWay() && !judged[t.ID] {
			judged[t.ID], contested = true, true
			if err := b.judge(ctx, groups, i); err != nil {
				return err
			}
		}
	}
	for i := range groups {
		if err := b.newestOnly(ctx, &groups[i]); err != nil {
			return err
		}
	}
	if err := b.transform(ctx, groups); err != nil {
		return err
	}
	if contested {
		if err := b.quarantined(ctx); err != nil {
			return err
		}
		for i := range groups {
			if err := b.recount(ctx, b.tx, &groups[i]); err != nil {
				return err
			}
		}
	}
	if held {
		if _, err := b.holdOrphans(ctx, groups); err != nil {
			return err
		}
	}
	if err := b.together(ctx, groups); err != nil {
		return err
	}
	if contested {
		if err := b.conclude(ctx, groups); err != nil {
			return err
		}
	}
	// What is left was applied; a held row among it is held no longer.
	tag, err := b.tx.Exec(ctx, `
		WITH done AS (DELETE FROM pg_temp.incoming RETURNING seq, key)
		DELETE FROM `+b.db.schema+`.held h USING done WHERE h.seq = done.seq AND h.key = done.key`)
	b.setAside = b.setAside || tag.RowsAffected() > 0
	return err
}

// groups lists what is in incoming by table and layout, parents first, and sets
// aside what has no table to go to.
func (b *batch) groups(ctx context.Context) ([]group, error) {
	// A marker says that a spelling of a key is gone; its row follows under another.
	rows, err := b.tx.Query(ctx, `
		WITH gone AS (DELETE FROM pg_temp.incoming WHERE op = 'm')
		SELECT table_id, coalesce(layout_id, 0), count(*) FILTER (WHERE op IN ('c', 'u')), count(*) FILTER (WHERE op = 'd')
		  FROM pg_temp.incoming WHERE op <> 'm' GROUP BY 1, 2`)
	if err != nil {
		return nil, err
	}
	all, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (g group, err error) {
		return g, r.Scan(&g.tableID, &g.layoutID, &g.upserts, &g.deletes)
	})
	if err != nil {
		return nil, err
	}
	var out []group
	for _, g := range all {
		problem, deletes, err := b.resolve(ctx, &g)
		if err != nil {
			return nil, err
		}
		if problem != "" {
			refused := g.upserts
			if !deletes {
				refused += g.deletes
			}
			if err := b.refuse(g.tableID, refused, problem); err != nil {
				return nil, err
			}
			if err := b.aside(ctx, "quarantined", problem, `i.table_id = $3 AND i.layout_id IS NOT DISTINCT FROM nullif($4::bigint, 0) AND (i.op <> 'd' OR NOT $5)`, g.tableID, g.layoutID, deletes); err != nil {
				return nil, err
			}
			// A row that comes again is not deleted before it.
			tag, err := b.tx.Exec(ctx, `
				DELETE FROM pg_temp.incoming d USING `+b.db.schema+`.held h
				 WHERE d.table_id = $1 AND d.op = 'd' AND h.table_id = $1 AND h.key = d.key AND h.seq > d.seq`, g.tableID)
			if err != nil {
				return nil, err
			}
			if g.upserts, g.deletes = 0, g.deletes-tag.RowsAffected(); !deletes || g.deletes <= 0 {
				continue
			}
		}
		out = append(out, g)
	}
	slices.SortFunc(out, func(x, y group) int {
		if x.order != y.order {
			return x.order - y.order
		}
		return strings.Compare(x.target.SQL, y.target.SQL)
	})
	return out, nil
}

// resolve finds the table a group goes to and checks that its columns are there.
// With a problem, deletes says that it is none for deletes.
func (b *batch) resolve(ctx context.Context, g *group) (problem string, deletes bool, err error) {
	t, ok := b.tables[g.tableID]
	if !ok {
		return "the table is no longer configured", false, nil
	}
	g.order = t.ApplyOrder
	if g.target = b.targets[g.tableID]; g.target == nil {
		if g.target, err = describeKeyed(ctx, b.tx, t.Relation(b.db.Side), b.mappings[g.tableID].KeyOrNil()); err != nil {
			return "", false, err
		}
		b.targets[g.tableID] = g.target
	}
	g.mapping = b.mappings[g.tableID]
	if g.target.Problem != "" {
		return "on " + b.db.Side + ": " + g.target.Problem, false, nil
	}
	if g.layoutID == 0 {
		g.layout = g.target.Layout // deletes that a truncate has left: they carry no row
		return "", false, nil
	}
	if g.layout = b.layouts[g.layoutID]; g.layout == nil {
		if g.layout, err = b.feed.Layout(ctx, g.layoutID); err != nil {
			return "", false, err
		}
		b.layouts[g.layoutID] = g.layout
	}
	if g.mapping != nil {
		return b.mapped(g, t.Name)
	}
	if !slices.Equal(g.layout.Key, g.target.Layout.Key) {
		return fmt.Sprintf("the key of %s is (%s) on the source and (%s) on %s", t.Name,
			strings.Join(g.layout.Key, ", "), strings.Join(g.target.Layout.Key, ", "), b.db.Side), false, nil
	}
	for _, c := range g.layout.Columns {
		if _, ok := g.target.Layout.Column(c.Name); !ok {
			return fmt.Sprintf("column %s of %s does not exist on %s: add it there, then retry", row.Ident(c.Name), t.Name, b.db.Side), true, nil
		}
	}
	return "", false, nil
}

// mapped looks at whether a group's rows can be mapped, and makes of its layout that of
// the rows then.
func (b *batch) mapped(g *group, table string) (problem string, deletes bool, err error) {
	switch missing := g.mapping.Missing(g.layout); {
	case !g.mapping.KeyOf(g.layout):
		return fmt.Sprintf("the key of %s is (%s) on the source, and its mapping was made for another: set the mapping again, then retry",
			table, strings.Join(g.layout.Key, ", ")), false, nil
	case missing != "":
		return fmt.Sprintf("column %s of %s, which its mapping uses, was not there when the row was read: set another mapping, then retry", row.Ident(missing), table), true, nil
	}
	g.mapping = g.mapping.On(g.target.Layout)
	g.sent, g.layout = g.layout, g.mapping.Layout(nil)
	for _, c := range g.layout.Columns {
		if _, ok := g.target.Layout.Column(c.Name); !ok {
			return fmt.Sprintf("column %s of %s does not exist on %s: add it there, or set another mapping, then retry", row.Ident(c.Name), g.target.Name, b.db.Side), true, nil
		}
	}
	return "", false, nil
}

// transform makes the receiver's rows of those that were sent, where they have another
// shape. What is set aside is the row as it was sent: a later mapping may make of it
// what this one cannot.
func (b *batch) transform(ctx context.Context, groups []group) error {
	for i := range groups {
		g := &groups[i]
		if g.mapping == nil || g.sent == nil || g.upserts == 0 {
			continue
		}
		ids, err := b.ids(ctx, g, `op IN ('c', 'u')`)
		if err != nil {
			return err
		}
		if err := b.halve(ctx, g, ids, nil, func(tx pgx.Tx, ids []int64) error {
			_, err := tx.Exec(ctx, `UPDATE pg_temp.incoming i SET sent = i."row", "row" = `+g.mapping.RowFrom(g.sent, `i."row"`)+` WHERE i.id = ANY ($1)`, ids)
			return err
		}); err != nil {
			return err
		}
		if err := b.recount(ctx, b.tx, g); err != nil {
			return err
		}
	}
	return nil
}

// typedKey reads a row's key back as the target's types.
func (g *group) typedKey(expr string) string {
	return strings.Join(g.target.Layout.KeyFrom(expr), ", ")
}

// newestOnly leaves of several entries of one key, by the type's own equality, the
// newest, and drops older ones that are set aside.
func (b *batch) newestOnly(ctx context.Context, g *group) error {
	return b.orIsolateKeys(ctx, g, func(tx pgx.Tx) error {
		key := g.typedKey("i.key")
		var twice bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_temp.incoming i WHERE table_id = $1 GROUP BY `+key+` HAVING count(*) > 1)`, g.tableID).Scan(&twice); err != nil {
			return err
		}
		t := b.tables[g.tableID]
		if twice && t.TwoWay() {
			if _, err := tx.Exec(ctx, `
				UPDATE pg_temp.incoming i SET unseen = x.first, released = x.released FROM (
				    SELECT id, min(least(unseen, seq)) OVER same AS first, bool_and(released) OVER same AS released FROM pg_temp.incoming i WHERE table_id = $1 WINDOW same AS (PARTITION BY `+key+`)) x
				 WHERE i.id = x.id`, g.tableID); err != nil {
				return err
			}
		}
		if twice {
			// What is held and older must not be tried again later.
			if _, err := tx.Exec(ctx, `
				WITH gone AS (
				    DELETE FROM pg_temp.incoming d USING (
				        SELECT id, row_number() OVER (PARTITION BY `+key+` ORDER BY seq DESC) AS n FROM pg_temp.incoming i WHERE table_id = $1) older
				     WHERE d.id = older.id AND older.n > 1 RETURNING d.seq, d.key)
				DELETE FROM `+b.db.schema+`.held h USING gone WHERE h.seq = gone.seq AND h.key = gone.key`, g.tableID); err != nil {
				return err
			}
		}
		var aside bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+b.db.schema+`.held WHERE table_id = $1)`, g.tableID).Scan(&aside); err != nil {
			return err
		}
		if aside && t.TwoWay() {
			if err := b.inherit(ctx, tx, g); err != nil {
				return err
			}
		}
		if aside {
			if err := b.replaceAside(ctx, tx, g); err != nil {
				return err
			}
		}
		return b.recount(ctx, tx, g)
	})
}

// replaceAside forgets rows set aside for whose key something newer has come: by
// text, and by the type's equality where the text can be read as the type.
func (b *batch) replaceAside(ctx context.Context, tx pgx.Tx, g *group) error {
	tag, err := tx.Exec(ctx, `
		DELETE FROM `+b.db.schema+`.held h USING pg_temp.incoming i
		 WHERE h.table_id = $1 AND i.table_id = $1 AND h.key = i.key AND h.seq < i.seq`, g.tableID)
	if err != nil {
		return err
	}
	b.setAside = b.setAside || tag.RowsAffected() > 0
	err = b.replaceTyped(ctx, tx, g, nil)
	if err == nil || !refusesRows(err) {
		return err
	}
	// A key that was set aside cannot be read as the type: find the others by halves.
	rows, err := tx.Query(ctx, `SELECT DISTINCT seq FROM `+b.db.schema+`.held WHERE table_id = $1`, g.tableID)
	if err != nil {
		return err
	}
	seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	return b.replaceHalves(ctx, tx, g, seqs)
}

func (b *batch) replaceHalves(ctx context.Context, tx pgx.Tx, g *group, seqs []int64) error {
	if len(seqs) == 0 {
		return nil
	}
	err := b.replaceTyped(ctx, tx, g, seqs)
	if err == nil || !refusesRows(err) {
		return err
	}
	if len(seqs) == 1 {
		return nil
	}
	half := len(seqs) / 2
	if err := b.replaceHalves(ctx, tx, g, seqs[:half]); err != nil {
		return err
	}
	return b.replaceHalves(ctx, tx, g, seqs[half:])
}

// replaceTyped forgets those of seqs, nil for all, for whose key something newer
// has come, comparing keys by their type.
func (b *batch) replaceTyped(ctx context.Context, tx pgx.Tx, g *group, seqs []int64) error {
	return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		// Both sets can be large, and expressions have no statistics: never row by row.
		if _, err := tx.Exec(ctx, `SET LOCAL enable_nestloop = off`); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			WITH h AS MATERIALIZED (SELECT seq, key FROM `+b.db.schema+`.held WHERE table_id = $1 AND ($2::bigint[] IS NULL OR seq = ANY ($2)))
			DELETE FROM `+b.db.schema+`.held d USING pg_temp.incoming i, h
			 WHERE d.seq = h.seq AND d.key = h.key AND i.table_id = $1 AND h.seq < i.seq AND `+sameKey(g.target.Layout, "i.key", "h.key"), g.tableID, seqs)
		if err != nil {
			return err
		}
		b.setAside = b.setAside || tag.RowsAffected() > 0
		_, err = tx.Exec(ctx, `SET LOCAL enable_nestloop = on`)
		return err
	})
}

func (b *batch) recount(ctx context.Context, tx pgx.Tx, g *group) error {
	return tx.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE op IN ('c', 'u')), count(*) FILTER (WHERE op = 'd')
		  FROM pg_temp.incoming WHERE table_id = $1 AND layout_id IS NOT DISTINCT FROM nullif($2::bigint, 0)`, g.tableID, g.layoutID).Scan(&g.upserts, &g.deletes)
}

// orIsolateKeys runs fn, which reads the keys of a group; when one of them cannot
// be read as the target's type, the rows whose key cannot are quarantined first.
func (b *batch) orIsolateKeys(ctx context.Context, g *group, fn func(pgx.Tx) error) error {
	err := pgx.BeginFunc(ctx, b.tx, fn)
	if err == nil || !refusesRows(err) {
		return err
	}
	// Of all layouts: fn reads the keys of the whole table.
	rows, err := b.tx.Query(ctx, `SELECT id FROM pg_temp.incoming WHERE table_id = $1 ORDER BY id`, g.tableID)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	b.keysOnly = true
	err = b.halve(ctx, g, ids, nil, func(tx pgx.Tx, ids []int64) error {
		_, err := tx.Exec(ctx, `SELECT `+g.typedKey("i.key")+` FROM pg_temp.incoming i WHERE id = ANY ($1)`, ids)
		return err
	})
	b.keysOnly = false
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, b.tx, fn)
}

// together applies all groups in one savepoint, a statement a table. When it
// cannot, orphans are held and it is tried again; then rows that swap unique
// values are given another way; at last each table's rows are halved until only
// those that are really refused are set aside.
func (b *batch) together(ctx context.Context, groups []group) error {
	var refused string
	for {
		err := b.attempt(ctx, groups, false)
		if err == nil || !refusesRows(err) {
			return err
		}
		held := int64(0)
		if refused = SQLState(err); refused == foreignKeyViolation {
			if held, err = b.holdOrphans(ctx, groups); err != nil {
				return err
			}
		}
		if held == 0 {
			break
		}
	}
	if refused == uniqueViolation || refused == exclusionViolation {
		err := b.attempt(ctx, groups, true)
		if err == nil || !refusesRows(err) {
			return err
		}
	}
	return b.apart(ctx, groups)
}

const foreignKeyViolation, uniqueViolation, exclusionViolation = "23503", "23505", "23P01"

// attempt applies all groups in a savepoint. With deleteFirst, tables from which a
// delete cannot cascade, and all of whose columns are sent, have their keys deleted
// before the upserts, in a statement of its own: a swap of unique values is refused
// within one.
func (b *batch) attempt(ctx context.Context, groups []group, deleteFirst bool) error {
	written := int64(0)
	err := pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error {
		if deleteFirst {
			for i := len(groups) - 1; i >= 0; i-- {
				if cascades, err := b.cascades(ctx, tx, &groups[i]); err != nil {
					return err
				} else if cascades || len(groups[i].layout.Columns) < len(groups[i].target.Layout.Columns) {
					continue
				}
				if _, err := tx.Exec(ctx, b.deleteSQL(&groups[i], "true")); err != nil {
					return err
				}
			}
		}
		for i := range groups {
			n, err := b.upsert(ctx, tx, &groups[i], nil)
			if err != nil {
				return err
			}
			written += n
		}
		if err := b.holdReferred(ctx, tx, groups); err != nil {
			return err
		}
		for i := len(groups) - 1; i >= 0; i-- {
			n, err := b.delete(ctx, tx, &groups[i], nil)
			if err != nil {
				return err
			}
			written += n
		}
		// Deferred constraints are checked here, where they can still be answered.
		_, err := tx.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED`)
		return err
	})
	if err == nil {
		b.written += written
		for i := range groups {
			if groups[i].upserts+groups[i].deletes > 0 {
				b.accept(&groups[i])
			}
		}
	}
	return err
}

// apart applies table after table, halving what is refused.
func (b *batch) apart(ctx context.Context, groups []group) error {
	// Each half is looked up by its ids. Without an index that reads all of incoming, for
	// each row that is refused, and the slower the more savepoints there were.
	if _, err := b.tx.Exec(ctx, `CREATE INDEX incoming_by_id ON pg_temp.incoming (id); SET CONSTRAINTS ALL IMMEDIATE`); err != nil {
		return err
	}
	for i := range groups {
		g := &groups[i]
		ids, err := b.ids(ctx, g, `op IN ('c', 'u')`)
		if err != nil {
			return err
		}
		orphans := func() (int64, error) { return b.holdOrphans(ctx, groups) }
		if err := b.halve(ctx, g, ids, orphans, func(tx pgx.Tx, ids []int64) error {
			n, err := b.upsert(ctx, tx, g, ids)
			b.written += n
			if err == nil {
				b.accept(g)
			}
			return err
		}); err != nil {
			return err
		}
	}
	for i := len(groups) - 1; i >= 0; i-- {
		g := &groups[i]
		if err := b.holdReferred(ctx, b.tx, groups); err != nil {
			return err
		}
		ids, err := b.ids(ctx, g, `op = 'd'`)
		if err != nil {
			return err
		}
		if err := b.halve(ctx, g, ids, nil, func(tx pgx.Tx, ids []int64) error {
			n, err := b.delete(ctx, tx, g, ids)
			b.written += n
			if err == nil {
				b.accept(g)
			}
			return err
		}); err != nil {
			return err
		}
	}
	_, err := b.tx.Exec(ctx, `SET CONSTRAINTS ALL DEFERRED; DROP INDEX pg_temp.incoming_by_id`)
	return err
}

func (b *batch) ids(ctx context.Context, g *group, where string) ([]int64, error) {
	rows, err := b.tx.Query(ctx, `
		SELECT id FROM pg_temp.incoming WHERE table_id = $1 AND layout_id IS NOT DISTINCT FROM nullif($2::bigint, 0) AND `+where+` ORDER BY id`, g.tableID, g.layoutID)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[int64])
}

// halve runs fn over ids, in a savepoint, and over their halves where it is
// refused; a single row that is refused is set aside. Rows whose parents are among those are
// held together by orphans, unless nil: one by one they could be as many as the table has.
func (b *batch) halve(ctx context.Context, g *group, ids []int64, orphans func() (int64, error), fn func(pgx.Tx, []int64) error) error {
	if len(ids) == 0 {
		return nil
	}
	written := b.written
	err := pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error { return fn(tx, ids) })
	if err == nil {
		return nil
	}
	b.written = written
	code := SQLState(err)
	switch {
	case !refusesRows(err):
		return err
	case len(ids) == 1 && code == foreignKeyViolation:
		// It may pass: the parent may still come.
		return b.aside(ctx, "held", Message(err), `i.id = ANY ($3)`, ids)
	case len(ids) == 1 && b.keysOnly && strings.HasPrefix(code, "22"):
		// No row here can have such a key, so there is none to delete.
		if there, err := b.forgetDelete(ctx, ids[0]); err != nil || there {
			return err
		}
		if err := b.refuse(g.tableID, 1, brief(err)); err != nil {
			return err
		}
		return b.aside(ctx, "quarantined", Message(err), `i.id = ANY ($3)`, ids)
	case len(ids) == 1 || strings.HasPrefix(code, "42"):
		// Class 42 is the statement, not a row: every row of it would be refused.
		if err := b.refuse(g.tableID, int64(len(ids)), brief(err)); err != nil {
			return err
		}
		state := "quarantined"
		if code == uniqueViolation || code == exclusionViolation {
			state = "held" // the row that gives the value up may still come
		}
		return b.aside(ctx, state, Message(err), `i.id = ANY ($3)`, ids)
	}
	if code == foreignKeyViolation && orphans != nil {
		held, err := orphans()
		if err != nil {
			return err
		}
		if held > 0 {
			if ids, err = b.left(ctx, ids); err != nil {
				return err
			}
			return b.halve(ctx, g, ids, orphans, fn)
		}
	}
	half := len(ids) / 2
	if err := b.halve(ctx, g, ids[:half], orphans, fn); err != nil {
		return err
	}
	rest := ids[half:]
	if orphans != nil { // the first half may have had some of them held
		if rest, err = b.left(ctx, rest); err != nil {
			return err
		}
	}
	return b.halve(ctx, g, rest, orphans, fn)
}

// left are those of ids that are still in incoming.
func (b *batch) left(ctx context.Context, ids []int64) ([]int64, error) {
	rows, err := b.tx.Query(ctx, `SELECT id FROM pg_temp.incoming WHERE id = ANY ($1) ORDER BY id`, ids)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[int64])
}

// forgetDelete drops an entry of incoming when it is a delete, with what is set aside
// of its key.
func (b *batch) forgetDelete(ctx context.Context, id int64) (dropped bool, err error) {
	b.setAside = true
	err = b.tx.QueryRow(ctx, `
		WITH i AS (DELETE FROM pg_temp.incoming WHERE id = $1 AND op = 'd' RETURNING table_id, key, seq),
		     gone AS (DELETE FROM `+b.db.schema+`.held h USING i WHERE h.table_id = i.table_id AND h.key = i.key AND h.seq <= i.seq)
		SELECT EXISTS (SELECT FROM i)`, id).Scan(&dropped)
	return dropped, err
}

// refusal is why rows cannot be written although PostgreSQL does not say so.
type refusal string

func (r refusal) Error() string { return string(r) }

// errSwallowed is a write without error that wrote fewer rows than it was given.
const errSwallowed = refusal("a trigger on the receiver swallowed the row without an error")

// refusesRows reports whether PostgreSQL refuses what it was given, so that
// setting rows aside helps; a lost connection or a deadlock is not that.
func refusesRows(err error) bool {
	var r refusal
	if errors.As(err, &r) {
		return true
	}
	code := SQLState(err)
	if code == "" || code == "55P03" {
		return false
	}
	// Triggers raise codes of their own making, so the others are listed: connection,
	// transaction, login, resources, operator, system, configuration, internal.
	switch code[:2] {
	case "08", "25", "26", "28", "2D", "3B", "3D", "40", "53", "57", "58", "F0", "XX":
		return false
	}
	return true
}

// What of a row of incoming goes to the held table.
const (
	asideColumns = `seq, table_id, layout_id, op, key, "row", stamp, released, unseen, conflict`
	asideValues  = `seq, table_id, layout_id, op, key, coalesce(sent, "row"), stamp, coalesce(released, false), coalesce(unseen, seq), quarantine OR decided`
)

// aside moves rows of incoming to the held table.
func (b *batch) aside(ctx context.Context, state, reason, where string, args ...any) error {
	tag, err := b.tx.Exec(ctx, `
		WITH i AS (DELETE FROM pg_temp.incoming i WHERE `+where+` RETURNING *),
		     older AS (DELETE FROM `+b.db.schema+`.held h USING i WHERE h.table_id = i.table_id AND h.key = i.key AND h.seq < i.seq)
		INSERT INTO `+b.db.schema+`.held AS h (`+asideColumns+`, state, reason) SELECT `+asideValues+`, $1, $2 FROM i
		ON CONFLICT (seq, key) DO UPDATE SET state = excluded.state, reason = excluded.reason, unseen = excluded.unseen, conflict = excluded.conflict`,
		append([]any{state, reason}, args...)...)
	b.setAside = b.setAside || tag.RowsAffected() > 0
	return err
}

// upsert writes a group's rows, or those of ids, in one statement.
func (b *batch) upsert(ctx context.Context, tx pgx.Tx, g *group, ids []int64) (int64, error) {
	want := g.upserts
	if ids != nil {
		want = int64(len(ids))
	}
	if want == 0 {
		return 0, nil
	}
	if err := b.renumber(ctx, tx, g, ids); err != nil {
		return 0, err
	}
	columns, values, set := g.assignments()
	conflict := "DO NOTHING"
	if len(set) > 0 {
		conflict = "DO UPDATE SET " + strings.Join(set, ", ")
	}
	var keys []string
	for _, name := range g.target.Layout.Key {
		keys = append(keys, row.Ident(name))
	}
	tag, err := tx.Exec(ctx, fmt.Sprintf(`
		INSERT INTO %s AS t (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM pg_temp.incoming i
		 WHERE i.table_id = $1 AND i.layout_id = $2 AND i.op IN ('c', 'u') AND ($3::bigint[] IS NULL OR i.id = ANY ($3))
		ON CONFLICT (%s) %s`, g.target.SQL, strings.Join(columns, ", "), strings.Join(values, ", "), strings.Join(keys, ", "), conflict),
		g.tableID, g.layoutID, ids)
	if err != nil {
		return 0, err
	}
	if tag.RowsAffected() == want {
		return want, nil
	}
	if len(set) > 0 {
		return 0, errSwallowed
	}
	// Rows of nothing but a key need no update where they are.
	var missing bool
	if err := tx.QueryRow(ctx, fmt.Sprintf(`SELECT EXISTS (SELECT FROM pg_temp.incoming i
		 WHERE i.table_id = $1 AND i.layout_id = $2 AND i.op IN ('c', 'u') AND ($3::bigint[] IS NULL OR i.id = ANY ($3)) AND NOT EXISTS (SELECT FROM %s t WHERE %s))`,
		g.target.SQL, g.target.Layout.KeyEquals("t", "i.key")), g.tableID, g.layoutID, ids).Scan(&missing); err != nil {
		return 0, err
	}
	if missing {
		return 0, errSwallowed
	}
	return tag.RowsAffected(), nil
}

// renumber makes way for rows that have another value in an identity column than
// the row here. Such a column can be inserted and never updated, so the old row has
// to go; where that could change other rows too, the new one is refused.
func (b *batch) renumber(ctx context.Context, tx pgx.Tx, g *group, ids []int64) error {
	var names, differ []string
	for i, c := range g.layout.Columns {
		if t, _ := g.target.Layout.Column(c.Name); t.AlwaysIdentity && !slices.Contains(g.target.Layout.Key, c.Name) {
			names = append(names, row.Ident(c.Name))
			differ = append(differ, fmt.Sprintf(`t.%s IS DISTINCT FROM %s`, row.Ident(c.Name), t.Read(fmt.Sprintf(`(i."row")[%d]`, i+1))))
		}
	}
	if names == nil {
		return nil
	}
	old := fmt.Sprintf(`i.table_id = $1 AND i.layout_id = $2 AND i.op IN ('c', 'u') AND ($3::bigint[] IS NULL OR i.id = ANY ($3)) AND %s AND (%s)`,
		g.target.Layout.KeyEquals("t", "i.key"), strings.Join(differ, " OR "))
	cascades, err := b.cascades(ctx, tx, g)
	if err != nil {
		return err
	}
	if !cascades {
		_, err := tx.Exec(ctx, `DELETE FROM `+g.target.SQL+` t USING pg_temp.incoming i WHERE `+old, g.tableID, g.layoutID, ids)
		return err
	}
	var there bool
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+g.target.SQL+` t, pg_temp.incoming i WHERE `+old+`)`, g.tableID, g.layoutID, ids).Scan(&there); err != nil {
		return err
	}
	if there {
		return refusal(fmt.Sprintf("%s has another value in %s, which is GENERATED ALWAYS AS IDENTITY and cannot be updated: make it GENERATED BY DEFAULT on %s, then retry",
			g.target.SQL, strings.Join(names, ", "), b.db.Side))
	}
	return nil
}

// assignments lists the target's columns, the values read back as the target's
// own types, and what an update sets. The casts carry no length, so that a value
// too long is refused rather than cut.
func (g *group) assignments() (columns, values, set []string) {
	for i, c := range g.layout.Columns {
		t, _ := g.target.Layout.Column(c.Name)
		name := row.Ident(c.Name)
		columns = append(columns, name)
		values = append(values, t.Read(subscript(i)))
		if !t.AlwaysIdentity {
			set = append(set, name+" = excluded."+name)
		}
	}
	return columns, values, set
}

// subscript is the SQL of a value of a row in incoming.
func subscript(column int) string { return fmt.Sprintf(`(i."row")[%d]`, column+1) }

// deleteSQL deletes the rows whose keys are in incoming.
func (b *batch) deleteSQL(g *group, where string) string {
	return fmt.Sprintf(`DELETE FROM %s t USING pg_temp.incoming i WHERE i.table_id = %d AND %s AND %s`,
		g.target.SQL, g.tableID, where, g.target.Layout.KeyEquals("t", "i.key"))
}

// delete removes a group's deleted keys, or those of ids. A key that is not there
// is a success; a row that is still there afterwards was kept by a trigger.
func (b *batch) delete(ctx context.Context, tx pgx.Tx, g *group, ids []int64) (int64, error) {
	if g.deletes == 0 {
		return 0, nil
	}
	which := fmt.Sprintf(`i.layout_id IS NOT DISTINCT FROM nullif(%d::bigint, 0) AND i.op = 'd' AND ($1::bigint[] IS NULL OR i.id = ANY ($1))`, g.layoutID)
	tag, err := tx.Exec(ctx, b.deleteSQL(g, which), ids)
	if err != nil {
		return 0, err
	}
	var left bool
	if err := tx.QueryRow(ctx, fmt.Sprintf(`SELECT EXISTS (SELECT FROM pg_temp.incoming i JOIN %s t ON %s WHERE i.table_id = %d AND %s)`,
		g.target.SQL, g.target.Layout.KeyEquals("t", "i.key"), g.tableID, which), ids).Scan(&left); err != nil {
		return 0, err
	}
	if left {
		return 0, errSwallowed
	}
	return tag.RowsAffected(), nil
}

// truncate empties a table. Rows that cannot go yet, because others still refer to
// them or a trigger keeps them, are held as deletes by key.
func (b *batch) truncate(ctx context.Context, tableID int32, seq int64) error {
	g := group{tableID: tableID}
	problem, _, err := b.resolve(ctx, &g)
	if err != nil {
		return err
	}
	if problem != "" {
		return b.truncateAside(ctx, tableID, seq, problem)
	}
	tag, err := b.tx.Exec(ctx, `DELETE FROM `+b.db.schema+`.held WHERE table_id = $1 AND seq < $2`, tableID, seq)
	if err != nil {
		return err
	}
	b.setAside = b.setAside || tag.RowsAffected() > 0
	// Its children are truncated too, and that comes: nothing here is taken along.
	referred, err := b.cascading(ctx, &g)
	if err != nil {
		return err
	}
	reason := "the table was truncated, but rows of another table still refer to this one, or a trigger keeps it"
	err = b.empty(ctx, &g, "NOT ("+referred+")")
	if err != nil && refusesRows(err) {
		reason = "the table was truncated, but: " + Message(err)
		referenced, rerr := b.referenced(ctx, &g)
		if rerr != nil {
			return rerr
		}
		if err = b.empty(ctx, &g, "NOT ("+referenced+")"); err != nil && refusesRows(err) {
			err = nil
		}
	}
	if err != nil {
		return err
	}
	tag, err = b.tx.Exec(ctx, `
		INSERT INTO `+b.db.schema+`.held (seq, table_id, op, key, state, reason)
		SELECT $1, $2, 'd', `+g.target.Layout.KeyText("t")+`, 'held', $3 FROM `+g.target.SQL+` t
		ON CONFLICT DO NOTHING`, seq, tableID, reason)
	b.setAside = b.setAside || tag.RowsAffected() > 0
	return err
}

// empty deletes a table's rows in a savepoint.
func (b *batch) empty(ctx context.Context, g *group, where string) error {
	return pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `DELETE FROM `+g.target.SQL+` t WHERE `+where)
		if err != nil {
			return err
		}
		if _, err = tx.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED`); err == nil {
			b.written += tag.RowsAffected()
		}
		return err
	})
}

// truncateAside quarantines a truncate that has no table to go to. It cannot be
// retried, because which rows came after it will not be known; it can be skipped.
func (b *batch) truncateAside(ctx context.Context, tableID int32, seq int64, problem string) error {
	if err := b.refuse(tableID, 1, problem); err != nil {
		return err
	}
	b.setAside = true
	_, err := b.tx.Exec(ctx, `
		INSERT INTO `+b.db.schema+`.held (seq, table_id, op, key, state, reason) VALUES ($1, $2, 't', '{}', 'quarantined', $3)
		ON CONFLICT DO NOTHING`, seq, tableID, "the truncate could not be applied, and later cannot be: "+problem)
	return err
}

// SetAsideRow is a change set aside here.
type SetAsideRow struct {
	Seq     int64
	TableID int32
	Key     backfill.Key
	State   string
	Reason  string
	Since   time.Time
}

// SetAside lists the changes set aside here, one for each seq.
func (db *DB) SetAside(ctx context.Context) (all []SetAsideRow, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT DISTINCT ON (seq) seq, table_id, key, state, reason, since FROM `+db.schema+`.held ORDER BY seq, key`)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[SetAsideRow])
		return err
	})
	return all, db.orNotSetUp(err)
}

// Unquarantine makes quarantined changes be tried again with the held ones.
func (db *DB) Unquarantine(ctx context.Context, seqs []int64) error {
	return db.do(ctx, `UPDATE `+db.schema+`.held SET state = 'held', since = clock_timestamp() WHERE seq = ANY ($1)`, seqs)
}

// Drop forgets changes set aside. Of those in conflict with a change of this side,
// whose tables' names are given by id, it notes that they lost, and has this side's
// version pushed, so that both sides hold it.
func (db *DB) Drop(ctx context.Context, seqs []int64, tables map[int32]backfill.Table) error {
	return db.in(ctx, writing, func(tx pgx.Tx) error {
		for id, t := range tables {
			if _, err := tx.Exec(ctx, `
				WITH gone AS (DELETE FROM `+db.schema+`.held WHERE seq = ANY ($1) AND table_id = $2 AND conflict RETURNING *),
				kept AS (INSERT INTO `+db.schema+`.outbox (tbl, op, key) SELECT $3, 'u', key FROM gone)
				INSERT INTO `+db.schema+`.lost (table_id, own, seq, op, key) SELECT table_id, false, seq, op, key FROM gone`, seqs, id, t.Name); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, `DELETE FROM `+db.schema+`.held WHERE seq = ANY ($1)`, seqs)
		return err
	})
}
