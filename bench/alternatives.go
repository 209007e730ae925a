package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// way is one way of doing a step that a backfill consists of: what the product does, or what it might do instead.
type way struct {
	name   string
	before []string      // made ready, not measured
	do     [][]statement // what each of its sessions does, one after the other; sessions run side by side
}

// statement is SQL. A COPY FROM STDIN reads what another COPY gave, a COPY TO STDOUT gives it to nobody.
type statement struct{ sql, from string }

func one(statements ...statement) [][]statement { return [][]statement{statements} }

func do(sql string) statement { return statement{sql: sql} }

// cost is what a way took: on the clock, of the servers' processors, and of the write-ahead log.
type cost struct {
	took, processor time.Duration
	log             int64 // bytes
}

// copied are what COPYs read, each made by one.
var copied = map[string]string{
	"columns":        `COPY (SELECT * FROM orders ORDER BY id) TO STDOUT`,
	"columns binary": `COPY (SELECT * FROM orders ORDER BY id) TO STDOUT (FORMAT binary)`,
	"texts":          staged("1", "ARRAY["+columnTexts+"]") + ` TO STDOUT (FORMAT binary)`,
	"first half":     staged("1", "ARRAY["+columnTexts+"]", "id <= (SELECT max(id) / 2 FROM orders)") + ` TO STDOUT (FORMAT binary)`,
	"second half":    staged("2", "ARRAY["+columnTexts+"]", "id > (SELECT max(id) / 2 FROM orders)") + ` TO STDOUT (FORMAT binary)`,
	"composite":      staged("1", "t::text") + ` TO STDOUT (FORMAT binary)`,
	"json":           staged("1", "row_to_json(t)::text") + ` TO STDOUT (FORMAT binary)`,
	"records": `COPY (SELECT 1::bigint, min(id), pg_current_snapshot(), array_agg(id::text ORDER BY id), array_agg(t::text ORDER BY id) FROM orders t GROUP BY id / 500)
		TO STDOUT (FORMAT binary)`,
	"half of columns": `COPY (SELECT * FROM orders WHERE hashint8(id) % 2 = 0 ORDER BY id) TO STDOUT`,
	"other half":      `COPY (SELECT * FROM orders WHERE hashint8(id) % 2 <> 0 ORDER BY id) TO STDOUT`,
	"arrays":          `COPY (SELECT ARRAY[` + columnTexts + `] FROM orders t ORDER BY id) TO STDOUT (FORMAT binary)`,
}

const columnTexts = "id::text, customer_id::text, status, amount::text, currency::text, placed_at::text, shipped_on::text, paid::text, note, attributes::text"

func staged(request, row string, where ...string) string {
	return fmt.Sprintf(`COPY (SELECT %s::bigint, id, pg_current_snapshot(), ARRAY[id::text], %s FROM orders t WHERE %s ORDER BY id)`,
		request, row, strings.Join(append(where, "true"), " AND "))
}

// remake makes a table anew.
func remake(name, columns string) []string {
	return []string{"DROP TABLE IF EXISTS " + name, "CREATE TABLE " + name + " (" + columns + ")"}
}

const (
	stagedColumns = `request_id bigint NOT NULL, n bigint NOT NULL, superseded_by bigint, snap pg_snapshot NOT NULL, key text[] COLLATE "C" NOT NULL, row %s COLLATE "C" NOT NULL, PRIMARY KEY (request_id, n)`
	keyIndex      = `CREATE UNIQUE INDEX ON staged (request_id, octet_length(key[1]), key)`
	entryColumns  = `direction integer NOT NULL, table_id integer NOT NULL, seq bigint GENERATED ALWAYS AS IDENTITY, layout_id bigint, request_id bigint,
		created_at timestamptz NOT NULL DEFAULT clock_timestamp(), snap pg_snapshot NOT NULL, op "char" NOT NULL, dropped boolean NOT NULL DEFAULT false, key text[] COLLATE "C", row text[] COLLATE "C"`
	intoStaged = `COPY staged (request_id, n, snap, key, row) FROM STDIN (FORMAT binary)`
	intoEntry  = `INSERT INTO entry (direction, table_id, layout_id, request_id, snap, op, key, row) SELECT 1, 1, 1, request_id, snap, 'c', key, %s FROM staged WHERE request_id = 1 AND n BETWEEN %d AND %d ORDER BY n`
	upserted   = ` ON CONFLICT (id) DO UPDATE SET (customer_id, status, amount, currency, placed_at, shipped_on, paid, note, attributes) =
		(excluded.customer_id, excluded.status, excluded.amount, excluded.currency, excluded.placed_at, excluded.shipped_on, excluded.paid, excluded.note, excluded.attributes)`
	fromTexts = `SELECT r[1]::bigint, r[2]::integer, r[3], r[4]::numeric, r[5]::char(3), r[6]::timestamptz, r[7]::date, r[8]::boolean, r[9], r[10]::jsonb FROM incoming`
)

// step is one of those that a backfill consists of, and the ways of doing it, of which the first is the product's own.
type step struct {
	name string
	ways []way
}

// steps are those of a backfill of so many rows of orders. They write tables named as the product's are, with the columns
// and indexes that count: should those change, these do.
func steps(rows int64) []step {
	target := remake("target", "LIKE orders INCLUDING ALL")
	table := func(row string, more ...string) []string {
		return append(remake("staged", fmt.Sprintf(stagedColumns, row)), more...)
	}
	read := func(from string) [][]statement { return one(do(copied[from])) }
	entries := func(more string, rest ...string) []string {
		return append(remake("entry", entryColumns+more), rest...)
	}
	released := func(row string, size int64) (all []statement) {
		for at := int64(0); at < rows; at += size {
			all = append(all, do(fmt.Sprintf(intoEntry, row, at+1, at+size)))
		}
		return all
	}
	upsert := func(kind, columns, from, query string) [][]statement {
		return one(do("CREATE "+kind+" TABLE incoming ("+columns+")"), statement{"COPY incoming FROM STDIN (FORMAT binary)", from},
			do("INSERT INTO target "+query+upserted), do("DROP TABLE incoming"))
	}
	full := slices.Concat(target, []string{"INSERT INTO target SELECT * FROM orders", "VACUUM ANALYZE target"})
	const texts, typed = "r text[]", "LIKE orders"
	const all = "SELECT * FROM incoming"
	const indexed = ", PRIMARY KEY (direction, seq)"
	staging := table("text[]", keyIndex, "INSERT INTO staged SELECT 1, id, NULL, pg_current_snapshot(), ARRAY[id::text], ARRAY["+columnTexts+"] FROM orders", "VACUUM ANALYZE staged")
	return []step{
		{"read for the walk", []way{
			{"text[], binary", nil, read("texts")},
			{"columns as text, as the floor reads them", nil, read("columns")},
			{"columns, binary: only a server of the same types can read them", nil, read("columns binary")},
			{"the row's composite text", nil, read("composite")},
			{"JSON: numbers and bytes lose their spelling", nil, read("json")},
		}},
		{"stage", []way{
			{"text[], with an index of positions and one of keys", table("text[]", keyIndex), one(statement{intoStaged, "texts"})},
			{"without the index of keys", table("text[]"), one(statement{intoStaged, "texts"})},
			{"and that made afterwards", table("text[]"), one(statement{intoStaged, "texts"}, do(keyIndex))},
			{"the row's composite text", table("text", keyIndex), one(statement{intoStaged, "composite"})},
			{"500 rows in one record, compressed: no index of keys", table("text[]", "ALTER TABLE staged ALTER COLUMN row SET COMPRESSION lz4"), one(statement{intoStaged, "records"})},
			{"unlogged: lost with a crash", table("text[]", keyIndex, "ALTER TABLE staged SET UNLOGGED"), one(statement{intoStaged, "texts"})},
			{"two ranges of keys side by side", table("text[]", keyIndex), [][]statement{{{intoStaged, "first half"}}, {{intoStaged, "second half"}}}},
		}},
		{"release", []way{
			{"in batches of 20,000", entries(indexed, staging...), one(released("row", 20_000)...)},
			{"in batches of 2,000", entries(indexed, staging...), one(released("row", 2_000)...)},
			{"at once", entries(indexed, staging...), one(released("row", rows)...)},
			{"entries with a key, that refer to staged rows", entries(indexed, staging...), one(released("NULL", 20_000)...)},
			{"into a table without an index, as a partition is filled before it is attached", entries("", staging...), one(released("row", 20_000)...)},
		}},
		{"apply to a table without these rows", []way{
			{"COPY", target, one(statement{"COPY target FROM STDIN", "columns"})},
			{"COPY, binary", target, one(statement{"COPY target FROM STDIN (FORMAT binary)", "columns binary"})},
			{"COPY, halves by a hash of the key side by side", target, [][]statement{{{"COPY target FROM STDIN", "half of columns"}}, {{"COPY target FROM STDIN", "other half"}}}},
			{"temporary table of text[], upsert", target, upsert("TEMP", texts, "arrays", fromTexts)},
			{"typed temporary table, upsert", target, upsert("TEMP", typed, "columns binary", all)},
			{"typed unlogged table, upsert", target, upsert("UNLOGGED", typed, "columns binary", all)},
		}},
		{"apply to a table with all of them", []way{
			{"temporary table of text[], upsert", full, upsert("TEMP", texts, "arrays", fromTexts)},
			{"typed temporary table, upsert", full, upsert("TEMP", typed, "columns binary", all)},
		}},
	}
}

// alternatives measures every way of every step on one server, without the product: what a step has to cost here, and
// what another way of doing it would.
func (b *bench) alternatives(ctx context.Context) error {
	rows := min(200_000, b.rows)
	pool := b.receiver
	if err := pool.exec(ctx, "CREATE SCHEMA IF NOT EXISTS alternatives"); err != nil {
		return err
	}
	defer func() { _ = pool.exec(context.WithoutCancel(ctx), "DROP SCHEMA alternatives CASCADE") }()
	var sessions []*pgx.Conn
	for range 2 {
		conn, err := pgx.Connect(ctx, pool.dsn)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		if _, err := conn.Exec(ctx, "SET search_path = alternatives; SET jit = off"); err != nil {
			return err
		}
		sessions = append(sessions, conn)
	}
	for _, sql := range []string{orders.create(), orders.fill(rows), "VACUUM ANALYZE orders"} {
		if _, err := sessions[0].Exec(ctx, sql); err != nil {
			return err
		}
	}
	data := map[string][]byte{}
	for name, sql := range copied {
		var b bytes.Buffer
		if _, err := sessions[0].PgConn().CopyTo(ctx, &b, sql); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		data[name] = b.Bytes()
	}
	section := fmt.Sprintf("Ways of each step of %d rows of orders, on one server", rows)
	b.report.heads(section, "", "of a processor", "on the clock", "log")
	for _, s := range steps(rows) {
		for _, w := range s.ways {
			var took, spent []time.Duration
			var log int64
			for range b.rounds {
				c, err := w.measured(ctx, sessions, data)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", s.name, w.name, err)
				}
				took, spent, log = append(took, c.took), append(spent, c.processor), c.log
			}
			name, value := s.name+": "+w.name, fmt.Sprintf("%.2f s | %.2f s | %.0f MB", median(spent).Seconds(), median(took).Seconds(), float64(log)/1e6)
			b.report.figure(section, name, value)
			b.say("%s: %s", name, value)
		}
	}
	return nil
}

func (w way) measured(ctx context.Context, sessions []*pgx.Conn, data map[string][]byte) (c cost, err error) {
	for _, sql := range append(slices.Clone(w.before), "CHECKPOINT") {
		if _, err := sessions[0].Exec(ctx, sql); err != nil {
			return c, err
		}
	}
	var from string
	if err := sessions[0].QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text").Scan(&from); err != nil {
		return c, err
	}
	spent := func() (sum time.Duration, err error) {
		for _, s := range sessions {
			d, e := processor(int(s.PgConn().PID()))
			sum, err = sum+d, errors.Join(err, e)
		}
		return sum, err
	}
	before, err := spent()
	if err != nil {
		return c, err
	}
	began := time.Now()
	ended := make(chan error, len(w.do))
	for i, statements := range w.do {
		go func() { ended <- work(ctx, sessions[i], statements, data) }()
	}
	for range w.do {
		err = errors.Join(err, <-ended)
	}
	c.took = time.Since(began)
	after, e := spent()
	c.processor = after - before
	return c, errors.Join(err, e, sessions[0].QueryRow(ctx, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::text::pg_lsn)::bigint", from).Scan(&c.log))
}

func work(ctx context.Context, session *pgx.Conn, statements []statement, data map[string][]byte) (err error) {
	for _, s := range statements {
		switch {
		case s.from != "":
			_, err = session.PgConn().CopyFrom(ctx, bytes.NewReader(data[s.from]), s.sql)
		case strings.HasPrefix(s.sql, "COPY ("):
			_, err = session.PgConn().CopyTo(ctx, io.Discard, s.sql)
		default:
			_, err = session.Exec(ctx, s.sql)
		}
		if err != nil {
			return fmt.Errorf("%.80s: %w", s.sql, err)
		}
	}
	return nil
}
