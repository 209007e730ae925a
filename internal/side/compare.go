package side

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/copypipe"
	"backfill/internal/proof"
	"backfill/internal/row"
)

// Compared is one side's table as a reconciliation compares it.
type Compared struct {
	Relation
	TableID int32
	Layout  *row.Layout // of this side, when the run began; the table must still have it
	Shape   string      // and this shape
	Rows    string      // the SQL of row t, encoded for comparison
	Bytes   string      // and of the bytes by which it is hashed
	Both    bool        // captured on the receiver too: its own unsent changes count as in flight
}

// Reading is what a leaf was read under.
type Reading struct {
	Snapshot string // of the read, without a transaction id of its own
	Position int64  // how far the other side's changes had been applied here
	Reads    int64  // the number of the read
}

// bucket is the SQL of the bucket of row t: by the text of its key, so that it is the
// same on both sides whatever order their collations have.
func bucket(l *row.Layout, buckets int32) string {
	return fmt.Sprintf(`(('x' || substr(encode(sha256(array_send(%s)), 'hex'), 1, 8))::bit(32)::bigint & 2147483647) %% %d`, l.KeyText("t"), buckets)
}

// inRange is the SQL for "row t is of this range". A range from a key up to that key,
// which would have none, stands for the key alone.
func inRange(l *row.Layout, leaf proof.Leaf) string {
	if leaf.Lower != nil && slices.Equal(leaf.Lower, leaf.Upper) {
		return l.KeyIs("t", leaf.Lower)
	}
	parts := []string{"true"}
	if leaf.Lower != nil {
		parts = append(parts, l.KeyAfter("t", leaf.Lower))
	}
	if leaf.Upper != nil {
		parts = append(parts, l.KeyUpTo("t", leaf.Upper))
	}
	return strings.Join(parts, " AND ")
}

// compare runs fn in one snapshot of a table that is as it was when the run began,
// locked before the snapshot.
func (db *DB) compare(ctx context.Context, c Compared, fn func(pgx.Tx, *Table) error) (r Reading, err error) {
	reads, err := db.read(ctx, c.Relation, func(tx pgx.Tx, t *Table) error {
		if err := t.unchangedSince(c.Layout, c.Shape, "the reconciliation began"); err != nil {
			return err
		}
		if r, err = db.reading(ctx, tx, c.TableID); err != nil {
			return err
		}
		// Ranges are narrow and the planner may not know how large the table is.
		if _, err := tx.Exec(ctx, `SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on; `+inOrder); err != nil {
			return err
		}
		return fn(tx, t)
	})
	r.Reads = reads
	return r, err
}

// reading notes the snapshot and how far changes of a table have been applied: a
// table that is stopped stands behind the others.
func (db *DB) reading(ctx context.Context, tx pgx.Tx, tableID int32) (r Reading, err error) {
	err = tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text, coalesce((SELECT stopped_at FROM `+db.schema+`.refused WHERE table_id = $1), seq) FROM `+db.schema+`.applied`, tableID).
		Scan(&r.Snapshot, &r.Position)
	return r, db.orNotSetUp(err)
}

// CutLeaves cuts up to most leaves of size rows each after a key, nil for the beginning;
// hashed says whether their rows are hashed or only counted. The table's last leaf may
// have fewer rows, and is open to the end; end says that it is among them.
func (db *DB) CutLeaves(ctx context.Context, c Compared, after backfill.Key, first int64, size, most int, hashed bool) (leaves []proof.Leaf, r Reading, end bool, err error) {
	r, err = db.compare(ctx, c, func(tx pgx.Tx, t *Table) error {
		for l := (proof.Leaf{N: first, Lower: after}); len(leaves) < most && !end; l = (proof.Leaf{N: l.N + 1, Lower: l.Upper}) {
			rows, err := tx.Query(ctx, nextSQL(t, l, size, 2))
			if err != nil {
				return err
			}
			last, err := pgx.CollectRows(rows, pgx.RowTo[[]string])
			if err != nil {
				return err
			}
			if end = len(last) < 2; !end {
				l.Upper = last[0]
			}
			if hashed {
				err = hashLeaf(ctx, tx, t, c.Bytes, &l)
			} else {
				err = countLeaf(ctx, tx, t, &l)
			}
			if err != nil {
				return err
			}
			leaves = append(leaves, l)
		}
		return nil
	})
	return leaves, r, end, err
}

// HashLeaves counts and hashes the rows of leaves as they are now, all in one
// snapshot; those of which hashed is false are only counted.
func (db *DB) HashLeaves(ctx context.Context, c Compared, leaves []proof.Leaf, hashed func(proof.Leaf) bool) (out []proof.Leaf, r Reading, err error) {
	r, err = db.compare(ctx, c, func(tx pgx.Tx, t *Table) error {
		out = slices.Clone(leaves)
		buckets := map[int32]*proof.Leaf{}
		for i := range out {
			var err error
			switch l := &out[i]; {
			case l.Buckets > 0:
				buckets[l.Bucket] = l
			case hashed(*l):
				err = hashLeaf(ctx, tx, t, c.Bytes, l)
			default:
				err = countLeaf(ctx, tx, t, l)
			}
			if err != nil {
				return err
			}
		}
		return hashBuckets(ctx, tx, c, t, buckets, hashed)
	})
	return out, r, err
}

// hashBuckets hashes buckets in one pass over the table. A bucket's rows have no order
// that is the same on both sides but that of their hashes.
func hashBuckets(ctx context.Context, tx pgx.Tx, c Compared, t *Table, buckets map[int32]*proof.Leaf, hashed func(proof.Leaf) bool) error {
	if len(buckets) == 0 {
		return nil
	}
	var all, some []int32
	var of int32
	for n, l := range buckets {
		all, of = append(all, n), l.Buckets
		if l.Count, l.Digest = 0, ""; hashed(*l) {
			some, l.Digest = append(some, n), nothing
		}
	}
	rows, err := tx.Query(ctx, fmt.Sprintf(`
		SELECT backfill_bucket::int, count(*), coalesce(encode(sha256(string_agg(h, ''::bytea ORDER BY h)), 'hex'), '')
		  FROM (SELECT backfill_bucket, CASE WHEN backfill_bucket = ANY ('%s'::bigint[]) THEN sha256(%s) END AS h
		          FROM (SELECT %s AS backfill_bucket, t.* FROM %s t OFFSET 0) t WHERE backfill_bucket = ANY ('%s'::bigint[]) OFFSET 0) x
		 GROUP BY 1`, numbers(some), c.Bytes, bucket(t.Layout, of), t.SQL, numbers(all)))
	if err != nil {
		return err
	}
	var n int32
	var l proof.Leaf
	_, err = pgx.ForEachRow(rows, []any{&n, &l.Count, &l.Digest}, func() error {
		buckets[n].Count, buckets[n].Digest = l.Count, l.Digest
		return nil
	})
	return err
}

// nothing is the digest of no rows.
var nothing = fmt.Sprintf("%x", sha256.Sum256(nil))

func numbers(list []int32) string {
	parts := make([]string, len(list))
	for i, n := range list {
		parts[i] = strconv.Itoa(int(n))
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// Keys are the keys of a leaf that are looked at again.
type Keys struct {
	Leaf int64          `json:"leaf"`
	Keys []backfill.Key `json:"keys"`
}

// CopyLeafRows writes the rows of leaves in COPY's binary form to w: the run, the
// leaf, key, found, row. With keys given, only those are read, each once, and one
// that is not there is written with found false.
func (db *DB) CopyLeafRows(ctx context.Context, c Compared, run int64, leaves []proof.Leaf, keys []Keys, w io.Writer) (r Reading, err error) {
	r, err = db.compare(ctx, c, func(tx pgx.Tx, t *Table) error {
		var sql string
		if keys != nil {
			if _, err := tx.Exec(ctx, byIndex); err != nil {
				return err
			}
			text, err := json.Marshal(keys)
			if err != nil {
				return err
			}
			// No temporary table: that would give the transaction an id, and its snapshot with it.
			// A leaf's number is taken once, not for each of its keys: that reads all of them.
			sql = fmt.Sprintf(`
				SELECT %d::bigint, k.leaf, k.key, t.tableoid IS NOT NULL, CASE WHEN t.tableoid IS NOT NULL THEN %s END
				  FROM (SELECT l.leaf, ARRAY(SELECT json_array_elements_text(k)) AS key
				          FROM (SELECT (l->>'leaf')::bigint AS leaf, l->'keys' AS keys FROM json_array_elements(%s) l OFFSET 0) l, json_array_elements(l.keys) k OFFSET 0) k
				  LEFT JOIN %s t ON %s`, run, c.Rows, row.Literal(string(text)), t.SQL, t.Layout.KeyEquals("t", "k.key"))
		} else {
			sql = strings.Join(leafRows(c, t, leaves, func(leaf string) string {
				return fmt.Sprintf("%d::bigint, %s, %s, true, %s", run, leaf, t.Layout.KeyText("t"), c.Rows)
			}), " UNION ALL ")
		}
		_, err := tx.Conn().PgConn().CopyTo(ctx, w, "COPY ("+sql+") TO STDOUT (FORMAT binary)")
		return err
	})
	return r, err
}

// leafRows is a SELECT of the rows of each leaf, or of all buckets together.
func leafRows(c Compared, t *Table, leaves []proof.Leaf, columns func(leaf string) string) []string {
	var out []string
	var buckets []int32
	when := ""
	for _, l := range leaves {
		if l.Buckets > 0 {
			buckets = append(buckets, l.Bucket)
			when += fmt.Sprintf(" WHEN %d THEN %d::bigint", l.Bucket, l.N)
			continue
		}
		out = append(out, fmt.Sprintf("SELECT %s FROM %s t WHERE %s", columns(fmt.Sprintf("%d::bigint", l.N)), t.SQL, inRange(t.Layout, l)))
	}
	if buckets != nil {
		out = append(out, fmt.Sprintf("SELECT %s FROM (SELECT %s AS backfill_bucket, t.* FROM %s t OFFSET 0) t WHERE backfill_bucket = ANY ('%s'::bigint[])",
			columns("CASE t.backfill_bucket"+when+" END"), bucket(t.Layout, leaves[0].Buckets), t.SQL, numbers(buckets)))
	}
	return out
}

// CompareRows compares the rows of leaves with those the source has listed, in one
// snapshot of this side. load writes the listed ones in COPY's binary form (leaf,
// key, found, row); store is given what differs in the same form: leaf, key (the
// source's spelling), here (this side's), kind (m missing here, d different, s surplus
// here), source, receiver, aside (the state of a change of the key that is set aside
// here, or "own" for one this side has not sent). keysOnly says that just the listed
// keys are compared, rather than whole leaves.
//
// Rows belong together when their keys are equal by the type, not by the text. It
// fails with ErrNotThere while not everything up to upTo has been applied here.
func (db *DB) CompareRows(ctx context.Context, c Compared, leaves []proof.Leaf, keysOnly bool, upTo int64,
	load func(io.Writer) error, store func(at int64, r io.Reader) error) error {
	parsed, err := backfill.ParseTableName(c.Name)
	if err != nil {
		return err
	}
	return db.in(ctx, comparing, func(tx pgx.Tx) error {
		if err := lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name)); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `CREATE TEMP TABLE IF NOT EXISTS listed (leaf bigint, key text[], found boolean, "row" text[] COLLATE "C") ON COMMIT DELETE ROWS`); err != nil {
			return err
		}
		if err := copypipe.Run(load, func(r io.Reader) error {
			_, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY pg_temp.listed (leaf, key, found, "row") FROM STDIN (FORMAT binary)`)
			return err
		}); err != nil {
			return err
		}
		at, err := db.reading(ctx, tx, c.TableID)
		if err != nil {
			return err
		}
		if at.Position < upTo {
			return ErrNotThere
		}
		t, err := describeRelation(ctx, tx, c.Relation)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		if err := t.unchangedSince(c.Layout, c.Shape, "the reconciliation began"); err != nil {
			return err
		}
		own := "false"
		if c.Both {
			own = fmt.Sprintf("EXISTS (SELECT FROM %s.outbox WHERE tbl = %s AND op IN ('t', 'g')) OR d.key IN (SELECT key FROM %s o) OR d.here IN (SELECT key FROM %[3]s o)", db.schema, row.Literal(t.Name.String()), db.captured(t.Name))
		}
		sql := fmt.Sprintf(`COPY (
			SELECT d.leaf, d.key, d.here, d.kind::"char", d.source, d.receiver,
			       CASE WHEN %s THEN 'own' ELSE (SELECT h.state FROM %s.held h WHERE h.table_id = %d AND h.key IN (d.key, d.here) ORDER BY h.seq DESC LIMIT 1) END
			  FROM (%s) d) TO STDOUT (FORMAT binary)`, own, db.schema, c.TableID, differing(c, t, leaves, keysOnly))
		if keysOnly {
			if _, err := tx.Exec(ctx, byIndex); err != nil {
				return err
			}
		} else if _, err := tx.Exec(ctx, `SET LOCAL enable_seqscan = off`); err != nil {
			return err
		}
		return copypipe.Run(func(w io.Writer) error {
			_, err := tx.Conn().PgConn().CopyTo(ctx, w, sql)
			return err
		}, func(r io.Reader) error { return store(at.Position, r) })
	})
}

// comparing is reading with temporary tables: its snapshot serves no comparison.
const comparing = "BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE;" + pinned

// differing is the SELECT of what differs between the listed rows and those here.
func differing(c Compared, t *Table, leaves []proof.Leaf, keysOnly bool) string {
	here := t.Layout.KeyText("t")
	if keysOnly {
		return fmt.Sprintf(`
			SELECT l.leaf, l.key, CASE WHEN t.tableoid IS NOT NULL THEN %[1]s END AS here,
			       CASE WHEN t.tableoid IS NULL THEN 'm' WHEN l.found THEN 'd' ELSE 's' END AS kind,
			       l."row" AS source, CASE WHEN t.tableoid IS NOT NULL THEN %[2]s END AS receiver
			  FROM pg_temp.listed l LEFT JOIN %[3]s t ON %[4]s
			 WHERE CASE WHEN t.tableoid IS NULL THEN l.found ELSE NOT l.found OR l."row" <> (%[2]s) COLLATE "C" END`,
			here, c.Rows, t.SQL, t.Layout.KeyEquals("t", "l.key"))
	}
	rows := leafRows(c, t, leaves, func(leaf string) string {
		return fmt.Sprintf(`%s AS backfill_leaf, %s, %s AS backfill_key, %s AS backfill_row`, leaf, t.Layout.KeyRefs("t"), here, c.Rows)
	})
	return fmt.Sprintf(`
		SELECT coalesce(l.leaf, t.backfill_leaf) AS leaf, coalesce(l.key, t.backfill_key) AS key, t.backfill_key AS here,
		       CASE WHEN t.backfill_leaf IS NULL THEN 'm' WHEN l.leaf IS NULL THEN 's' ELSE 'd' END AS kind, l."row" AS source, t.backfill_row AS receiver
		  FROM pg_temp.listed l FULL JOIN (%s) t ON %s
		 WHERE l.leaf IS NULL OR t.backfill_leaf IS NULL OR l."row" <> t.backfill_row COLLATE "C"`,
		strings.Join(rows, " UNION ALL "), t.Layout.KeyEquals("t", "l.key"))
}

// listedKeys is the SQL of keys, given as a JSON array of arrays, as rows of one
// column key. It needs no temporary table, which would give the transaction an id.
func listedKeys(keys string) string {
	return fmt.Sprintf(`(SELECT ARRAY(SELECT json_array_elements_text(k)) AS key FROM json_array_elements(%s) k OFFSET 0)`, row.Literal(keys))
}

// Touch records keys in the outbox again, as if their rows had been updated: the
// next push reads and sends them as they are then. Only keys whose row is there are
// recorded, so that nothing is ever deleted by it. It returns how many those are.
func (db *DB) Touch(ctx context.Context, table string, keys []backfill.Key) (n int64, err error) {
	text, err := json.Marshal(keys)
	if err != nil {
		return 0, err
	}
	as := db.met.Load()
	err = db.in(ctx, writing, func(tx pgx.Tx) error {
		if err := db.same(ctx, tx, as); err != nil {
			return err
		}
		t, err := describe(ctx, tx, table)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		tag, err := tx.Exec(ctx, byIndex+fmt.Sprintf(`
			INSERT INTO %s.outbox (tbl, op, key)
			SELECT %s, 'u', %s FROM %s k JOIN %s t ON %s`, db.schema, row.Literal(t.Name.String()), t.Layout.KeyText("t"), listedKeys(string(text)), t.SQL, t.Layout.KeyEquals("t", "k.key")))
		n = tag.RowsAffected()
		return err
	})
	return n, err
}

// AppliedTo is how far the other side's changes of a table have been applied here.
func (db *DB) AppliedTo(ctx context.Context, tableID int32) (seq int64, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		r, err := db.reading(ctx, tx, tableID)
		seq = r.Position
		return err
	})
	return seq, err
}

// Found is how a table is made when a reconciliation begins.
type Found struct {
	*Table
	// Order describes how this side orders each key column: equal texts mean that
	// ranges of keys hold the same keys on both sides. "" means that nobody knows.
	Order    []string
	Bytes    int64 // on disk
	Snapshot string
}

// Find reads how a table is made.
func (db *DB) Find(ctx context.Context, r Relation) (f Found, err error) {
	_, err = db.read(ctx, r, func(tx pgx.Tx, d *Table) error {
		f.Table = d
		rows, err := tx.Query(ctx, `
			WITH RECURSIVE base AS (
			    SELECT k.n, a.attcollation, a.atttypid AS typ FROM unnest($2::text[]) WITH ORDINALITY k (name, n) JOIN pg_attribute a ON a.attrelid = $1::oid AND a.attname = k.name
			    UNION ALL
			    SELECT b.n, b.attcollation, t.typbasetype FROM base b JOIN pg_type t ON t.oid = b.typ WHERE t.typtype = 'd')
			SELECT CASE WHEN t.typtype = 'e' THEN 'enum ' || (SELECT string_agg(quote_literal(e.enumlabel), ' ' ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid)
			            WHEN t.typnamespace <> 'pg_catalog'::regnamespace OR t.typtype <> 'b' THEN ''
			            WHEN b.attcollation = 0 THEN t.typname::text
			            ELSE CASE WHEN t.typname IN ('text', 'varchar') THEN 'text' ELSE t.typname::text END || ' ' ||
			                 CASE WHEN c.collname IN ('C', 'POSIX', 'ucs_basic') OR c.collname = 'default' AND d.datcollate IN ('C', 'POSIX') AND coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'c' THEN 'C'
			                      WHEN c.collname = 'default' THEN concat_ws(' ', to_jsonb(d) ->> 'datlocprovider', d.datcollate, coalesce(to_jsonb(d) ->> 'datlocale', to_jsonb(d) ->> 'daticulocale'), pg_collation_actual_version(c.oid))
			                      ELSE concat_ws(' ', c.collprovider, c.collcollate, coalesce(to_jsonb(c) ->> 'colllocale', to_jsonb(c) ->> 'colliculocale'), c.collisdeterministic, pg_collation_actual_version(c.oid)) END END
			  FROM base b JOIN pg_type t ON t.oid = b.typ AND t.typtype <> 'd'
			  LEFT JOIN pg_collation c ON c.oid = b.attcollation CROSS JOIN pg_database d
			 WHERE d.datname = current_database() ORDER BY b.n`, d.OID, d.Own.Key)
		if err != nil {
			return err
		}
		if f.Order, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return err
		}
		return tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text, coalesce(sum(pg_table_size(to_regclass(r))), 0)::bigint FROM unnest($1::text[]) r`, d.Relations()).
			Scan(&f.Snapshot, &f.Bytes)
	})
	return f, err
}
