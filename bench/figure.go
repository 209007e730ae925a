package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"backfill/internal/side"
	"backfill/workflows"
)

var orders, narrow = workloads[0], workloads[1]

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1e3) }

// spread is how values are distributed, for people.
func spread(values []time.Duration) string {
	return fmt.Sprintf("p50 %s, p99 %s, of %d", milliseconds(median(values)), milliseconds(quantile(values, 0.99)), len(values))
}

// live measures how long a change takes from its commit on the source to its commit on the receiver, with nothing else
// under way and then beside a backfill at full speed, from request to drained.
func (b *bench) live(ctx context.Context) error {
	if err := b.table(ctx, orders); err != nil {
		return err
	}
	const columns = "CREATE TABLE live (id bigint PRIMARY KEY)"
	if err := b.source.exec(ctx, columns); err != nil {
		return err
	}
	// A notification arrives when what sent it is committed.
	if err := b.receiver.exec(ctx, columns, `
		CREATE FUNCTION arrived() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_notify('live', NEW.id::text); RETURN NULL; END $$`,
		`CREATE TRIGGER arrived AFTER INSERT ON live FOR EACH ROW EXECUTE FUNCTION arrived()`); err != nil {
		return err
	}
	if err := b.product.capture(ctx, "live"); err != nil {
		return err
	}
	const what = "A change's way from commit to commit, 50 a second"
	id := int64(0)
	alone, err := b.latencies(ctx, &id, func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(b.duration) * time.Second):
			return nil
		}
	})
	if err != nil {
		return err
	}
	b.report.figure(what, "no backfill", spread(alone))
	if err := b.ready(ctx, orders, empty); err != nil {
		return err
	}
	beside, err := b.latencies(ctx, &id, func(ctx context.Context) error {
		_, err := b.through(ctx, orders, "orders, beside live changes")
		return err
	})
	if err != nil {
		return err
	}
	b.report.figure(what, "beside a backfill at full speed", spread(beside))
	return nil
}

// latencies inserts rows at a steady rate while something else goes on, and times their arrival.
func (b *bench) latencies(ctx context.Context, id *int64, meanwhile func(context.Context) error) (all []time.Duration, err error) {
	listener, err := b.receiver.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer listener.Release()
	if _, err := listener.Exec(ctx, "LISTEN live"); err != nil {
		return nil, err
	}
	defer func() { _, err = listener.Exec(context.WithoutCancel(ctx), "UNLISTEN *") }()
	committed := make(chan map[int64]time.Time, 1)
	writing, stop := context.WithCancel(ctx)
	defer stop()
	first := *id
	go func() {
		at := map[int64]time.Time{}
		defer func() { committed <- at }()
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			select {
			case <-writing.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
			if _, err := b.source.Exec(ctx, "INSERT INTO live VALUES ($1)", *id+1); err != nil {
				return
			}
			*id++
			at[*id] = time.Now()
		}
	}()
	arrived := map[int64]time.Time{}
	received := make(chan error, 1)
	upTo := make(chan int64, 1)
	go func() {
		for last := int64(-1); last < 0 || int64(len(arrived)) < last-first; {
			select {
			case last = <-upTo:
				continue
			default:
			}
			wait, cancel := context.WithTimeout(ctx, time.Second)
			n, err := listener.Conn().WaitForNotification(wait)
			cancel()
			if err != nil && (ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded)) {
				received <- err
				return
			}
			if err != nil {
				continue
			}
			got, err := strconv.ParseInt(n.Payload, 10, 64)
			if err != nil {
				received <- err
				return
			}
			arrived[got] = time.Now()
		}
		received <- nil
	}()
	err = meanwhile(ctx)
	stop()
	at := <-committed
	upTo <- *id
	if err := errors.Join(err, <-received); err != nil {
		return nil, err
	}
	for id, when := range at {
		all = append(all, arrived[id].Sub(when))
	}
	return all, nil
}

// trigger measures what capture adds to a statement that writes many rows, and to a transaction that writes one. The large
// ones are rolled back, so that their rows burden nobody.
func (b *bench) trigger(ctx context.Context) error {
	n := min(300_000, b.rows)
	plain, captured := orders, orders
	plain.name, captured.name = "plain", "captured"
	for _, w := range []workload{plain, captured} {
		if err := b.source.exec(ctx, w.create(), w.fill(n), "VACUUM ANALYZE "+w.name); err != nil {
			return err
		}
	}
	if err := errors.Join(b.receiver.exec(ctx, captured.create()), b.product.capture(ctx, captured.name)); err != nil {
		return err
	}
	more := strings.Replace(orders.fill(n), "generate_series(1, ", fmt.Sprintf("generate_series(%d, %d + ", n+1, n), 1)
	took := map[string][]time.Duration{}
	for range max(b.rounds, 3) {
		for _, table := range []string{plain.name, captured.name} {
			for what, sql := range map[string]string{
				"insert": strings.Replace(more, "INSERT INTO orders", "INSERT INTO "+table, 1),
				"update": "UPDATE " + table + " SET note = 'another'",
				"delete": "DELETE FROM " + table,
			} {
				d, err := b.rolledBack(ctx, sql)
				if err != nil {
					return err
				}
				took[what+table] = append(took[what+table], d)
			}
		}
	}
	const section = "What capture adds"
	for _, what := range []string{"insert", "update", "delete"} {
		with, without := median(took[what+captured.name]), median(took[what+plain.name])
		b.report.figure(section, fmt.Sprintf("%s of %d rows in one statement, for each row", what, n),
			fmt.Sprintf("%.2f µs (%.2f → %.2f s, ×%.2f)", (with-without).Seconds()*1e6/float64(n), without.Seconds(), with.Seconds(), with.Seconds()/without.Seconds()))
	}
	// By itself, and while what it captures is sent.
	b.product.halt(sourceAgent)
	for _, beside := range []string{", nothing sent meanwhile", ", sent as it comes"} {
		single := map[string][]time.Duration{}
		for i := range 2000 {
			for _, table := range []string{plain.name, captured.name} {
				began := time.Now()
				if _, err := b.source.Exec(ctx, "UPDATE "+table+" SET paid = NOT paid WHERE id = $1", i+1); err != nil {
					return err
				}
				single[table] = append(single[table], time.Since(began))
			}
		}
		b.report.figure(section, "update of one row in a transaction, without capture"+beside, spread(single[plain.name]))
		b.report.figure(section, "update of one row in a transaction, with capture"+beside, spread(single[captured.name]))
		if b.product.roles[sourceAgent] == nil {
			if err := b.product.start(sourceAgent); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) rolledBack(ctx context.Context, sql string) (took time.Duration, err error) {
	tx, err := b.source.Begin(ctx)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	_, err = tx.Exec(ctx, sql)
	took = time.Since(began)
	return took, errors.Join(err, tx.Rollback(context.WithoutCancel(ctx)))
}

// changes measures how long captured changes take, from the commit of one statement that updates every row of orders to the
// last of them acknowledged.
func (b *bench) changes(ctx context.Context) error {
	if err := b.table(ctx, orders); err != nil {
		return err
	}
	var floors, all []time.Duration
	for range b.rounds {
		floor, err := b.timed(ctx, orders, empty, contenders[0])
		if err != nil {
			return err
		}
		floors = append(floors, floor)
		if err := errors.Join(b.receiver.exec(ctx, "VACUUM ANALYZE orders"), b.product.clear(ctx), b.settle(ctx)); err != nil {
			return err
		}
		if err := b.source.exec(ctx, "UPDATE orders SET paid = NOT paid"); err != nil {
			return err
		}
		committed := time.Now()
		if err := await(ctx, "the outbox to be empty", func() (pushed bool, err error) {
			err = b.source.QueryRow(ctx, "SELECT NOT EXISTS (SELECT FROM "+side.SchemaName(site, source)+".outbox)").Scan(&pushed)
			return pushed, errors.Join(err, b.product.alive())
		}); err != nil {
			return err
		}
		at, _, err := b.product.drained(ctx)
		if err != nil {
			return err
		}
		all = append(all, at.Sub(committed))
		b.say("%d captured changes: %.2f s, the floor %.2f s", b.rows, at.Sub(committed).Seconds(), floor.Seconds())
		var there, here int64
		const paid = "SELECT count(*) FROM orders WHERE paid"
		if err := errors.Join(b.source.QueryRow(ctx, paid).Scan(&there), b.receiver.QueryRow(ctx, paid).Scan(&here), b.explained(ctx)); err != nil {
			return err
		}
		if there != here {
			return fmt.Errorf("%d rows are paid on the source, %d on the receiver", there, here)
		}
		if err := b.source.exec(ctx, "VACUUM orders"); err != nil {
			return err
		}
	}
	section := fmt.Sprintf("%d captured changes, updates of one statement", b.rows)
	b.report.figure(section, floorName, fmt.Sprintf("%.2f s, 1.00 of the floor", median(floors).Seconds()))
	b.report.figure(section, "pushed, applied, acknowledged", fmt.Sprintf("%.2f s, %s of the floor", median(all).Seconds(), ratio(median(all), median(floors))))
	return nil
}

// reconciled runs a full reconciliation of orders and returns how long it took.
func (b *bench) reconciled(ctx context.Context, verdict string) (time.Duration, error) {
	var run struct {
		ID          int64
		State       string
		Verdict     *string
		Reason      string
		RequestedAt time.Time  `json:"requested_at"`
		ClosedAt    *time.Time `json:"closed_at"`
	}
	if err := b.product.call(ctx, http.MethodPost, "/sites/"+site+"/reconciliations", map[string]any{"table": "public." + orders.name, "from": source, "mode": "full"}, &run); err != nil {
		return 0, err
	}
	if err := awaitEvery(ctx, 100*time.Millisecond, "the reconciliation", func() (bool, error) {
		err := b.product.call(ctx, http.MethodGet, fmt.Sprintf("/reconciliations/%d", run.ID), nil, &run)
		return run.ClosedAt != nil, errors.Join(err, b.product.alive())
	}); err != nil {
		return 0, err
	}
	if run.Verdict == nil || *run.Verdict != verdict {
		return 0, fmt.Errorf("reconciliation %d ended %s %s, not %s", run.ID, run.State, run.Reason, verdict)
	}
	return run.ClosedAt.Sub(run.RequestedAt), nil
}

// proof measures a full reconciliation of equal sides, one that finds ten rows wrong, and the backfill of those.
func (b *bench) proof(ctx context.Context) error {
	if err := b.table(ctx, orders); err != nil {
		return err
	}
	var floors, equal, different, mended []time.Duration
	for range b.rounds {
		floor, err := b.timed(ctx, orders, empty, contenders[0])
		if err != nil {
			return err
		}
		floors = append(floors, floor)
		if err := errors.Join(b.receiver.exec(ctx, "VACUUM ANALYZE "+orders.name), b.product.clear(ctx)); err != nil {
			return err
		}
		took, err := b.reconciled(ctx, "EQUAL")
		if err != nil {
			return err
		}
		equal = append(equal, took)
		if err := b.receiver.exec(ctx, fmt.Sprintf("UPDATE orders SET note = %s WHERE id %% %d = 1", orders.old, b.rows/10)); err != nil {
			return err
		}
		if took, err = b.reconciled(ctx, "DIFFERENT"); err != nil {
			return err
		}
		different = append(different, took)
		r, err := b.product.request(ctx, orders.name, "differences")
		if err != nil {
			return err
		}
		if r, err = b.product.reviewable(ctx, r.ID); err != nil {
			return err
		}
		if r.Staged != 10 {
			return fmt.Errorf("%d rows were staged, 10 differ", r.Staged)
		}
		if err := b.product.approve(ctx, r); err != nil {
			return err
		}
		if _, err := b.product.finished(ctx, r.ID); err != nil {
			return err
		}
		at, _, err := b.product.drained(ctx)
		if err != nil {
			return err
		}
		mended = append(mended, at.Sub(r.RequestedAt))
		if err := b.arrived(ctx, orders); err != nil {
			return err
		}
	}
	section := fmt.Sprintf("Proof of %d rows of orders", b.rows)
	show := func(name string, took []time.Duration) {
		b.report.figure(section, name, fmt.Sprintf("%.2f s, %s of the floor", median(took).Seconds(), ratio(median(took), median(floors))))
	}
	show(floorName, floors)
	show("full reconciliation, both sides equal", equal)
	show("full reconciliation that finds 10 rows wrong", different)
	show("backfill of those 10 rows (mode differences), from request to drained", mended)
	return nil
}

// review measures walks and the pages of staged rows that wait for a person: as many as orders has, and ten times as many.
func (b *bench) review(ctx context.Context) error {
	large := narrow
	large.name = "large"
	if err := b.table(ctx, orders); err != nil {
		return err
	}
	if err := errors.Join(b.source.exec(ctx, large.create(), large.fill(10*b.rows), "VACUUM ANALYZE large"),
		b.receiver.exec(ctx, large.create()), b.product.capture(ctx, large.name)); err != nil {
		return err
	}
	if err := b.table(ctx, narrow); err != nil {
		return err
	}
	for _, w := range []workload{orders, narrow, large} {
		if err := b.ready(ctx, w, empty); err != nil {
			return err
		}
		r, err := b.walked(ctx, w)
		if err != nil {
			return err
		}
		section := fmt.Sprintf("A page of 100 of %d staged rows", r.Staged)
		for _, kind := range []struct {
			what  string
			query func() string
		}{
			{"at a random place", func() string { return fmt.Sprintf("position=%d", rand.Int64N(r.Staged)) }},
			{"at a random place among the inserts", func() string { return fmt.Sprintf("effect=insert&position=%d", rand.Int64N(r.Staged)) }},
			{"from a random key on", func() string { return fmt.Sprintf("from_key=%d", rand.Int64N(r.Staged)) }},
			{"of the overwrites, of which there are none", func() string { return "effect=overwrite" }},
		} {
			var took []time.Duration
			for range 200 {
				began := time.Now()
				if err := b.product.call(ctx, http.MethodGet, fmt.Sprintf("/backfills/%d/rows?limit=100&%s", r.ID, kind.query()), nil, nil); err != nil {
					return err
				}
				took = append(took, time.Since(began))
			}
			b.report.figure(section, kind.what, spread(took))
		}
		if err := b.product.reject(ctx, r); err != nil {
			return err
		}
	}
	return b.product.clear(ctx)
}

// walked walks a workload, has its effects judged, and notes how fast the walk was at its beginning and at its end.
func (b *bench) walked(ctx context.Context, w workload) (backfill, error) {
	r, err := b.product.request(ctx, w.name, "full")
	if err != nil {
		return r, err
	}
	var first, last time.Time
	if r, err = b.product.until(ctx, r.ID, "judged", func(r backfill) bool {
		if first.IsZero() && r.Staged > 0 && r.Staged >= r.Expected/10 {
			first = time.Now()
		}
		if last.IsZero() && r.Staged > 0 && r.Staged >= r.Expected*9/10 {
			last = time.Now()
		}
		return r.State == "AWAITING_REVIEW" && r.Effects["insert"] == r.Staged
	}); err != nil {
		return r, err
	}
	b.report.figure("Walks of one table and of another that is ten times as large", fmt.Sprintf("%d rows of %s", r.Staged, w.name),
		fmt.Sprintf("%.2f s, %.1f µs a row; the first tenth took %.2f s, the last %.2f s", r.WalkedAt.Sub(*r.StartedAt).Seconds(),
			r.WalkedAt.Sub(*r.StartedAt).Seconds()*1e6/float64(r.Staged), first.Sub(*r.StartedAt).Seconds(), max(0, r.WalkedAt.Sub(last)).Seconds()))
	return r, b.memory(r.Staged)
}

// idle measures what a site costs while nothing happens.
func (b *bench) idle(ctx context.Context) error {
	section := fmt.Sprintf("An idle site, over %d s", b.duration)
	pids := b.product.pids()
	look := func() (spent map[string]time.Duration, transactions map[string]int64, events int64, err error) {
		spent, transactions = map[string]time.Duration{}, map[string]int64{}
		for what, pid := range pids {
			if spent[what], err = processor(pid); err != nil {
				return nil, nil, 0, err
			}
		}
		for name, db := range map[string]*database{"source": b.source, "receiver": b.receiver, "control": b.control} {
			var n int64
			if err := db.QueryRow(ctx, `SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()`).Scan(&n); err != nil {
				return nil, nil, 0, err
			}
			transactions[name] = n
		}
		for _, side := range []string{source, receiver} {
			n, err := b.product.history(ctx, workflows.SyncID(site, side))
			if err != nil {
				return nil, nil, 0, err
			}
			events += n
		}
		return spent, transactions, events, nil
	}
	spent, transactions, events, err := look()
	if err != nil {
		return err
	}
	began := time.Now()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Duration(b.duration) * time.Second):
	}
	spentThen, transactionsThen, eventsThen, err := look()
	if err != nil {
		return err
	}
	seconds := time.Since(began).Seconds()
	for _, what := range slices.Sorted(maps.Keys(spent)) {
		b.report.figure(section, what, fmt.Sprintf("%.1f %% of a processor", (spentThen[what]-spent[what]).Seconds()/seconds*100))
	}
	for _, name := range slices.Sorted(maps.Keys(transactions)) {
		b.report.figure(section, "database "+name, fmt.Sprintf("%.1f transactions a second", float64(transactionsThen[name]-transactions[name])/seconds))
	}
	b.report.figure(section, "events in Temporal of both sides' syncs", fmt.Sprint(eventsThen-events))
	return nil
}
