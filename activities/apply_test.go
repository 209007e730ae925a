package activities

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

const family = `
	CREATE TABLE parents (id int PRIMARY KEY, name text);
	CREATE TABLE children (id int PRIMARY KEY, parent int NOT NULL REFERENCES parents ON UPDATE CASCADE ON DELETE CASCADE, name text);
	CREATE TABLE grandchildren (id int PRIMARY KEY, child int REFERENCES children ON UPDATE CASCADE ON DELETE CASCADE)`

var familyTables = []string{"public.parents", "public.children", "public.grandchildren"}

func TestGuarantee2_ForeignKeys(t *testing.T) {
	for name, steps := range map[string][]string{
		"a family":         {`INSERT INTO parents VALUES (1, 'a'), (2, 'b'); INSERT INTO children VALUES (10, 1), (20, 2); INSERT INTO grandchildren VALUES (100, 10), (200, 20)`},
		"key of a parent":  {`INSERT INTO parents VALUES (1, 'a'); INSERT INTO children VALUES (10, 1); INSERT INTO grandchildren VALUES (100, 10)`, `UPDATE parents SET id = 2`, `UPDATE children SET id = 11`},
		"another parent":   {`INSERT INTO parents VALUES (1, 'a'), (2, 'b'); INSERT INTO children VALUES (10, 1); INSERT INTO grandchildren VALUES (100, 10)`, `UPDATE children SET parent = 2; DELETE FROM parents WHERE id = 1`},
		"cascading delete": {`INSERT INTO parents VALUES (1, 'a'), (2, 'b'); INSERT INTO children VALUES (10, 1), (20, 2); INSERT INTO grandchildren VALUES (100, 10), (200, 20)`, `DELETE FROM parents WHERE id = 1`},
		"grandchild that moves while its branch is deleted": {`INSERT INTO parents VALUES (1, 'a'), (2, 'b'); INSERT INTO children VALUES (10, 1), (20, 2); INSERT INTO grandchildren VALUES (100, 10)`,
			`UPDATE grandchildren SET child = 20; DELETE FROM parents WHERE id = 1`},
		"delete and insert": {`INSERT INTO parents VALUES (1, 'a'); INSERT INTO children VALUES (10, 1)`, `DELETE FROM parents; INSERT INTO parents VALUES (1, 'again'); INSERT INTO children VALUES (11, 1)`},
		"truncate":          {`INSERT INTO parents VALUES (1, 'a'); INSERT INTO children VALUES (10, 1); INSERT INTO grandchildren VALUES (100, 10)`, `TRUNCATE parents CASCADE; INSERT INTO parents VALUES (1, 'again')`},
	} {
		for _, batch := range []int{1, 1000} {
			t.Run(fmt.Sprint(name, ", batches of ", batch), func(t *testing.T) {
				w := newWorld(t, family, familyTables...)
				w.from.BatchRows, w.to.BatchRows = batch, batch
				for _, sql := range steps {
					w.onSource(sql)
					w.drain()
					w.Equal(familyTables...)
					require.Empty(t, w.setAside())
				}
			})
		}
	}
}

// Rows that refer to each other in a circle can only be written together.
func TestGuarantee2_CirclesOfForeignKeys(t *testing.T) {
	const circle = `
		CREATE TABLE a (id int PRIMARY KEY, b int);
		CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a DEFERRABLE INITIALLY DEFERRED);
		ALTER TABLE a ADD FOREIGN KEY (b) REFERENCES b DEFERRABLE INITIALLY DEFERRED;
		CREATE TABLE nodes (id int PRIMARY KEY, up int REFERENCES nodes%s)`
	w := worldOf(testkit.NewPairOf(t, fmt.Sprintf(circle, ` DEFERRABLE INITIALLY DEFERRED`), fmt.Sprintf(circle, ``), "public.a", "public.b", "public.nodes"), Settings{})
	w.onSource(`BEGIN; INSERT INTO a VALUES (1, 1), (2, 2); INSERT INTO b VALUES (1, 2), (2, 1); COMMIT`)
	w.onSource(`BEGIN; INSERT INTO nodes SELECT g, g % 50 + 1 FROM generate_series(1, 50) g; COMMIT`)
	w.drain()
	w.Equal("a", "b", "nodes")
	require.Empty(t, w.setAside())
	w.onSource(`BEGIN; DELETE FROM nodes; INSERT INTO nodes VALUES (1, 2), (2, 1); DELETE FROM a; DELETE FROM b; COMMIT`)
	w.drain()
	w.Equal("a", "b", "nodes")
	require.Empty(t, w.setAside())

	// In batches that cut the circle, its parts are held until the rest has come.
	w.from.BatchRows, w.to.BatchRows = 3, 3
	w.onSource(`BEGIN; DELETE FROM nodes; INSERT INTO nodes SELECT g, g % 20 + 1 FROM generate_series(1, 20) g; COMMIT`)
	w.drain()
	w.Equal("nodes")
	require.Empty(t, w.setAside())
}

// Where deletes cascade in a circle, what is deleted together goes together, and
// what the source still has stays.
func TestGuarantee2_CirclesOfCascades(t *testing.T) {
	w := newWorld(t, `
		CREATE TABLE a (id int PRIMARY KEY, b int);
		CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a ON DELETE CASCADE ON UPDATE CASCADE DEFERRABLE INITIALLY DEFERRED);
		ALTER TABLE a ADD FOREIGN KEY (b) REFERENCES b ON DELETE CASCADE ON UPDATE CASCADE DEFERRABLE INITIALLY DEFERRED;
		CREATE TABLE c (id int PRIMARY KEY, a int REFERENCES a ON DELETE CASCADE ON UPDATE CASCADE);
		CREATE TABLE nodes (id int PRIMARY KEY, up int REFERENCES nodes ON DELETE CASCADE ON UPDATE CASCADE)`,
		"public.a", "public.b", "public.c", "public.nodes")
	for _, batch := range []int{1000, 2, 1} {
		w.from.BatchRows, w.to.BatchRows = batch, batch
		for _, sql := range []string{
			`BEGIN; INSERT INTO a SELECT g, g FROM generate_series(1, 6) g; INSERT INTO b SELECT g, g % 6 + 1 FROM generate_series(1, 6) g; COMMIT`,
			`INSERT INTO c SELECT g, g FROM generate_series(1, 6) g; INSERT INTO nodes SELECT g, nullif(g / 2, 0) FROM generate_series(1, 15) g`,
			`UPDATE nodes SET id = 100 WHERE id = 1; UPDATE nodes SET up = 3 WHERE id = 5; DELETE FROM nodes WHERE id = 2`,
			`UPDATE a SET id = id + 10 WHERE id < 3`,
			`BEGIN; UPDATE b SET a = 11; DELETE FROM a WHERE id = 12; COMMIT`,
			`DELETE FROM a; DELETE FROM nodes`,
		} {
			w.onSource(sql)
			w.drain()
			for range 8 {
				w.apply()
			}
			w.Equal("a", "b", "c", "nodes")
			require.Empty(t, w.setAside())
		}
	}
}

// A backfill can bring children before their parents.
func TestGuarantee2_ChildrenBeforeTheirParentsAreHeld(t *testing.T) {
	w := newWorld(t, family, familyTables...)
	w.onSource(`ALTER TABLE parents DISABLE TRIGGER ALL; ALTER TABLE children DISABLE TRIGGER ALL; ALTER TABLE grandchildren DISABLE TRIGGER ALL`)
	w.onSource(`INSERT INTO parents SELECT g FROM generate_series(1, 30) g; INSERT INTO children SELECT g, g FROM generate_series(1, 30) g; INSERT INTO grandchildren SELECT g, g FROM generate_series(1, 30) g`)
	w.onSource(`ALTER TABLE parents ENABLE TRIGGER ALL; ALTER TABLE children ENABLE TRIGGER ALL; ALTER TABLE grandchildren ENABLE TRIGGER ALL`)
	w.Setup()
	for i, table := range []string{"public.grandchildren", "public.children", "public.parents"} {
		id := w.Request(table).ID
		w.walk(id)
		w.Approve(id)
		w.release(id, 7)
		w.applyAll()
		require.Len(t, w.setAside(), []int{30, 60, 0}[i])
		// While they are held, they change: what is newer replaces them.
		if i == 0 {
			w.onSource(`UPDATE grandchildren SET child = 1 WHERE id = 5; DELETE FROM grandchildren WHERE id = 6; INSERT INTO grandchildren VALUES (31, 2)`)
			w.drain()
		}
	}
	w.drain()
	w.Equal(familyTables...)
	require.Empty(t, w.setAside())
}

// Each held row is shown in the control database, and quarantined in the end.
func TestHeldRowsAreQuarantinedAfterALimit(t *testing.T) {
	w := worldOf(testkit.NewPairOf(t, `CREATE TABLE children (id int PRIMARY KEY, parent int)`,
		`CREATE TABLE parents (id int PRIMARY KEY); CREATE TABLE children (id int PRIMARY KEY, parent int REFERENCES parents)`, "public.children"), Settings{})
	w.onSource(`INSERT INTO children VALUES (1, 1), (2, NULL)`)
	w.drain()
	require.Len(t, w.setAside(), 1)
	states := func() []string {
		queue, err := w.Store.Queue(t.Context(), control.EntryFilter{Site: testkit.Site, Limit: 10})
		require.NoError(t, err)
		out := []string{}
		for _, e := range queue {
			out = append(out, e.State+" "+e.Key.String())
			require.Contains(t, e.Reason, "parents")
		}
		return out
	}
	require.Equal(t, []string{"held 1"}, states())
	w.to.HoldLimit = time.Nanosecond
	w.apply()
	require.Equal(t, []string{"quarantined 1"}, states())
	w.to.HoldLimit = time.Hour
	w.onReceiver(`INSERT INTO parents VALUES (1)`)
	w.apply() // not tried by itself any more
	require.Equal(t, []string{"quarantined 1"}, states())
	w.retryAll()
	require.Empty(t, states())
	w.Equal("children")
}

func TestGuarantee2_SwapsOfUniqueValues(t *testing.T) {
	const seats = `CREATE TABLE seats (id int PRIMARY KEY, guest text UNIQUE%s)`
	w := worldOf(testkit.NewPairOf(t, fmt.Sprintf(seats, ` DEFERRABLE INITIALLY DEFERRED`), fmt.Sprintf(seats, ``), "public.seats"), Settings{})
	w.onSource(`INSERT INTO seats SELECT g, 'guest ' || g FROM generate_series(1, 10) g`)
	w.drain()
	for _, sql := range []string{
		`UPDATE seats SET guest = 'guest ' || (id % 10 + 1)`,
		`UPDATE seats SET guest = (ARRAY['b', 'a'])[id] WHERE id < 3; UPDATE seats SET guest = (ARRAY['a', 'b'])[id] WHERE id < 3`,
		`DELETE FROM seats WHERE id = 5; UPDATE seats SET guest = 'guest of 5' WHERE id = 6; INSERT INTO seats VALUES (5, 'new')`,
	} {
		w.onSource(sql)
		w.drain()
		w.Equal("seats")
		require.Empty(t, w.setAside())
	}
	// In batches of one row the first is held until the second has come.
	w.from.BatchRows, w.to.BatchRows = 1, 1
	w.onSource(`UPDATE seats SET guest = 'guest ' || (id * 7 % 11)`)
	w.drain()
	for range 5 {
		w.apply()
	}
	w.Equal("seats")
	require.Empty(t, w.setAside())
}

// What only the receiver has of a row is never touched.
func TestColumnsOnlyTheReceiverHasKeepTheirValues(t *testing.T) {
	w := worldOf(testkit.NewPairOf(t, `CREATE TABLE seats (id int PRIMARY KEY, guest text UNIQUE DEFERRABLE)`,
		`CREATE TABLE seats (id int PRIMARY KEY, guest text UNIQUE, own text DEFAULT 'default')`, "public.seats"), Settings{})
	w.onSource(`INSERT INTO seats VALUES (1, 'a'), (2, 'b'), (3, 'c')`)
	w.drain()
	w.onReceiver(`UPDATE seats SET own = 'precious'`)
	w.onSource(`UPDATE seats SET guest = CASE id WHEN 1 THEN 'b' WHEN 2 THEN 'a' ELSE 'd' END`)
	w.drain()
	require.Equal(t, 3, testkit.Value[int](t, w.R, `SELECT count(*) FROM seats WHERE own = 'precious'`))
	require.Equal(t, "d", testkit.Value[string](t, w.R, `SELECT guest FROM seats WHERE id = 3`))
	require.Len(t, w.setAside(), 2, "a swap needs more than an update can do, and says so")
}

// A row that is refused is set aside with PostgreSQL's own message, and the rest
// goes on; when it is mended, or something newer comes, it is applied.
func TestARowThatIsRefusedIsSetAsideAndTheRestGoesOn(t *testing.T) {
	for name, c := range map[string]struct{ receiver, mend, message string }{
		"a check":         {`ALTER TABLE orders ADD CONSTRAINT few CHECK (total < 1000)`, `ALTER TABLE orders DROP CONSTRAINT few`, `violates check constraint "few"`},
		"a shorter type":  {`ALTER TABLE orders ALTER note TYPE varchar(10)`, `ALTER TABLE orders ALTER note TYPE text`, "too long"},
		"a smaller type":  {`ALTER TABLE orders ALTER total TYPE smallint`, `ALTER TABLE orders ALTER total TYPE int`, "out of range"},
		"another type":    {`ALTER TABLE orders ALTER note TYPE int USING 0`, `ALTER TABLE orders ALTER note TYPE text`, "invalid input syntax"},
		"a trigger":       {`CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.total > 1000 THEN RAISE 'not here'; END IF; RETURN new; END $$; CREATE TRIGGER no BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION no()`, `DROP TRIGGER no ON orders`, "not here"},
		"a swallowed row": {`CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.total > 1000 THEN RETURN NULL; END IF; RETURN new; END $$; CREATE TRIGGER no BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION no()`, `DROP TRIGGER no ON orders`, "swallowed"},
		"a unique index":  {`CREATE UNIQUE INDEX one ON orders ((total > 1000)) WHERE total > 1000; INSERT INTO orders VALUES (-1, '1', 2000)`, `DROP INDEX one; DELETE FROM orders WHERE id = -1`, "duplicate key"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, orders, "public.orders")
			w.onReceiver(c.receiver)
			w.onSource(`INSERT INTO orders SELECT g, CASE WHEN g % 10 = 5 THEN 'a note that is long' ELSE '1' END, CASE WHEN g % 10 = 5 THEN 40000 ELSE g END FROM generate_series(1, 40) g`)
			w.drain()
			aside := w.setAside()
			if name == "a unique index" {
				require.Len(t, aside, 4)
			} else {
				require.Len(t, aside, 4)
				for _, a := range aside {
					require.Contains(t, a, "quarantined")
				}
			}
			for _, a := range aside {
				require.Contains(t, a, c.message)
			}
			require.Equal(t, 36, testkit.Value[int](t, w.R, `SELECT count(*) FROM orders WHERE id > 0`))
			// Something newer replaces one, whatever it is spelled like; another is deleted.
			w.onSource(`UPDATE orders SET id = 5.00, note = '2', total = 2 WHERE id = 5; DELETE FROM orders WHERE id = 15`)
			w.drain()
			require.Len(t, w.setAside(), 2)
			w.onReceiver(c.mend)
			w.retryAll()
			require.Empty(t, w.setAside())
			if name == "another type" {
				w.onReceiver(`UPDATE orders SET note = '1' WHERE note = '0'`)
			}
			w.Equal("orders")
		})
	}
}

// A retry never applies an older read after a newer one.
func TestGuarantee4_ARetryNeverBringsBackOlderValues(t *testing.T) {
	t.Run("another spelling", func(t *testing.T) {
		w := newWorld(t, orders, "public.orders")
		w.onReceiver(`ALTER TABLE orders ADD CONSTRAINT few CHECK (total < 1000)`)
		w.onSource(`INSERT INTO orders VALUES (1.0, 'old', 5000)`)
		w.drain()
		w.onSource(`UPDATE orders SET id = 1.00, note = 'new', total = 1`)
		w.drain()
		w.onReceiver(`ALTER TABLE orders DROP CONSTRAINT few`)
		w.applyAll()
		w.retryAll()
		w.Equal("orders")
	})
	// A key that cannot be read as the receiver's type must not hide the others.
	t.Run("beside a key that cannot be read", func(t *testing.T) {
		w := worldOf(testkit.NewPairOf(t, `CREATE TABLE orders (id text PRIMARY KEY, note text, total int)`,
			`CREATE TABLE orders (id numeric PRIMARY KEY, note text, total int CHECK (total < 1000))`, "public.orders"), Settings{})
		w.onSource(`INSERT INTO orders VALUES ('no number', 'x', 1), ('1.0', 'old', 5000), ('3', 'fine', 1)`)
		w.drain()
		require.Len(t, w.setAside(), 2)
		w.onSource(`DELETE FROM orders WHERE id = '1.0'`)
		w.push()
		w.onSource(`INSERT INTO orders VALUES ('1.00', 'new', 2)`)
		w.drain()
		require.Len(t, w.setAside(), 1)
		w.onReceiver(`ALTER TABLE orders DROP CONSTRAINT orders_total_check`)
		w.retryAll()
		require.Equal(t, map[string]string{"1.00": "new", "3": "fine"}, w.receiver())
	})
	// Two changes of a key are set aside for different reasons, and the newer is retried first.
	t.Run("newer first", func(t *testing.T) {
		w := newWorld(t, orders, "public.orders")
		w.onReceiver(`ALTER TABLE orders ADD CONSTRAINT few CHECK (total < 1000)`)
		w.onSource(`INSERT INTO orders VALUES (1, 'old', 5000)`)
		w.drain()
		w.onSource(`ALTER TABLE orders ADD COLUMN more int; UPDATE orders SET note = 'new', total = 1`)
		w.drain()
		rows, err := w.to.db.SetAside(t.Context())
		require.NoError(t, err)
		w.onReceiver(`ALTER TABLE orders DROP CONSTRAINT few; ALTER TABLE orders ADD COLUMN more int`)
		newest := rows[len(rows)-1].Seq
		require.NoError(t, w.Store.Wish(t.Context(), testkit.Site, newest, "retry", "someone"))
		w.applyAll()
		w.Equal("orders")
		w.retryAll()
		w.Equal("orders")
	})
}

// Keys that cannot be read as the receiver's type are set aside, under whatever
// layout they came.
func TestKeysThatCannotBeReadAreQuarantined(t *testing.T) {
	w := worldOf(testkit.NewPairOf(t, `CREATE TABLE orders (id text PRIMARY KEY, note text)`,
		`CREATE TABLE orders (id int PRIMARY KEY, note text, more int)`, "public.orders"), Settings{})
	w.onSource(`INSERT INTO orders VALUES ('1', 'a'), ('2', 'b')`)
	w.push()
	w.onSource(`ALTER TABLE orders ADD COLUMN more int; INSERT INTO orders VALUES ('three', 'c', 3), ('4', 'd', 4)`)
	w.push()
	w.applyAll()
	require.Len(t, w.setAside(), 1)
	require.Equal(t, map[string]string{"1": "a", "2": "b", "4": "d"}, w.receiver())
	w.wish("skip")
	w.apply()
	require.Empty(t, w.setAside())
	queue, err := w.Store.Queue(t.Context(), control.EntryFilter{Site: testkit.Site, State: "skipped", Limit: 10})
	require.NoError(t, err)
	require.Len(t, queue, 1)
}

// A truncate leaves no row behind, whatever is in its way.
func TestGuarantee2_Truncates(t *testing.T) {
	t.Run("rows that others refer to go later", func(t *testing.T) {
		const tables = `CREATE TABLE parents (id int PRIMARY KEY); CREATE TABLE children (id int PRIMARY KEY, parent int%s)`
		w := worldOf(testkit.NewPairOf(t, fmt.Sprintf(tables, ""), fmt.Sprintf(tables, " REFERENCES parents"), "public.parents", "public.children"), Settings{})
		w.onSource(`INSERT INTO parents SELECT generate_series(1, 9); INSERT INTO children SELECT g, g FROM generate_series(1, 3) g`)
		w.drain()
		w.onSource(`TRUNCATE parents; INSERT INTO parents VALUES (2), (20)`)
		w.drain()
		require.Equal(t, []string{"(1)", "(2)", "(20)", "(3)"}, testkit.Rows(t, w.R, "parents"))
		require.Len(t, testkit.Strings(t, w.R, `SELECT key::text FROM backfill_maple_central.held`), 2)
		w.onSource(`DELETE FROM children WHERE id <> 2`)
		w.drain()
		w.drain()
		w.Equal("parents", "children")
		require.Empty(t, w.setAside())
	})
	// One push has both truncates and what was inserted since, and tables named so that
	// children come first.
	for _, batch := range []int{1000, 1} {
		t.Run(fmt.Sprint("of parents whose children were inserted again, batches of ", batch), func(t *testing.T) {
			w := newWorld(t, `
				CREATE TABLE p (id int PRIMARY KEY);
				CREATE TABLE a (id int PRIMARY KEY, p int REFERENCES p ON DELETE CASCADE);
				CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a ON DELETE CASCADE)`, "public.p", "public.a", "public.b")
			w.from.BatchRows, w.to.BatchRows = batch, batch
			const fill = `INSERT INTO p SELECT generate_series(1, 5); INSERT INTO a SELECT g, g FROM generate_series(1, 5) g; INSERT INTO b SELECT g, g FROM generate_series(1, 5) g`
			w.onSource(fill)
			w.drain()
			w.onSource(`TRUNCATE p CASCADE; ` + fill + `; DELETE FROM b WHERE id = 1`)
			w.drain()
			w.drain()
			w.Equal("p", "a", "b")
			require.Empty(t, w.setAside())
		})
	}
	t.Run("a trigger that refuses", func(t *testing.T) {
		w := newWorld(t, orders, "public.orders")
		w.onReceiver(`CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF old.id = 3 THEN RAISE 'keep it'; END IF; RETURN old; END $$; CREATE TRIGGER no BEFORE DELETE ON orders FOR EACH ROW EXECUTE FUNCTION no()`)
		w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 5) g`)
		w.drain()
		w.onSource(`TRUNCATE orders; INSERT INTO orders VALUES (7)`)
		w.drain()
		require.Len(t, w.setAside(), 1)
		w.onReceiver(`DROP TRIGGER no ON orders`)
		w.retryAll()
		w.Equal("orders")
	})
	t.Run("a trigger that swallows", func(t *testing.T) {
		w := newWorld(t, orders, "public.orders")
		w.onReceiver(`CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF old.id = 3 THEN RETURN NULL; END IF; RETURN old; END $$; CREATE TRIGGER no BEFORE DELETE ON orders FOR EACH ROW EXECUTE FUNCTION no()`)
		w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 5) g`)
		w.drain()
		w.onSource(`TRUNCATE orders; INSERT INTO orders VALUES (7)`)
		w.drain()
		require.Len(t, w.setAside(), 1)
		w.onReceiver(`DROP TRIGGER no ON orders`)
		w.retryAll()
		w.Equal("orders")
	})
	t.Run("no table to empty", func(t *testing.T) {
		w := newWorld(t, orders, "public.orders")
		w.onReceiver(`ALTER TABLE orders RENAME TO away`)
		w.onSource(`TRUNCATE orders; INSERT INTO orders VALUES (7)`)
		w.drain()
		require.Len(t, w.setAside(), 2)
		require.Contains(t, strings.Join(w.setAside(), "\n"), "truncate")
		w.onReceiver(`ALTER TABLE away RENAME TO orders`)
		w.retryAll()
		w.Equal("orders")
		require.Len(t, w.setAside(), 1, "the truncate stays until a person skips it")
		w.wish("skip")
		w.apply()
		require.Empty(t, w.setAside())
	})
	t.Run("in the middle of a batch", func(t *testing.T) {
		w := newWorld(t, family, familyTables...)
		for _, sql := range []string{
			`INSERT INTO parents SELECT generate_series(1, 5); INSERT INTO children SELECT g, g FROM generate_series(1, 5) g`,
			`TRUNCATE parents CASCADE; INSERT INTO parents VALUES (1)`,
			`INSERT INTO children VALUES (1, 1)`, `TRUNCATE children, grandchildren`, `INSERT INTO children VALUES (2, 1)`,
			`BEGIN; TRUNCATE grandchildren; ROLLBACK`, `BEGIN; SAVEPOINT s; TRUNCATE parents CASCADE; ROLLBACK TO s; COMMIT`,
		} {
			w.onSource(sql)
			w.push()
		}
		w.applyAll()
		w.Equal(familyTables...)
	})
}

// Rows and position are committed together, or not at all.
func TestGuarantee5_RowsAndPositionAreOneTransaction(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 10) g`)
	w.push()
	position := func() int64 { return testkit.Value[int64](t, w.R, `SELECT seq FROM backfill_maple_central.applied`) }

	// The position cannot be written: no row stays.
	w.onReceiver(`CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
		CREATE CONSTRAINT TRIGGER no AFTER UPDATE ON backfill_maple_central.applied DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION no()`)
	_, err := (&applier{Agent: w.to}).apply(t.Context())
	require.Error(t, err)
	require.Empty(t, w.receiver())
	require.Zero(t, position())
	w.onReceiver(`DROP TRIGGER no ON backfill_maple_central.applied`)

	// The rows cannot be had to the end: the position stays.
	feed := side.Feed{
		Next: func(ctx context.Context, at side.Position) (side.Position, int64, error) {
			b, err := w.Store.Next(ctx, w.Out, control.Position(at), 100, 1<<20)
			return side.Position(b.To), b.Rows, err
		},
		Copy: func(ctx context.Context, p side.Part, out io.Writer) error {
			if err := w.Store.CopyBatch(ctx, w.Out.ID, control.Part(p), out); err != nil {
				return err
			}
			return errCrash
		},
		Layout: w.Store.Layout, Tables: func(context.Context) (map[int32]backfill.Table, map[int32]*row.Mapping, error) {
			return w.ByID(), nil, nil
		}, HoldLimit: time.Hour,
	}
	_, err = w.to.db.Apply(t.Context(), feed)
	require.ErrorIs(t, err, errCrash)
	require.Zero(t, position())
	require.Empty(t, w.receiver())
	w.applyAll()
	w.Equal("orders")
}

// Applies of one direction take turns, however many there are, and an acknowledgement
// lost to a crash is made up for.
func TestGuarantee5_AppliesBesideEachOther(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	for i := range 30 {
		w.onSource(`INSERT INTO orders VALUES ($1::int, 'a') ON CONFLICT (id) DO UPDATE SET total = orders.total + 1`, i%10)
		w.push()
	}
	waits := make([]func() (struct{}, error), 5)
	for i := range waits {
		a := w.agent(testkit.Receiver)
		a.BatchRows = 1 + i
		waits[i] = async(func() (struct{}, error) {
			l := &applier{Agent: a}
			for {
				if busy, err := l.apply(t.Context()); err != nil || !busy {
					return struct{}{}, err
				}
			}
		})
	}
	for _, wait := range waits {
		_, err := wait()
		require.NoError(t, err)
	}
	w.Equal("orders")

	w.onSource(`INSERT INTO orders VALUES (99, 'b')`)
	w.push()
	failAt(w.to, "apply: committed")
	_, err := (&applier{Agent: w.to}).apply(t.Context())
	require.ErrorIs(t, err, errCrash)
	w.Equal("orders")
	lag, err := w.Store.Lag(t.Context(), testkit.Site)
	require.NoError(t, err)
	require.EqualValues(t, 1, lag[0].Waiting+lag[1].Waiting)
	w.apply()
	lag, err = w.Store.Lag(t.Context(), testkit.Site)
	require.NoError(t, err)
	require.Zero(t, lag[0].Waiting+lag[1].Waiting)
}

// A receiver whose position went back to one this control database gave out goes on
// from there; one that stands where it did not stops.
func TestApplyStopsRatherThanGuess(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	for i := range 4 {
		w.onSource(fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'a') ON CONFLICT DO NOTHING; UPDATE orders SET total = total + 1`, i))
		w.drain()
	}
	type position struct {
		seq   int64
		nonce string
	}
	put := func(p position) {
		w.onReceiver(`UPDATE backfill_maple_central.applied SET seq = $1, nonce = $2`, p.seq, p.nonce)
	}
	var now, earlier position
	require.NoError(t, w.R.QueryRow(t.Context(), `SELECT seq, nonce FROM backfill_maple_central.applied`).Scan(&now.seq, &now.nonce))
	require.NoError(t, w.C.QueryRow(t.Context(), `SELECT last_seq, nonce FROM backfill_control.batch WHERE direction = $1 ORDER BY last_seq OFFSET 1 LIMIT 1`, w.Out.ID).Scan(&earlier.seq, &earlier.nonce))
	put(earlier)
	w.onReceiver(`UPDATE orders SET total = 0; DELETE FROM orders WHERE id > 1`)
	w.applyAll()
	w.Equal("orders")

	for name, p := range map[string]position{"another control database's": {now.seq, "other"}, "of the future": {now.seq + 1000, now.nonce}, "none": {0, ""}} {
		put(p)
		_, err := (&applier{Agent: w.to}).apply(t.Context())
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%s: %v", name, err)
	}
	put(now)
	w.applyAll()
}

// Rows the agent applies are not captured again, and nobody else can hide a write
// by the same means.
func TestNoEcho(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	// Capture on the receiver too, as if changes went both ways.
	table := w.Tables["public.orders"]
	table.CapturedFrom = []string{testkit.Source, testkit.Receiver}
	steps, err := w.To.SetupSteps(t.Context(), []backfill.Table{table}, side.Roles{})
	require.NoError(t, err)
	require.NoError(t, w.To.Setup(t.Context(), steps))
	outbox := func() int { return testkit.Value[int](t, w.R, `SELECT count(*) FROM backfill_maple_central.outbox`) }

	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 5) g; UPDATE orders SET total = 1; DELETE FROM orders WHERE id = 1; TRUNCATE orders; INSERT INTO orders VALUES (1)`)
	w.drain()
	w.Equal("orders")
	require.Zero(t, outbox())

	w.onReceiver(`INSERT INTO orders VALUES (2)`)
	require.Equal(t, 1, outbox(), "a write without the setting")
	role := "app_" + strings.ToLower(w.R.Config().Database)
	w.onReceiver(`CREATE ROLE ` + role + ` LOGIN PASSWORD 'app'; GRANT ALL ON orders TO ` + role)
	t.Cleanup(func() { testkit.DropRole(t, w.ReceiverDSN, role) })
	app := testkit.Session(t, testkit.As(t, w.ReceiverDSN, role, "app"))
	testkit.Exec(t, app, `SET backfill.applying = 'maple'; INSERT INTO orders VALUES (3)`)
	require.Equal(t, 2, outbox(), "another role with the setting")
	// The setting of another site does not count either.
	w.onReceiver(`SET backfill.applying = 'other'; INSERT INTO orders VALUES (4); RESET backfill.applying`)
	require.Equal(t, 3, outbox())
	// Nor does the apply's own setting outlive its transaction.
	w.apply()
	w.onReceiver(`INSERT INTO orders VALUES (5)`)
	require.Equal(t, 4, outbox())
}
