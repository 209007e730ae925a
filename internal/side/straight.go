package side

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"backfill/internal/copypipe"
)

// straight copies a batch of released rows into their table, where that may be all
// there is to do, and reports whether it was: the rows are of one table, none of them
// is there yet, nothing of the table is set aside, and PostgreSQL accepts them. If not,
// nothing has happened, and the batch goes the long way.
//
// COPY takes half the time of an upsert from a temporary table. Values are read by the
// column's own input function, as they are there.
func (b *batch) straight(ctx context.Context, part Part, rows int64) (done bool, err error) {
	if b.feed.Released == nil {
		return false, nil
	}
	g := group{upserts: rows}
	var released bool
	g.tableID, g.layoutID, released = b.feed.Released()
	table := b.tables[g.tableID]
	if !released || table.TwoWay() || table.Mapping != nil || slices.Contains(part.Except, g.tableID) || b.db.detours.taken(g.tableID) {
		return false, nil
	}
	// What is to be said of a table that cannot be resolved is said on the long way.
	if problem, _, err := b.resolve(ctx, &g); err != nil || problem != "" {
		return false, err
	}
	columns, values, _ := g.assignments()
	if !g.plain(values) {
		return false, nil
	}
	var aside bool
	if err := b.tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+b.db.schema+`.held WHERE table_id = $1)`, g.tableID).Scan(&aside); err != nil || aside {
		return false, err
	}
	err = pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error {
		if err := copypipe.Run(func(w io.Writer) error { return b.feed.CopyValues(ctx, part, len(columns), w) }, func(r io.Reader) error {
			tag, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY `+g.target.SQL+` (`+strings.Join(columns, ", ")+`) FROM STDIN`)
			if err == nil && tag.RowsAffected() != rows {
				err = errSwallowed
			}
			return err
		}); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED`)
		return err
	})
	switch {
	case err == nil:
		b.db.detours.straight(g.tableID)
		b.written += rows
		b.accept(&g)
		return true, nil
	case refusesRows(err) || Unconvertible(err):
		b.db.detours.refused(g.tableID)
		return false, nil
	}
	return false, err
}

// plain reports whether what is assigned to each column is the text of one value, as the
// input function of the column's type reads it.
func (g *group) plain(values []string) bool {
	for i, c := range g.layout.Columns {
		t, ok := g.target.Layout.Column(c.Name)
		if !ok || t.Byte || t.Via != "" || i >= len(values) || values[i] != t.Read(subscript(i)) {
			return false
		}
	}
	return len(values) == len(g.layout.Columns)
}

// detours remembers of which tables a batch could not be copied straight: some of the
// next are not tried, and the more the oftener it was in vain.
type detours struct {
	mu   sync.Mutex
	left map[int32]int // batches that go the long way before the next try
	next map[int32]int
}

// detour is the most batches that go the long way after a try.
const detour = 64

// taken reports whether the next batch of a table is to go the long way.
func (d *detours) taken(table int32) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left[table] == 0 {
		return false
	}
	d.left[table]--
	return true
}

func (d *detours) refused(table int32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left == nil {
		d.left, d.next = map[int32]int{}, map[int32]int{}
	}
	d.next[table] = min(max(d.next[table]*2, 1), detour)
	d.left[table] = d.next[table]
}

func (d *detours) straight(table int32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.next, table)
}
