package activities

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

const measures = `
	CREATE TABLE measures (region int, id int, v int, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
	CREATE TABLE measures_1 PARTITION OF measures FOR VALUES IN (1);
	CREATE TABLE measures_2 (dropped int, v int, id int NOT NULL, region int NOT NULL);
	ALTER TABLE measures_2 DROP COLUMN dropped;
	ALTER TABLE measures ATTACH PARTITION measures_2 FOR VALUES IN (2);
	CREATE TABLE measures_34 PARTITION OF measures FOR VALUES IN (3, 4) PARTITION BY LIST (region);
	CREATE TABLE measures_3 PARTITION OF measures_34 FOR VALUES IN (3);
	CREATE TABLE measures_4 PARTITION OF measures_34 FOR VALUES IN (4)`

func TestGuarantee2_Partitions(t *testing.T) {
	w := newWorld(t, measures, "public.measures")
	for _, sql := range []string{
		`INSERT INTO measures SELECT r, g, g FROM generate_series(1, 4) r, generate_series(1, 5) g`,
		`UPDATE measures SET region = 2, v = 50 WHERE region = 1 AND id = 1 AND false`,
		`UPDATE measures SET id = id + 100 WHERE region = 2 AND id = 1`,
		`UPDATE measures SET region = CASE region WHEN 1 THEN 3 WHEN 2 THEN 1 WHEN 3 THEN 4 ELSE 2 END, id = id + 100 * region`,
		`INSERT INTO measures_2 (region, id, v) VALUES (2, 7777, 7)`,
		`UPDATE measures_34 SET region = 4, id = id + 10000 WHERE region = 3`,
		`DELETE FROM measures_4 WHERE id % 2 = 0`,
		`INSERT INTO measures VALUES (1, 105, 5), (2, 105, 5) ON CONFLICT (region, id) DO UPDATE SET v = excluded.v + 1`,
		`TRUNCATE measures; INSERT INTO measures VALUES (1, 1, 1), (4, 1, 1)`,
	} {
		w.onSource(sql)
		w.drain()
		w.Equal("measures")
	}
}

// What cannot be recorded ends the requests it makes doubtful, and capture counts
// as unbroken only since.
func TestGapsEndRequestsTheyMakeDoubtful(t *testing.T) {
	for name, c := range map[string]struct {
		sql    string
		reason string
		since  bool // capture is unbroken since then, rather than broken
	}{
		"truncate of a partition": {`TRUNCATE measures_1`, "partition was truncated", true},
		"partition attached": {`CREATE TABLE measures_5 (region int NOT NULL, id int NOT NULL, v int, PRIMARY KEY (region, id));
			INSERT INTO measures_5 VALUES (5, 1, 1); ALTER TABLE measures ATTACH PARTITION measures_5 FOR VALUES IN (5);
			UPDATE measures SET v = 0 WHERE region = 1`, "is missing on", false},
		"partition detached":  {`ALTER TABLE measures DETACH PARTITION measures_2; UPDATE measures SET v = 0 WHERE region = 1`, "attached or detached", true},
		"column rewritten":    {`ALTER TABLE measures ALTER v TYPE int USING v + 1; UPDATE measures SET v = 0 WHERE region = 1`, "column of the table was altered", true},
		"trigger disabled":    {`ALTER TABLE measures_1 DISABLE TRIGGER ALL; UPDATE measures SET v = 0 WHERE region = 2`, "disabled", false},
		"trigger was off":     {`ALTER TABLE measures_1 DISABLE TRIGGER ALL; ALTER TABLE measures_1 ENABLE TRIGGER ALL; UPDATE measures SET v = 0 WHERE region = 2`, "disabled", false},
		"key column renamed":  {`ALTER TABLE measures RENAME id TO number; UPDATE measures SET v = 0 WHERE region = 2`, "key", false},
		"seen by a count too": {`ALTER TABLE measures_1 DISABLE TRIGGER ALL`, "disabled", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, measures, "public.measures")
			w.onSource(`INSERT INTO measures SELECT r, g, g FROM generate_series(1, 4) r, generate_series(1, 5) g`)
			w.pushAll()
			require.NoError(t, w.from.CountNow(t.Context()))
			before, err := w.Store.Panel(t.Context(), testkit.Site, "public.measures", testkit.Source)
			require.NoError(t, err)
			require.True(t, before.Source.CaptureOK, before.Source.Problem)
			id := w.Request("public.measures").ID
			w.walk(id)

			w.onSource(c.sql)
			w.push()
			if name == "seen by a count too" {
				require.NoError(t, w.from.CountNow(t.Context()))
			}
			r := w.Now(id)
			require.Equal(t, backfill.Failed, r.State)
			require.Contains(t, r.Reason, c.reason)
			after, err := w.Store.Panel(t.Context(), testkit.Site, "public.measures", testkit.Source)
			require.NoError(t, err)
			require.Equal(t, c.since, after.Source.CaptureOK)
			if name == "truncate of a partition" {
				require.True(t, after.Source.CaptureSince.After(*before.Source.CaptureSince))
			}
			_, _, err = w.Store.ReleaseBatch(t.Context(), id, 10)
			require.Error(t, err)
		})
	}
}

// A gap in what was sent makes a backfill possible although the counts agree, until
// one that began after the repair has finished.
func TestAGapOffersABackfillUntilItIsFilled(t *testing.T) {
	disable := `ALTER TABLE orders DISABLE TRIGGER ALL; UPDATE orders SET note = 'unseen' WHERE id = 3`
	for name, c := range map[string]struct {
		sql    string
		broken string // what the condition of capture says until setup repairs it, "" when it needs no repair
		seen   bool   // by a push or count before the repair
	}{
		"trigger disabled":                   {disable, "is or was disabled", true},
		"and repaired before anybody looked": {disable, "", false},
		"trigger dropped":                    {`DROP TRIGGER backfill_maple_school_update ON orders; UPDATE orders SET note = 'unseen' WHERE id = 3`, "is missing on", true},
		"fires in replicas only":             {`ALTER TABLE orders ENABLE REPLICA TRIGGER backfill_maple_school_update; UPDATE orders SET note = 'unseen' WHERE id = 3`, "disabled", true},
		"column rewritten":                   {`ALTER TABLE orders ALTER total TYPE int USING total + 1`, "", true},
		"changes dropped":                    {``, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, orders, "public.orders")
			w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 9) g`)
			w.drain()
			w.count()
			require.False(t, w.panel().CanRequest(), "the sides agree")
			if name == "changes dropped" {
				w.Configure("public.orders", control.TableChange{Update: ptr(false)})
				w.onSource(`UPDATE orders SET note = 'unseen' WHERE id = 3`)
				w.drain()
				w.Configure("public.orders", control.TableChange{Update: ptr(true)})
			}
			w.onSource(c.sql)
			if c.seen {
				w.count()
			}
			if c.broken != "" {
				p := w.panel()
				require.False(t, p.CanRequest())
				unmet := backfill.Unmet(p.Conditions(false))
				require.Len(t, unmet, 1)
				require.Equal(t, "capture", unmet[0].Name)
				require.Regexp(t, `^on school since \d{4}-\d\d-\d\d .*`+c.broken+`.*: run backfill setup --site maple --side school$`, unmet[0].Message)
				// What began before the repair does not fill the gap.
				id := w.Request("public.orders").ID
				k := w.claim(w.from, id)
				require.NoError(t, k.freeze(t.Context()))
				w.Setup()
				require.Error(t, toTheEnd(t.Context(), k))
				require.Equal(t, backfill.Failed, w.Now(id).State)
				require.Contains(t, w.Now(id).Reason, "until setup repaired it")
			}
			if c.broken == "" && !c.seen {
				w.Setup()
			}
			w.drain()
			w.count()
			p := w.panel()
			require.True(t, p.CanRequest(), "%v", backfill.Unmet(p.Conditions(false)))
			require.NotEmpty(t, p.Source.Gap)
			require.WithinDuration(t, *p.Source.CountedAt, *p.Source.GapSince, time.Minute)

			// A row backfill, and one that is rejected, leave it open.
			row := w.Request("public.orders", "1").ID
			w.walk(row)
			w.Approve(row)
			w.release(row, 10)
			id := w.Request("public.orders").ID
			w.walk(id)
			w.Reject(id)
			require.True(t, w.panel().CanRequest())

			id = w.Request("public.orders").ID
			w.walk(id)
			w.Approve(id)
			w.release(id, 10)
			require.False(t, w.panel().CanRequest())
			require.Empty(t, w.panel().Source.Gap)
			w.drain()
			w.count()
			w.Equal("orders")
			require.False(t, w.panel().CanRequest())
		})
	}
}

// Sessions in replica role are captured too.
func TestReplicaRoleHidesNothing(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`SET session_replication_role = replica; INSERT INTO orders VALUES (1, 'a'), (2, 'b'); UPDATE orders SET note = 'c' WHERE id = 1; DELETE FROM orders WHERE id = 2; RESET session_replication_role`)
	w.drain()
	require.Len(t, w.receiver(), 1)
	w.Equal("orders")
}

// A table that is altered under a walk ends it, before the rows read under another
// shape are staged, or before they can be approved.
func TestAWalkOverATableThatIsAlteredFails(t *testing.T) {
	for name, sql := range map[string]string{
		"column dropped":   `ALTER TABLE orders DROP COLUMN total`,
		"column added":     `ALTER TABLE orders ADD COLUMN more int DEFAULT 5`,
		"column retyped":   `ALTER TABLE orders ALTER total TYPE bigint`,
		"column rewritten": `ALTER TABLE orders ALTER total TYPE int USING total + 1`,
		"column renamed":   `ALTER TABLE orders RENAME total TO amount`,
		"table dropped":    `DROP TABLE orders`,
		"table replaced":   `DROP TABLE orders; CREATE TABLE orders (id numeric PRIMARY KEY, note text, total int NOT NULL DEFAULT 0)`,
	} {
		for _, at := range []string{"in the middle", "at the end"} {
			if at == "at the end" && name != "column rewritten" && name != "column added" {
				continue
			}
			t.Run(name+" "+at, func(t *testing.T) {
				w := newWorld(t, orders, "public.orders")
				w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 30) g`)
				w.pushAll()
				w.from.PageRows = 10
				k := w.claim(w.from, w.Request("public.orders").ID)
				require.NoError(t, k.freeze(t.Context()))
				pages := 1
				if at == "at the end" {
					pages = 3
				}
				for range pages {
					_, err := k.page(t.Context())
					require.NoError(t, err)
				}
				w.onSource(sql)
				err := toTheEnd(t.Context(), k)
				require.Error(t, permanent(err))
				require.ErrorContains(t, permanent(err), ErrPermanent)
				require.Len(t, w.staged(k.req.ID), pages*10, "staged rows are kept")
				require.Equal(t, backfill.InProgress, w.Now(k.req.ID).State, "nobody can approve it")
			})
		}
	}
}

// VACUUM FULL, CLUSTER and TRUNCATE change no row behind the triggers' back.
func TestAWalkGoesOnThroughMaintenance(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 30) g`)
	w.pushAll()
	w.from.PageRows = 10
	k := w.claim(w.from, w.Request("public.orders").ID)
	require.NoError(t, k.freeze(t.Context()))
	for _, sql := range []string{`VACUUM FULL orders`, `CLUSTER orders USING orders_pkey`, `REINDEX TABLE orders`, `ANALYZE orders`} {
		w.onSource(sql)
	}
	_, err := k.page(t.Context())
	require.NoError(t, err)
	w.onSource(`TRUNCATE orders`)
	w.onSource(`INSERT INTO orders VALUES (25, 'after')`)
	w.finish(k)
	require.Len(t, w.staged(k.req.ID), 11)
	w.Approve(k.req.ID)
	r := w.release(k.req.ID, 100)
	require.Equal(t, int64(10), r.Superseded)
	w.drain()
	w.Equal("orders")
}

// Truncating the root truncates its partitions too, which is no gap, wherever a push
// ends.
func TestATruncateOfTheRootIsNoGapHoweverLittleIsPushed(t *testing.T) {
	w := newWorld(t, measures, "public.measures")
	w.onSource(`INSERT INTO measures SELECT r, g, g FROM generate_series(1, 4) r, generate_series(1, 2) g`)
	w.drain()
	id := w.Request("public.measures").ID
	w.walk(id)
	w.from.BatchRows = 1
	w.onSource(`TRUNCATE measures; INSERT INTO measures VALUES (1, 1, 1); TRUNCATE measures; INSERT INTO measures VALUES (4, 1, 1)`)
	w.drain()
	require.Equal(t, backfill.AwaitingReview, w.Now(id).State)
	w.Equal("measures")
}
