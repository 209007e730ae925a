package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

// everything has a column of every kind of type.
const everything = `
	CREATE EXTENSION IF NOT EXISTS hstore;
	CREATE EXTENSION IF NOT EXISTS citext;
	CREATE TYPE mood AS ENUM ('sad', 'it''s "ok"', 'happy, {very}');
	CREATE TYPE pair AS (a int, b text);
	CREATE DOMAIN positive AS numeric(12, 3) CHECK (value > 0);
	CREATE DOMAIN name_of AS varchar(40);
	CREATE TYPE span AS RANGE (subtype = float8);
	CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
	CREATE TABLE everything (
		id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		c_bool bool, c_int2 int2, c_int4 int4, c_int8 int8, c_float4 float4, c_float8 float8, c_numeric numeric, c_numeric2 numeric(20, 5), c_money money,
		c_text text, c_varchar varchar(30), c_char char(12), c_bpchar bpchar, c_name name, c_char1 "char", c_citext citext, c_ci text COLLATE ci,
		c_bytea bytea, c_date date, c_time time, c_timetz timetz, c_timestamp timestamp, c_timestamptz timestamptz(3), c_interval interval,
		c_uuid uuid, c_json json, c_jsonb jsonb, c_xml xml, c_inet inet, c_cidr cidr, c_macaddr macaddr, c_macaddr8 macaddr8,
		c_bit bit(5), c_varbit varbit, c_point point, c_line line, c_lseg lseg, c_box box, c_path path, c_polygon polygon, c_circle circle,
		c_tsvector tsvector, c_tsquery tsquery, c_int4range int4range, c_tstzrange tstzrange, c_span span, c_multi int8multirange,
		c_mood mood, c_pair pair, c_positive positive, c_name_of name_of, c_hstore hstore, c_pg_lsn pg_lsn, c_xid8 xid8, c_oid oid, c_jsonpath jsonpath,
		c_ints int[], c_texts text[], c_matrix int[], c_bounds int[], c_moods mood[], c_pairs pair[], c_domains name_of[], c_json_array json[],
		"Odd ""name""" text, c_generated int GENERATED ALWAYS AS (c_int2 * 2) STORED)`

func TestGuarantee8_EveryTypeSurvivesTheTrip(t *testing.T) {
	w := newWorld(t, everything, "public.everything")
	w.onSource(`SET timezone = 'Asia/Kathmandu'; SET datestyle = 'SQL, DMY'; SET intervalstyle = 'sql_standard'; SET extra_float_digits = -5; SET bytea_output = 'escape'`)
	w.onSource(`INSERT INTO everything (c_int4) VALUES (NULL)`) // NULL everywhere
	w.onSource(`
		INSERT INTO everything (c_bool, c_int2, c_int4, c_int8, c_float4, c_float8, c_numeric, c_numeric2, c_money, c_text, c_varchar, c_char, c_bpchar, c_name, c_char1, c_citext, c_ci,
			c_bytea, c_date, c_time, c_timetz, c_timestamp, c_timestamptz, c_interval, c_uuid, c_json, c_jsonb, c_xml, c_inet, c_cidr, c_macaddr, c_macaddr8, c_bit, c_varbit,
			c_point, c_line, c_lseg, c_box, c_path, c_polygon, c_circle, c_tsvector, c_tsquery, c_int4range, c_tstzrange, c_span, c_multi, c_mood, c_pair, c_positive, c_name_of, c_hstore,
			c_pg_lsn, c_xid8, c_oid, c_jsonpath, c_ints, c_texts, c_matrix, c_bounds, c_moods, c_pairs, c_domains, c_json_array, "Odd ""name""")
		VALUES (true, -32768, -2147483648, -9223372036854775808, '1.1754944e-38', 0.1::float8 + 0.2, '123456789012345678901234567890.1234567890123456789000', 1.5, '-1234.56',
			E'tab\t nl\n cr\r bs\\ q'' dq" Ω 😀 \\N', 'ends with space ', 'pad', 'keeps  ', 'name', 'x', 'MiXed', 'MiXed',
			'\x00ff5c27', '0044-03-15 BC', '23:59:59.999999', '12:00:00.5-03:30', '294276-12-31 23:59:59.999999', '2021-03-28 02:30:00.123+02', '-1 year 2 mons -3 days 04:05:06.789',
			'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"b": 1, "a" :2, "a": 1e2,  "z":"\u00e9"}', '{"b": 1.10, "a": [null, true]}', '<a b="1">x &amp; y</a>', '10.1.2.3/8', '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05',
			B'10101', B'', '(1.1,-0)', '{1,2,3}', '((1,2),(3,4))', '((3,4),(1,2))', '[(1,2),(3,4)]', '((1,2),(3,4),(5,0))', '<(1,2),3>', 'a:1A b:2,3 ''q''''q''', 'a & (b | !c)',
			'[1,10)', '["2021-03-28 02:30:00+02",infinity)', '[0.1,0.3]', '{[1,3),[5,9)}', 'it''s "ok"', '(1,"a, ""b"" (c)")', 1.250, 'name', '"a, b"=>"c=>d", e=>NULL', '16/B374D848', '12345678901', 4294967295, '$.a[*] ? (@.b > 1)',
			'{}', ARRAY['', NULL, 'NULL', 'a,b', '{x}', '"q"', E'\\'], '{{1,2},{3,4}}', '[-2:0]={1,NULL,3}', ARRAY['happy, {very}', 'sad']::mood[], ARRAY[ROW(1, NULL), ROW(NULL, 'x,y')]::pair[], '{a,NULL}', ARRAY['{"a":  1}', 'null']::json[], 'odd')`)
	w.onSource(`
		INSERT INTO everything (c_bool, c_float4, c_float8, c_numeric, c_text, c_varchar, c_char, c_bytea, c_date, c_timestamp, c_timestamptz, c_interval, c_json, c_jsonb, c_xml, c_pair, c_hstore, c_int4range, c_multi, c_mood)
		VALUES (false, '-0', '-0', 'NaN', '', '', '', '', 'infinity', '-infinity', 'infinity', '0', 'null', 'null', '', ROW(NULL, NULL), '', 'empty', '{}', 'sad'),
		       (NULL, 'Infinity', 'NaN', 'Infinity', repeat('long ', 200000), ' ', ' ', decode(repeat('ab', 300000), 'hex'), '-infinity', '4713-01-01 BC', '0001-01-01 BC', '-178000000 years', '[]', '"\\u0041"', 'text only', ROW(1, ''), 'a=>""', '(,)', NULL, NULL)`)
	w.onSource(`RESET ALL`)
	w.drain()
	require.Empty(t, w.setAside())
	same := func() {
		t.Helper()
		for _, db := range []func(string, ...any){w.onSource, w.onReceiver} {
			db(`SET extra_float_digits = 3; SET timezone = 'UTC'; SET intervalstyle = 'postgres'`)
		}
		w.Equal("everything")
		// Not only by text: by what is stored, too.
		const binary = `SELECT encode(sha256(record_send(ROW(c_bool, c_float4, c_float8, c_numeric, c_char, c_bytea, c_timestamptz, c_interval, c_json, c_jsonb, c_point, c_bounds, c_ints, c_texts))), 'hex') FROM everything ORDER BY id`
		require.Equal(t, testkit.Strings(t, w.S, binary), testkit.Strings(t, w.R, binary))
	}
	same()

	// As a backfill, over what a receiver has of another kind, and judged identical afterwards.
	w.onReceiver(`UPDATE everything SET c_float8 = 0, c_text = 'x', c_bounds = NULL, c_json = '{}'; DELETE FROM everything WHERE id = 1`)
	id := w.Request("public.everything").ID
	w.walk(id)
	w.classify(id)
	require.Equal(t, map[backfill.Effect]int64{backfill.Insert: 1, backfill.Overwrite: 3, backfill.Identical: 0, backfill.Unknown: 0}, w.Now(id).Effects)
	w.Approve(id)
	w.release(id, 10)
	w.applyAll()
	require.Empty(t, w.setAside())
	same()
	id = w.Request("public.everything").ID
	w.walk(id)
	w.classify(id)
	require.Equal(t, int64(4), w.Now(id).Effects[backfill.Identical])
}

// A type whose cast to text is a function of its own keeps what its output function
// prints, also where IS NOT NULL does not mean what it says.
func TestGuarantee8_CompositesWithACastOfTheirOwn(t *testing.T) {
	const schema = `
		CREATE TYPE point3 AS (x int, y int, z int);
		CREATE FUNCTION point3_text(point3) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'a point' $$;
		CREATE CAST (point3 AS text) WITH FUNCTION point3_text(point3);
		CREATE TABLE points (id int PRIMARY KEY, p point3)`
	w := newWorld(t, schema, "public.points")
	w.onSource(`INSERT INTO points VALUES (1, ROW(1, 2, 3)), (2, ROW(1, NULL, 3)), (3, ROW(NULL, NULL, NULL)), (4, NULL)`)
	w.drain()
	require.Empty(t, w.setAside())
	const all = `SELECT id || ' ' || (p IS DISTINCT FROM NULL) || ' ' || coalesce((p).x::text, '-') || coalesce((p).y::text, '-') FROM points ORDER BY id`
	require.Equal(t, testkit.Strings(t, w.S, all), testkit.Strings(t, w.R, all))
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
