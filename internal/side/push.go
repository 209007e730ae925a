package side

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Outbox is what one push has read: which records, which tables they touch, under
// which snapshot. It lives inside ReadOutbox's transaction.
type Outbox struct {
	Snapshot string
	Batch    int64  // the number of the last push whose records were deleted here
	Nonce    string // and its nonce
	Epoch    int
	Seqs     []int64
	Tables   []OutboxTable
	// Unread names tables that have records left: more than fit, or the table could
	// not be read, with PostgreSQL's message ("" when there are simply more).
	Unread map[string]string

	tx  pgx.Tx
	db  *DB
	cut int64
}

// OutboxTable is one table of a push.
type OutboxTable struct {
	*Table
	Truncated bool   // a truncate of the whole table is among the records
	Gap       bool   // so is one of a partition, or a write whose keys could not be recorded
	GapXID    uint64 // the transaction of the newest of those, 0 when it is not known
	Keys      bool   // keys are among them
	Capture   string // what is wrong with capture, "" when it is healthy
	otherKey  bool   // the records' keys are not those of the table's key now
}

// Pending is what waits in the outbox.
type Pending struct {
	Tables []string // of the oldest records
	Last   int64    // the highest number among those
	All    bool     // there are no further records
}

// Pending looks at up to limit of the oldest outbox records of all tables but the
// ones in except: records of a table that cannot be read must not hide the others'.
func (db *DB) Pending(ctx context.Context, limit int, except []string) (p Pending, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
		SELECT coalesce(array_agg(DISTINCT tbl), '{}'), coalesce(max(seq), 0), count(*) < $1::int
		  FROM (SELECT tbl, seq FROM `+db.schema+`.outbox WHERE tbl <> ALL (coalesce($2::text[], '{}')) ORDER BY seq LIMIT $1::int) o`, limit, except).
			Scan(&p.Tables, &p.Last, &p.All)
	})
	return p, db.orNotSetUp(err)
}

// ReadOutbox reads records of up to limit keys of the given tables, oldest first, and
// hands them to fn together with the means to copy the current rows of their keys,
// all under one snapshot. Tables are locked (ACCESS SHARE) before that snapshot is
// taken. The transaction is read-only and so owns no transaction id: a snapshot
// hides its own, and two reads would then compare equal. When ReadOutbox returns
// without error, no crash of the server can take back what fn has read; reads is the
// number of that read, 0 when there were no records.
func (db *DB) ReadOutbox(ctx context.Context, tables []string, limit int, fn func(*Outbox) error) (reads int64, err error) {
	as := db.met.Load()
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		o := &Outbox{tx: tx, db: db, Unread: map[string]string{}}
		var readable []string
		for _, name := range tables {
			if err := tryLock(ctx, tx, name); err != nil {
				if SQLState(err) == "" {
					return err
				}
				o.Unread[name] = Message(err)
				continue
			}
			readable = append(readable, name)
		}
		if err := tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text, epoch, batch, nonce FROM `+db.schema+`.pushed`).
			Scan(&o.Snapshot, &o.Epoch, &o.Batch, &o.Nonce); err != nil {
			return db.orNotSetUp(err)
		}
		if err := db.same(ctx, tx, as); err != nil {
			return err
		}
		for _, name := range readable {
			t, err := describe(ctx, tx, name)
			if err != nil {
				return err
			}
			if t.Problem != "" {
				o.Unread[name] = t.Problem
				continue
			}
			capture, otherKey, err := db.captureProblem(ctx, tx, t)
			if err != nil {
				return err
			}
			o.Tables = append(o.Tables, OutboxTable{Table: t, Capture: capture, otherKey: otherKey})
		}
		if err := o.records(ctx, limit); err != nil {
			return err
		}
		if err := fn(o); err != nil || len(o.Seqs) == 0 {
			return err
		}
		reads, err = db.beat(ctx, as)
		return err
	})
	return reads, err
}

// tryLock locks a table in a savepoint, so that one table in the way, or gone,
// does not keep the others from being pushed.
func tryLock(ctx context.Context, tx pgx.Tx, name string) error {
	parsed, err := backfill.ParseTableName(name)
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		return lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name))
	})
}

// records takes a prefix by seq of the tables' records. Deleting them later goes
// by their exact numbers: a lower number can become visible after a higher one.
// A truncate of a root is not torn from those of its partitions, which are recorded
// right after it: alone they would look like truncates of partitions only.
func (o *Outbox) records(ctx context.Context, limit int) error {
	var names []string
	more, partitions := 1, map[string]int{}
	for _, t := range o.Tables {
		names = append(names, t.Name.String())
		partitions[t.Name.String()] = len(t.Partitions)
		more += len(t.Relations())
	}
	var all []record
	var take int
	// Those of other tables can stand in between; that is not looked for without end.
	for torn := true; torn && more < 100_000; more *= 2 {
		rows, err := o.tx.Query(ctx, `SELECT seq, tbl, op::text, CASE op WHEN 'g' THEN coalesce(key[1], '0') ELSE '0' END::bigint, n FROM `+o.db.schema+`.outbox WHERE tbl = ANY ($1) ORDER BY seq LIMIT $2`, names, limit+more)
		if err != nil {
			return err
		}
		if all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[record]); err != nil {
			return err
		}
		take, torn = whole(all, limit, partitions)
		torn = torn && len(all) == limit+more
	}
	truncating := map[string]bool{} // the table's previous record was a truncate of the root, or of a partition with it
	if take < len(all) {
		for _, n := range names {
			o.Unread[n] = ""
		}
	}
	for _, r := range all[:take] {
		o.Seqs, o.cut = append(o.Seqs, r.Seq), r.Seq
		t := &o.Tables[slices.Index(names, r.Name)]
		switch r.Op {
		case "t":
			t.Truncated = true
		case "g":
			if !truncating[r.Name] {
				t.Gap, t.GapXID = true, max(t.GapXID, r.XID)
			}
		default:
			// Keys of another key would be taken for those of deleted rows.
			t.Keys, t.Gap = !t.otherKey, t.Gap || t.otherKey
		}
		truncating[r.Name] = r.Op == "t" || r.Op == "g" && truncating[r.Name]
	}
	return nil
}

// record is one record of the outbox.
type record struct {
	Seq  int64
	Name string
	Op   string
	XID  uint64
	N    int // of keys
}

// whole returns how many of some records to take: those of limit keys, or the first, and what
// belongs to a truncate of a root among them: one of each partition. torn says that more of
// that may follow the last.
func whole(all []record, limit int, partitions map[string]int) (take int, torn bool) {
	for n := 0; take < len(all) && (take == 0 || n+all[take].N <= limit); take++ {
		n += all[take].N
	}
	left := map[string]int{} // to come of a truncate that is taken, by table
	for i, r := range all {
		switch {
		case r.Op == "t" && i < take:
			left[r.Name] = partitions[r.Name]
		case r.Op == "g" && left[r.Name] > 0:
			left[r.Name]--
			take = max(take, i+1)
		default:
			left[r.Name] = 0
		}
	}
	for _, n := range left {
		torn = torn || n > 0
	}
	return take, torn
}

// captured is the SQL of the keys in the outbox of a table, as rows (seq, op, key, place);
// place is in the order in which they were recorded. Keys of one column need not be put
// together again.
func (db *DB) captured(table backfill.TableName) string {
	return strings.NewReplacer("{outbox}", db.schema+".outbox", "{tbl}", row.Literal(table.String()), "{many}", fmt.Sprint(keysInRecord)).Replace(`(
		SELECT o.seq, o.op, k.key COLLATE "C" AS key, o.seq * {many} + k.i AS place FROM {outbox} o CROSS JOIN LATERAL (
		    SELECT ARRAY[x] AS key, i - 1 AS i FROM unnest(CASE WHEN cardinality(o.key) = o.n THEN o.key END) WITH ORDINALITY u (x, i)
		    UNION ALL
		    SELECT array_agg(x ORDER BY i), (i - 1) / (cardinality(o.key) / o.n)
		      FROM unnest(CASE WHEN cardinality(o.key) > o.n THEN o.key END) WITH ORDINALITY u (x, i) GROUP BY 2) k
		 WHERE o.tbl = {tbl} AND o.op IN ('c', 'u', 'd'))`)
}

// Rules say what of a table's changes is sent, and whether with stamps, for a table
// captured on both sides.
type Rules struct{ Create, Update, Delete, TwoWay bool }

// CopyEntries writes the entries of one table in COPY's binary form to w: the
// current row of each key among the records, in the columns of the control
// database's queue: direction, table_id, layout_id, snap, op, dropped, key, row, stamp.
//
// Found by type and text: an upsert. Found under another spelling (1.0 became
// 1.00): a marker for the captured spelling and an upsert of the live row. Not
// found: a delete. What the rules turn off becomes a dropped entry without a row.
func (o *Outbox) CopyEntries(ctx context.Context, t OutboxTable, direction, tableID int32, layoutID int64, rules Rules, w io.Writer) error {
	stamp := "NULL::bigint"
	if rules.TwoWay {
		var err error
		if stamp, err = o.db.stampOfRecords(ctx, o.tx, t, tableID, o.cut, "key"); err != nil {
			return err
		}
	}
	// Most types spell a value in one way only, which saves asking each row for its spelling.
	op := `CASE WHEN NOT found THEN 'd' WHEN created THEN 'c' ELSE 'u' END::"char"`
	if t.Layout.Respells() {
		op = `unnest(CASE WHEN NOT found THEN '{d}' WHEN livekey <> key THEN '{m,n}' WHEN created THEN '{c}' ELSE '{u}' END::"char"[])`
	}
	s := strings.NewReplacer(
		"{stamp}", stamp, "{entry}", fmt.Sprintf("%d::integer, %d::integer, %d::bigint, pg_current_snapshot()", direction, tableID, layoutID),
		"{captured}", o.db.captured(t.Name), "{cut}", fmt.Sprint(o.cut), "{op}", op,
		"{table}", t.SQL, "{on}", t.Layout.KeyEquals("t", "k.key"),
		"{livekey}", t.Layout.KeyText("t"), "{liverow}", t.Layout.RowText("t"),
		"{create}", fmt.Sprint(rules.Create), "{update}", fmt.Sprint(rules.Update), "{delete}", fmt.Sprint(rules.Delete))
	// In the order of their changes rows that lie together are read, and later written,
	// together. A found row needs create or update on among its key's records; with everything
	// on there is nothing to ask. OFFSET 0 has a row made into text once, and kept nowhere.
	// n is the upsert that goes with a marker.
	sql := s.Replace(`COPY (
		WITH k AS MATERIALIZED (
		    SELECT key, bool_or(op = 'c') AS created, bool_or(op = 'u') AS updated
		      FROM {captured} o WHERE seq <= {cut} GROUP BY 1 ORDER BY min(place)),
		j AS NOT MATERIALIZED (
		    SELECT k.*, t.tableoid IS NOT NULL AS found, CASE WHEN t.tableoid IS NOT NULL THEN {livekey} END COLLATE "C" AS livekey,
		           CASE WHEN t.tableoid IS NOT NULL THEN {liverow} END AS liverow,
		           NOT (k.created AND {create} OR k.updated AND {update} OR {create} AND {update} AND {delete}) AS off
		      FROM k LEFT JOIN {table} t ON {on} OFFSET 0),
		e AS NOT MATERIALIZED (SELECT key, livekey, liverow, off, {op} AS op FROM j OFFSET 0)
		SELECT {entry}, CASE op WHEN 'n' THEN 'u' ELSE op END,
		       CASE WHEN op = 'd' THEN NOT {delete} WHEN op IN ('m', 'n') THEN NOT ({create} OR {update}) ELSE off END,
		       CASE WHEN op IN ('d', 'm') THEN key ELSE livekey END,
		       CASE WHEN op IN ('c', 'u') AND NOT off OR op = 'n' AND ({create} OR {update}) THEN liverow END, {stamp}
		  FROM e
		) TO STDOUT (FORMAT binary)`)
	_, err := o.tx.Conn().PgConn().CopyTo(ctx, w, sql)
	return err
}

// DeletePushed removes exactly the records a push has read and stores the push's
// number and nonce with that. When that number is known here already, the push was
// held up since its commit, others went by what it left, and nothing is removed: it
// is pushed again. own, unless nil, writes what the push has sent of two-way tables
// (table_id, key, seq, since, in COPY's binary form), which is then known as this side's.
func (db *DB) DeletePushed(ctx context.Context, seqs []int64, batch int64, nonce string, own func(io.Writer) error) error {
	return db.in(ctx, writing, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+db.schema+`.pushed SET batch = $1, nonce = $2 WHERE batch < $1`, batch, nonce)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if own != nil {
			if err := db.remember(ctx, tx, own); err != nil {
				return err
			}
		}
		_, err = tx.Exec(ctx, `DELETE FROM `+db.schema+`.outbox WHERE seq = ANY ($1)`, seqs)
		return err
	})
}

// Fence makes a push be known that was committed, so that it can remove no records
// any more when it comes back: they are pushed again. What it has sent is known as
// this side's, as by DeletePushed.
func (db *DB) Fence(ctx context.Context, batch int64, nonce string, own func(io.Writer) error) error {
	return db.in(ctx, writing, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+db.schema+`.pushed SET batch = $1, nonce = $2 WHERE batch = $1 - 1`, batch, nonce)
		if err != nil || tag.RowsAffected() == 0 || own == nil {
			return err
		}
		return db.remember(ctx, tx, own)
	})
}

// Forget removes the records, up to a number, of tables that are not configured.
func (db *DB) Forget(ctx context.Context, tables []string, upTo int64) error {
	return db.do(ctx, `DELETE FROM `+db.schema+`.outbox WHERE tbl = ANY ($1) AND seq <= $2`, tables, upTo)
}
