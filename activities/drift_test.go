package activities

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// A table of the drift tests, plain and partitioned: code is another key it could have.
const (
	plainTable = `CREATE TABLE orders (id int PRIMARY KEY, code text NOT NULL UNIQUE, note text, total int NOT NULL DEFAULT 0)`
	splitTable = `CREATE TABLE orders (id int PRIMARY KEY, code text NOT NULL, note text, total int NOT NULL DEFAULT 0) PARTITION BY RANGE (id);
		CREATE TABLE orders_1 PARTITION OF orders FOR VALUES FROM (0) TO (20); CREATE TABLE orders_2 PARTITION OF orders FOR VALUES FROM (20) TO (1000)`
	swapTable = `CREATE TABLE orders_new (LIKE orders INCLUDING ALL); INSERT INTO orders_new SELECT * FROM orders;
		ALTER TABLE orders RENAME TO orders_old; ALTER TABLE orders_new RENAME TO orders`
)

// drift is a change of a table's shape on one side, with how it is mended.
type drift struct {
	name   string
	on     string // the side
	sql    string
	schema string // "" for the plain table
	writes string // what the application then does on the source; "" for the usual
	mendOn string // the side where it is mended; "" when there is nothing to mend but what setup does
	mend   string
}

const (
	usual    = `UPDATE orders SET note = 'later' WHERE id IN (3, 25); INSERT INTO orders (id, code, note) VALUES (100, 'c100', 'new'); DELETE FROM orders WHERE id = 4`
	noDelete = `UPDATE orders SET note = 'later' WHERE id IN (3, 25); INSERT INTO orders (id, code, note) VALUES (100, 'c100', 'new')`
	silent   = `SELECT`
)

var drifts = []drift{
	{name: "column added", on: testkit.Source, sql: `ALTER TABLE orders ADD more int DEFAULT 5`, mendOn: testkit.Receiver, mend: `ALTER TABLE orders ADD more int DEFAULT 5`},
	{name: "column added", on: testkit.Receiver, sql: `ALTER TABLE orders ADD more int DEFAULT 5`, mendOn: testkit.Source, mend: `ALTER TABLE orders ADD more int DEFAULT 5`},
	{name: "column dropped", on: testkit.Source, sql: `ALTER TABLE orders DROP total`, mendOn: testkit.Receiver, mend: `ALTER TABLE orders DROP total`},
	{name: "column dropped", on: testkit.Receiver, sql: `ALTER TABLE orders DROP total`, mendOn: testkit.Source, mend: `ALTER TABLE orders DROP total`},
	{name: "column renamed", on: testkit.Source, sql: `ALTER TABLE orders RENAME total TO amount`, mendOn: testkit.Receiver, mend: `ALTER TABLE orders RENAME total TO amount`},
	{name: "column renamed", on: testkit.Receiver, sql: `ALTER TABLE orders RENAME total TO amount`, mendOn: testkit.Source, mend: `ALTER TABLE orders RENAME total TO amount`},
	{name: "column retyped", on: testkit.Source, sql: `ALTER TABLE orders ALTER total TYPE bigint`, writes: usual + `; UPDATE orders SET total = 5000000000 WHERE id = 7`,
		mendOn: testkit.Receiver, mend: `ALTER TABLE orders ALTER total TYPE bigint`},
	{name: "column retyped", on: testkit.Receiver, sql: `ALTER TABLE orders ALTER total TYPE smallint`, writes: usual + `; UPDATE orders SET total = 40000 WHERE id = 7`,
		mendOn: testkit.Receiver, mend: `ALTER TABLE orders ALTER total TYPE int`},
	{name: "column retyped without rewrite", on: testkit.Receiver, sql: `ALTER TABLE orders ALTER note TYPE varchar(7)`, writes: usual + `; UPDATE orders SET note = 'much longer' WHERE id = 5`, mendOn: testkit.Receiver, mend: `ALTER TABLE orders ALTER note TYPE text`},
	{name: "column rewritten", on: testkit.Source, sql: `ALTER TABLE orders ALTER total TYPE int USING total + 1`},
	{name: "key changed", on: testkit.Source, sql: `ALTER TABLE orders DROP CONSTRAINT orders_pkey`, writes: noDelete, mendOn: testkit.Receiver, mend: `ALTER TABLE orders DROP CONSTRAINT orders_pkey`},
	{name: "key changed", on: testkit.Receiver, sql: `ALTER TABLE orders DROP CONSTRAINT orders_pkey`, mendOn: testkit.Receiver, mend: `ALTER TABLE orders ADD PRIMARY KEY (id)`},
	{name: "key renamed", on: testkit.Source, sql: `ALTER TABLE orders RENAME id TO number`, writes: `UPDATE orders SET note = 'later' WHERE number IN (3, 25); INSERT INTO orders (number, code, note) VALUES (100, 'c100', 'new')`,
		mendOn: testkit.Receiver, mend: `ALTER TABLE orders RENAME id TO number`},
	{name: "table dropped", on: testkit.Source, sql: `DROP TABLE orders`, writes: silent, mendOn: testkit.Source, mend: plainTable + `; INSERT INTO orders SELECT g, 'c' || g, 'history', g FROM generate_series(1, 30) g`},
	{name: "table dropped", on: testkit.Receiver, sql: `DROP TABLE orders`, mendOn: testkit.Receiver, mend: plainTable},
	{name: "table renamed", on: testkit.Source, sql: `ALTER TABLE orders RENAME TO away`, writes: `UPDATE away SET note = 'later' WHERE id IN (3, 25); INSERT INTO away (id, code, note) VALUES (100, 'c100', 'new'); DELETE FROM away WHERE id = 4`,
		mendOn: testkit.Source, mend: `ALTER TABLE away RENAME TO orders`},
	{name: "table renamed", on: testkit.Receiver, sql: `ALTER TABLE orders RENAME TO away`, mendOn: testkit.Receiver, mend: `ALTER TABLE away RENAME TO orders`},
	{name: "table swapped", on: testkit.Source, sql: swapTable, writes: noDelete},
	{name: "table swapped", on: testkit.Receiver, sql: swapTable},
	{name: "truncated", on: testkit.Source, sql: `TRUNCATE orders`},
	{name: "truncated", on: testkit.Receiver, sql: `TRUNCATE orders`},
	{name: "constraint added", on: testkit.Receiver, sql: `ALTER TABLE orders ADD CONSTRAINT never CHECK (note <> 'later')`, mendOn: testkit.Receiver, mend: `ALTER TABLE orders DROP CONSTRAINT never`},
	{name: "partition attached", on: testkit.Source, schema: splitTable, sql: `CREATE TABLE orders_3 (LIKE orders INCLUDING ALL); INSERT INTO orders_3 VALUES (2000, 'c2000', 'attached', 1); ALTER TABLE orders ATTACH PARTITION orders_3 FOR VALUES FROM (1000) TO (3000)`,
		writes: noDelete + `; UPDATE orders SET total = 2 WHERE id = 2000`, mendOn: testkit.Receiver, mend: `CREATE TABLE orders_3 PARTITION OF orders FOR VALUES FROM (1000) TO (3000)`},
	{name: "partition detached", on: testkit.Source, schema: splitTable, sql: `ALTER TABLE orders DETACH PARTITION orders_2`, writes: `UPDATE orders SET note = 'later' WHERE id = 3; DELETE FROM orders WHERE id = 4`,
		mendOn: testkit.Source, mend: `ALTER TABLE orders ATTACH PARTITION orders_2 FOR VALUES FROM (20) TO (1000)`},
	{name: "partition detached", on: testkit.Receiver, schema: splitTable, sql: `ALTER TABLE orders DETACH PARTITION orders_2`, mendOn: testkit.Receiver, mend: `ALTER TABLE orders ATTACH PARTITION orders_2 FOR VALUES FROM (20) TO (1000)`},
}

var phases = []string{"capture", "push", "walk", "review", "classify", "release", "apply"}

// A table that changes its shape under way, on either side, at any time: no write of
// the application fails; no row is wrong on the receiver; the request finishes, or
// ends FAILED with a reason and its staged rows kept; changes are applied, or set
// aside with a reason; and once it is mended, retries and another backfill, which may
// be requested where the sides differ, make the sides equal.
//
// Each change meets one phase; with BACKFILL_DRIFT=all every one.
func TestGuarantee2_TablesThatChangeTheirShapeUnderWay(t *testing.T) {
	for i, d := range drifts {
		for j, phase := range phases {
			if os.Getenv("BACKFILL_DRIFT") != "all" && j != i*3%len(phases) {
				continue
			}
			t.Run(fmt.Sprintf("%s on %s during %s", d.name, d.on, phase), func(t *testing.T) { driftsDuring(t, d, phase) })
		}
	}
}

func driftsDuring(t *testing.T, d drift, phase string) {
	schema := d.schema
	if schema == "" {
		schema = plainTable
	}
	w := newWorld(t, schema, "public.orders")
	w.from.PageRows = 10
	// History that capture never saw, a third of it on the receiver.
	w.onSource(`BEGIN; SET LOCAL backfill.applying = 'maple'; INSERT INTO orders SELECT g, 'c' || g, 'history', g FROM generate_series(1, 30) g; COMMIT`)
	w.onReceiver(`INSERT INTO orders SELECT g, 'c' || g, 'history', g FROM generate_series(1, 10) g`)
	w.onSource(`CREATE TABLE versions (r jsonb); INSERT INTO versions SELECT to_jsonb(o) FROM orders o`)
	w.count()

	changed := false
	change := func() {
		require.False(t, changed)
		changed = true
		if d.on == testkit.Source {
			w.onSource(d.sql)
		} else {
			w.onReceiver(d.sql)
		}
	}
	// A write from before the change is on its way, too.
	before := func() { w.onSource(`UPDATE orders SET note = 'before' WHERE id IN (2, 22)`); w.remember() }

	id := w.Request("public.orders").ID
	switch phase {
	case "capture":
		before()
		change()
	case "push":
		before()
		meanwhile(w.from, "push: committed", change)
		w.push()
	case "walk":
		before()
		k := w.claim(w.from, id)
		require.NoError(t, k.freeze(t.Context()))
		_, err := k.page(t.Context())
		require.NoError(t, err)
		require.NoError(t, w.Store.Hand(t.Context(), k.lease))
		change()
	case "review":
		w.walk(id)
		w.classify(id)
		before()
		change()
	case "classify":
		before()
		w.walk(id)
		change()
	case "release":
		w.walk(id)
		w.Approve(id)
		_, _, err := w.Store.ReleaseBatch(t.Context(), id, 10)
		require.NoError(t, err)
		before()
		change()
	case "apply":
		w.walk(id)
		w.Approve(id)
		w.release(id, 100)
		before()
		w.push()
		change()
	}
	require.True(t, changed)
	// Whatever the shape, the application goes on.
	writes := d.writes
	if writes == "" {
		writes = usual
	}
	w.onSource(writes)
	w.remember()
	w.goOn(id)

	r := w.Now(id)
	require.Contains(t, []backfill.State{backfill.Finished, backfill.Failed}, r.State)
	if r.State == backfill.Failed {
		require.NotEmpty(t, r.Reason)
	}
	w.staged(id) // they are kept
	w.noneWrong()

	if d.mendOn == testkit.Source {
		w.onSource(d.mend)
	} else if d.mendOn != "" {
		w.onReceiver(d.mend)
	}
	w.remember()
	w.mended(t)
}

// remember keeps every version of a row that the source has had.
func (w *world) remember() {
	w.Helper()
	w.onSource(`DO $$ BEGIN
		IF to_regclass('orders') IS NOT NULL THEN INSERT INTO versions SELECT to_jsonb(o) FROM orders o; END IF;
		IF to_regclass('away') IS NOT NULL THEN INSERT INTO versions SELECT to_jsonb(o) FROM away o; END IF;
	END $$`)
}

// noneWrong checks that each row of the receiver is one that the source has had, in
// the columns that both have.
func (w *world) noneWrong() {
	w.Helper()
	if !testkit.Value[bool](w, w.R, `SELECT to_regclass('orders') IS NOT NULL`) {
		return
	}
	rows := testkit.Value[string](w, w.R, `SELECT coalesce(jsonb_agg(to_jsonb(o)), '[]')::text FROM orders o`)
	wrong := testkit.Strings(w, w.S, `
		SELECT r::text FROM jsonb_array_elements($1::text::jsonb) r
		 WHERE NOT EXISTS (SELECT FROM versions v WHERE v.r->>'code' = r->>'code' AND NOT EXISTS (
		     SELECT FROM jsonb_each_text(r) a JOIN jsonb_each_text(v.r) b USING (key) WHERE a.value IS DISTINCT FROM b.value))`, rows)
	require.Empty(w, wrong, "rows that the source never had")
}

// goOn does what agents and workflows would, until nothing moves any more.
func (w *world) goOn(id int64) {
	w.Helper()
	for range 3 {
		w.push()
		w.count()
		w.see(id)
		for range 3 {
			w.apply()
		}
	}
}

// see sees a request through as its workflow would.
func (w *world) see(id int64) {
	w.Helper()
	ctx := w.Context()
	fails := func(err error) {
		if err == nil || errors.Is(err, control.ErrFenced) {
			return
		}
		require.ErrorContains(w, permanent(err), ErrPermanent)
		_, err = w.Store.Close(ctx, id, "backfill", backfill.Failed, message(err))
		require.NoError(w, err)
	}
	if s := w.Now(id).State; s == backfill.Pending || s == backfill.InProgress {
		k := w.claim(w.from, id)
		fails(toTheEnd(ctx, k))
	}
	if r := w.Now(id); r.State == backfill.AwaitingReview {
		_ = w.to.classify(ctx, r, 0, r.Staged) // the review does not depend on it
		w.Approve(id)
	}
	for w.Now(id).State == backfill.Releasing {
		_, _, err := w.Store.ReleaseBatch(ctx, id, 10)
		fails(err)
	}
}

// mended does what a person would once the shape is right again, and checks that the
// sides become equal.
func (w *world) mended(t *testing.T) {
	t.Helper()
	w.Setup()
	w.from, w.to = w.agent(testkit.Source), w.agent(testkit.Receiver)
	w.drain()
	w.count()
	w.retryAll()
	// What cannot be applied any more, because it was read under a shape that is gone, is
	// skipped, and its row sent as it is now.
	rows, err := w.to.db.SetAside(t.Context())
	require.NoError(t, err)
	w.wish("skip")
	w.apply()
	for _, r := range rows {
		if len(r.Key) > 0 {
			id := w.Request("public.orders", r.Key...).ID
			w.see(id)
			require.Equal(t, backfill.Finished, w.Now(id).State, w.Now(id).Reason)
		}
	}
	w.drain()
	w.count()
	if p := w.panel(); p.CanRequest() {
		id := w.Request("public.orders").ID
		w.see(id)
		require.Equal(t, backfill.Finished, w.Now(id).State, w.Now(id).Reason)
		w.drain()
	}
	require.Empty(t, w.setAside())
	require.Empty(t, w.to.problem(t.Context()))
	w.noneWrong()
	w.Equal("orders")
	w.count()
	require.Empty(t, w.panel().Source.Gap)
}
