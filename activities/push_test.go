package activities

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

func TestGuarantee2_ChangesArrive(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g, 'n' || g, g FROM generate_series(1, 100) g`)
	w.drain()
	w.Equal("orders")
	w.onSource(`UPDATE orders SET total = 7 WHERE id < 50`)
	w.onSource(`DELETE FROM orders WHERE id > 80`)
	w.onSource(`UPDATE orders SET id = id + 1000 WHERE id BETWEEN 20 AND 30`)
	w.drain()
	w.Equal("orders")
	w.onSource(`TRUNCATE orders; INSERT INTO orders VALUES (5, 'after', 1)`)
	w.drain()
	w.Equal("orders")
	require.Len(t, testkit.Rows(t, w.R, "orders"), 1)
}

// A push that has read a key and not yet committed keeps every other push of the
// direction waiting: otherwise its older state would land behind a newer one.
func TestGuarantee2_PushesOfADirectionTakeTurns(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	other := w.agent(testkit.Source)
	w.onSource(`INSERT INTO orders VALUES (1, 'old')`)

	reached, resume := w.stopAt(w.from, "push: snapshot")
	first := async(func() (pushed, error) { return w.from.push(t.Context()) })
	<-reached
	w.onSource(`UPDATE orders SET note = 'new'`)
	ended := make(chan struct{})
	second := async(func() (pushed, error) {
		defer close(ended)
		return other.push(t.Context())
	})
	testkit.Eventually(t, "the second push waits or ends", func() bool {
		select {
		case <-ended:
			return true
		default:
			return testkit.LockWaiters(t, w.C) > 0
		}
	})
	resume(nil)
	_, err := first()
	require.NoError(t, err)
	_, err = second()
	require.NoError(t, err)
	w.drain()
	w.Equal("orders")
}

// What a push reads, it reads after it has the lock.
func TestGuarantee2_APushReadsUnderTheLock(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	other := w.agent(testkit.Source)
	w.onSource(`INSERT INTO orders VALUES (1, 'old')`)

	reached, resume := w.stopAt(other, "push: locked")
	first := async(func() (pushed, error) { return other.push(t.Context()) })
	<-reached
	second := async(func() (pushed, error) { return w.from.push(t.Context()) })
	w.waits(1)
	w.onSource(`UPDATE orders SET note = 'new'`)
	resume(nil)
	_, err := first()
	require.NoError(t, err)
	_, err = second()
	require.NoError(t, err)
	w.drain()
	w.Equal("orders")
}

func TestGuarantee5_APushThatCrashesRunsAgain(t *testing.T) {
	for _, point := range []string{"push: locked", "push: snapshot", "push: read", "push: durable", "push: committed"} {
		t.Run(point, func(t *testing.T) {
			w := newWorld(t, orders, "public.orders")
			w.onSource(`INSERT INTO orders SELECT g, 'first' FROM generate_series(1, 20) g`)
			for range 3 { // however often
				failAt(w.from, point)
				_, err := w.from.push(t.Context())
				require.ErrorIs(t, err, errCrash)
			}
			w.onSource(`UPDATE orders SET note = 'second' WHERE id < 5; DELETE FROM orders WHERE id > 15`)
			w.drain()
			w.Equal("orders")
		})
	}
}

// A push that was held up after its commit, while others went on, comes back and
// must not make the source remember an older push than the control database does.
func TestGuarantee5_APushHeldUpAfterItsCommitStopsNothing(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	other := w.agent(testkit.Source)
	w.onSource(`INSERT INTO orders VALUES (1, 'a')`)
	reached, resume := w.stopAt(other, "push: committed")
	late := async(func() (pushed, error) { return other.push(t.Context()) })
	<-reached
	for i := 2; i < 5; i++ {
		w.onSource(`INSERT INTO orders VALUES ($1::int, 'b')`, i)
		w.push()
	}
	resume(nil)
	_, err := late()
	require.NoError(t, err)
	w.onSource(`INSERT INTO orders VALUES (9, 'c')`)
	w.drain()
	w.Equal("orders")
}

// One of the two databases was restored: going on would send, or forget, the wrong
// changes.
// A push that has lost its session, and so the direction's lock, sees what another has
// pushed since: that is no sign of a restored database.
func TestAPushThatLostItsLockTakesNothingForRestored(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	other := w.agent(testkit.Source)
	w.onSource(`INSERT INTO orders VALUES (1)`)
	w.pushAll()
	w.onSource(`INSERT INTO orders VALUES (2)`)
	meanwhile(w.from, "push: locked", func() {
		testkit.Exec(t, w.C, `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND classid = 20011 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
		_, err := other.push(t.Context())
		require.NoError(t, err)
	})
	_, err := w.from.push(t.Context())
	require.NotEqual(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
	w.drain()
	w.Equal("orders")
}

func TestPushStopsWhenADatabaseWasRestored(t *testing.T) {
	for name, restore := range map[string]func(*world){
		"source": func(w *world) {
			w.onSource(`UPDATE backfill_maple_school.pushed SET batch = 1, nonce = 'of an older backup'`)
		},
		"control": func(w *world) {
			testkit.Exec(w, w.C, `UPDATE backfill_control.direction SET push_batch = 1, push_nonce = 'of an older backup', prev_nonce = '' WHERE id = $1`, w.Out.ID)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, orders, "public.orders")
			for i := range 4 {
				w.onSource(`INSERT INTO orders VALUES ($1::int, 'a')`, i)
				w.push()
			}
			k := w.claim(w.from, w.Request("public.orders").ID)
			require.NoError(t, k.ready(t.Context()))
			restore(w)
			if name == "control" {
				require.Error(t, k.ready(t.Context()), "a walk stops too, though nothing waits to be pushed")
			}
			w.onSource(`INSERT INTO orders VALUES (9, 'c')`)
			_, err := w.from.push(t.Context())
			require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
			require.ErrorContains(t, err, "new-epoch")
		})
	}
}

func TestGuarantee2_RespelledKeysStayOneRow(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders VALUES (1.0, 'a'), (2.0, 'b')`)
	w.drain()
	for _, id := range []string{"1.00", "1", "1.000"} {
		w.onSource(`UPDATE orders SET id = `+id+`, note = $1 WHERE id = 1`, "is "+id)
		w.drain()
		w.Equal("orders")
	}
	// Deleted under one spelling, there again under another, between two pushes.
	w.onSource(`DELETE FROM orders WHERE id = 1; INSERT INTO orders VALUES (1.0, 'back')`)
	w.drain()
	w.Equal("orders")
	// In a batch of its own each.
	w.onSource(`UPDATE orders SET id = 2.00` + ` WHERE id = 2`)
	w.push()
	w.onSource(`DELETE FROM orders WHERE id = 2`)
	w.push()
	w.onSource(`INSERT INTO orders VALUES (2, 'c')`)
	w.push()
	w.applyAll()
	w.Equal("orders")
}

// Operations that are off, and inactive tables, become entries that are not
// delivered but still overtake.
func TestOperationsThatAreOffAreDroppedNotDelivered(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g, 'x' FROM generate_series(1, 4) g`)
	w.drain()
	entries := func() []string {
		return testkit.Strings(t, w.C, `
			SELECT op::text || CASE WHEN dropped THEN ' dropped' ELSE '' END || coalesce(' ' || key[1], '') || CASE WHEN row IS NULL THEN '' ELSE ' row' END
			  FROM backfill_control.entry WHERE seq > (SELECT applied_seq FROM backfill_control.direction WHERE id = $1) ORDER BY key, op`, w.Out.ID)
	}
	change := func() {
		w.onSource(`INSERT INTO orders VALUES (9, 'i'); UPDATE orders SET note = 'u' WHERE id = 1; DELETE FROM orders WHERE id = 2`)
	}
	undo := func() {
		w.Configure("public.orders", control.TableChange{Active: ptr(true), Create: ptr(true), Update: ptr(true), Delete: ptr(true)})
		w.onSource(`DELETE FROM orders WHERE id = 9; INSERT INTO orders VALUES (2, 'x') ON CONFLICT DO NOTHING; UPDATE orders SET note = 'x'`)
		w.drain()
		w.Equal("orders")
	}
	for _, c := range []struct {
		change control.TableChange
		want   []string
	}{
		{control.TableChange{Active: ptr(false)}, []string{"u dropped 1", "d dropped 2", "c dropped 9"}},
		{control.TableChange{Create: ptr(false)}, []string{"u 1 row", "d 2", "c dropped 9"}},
		{control.TableChange{Update: ptr(false)}, []string{"u dropped 1", "d 2", "c 9 row"}},
		{control.TableChange{Delete: ptr(false)}, []string{"u 1 row", "d dropped 2", "c 9 row"}},
	} {
		w.Configure("public.orders", c.change)
		change()
		w.push()
		require.Equal(t, c.want, entries())
		w.applyAll()
		undo()
	}
	w.Configure("public.orders", control.TableChange{Delete: ptr(false)})
	w.onSource(`TRUNCATE orders; INSERT INTO orders VALUES (1, 'y')`)
	w.push()
	require.Equal(t, []string{"c 1 row", "t dropped"}, entries())
}

// A table that cannot be read waits, and the others' changes go on, however many
// of its records are ahead of theirs.
func TestATableThatCannotBeReadHoldsUpNoOther(t *testing.T) {
	w := newWorld(t, orders+`; CREATE TABLE other (id int PRIMARY KEY)`, "public.orders", "public.other")
	w.from.BatchRows = 10
	w.onSource(`INSERT INTO orders SELECT g, 'x' FROM generate_series(1, 50) g; ALTER TABLE orders RENAME TO gone; INSERT INTO other VALUES (1)`)
	for range 5 {
		w.push()
	}
	w.applyAll()
	w.Equal("other")
	require.Contains(t, w.from.problem(t.Context()), "public.orders")
	require.False(t, w.push().complete("public.orders"))
	require.True(t, w.push().complete("public.other"))

	w.onSource(`ALTER TABLE gone RENAME TO orders`)
	clear(w.from.blocked) // as if its time were over
	w.drain()
	w.Equal("orders", "other")
}

// Nothing that goes wrong with a push as a whole is taken for a table's fault.
func TestAPushThatCannotReadTheOutboxSaysSo(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders VALUES (1, 'x'); ALTER TABLE backfill_maple_school.pushed RENAME COLUMN nonce TO lost`)
	_, err := w.from.push(t.Context())
	require.Error(t, err)
}

func TestChangesOfATableThatIsNotConfiguredAreForgotten(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	testkit.Exec(t, w.C, `UPDATE backfill_control.table_config SET captured_from = '{}'`)
	w.onSource(`INSERT INTO orders VALUES (1, 'x')`)
	w.push()
	require.Zero(t, testkit.Value[int](t, w.S, `SELECT count(*) FROM backfill_maple_school.outbox`))
	require.Zero(t, testkit.Value[int](t, w.C, `SELECT count(*) FROM backfill_control.entry`))
}

// The keys of one statement share records of the outbox, and each of them arrives, those of
// a record in the order in which they were captured; of a key of several columns too.
func TestGuarantee2_KeysOfOneStatementArrive(t *testing.T) {
	w := newWorld(t, `
		CREATE TABLE single (id int PRIMARY KEY, v text);
		CREATE TABLE double (a text, b int, v text, PRIMARY KEY (a, b))`, "public.single", "public.double")
	w.onSource(`INSERT INTO single SELECT 1000 - g, 'x' FROM generate_series(1, 400) g`)
	w.onSource(`INSERT INTO double SELECT CASE g % 3 WHEN 0 THEN '' WHEN 1 THEN '{"a,b"}' ELSE 'a' || g END, g, 'x' FROM generate_series(1, 400) g`)
	require.Equal(t, []string{"100", "100", "150", "150", "150", "150"}, testkit.Strings(t, w.S, `SELECT n::text FROM backfill_maple_school.outbox ORDER BY n`))
	w.drain()
	w.Equal("single", "double")
	require.Equal(t, 397, testkit.Value[int](t, w.C, `
		SELECT count(*) FROM (SELECT key[1]::int - lag(key[1]::int) OVER (ORDER BY seq) AS step FROM backfill_control.entry WHERE cardinality(key) = 1) e WHERE step = -1`))
	w.onSource(`UPDATE double SET b = b + 1000, v = 'moved' WHERE b > 100; DELETE FROM single WHERE id % 2 = 0; UPDATE single SET id = -id`)
	w.drain()
	w.Equal("single", "double")
	require.Len(t, testkit.Rows(t, w.R, "double"), 400)
	require.Len(t, testkit.Rows(t, w.R, "single"), 200)
}

// An agent that was started before its side was set up is well once that is done, also
// where nothing is ever captured.
func TestAnAgentStartedBeforeSetupIsWellAfterIt(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	a := w.from
	a.Turn = 10 * time.Millisecond
	testkit.Exec(t, w.S, `ALTER SCHEMA backfill_maple_school RENAME TO later`)
	push := func() error { _, err := runActivity(a.Push); return err }
	require.ErrorContains(t, push(), "is not set up")
	testkit.Exec(t, w.S, `ALTER SCHEMA later RENAME TO backfill_maple_school`)
	require.Contains(t, a.problem(t.Context()), "changes cannot be pushed")
	require.NoError(t, push())
	require.Empty(t, a.problem(t.Context()))
}
