package activities

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
	"backfill/internal/testkit"
)

// keyedBy is a table with a key that is hard to walk, and its rows.
type keyedBy struct {
	what, ddl, fill string
	change          string // of its keys, on the source
}

var hardKeys = []keyedBy{
	{"mixed types", `(a text COLLATE "C", b numeric, c timestamptz, d boolean, v int, PRIMARY KEY (a, b, c, d))`,
		`SELECT a, b, c, d, 0 FROM unnest(ARRAY['', 'A', 'a', 'B']) a, unnest(ARRAY[1.0, 1.5, 'NaN'::numeric, '-Infinity']) b, unnest(ARRAY['-infinity', '2024-03-31 01:30+00', 'infinity']::timestamptz[]) c, unnest(ARRAY[true, false]) d`,
		`UPDATE t SET b = 1.00, v = 1 WHERE b = 1; UPDATE t SET a = lower(a) || 'x', v = 2 WHERE a = 'B'`},
	{"text that is equal in other spellings, with a number", `(a text COLLATE nobody_cares, b int, v int, PRIMARY KEY (a, b))`,
		`SELECT CASE n % 3 WHEN 0 THEN 'key' WHEN 1 THEN 'KEY' ELSE 'Key' END || n / 9, n % 9, 0 FROM generate_series(0, 26) n`,
		`UPDATE t SET a = upper(a), v = 1 WHERE b < 5; DELETE FROM t WHERE a = 'key1' AND b = 3`},
	{"a domain under another collation than its own", `(a careless COLLATE "C", v int, PRIMARY KEY (a))`,
		`SELECT unnest(ARRAY['b', 'B', 'a', 'A', 'c', 'C', 'ä', 'Ä']), 0`, `UPDATE t SET a = a || 'x' WHERE a < 'a'`},
	{"a domain back under the database's collation", `(a careless COLLATE "default", v int, PRIMARY KEY (a))`,
		`SELECT unnest(ARRAY['b', 'B', 'a', 'A', 'c', 'C', 'ä', 'Ä']), 0`, `UPDATE t SET a = a || 'x' WHERE a < 'a'`},
	{"text under ICU", `(a text COLLATE "en-x-icu", v int, PRIMARY KEY (a))`,
		`SELECT unnest(ARRAY['b', 'B', 'a', 'A', '-a', 'a-b', 'ab', 'ä', 'z', 'Z', 'æ', 'ae', '', ' ']), 0`, `UPDATE t SET a = a || '-' WHERE a IN ('A', 'z')`},
	{"text under a libc locale", `(a text COLLATE "C.utf8", b text COLLATE "C", v int, PRIMARY KEY (b, a))`,
		`SELECT x, y, 0 FROM unnest(ARRAY['b', 'B', 'é', '😀', '']) x, unnest(ARRAY['b', 'B', 'é', '😀']) y`, `UPDATE t SET a = a || 'x' WHERE b = 'é'`},
	{"an extension's type with a number", `(a citext, b numeric, c hstore, v int, PRIMARY KEY (b, a, c))`,
		`SELECT a, b, c, 0 FROM unnest(ARRAY['x', 'Y', 'z']::citext[]) a, unnest(ARRAY[1, 2.50]) b, unnest(ARRAY['', 'a=>1', 'a=>NULL,b=>2']::hstore[]) c`,
		`UPDATE t SET a = upper(a), b = round(b, 1), v = 1`},
	{"enum, range and array", `(a mood, b numrange, c int[], v int, PRIMARY KEY (a, b, c))`,
		`SELECT a, b, c, 0 FROM unnest(enum_range(NULL::mood)) a, unnest(ARRAY['empty', '(,)', '[1.0,2)', '(,5]']::numrange[]) b, unnest(ARRAY['{}', '[0:1]={1,NULL}']) x(c0), LATERAL (SELECT c0::int[]) y(c)`,
		`UPDATE t SET b = '[1.00,2.0)', v = 1 WHERE b = '[1,2)'; DELETE FROM t WHERE isempty(b)`},
	{"a composite", `(a pair, b uuid, v int, PRIMARY KEY (a, b))`,
		`SELECT ROW(n / 4.0, CASE WHEN n % 3 > 0 THEN 'x' || n % 3 END)::pair, md5(n::text)::uuid, 0 FROM generate_series(1, 20) n`,
		`UPDATE t SET a = ROW((a).n * 1.00, (a).t)::pair, v = 1`},
	{"a network, a bit string, raw bytes", `(a inet, b varbit, c bytea, v int, PRIMARY KEY (a, b, c))`,
		`SELECT a, b, c, 0 FROM unnest(ARRAY['10.0.0.1', '10.0.0.1/8', '::1']::inet[]) a, unnest(ARRAY[B'', B'0', B'1']) b, unnest(ARRAY['\x', '\x00', '\xff5c']::bytea[]) c`,
		`UPDATE t SET c = c || '\x27'::bytea WHERE b = B'0'`},
	{"a unique index that descends, and includes", `(a int NOT NULL, b text NOT NULL, v int); CREATE UNIQUE INDEX ON t (b DESC, a) INCLUDE (v)`,
		`SELECT n % 5, 'b' || n % 7, n FROM generate_series(1, 30) n`, `UPDATE t SET a = -a WHERE b > 'b3'`},
	{"a unique index by pattern", `(a text COLLATE "en-x-icu" NOT NULL, v int); CREATE UNIQUE INDEX ON t (a text_pattern_ops)`,
		`SELECT unnest(ARRAY['b', 'B', 'a', 'A', '-a', 'a-b']), 0`, `UPDATE t SET a = a || 'x' WHERE a = 'B'`},
	{"columns named like aliases", `(t int, s int, "key" int, "row" int, snap int, k int, r int, i int, n int, c int, h int, p int, j int, op text, seq int, excluded int, created int, updated int, found int, livekey int, off int,
		tbl int, id int, table_id int, layout_id int, new_rows int, old_rows int, PRIMARY KEY ("key", "row", k, i, t, created, updated))`,
		`SELECT n, n, n % 3, n % 2, n, n, n, n, n, n, n, n, n, 'op', n, n, n, n, n, n, n, n, n, n, n, n, n FROM generate_series(1, 12) n`,
		`UPDATE t SET "key" = "key" + 1, created = 0 WHERE n < 4; DELETE FROM t WHERE t = 7`},
}

// Every key is staged once, in the order of its type, however small the pages are;
// and its changes arrive.
func TestGuarantee3_HardKeysInSmallPages(t *testing.T) {
	schema := madeTypes + "CREATE EXTENSION citext; CREATE EXTENSION hstore;"
	var tables []string
	named := func(sql, name string) string {
		for _, before := range []string{"UPDATE ", "DELETE FROM ", "ON "} {
			sql = strings.ReplaceAll(sql, before+"t ", before+name+" ")
		}
		return sql
	}
	for i, k := range hardKeys {
		name := fmt.Sprintf("hard_%d", i)
		if i == len(hardKeys)-1 {
			name = "excluded" // a name that statements of ours have a meaning for
		}
		tables = append(tables, name)
		schema += "CREATE TABLE " + name + " " + named(k.ddl, name) + ";"
	}
	w := newWorldOf(t, Settings{}, schema, schema)
	for _, name := range tables {
		w.Configure("public."+name, control.TableChange{CapturedFrom: []string{testkit.Source}})
	}
	w.Setup()
	var all []string
	for i, k := range hardKeys {
		w.onSource("INSERT INTO " + tables[i] + " " + k.fill)
		all = append(all, tables[i])
	}
	w.drain()
	require.Empty(t, w.setAside())
	w.Equal(all...)
	for i, k := range hardKeys {
		w.onSource(named(k.change, tables[i]))
	}
	w.drain()
	require.Empty(t, w.setAside())
	w.Equal(all...)
	for i, k := range hardKeys {
		w.onReceiver(`DELETE FROM ` + tables[i] + ` WHERE ctid IN (SELECT ctid FROM ` + tables[i] + ` LIMIT 5)`)
		w.settings.PageRows = 1 + i%3
		w.from = w.agent(testkit.Source)
		id := w.Request("public." + tables[i]).ID
		w.walk(id)
		d, err := w.from.db.Describe(t.Context(), "public."+tables[i])
		require.NoError(t, err)
		rows := testkit.Strings(t, w.S, `SELECT array_to_string(`+d.Layout.KeyText("x")+`, ',') FROM `+tables[i]+` x ORDER BY `+d.Layout.KeyRefs("x"))
		require.Equal(t, rows, w.staged(id), k.what)
		w.classify(id)
		require.Zero(t, w.Now(id).Effects["unknown"], k.what)
		w.Approve(id)
		w.release(id, 100)
	}
	w.applyAll()
	require.Empty(t, w.setAside())
	w.Equal(all...)
}
