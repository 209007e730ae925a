package activities

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// try checks a mapping against both sides, each agent in its turn.
func (w *world) try(table string, m backfill.Mapping) *control.MappingTrial {
	w.Helper()
	ctx := w.Context()
	require.NoError(w, m.Check())
	id, err := w.Store.StartTrial(ctx, "test", control.MappingTrial{Site: testkit.Site, Source: testkit.Source, Receiver: testkit.Receiver,
		From: m.SourceOf(table), To: m.TargetOf(table), Mapping: m, Sample: 10})
	require.NoError(w, err)
	for range 2 {
		require.NoError(w, w.from.TryMappings(ctx))
		require.NoError(w, w.to.TryMappings(ctx))
	}
	t, err := w.Store.Trial(ctx, id)
	require.NoError(w, err)
	require.True(w, t.Done(), "%+v", t)
	require.NoError(w, w.Store.EndTrial(ctx, id))
	return t
}

// checked is what a trial found for a table as it is configured now.
func (w *world) checked(table string, t *control.MappingTrial) *control.Checked {
	c := &control.Checked{Made: t.Made, From: t.Source}
	if known, err := w.Store.Table(w.Context(), testkit.Site, table); err == nil {
		c.Version = known.Version
	}
	return c
}

// remap sets a table's mapping.
func (w *world) remap(table string, m backfill.Mapping) {
	w.Helper()
	t := w.try(table, m)
	require.Empty(w, t.Fields)
	w.Configure(table, control.TableChange{CapturedFrom: []string{testkit.Source}, Mapping: &m, Checked: w.checked(table, t)})
	w.Setup()
	w.count()
}

// people is a table whose receiver has another shape.
const people = `CREATE TABLE users (id int PRIMARY KEY, name text NOT NULL, born date, legacy boolean, score numeric)`

const peopleThere = `
	CREATE SCHEMA shop;
	CREATE TABLE shop.people (nr bigint PRIMARY KEY, first_name text NOT NULL, last_name text NOT NULL, grade varchar(3), points numeric(6,1), since date DEFAULT '2000-01-01', kind text NOT NULL)`

func peopleMapping() backfill.Mapping {
	return backfill.Mapping{Target: "shop.people", Drop: []string{"legacy", "born"}, Columns: map[string]string{
		"nr": "id", "first_name": "split_part(name, ' ', 1)", "last_name": "nullif(regexp_replace(name, '^\\S+\\s*', ''), '')",
		"points": "score", "grade": "CASE WHEN score > 90 THEN 'A' ELSE 'B' END", "kind": "'person'"}}
}

func peopleWorld(t *testing.T, rows int) *world {
	t.Helper()
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, people+fmt.Sprintf(`; INSERT INTO users SELECT n, 'Ann van ' || n, '1990-01-01', true, n FROM generate_series(1, %d) n`, rows), peopleThere), small(10))
	w.remap("public.users", peopleMapping())
	return w
}

func (w *world) people() []string {
	w.Helper()
	return testkit.Strings(w, w.R, `SELECT concat_ws('|', nr, first_name, last_name, grade, points, since, kind) FROM shop.people ORDER BY nr`)
}

// shaped fails unless the receiver holds what the mapping makes of each row.
func (w *world) shaped() {
	w.Helper()
	want := testkit.Strings(w, w.S, `
		SELECT concat_ws('|', id, split_part(name, ' ', 1), regexp_replace(name, '^\S+\s*', ''), CASE WHEN score > 90 THEN 'A' ELSE 'B' END, score::numeric(6,1), '2000-01-01', 'person') FROM users ORDER BY id`)
	require.Equal(w, want, w.people())
}

func TestAReceiverOfAnotherShape(t *testing.T) {
	w := peopleWorld(t, 95)
	r := w.Request("public.users")
	w.walk(r.ID)
	// Live changes are mapped as well, also while the walk's rows wait.
	w.onSource(`UPDATE users SET name = 'Bob Odd' WHERE id = 7; DELETE FROM users WHERE id = 8; INSERT INTO users VALUES (200, 'Zed New', NULL, NULL, 91.25); UPDATE users SET id = 300 WHERE id = 9`)
	w.drain()
	require.Equal(t, []string{"7|Bob|Odd|B|7.0|2000-01-01|person", "200|Zed|New|A|91.3|2000-01-01|person", "300|Ann|van 9|B|9.0|2000-01-01|person"}, w.people())
	w.onReceiver(`INSERT INTO shop.people VALUES (10, 'Ann', 'van 10', 'B', 10, DEFAULT, 'person'), (11, 'Eve', 'van 11', 'B', 11, DEFAULT, 'person')`)
	w.classify(r.ID)
	rows, err := w.Store.StagedRows(t.Context(), r.ID, "", 0, 1000)
	require.NoError(t, err)
	effects := map[backfill.Effect]int{}
	for _, x := range rows {
		effects[x.Effect]++
		require.Len(t, x.Result, 6)
		require.Equal(t, x.Key[0], *x.Result[0])
		if x.Key[0] == "11" {
			require.Equal(t, "Eve", *x.Receiver[1])
			require.Equal(t, "Ann", *x.Result[1])
			require.Equal(t, "Ann van 11", *x.Row[1], "the source's row is there too")
		}
	}
	require.Equal(t, map[backfill.Effect]int{backfill.Insert: 92, backfill.Overwrite: 3}, effects)
	w.Approve(r.ID)
	w.release(r.ID, 50)
	w.drain()
	w.shaped()
	require.Empty(t, w.setAside())

	run := w.reconcile("public.users")
	require.Equal(t, "EQUAL", run.Verdict)
	require.EqualValues(t, 95, run.Counts.Rows)

	// One wrong value, one row missing, one too many.
	w.onReceiver(`UPDATE shop.people SET last_name = 'x' WHERE nr = 20; DELETE FROM shop.people WHERE nr = 21; INSERT INTO shop.people VALUES (1000, 'a', 'b', 'A', 1, DEFAULT, 'person')`)
	run = w.reconcile("public.users")
	require.Equal(t, "DIFFERENT", run.Verdict)
	require.Equal(t, []string{"different 20 last_name", "missing 21", "surplus 1000"}, w.differences(run))
	w.onReceiver(`DELETE FROM shop.people WHERE nr = 1000`)

	// The differences are walked alone.
	d, err := w.Store.CreateRequest(t.Context(), control.NewRequest{Direction: w.Out.ID, TableID: w.Tables["public.users"].ID, Mode: backfill.ModeDifferences, Proof: run.ID, By: "test"})
	require.NoError(t, err)
	w.walk(d.ID)
	require.Equal(t, []string{"20", "21"}, w.staged(d.ID))
	w.classify(d.ID)
	w.Approve(d.ID)
	w.release(d.ID, 50)
	w.drain()
	w.shaped()
	require.Equal(t, "EQUAL", w.reconcile("public.users").Verdict)

	w.onSource(`TRUNCATE users`)
	w.drain()
	require.Empty(t, w.people())
}

// A row of which nothing can be made is quarantined as it was sent, with PostgreSQL's
// words, and a later mapping makes something of it.
func TestARowThatAMappingCannotMake(t *testing.T) {
	w := peopleWorld(t, 0)
	m := peopleMapping()
	m.Columns["points"] = "100 / (score - 13)"
	w.remap("public.users", m)
	w.onSource(`INSERT INTO users SELECT n, 'Ann van ' || n, NULL, NULL, n FROM generate_series(1, 30) n; INSERT INTO users VALUES (40, 'Cher', NULL, NULL, 1), (41, 'Ann B', NULL, NULL, 13.001)`)
	r := w.Request("public.users")
	w.walk(r.ID)
	w.classify(r.ID)
	rows, err := w.Store.StagedRows(t.Context(), r.ID, backfill.Unknown, 0, 1000)
	require.NoError(t, err)
	require.Len(t, rows, 2)
	require.Equal(t, backfill.Key{"13"}, rows[0].Key)
	require.Equal(t, "division by zero", rows[0].Problem)
	require.Contains(t, rows[1].Problem, "numeric field overflow")
	require.Nil(t, rows[0].Result)

	w.drain()
	require.Len(t, w.people(), 29)
	aside := w.setAside()
	require.Len(t, aside, 3)
	for i, part := range []string{"quarantined (13): division by zero", `quarantined (40): null value in column "last_name"`, "quarantined (41): numeric field overflow"} {
		require.Contains(t, aside[i], part)
	}
	require.Equal(t, "{13,\"Ann van 13\",NULL,NULL,13}", testkit.Value[string](t, w.R, `SELECT "row"::text FROM backfill_maple_central.held WHERE key = '{13}'`), "as it was sent")
	// A comparison that cannot be made is never called equal.
	require.Error(t, w.tryJudge(w.newRun("public.users", control.NewReconciliation{})))

	m = peopleMapping()
	m.Columns["last_name"] = "coalesce(nullif(regexp_replace(name, '^\\S+\\s*', ''), ''), '-')"
	w.remap("public.users", m)
	w.retryAll()
	require.Empty(t, w.setAside())
	require.Contains(t, w.people(), "40|Cher|-|B|1.0|2000-01-01|person")
	require.Contains(t, w.people(), "13|Ann|van 13|B|13.0|2000-01-01|person")
}

// A mapping is refused with a reason for everything that is wrong with it, and nothing
// that was given is run.
func TestMappingsThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, people+`;
		CREATE FUNCTION here(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1'; CREATE FUNCTION same(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1';
		CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TABLE moods (id int PRIMARY KEY, m mood); CREATE TABLE two (a int, b int, v text, PRIMARY KEY (a, b))`,
		peopleThere+`; CREATE FUNCTION same(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1'; CREATE FUNCTION there(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1';
		CREATE TABLE moods (id int PRIMARY KEY, m text); CREATE TABLE two (x int NOT NULL, y int NOT NULL, v text, nr int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, UNIQUE (y, x))`), Settings{})
	w.onSource(`INSERT INTO users VALUES (1, 'Ann B', NULL, NULL, 1)`)
	for _, c := range []struct{ column, expr, field, says string }{
		{"kind", "id / 0", "", ""}, // which rows it fails for is seen by trying it
		{"kind", "public.same(name)", "", ""},
		{"kind", "now()::text", "columns.kind", "not immutable"},
		{"kind", "random()::text", "columns.kind", "not immutable"},
		{"kind", "(SELECT rolname FROM pg_authid LIMIT 1)", "columns.kind", "cannot use subquery"},
		{"kind", "max(name)", "columns.kind", "aggregate functions are not allowed"},
		{"kind", "public.here(name)", "columns.kind", "on central: function public.here(text) does not exist"},
		{"kind", "public.there(name)", "columns.kind", "on school: function public.there(text) does not exist"},
		{"kind", "same(name)", "columns.kind", "need their schema"},
		{"kind", "nam", "columns.kind", `column "nam" does not exist`},
		{"kind", "name; DROP TABLE users", "columns.kind", "; is not allowed"},
		{"kind", "name) STORED, ADD COLUMN evil int DEFAULT (1", "columns.kind", "brackets do not match"},
		{"kind", "name -- comment", "columns.kind", "comments are not allowed"},
		{"kind", "$1", "columns.kind", "no parameter $1"},
		{"kind", "tableoid::text", "columns.kind", "tableoid is PostgreSQL's own"},
		{"kind", "name || source.tableoid", "columns.kind", "tableoid is PostgreSQL's own"},
		{"kind", "ctid::text", "columns.kind", "system column"},
		{"kind", "xmin::text", "columns.kind", "system column"},
		{"kind", "source.cmax::text", "columns.kind", "system column"},
		{"kind", "(source IS NULL)::text", "columns.kind", "on central"},
		{"kind", "name AS x", "columns.kind", "syntax error"},
		{"kind", "name, id", "columns.kind", "on central:"},
		{"kind", "default", "columns.kind", "no default"},
		{"kind", "", "columns.kind", "give the expression"},
		{"points", "name", "columns.points", "the column is of type numeric"},
		{"nope", "name", "columns.nope", "that can be written"},
		{"nr", "id + 1", "key", "of the source's key (id) alone"},
	} {
		m := peopleMapping()
		m.Columns[c.column] = c.expr
		err := m.Check()
		if err == nil {
			if trial := w.try("public.users", m); len(trial.Fields) > 0 {
				err = backfill.Unfit(trial.Fields)
			}
		}
		if c.field == "" {
			require.NoError(t, err, c.expr)
			continue
		}
		require.Error(t, err, c.expr)
		require.Contains(t, err.Error(), "mapping."+c.field+": ", c.expr)
		require.Contains(t, err.Error(), c.says, c.expr)
	}
	for _, c := range []struct {
		change func(*backfill.Mapping)
		says   string
	}{
		{func(m *backfill.Mapping) { delete(m.Columns, "kind") }, "mapping.columns.kind: nothing makes it"},
		{func(m *backfill.Mapping) { m.Drop = []string{"born"} }, "mapping.drop: column \"legacy\" of the source goes nowhere"},
		{func(m *backfill.Mapping) { m.Drop = append(m.Drop, "score") }, "mapping.drop: column \"score\" is used"},
		{func(m *backfill.Mapping) { m.Drop = append(m.Drop, "nope") }, "mapping.drop: the source has no column \"nope\""},
		{func(m *backfill.Mapping) { m.Target = "shop.gone" }, "mapping.target: side central: there is no table shop.gone"},
		{func(m *backfill.Mapping) { m.Source = "public.gone" }, "mapping.source: side school: there is no table public.gone"},
		{func(m *backfill.Mapping) { m.Key = []string{"first_name"} }, "mapping.key: no column of it is column \"id\""},
		{func(m *backfill.Mapping) { m.Key = []string{"nr", "kind"} }, "mapping.key: it has more columns"},
	} {
		m := peopleMapping()
		c.change(&m)
		trial := w.try("public.users", m)
		require.NotEmpty(t, trial.Fields, c.says)
		require.Contains(t, backfill.Unfit(trial.Fields).Error(), c.says)
	}
	require.Contains(t, backfill.Unfit(w.try("public.moods", backfill.Mapping{Columns: map[string]string{"m": "upper(m::text)"}}).Fields).Error(),
		"the type public.mood of the source's column \"m\" does not exist on central")

	// A key in another order, under other names, that is not the target's primary key.
	two := w.try("public.two", backfill.Mapping{Columns: map[string]string{"x": "a", "y": "b"}})
	require.Empty(t, two.Fields)
	require.Equal(t, []string{"x", "y"}, two.Made.Key)
	w.onReceiver(`ALTER TABLE two DROP CONSTRAINT two_y_x_key`)
	require.Contains(t, backfill.Unfit(w.try("public.two", backfill.Mapping{Columns: map[string]string{"x": "a", "y": "b"}}).Fields).Error(), "has no usable key (x, y)")

	// What an expression cannot do for some rows is seen on the sample.
	m := peopleMapping()
	m.Columns["points"] = "1 / (score - 1)"
	var tried []side.TrialRow
	require.NoError(t, json.Unmarshal(w.try("public.users", m).Rows, &tried))
	require.Len(t, tried, 1)
	require.Equal(t, "division by zero", tried[0].Problem)
	require.Zero(t, testkit.Value[int](t, w.R, `SELECT count(*) FROM pg_class WHERE relname = 'source'`), "nothing stays")
}

// A mistake in an expression is the same on both sides; a claim finds it.
func TestAMistakeInAMappingIsFoundByAClaim(t *testing.T) {
	w := peopleWorld(t, 30)
	m := peopleMapping()
	m.Columns["last_name"] = "regexp_replace(name, '^.*\\s', '')" // the name in the middle is lost
	w.remap("public.users", m)
	r := w.Request("public.users")
	w.walk(r.ID)
	w.Approve(r.ID)
	w.release(r.ID, 100)
	w.drain()
	require.Equal(t, "EQUAL", w.reconcile("public.users").Verdict, "the source makes the same mistake")
	m.Prove = map[string]backfill.Claim{"whole name": {Source: "name", Target: "first_name || ' ' || last_name"}}
	w.remap("public.users", m)
	w.onSource(`UPDATE users SET name = 'Ann 5' WHERE id = 5`)
	w.drain()
	run := w.reconcile("public.users")
	require.Equal(t, "DIFFERENT", run.Verdict)
	require.Len(t, w.differences(run), 29)
	require.Contains(t, w.differences(run), "different 1 claim: whole name")
	stop := w.sync()
	read := func(key, column, value string) control.ShadowRead {
		return control.ShadowRead{TableID: w.Tables["public.users"].ID, Key: backfill.Key{key}, Found: true, Columns: []string{column}, Values: []*string{&value}}
	}
	require.Equal(t, backfill.ShadowCounts{Match: 1, Mismatch: 1}, w.verdicts(read("1", "name", "Ann van 1"), read("5", "name", "Ann 5")))
	stop()

	m.Columns["last_name"] = peopleMapping().Columns["last_name"]
	w.remap("public.users", m)
	run = w.reconcile("public.users")
	require.Equal(t, "DIFFERENT", run.Verdict)
	require.Contains(t, w.differences(run), "different 1 last_name claim: whole name")
	d, err := w.Store.CreateRequest(t.Context(), control.NewRequest{Direction: w.Out.ID, TableID: w.Tables["public.users"].ID, Mode: backfill.ModeDifferences, Proof: run.ID, By: "test"})
	require.NoError(t, err)
	w.walk(d.ID)
	require.Len(t, w.staged(d.ID), 29)
	w.Approve(d.ID)
	w.release(d.ID, 100)
	w.drain()
	require.Equal(t, "EQUAL", w.reconcile("public.users").Verdict)
	w.shaped()
	m.Prove["bad"] = backfill.Claim{Source: "nam", Target: "first_name"}
	require.Contains(t, backfill.Unfit(w.try("public.users", m).Fields).Error(), "mapping.prove.bad: source: on school: column")
	m.Prove["bad"] = backfill.Claim{Source: "name", Target: "target.tableoid::text"}
	require.Contains(t, backfill.Unfit(w.try("public.users", m).Fields).Error(), "mapping.prove.bad: target: tableoid is PostgreSQL's own")
	m.Prove["bad"] = backfill.Claim{Source: "name", Target: "now()::text"}
	require.Contains(t, backfill.Unfit(w.try("public.users", m).Fields).Error(), "mapping.prove.bad: target: on central it is not immutable")
}

// A key of the source that is another than the mapping was made for deletes nothing.
func TestAnotherKeyThanTheMappingWasMadeFor(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, `CREATE TABLE users (id int PRIMARY KEY, other int NOT NULL)`, `CREATE TABLE people (nr int PRIMARY KEY, other int NOT NULL)`), Settings{})
	m := backfill.Mapping{Target: "public.people", Columns: map[string]string{"nr": "id"}}
	w.remap("public.users", m)
	w.onSource(`INSERT INTO users VALUES (1, 2), (2, 1)`)
	w.drain()
	require.Equal(t, []string{"(1,2)", "(2,1)"}, testkit.Rows(t, w.R, "people"))
	w.onSource(`ALTER TABLE users DROP CONSTRAINT users_pkey, ADD PRIMARY KEY (other)`)
	w.Setup()
	w.drain()
	w.onSource(`DELETE FROM users WHERE other = 2`)
	w.drain()
	require.Equal(t, []string{"(1,2)", "(2,1)"}, testkit.Rows(t, w.R, "people"), "row 2 is not the one that was deleted")
	require.Contains(t, strings.Join(w.setAside(), "\n"), "its mapping was made for another")
}

func TestATableTakesTheRowsOfOneAndEveryKeyOfIt(t *testing.T) {
	w := peopleWorld(t, 0)
	m := peopleMapping()
	m.Source = "public.users"
	trial := w.try("public.more", m)
	require.Empty(t, trial.Fields)
	_, err := w.Store.PutTable(t.Context(), "test", testkit.Site, "public.more", control.TableChange{CapturedFrom: []string{testkit.Source}, Mapping: &m, Checked: w.checked("public.more", trial)})
	require.ErrorContains(t, err, "public.users is written to shop.people already")

	w.onReceiver(`CREATE TABLE shop.narrow (nr smallint PRIMARY KEY)`)
	narrow := backfill.Mapping{Target: "shop.narrow", Columns: map[string]string{"nr": "id"}, Drop: []string{"name", "born", "legacy", "score"}}
	require.Contains(t, backfill.Unfit(w.try("public.users", narrow).Fields).Error(), "two keys of the source could become one")

	m.Source = ""
	m.Prove = map[string]backfill.Claim{"first": {Source: "split_part(source.name, ' ', 1)", Target: "target.first_name"}}
	require.Empty(t, w.try("public.users", m).Fields)
	m.Prove["first"] = backfill.Claim{Source: "name", Target: "source.first_name"}
	require.NotEmpty(t, w.try("public.users", m).Fields)
}

// A column that is left out stays as it is on the receiver, and is not compared.
func TestColumnsThatAreLeftOut(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY, note text, touched timestamptz)`), small(10))
	w.remap("public.orders", backfill.Mapping{Drop: []string{"touched"}})
	w.onSource(`INSERT INTO orders VALUES (1, 'a', '2020-01-01'), (2, 'b', '2020-01-01')`)
	w.drain()
	require.Equal(t, []string{"(1,a,)", "(2,b,)"}, testkit.Rows(t, w.R, "orders"))
	w.onReceiver(`UPDATE orders SET touched = '2024-05-05 00:00:00+00'`)
	w.onSource(`UPDATE orders SET note = 'c', touched = '2021-01-01' WHERE id = 1`)
	w.drain()
	require.Equal(t, 2, testkit.Value[int](t, w.R, `SELECT count(*) FROM orders WHERE touched = '2024-05-05 00:00:00+00'`))
	require.Equal(t, "EQUAL", w.reconcile("public.orders").Verdict)
	w.onReceiver(`ALTER TABLE orders ALTER touched SET NOT NULL`)
	require.Contains(t, backfill.Unfit(w.try("public.orders", backfill.Mapping{Drop: []string{"touched"}}).Fields).Error(), "mapping.columns.touched: nothing makes it")
}

// Another mapping ends what was read and proven under the one before, and offers a backfill.
func TestAnotherMappingClosesNothingSilently(t *testing.T) {
	w := peopleWorld(t, 30)
	r := w.Request("public.users")
	w.walk(r.ID)
	w.classify(r.ID)
	m := peopleMapping()
	m.Columns["kind"] = "'someone'"
	w.remap("public.users", m)
	now := w.Now(r.ID)
	require.Equal(t, backfill.Failed, now.State)
	require.Contains(t, now.Reason, "mapping of the table was changed to version 2")
	p, err := w.Store.Panel(t.Context(), testkit.Site, "public.users", testkit.Source)
	require.NoError(t, err)
	require.True(t, p.CanRequest(), "%+v", p.Conditions(false))
	require.Contains(t, p.Source.Gap, "mapping")

	r = w.Request("public.users")
	w.walk(r.ID)
	w.Approve(r.ID)
	w.release(r.ID, 100)
	w.drain()
	require.Equal(t, "EQUAL", w.reconcile("public.users").Verdict)
	id := w.newRun("public.users", control.NewReconciliation{})
	w.remap("public.users", m) // the same again changes nothing
	require.Equal(t, 2, w.Tables["public.users"].Version)
	run, err := w.Store.Run(t.Context(), id)
	require.NoError(t, err)
	require.True(t, run.State.Open())
	w.remap("public.users", peopleMapping())
	run, err = w.Store.Run(t.Context(), id)
	require.NoError(t, err)
	require.False(t, run.State.Open())
	require.Equal(t, "DIFFERENT", w.reconcile("public.users").Verdict)
	// It would be read the other way round.
	_, err = w.Store.PutTable(t.Context(), "test", testkit.Site, "public.users", control.TableChange{CapturedFrom: []string{testkit.Receiver}})
	require.ErrorContains(t, err, "it makes rows of school")
	_, err = w.Store.PutTable(t.Context(), "test", testkit.Site, "public.users", control.TableChange{CapturedFrom: []string{testkit.Receiver, testkit.Source}, Conflict: ptr("quarantine")})
	require.ErrorContains(t, err, "mapping")
}

// One table of the source feeds two of the receiver, which are schemas of one database:
// expand and contract, with the triggers as the dual write.
func TestOneTableFeedsTwoInOneDatabase(t *testing.T) {
	t.Parallel()
	dsn := testkit.Database(t)
	p := testkit.NewPairIn(t, testkit.Places{Source: dsn, Receiver: dsn}, people+`; INSERT INTO users SELECT n, 'Ann van ' || n, '1990-01-01', true, n FROM generate_series(1, 25) n`,
		peopleThere+`; CREATE TABLE shop.births (nr int PRIMARY KEY, born date, year int)`)
	w := worldOf(p, small(10))
	w.remap("public.users", peopleMapping())
	w.remap("shop.births", backfill.Mapping{Source: "public.users", Columns: map[string]string{"nr": "id", "year": "extract(year FROM born)::int"}, Drop: []string{"name", "legacy", "score"}})
	w.onSource(`UPDATE users SET born = '1991-05-05' WHERE id = 3; DELETE FROM users WHERE id = 4`)
	w.drain()
	require.Equal(t, []string{"3|1991-05-05|1991"}, testkit.Strings(t, w.R, `SELECT concat_ws('|', nr, born, year) FROM shop.births`))
	for _, table := range []string{"public.users", "shop.births"} {
		r := w.Request(table)
		w.walk(r.ID)
		w.classify(r.ID)
		w.Approve(r.ID)
		w.release(r.ID, 100)
		w.drain()
		require.Equal(t, "EQUAL", w.reconcile(table).Verdict, table)
	}
	w.shaped()
	require.Equal(t, 24, testkit.Value[int](t, w.R, `SELECT count(*) FROM shop.births`))
	w.onReceiver(`UPDATE shop.births SET year = 1 WHERE nr = 5`)
	run := w.reconcile("shop.births")
	require.Equal(t, []string{"different 5 year"}, w.differences(run))
	// A repair sends the row to both tables it feeds.
	rep := w.newRun("shop.births", control.NewReconciliation{Mode: backfill.RunRepair, Parent: run.ID})
	stop := w.sync()
	defer stop()
	w.judge(rep)
	require.Equal(t, 1990, testkit.Value[int](t, w.R, `SELECT year FROM shop.births WHERE nr = 5`))
}

// What the old path served is compared with what the mapping makes of it.
func TestShadowReadsOfAnotherShape(t *testing.T) {
	w := peopleWorld(t, 20)
	r := w.Request("public.users")
	w.walk(r.ID)
	w.Approve(r.ID)
	w.release(r.ID, 100)
	w.drain()
	stop := w.sync()
	defer stop()
	id := w.Tables["public.users"].ID
	read := func(key string, columns string, values ...string) control.ShadowRead {
		x := control.ShadowRead{TableID: id, Key: backfill.Key{key}, Found: true, Columns: strings.Split(columns, " ")}
		for _, v := range values {
			x.Values = append(x.Values, &v)
		}
		return x
	}
	require.Equal(t, backfill.ShadowCounts{Match: 3}, w.verdicts(read("1", "name", "Ann van 1"), read("2", "name score", "Ann van 2", "2"), read("3", "legacy", "true")))
	w.onReceiver(`UPDATE shop.people SET last_name = 'x' WHERE nr = 1; UPDATE shop.people SET points = 0 WHERE nr = 2`)
	require.Equal(t, backfill.ShadowCounts{Match: 1, Mismatch: 2}, w.verdicts(read("1", "name", "Ann van 1"), read("2", "score", "2"), read("3", "name", "Ann van 3")))
}

// A value that is too long for its column is refused, as an INSERT refuses it, and never
// cut, wherever the length stands, with a mapping and without one.
func TestWhatIsTooLongIsRefusedAndNeverCut(t *testing.T) {
	t.Parallel()
	cases := []struct{ typ, fits, long, wide, expr string }{
		{"varchar(3)", "abc", "abcd", "text", "lower(%s)"},
		{"char(3)", "ab", "abcd", "text", "lower(%s)"},
		{"bit(3)", "101", "1011", "varbit", "~%s"},
		{"varbit(3)", "10", "1011", "varbit", "~%s"},
		{"varchar(3)[]", "{abc,NULL}", "{a,abcd}", "text[]", "%s || '{x}'"},
		{"char(3)[]", "{ab,c}", "{a,abcd}", "text[]", "%s || '{x}'"},
		{"bit(3)[]", "{101}", "{1011}", "varbit[]", "%s || '{111}'"},
		{"varbit(3)[]", "{10,1}", "{1011}", "varbit[]", "%s || '{1}'"},
		{"d3", "abc", "abcd", "text", "lower(%s)"},
		{"deep", "abc", "abcd", "text", "lower(%s)"},
		{"c3", "ab", "abcd", "text", "lower(%s)"},
		{"b3", "101", "1011", "varbit", "~%s"},
		{"many", "{abc}", "{abcd}", "text[]", "%s || '{x}'"},
		{"d3[]", "{abc,NULL}", "{abcd}", "text[]", "%s || '{x}'"},
		{"c3[]", "{ab}", "{abcd}", "text[]", "%s || '{x}'"},
		{"b3[]", "{101}", "{1011}", "varbit[]", "%s || '{111}'"},
		{"part", "(abc,1)", "(abcd,1)", "wide", "ROW((%s).a, (%[1]s).n)"},
		{"part[]", `{"(abc,1)"}`, `{"(abcd,1)"}`, "text", ""},
		{"many[]", `{"{abc}"}`, `{"{abcd}"}`, "text", ""},
	}
	const types = `CREATE DOMAIN d3 AS varchar(3); CREATE DOMAIN deep AS d3; CREATE DOMAIN many AS varchar(3)[]; CREATE DOMAIN c3 AS char(3); CREATE DOMAIN b3 AS bit(3);
		CREATE TYPE part AS (a varchar(3), n int); CREATE TYPE wide AS (a text, n int);`
	text, wide, limited, fits, long := "id text PRIMARY KEY", "id int PRIMARY KEY", "id int PRIMARY KEY", "'0'", ""
	m := backfill.Mapping{Target: "public.there", Columns: map[string]string{}}
	for i, c := range cases {
		name := fmt.Sprintf("c%d", i)
		text += ", " + name + " text"
		wide += ", " + name + " " + c.wide
		limited += ", " + name + " " + c.typ
		fits += ", '" + c.fits + "'"
		long += fmt.Sprintf("INSERT INTO %%[1]s (id, %s) VALUES ('%d', '%s');", name, i+1, c.long)
		if c.expr == "" {
			m.Drop = append(m.Drop, name)
		} else {
			m.Columns[name] = fmt.Sprintf(c.expr, name)
		}
	}
	w := worldOf(testkit.NewPairOf(t, types+`CREATE TABLE plain (`+text+`); CREATE TABLE here (`+wide+`)`,
		types+`CREATE TABLE plain (`+strings.Replace(limited, "int", "d3", 1)+`); CREATE TABLE there (`+limited+`)`, "public.plain"), Settings{})
	w.remap("public.here", m)
	for _, table := range []string{"plain", "here"} {
		w.onSource(`INSERT INTO ` + table + ` VALUES (` + fits + `)`)
		w.onSource(fmt.Sprintf(long, table))
	}
	w.onSource(`INSERT INTO plain (id) VALUES ('abcd'), ('abc'); DELETE FROM plain WHERE id = 'abcd'`)
	w.drain()
	require.Equal(t, []string{"0", "abc"}, testkit.Strings(t, w.R, `SELECT id FROM plain ORDER BY 1`), "a key is not cut either, and deletes nothing")
	require.Equal(t, []string{"0", "18", "19"}, testkit.Strings(t, w.R, `SELECT id::text FROM there ORDER BY id`), "the last two columns are dropped")
	aside := w.setAside()
	require.Len(t, aside, len(cases)+len(cases)-2, strings.Join(aside, "\n"))
	for _, line := range aside {
		require.Regexp(t, "value too long|does not match type|too long for type", line)
	}
	// What fits is compared as it is stored.
	w.onSource(`DELETE FROM plain WHERE id <> '0'; DELETE FROM here WHERE id BETWEEN 1 AND 17`)
	w.drain()
	require.Equal(t, "EQUAL", w.reconcile("public.here").Verdict)
	run := w.reconcile("public.plain")
	require.Equal(t, []string{"different 0 c5 c14"}, w.differences(run), "the source's text is no array, where blanks would be")
}

// A key that no row of the receiver can have is a problem of its row alone, in the review
// and when it is released.
func TestAKeyThatTheReceiverCannotHold(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, `CREATE TABLE plain (id bigint PRIMARY KEY, v text); CREATE TABLE source (id bigint PRIMARY KEY, v text);
		INSERT INTO plain SELECT n, n FROM generate_series(1, 30) n; INSERT INTO plain VALUES (3000000000, 'far'); INSERT INTO source TABLE plain`,
		`CREATE TABLE plain (id int PRIMARY KEY, v text); CREATE TABLE target (nr bigint PRIMARY KEY, v text)`, "public.plain"), small(7))
	w.remap("public.source", backfill.Mapping{Target: "public.target", Columns: map[string]string{"nr": "id"}})
	w.onReceiver(`ALTER TABLE target ALTER nr TYPE int`) // since the mapping was checked
	for _, filled := range []bool{false, true} {
		for _, table := range []string{"public.plain", "public.source"} {
			r := w.Request(table)
			w.walk(r.ID)
			w.classify(r.ID)
			odd, err := w.Store.StagedRows(t.Context(), r.ID, backfill.Unknown, 0, 100)
			require.NoError(t, err)
			require.Len(t, odd, 1, table)
			require.Equal(t, backfill.Key{"3000000000"}, odd[0].Key)
			require.Contains(t, odd[0].Problem, "out of range for type integer")
			effect := map[bool]backfill.Effect{false: backfill.Insert, true: backfill.Identical}[filled]
			rows, err := w.Store.StagedRows(t.Context(), r.ID, effect, 0, 100)
			require.NoError(t, err)
			require.Len(t, rows, 30, table)
			if filled {
				w.Reject(r.ID)
				continue
			}
			w.Approve(r.ID)
			w.release(r.ID, 100)
			w.drain()
		}
	}
	require.Len(t, w.setAside(), 2)
}

// Nothing that was given as an expression is run before it is known to be immutable, on
// either side, nor anything when a mapping is refused.
func TestAnExpressionThatDoesSomethingIsNeverRun(t *testing.T) {
	t.Parallel()
	const trap = `CREATE TABLE ran (what text); CREATE SEQUENCE s;
		CREATE FUNCTION v(text) RETURNS text VOLATILE LANGUAGE sql AS 'INSERT INTO public.ran VALUES ($1) RETURNING what';
		CREATE FUNCTION st(text) RETURNS text STABLE LANGUAGE plpgsql AS 'BEGIN PERFORM pg_notify($1, $1); PERFORM nextval(''public.s''); RETURN $1; END';
		CREATE FUNCTION vop(text, text) RETURNS text VOLATILE LANGUAGE sql AS 'SELECT public.v($1)'; CREATE OPERATOR public.## (LEFTARG = text, RIGHTARG = text, FUNCTION = vop);
		CREATE TYPE made AS (t text); CREATE FUNCTION vcast(text) RETURNS made VOLATILE LANGUAGE sql AS 'SELECT ROW(public.v($1))::public.made'; CREATE CAST (text AS made) WITH FUNCTION vcast(text);`
	const honest = `CREATE FUNCTION one(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1';`
	exprs := []string{
		"public.v(name)", "public.st(name)", "name OPERATOR(public.##) name", "(name::public.made).t", "CASE WHEN id < 0 THEN public.v('x') ELSE name END", "coalesce(name, public.v('x'))",
		"nextval('public.s')::text", "setval('public.s', 99)::text", "pg_notify('x', name)::text", "set_config('search_path', name, false)", "pg_read_file('/etc/passwd')", "pg_sleep(60)::text",
		"pg_terminate_backend(id)::text", "lo_create(1)::text", "query_to_xml('DELETE FROM public.source', true, true, '')::text", "pg_advisory_lock(1)::text", "current_user::text", "clock_timestamp()::text",
		"(SELECT public.v('x'))", "(WITH d AS (DELETE FROM public.source RETURNING name) SELECT name FROM d)", "ARRAY(SELECT name FROM public.source)::text", "EXISTS (SELECT)::text",
		"string_agg(name, '')", "row_number() OVER ()::text", "generate_series(1, 1000000000)::text", "regexp_split_to_table(name, '')", "(VALUES ('x'))", "name) FROM public.source; DELETE FROM public.source; SELECT (name",
	}
	columns := backfill.Mapping{Target: "public.target", Columns: map[string]string{}}
	nothing := map[string]string{}
	sources := backfill.Mapping{Target: "public.target", Columns: nothing, Prove: map[string]backfill.Claim{}}
	targets := backfill.Mapping{Target: "public.target", Columns: nothing, Prove: map[string]backfill.Claim{}}
	target := "id int PRIMARY KEY, name text"
	for i, expr := range exprs {
		name := fmt.Sprintf("c%d", i)
		target += ", " + name + " text"
		columns.Columns[name], nothing[name] = expr, "null"
		sources.Prove[name] = backfill.Claim{Source: expr, Target: "name"}
		targets.Prove[name] = backfill.Claim{Source: "name", Target: expr}
	}
	w := worldOf(testkit.NewPairOf(t, `CREATE TABLE source (id int PRIMARY KEY, name text); INSERT INTO source VALUES (1, 'Ann');`+trap+honest+`CREATE FUNCTION two(text) RETURNS text VOLATILE LANGUAGE sql AS 'SELECT public.v($1)'`,
		`CREATE TABLE target (`+target+`);`+trap+honest+`CREATE FUNCTION two(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1'`), Settings{})
	for field, m := range map[string]backfill.Mapping{"mapping.columns.": columns, "mapping.prove.": targets, "mapping.prove. ": sources} {
		refused := map[string]bool{}
		for _, f := range w.try("public.source", m).Fields {
			refused[f.Field] = true
		}
		for i, expr := range exprs {
			require.True(t, refused[strings.TrimSpace(field)+fmt.Sprintf("c%d", i)], "%s %s", field, expr)
		}
	}
	sources.Prove = nil
	sources.Columns["c0"] = "public.two(name)"
	require.Contains(t, backfill.Unfit(w.try("public.source", sources).Fields).Error(), "mapping.columns.c0: on school it is not immutable")
	sources.Columns["c0"] = "public.one(name)"
	require.Empty(t, w.try("public.source", sources).Fields)
	for _, side := range []*pgx.Conn{w.S, w.R} {
		require.Equal(t, []string{"0 false"}, testkit.Strings(t, side, `SELECT (SELECT count(*) FROM ran) || ' ' || is_called FROM s`))
		require.Zero(t, testkit.Value[int](t, side, `SELECT count(*) FROM pg_class WHERE relname IN ('source', 'target') AND relpersistence = 't'`))
	}
	require.Equal(t, 1, testkit.Value[int](t, w.S, `SELECT count(*) FROM source`))
}

// Another mapping ends a backfill wherever it is, and what was not released yet never is.
func TestAnotherMappingEndsABackfillWhereverItIs(t *testing.T) {
	w := peopleWorld(t, 100)
	version := 1
	another := func(r *backfill.Request) {
		t.Helper()
		version++
		m := peopleMapping()
		m.Columns["kind"] = fmt.Sprintf("'version %d'", version)
		w.remap("public.users", m)
		now := w.Now(r.ID)
		require.Equal(t, backfill.Failed, now.State)
		require.Equal(t, backfill.Remapped(version), now.Reason)
	}
	// Before and while it walks.
	another(w.Request("public.users"))
	r := w.Request("public.users")
	k := w.claim(w.from, r.ID)
	require.NoError(t, k.freeze(t.Context()))
	_, err := k.page(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 40, w.Now(r.ID).Staged)
	another(r)
	require.Error(t, toTheEnd(t.Context(), k))
	require.EqualValues(t, 40, w.Now(r.ID).Staged)
	// While its rows are judged: what one mapping has made is not shown as the other's.
	r = w.Request("public.users")
	w.walk(r.ID)
	reached, resume := w.stopAt(w.to, "classify: read")
	judged := make(chan error, 1)
	go func() { judged <- w.to.classify(t.Context(), w.Now(r.ID), 0, 100) }()
	<-reached
	another(r)
	resume(nil)
	require.NoError(t, <-judged)
	rows, err := w.Store.StagedRows(t.Context(), r.ID, "", 0, 100)
	require.NoError(t, err)
	require.Nil(t, rows[0].Result)
	// While it is released: what is in the queue by then is made by the new one.
	r = w.Request("public.users")
	w.walk(r.ID)
	w.classify(r.ID)
	w.Approve(r.ID)
	done, _, err := w.Store.ReleaseBatch(t.Context(), r.ID, 15)
	require.NoError(t, err)
	require.False(t, done)
	another(r)
	_, _, err = w.Store.ReleaseBatch(t.Context(), r.ID, 15)
	if err == nil {
		require.Equal(t, backfill.Failed, w.Now(r.ID).State)
	}
	w.drain()
	require.Len(t, w.people(), 15)
	require.Equal(t, []string{fmt.Sprintf("version %d", version)}, testkit.Strings(t, w.R, `SELECT DISTINCT kind FROM shop.people`))
}

// Whatever judges a row judges what the mapping makes of it: with a column dropped, one
// that is NULL by its expression, a key in another order, and two targets of one table.
func TestEveryJudgeSeesWhatTheMappingMakes(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPairOf(t, `CREATE TABLE orders (a int, b text COLLATE "C", gone text, v text, n numeric, at timestamp, PRIMARY KEY (a, b));
		INSERT INTO orders SELECT n % 10, 'k' || n, 'gone', CASE WHEN n % 3 = 0 THEN 'None' WHEN n % 5 > 0 THEN 'V' || n END, n + 0.5, '2024-01-01 10:00'::timestamp + n * interval '7 h' FROM generate_series(1, 60) n`, `
		CREATE TABLE sold (y text NOT NULL, x bigint NOT NULL, v text, whole int, day date, UNIQUE (y, x));
		CREATE TABLE copies (a int, b text, half numeric, PRIMARY KEY (b, a))`), small(10))
	w.remap("public.orders", backfill.Mapping{Target: "public.sold", Drop: []string{"gone"}, Columns: map[string]string{"x": "a", "y": "b", "v": "nullif(lower(v), 'none')", "whole": "n", "day": "at"}})
	w.remap("public.copies", backfill.Mapping{Source: "public.orders", Drop: []string{"gone", "v", "at"}, Columns: map[string]string{"half": "n / 2"}})
	send := func(r *backfill.Request, rows int) {
		t.Helper()
		w.walk(r.ID)
		w.classify(r.ID)
		require.Len(t, w.staged(r.ID), rows)
		w.Approve(r.ID)
		w.release(r.ID, 100)
		w.drain()
		require.Empty(t, w.setAside())
	}
	judge := func(table string) (verdict string, differences []string) {
		t.Helper()
		run := w.reconcile(table)
		require.EqualValues(t, 60, run.Counts.Rows)
		return run.Verdict, w.differences(run)
	}
	equal := func() {
		t.Helper()
		for _, table := range []string{"public.orders", "public.copies"} {
			verdict, differences := judge(table)
			require.Equal(t, "EQUAL", verdict, "%s: %v", table, differences)
		}
		w.look()
		require.NotContains(t, w.refusals(), "proof")
	}
	send(w.Request("public.orders"), 60)
	send(w.Request("public.copies"), 60)
	require.Equal(t, []string{"k3|3||4|2024-01-02"}, testkit.Strings(t, w.R, `SELECT concat_ws('|', y, x, coalesce(v, ''), whole, day) FROM sold WHERE y = 'k3'`), "assigned, not read anew")
	equal()
	w.onSource(`UPDATE orders SET gone = 'other'`)
	w.drain()
	equal()

	stop := w.sync()
	read := func(key, column, value string) control.ShadowRead {
		return control.ShadowRead{TableID: w.Tables["public.orders"].ID, Key: strings.Split(key, " "), Found: true, Columns: []string{column}, Values: []*string{&value}}
	}
	require.Equal(t, backfill.ShadowCounts{Match: 5}, w.verdicts(read("3 k3", "v", "None"), read("1 k1", "v", "V1"), read("1 k1", "gone", "other"), read("1 k1", "n", "1.5"), read("1 k1", "at", "2024-01-01 17:00:00")))
	w.onReceiver(`UPDATE sold SET v = 'none' WHERE y = 'k3'; UPDATE sold SET v = NULL WHERE y = 'k1'; DELETE FROM sold WHERE y = 'k2'; INSERT INTO sold VALUES ('k2', 22)`)
	require.Equal(t, backfill.ShadowCounts{Match: 1, Mismatch: 2}, w.verdicts(read("3 k3", "v", "None"), read("1 k1", "v", "V1"), read("4 k4", "v", "V4")))
	stop()
	run := w.reconcile("public.orders")
	require.Equal(t, "DIFFERENT", run.Verdict)
	require.ElementsMatch(t, []string{"different 3, k3 v", "different 1, k1 v", "missing 2, k2", "surplus 22, k2"}, w.differences(run))
	verdict, _ := judge("public.copies")
	require.Equal(t, "EQUAL", verdict, "each target by itself")
	w.look()
	require.Contains(t, w.refusals()["proof"], "found")
	d, err := w.Store.CreateRequest(t.Context(), control.NewRequest{Direction: w.Out.ID, TableID: w.Tables["public.orders"].ID, Mode: backfill.ModeDifferences, Proof: run.ID, By: "test"})
	require.NoError(t, err)
	send(d, 3)
	w.onReceiver(`DELETE FROM sold WHERE x = 22`)
	equal()

	// The source's table loses the column that goes nowhere.
	w.onSource(`ALTER TABLE orders DROP COLUMN gone`)
	w.Setup()
	w.count()
	w.onSource(`UPDATE orders SET v = 'None' WHERE a = 4`)
	w.drain()
	equal()

	// The receiver's column takes more than when the mapping was checked: nothing is cut to
	// what it was, and the sides are not compared by it.
	w.onReceiver(`ALTER TABLE sold ALTER whole TYPE numeric(10, 1)`)
	w.onSource(`UPDATE orders SET n = 7.25 WHERE b = 'k7'`)
	w.drain()
	require.Equal(t, []string{"7.3"}, testkit.Strings(t, w.R, `SELECT whole::text FROM sold WHERE y = 'k7'`))
	require.ErrorContains(t, w.tryJudge(w.newRun("public.orders", control.NewReconciliation{})), "column \"whole\" is numeric(10,1) and was integer when its mapping was checked: set the mapping again")
	r := w.Request("public.orders")
	w.walk(r.ID)
	w.classify(r.ID)
	rows, err := w.Store.StagedRows(t.Context(), r.ID, backfill.Overwrite, 0, 100)
	require.NoError(t, err)
	require.Len(t, rows, 59, "all but the one that came since")
	require.Equal(t, "10.5", *rows[0].Result[3])
}
