package main

import (
	"fmt"
	"strings"
)

// workload is a table and the rows it has on the source. Rows are made of their number g alone, so that every run has the
// same, and hardly compress.
type workload struct {
	name    string
	part    int64 // it has rows/part rows
	columns string
	key     []string
	values  string // SQL of the columns from g
	stale   string // a column that the receiver may have an old value of
	old     string // that value
}

var workloads = []workload{
	{
		name: "orders", part: 1, key: []string{"id"}, stale: "note", old: "'an older note'",
		columns: `id bigint, customer_id integer NOT NULL, status text NOT NULL, amount numeric(12,2) NOT NULL, currency char(3) NOT NULL,
			placed_at timestamptz NOT NULL, shipped_on date, paid boolean NOT NULL, note text, attributes jsonb NOT NULL`,
		values: `g, g * 7919 % 100003, (ARRAY['open', 'paid', 'packed', 'shipped', 'returned'])[1 + g % 5], (g * 31337 % 10000000) / 100.0, 'EUR',
			'2020-01-01'::timestamptz + g * interval '37 seconds', CASE WHEN g % 3 > 0 THEN '2020-01-02'::date + (g % 2000)::int END, g % 4 > 0,
			md5(g::text), jsonb_build_object('channel', 'web', 'items', g % 9, 'ref', left(md5((-g)::text), 8))`,
	},
	{name: "narrow", part: 1, key: []string{"id"}, stale: "value", old: "-1", columns: `id bigint, value integer NOT NULL`, values: `g, g % 1000003`},
	{
		name: "wide", part: 10, key: []string{"id"}, stale: "t1", old: "'an older text'",
		columns: "id bigint" + each(20, ", t%[1]d text, i%[1]d integer") + each(19, ", n%[1]d numeric"),
		values:  "g" + each(20, ", left(md5((g * %[1]d)::text), 8), (g * %[1]d) %% 1000003") + each(19, ", (g * %[1]d) / 100.0"),
	},
	{
		name: "fat", part: 50, key: []string{"id"}, stale: "body", old: "repeat('an older body ', 700)", columns: `id bigint, body text NOT NULL`,
		values: `g, (SELECT string_agg(md5((g * n)::text), '') FROM generate_series(1, 320) n)`,
	},
	{
		name: "composite", part: 2, key: []string{"tenant", "code"}, stale: "note", old: "'an older note'",
		columns: `tenant text, code text, value integer NOT NULL, note text`, values: `'tenant-' || g % 97, md5(g::text), g % 1000003, md5((-g)::text)`,
	},
}

func each(n int, format string) string {
	var all strings.Builder
	for i := range n {
		fmt.Fprintf(&all, format, i+1)
	}
	return all.String()
}

func (w workload) keys() string { return strings.Join(w.key, ", ") }

// create is the SQL of the table with its primary key.
func (w workload) create() string {
	return fmt.Sprintf("CREATE TABLE %s (%s, PRIMARY KEY (%s))", w.name, w.columns, w.keys())
}

// fill is the SQL that makes n rows.
func (w workload) fill(n int64) string {
	return fmt.Sprintf("INSERT INTO %s SELECT %s FROM generate_series(1, %d::bigint) g", w.name, w.values, n)
}

// holding is what a receiver has of a workload's rows before they are copied.
type holding string

const (
	empty holding = "empty"     // nothing
	half  holding = "half full" // every second row, as it is on the source
	full  holding = "full"      // every row but the last, with an old value
)

// held is the SQL, on the source, of the rows that a receiver has; columns are the table's.
func (w workload) held(h holding, columns []string) string {
	out := make([]string, len(columns))
	for i, c := range columns {
		if out[i] = c; h == full && c == w.stale {
			out[i] = w.old
		}
	}
	keep := "n % 2 = 0"
	if h == full {
		keep = "n < total"
	}
	return fmt.Sprintf("SELECT %s FROM (SELECT *, row_number() OVER (ORDER BY %s) AS n, count(*) OVER () AS total FROM %s) t WHERE %s",
		strings.Join(out, ", "), w.keys(), w.name, keep)
}
