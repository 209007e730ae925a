package activities

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// Keys are walked in the order of their type, whatever their text sorts like, in
// pages that end anywhere.
func TestGuarantee3_EveryKeyOnceInTheOrderOfItsType(t *testing.T) {
	for name, c := range map[string]struct{ schema, fill string }{
		"numbers": {`CREATE TABLE k (id int PRIMARY KEY)`, `SELECT g FROM generate_series(-20, 110) g`},
		"numeric": {`CREATE TABLE k (id numeric PRIMARY KEY)`, `SELECT (g / 7.0)::numeric(10, 3) FROM generate_series(-20, 110) g UNION ALL SELECT 'NaN' UNION ALL SELECT '-Infinity'`},
		"floats":  {`CREATE TABLE k (id float8 PRIMARY KEY)`, `SELECT g / 3.0::float8 FROM generate_series(-20, 110) g UNION ALL SELECT unnest('{NaN,Infinity,-Infinity,1e300,5e-324}'::float8[])`},
		"composite": {`CREATE TABLE k (a text COLLATE "C", b int, c date, PRIMARY KEY (b, a, c))`,
			`SELECT chr(64 + g % 5), g % 7, date '2020-01-01' + g FROM generate_series(1, 120) g`},
		"texts": {`CREATE TABLE k (id text PRIMARY KEY)`,
			`SELECT md5(g::text) FROM generate_series(1, 100) g UNION ALL SELECT unnest(ARRAY['', ' ', '  ', 'a', 'A', 'ä', '\', '''', '"', '10', '9', 'a\b', E'a\nb', '{x,y}', 'NULL'])`},
		"nondeterministic": {`CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false); CREATE TABLE k (id text COLLATE ci PRIMARY KEY)`,
			`SELECT CASE WHEN g % 2 = 0 THEN 'Key' ELSE 'kEY' END || g FROM generate_series(1, 100) g`},
		"blank padded": {`CREATE TABLE k (id char(8) PRIMARY KEY)`, `SELECT chr(64 + g % 20) || g / 20 FROM generate_series(1, 100) g`},
		"case-insensitive": {`CREATE EXTENSION citext; CREATE TABLE k (id citext, n int, PRIMARY KEY (id, n))`,
			`SELECT CASE WHEN g % 2 = 0 THEN 'Key' ELSE 'kEY' END || g / 2, g % 2 FROM generate_series(1, 100) g`},
		"uuid":                         {`CREATE TABLE k (id uuid PRIMARY KEY)`, `SELECT md5(g::text)::uuid FROM generate_series(1, 100) g`},
		"timestamps":                   {`CREATE TABLE k (id timestamptz PRIMARY KEY)`, `SELECT timestamptz '2021-03-28 00:30+00' + g * interval '7.000001 min' FROM generate_series(1, 100) g UNION ALL SELECT 'infinity'`},
		"enum":                         {`CREATE TYPE mood AS ENUM ('zz', 'mm', 'aa'); CREATE TABLE k (id mood, n int, PRIMARY KEY (id, n))`, `SELECT (ARRAY['aa', 'mm', 'zz'])[1 + g % 3]::mood, g FROM generate_series(1, 90) g`},
		"domain":                       {`CREATE DOMAIN code AS text CHECK (value ~ '^c'); CREATE TABLE k (id code PRIMARY KEY)`, `SELECT 'c' || g FROM generate_series(1, 100) g`},
		"ranges":                       {`CREATE TABLE k (id int4range PRIMARY KEY)`, `SELECT int4range(g % 9, g) FROM generate_series(10, 100) g`},
		"interval":                     {`CREATE TABLE k (id interval PRIMARY KEY)`, `SELECT g * interval '1 day 3.5 hours' FROM generate_series(-50, 50) g`},
		"a column named like a word":   {`CREATE TABLE k ("select" int, "Odd ""name""" int, PRIMARY KEY ("Odd ""name""", "select"))`, `SELECT g % 10, g FROM generate_series(1, 90) g`},
		"unique index, no primary key": {`CREATE TABLE k (v text, id int NOT NULL, UNIQUE (id))`, `SELECT 'v', g FROM generate_series(1, 90) g`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, c.schema, "public.k")
			w.onSource(`INSERT INTO k ` + c.fill)
			w.pushAll()
			testkit.Exec(t, w.C, `DELETE FROM backfill_control.entry`) // rows older than capture
			testkit.Exec(t, w.C, `DELETE FROM backfill_control.batch`)
			w.from.PageRows = 7
			id := w.Request("public.k").ID
			w.walk(id)
			d, err := w.from.db.Describe(t.Context(), "public.k")
			require.NoError(t, err)
			rows := testkit.Strings(t, w.S, `SELECT array_to_string(`+d.Layout.KeyText("k")+`, ',') FROM k ORDER BY `+d.Layout.KeyRefs("k"))
			require.Equal(t, rows, w.staged(id))
			w.Approve(id)
			w.release(id, 11)
			w.applyAll()
			w.Equal("k")
			// And as changes.
			w.onSource(`DELETE FROM k WHERE ctid IN (SELECT ctid FROM k ORDER BY ctid LIMIT 20); CREATE TEMP TABLE back AS SELECT * FROM k; TRUNCATE k; INSERT INTO k SELECT * FROM back`)
			w.drain()
			w.Equal("k")
		})
	}
}

// The walk ends at the last key there was when it began, also when that row is
// deleted, respelled, or when the table grows faster than it is walked.
func TestGuarantee3_TheWalkEnds(t *testing.T) {
	for name, sql := range map[string]string{
		"last row deleted":   `DELETE FROM orders WHERE id = 20`,
		"last row respelled": `UPDATE orders SET id = 20.00 WHERE id = 20`,
		"all rows deleted":   `DELETE FROM orders`,
		"the table grows":    `INSERT INTO orders SELECT g FROM generate_series(21, 200) g`,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, orders, "public.orders")
			w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 20) g`)
			w.from.PageRows = 6
			id := w.Request("public.orders").ID
			k := w.claim(w.from, id)
			require.NoError(t, k.freeze(t.Context()))
			_, err := k.page(t.Context())
			require.NoError(t, err)
			w.onSource(sql)
			w.finish(k)
			keys := w.staged(id)
			require.LessOrEqual(t, len(keys), 20)
			require.NotContains(t, keys, "21")
			w.Approve(id)
			w.release(id, 100)
			w.drain()
			w.Equal("orders")
		})
	}
	t.Run("an empty table", func(t *testing.T) {
		w := newWorld(t, orders, "public.orders")
		id := w.Request("public.orders").ID
		w.walk(id)
		w.Approve(id)
		require.Zero(t, w.release(id, 10).Released)
	})
}

// Rows inserted, moved and deleted around the resume key: every key that is there
// from begin to end is staged, and none twice.
func TestGuarantee3_KeysThatMoveDuringTheWalk(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g * 10 FROM generate_series(1, 40) g`)
	w.from.PageRows = 5
	id := w.Request("public.orders").ID
	k := w.claim(w.from, id)
	require.NoError(t, k.freeze(t.Context()))
	for i := range 8 {
		_, err := k.page(t.Context())
		require.NoError(t, err)
		at := fmt.Sprint(k.req.ResumeKey)
		at = strings.Trim(at, "[]")
		w.onSource(`INSERT INTO orders VALUES (` + at + ` - 1, 'behind'), (` + at + ` + 1, 'ahead')`)
		w.onSource(`DELETE FROM orders WHERE id = ` + at) // the resume key itself
		w.onSource(`UPDATE orders SET id = id + 5 WHERE id = `+at+` - 10 AND $1::int > 0`, i)
	}
	w.finish(k)
	keys := w.staged(id)
	for g := 1; g <= 40; g++ {
		require.Contains(t, keys, fmt.Sprint(g*10))
	}
	w.Approve(id)
	w.release(id, 9)
	w.drain()
	w.Equal("orders")
}

// A holder that was held up in the middle of a page, and comes back after another
// has taken over, writes nothing more.
func TestGuarantee6_AHolderThatWasTakenOverIsFencedOut(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 50) g`)
	w.from.PageRows = 10
	id := w.Request("public.orders").ID
	old := w.claim(w.from, id)
	require.NoError(t, old.freeze(t.Context()))
	_, err := old.page(t.Context())
	require.NoError(t, err)

	reached, resume := w.stopAt(w.from, "page: read")
	page := async(func() (int64, error) { return old.page(t.Context()) })
	<-reached
	w.expire(id)
	other := w.agent(testkit.Source)
	other.PageRows = 15
	taker := w.claim(other, id)
	require.NoError(t, taker.freeze(t.Context()))
	soon, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	n, err := taker.page(soon) // not kept waiting by the rows the old holder has in hand
	require.NoError(t, err)
	require.Equal(t, int64(15), n)
	before := w.Now(id)
	resume(nil)
	_, err = page()
	require.Error(t, err)
	require.Equal(t, before.Staged, w.Now(id).Staged)

	// Nor does anything else the old holder may still try.
	_, err = old.page(t.Context())
	require.ErrorIs(t, err, control.ErrFenced)
	require.ErrorIs(t, old.store.Renew(t.Context(), old.lease), control.ErrFenced)
	require.ErrorIs(t, old.store.Reviewable(t.Context(), old.lease), control.ErrFenced)
	require.ErrorIs(t, old.store.Freeze(t.Context(), old.lease, control.Frozen{}), control.ErrFenced)
	require.NoError(t, old.store.Hand(t.Context(), old.lease))
	require.NotNil(t, w.Now(id).LeaseUntil)

	w.finish(taker)
	require.Len(t, w.staged(id), 50)
}

// The next page is read while one is being committed, and staged only after it: when that
// one is not committed, nothing of either is.
func TestGuarantee6_APageThatIsReadAheadWaitsForTheOneBefore(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile string
		want      error
		staged    int
	}{
		"committed":  {`SELECT`, nil, 20},
		"taken over": {`UPDATE backfill_control.request SET epoch = epoch + 1`, control.ErrFenced, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, orders, "public.orders")
			w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 20) g`)
			w.from.PageRows = 5
			id := w.Request("public.orders").ID
			k := w.claim(w.from, id)
			require.NoError(t, k.freeze(t.Context()))
			k.keeper.course.stands = nil // what it tells people would wait for the request too
			reads := func() int64 { return testkit.Value[int64](t, w.S, `SELECT reads FROM backfill_maple_school.pushed`) }
			before := reads()
			testkit.Exec(t, w.C, `BEGIN`)
			testkit.Exec(t, w.C, `SELECT FROM backfill_control.request WHERE id = $1 FOR UPDATE`, id)
			chunk := async(func() (bool, error) { return k.chunk(t.Context(), nil) })
			testkit.Eventually(t, "the second page was read", func() bool { return reads() == before+2 })
			require.Equal(t, 1, testkit.LockWaiters(t, w.C), "only the first is about to be committed")
			testkit.Exec(t, w.C, c.meanwhile)
			testkit.Exec(t, w.C, `COMMIT`)
			_, err := chunk()
			require.ErrorIs(t, err, c.want)
			require.Len(t, w.staged(id), c.staged)
			require.Equal(t, int64(c.staged), w.Now(id).Staged)
		})
	}
}

// The same when the old holder had not yet begun to write when it was taken over,
// or believes that its lease still runs.
func TestGuarantee6_ALateHolderWritesNothing(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 20) g`)
	id := w.Request("public.orders").ID
	w.from.PageRows = 5
	old := w.claim(w.from, id)
	require.NoError(t, old.freeze(t.Context()))
	meanwhile(w.from, "page: read", func() {
		// Taken over without the old holder's session being ended, as when that is on its way.
		testkit.Exec(t, w.C, `UPDATE backfill_control.request SET epoch = epoch + 1, holder = 'another' WHERE id = $1`, id)
	})
	_, err := old.page(t.Context())
	require.ErrorIs(t, err, control.ErrFenced)
	require.Empty(t, w.staged(id))
}

func TestLeases(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	other := w.agent(testkit.Source)
	id := w.Request("public.orders").ID
	k := w.claim(w.from, id)
	_, _, err := other.store.Claim(t.Context(), id, other.ID, time.Minute)
	var held *control.LeaseHeld
	require.ErrorAs(t, err, &held)
	require.Equal(t, w.from.ID, held.Holder)
	require.NoError(t, w.Store.Hand(t.Context(), k.lease))
	taker := w.claim(other, id)
	require.Greater(t, taker.lease.Epoch, k.lease.Epoch)
	_, err = w.Store.Close(t.Context(), id, "test", backfill.Cancelled, "enough")
	require.NoError(t, err)
	_, _, err = other.store.Claim(t.Context(), id, other.ID, time.Minute)
	require.ErrorIs(t, err, control.ErrFenced)
	require.ErrorIs(t, taker.store.Reviewable(t.Context(), taker.lease), control.ErrFenced)
}

// A walk goes on after the last committed key, whoever takes it up.
func TestGuarantee5_APageThatCrashesRunsAgain(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 50) g`)
	id := w.Request("public.orders").ID
	for i := range 8 {
		a := w.agent(testkit.Source)
		a.PageRows = 3 + i
		k := w.claim(a, id)
		require.NoError(t, k.freeze(t.Context()))
		_, err := k.page(t.Context())
		require.NoError(t, err)
		failAt(a, "page: read")
		_, err = k.page(t.Context())
		require.ErrorIs(t, err, errCrash)
		w.expire(id)
	}
	w.walk(id)
	require.Len(t, w.staged(id), 50)
}

// The same for the one row of a row backfill, spelled otherwise or not.
func TestGuarantee5_ARowBackfillThatCrashesAfterItsPage(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders VALUES (1.00), (2)`)
	for _, key := range []string{"1", "2", "3"} {
		id := w.Request("public.orders", key).ID
		k := w.claim(w.from, id)
		require.NoError(t, k.freeze(t.Context()))
		_, err := k.page(t.Context())
		require.NoError(t, err)
		w.expire(id)
		require.LessOrEqual(t, w.walk(id).Staged, int64(1))
		w.staged(id)
	}
}

// The review does not begin while something captured before the last page has not
// been pushed.
func TestReviewWaitsForChangesCapturedBeforeTheLastPage(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 5) g`)
	id := w.Request("public.orders").ID
	k := w.claim(w.from, id)
	require.NoError(t, k.freeze(t.Context()))
	_, err := k.page(t.Context())
	require.NoError(t, err)
	w.from.block("public.orders", "in the way")
	settled := async(func() (struct{}, error) { return struct{}{}, k.settle(t.Context()) })
	testkit.Eventually(t, "the request says why it waits", func() bool { return strings.Contains(w.Now(id).Waiting, "in the way") })
	require.Equal(t, backfill.InProgress, w.Now(id).State)
	w.from.mu.Lock()
	clear(w.from.blocked)
	w.from.mu.Unlock()
	_, err = settled()
	require.NoError(t, err)
	require.Zero(t, testkit.Value[int](t, w.S, `SELECT count(*) FROM backfill_maple_school.outbox`))
	require.Equal(t, backfill.AwaitingReview, w.Now(id).State)
	require.Empty(t, w.Now(id).Waiting)
}

// runActivity runs an activity as a worker would.
func runActivity(activity any, args ...any) (converter.EncodedValue, error) {
	var suite testsuite.WorkflowTestSuite
	env := suite.NewTestActivityEnvironment()
	env.RegisterActivity(activity)
	return env.ExecuteActivity(activity, args...)
}

func TestWalkAsAnActivity(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 1000) g`)
	w.from.PageRows, w.from.ChunkRows, w.from.LeaseTTL = 50, 100, 300*time.Millisecond
	id := w.Request("public.orders").ID
	value, err := runActivity(w.from.Walk, id)
	require.NoError(t, err)
	var result WalkResult
	require.NoError(t, value.Get(&result))
	require.Equal(t, backfill.AwaitingReview, result.State)
	require.Equal(t, int64(1000), result.Staged)
	require.Equal(t, backfill.Key{"1000"}, result.Walked.ResumeKey)
	require.Len(t, w.staged(id), 1000)

	// Again: there is nothing left to do.
	value, err = runActivity(w.from.Walk, id)
	require.NoError(t, err)
	require.NoError(t, value.Get(&result))
	require.Equal(t, int64(1000), result.Staged)
}

func TestWalkReturnsWhenPausedAndWhenClosed(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders SELECT g FROM generate_series(1, 100) g`)
	w.from.PageRows = 10
	id := w.Request("public.orders").ID
	pages := 0
	w.from.faults = func(point string) error {
		if point != "page: read" {
			return nil
		}
		if pages++; pages == 4 {
			_, err := w.Store.Pause(t.Context(), id, "someone", "", true)
			return err
		}
		return nil
	}
	walk := func() (r WalkResult) {
		value, err := runActivity(w.from.Walk, id)
		require.NoError(t, err)
		require.NoError(t, value.Get(&r))
		return r
	}
	r := walk()
	require.True(t, r.Paused)
	require.Equal(t, backfill.InProgress, r.State)
	require.NotZero(t, r.Staged)
	require.Less(t, r.Staged, int64(100))
	_, err := w.Store.Pause(t.Context(), id, "someone", "", false)
	require.NoError(t, err)
	w.from.faults = func(point string) error {
		if point != "page: read" {
			return nil
		}
		_, err := w.Store.Close(t.Context(), id, "someone", backfill.Cancelled, "enough")
		return err
	}
	r = walk()
	require.Equal(t, backfill.Cancelled, r.State)
	require.Less(t, r.Staged, int64(100))
}

func TestWalkOfARowThatCannotBeAKeyFails(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders VALUES (1.00, 'x')`)
	for key, want := range map[string]string{"one": "numeric", "1,2": "columns"} {
		id := w.Request("public.orders", strings.Split(key, ",")...).ID
		_, err := runActivity(w.from.Walk, id)
		require.ErrorContains(t, err, want)
		var app *temporal.ApplicationError
		require.ErrorAs(t, err, &app)
		require.True(t, app.NonRetryable())
	}
	// Another spelling of a key that is there is that row; one that is not is none.
	for key, want := range map[string][]string{"1": {"1.00"}, "2": {}} {
		id := w.Request("public.orders", key).ID
		w.walk(id)
		require.ElementsMatch(t, want, w.staged(id))
	}
}

// Rows of one byte and rows far larger than a page may be, in one table: no page has
// more bytes than it may, but for a row that is larger by itself.
func TestPagesOfRowsOfVeryDifferentSizeStayInTheirBounds(t *testing.T) {
	const most = 4 << 20
	w := worldOf(testkit.NewPair(t, `CREATE TABLE blobs (id int PRIMARY KEY, a text, b bytea, j jsonb)`, "public.blobs"), Settings{PageRows: 5000, PageBytes: most, PageTarget: time.Minute})
	w.onSource(`
		ALTER TABLE blobs ALTER a SET STORAGE EXTERNAL;
		INSERT INTO blobs SELECT n, 'x' FROM generate_series(1, 3000) n;
		INSERT INTO blobs SELECT n, repeat('y', 1500000) FROM generate_series(3001, 3012) n;
		INSERT INTO blobs SELECT n, repeat('y', 9000000) FROM generate_series(3013, 3014) n; -- compressed, to almost nothing, if it may be
		INSERT INTO blobs SELECT n, NULL, (SELECT string_agg(sha256((n * 1000 + i)::text::bytea), '') FROM generate_series(1, 30000) i) FROM generate_series(3015, 3020) n;
		INSERT INTO blobs SELECT n, 'x' FROM generate_series(3021, 6000) n`)
	r := w.Request("public.blobs")
	k := w.claim(w.from, r.ID)
	require.NoError(t, k.freeze(t.Context()))
	pages := 0
	for {
		n, err := k.page(t.Context())
		require.NoError(t, err)
		if n == 0 {
			break
		}
		pages++
		bytes := testkit.Value[int64](t, w.C, `SELECT sum(octet_length(array_to_string(row, ','))) FROM backfill_control.staged WHERE request_id = $1 AND n > $2`, r.ID, k.req.Staged-n)
		require.True(t, n == 1 || bytes <= most, "a page of %d rows has %d bytes", n, bytes)
	}
	require.Len(t, w.staged(r.ID), 6000)
	require.Less(t, pages, 60)
}
