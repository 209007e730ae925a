package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

// sent walks, approves and releases a backfill of all orders.
func (w *world) sent() {
	w.Helper()
	id := w.Request("public.orders").ID
	w.walk(id)
	w.Approve(id)
	require.Equal(w, backfill.Finished, w.release(id, 100).State)
}

// watchWrites has the receiver note by which statements orders is written.
const watchWrites = `
	CREATE TABLE written (n int GENERATED ALWAYS AS IDENTITY, verb text);
	CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.written (verb) VALUES ((regexp_match(current_query(), '\w+'))[1]); RETURN NULL; END $$;
	CREATE TRIGGER watch AFTER INSERT ON orders FOR EACH STATEMENT EXECUTE FUNCTION watch()`

// Released rows that are new are copied straight into their table; where some are there
// already, the batch goes the long way, and so do a few after it.
func TestReleasedRowsThatAreNewAreCopied(t *testing.T) {
	w := history(t, 30)
	w.onReceiver(watchWrites)
	w.to.BatchRows = 10
	w.onSource(`UPDATE orders SET note = 'there already' WHERE id = 5`)
	w.pushAll()
	w.onSource(`ALTER TABLE orders DISABLE TRIGGER ALL; UPDATE orders SET note = E'tab\t, line\n, \\\\N and \\\\.' WHERE id = 27; UPDATE orders SET note = NULL WHERE id = 28; UPDATE orders SET note = '\N' WHERE id = 29`)
	w.Setup()
	w.sent()
	w.applyAll()
	w.Equal("orders")
	require.Equal(t, []string{"INSERT", "INSERT", "INSERT", "COPY"}, testkit.Strings(t, w.R, `SELECT verb FROM written ORDER BY n`), "a captured change, a batch that holds it, the one after that, and the last")
}

// What a trigger swallows is not lost, and does not keep the rest.
func TestARowThatIsSwallowedWhenCopiedIsSetAside(t *testing.T) {
	w := history(t, 5)
	w.onReceiver(`CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER swallow BEFORE INSERT ON orders FOR EACH ROW WHEN (new.id = 3) EXECUTE FUNCTION swallow()`)
	w.sent()
	w.applyAll()
	require.Equal(t, []string{"1", "2", "4", "5"}, testkit.Strings(t, w.R, `SELECT id::text FROM orders ORDER BY id`))
	require.Equal(t, []string{"{3}"}, testkit.Strings(t, w.R, `SELECT key::text FROM backfill_maple_central.held WHERE state = 'quarantined'`))
}

// An older change of a key that is set aside is never applied after a released row of it.
func TestACopiedRowReplacesWhatWasSetAside(t *testing.T) {
	w := history(t, 3)
	w.onReceiver(`ALTER TABLE orders ADD CONSTRAINT no CHECK (note <> 'old')`)
	w.onSource(`UPDATE orders SET note = 'old' WHERE id = 2`)
	w.drain()
	require.Equal(t, int64(1), testkit.Value[int64](t, w.R, `SELECT count(*) FROM backfill_maple_central.held`))
	w.onSource(`ALTER TABLE orders DISABLE TRIGGER ALL; UPDATE orders SET note = 'new' WHERE id = 2`)
	w.Setup()
	w.sent()
	w.onReceiver(`ALTER TABLE orders DROP CONSTRAINT no`)
	w.applyAll()
	w.Equal("orders")
	require.Zero(t, testkit.Value[int64](t, w.R, `SELECT count(*) FROM backfill_maple_central.held`))
}

// Where releasing would do the same to all rows of a chunk, no row has an effect of its
// own, and all that is told of single rows is told of these too.
func TestChunksOfOneEffect(t *testing.T) {
	w := history(t, 40)
	w.onReceiver(`INSERT INTO orders SELECT g, 'history', g FROM generate_series(11, 20) g; INSERT INTO orders VALUES (25, 'history', 25), (26, 'other', 26)`)
	id := w.Request("public.orders").ID
	w.walk(id)
	for after := int64(0); after < 40; after += 10 {
		require.NoError(t, w.to.classify(t.Context(), w.Now(id), after, after+10))
	}
	require.Equal(t, map[backfill.Effect]int64{backfill.Insert: 28, backfill.Overwrite: 1, backfill.Identical: 11, backfill.Unknown: 0}, w.Now(id).Effects)
	require.Equal(t, int64(10), testkit.Value[int64](t, w.C, `SELECT count(*) FROM backfill_control.effect`), "of the chunk whose rows differ in effect")

	want := map[backfill.Effect][]int64{}
	for n := int64(1); n <= 40; n++ {
		effect := backfill.Insert
		switch {
		case n == 26:
			effect = backfill.Overwrite
		case n > 10 && n <= 20, n == 25:
			effect = backfill.Identical
		}
		want[effect] = append(want[effect], n)
		rows, err := w.Store.StagedRows(t.Context(), id, "", n-1, 1)
		require.NoError(t, err)
		require.Equal(t, effect, rows[0].Effect, n)
	}
	for effect, all := range want {
		for skip := range all {
			after, err := w.Store.StagedAt(t.Context(), id, effect, int64(skip))
			require.NoError(t, err)
			rows, err := w.Store.StagedRows(t.Context(), id, effect, after, 7)
			require.NoError(t, err)
			var got []int64
			for _, r := range rows {
				require.Equal(t, effect, r.Effect)
				got = append(got, r.N)
			}
			require.Equal(t, all[skip:min(skip+7, len(all))], got, "%s from the %d. on", effect, skip)
			rank, err := w.Store.StagedRank(t.Context(), id, effect, all[skip])
			require.NoError(t, err)
			require.Equal(t, int64(skip+1), rank)
		}
	}

	w.ApproveDiffering(id)
	r := w.release(id, 7)
	require.Equal(t, int64(11), r.Skipped)
	require.Equal(t, int64(29), r.Released)
	w.drain()
	w.Equal("orders")
}
