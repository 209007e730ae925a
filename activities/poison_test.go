package activities

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// statements counts the statements that write a table of the receiver, those that
// are rolled back too: a sequence does not roll back.
func (w *world) statements(table string) (count func() int64) {
	w.onReceiver(fmt.Sprintf(`
		CREATE SEQUENCE seen;
		CREATE FUNCTION seen() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM nextval('public.seen'); RETURN NULL; END $$;
		CREATE TRIGGER seen BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH STATEMENT EXECUTE FUNCTION seen()`, table))
	return func() int64 {
		return testkit.Value[int64](w, w.R, `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM seen`)
	}
}

// One bad row among many is found by halves.
func TestOneBadRowAmongManyIsFoundByHalves(t *testing.T) {
	const rows = 20_000
	w := newWorld(t, orders, "public.orders")
	w.onReceiver(`ALTER TABLE orders ADD CONSTRAINT few CHECK (total <> 13)`)
	statements := w.statements("orders")
	w.onSource(`INSERT INTO orders SELECT g, 'note', CASE WHEN g = 13579 THEN 13 ELSE 0 END FROM generate_series(1, $1::int) g`, rows)
	w.drain()
	require.Len(t, w.setAside(), 1)
	require.Equal(t, rows-1, testkit.Value[int](t, w.R, `SELECT count(*) FROM orders`))
	// An INSERT ... ON CONFLICT DO UPDATE fires the triggers of both.
	n := statements() / 2
	t.Logf("%d statements", n)
	require.Less(t, n, int64(2*15+4), "15 halvings, each one that is refused and one that is not")
}

// A table whose rows are all refused stops before it has filled the quarantine. The
// other tables of the direction go on, and it goes on by itself when mended.
func TestATableThatIsAllPoisonStops(t *testing.T) {
	const note = `CREATE TABLE notes (id int PRIMARY KEY, v text)`
	for name, c := range map[string]struct{ spoil, mend, reason string }{
		"a check":        {`ALTER TABLE orders ADD CONSTRAINT few CHECK (total < 0)`, `ALTER TABLE orders DROP CONSTRAINT few`, `new row for relation "orders" violates check constraint "few"`},
		"a unique index": {`ALTER TABLE orders ADD COLUMN own int DEFAULT 1 UNIQUE; INSERT INTO orders VALUES (-1)`, `DELETE FROM orders; ALTER TABLE orders DROP COLUMN own`, `duplicate key value`},
		"a table gone":   {`ALTER TABLE orders RENAME TO away`, `ALTER TABLE away RENAME TO orders`, `there is no table public.orders`},
		"a column gone":  {`ALTER TABLE orders DROP COLUMN total`, `ALTER TABLE orders ADD COLUMN total int NOT NULL DEFAULT 0`, `column "total" of public.orders does not exist on central`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, orders+"; "+note, "public.orders", "public.notes")
			w.to.RefusedLimit = 20
			w.to.BatchRows = 15
			w.onReceiver(c.spoil)
			w.onSource(`INSERT INTO orders SELECT g, 'note', g FROM generate_series(1, 200) g`)
			w.pushAll()
			w.onSource(`INSERT INTO notes SELECT g FROM generate_series(1, 50) g; UPDATE orders SET total = 1000 WHERE id = 7; DELETE FROM orders WHERE id = 8`)
			w.drain()
			w.Equal("notes")
			require.LessOrEqual(t, len(w.setAside()), 20, "the quarantine does not fill")

			// It is shown wherever one looks, and none of it passes for applied.
			problem := w.to.problem(t.Context())
			require.Contains(t, problem, "public.orders")
			require.Contains(t, problem, c.reason)
			panel, err := w.Store.Panel(t.Context(), testkit.Site, "public.orders", testkit.Source)
			require.NoError(t, err)
			require.Contains(t, panel.Stopped, c.reason)
			require.WithinDuration(t, time.Now(), *panel.StoppedSince, 5*time.Minute)
			stopped, err := w.Store.Queue(t.Context(), control.EntryFilter{Site: testkit.Site, State: "stopped", Limit: 1000})
			require.NoError(t, err)
			require.GreaterOrEqual(t, len(stopped)+len(w.setAside()), 201)
			require.Contains(t, stopped[0].Reason, c.reason)
			require.EqualValues(t, len(stopped), panel.Waiting)
			history, err := w.Store.History(t.Context(), control.EntryFilter{Site: testkit.Site, Table: "public.orders", Limit: 1000})
			require.NoError(t, err)
			for _, e := range history {
				require.NotEqual(t, "applied", e.State)
			}
			lag, err := w.Store.Lag(t.Context(), testkit.Site)
			require.NoError(t, err)
			require.EqualValues(t, len(stopped), lag[0].Waiting+lag[1].Waiting)

			// Nobody can skip a part of it, and trying it again while it is as it was changes nothing.
			require.Equal(t, backfill.Conflict, backfill.CodeOf(w.Store.Wish(t.Context(), testkit.Site, stopped[0].Seq, "skip", "someone")))
			require.NoError(t, w.Store.Wish(t.Context(), testkit.Site, stopped[0].Seq, "retry", "someone"))
			w.apply()
			require.NotEmpty(t, w.to.problem(t.Context()))

			w.onReceiver(c.mend)
			w.onSource(`UPDATE orders SET note = 'newer' WHERE id = 9`)
			w.pushAll()
			testkit.Eventually(w, "the table has caught up", func() bool { w.apply(); return w.to.problem(t.Context()) == "" })
			w.retryAll()
			require.Empty(t, w.setAside())
			w.Equal("orders", "notes")
			queue, err := w.Store.Queue(t.Context(), control.EntryFilter{Site: testkit.Site, Limit: 10})
			require.NoError(t, err)
			require.Empty(t, queue)

			// From here on it goes along as before.
			w.onSource(`INSERT INTO orders VALUES (1000, 'last')`)
			w.drain()
			w.Equal("orders")
		})
	}
}

// Rows that are refused here and there do not stop a table: others are applied in between.
func TestRowsRefusedHereAndThereDoNotStopATable(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.to.RefusedLimit = 5
	w.onReceiver(`ALTER TABLE orders ADD CONSTRAINT few CHECK (total % 3 > 0)`)
	for i := range 30 {
		w.onSource(`INSERT INTO orders VALUES ($1::int, 'a', $1::int)`, i)
		if i%4 == 0 {
			w.drain()
		}
	}
	w.drain()
	require.Empty(t, w.to.problem(t.Context()))
	require.Len(t, w.setAside(), 10)
	// Trying them again does not count either.
	w.wish("retry")
	w.apply()
	require.Empty(t, w.to.problem(t.Context()))
	require.Len(t, w.setAside(), 10)

	// Spread over batches, they stop it all the same.
	for i := range 6 {
		w.onSource(`INSERT INTO orders VALUES (100 + $1::int, 'a', 0)`, i)
		w.drain()
	}
	require.NotEmpty(t, w.to.problem(t.Context()))
	require.Len(t, w.setAside(), 15)
}

// While a table is stopped, a staged row is not called identical because of what
// waits: the change that waits would change the receiver's row again.
func TestGuarantee2_ATableIsStoppedDuringAReview(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.to.RefusedLimit = 1
	w.onSource(`INSERT INTO orders SELECT g, 'a' FROM generate_series(1, 9) g`)
	w.drain()
	w.onReceiver(`ALTER TABLE orders ADD CONSTRAINT few CHECK (note <> 'b')`)
	w.onSource(`UPDATE orders SET note = 'b'`)
	w.drain()
	w.onSource(`UPDATE orders SET note = 'a'`) // in the outbox
	id := w.Request("public.orders").ID
	w.walk(id) // pushes them
	w.apply()
	w.classify(id)
	w.ApproveDiffering(id)
	w.release(id, 100)
	w.onReceiver(`ALTER TABLE orders DROP CONSTRAINT few`)
	w.drain()
	w.Equal("orders")
	require.Empty(t, w.setAside())
}

// A kill between stopping a table and anything that follows loses nothing.
func TestGuarantee5_CrashesWhileATableIsStopped(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.to.RefusedLimit, w.to.BatchRows = 3, 10
	w.onReceiver(`ALTER TABLE orders ADD CONSTRAINT few CHECK (total <> 5)`)
	w.onSource(`INSERT INTO orders SELECT g, 'a', 5 FROM generate_series(1, 25) g; UPDATE orders SET total = 0 WHERE id = 12; DELETE FROM orders WHERE id = 13`)
	w.pushAll()
	for range 20 {
		failAt(w.to, "apply: committed")
		_, _ = (&applier{Agent: w.to}).apply(t.Context())
		w.to = w.agent(testkit.Receiver)
		w.to.RefusedLimit, w.to.BatchRows = 3, 10
	}
	require.Less(t, len(w.setAside()), 4)
	w.onReceiver(`ALTER TABLE orders DROP CONSTRAINT few`)
	for range 20 {
		failAt(w.to, "apply: committed")
		_, _ = (&applier{Agent: w.to}).apply(t.Context())
	}
	w.applyAll()
	w.retryAll()
	w.Equal("orders")
	require.Empty(t, w.to.problem(t.Context()))
}

// Rows whose parents are refused are held together, not found one by one.
func TestChildrenOfRefusedRowsAreHeldTogether(t *testing.T) {
	const refused = `
		CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no' USING ERRCODE = %s; END $$;
		CREATE TRIGGER no BEFORE INSERT ON %s FOR EACH ROW %s EXECUTE FUNCTION no()`
	for name, c := range map[string]struct{ schema, spoil, rows, child string }{
		"of another table": {
			`CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent)`,
			fmt.Sprintf(refused, "'42501'", "parent", ""),
			`INSERT INTO parent SELECT generate_series(1, 500); INSERT INTO child SELECT g, g FROM generate_series(1, 500) g`, "child",
		},
		"of the same": {
			`CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES child)`,
			fmt.Sprintf(refused, "'P0001'", "child", "WHEN (new.id = 1)"),
			`INSERT INTO child VALUES (1, NULL); INSERT INTO child SELECT g, g / 2 FROM generate_series(2, 500) g; INSERT INTO child SELECT g, NULL FROM generate_series(501, 600) g`, "child",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, c.schema, "public.parent", "public.child")
			w.onReceiver(c.spoil)
			statements := w.statements(c.child)
			w.onSource(c.rows)
			w.pushAll()
			w.applyAll()
			n := statements() / 2
			t.Logf("%d statements", n)
			require.Less(t, n, int64(60))
			require.Equal(t, testkit.Value[int](t, w.S, `SELECT count(*) FROM child`), testkit.Value[int](t, w.R, `SELECT (SELECT count(*) FROM child) + (SELECT count(*) FROM backfill_maple_central.held WHERE table_id = $1)`, w.Tables["public.child"].ID))
			w.onReceiver(`DROP FUNCTION no CASCADE`)
			w.retryAll()
			w.drain()
			w.Equal("parent", "child")
		})
	}
}
