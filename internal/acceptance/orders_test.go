//go:build linux

package acceptance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

const orders = "public.orders"

const ordersTable = `
	CREATE TABLE orders (
	    id        bigint PRIMARY KEY,
	    customer  text NOT NULL,
	    status    text NOT NULL,
	    total     numeric(12, 2) NOT NULL,
	    placed_at timestamptz NOT NULL,
	    paid      boolean,
	    tags      text[],
	    doc       jsonb NOT NULL,
	    receipt   bytea,
	    note      text
	);
	CREATE FUNCTION make_orders(lowest bigint, highest bigint) RETURNS SETOF orders LANGUAGE sql AS $$
	    SELECT n, 'customer ' || n % 9973, (ARRAY['new', 'paid', 'sent', 'returned'])[1 + abs(n) % 4], (n * 7919 % 1000000) / 100.0,
	           timestamptz '2024-01-01 00:00:00.25+00' + n * interval '37 seconds', CASE n % 3 WHEN 0 THEN true WHEN 1 THEN false END,
	           ARRAY['web', 'week ' || n % 52], jsonb_build_object('lines', n % 7, 'coupon', md5(n::text)), decode(md5('r' || n), 'hex'),
	           CASE WHEN n % 5 > 0 THEN 'gift no ' || n END
	      FROM generate_series(lowest, highest) n $$;`

// ordersSetup is rows orders on a and two fifths of them on b, of which one in a
// hundred has other values there.
func ordersSetup(rows int) setup {
	return setup{
		tables: []string{orders},
		a:      ordersTable + fmt.Sprintf(`INSERT INTO orders SELECT * FROM make_orders(1, %d);`, rows),
		b: ordersTable + fmt.Sprintf(`INSERT INTO orders SELECT * FROM make_orders(1, %d) WHERE id %% 5 < 2;
			UPDATE orders SET status = 'lost', total = -1, note = '' WHERE id %% 100 = 10`, rows),
	}
}

// shop is the application: it keeps changing orders on side a.
type shop struct {
	site    *site
	rows    int64
	random  *rand.Rand
	changes atomic.Int64
	deletes atomic.Bool // whether it deletes too
	next    int64       // the next id of a new order is this, or its negative
	began   time.Time
	cancel  context.CancelFunc
	closed  chan struct{}
}

const changesPerSecond = 200

// openShop lets the application run until it is closed.
func (s *site) openShop(rows int) *shop {
	s.Helper()
	seed := rand.Uint64()
	s.Logf("the application's seed is %d", seed)
	ctx, cancel := context.WithCancel(s.Context())
	w := &shop{site: s, rows: int64(rows), random: rand.New(rand.NewPCG(seed, 0)), next: int64(rows), began: time.Now(), cancel: cancel, closed: make(chan struct{})}
	go func() {
		defer close(w.closed)
		if err := w.run(ctx); err != nil {
			s.Errorf("the application's write failed: %v", err)
		}
	}()
	s.Cleanup(func() { cancel(); <-w.closed })
	return w
}

func (w *shop) run(ctx context.Context) error {
	conn, err := w.site.a.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	ticker := time.NewTicker(time.Second / changesPerSecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if err := w.change(conn.Conn()); err != nil {
			return err
		}
		w.changes.Add(1)
	}
}

// change makes one change, of an order that is not among those reserved.
func (w *shop) change(conn *pgx.Conn) error {
	const one = ` id = (SELECT id FROM orders WHERE id >= $1 AND id % 10 <> 3 ORDER BY id LIMIT 1)`
	id := 1 + w.random.Int64N(w.rows)
	w.next++
	fresh := w.next
	if fresh%10 == 3 {
		w.next++
		fresh++
	}
	if w.random.IntN(2) == 0 {
		fresh = -fresh // before what a walk has passed
	}
	var sql string
	args := []any{id}
	switch n := w.random.IntN(20); {
	case n < 8:
		sql = `UPDATE orders SET status = 'sent', total = total + 0.01, doc = doc || '{"sent": true}', tags = tags || 'sent'::text WHERE` + one
	case n < 13:
		sql, args = `INSERT INTO orders SELECT * FROM make_orders($1, $1)`, []any{fresh}
	case n < 14:
		sql = `UPDATE orders SET note = NULL, receipt = '' WHERE id >= $1 AND id < $1 + 5 AND id % 10 <> 3`
	case !w.deletes.Load():
		sql = `UPDATE orders SET paid = NOT paid WHERE` + one
	case n < 17:
		sql = `DELETE FROM orders WHERE` + one
	case n < 19:
		sql, args = `UPDATE orders SET id = $2 WHERE`+one, []any{id, fresh}
	default:
		return w.replace(conn, id)
	}
	_, err := conn.Exec(context.Background(), sql, args...)
	if err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}

// replace deletes an order and makes it anew, with other values, in one transaction.
func (w *shop) replace(conn *pgx.Conn, id int64) error {
	ctx := context.Background()
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `DELETE FROM orders WHERE id = $1 AND id % 10 <> 3 RETURNING id`, id)
		if err != nil {
			return err
		}
		deleted, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil || len(deleted) == 0 {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO orders SELECT id, customer, 'anew', total, placed_at, paid, tags, doc, NULL, '' FROM make_orders($1, $1)`, id)
		return err
	})
}

// close ends the application.
func (w *shop) close() {
	w.site.Helper()
	w.cancel()
	<-w.closed
	took := time.Since(w.began)
	w.site.Logf("the application made %d changes in %s, %.0f a second", w.changes.Load(), took.Round(time.Second), float64(w.changes.Load())/took.Seconds())
}

// requireUntouched fails when b has an order that was staged and not approved:
// of those reserved, which the application leaves alone, b had none.
func (s *site) requireUntouched() {
	s.Helper()
	require.Zero(s, s.number(s.b, `SELECT count(*) FROM orders WHERE id % 10 = 3`), "staged rows have reached b before approval")
}

// requireStagedOnce looks into the control database: positions without gaps, each
// key once and in order.
func (s *site) requireStagedOnce(r *request) {
	s.Helper()
	var rows, keys, lowest, highest, disorder int64
	require.NoError(s, s.control().QueryRow(s.Context(), `
		SELECT count(*), count(DISTINCT key), min(n), max(n), count(*) FILTER (WHERE id <= before)
		  FROM (SELECT n, key, key[1]::bigint AS id, lag(key[1]::bigint) OVER (ORDER BY n) AS before FROM backfill_control.staged WHERE request_id = $1) s`, r.ID).
		Scan(&rows, &keys, &lowest, &highest, &disorder))
	require.Equal(s, r.Staged, rows)
	require.Equal(s, rows, keys, "a key was staged twice")
	require.Equal(s, [2]int64{1, rows}, [2]int64{lowest, highest}, "staged positions have gaps")
	require.Zero(s, disorder, "staged rows are not in key order")
}

// Two databases of one's own, one of them missing most of the history, end up
// equal while an application keeps writing.
func TestOrdersEndUpEqualWhileAnApplicationWrites(t *testing.T) {
	t.Parallel()
	s := prepareSite(t, ordersSetup(ordersRows))
	app := s.openShop(ordersRows) // before capture begins; deletes from then on
	s.start()
	app.deletes.Store(true)

	r := s.awaitReview(s.request(orders).ID)
	walk := r.WalkedAt.Sub(*r.StartedAt)
	t.Logf("walked %d rows in %s, %.0f rows/s", r.Staged, walk.Round(time.Millisecond), float64(r.Staged)/walk.Seconds())
	s.requireUntouched()
	s.requireStagedOnce(r)
	require.Equal(t, r.Staged, r.Effects["insert"]+r.Effects["overwrite"]+r.Effects["identical"])
	require.GreaterOrEqual(t, r.Effects["insert"], int64(ordersRows)/2)
	require.GreaterOrEqual(t, r.Effects["overwrite"], int64(ordersRows)/200)
	require.Empty(t, list[change](s, "/sites/s/history", url.Values{"key": {"3"}}), "a staged row is in history before approval")
	if ordersRows <= 100_000 {
		s.requireReadable(r)
	}

	s.approve(r)
	r = s.awaitFinished(r.ID)
	finished := time.Now()
	require.Positive(t, r.Superseded)
	t.Logf("released %d rows in %s; %d superseded", r.Released, r.ClosedAt.Sub(*r.ReviewedAt).Round(time.Millisecond), r.Superseded)
	s.await("all released rows to be applied", func() (bool, string) {
		n := s.number(s.b, `SELECT count(*) FROM orders WHERE id % 10 = 3`)
		return n == int64(ordersRows)/10, fmt.Sprintf("%d of %d of those reserved", n, ordersRows/10)
	})
	t.Logf("applied them %s after that, %s after approval", time.Since(finished).Round(time.Millisecond), time.Since(*r.ReviewedAt).Round(time.Millisecond))

	app.close()
	s.drain()
	s.requireEqual(orders)
	require.Empty(t, s.queue(orders, ""))
	require.Equal(t, r.State, s.show(r.ID).State)

	peak, err := s.dev.peakMemory()
	require.NoError(t, err)
	t.Logf("the program had at most %d MiB resident", peak)
	if !raceEnabled {
		require.Less(t, peak, 256)
	}
}

// requireReadable reads all staged rows as the review page does.
func (s *site) requireReadable(r *request) {
	s.Helper()
	rows := list[staged](s, path(r.ID)+"/rows", url.Values{})
	require.Len(s, rows, int(r.Staged))
	for i, x := range rows {
		require.Equal(s, int64(i+1), x.N)
		require.Equal(s, x.Key[0], *x.Row["id"])
	}
	overwrites := list[staged](s, path(r.ID)+"/rows", url.Values{"effect": {"overwrite"}})
	require.Len(s, overwrites, int(r.Effects["overwrite"]))
	require.NotEmpty(s, overwrites[0].Changed)
}
