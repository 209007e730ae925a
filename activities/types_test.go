package activities

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// sample is a type, and values of it that are hard to carry: as text, or, with "=" in
// front, as SQL.
type sample struct {
	typ    string
	values []string
}

// unreadable are the types whose text PostgreSQL itself does not read back: no client
// can write a value of one, so a row that holds one is quarantined with that reason.
var unreadable = []string{"gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary", "pg_dependencies", "pg_mcv_list", "pg_ndistinct", "pg_node_tree"}

// builtin has every other type of PostgreSQL's own that a column can have.
var builtin = []sample{
	{"boolean", []string{"true", "false"}},
	{"smallint", []string{"0", "-32768", "32767"}},
	{"integer", []string{"0", "-2147483648", "2147483647"}},
	{"bigint", []string{"0", "-9223372036854775808", "9223372036854775807"}},
	{"real", []string{"-0", "0", "NaN", "Infinity", "-Infinity", "1.1", "3.4028235e38", "1e-45", "-1.1754944e-38"}},
	{"double precision", []string{"-0", "0", "NaN", "Infinity", "-Infinity", "0.1", "0.30000000000000004", "1.7976931348623157e308", "5e-324", "-2.2250738585072014e-308"}},
	{"numeric", []string{"1.0", "1.00", "0", "0.000", "-0.001", "NaN", "Infinity", "-Infinity", "1e131071", "1e-16383", "123456789012345678901234567890.1234567890123456789000", "-100"}},
	{"numeric(20,5)", []string{"1", "-1.5", "123456789012345.12345", "NaN"}},
	{"money", []string{"0", "1.10", "-92233720368547758.08", "92233720368547758.07"}},
	{"text", []string{"", " ", "ends in a space ", "NULL", `\N`, `\.`, "{}", `{"a,b"}`, "a", "A", "é", "e\u0301", "😀", "\t\n\r\x01\x7f", `back\slash`, "it's", `"q"`, "\u202eright to left", "\ufeff"}},
	{"character varying(7)", []string{"", "ab", "ab ", "ab     ", "ééééééé"}},
	{"character(5)", []string{"", "ab", "abcde", " x", "é", "ab   "}},
	{"bpchar", []string{"", "keeps  ", "x"}},
	{`"char"`, []string{"a", "", " ", `\`, `=1::"char"`}},
	{"name", []string{"a", "", `q"'`, strings.Repeat("é", 31) + "x"}},
	{"bytea", []string{`\x`, `\x00`, `\x0001ff`, `\x5c78`, `\x61`, `\xffffffff`}},
	{"uuid", []string{"00000000-0000-0000-0000-000000000000", "FFFFFFFF-ffff-FFFF-ffff-ffffffffffff"}},
	{"date", []string{"2024-02-29", "infinity", "-infinity", "4713-01-01 BC", "0001-12-31 BC", "0001-01-01", "5874897-12-31"}},
	{"time", []string{"00:00:00", "24:00:00", "12:34:56.789012"}},
	{"time(1)", []string{"12:34:56.7"}},
	{"timetz", []string{"12:00:00+00", "12:00:00-15:59:59", "24:00:00+05:30", "12:00:00+15:59:59"}},
	{"timestamp", []string{"2024-02-29 23:59:59.999999", "infinity", "-infinity", "0044-03-15 12:00:00 BC", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999"}},
	{"timestamptz", []string{"2024-03-31 01:30:00+01", "2024-03-31 03:30:00+02", "2024-10-27 02:30:00.000001+02", "2024-10-27 02:30:00+01", "infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "1890-01-01 00:00:00+00:19:32"}},
	{"timestamptz(3)", []string{"2024-03-31 01:30:00.1239+01", "infinity"}},
	{"interval", []string{"1 day", "24:00:00", "1 mon", "30 days", "-1 year -2 mons +3 days -04:05:06.789", "00:00:00", "178000000 years", "-178000000 years", "-00:00:00.000001", "1 year -1 day", "-1 day 1 sec"}},
	{"interval day to second(2)", []string{"1 day 02:03:04.05"}},
	{"json", []string{`{"b": 1,  "a" :2, "b": 3}`, "null", " [1.0, 1e5] ", `"\u0000"`, `"\ud83d\ude00"`, `{"":{}}`, `1E+400`}},
	{"jsonb", []string{"null", "1.0", "1.00", `{"b": 1, "a": [1, null, "x\u00e9"], "b": 2}`, `"text"`, "[]", "{}", "12345678901234567890.0123456789", `"\\\""`, "1e300"}},
	{"jsonpath", []string{`$."a"[*]?(@ > 1)`, "strict $.a.type()", `$ ? (@ like_regex "^\\d" flag "i")`}},
	{"xml", []string{"", "<a>&lt; é &#169;</a>", "text <b/> content", `<?xml version="1.0" encoding="ISO-8859-1" standalone="yes"?><r a='1'/>`, "<a><![CDATA[<&>]]></a>", "  <!-- c --> <x:y xmlns:x=\"u\"/>"}},
	{"inet", []string{"10.0.0.1", "10.0.0.1/8", "10.0.0.0/8", "::1", "2001:db8::1/32", "::ffff:1.2.3.4", "0.0.0.0/0"}},
	{"cidr", []string{"10.0.0.0/8", "10.0.0.0/32", "2001:db8::/32", "::/0"}},
	{"macaddr", []string{"08:00:2b:01:02:03", "ff:ff:ff:ff:ff:ff"}},
	{"macaddr8", []string{"08:00:2b:01:02:03:04:05", "00:00:00:00:00:00:00:00"}},
	{"bit(5)", []string{"00000", "10101", "11111"}},
	{"varbit", []string{"", "0", "00", "1", "101010101010101010101"}},
	{"varbit(9)", []string{"101"}},
	{"point", []string{"(1,-0)", "(NaN,Infinity)", "(0.1,1e300)", "(-Infinity,5e-324)"}},
	{"line", []string{"{1,-1,0}", "{0,1,-0.5}"}},
	{"lseg", []string{"[(1,2),(3,4)]", "[(0,0),(0,0)]"}},
	{"box", []string{"(3,4),(1,2)", "(0.1,0.3),(-0,NaN)"}},
	{"path", []string{"[(1,2),(3,4)]", "((1,2),(3,4))", "[(1,1)]"}},
	{"polygon", []string{"((0,0),(1,0),(0,1))", "((0.1,0.2))"}},
	{"circle", []string{"<(1,2),0.5>", "<(1,2),0>", "<(0,0),Infinity>"}},
	{"tsvector", []string{"'a':1A 'b c':2", "", "'it''s':3 '\\\\':4B,5C"}},
	{"tsquery", []string{"'a' & !'b' <-> 'c':*A", "'x'", "", "'a' <3> 'it''s'"}},
	{"pg_lsn", []string{"0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"}},
	{"pg_snapshot", []string{"10:20:10,14", "1:1:"}},
	{"txid_snapshot", []string{"10:20:10,14", "1:1:"}},
	{"xid", []string{"0", "4294967295"}},
	{"xid8", []string{"0", "18446744073709551615"}},
	{"cid", []string{"0", "4294967295"}},
	{"tid", []string{"(0,0)", "(4294967295,65535)"}},
	{"oid", []string{"0", "4294967295"}},
	{"oidvector", []string{"", "1 2 4294967295"}},
	{"int2vector", []string{"", "1 -2 3"}},
	{"refcursor", []string{"", `a "cursor"`}},
	{"aclitem", []string{"=makeaclitem(10, 10, 'SELECT', true)", "=makeaclitem(0, 10, 'INSERT', false)"}},
	{"regclass", []string{"pg_class", `public."Größe ""x"""`, "-"}},
	{"regcollation", []string{`"C"`, "-"}},
	{"regconfig", []string{"english", "simple"}},
	{"regdictionary", []string{"simple"}},
	{"regnamespace", []string{"public", "pg_catalog", "-"}},
	{"regoper", []string{"pg_catalog.||/", "0"}},
	{"regoperator", []string{"*(integer,integer)", "0"}},
	{"regproc", []string{"now", "-"}},
	{"regprocedure", []string{"lower(text)", "-"}},
	{"regrole", []string{"pg_monitor", "-"}},
	{"regtype", []string{"integer", "public.mood", "-", "text[]"}},
	{"int4range", []string{"[1,5)", "empty", "(,)", "[1,)", "(,7]"}},
	{"int8range", []string{"[1,9223372036854775807)", "empty"}},
	{"numrange", []string{"[1.0,2)", "[1.00,2)", "(1,2]", "(,5)", "[-Infinity,NaN]", "empty"}},
	{"daterange", []string{"[2024-02-29,infinity)", "[-infinity,infinity]", "empty", "(,0044-03-15 BC)"}},
	{"tsrange", []string{"[2024-02-29 01:02:03.000004,infinity]", "(,)"}},
	{"tstzrange", []string{`["2024-03-31 01:30:00+01",infinity]`, `["2024-03-31 01:30:00+01",)`, "empty"}},
	{"int4multirange", []string{"{}", "{[1,3),[5,9)}", "{(,)}", "{(,1),[5,)}"}},
	{"int8multirange", []string{"{}", "{[1,3),[5,9)}"}},
	{"nummultirange", []string{"{}", "{[1.0,2)}", "{[1.00,2),(3,4]}"}},
	{"datemultirange", []string{"{}", "{[2024-02-29,infinity)}"}},
	{"tsmultirange", []string{"{}", "{[2024-02-29 01:02:03.000004,infinity]}"}},
	{"tstzmultirange", []string{"{}", `{(,"2024-03-31 01:30:00+01"),["2024-10-27 02:30:00+02",]}`}},
}

// made are types that a user can make.
var made = []sample{
	{"mood", []string{"sad", "it's \"ok\"", "happy, {very}", ""}},
	{"positive", []string{"1.0", "2.500", "123456789.000"}},
	{"paid", []string{"1.00", "2.5"}},
	{"email", []string{"a@B.example", "A@b.example"}},
	{"short_list", []string{"{1,2}", "{}", "[5:5]={NULL}"}},
	{"pair", []string{"(1.0,a)", "(,)", `(NaN,"x, ""y"" (z)")`, `(2,"")`}},
	{"nest", []string{`("(1.0,a)","{""(2,b)"",NULL,""(,)""}",{},sad)`, "(,,,)", `(,,"{{1.0,2},{3,4}}","it's ""ok""")`}},
	{"pair_over_one", []string{"(2,a)"}},
	{"gone", []string{"(1,3)", "(,)"}},
	{"span", []string{"[-0,0.1]", "empty", "(,NaN]", "[0.30000000000000004,Infinity]"}},
	{"span_multi", []string{"{}", "{[-0,0.1]}"}},
	{"careless", []string{"alice", "Alicia", "Bob", "straße", "STRASSE"}},
}

const madeTypes = `
	CREATE TYPE mood AS ENUM ('sad', 'it''s "ok"', '', 'happy, {very}');
	CREATE DOMAIN positive AS numeric(12, 3) CHECK (value > 0);
	CREATE DOMAIN paid AS positive CHECK (value < 1000);
	CREATE DOMAIN email AS varchar(40) COLLATE "C" CHECK (value LIKE '%@%');
	CREATE DOMAIN short_list AS integer[] CHECK (cardinality(value) < 3);
	CREATE TYPE pair AS (n numeric, t text);
	CREATE TYPE nest AS (p pair, ps pair[], ds positive[], m mood);
	CREATE DOMAIN pair_over_one AS pair CHECK ((value).n > 1);
	CREATE TYPE gone AS (a int, b text, c int); ALTER TYPE gone DROP ATTRIBUTE b;
	CREATE TYPE span AS RANGE (subtype = float8, multirange_type_name = span_multi);
	CREATE COLLATION nobody_cares (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
	CREATE DOMAIN careless AS text COLLATE nobody_cares;
	CREATE TABLE "Größe ""x""" (a int);`

// extended are types of extensions that come with PostgreSQL.
var extended = map[string][]sample{
	"hstore": {{"hstore", []string{`"a, b"=>"c=>d", e=>NULL`, "", `"q\"uote"=>"\\", ""=>""`}}},
	"citext": {{"citext", []string{"MiXed", "mixed", "", "É", "b"}}},
	"ltree":  {{"ltree", []string{"a.b.c", "", "A"}}, {"lquery", []string{"*.a|b*@.!c{1,2}"}}, {"ltxtquery", []string{"a & !b%"}}},
	"cube":   {{"cube", []string{"(1, -0)", "(0.1,2),(3,4)", "(NaN)", "()"}}},
	"seg":    {{"seg", []string{"1.0 .. 2.00", "~3.1", "5 .."}}},
	"isn":    {{"isbn13", []string{"978-0-393-04002-9"}}, {"issn", []string{"1436-4522"}}},
}

// spatial are PostGIS's.
var spatial = []sample{
	{"geometry", []string{"POINT(0.1 0.30000000000000004)", "POINT EMPTY", "SRID=4326;POINTZM(1 2 3 -0)", "MULTIPOLYGON(((0 0,1 0,1 1,0 0)),EMPTY)", "GEOMETRYCOLLECTION(POINT(1 1),CIRCULARSTRING(0 0,1 1,2 0))", "LINESTRING(1e300 5e-324,0 0)"}},
	{"geometry(PointZ,3857)", []string{"SRID=3857;POINT Z (1.1 2.2 3.3)"}},
	{"geography", []string{"POINT(-179.99999999999997 89.9)", "POLYGON((0 0,1 0,1 1,0 0))"}},
	{"geography(Point,4326)", []string{"POINT(12.345678901234567 1)"}},
	{"box2d", []string{"BOX(1 2,3 4)"}},
	{"box3d", []string{"BOX3D(0.1 2 3,4 5 6)"}},
}

// Every type of PostgreSQL's own that a column can have is among the samples, or is
// one whose values PostgreSQL itself does not take.
func TestEveryBuiltinTypeHasASample(t *testing.T) {
	t.Parallel()
	db := testkit.Session(t, testkit.Database(t))
	var have []string
	for _, s := range builtin {
		have = append(have, s.typ)
	}
	require.Empty(t, testkit.Strings(t, db, `
		SELECT t.typname::text FROM pg_type t
		 WHERE t.typnamespace = 'pg_catalog'::regnamespace AND t.typtype IN ('b', 'r', 'm', 'e', 'd') AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)
		   AND NOT t.oid IN (SELECT to_regtype(h) FROM unnest($1::text[]) h) AND t.typname <> ALL ($2)`, have, unreadable), "these types have no sample")
	for _, typ := range unreadable {
		_, err := db.Exec(t.Context(), `SELECT ''::`+typ)
		require.Equal(t, "0A000", side.SQLState(err), typ)
	}
}

// What PostgreSQL does not take back is quarantined in its words, and the rest goes on.
func TestValuesThatNobodyCanWriteAreQuarantined(t *testing.T) {
	w := newWorld(t, `CREATE TABLE trees (id int PRIMARY KEY, tree pg_node_tree)`, "public.trees")
	w.onSource(`INSERT INTO trees SELECT 1, adbin FROM pg_attrdef LIMIT 1; INSERT INTO trees SELECT 2, ev_action FROM pg_rewrite LIMIT 1; INSERT INTO trees VALUES (3, NULL)`)
	w.drain()
	const reason = "cannot accept a value of type pg_node_tree"
	require.Equal(t, []string{"quarantined (1): " + reason, "quarantined (2): " + reason}, w.setAside())
	require.Equal(t, []string{"3"}, testkit.Strings(t, w.R, `SELECT id::text FROM trees`))
}

func TestGuarantee8_EveryTypeSurvivesTheTrip(t *testing.T) {
	samples := append(slices.Clone(builtin), made...)
	schema := madeTypes
	db := testkit.Session(t, testkit.Database(t))
	for _, extension := range testkit.Strings(t, db, `SELECT name FROM pg_available_extensions ORDER BY name`) {
		if known, ok := extended[extension]; ok {
			samples = append(samples, known...)
			schema += "CREATE EXTENSION " + extension + ";"
		}
	}
	carry(t, schema, samples)
}

func TestGuarantee8_PostGIS(t *testing.T) {
	db := testkit.Session(t, testkit.Database(t))
	if !testkit.Value[bool](t, db, `SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'postgis')`) {
		t.Skip("the server has no PostGIS: deploy/need postgis installs it (Debian: postgresql-15-postgis-3)")
	}
	carry(t, "CREATE EXTENSION postgis;", spatial)
}

// carry sends every sample as a column, as arrays of several shapes, and in a
// composite, and each that has an order as a key too: as captured, and as a backfill.
func carry(t *testing.T, schema string, samples []sample) {
	schema += "CREATE TABLE everything (id int PRIMARY KEY);"
	rows := 8
	var columns, names []string
	for i, s := range samples {
		rows = max(rows, len(s.values))
		schema += fmt.Sprintf(`CREATE TYPE pack_%d AS (v %s, a %[2]s[]);`, i, s.typ)
		columns = append(columns, fmt.Sprintf("ADD COLUMN c%d %s, ADD COLUMN a%[1]d %[2]s[], ADD COLUMN p%[1]d pack_%[1]d", i, s.typ))
		names = append(names, fmt.Sprintf("c%d", i), fmt.Sprintf("a%d", i), fmt.Sprintf("p%d", i))
		// A type without an order can be no key, and PostgreSQL says so.
		schema += fmt.Sprintf("DO $$ BEGIN CREATE TABLE k%d (k %s PRIMARY KEY, v int); EXCEPTION WHEN undefined_object THEN NULL; END $$;", i, s.typ)
	}
	schema += "ALTER TABLE everything " + strings.Join(columns, ", ") + ";"
	w := newWorldOf(t, Settings{PageRows: 3}, schema, schema)
	keyed := map[int]string{}
	var tables []string
	for i, s := range samples {
		name := fmt.Sprintf("public.k%d", i)
		if !testkit.Value[bool](t, w.S, `SELECT to_regclass($1) IS NOT NULL`, name) {
			continue
		}
		d, err := w.From.Describe(t.Context(), name)
		require.NoError(t, err)
		if strings.HasPrefix(s.typ, "reg") {
			require.Contains(t, d.Problem, "reg* type")
			continue
		}
		require.Empty(t, d.Problem)
		keyed[i] = name
		tables = append(tables, name)
	}
	tables = append(tables, "public.everything")
	for _, name := range tables {
		w.Configure(name, control.TableChange{CapturedFrom: []string{testkit.Source}})
	}
	w.Setup()

	for n := range rows {
		var cells []string
		for i, s := range samples {
			cells = append(cells, s.cells(i, n)...)
		}
		w.onSource(fmt.Sprintf("INSERT INTO everything (id, %s) VALUES (%d, %s)", strings.Join(names, ", "), n, strings.Join(cells, ", ")))
	}
	w.onSource(`INSERT INTO everything (id) SELECT -1`)
	for i, s := range samples {
		if keyed[i] == "" {
			continue
		}
		for n := range s.values {
			w.onSource(fmt.Sprintf("INSERT INTO k%d VALUES (%s, %d) ON CONFLICT DO NOTHING", i, s.literal(n), n))
		}
	}
	w.drain()
	require.Empty(t, w.setAside())
	w.equalInside(names, samples, keyed)

	// Keys are captured whatever the session's settings: changed, gone, and come back.
	w.onSource(`SET timezone = 'Asia/Kathmandu'; SET datestyle = 'SQL, DMY'; SET intervalstyle = 'sql_standard'; SET extra_float_digits = -5; SET bytea_output = 'escape'`)
	for i := range keyed {
		w.onSource(fmt.Sprintf("UPDATE k%d SET v = v + 100; DELETE FROM k%[1]d WHERE v = 101", i))
	}
	w.onSource(`UPDATE everything SET id = id + 0`)
	w.onSource(`RESET timezone; RESET datestyle; RESET intervalstyle; RESET extra_float_digits; RESET bytea_output`)
	w.drain()
	require.Empty(t, w.setAside())
	w.equalInside(names, samples, keyed)

	// As a backfill, over what a receiver lacks and has of another kind.
	for i := range keyed {
		w.onReceiver(fmt.Sprintf("DELETE FROM k%d WHERE v %% 2 = 0; UPDATE k%[1]d SET v = -1", i))
	}
	w.onReceiver(`DELETE FROM everything WHERE id % 3 = 0; UPDATE everything SET ` + strings.Join(names, " = NULL, ") + ` = NULL WHERE id % 3 = 1`)
	for _, name := range tables {
		id := w.Request(name).ID
		w.walk(id)
		require.Len(t, w.staged(id), testkit.Value[int](t, w.S, `SELECT count(*) FROM `+name), name)
		w.Approve(id)
		w.release(id, 100)
	}
	w.applyAll()
	require.Empty(t, w.setAside())
	w.equalInside(names, samples, keyed)
	id := w.Request("public.everything").ID
	w.walk(id)
	w.classify(id)
	require.Equal(t, w.Now(id).Staged, w.Now(id).Effects[backfill.Identical])
}

// literal is the n-th value as SQL.
func (s sample) literal(n int) string {
	v := s.values[n%len(s.values)]
	if sql, ok := strings.CutPrefix(v, "="); ok {
		return sql
	}
	return "'" + strings.ReplaceAll(v, "'", "''") + "'::" + s.typ
}

// cells are row n's value, array and composite of sample i.
func (s sample) cells(i, n int) []string {
	var all []string
	for v := range s.values {
		all = append(all, s.literal(v))
	}
	array := func(elements ...string) string { return "ARRAY[" + strings.Join(elements, ", ") + "]::" + s.typ + "[]" }
	var a string
	switch n % 4 {
	case 0:
		a = "'{}'::" + s.typ + "[]"
	case 1:
		// Bounds of its own: PostgreSQL has no other way to say so.
		a = fmt.Sprintf("('[-1:%d]=' || %s::text)::%s[]", len(all)-1, array(append(all, "NULL")...), s.typ)
	case 2:
		a = fmt.Sprintf("ARRAY[%s, %s]", array(s.literal(n), "NULL"), array("NULL", s.literal(n+1)))
	default:
		a = "NULL"
	}
	pack := fmt.Sprintf("ROW(%s, %s)::pack_%d", s.literal(n), a, i)
	return []string{s.literal(n), a, pack}
}

// equalInside compares every cell by its text, and, where both databases have the
// type under one number, by what is stored.
func (w *world) equalInside(names []string, samples []sample, keyed map[int]string) {
	w.Helper()
	for _, db := range []func(string, ...any){w.onSource, w.onReceiver} {
		db(`SET extra_float_digits = 3; SET timezone = 'UTC'; SET intervalstyle = 'postgres'`)
	}
	stored := map[string]bool{}
	for _, typ := range testkit.Strings(w, w.S, `SELECT oid::regtype::text FROM pg_type WHERE oid < 10000 AND typsend <> 0 AND typname NOT LIKE 'reg%'`) {
		stored[typ] = true
	}
	look := func(c, typ string) string {
		text := fmt.Sprintf("CASE WHEN %s IS DISTINCT FROM NULL THEN md5(concat(%[1]s)) ELSE 'NULL' END", c)
		base, _, _ := strings.Cut(typ, "(")
		if stored[base] {
			text += fmt.Sprintf(" || md5(record_send(ROW(%s)))", c)
		}
		return text
	}
	var looks []string
	for n, c := range names {
		typ := samples[n/3].typ
		if n%3 == 2 {
			typ = ""
		}
		looks = append(looks, look(c, typ))
	}
	cells := func(db *pgx.Conn) [][]string {
		rows, err := db.Query(w.Context(), `SELECT ARRAY[`+strings.Join(looks, ", ")+`] FROM everything ORDER BY id`)
		require.NoError(w, err)
		out, err := pgx.CollectRows(rows, pgx.RowTo[[]string])
		require.NoError(w, err)
		return out
	}
	here, there := cells(w.S), cells(w.R)
	require.Equal(w, len(here), len(there))
	for row := range here {
		for n, c := range names {
			require.Equal(w, here[row][n], there[row][n], "row %d, column %s of type %s", row, c, samples[n/3].typ)
		}
	}
	for i := range keyed {
		sql := fmt.Sprintf("SELECT %s || ' ' || v FROM k%d ORDER BY v", look("k", samples[i].typ), i)
		require.Equal(w, testkit.Strings(w, w.S, sql), testkit.Strings(w, w.R, sql), "keys of type %s", samples[i].typ)
	}
}

// Values that are large: 50 MB of text, all the digits a number can have.
func TestGuarantee8_LargeValues(t *testing.T) {
	w := newWorld(t, `CREATE TABLE large (id int PRIMARY KEY, t text, b bytea, n numeric, a text[])`, "public.large")
	w.onSource(`INSERT INTO large VALUES (1, repeat('Ω and "so" \ on,', 3200000), decode(repeat('00ff5c27', 500000), 'hex'), repeat('9', 131072)::numeric + ('0.' || repeat('7', 16383))::numeric, NULL)`)
	w.onSource(`INSERT INTO large VALUES (2, '', '', ('-0.' || repeat('0', 16382) || '1')::numeric, array_fill('x"{,}'::text, ARRAY[100000], ARRAY[-7]))`)
	w.drain()
	require.Empty(t, w.setAside())
	const look = `SELECT id || md5(t) || md5(b) || md5(numeric_send(n)) || coalesce(md5(array_send(a)), '-') FROM large ORDER BY id`
	require.Equal(t, testkit.Strings(t, w.S, look), testkit.Strings(t, w.R, look))
	w.onReceiver(`DELETE FROM large`)
	id := w.Request("public.large").ID
	w.walk(id)
	w.Approve(id)
	w.release(id, 10)
	w.applyAll()
	require.Equal(t, testkit.Strings(t, w.S, look), testkit.Strings(t, w.R, look))
}

// A type whose cast to text, or from it, is a function of its own keeps what its
// output function prints, also where IS NOT NULL does not mean what it says.
func TestGuarantee8_TypesWithCastsOfTheirOwn(t *testing.T) {
	const schema = `
		CREATE TYPE point3 AS (x int, y int, z int);
		CREATE FUNCTION point3_text(point3) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'a point' $$;
		CREATE FUNCTION text_point3(text) RETURNS point3 LANGUAGE sql IMMUTABLE AS $$ SELECT ROW(0, 0, 0)::point3 $$;
		CREATE CAST (point3 AS text) WITH FUNCTION point3_text(point3);
		CREATE CAST (text AS point3) WITH FUNCTION text_point3(text);
		CREATE TABLE points (id int PRIMARY KEY, p point3);
		CREATE TABLE at (p point3 PRIMARY KEY, v int)`
	w := newWorld(t, schema, "public.points", "public.at")
	w.onSource(`INSERT INTO points VALUES (1, ROW(1, 2, 3)), (2, ROW(1, NULL, 3)), (3, ROW(NULL, NULL, NULL)), (4, NULL);
		INSERT INTO at VALUES (ROW(1, 2, 3), 1), (ROW(1, 2, 4), 2)`)
	w.drain()
	w.onSource(`UPDATE at SET v = 3 WHERE v = 1; DELETE FROM at WHERE v = 2`)
	w.drain()
	require.Empty(t, w.setAside())
	const all = `SELECT id || ' ' || (p IS DISTINCT FROM NULL) || ' ' || coalesce((p).x::text, '-') || coalesce((p).y::text, '-') FROM points
		UNION ALL SELECT concat('at ', (p).x, (p).y, (p).z, ' ', v) FROM at ORDER BY 1`
	require.Equal(t, testkit.Strings(t, w.S, all), testkit.Strings(t, w.R, all))
	id := w.Request("public.points").ID
	w.walk(id)
	w.classify(id)
	require.Equal(t, int64(4), w.Now(id).Effects[backfill.Identical])
}

// The type "char" is a byte of any value; what is above 127 is no text before
// PostgreSQL 16, which writes it as three octal digits.
func TestGuarantee8_BytesThatAreNoText(t *testing.T) {
	const schema = `CREATE DOMAIN flag AS "char"; CREATE TABLE bytes (id int PRIMARY KEY, c "char", f flag); CREATE TABLE at ("key" "char" PRIMARY KEY, v int)`
	w := newWorldOf(t, Settings{PageRows: 50}, schema, schema, "public.bytes", "public.at")
	w.onSource(`INSERT INTO bytes SELECT n, n::"char", (-n - 1)::"char" FROM generate_series(-128, 127) n; INSERT INTO bytes VALUES (999); INSERT INTO at SELECT c, id FROM bytes WHERE id % 16 = 0`)
	w.drain()
	w.onSource(`UPDATE at SET v = v + 1000 WHERE v % 3 = 0; DELETE FROM at WHERE v IN (-128, -64)`)
	w.drain()
	require.Empty(t, w.setAside())
	const look = `SELECT id || ' ' || encode(charsend(c), 'hex') || encode(charsend(f), 'hex') FROM bytes WHERE id < 999 UNION ALL SELECT encode(charsend("key"), 'hex') || v FROM at ORDER BY 1`
	require.Equal(t, testkit.Strings(t, w.S, look), testkit.Strings(t, w.R, look))
	w.onReceiver(`DELETE FROM at; DELETE FROM bytes`)
	for _, table := range []string{"public.bytes", "public.at"} {
		id := w.Request(table).ID
		w.walk(id)
		w.staged(id)
		w.Approve(id)
		w.release(id, 1000)
	}
	w.applyAll()
	require.Equal(t, testkit.Strings(t, w.S, look), testkit.Strings(t, w.R, look))
}

// PostgreSQL holds 1,600 columns in a table and 1,664 in a query.
func TestGuarantee8_WideTables(t *testing.T) {
	const schema = `
		CREATE TABLE wide (id int PRIMARY KEY);
		DO $$ BEGIN FOR i IN 1..1500 LOOP EXECUTE format('ALTER TABLE wide ADD COLUMN c%s smallint', i); END LOOP; END $$`
	w := newWorld(t, schema, "public.wide")
	w.onSource(`INSERT INTO wide (id, c1, c1500) SELECT g, g, -g FROM generate_series(1, 30) g`)
	w.drain()
	w.Equal("wide")
	w.onReceiver(`UPDATE wide SET c700 = 7 WHERE id < 4; DELETE FROM wide WHERE id = 10`)
	id := w.Request("public.wide").ID
	w.walk(id)
	w.classify(id)
	require.Equal(t, map[backfill.Effect]int64{backfill.Insert: 1, backfill.Overwrite: 3, backfill.Identical: 26, backfill.Unknown: 0}, w.Now(id).Effects)
	w.ApproveDiffering(id)
	w.release(id, 10)
	w.drain()
	w.Equal("wide")
}
