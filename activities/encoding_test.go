package activities

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

const mixed = `
	CREATE TABLE mixed (at timestamptz, b boolean, span interval, f float8, raw bytea, m money, "To" text,
		v text, ds date[], i interval, x xml, n float4, bs bytea[], PRIMARY KEY (at, b, span, f, raw, m, "To"));
	CREATE TABLE words (id int PRIMARY KEY, w text);
	CREATE TABLE names (name text PRIMARY KEY, n int)`

// settled makes a database of an encoding whose sessions bring settings along that
// print and read values in other ways.
func settled(t *testing.T, encoding string, settings ...string) string {
	dsn := testkit.DatabaseWith(t, "ENCODING '"+encoding+"' LC_COLLATE 'C' LC_CTYPE 'C'")
	conn := testkit.Session(t, dsn)
	name := conn.Config().Database
	testkit.Exec(t, conn, `CREATE SCHEMA evil; CREATE FUNCTION evil.concat(boolean) RETURNS text LANGUAGE sql AS $$ SELECT 'evil' $$;
		CREATE FUNCTION evil.differ(bytea, bytea) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$; CREATE OPERATOR evil.= (LEFTARG = bytea, RIGHTARG = bytea, FUNCTION = evil.differ)`)
	for i, set := range append(settings, "search_path = public, evil, pg_catalog", "client_encoding = 'LATIN1'") {
		if i%2 == 0 {
			testkit.Exec(t, conn, `ALTER DATABASE `+name+` SET `+set)
		} else {
			testkit.Exec(t, conn, `ALTER ROLE CURRENT_USER IN DATABASE `+name+` SET `+set)
		}
	}
	return dsn
}

// Sides whose sessions have other settings, and whose databases have other
// encodings, hold the same rows; a character that the receiver's encoding lacks
// quarantines its row, in PostgreSQL's words, and nothing else.
func TestGuarantee8_EncodingsAndSettings(t *testing.T) {
	for name, c := range map[string]struct{ from, to string }{
		"from LATIN1 to UTF8": {"LATIN1", "UTF8"},
		"from UTF8 to LATIN1": {"UTF8", "LATIN1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			source := settled(t, c.from, "datestyle = 'SQL, DMY'", "timezone = 'Asia/Kathmandu'", "intervalstyle = 'sql_standard'", "bytea_output = 'escape'", "extra_float_digits = -15",
				"quote_all_identifiers = on", "default_transaction_isolation = 'serializable'")
			receiver := settled(t, c.to, "datestyle = 'German'", "timezone = 'America/St_Johns'", "intervalstyle = 'iso_8601'", "standard_conforming_strings = off", "escape_string_warning = off",
				"array_nulls = off", "xmloption = document", "lc_monetary = 'C'", "transform_null_equals = on", "default_transaction_isolation = 'repeatable read'")
			w := worldOf(testkit.NewPairIn(t, testkit.Places{Source: source, Receiver: receiver}, mixed, mixed, "public.mixed", "public.words", "public.names"), Settings{PageRows: 2})
			for _, db := range []func(string, ...any){w.onSource, w.onReceiver} {
				db(`SET client_encoding = 'UTF8'`)
			}
			same := func() {
				t.Helper()
				for _, db := range []func(string, ...any){w.onSource, w.onReceiver} {
					db(`SET datestyle = ISO; SET timezone = 'UTC'; SET intervalstyle = 'postgres'; SET extra_float_digits = 3; SET bytea_output = 'hex'`)
				}
				w.Equal("mixed", "words", "names")
				for _, db := range []func(string, ...any){w.onSource, w.onReceiver} {
					db(`RESET datestyle; RESET timezone; RESET intervalstyle; RESET extra_float_digits; RESET bytea_output`)
				}
			}
			w.onSource(`INSERT INTO mixed SELECT timestamptz '2024-02-03 04:05:06.789+00' + n * interval '1 day 1 hour', n % 2 = 0, make_interval(months => n, secs => n / 7.0::float8), n / 3.0, decode(md5(n::text), 'hex'), n / 7.0, 'Größe ''\\ ' || n,
				'é ' || n, ARRAY[date '2024-02-03', NULL, 'infinity'], make_interval(years => -n, days => n), '<a/>text', n / 3.0, ARRAY[decode('5c00ff', 'hex'), NULL] FROM generate_series(1, 9) n`)
			w.onSource(`INSERT INTO words SELECT n, chr(160 + n * 7) || 'ü' FROM generate_series(1, 13) n; INSERT INTO names SELECT chr(192 + n), n FROM generate_series(1, 40) n`)
			w.drain()
			require.Empty(t, w.setAside())
			same()
			w.onSource(`UPDATE mixed SET f = f + 0.1, at = at + interval '6 months' WHERE b; DELETE FROM mixed WHERE NOT b AND m < '1'::money; UPDATE names SET name = name || 'ß' WHERE n % 2 = 0; DELETE FROM names WHERE n = 3`)
			w.drain()
			require.Empty(t, w.setAside())
			same()
			w.onReceiver(`DELETE FROM mixed WHERE b; UPDATE mixed SET v = '', i = NULL; DELETE FROM words WHERE id % 2 = 0; DELETE FROM names WHERE n % 3 = 0; UPDATE names SET n = -1`)
			backfillAll := func() {
				t.Helper()
				for _, table := range []string{"public.mixed", "public.words", "public.names"} {
					id := w.Request(table).ID
					w.walk(id)
					require.Len(t, w.staged(id), testkit.Value[int](t, w.S, `SELECT count(*) FROM `+table))
					w.classify(id)
					w.Approve(id)
					w.release(id, 100)
				}
				w.applyAll()
			}
			backfillAll()
			require.Empty(t, w.setAside())
			same()
			if c.to == "UTF8" {
				return
			}

			const lacks = `has no equivalent in encoding "LATIN1"`
			w.onSource(`INSERT INTO words VALUES (101, 'plain'), (102, 'Łódź'), (103, 'plain'), (104, '€'); INSERT INTO names VALUES ('Łódź', 1), ('plain', 2); UPDATE words SET w = '😀' WHERE id = 1`)
			w.drain()
			aside := w.setAside()
			require.Len(t, aside, 4)
			for i, key := range []string{"102", "104", `\u0141\u00f3d\u017a`, "1"} {
				found := false
				for _, a := range aside {
					found = found || strings.HasPrefix(a, "quarantined ("+key+"): ") && strings.Contains(a, lacks)
				}
				require.True(t, found, "%d: %s is not among %q", i, key, aside)
			}
			require.Equal(t, int64(3), testkit.Value[int64](t, w.R, `SELECT count(*) FROM (SELECT id::text FROM words WHERE w = 'plain' UNION ALL SELECT name FROM names WHERE name = 'plain') x`))
			w.retryAll()
			require.Len(t, w.setAside(), 4, "trying again changes nothing")
			// The walk, too: what they would do is not known, and they are quarantined again.
			w.onReceiver(`DELETE FROM words WHERE id = 103`)
			id := w.Request("public.words").ID
			w.walk(id)
			w.classify(id)
			require.Equal(t, map[backfill.Effect]int64{backfill.Insert: 1, backfill.Overwrite: 0, backfill.Identical: 13, backfill.Unknown: 3}, w.Now(id).Effects)
			w.Approve(id)
			w.release(id, 100)
			w.applyAll()
			require.Len(t, w.setAside(), 4)
			// Something newer replaces them.
			w.onSource(`UPDATE words SET w = 'Lodz' WHERE id = 102; DELETE FROM words WHERE id = 104; UPDATE words SET w = 'smile' WHERE id = 1; UPDATE names SET name = 'Lodz' WHERE name = 'Łódź'`)
			w.drain()
			require.Empty(t, w.setAside())
			same()
		})
	}
}

// Sides whose sessions differ in nothing but how they print intervals, or times, hold
// the same rows, which were sent once each, under one spelling of their keys, and are
// judged the same.
func TestGuarantee8_SessionsThatPrintTimesDifferently(t *testing.T) {
	for _, c := range [][2]string{
		{"intervalstyle = 'sql_standard'", "intervalstyle = 'postgres'"}, // -1 2:00:00 is 22 hours here, and 26 there
		{"intervalstyle = 'iso_8601'", "intervalstyle = 'sql_standard'"},
		{"timezone = 'Asia/Kathmandu'", "timezone = 'America/St_Johns'"},
		{"timezone = 'UTC'", "timezone = 'Asia/Kathmandu'"},
	} {
		t.Run(c[0]+" and "+c[1], func(t *testing.T) {
			t.Parallel()
			const spans = `CREATE TABLE spans (at timestamptz, span interval, other interval, note text, PRIMARY KEY (at, span))`
			w := worldOf(testkit.NewPairIn(t, testkit.Places{Source: settled(t, "UTF8", c[0]), Receiver: settled(t, "UTF8", c[1])}, spans, spans, "public.spans"), Settings{PageRows: 2})
			for _, db := range []func(string, ...any){w.onSource, w.onReceiver} {
				db(`SET timezone = 'UTC'; SET intervalstyle = 'postgres'; SET client_encoding = 'UTF8'`)
			}
			w.onSource(`INSERT INTO spans SELECT timestamptz '2024-02-03 04:05:06+00' + n * interval '1 day', make_interval(days => -n, hours => -n), make_interval(months => -n, days => n), 'x' FROM generate_series(1, 5) n`)
			w.drain()
			w.Equal("spans")
			w.onSource(`UPDATE spans SET note = 'y'`)
			w.drain()
			w.Equal("spans")
			require.Equal(t, []string{"c 5", "u 5"}, testkit.Strings(t, w.C, `SELECT op::text || ' ' || count(*) FROM backfill_control.entry GROUP BY op ORDER BY 1`))
			id := w.Request("public.spans").ID
			w.walk(id)
			w.classify(id)
			require.Equal(t, int64(5), w.Now(id).Effects[backfill.Identical])
			require.Equal(t, "EQUAL", w.reconcile("public.spans").Verdict)
		})
	}
}
