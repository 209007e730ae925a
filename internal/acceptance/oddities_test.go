//go:build linux

package acceptance

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// oddity is a table that is no textbook's.
type oddity struct {
	name   string // as --table takes it
	ddl    string // makes it on both sides
	onB    string // makes it on b, where it differs there
	a, b   string // the rows of either side before capture begins
	early  []string
	during []string // changes on a while its rows await review, each a transaction; early: before it is requested
	needs  string   // SQL that says whether the server has what it takes
}

// oddities of keys, names, relations and constraints.
var oddities = []oddity{
	{
		name: "public.lines", // text and number, with all that text can hold
		ddl:  `CREATE TABLE lines (book text, page integer, body text, PRIMARY KEY (book, page))`,
		a: `INSERT INTO lines VALUES ('Ábaco', 1, 'x'), ('abaco', 1, ''), ('ABACO', 2, NULL), ('zebra', 10, 'NULL'), ('Zebra', -1, E'a\nb'),
			('ñandú', 2147483647, E'\t'), ('', 0, '"'), (' leading', 1, '{}'), ('trailing ', 1, '\'), (E'tab\t', 1, ''''), (E'new\nline', 1, '{a,"b"}'),
			('quote"''\{},', 1, '\N'), ('NULL', 1, '\.'), ('null', -2147483648, '()'), ('😀', 1, ',,'), (U&'e\0301', 1, 'two characters'), ('é', 1, 'one');
			INSERT INTO lines SELECT md5(n::text), n, 'line ' || n FROM generate_series(1, 3000) n`,
		b:     `INSERT INTO lines VALUES ('Ábaco', 1, 'y'), ('zebra', 10, 'NULL'), ('', 0, NULL), ('null', -2147483648, '()')`,
		early: []string{`UPDATE lines SET body = body || '!' WHERE page = 1`, `UPDATE lines SET page = 3 WHERE book = 'ABACO'`},
		during: []string{`DELETE FROM lines WHERE book IN ('Ábaco', '', 'é')`, `INSERT INTO lines VALUES ('', 0, 'again'), ('ÁBACO', 1, 'new')`,
			`UPDATE lines SET book = upper(book) WHERE page > 2000`},
	},
	{
		name: `"Order Items"."select"`,
		ddl: `CREATE SCHEMA "Order Items"; CREATE TABLE "Order Items"."select" ("Größe" numeric(6, 3), "from" integer, "we""ird" text, "dot.ted" date, "To" text, "$1" boolean,
			PRIMARY KEY ("To", "from"))`,
		onB: `CREATE SCHEMA "Order Items"; CREATE TABLE "Order Items"."select" ("only here" text DEFAULT 'kept', "To" text, "$1" boolean, "dot.ted" date, "we""ird" text,
			"from" integer, "Größe" numeric(6, 3), PRIMARY KEY ("To", "from"))`,
		a: `INSERT INTO "Order Items"."select" SELECT n / 8.0, n, 'a "b" ' || n, date '2024-02-29' + n, 'To ' || n % 3, n % 2 = 0 FROM generate_series(1, 30) n`,
		b: `INSERT INTO "Order Items"."select" ("from", "To") SELECT n, 'To ' || n % 3 FROM generate_series(1, 10) n`,
		during: []string{`UPDATE "Order Items"."select" SET "we""ird" = NULL, "from" = -"from" WHERE "from" % 4 = 0`,
			`DELETE FROM "Order Items"."select" WHERE "from" = 7`},
	},
	{
		name:   "public." + strings.Repeat("long_name_", 6) + "one", // 63 bytes, twice
		ddl:    accounts(strings.Repeat("long_name_", 6)+"one", 0) + accounts(strings.Repeat("long_name_", 6)+"two", 0),
		a:      `INSERT INTO ` + strings.Repeat("long_name_", 6) + `one VALUES (1, 'one', 1)`,
		during: []string{`INSERT INTO ` + strings.Repeat("long_name_", 6) + `one VALUES (2, 'one', 1)`},
	},
	{
		name:   "public." + strings.Repeat("long_name_", 6) + "two",
		a:      `INSERT INTO ` + strings.Repeat("long_name_", 6) + `two VALUES (1, 'two', 2)`,
		during: []string{`INSERT INTO ` + strings.Repeat("long_name_", 6) + `two VALUES (2, 'two', 2)`},
	},
	{
		name: "public.words",
		ddl:  `CREATE TABLE words (word text COLLATE "de-x-icu" PRIMARY KEY, n integer)`,
		a: `INSERT INTO words VALUES ('Äpfel', 1), ('apfel', 2), ('Apfel', 3), ('zoo', 4), ('Öl', 5), ('öl', 6), ('straße', 7), ('strasse', 8), ('STRASSE', 9), ('-', 10);
			INSERT INTO words SELECT chr(192 + n) || n, n FROM generate_series(1, 200) n`,
		b:      `INSERT INTO words VALUES ('apfel', 0), ('Öl', 5)`,
		during: []string{`UPDATE words SET word = upper(word) WHERE n < 3`, `DELETE FROM words WHERE word = 'straße'`},
		needs:  `SELECT EXISTS (SELECT FROM pg_collation WHERE collname = 'de-x-icu')`,
	},
	{
		name: "public.logins", // keys that are equal and spelled otherwise
		ddl: `CREATE COLLATION nobody_cares (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
			CREATE TABLE logins (name text COLLATE nobody_cares PRIMARY KEY, n integer)`,
		a:      `INSERT INTO logins VALUES ('alice', 1), ('Bob', 2), ('CAROL', 3), ('dave', 4), ('Eve', 5)`,
		b:      `INSERT INTO logins VALUES ('ALICE', 1), ('bob', 2)`,
		early:  []string{`UPDATE logins SET name = 'Alice' WHERE name = 'alice'`},
		during: []string{`UPDATE logins SET name = 'carol' WHERE name = 'carol'`, `DELETE FROM logins WHERE name = 'DAVE'; INSERT INTO logins VALUES ('Dave', 44)`},
		needs:  `SELECT EXISTS (SELECT FROM pg_collation WHERE collname = 'de-x-icu')`,
	},
	{
		name:   "public.coded", // no primary key, but a unique index will do
		ddl:    `CREATE TABLE coded (v text, code text NOT NULL, gone integer, w text); CREATE UNIQUE INDEX ON coded (code) INCLUDE (v); ALTER TABLE coded DROP COLUMN gone`,
		onB:    `CREATE TABLE coded (code text NOT NULL UNIQUE, w text, v text)`,
		a:      `INSERT INTO coded SELECT 'v' || n, 'c' || n, 'w' FROM generate_series(1, 20) n`,
		b:      `INSERT INTO coded SELECT 'c' || n FROM generate_series(1, 5) n`,
		during: []string{`UPDATE coded SET code = 'd' || code WHERE v LIKE 'v1%'`},
	},
	{
		name:   "public.totals",
		ddl:    `CREATE TABLE totals (gross numeric GENERATED ALWAYS AS (net + tax) STORED, id integer PRIMARY KEY, net numeric, tax numeric)`,
		a:      `INSERT INTO totals (id, net, tax) SELECT n, n * 1.10, n / 3.0 FROM generate_series(1, 20) n`,
		b:      `INSERT INTO totals (id, net, tax) SELECT n, 0, 0 FROM generate_series(1, 5) n`,
		during: []string{`UPDATE totals SET net = net + 1 WHERE id % 3 = 0`, `UPDATE totals SET id = id + 100 WHERE id = 4`},
	},
	{
		name:   "public.numbered",
		ddl:    `CREATE TABLE numbered (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)`,
		a:      `INSERT INTO numbered (v) SELECT 'v' || n FROM generate_series(1, 20) n`,
		b:      `INSERT INTO numbered (v) SELECT 'w' || n FROM generate_series(1, 5) n`,
		during: []string{`UPDATE numbered SET v = 'u' WHERE id % 3 = 0`, `DELETE FROM numbered WHERE id = 20; INSERT INTO numbered (v) VALUES ('new')`},
	},
	{
		name:   "public.stamped", // the identity is not the key
		ddl:    `CREATE TABLE stamped (code text PRIMARY KEY, serial bigint GENERATED ALWAYS AS IDENTITY, v text)`,
		a:      `INSERT INTO stamped (code, v) SELECT 'c' || n, 'v' || n FROM generate_series(1, 20) n`,
		b:      `INSERT INTO stamped (code, v) SELECT 'c' || n, 'w' || n FROM generate_series(3, 5) n`,
		early:  []string{`DELETE FROM stamped WHERE code = 'c4'; INSERT INTO stamped (code, v) VALUES ('c4', 'anew')`},
		during: []string{`UPDATE stamped SET v = 'u' WHERE code > 'c3'`, `DELETE FROM stamped WHERE code = 'c8'`, `INSERT INTO stamped (code, v) VALUES ('c8', 'anew')`},
	},
	{
		name: "public.events", // partitioned here, plain there
		ddl: `CREATE TABLE events (day date, id integer, v text, PRIMARY KEY (day, id)) PARTITION BY RANGE (day);
			CREATE TABLE events_2023 PARTITION OF events FOR VALUES FROM ('2023-01-01') TO ('2024-01-01');
			CREATE TABLE events_2024 PARTITION OF events FOR VALUES FROM ('2024-01-01') TO ('2025-01-01') PARTITION BY LIST (day);
			CREATE TABLE events_2024_leap PARTITION OF events_2024 FOR VALUES IN ('2024-02-29');
			CREATE TABLE events_2024_rest PARTITION OF events_2024 DEFAULT;
			CREATE TABLE events_old (v text, gone text, id integer NOT NULL, day date NOT NULL);
			ALTER TABLE events_old DROP COLUMN gone; ALTER TABLE events ATTACH PARTITION events_old FOR VALUES FROM (MINVALUE) TO ('2023-01-01')`,
		onB:   `CREATE TABLE events (day date, id integer, v text, PRIMARY KEY (day, id))`,
		a:     `INSERT INTO events SELECT date '2022-06-01' + n * 20, n, 'v' || n FROM generate_series(1, 40) n; INSERT INTO events VALUES ('2024-02-29', 1, 'leap')`,
		b:     `INSERT INTO events SELECT date '2022-06-01' + n * 20, n, 'w' || n FROM generate_series(1, 15) n`,
		early: []string{`UPDATE events SET day = '2024-02-29' WHERE id IN (3, 4)`},
		during: []string{`UPDATE events SET day = day + 365 WHERE id < 12 AND day < '2023-12-01'`, `DELETE FROM events_2023 WHERE id % 5 = 0`, `INSERT INTO events_old (id, day, v) VALUES (99, '2000-01-01', 'direct')`,
			`UPDATE events SET v = 'u' WHERE day = '2024-02-29'`},
	},
	{
		name: "public.people", // parents after children in key order
		ddl:  `CREATE TABLE people (id integer PRIMARY KEY, boss integer REFERENCES people, name text)`,
		a:    `INSERT INTO people SELECT n, nullif(n % 50 + n + 1, n + 1), 'p' || n FROM generate_series(50, 100) n WHERE false; INSERT INTO people SELECT n, CASE WHEN n < 300 THEN n + 1 END, 'p' || n FROM generate_series(1, 300) n`,
		b:    `INSERT INTO people VALUES (300, NULL, 'p300')`,
		during: []string{`UPDATE people SET boss = 1 WHERE id = 300; UPDATE people SET boss = NULL WHERE id = 150`,
			`INSERT INTO people VALUES (301, NULL, 'new'); UPDATE people SET boss = 301 WHERE id = 299; UPDATE people SET boss = NULL WHERE boss = 2; DELETE FROM people WHERE id = 2`},
	},
	{
		name: "public.left_hands", // each refers to the other
		ddl: `CREATE TABLE left_hands (id integer PRIMARY KEY, other integer NOT NULL); CREATE TABLE right_hands (id integer PRIMARY KEY, other integer NOT NULL);
			ALTER TABLE left_hands ADD FOREIGN KEY (other) REFERENCES right_hands DEFERRABLE INITIALLY DEFERRED;
			ALTER TABLE right_hands ADD FOREIGN KEY (other) REFERENCES left_hands DEFERRABLE INITIALLY DEFERRED`,
		a: `INSERT INTO left_hands SELECT n, n FROM generate_series(1, 50) n; INSERT INTO right_hands SELECT n, n FROM generate_series(1, 50) n`,
		b: `INSERT INTO left_hands SELECT n, n FROM generate_series(1, 5) n; INSERT INTO right_hands SELECT n, n FROM generate_series(1, 5) n`,
		during: []string{`INSERT INTO left_hands VALUES (60, 61), (61, 60); INSERT INTO right_hands VALUES (60, 60), (61, 61)`,
			`DELETE FROM left_hands WHERE id = 7; DELETE FROM right_hands WHERE id = 7`, `UPDATE left_hands SET other = 9 WHERE id = 8`},
	},
	{name: "public.right_hands"},
	{
		name: "public.albums",
		ddl: `CREATE TABLE albums (id integer PRIMARY KEY, title text);
			CREATE TABLE tracks (album integer REFERENCES albums ON DELETE CASCADE ON UPDATE CASCADE, n integer, title text, PRIMARY KEY (album, n))`,
		a:     `INSERT INTO albums SELECT n, 'album ' || n FROM generate_series(1, 40) n; INSERT INTO tracks SELECT a, n, 'track ' || n FROM generate_series(1, 40) a, generate_series(1, 5) n`,
		b:     `INSERT INTO albums SELECT n, 'album ' || n FROM generate_series(1, 10) n; INSERT INTO tracks SELECT a, n, 'old' FROM generate_series(1, 10) a, generate_series(1, 3) n`,
		early: []string{`DELETE FROM albums WHERE id IN (2, 22)`, `UPDATE albums SET id = 103 WHERE id = 3`},
		during: []string{`DELETE FROM albums WHERE id IN (4, 24)`, `UPDATE albums SET id = 105 WHERE id = 5`, `UPDATE albums SET id = 125 WHERE id = 25`,
			`DELETE FROM albums WHERE id = 26; INSERT INTO albums VALUES (26, 'anew'); INSERT INTO tracks VALUES (26, 1, 'anew')`},
	},
	{name: "public.tracks"},
	{
		name:  "public.seats", // unique values that change hands
		ddl:   `CREATE TABLE seats (id integer PRIMARY KEY, seat integer NOT NULL UNIQUE)`,
		a:     `INSERT INTO seats SELECT n, n FROM generate_series(1, 30) n`,
		b:     `INSERT INTO seats SELECT n, 1 + n % 10 FROM generate_series(1, 10) n`,
		early: []string{`UPDATE seats SET seat = -1 WHERE id = 1; UPDATE seats SET seat = 1 WHERE id = 2; UPDATE seats SET seat = 2 WHERE id = 1`},
		during: []string{`UPDATE seats SET seat = -seat WHERE id BETWEEN 5 AND 8; UPDATE seats SET seat = CASE id WHEN 5 THEN 6 WHEN 6 THEN 7 WHEN 7 THEN 8 ELSE 5 END WHERE id BETWEEN 5 AND 8`,
			`DELETE FROM seats WHERE id = 9; UPDATE seats SET seat = 9 WHERE id = 20`, `UPDATE seats SET id = 31 WHERE id = 30; INSERT INTO seats VALUES (30, 20)`},
	},
	{
		name:   "public.places", // the same at once, in one statement
		ddl:    `CREATE TABLE places (id integer PRIMARY KEY, place integer NOT NULL UNIQUE DEFERRABLE INITIALLY DEFERRED)`,
		a:      `INSERT INTO places SELECT n, n FROM generate_series(1, 30) n`,
		b:      `INSERT INTO places SELECT n, 11 - n FROM generate_series(1, 10) n`,
		during: []string{`UPDATE places SET place = 31 - place`},
	},
	{
		name:  "public.ranks", // the key itself moves on
		ddl:   `CREATE TABLE ranks (rank integer PRIMARY KEY, who text)`,
		a:     `INSERT INTO ranks SELECT n, 'who ' || n FROM generate_series(1, 100) n`,
		b:     `INSERT INTO ranks SELECT n, 'who ' || n FROM generate_series(1, 10) n`,
		early: []string{`UPDATE ranks SET rank = -rank WHERE rank <= 20; UPDATE ranks SET rank = rank - 1000 WHERE rank < -10`},
		during: []string{`UPDATE ranks SET rank = rank + 1000 WHERE rank % 2 = 0`,
			`UPDATE ranks SET rank = 0 WHERE rank = 3; UPDATE ranks SET rank = 3 WHERE rank = 5; UPDATE ranks SET rank = 5 WHERE rank = 0`},
	},
	{
		name:   "public.logs",
		ddl:    accounts("logs", 0),
		a:      `INSERT INTO logs SELECT n, 'v', n FROM generate_series(1, 50) n`,
		b:      `INSERT INTO logs SELECT n, 'w', n FROM generate_series(1, 20) n`,
		during: []string{`INSERT INTO logs VALUES (60, 'before', 0)`, `TRUNCATE logs; INSERT INTO logs VALUES (7, 'anew', 1), (70, 'anew', 2)`, `INSERT INTO logs VALUES (8, 'after', 1)`},
	},
	{
		name: "public.boxes", // truncated together with those that refer to it
		ddl:  `CREATE TABLE boxes (id integer PRIMARY KEY); CREATE TABLE things (id integer PRIMARY KEY, box integer REFERENCES boxes)`,
		a:    `INSERT INTO boxes SELECT generate_series(1, 20); INSERT INTO things SELECT n, n FROM generate_series(1, 20) n`,
		b:    `INSERT INTO boxes SELECT generate_series(1, 10); INSERT INTO things SELECT n, n FROM generate_series(1, 5) n`,
		during: []string{`TRUNCATE boxes CASCADE`,
			`INSERT INTO boxes SELECT generate_series(3, 6); INSERT INTO things SELECT n, n FROM generate_series(3, 6) n`},
	},
	{name: "public.things"},
	{
		name:   "public.heavy",
		ddl:    `CREATE TABLE heavy (id integer PRIMARY KEY, body text, raw bytea)`,
		a:      `INSERT INTO heavy SELECT n, repeat(md5(n::text), 100000), decode(repeat(md5('r' || n), 50000), 'hex') FROM generate_series(1, 4) n`,
		b:      `INSERT INTO heavy VALUES (1, '', '')`,
		during: []string{`UPDATE heavy SET body = body || 'x' WHERE id = 2`},
	},
}

// values are those of a type that a column is tested with.
type values struct {
	typ    string
	list   []string
	respel string // a key equal to the first one, but spelled otherwise
	noKey  bool   // the type has no order, so it can be no key
	needs  string // the extension it comes from
}

// oddTypes are the types, each in a key and as a column of one table that has them
// all.
var oddTypes = []values{
	{typ: "numeric", list: []string{"1.0", "0", "-0.001", "NaN", "Infinity", "-Infinity", "1e131000", "12345678901234567890.123456789", "100", "0.10"}, respel: "1.00"},
	{typ: "numeric(10,2)", list: []string{"1", "-1.5", "12345678.91"}},
	{typ: "real", list: []string{"-0", "NaN", "Infinity", "-Infinity", "1.1", "3.4028235e38", "1e-45"}, respel: "0"},
	{typ: "double precision", list: []string{"-0", "NaN", "Infinity", "-Infinity", "0.1", "1.7976931348623157e308", "5e-324", "0.30000000000000004"}, respel: "0"},
	{typ: "smallint", list: []string{"1", "-32768", "32767"}},
	{typ: "bigint", list: []string{"1", "-9223372036854775808", "9223372036854775807", "0"}},
	{typ: "boolean", list: []string{"true", "false"}},
	{typ: "text", list: []string{"a", "", " ", "NULL", "A", "é", "a,b", `{"a"}`, `\\x`, "\t", "😀"}},
	{typ: "character(5)", list: []string{"ab", "", "abcde", " x", "é"}},
	{typ: "character varying(5)", list: []string{"ab", "", "ab   ", "ab "}},
	{typ: `"char"`, list: []string{"a", "", "Z"}},
	{typ: "name", list: []string{"a", "", "Ünïcode"}},
	{typ: "bytea", list: []string{`\x`, `\x00`, `\x0001ff`, `\x5c78`, `\x61`}},
	{typ: "uuid", list: []string{"00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff", "6BA7B810-9DAD-11D1-80B4-00C04FD430C8"}},
	{typ: "date", list: []string{"2024-02-29", "infinity", "-infinity", "4713-01-01 BC", "5874897-12-31"}},
	{typ: "timestamp", list: []string{"2024-02-29 23:59:59.999999", "infinity", "-infinity", "0044-03-15 12:00:00 BC", "294276-12-31 23:59:59"}},
	{typ: "timestamptz", list: []string{"2024-03-31 01:30:00+01", "infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "2024-10-27 02:30:00.000001+02"}},
	{typ: "timestamptz(0)", list: []string{"2024-03-31 01:30:00+01", "infinity"}},
	{typ: "time", list: []string{"00:00:00", "24:00:00", "12:34:56.789012"}},
	{typ: "timetz", list: []string{"12:00:00+00", "12:00:00-15:59", "24:00:00+05:30"}},
	{typ: "interval", list: []string{"1 day", "-1 year -2 mons +3 days -04:05:06.789", "00:00:00", "178000000 years", "1 mon"}, respel: "24:00:00"},
	{typ: "money", list: []string{"1.10", "-92233720368547758.08", "0"}},
	{typ: "inet", list: []string{"10.0.0.1", "10.0.0.1/8", "::1", "2001:db8::/32"}},
	{typ: "cidr", list: []string{"10.0.0.0/8", "2001:db8::/32", "0.0.0.0/0"}},
	{typ: "macaddr", list: []string{"08:00:2b:01:02:03", "ff:ff:ff:ff:ff:ff"}},
	{typ: "macaddr8", list: []string{"08:00:2b:01:02:03:04:05", "00:00:00:00:00:00:00:00"}},
	{typ: "bit(4)", list: []string{"0000", "1010", "1111"}},
	{typ: "bit varying", list: []string{"", "0", "1", "00", "10101010101"}},
	{typ: "oid", list: []string{"0", "4294967295"}},
	{typ: "pg_lsn", list: []string{"0/0", "FFFFFFFF/FFFFFFFF"}},
	{typ: "xid8", list: []string{"0", "18446744073709551615"}},
	{typ: "jsonb", list: []string{"1.0", "null", `{"b": 1, "a": [1, null, "x\u00e9"]}`, `"text"`, "[]", "12345678901234567890.0123456789"}, respel: "1.00"},
	{typ: "integer[]", list: []string{"{1,2,NULL}", "{}", "[0:2]={1,2,3}", "{{1,2},{3,4}}", "[-1:0][2:3]={{1,2},{3,4}}"}},
	{typ: "text[]", list: []string{`{a,"NULL",NULL,""}`, `{"a,b","{}","\"",\\}`, `{" "}`, `{{a},{b}}`}},
	{typ: "numeric[]", list: []string{"{1.0}", "{1,NaN}", "{Infinity}"}, respel: "{1.00}"},
	{typ: "timestamptz[]", list: []string{`{infinity,"2024-01-01 00:00:00+00"}`, "{}"}},
	{typ: "int4range", list: []string{"[1,5)", "empty", "(,)", "[1,)"}},
	{typ: "numrange", list: []string{"[1.0,2)", "(1,2]", "(,5)"}, respel: "[1.00,2)"},
	{typ: "tstzrange", list: []string{`["2024-01-01 00:00:00+00",infinity]`, `["2024-01-01 00:00:00+00",)`}},
	{typ: "nummultirange", list: []string{"{[1.0,2)}", "{}", "{[1,2),[3,4)}"}, respel: "{[1.00,2)}"},
	{typ: "tsvector", list: []string{"'a':1A 'b c':2", "", "'it''s':3"}},
	{typ: "tsquery", list: []string{"'a' & !'b' <-> 'c':*A", "'x'"}},
	{typ: "mood", list: []string{"so-so", "happy", "Very Sad", "ok, \"fine\""}},
	{typ: "mood[]", list: []string{"{happy,NULL}", `{"Very Sad"}`}},
	{typ: "positive", list: []string{"1.0", "2.50"}, respel: "1.00"},
	{typ: "email", list: []string{"a@b.example", "A@b.example"}},
	{typ: "short_list", list: []string{"{1,2}", "{}"}},
	{typ: "pair", list: []string{"(1.0,a)", `(,)`, `(NaN,"x, ""y""")`, `(2,"")`}, respel: "(1.00,a)"},
	{typ: "pair[]", list: []string{`{"(1.0,a)","(,)"}`, "{}"}},
	{typ: "citext", list: []string{"Ab", "b", "", "é"}, respel: "aB", needs: "citext"},
	{typ: "hstore", list: []string{`"a"=>"1", "b"=>NULL`, "", `"q\"uote"=>"x=>y"`}, needs: "hstore"},
	{typ: "hstore[]", list: []string{`{"\"a\"=>\"1\""}`}, needs: "hstore"},
	{typ: "ltree", list: []string{"a.b.c", "", "A"}, needs: "ltree"},
	{typ: "json", list: []string{`{"b": 1,  "a":2, "b": 3}`, "null", " [1.0, 1e5] ", `"\u0000"`}, noKey: true},
	{typ: "xml", list: []string{"<a>&lt; é</a>", "text <b/> content", "<?xml version=\"1.0\"?><r a='1'/>"}, noKey: true},
	{typ: "point", list: []string{"(1,-0)", "(NaN,Infinity)", "(0.1,1e300)"}, noKey: true},
	{typ: "line", list: []string{"{1,-1,0}"}, noKey: true},
	{typ: "lseg", list: []string{"[(1,2),(3,4)]"}, noKey: true},
	{typ: "box", list: []string{"(3,4),(1,2)"}, noKey: true},
	{typ: "box[]", list: []string{"{(3,4),(1,2);(1,1),(0,0)}"}, noKey: true},
	{typ: "path", list: []string{"[(1,2),(3,4)]", "((1,2),(3,4))"}, noKey: true},
	{typ: "polygon", list: []string{"((0,0),(1,0),(0,1))"}, noKey: true},
	{typ: "circle", list: []string{"<(1,2),0.5>"}, noKey: true},
	{typ: "jsonpath", list: []string{`$."a"[*]?(@ > 1)`}, noKey: true},
	{typ: "pg_snapshot", list: []string{"10:20:10,14"}, noKey: true},
	{typ: "xid", list: []string{"4294967295"}, noKey: true},
	{typ: "tid", list: []string{"(4294967295,65535)"}, noKey: true},
	{typ: "regtype", list: []string{"integer", "public.mood", "-"}, noKey: true},
	{typ: "regclass", list: []string{"public.everything", "pg_class"}, noKey: true},
	{typ: "regprocedure", list: []string{"pg_catalog.lower(text)"}, noKey: true},
	{typ: "int2vector", list: []string{"1 2 3", ""}, noKey: true},
}

const oddTypesDDL = `
	CREATE TYPE mood AS ENUM ('Very Sad', 'so-so', 'happy', 'ok, "fine"');
	CREATE DOMAIN positive AS numeric CHECK (VALUE > 0);
	CREATE DOMAIN email AS text NOT NULL CHECK (VALUE LIKE '%@%');
	CREATE DOMAIN short_list AS integer[] CHECK (cardinality(VALUE) < 3);
	CREATE TYPE pair AS (n numeric, t text);`

// availableTypes drops the types of extensions that the server does not have.
func (s *site) availableTypes() []values {
	s.Helper()
	var have []string
	require.NoError(s, s.a.QueryRow(s.Context(), `SELECT array_agg(name::text) FROM pg_available_extensions`).Scan(&have))
	return slices.DeleteFunc(slices.Clone(oddTypes), func(v values) bool { return v.needs != "" && !slices.Contains(have, v.needs) })
}

func (v values) literal(i int) string {
	return "'" + strings.ReplaceAll(v.list[i%len(v.list)], "'", "''") + "'::" + v.typ
}

// keyed is a table whose key has columns of these types, with as many rows as the
// longest list of values.
func keyed(n int, types ...values) oddity {
	table := fmt.Sprintf("key_%d", n)
	var columns, names, values []string
	rows := 0
	for i, v := range types {
		columns = append(columns, fmt.Sprintf("k%d %s", i, v.typ))
		names = append(names, fmt.Sprintf("k%d", i))
		rows = max(rows, len(v.list))
	}
	key := func(i int) string {
		var parts []string
		for _, v := range types {
			parts = append(parts, v.literal(i))
		}
		return strings.Join(parts, ", ")
	}
	where := func(key string) string { return fmt.Sprintf("(%s) = (%s)", strings.Join(names, ", "), key) }
	for i := range rows {
		values = append(values, fmt.Sprintf("(%s, 'v %d')", key(i), i))
	}
	o := oddity{name: "public." + table, a: "INSERT INTO " + table + " VALUES " + strings.Join(values, ", "),
		ddl: fmt.Sprintf("CREATE TABLE %s (%s, v text, PRIMARY KEY (%s))", table, strings.Join(columns, ", "), strings.Join(names, ", "))}
	if known := values[:rows/2]; len(known) > 0 {
		o.b = "INSERT INTO " + table + " VALUES " + strings.ReplaceAll(strings.Join(known, ", "), "'v ", "'w ")
	}
	if respel := types[0].respel; respel != "" {
		respelt := "'" + respel + "'::" + types[0].typ
		o.early = append(o.early, fmt.Sprintf("UPDATE %s SET k0 = %s WHERE k0 = %[2]s", table, respelt))
		o.during = append(o.during, fmt.Sprintf("UPDATE %s SET k0 = %s, v = 'back' WHERE k0 = %[2]s", table, types[0].literal(0)),
			fmt.Sprintf("UPDATE %s SET k0 = %s WHERE k0 = %[2]s", table, respelt))
	}
	if rows > 2 {
		o.during = append(o.during, fmt.Sprintf("DELETE FROM %s WHERE %s", table, where(key(1))))
	}
	o.during = append(o.during, fmt.Sprintf("UPDATE %s SET v = v || ' changed' WHERE %s", table, where(key(rows-1))))
	if rows > 3 {
		o.during = append(o.during, fmt.Sprintf("DELETE FROM %s WHERE %s", table, where(key(2))),
			fmt.Sprintf("INSERT INTO %s VALUES (%s, 'again')", table, key(2)))
	}
	return o
}

// keyedTables has a table for each type that has equal values of several spellings,
// and for the others a table for a few types each.
func keyedTables(types []values) (all []oddity) {
	var few []values
	add := func(types ...values) { all = append(all, keyed(len(all), types...)) }
	for _, v := range types {
		switch {
		case v.noKey:
		case v.respel != "":
			add(v)
		default:
			if few = append(few, v); len(few) == 4 {
				add(few...)
				few = nil
			}
		}
	}
	if few != nil {
		add(few...)
	}
	return all
}

// everything is one table with a column of each type. Row n has the n-th value of
// each, every seventh is NULL; b has some rows, with the next values.
func everything(types []values) oddity {
	const rows = 40
	row := func(n, shift int) string {
		cells := []string{fmt.Sprint(n)}
		for i, v := range types {
			if (n+i)%7 == 0 && v.typ != "email" {
				cells = append(cells, "NULL")
			} else {
				cells = append(cells, v.literal(n+shift))
			}
		}
		return "(" + strings.Join(cells, ", ") + ")"
	}
	insert := func(to, shift int) string {
		var all []string
		for n := range to {
			all = append(all, row(n, shift))
		}
		return "INSERT INTO everything VALUES " + strings.Join(all, ", ")
	}
	columns, set := []string{"id integer PRIMARY KEY"}, []string{}
	for i, v := range types {
		columns = append(columns, fmt.Sprintf("c%d %s", i, v.typ))
		set = append(set, fmt.Sprintf("c%d = x.c%d", i, i))
	}
	change := func(n, from int) string {
		return fmt.Sprintf("UPDATE everything e SET %s FROM everything x WHERE e.id = %d AND x.id = %d", strings.Join(set, ", "), n, from)
	}
	return oddity{name: "public.everything", ddl: "CREATE TABLE everything (" + strings.Join(columns, ", ") + ")",
		a: insert(rows, 0), b: insert(rows/2, 1), early: []string{change(3, 4), change(33, 34)}, during: []string{change(5, 6), change(35, 36), change(39, 0)}}
}

// Tables that are no textbook's arrive byte for byte, by backfill and by capture.
func TestOddTablesArriveByteForByte(t *testing.T) {
	t.Parallel()
	s := prepareSite(t, setup{})
	all := s.installOddities()
	for _, o := range all {
		s.args = append(s.args, "--table", o.name)
	}
	phase := s.phases()
	s.start()
	phase("started")

	s.apply(all, func(o oddity) []string { return o.early })
	s.drain()
	phase("drained")
	requests := map[string]*request{}
	for _, o := range all {
		requests[o.name] = s.request(o.name)
	}
	phase("requested")
	for _, o := range all {
		requests[o.name] = s.awaitReview(requests[o.name].ID)
		s.requireStagedOnceByKey(requests[o.name])
	}
	phase("staged and read")
	s.apply(all, func(o oddity) []string { return o.during })
	for _, o := range all {
		s.approve(requests[o.name])
	}
	phase("approved")
	for _, o := range all {
		s.awaitFinished(requests[o.name].ID)
	}
	s.drain()
	s.await("nothing to be held", func() (bool, string) {
		var left []string
		for _, c := range list[change](s, "/sites/s/queue", map[string][]string{}) {
			left = append(left, fmt.Sprintf("%s %s %v: %s", c.State, c.Table, c.Key, c.Reason))
		}
		return len(left) == 0, strings.Join(left, "\n")
	})
	phase("released and applied")
	for _, o := range all {
		t.Run(o.name, func(t *testing.T) {
			one := *s
			one.T = t
			one.requireEqual(o.name)
		})
	}
}

// phases returns a function that logs how long a phase has taken.
func (s *site) phases() func(what string) {
	began := time.Now()
	return func(what string) {
		s.Helper()
		s.Logf("%s within %s", what, time.Since(began).Round(10*time.Millisecond))
		began = time.Now()
	}
}

// installOddities makes the tables on both sides and returns them.
func (s *site) installOddities() []oddity {
	s.Helper()
	types := s.availableTypes()
	prepare := oddTypesDDL
	var extensions []string
	for _, v := range types {
		if v.needs != "" && !slices.Contains(extensions, v.needs) {
			extensions = append(extensions, v.needs)
			prepare += "CREATE EXTENSION " + v.needs + ";"
		}
	}
	s.run(s.a, prepare)
	s.run(s.b, prepare)
	all := append(slices.Clone(oddities), everything(types))
	all = append(all, keyedTables(types)...)
	all = slices.DeleteFunc(all, func(o oddity) bool {
		if o.needs == "" {
			return false
		}
		var have bool
		require.NoError(s, s.a.QueryRow(s.Context(), o.needs).Scan(&have))
		return !have
	})
	for _, o := range all {
		s.run(s.a, o.ddl)
		if o.onB == "" {
			o.onB = o.ddl
		}
		s.run(s.b, o.onB)
		s.run(s.a, o.a)
		s.run(s.b, o.b)
	}
	return all
}

// apply makes changes on a, each in a transaction of its own.
func (s *site) apply(all []oddity, which func(oddity) []string) {
	s.Helper()
	for _, o := range all {
		for _, change := range which(o) {
			s.run(s.a, change)
		}
	}
}

// requireStagedOnceByKey is requireStagedOnce for any key.
func (s *site) requireStagedOnceByKey(r *request) {
	s.Helper()
	rows := list[staged](s, path(r.ID)+"/rows", map[string][]string{})
	require.Len(s, rows, int(r.Staged), r.Table)
	seen := map[string]bool{}
	for i, x := range rows {
		require.EqualValues(s, i+1, x.N, r.Table)
		key := fmt.Sprintf("%q", x.Key)
		require.False(s, seen[key], "%s staged %s twice", r.Table, key)
		seen[key] = true
	}
	require.EqualValues(s, s.number(s.a, "SELECT count(*) FROM "+r.Table), r.Staged, "%s: staged rows", r.Table)
}
