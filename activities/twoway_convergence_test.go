package activities

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// TestGuarantee2_TwoWayConvergence lets writers change the same few keys on both sides
// while both push, apply, walk and release, crash, are held up and come back late, and
// while a person decides conflicts. When all is quiet the sides must be equal, changes
// must have come to rest, and every version that nobody overwrote knowingly must be
// there or be found in history as one that lost a conflict.
func TestGuarantee2_TwoWayConvergence(t *testing.T) { random(t, 15*time.Second, duelOf, 795987689) }

// duel is one schedule.
type duel struct {
	*storm
	policy string
	shifts bool // the policy changes now and then
}

const (
	duelSchema = `
		CREATE TABLE t (id numeric PRIMARY KEY, val text);
		CREATE TABLE written (val text);
		CREATE TABLE replaced (val text);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF current_setting('backfill.applying', true) = 'maple' THEN
				-- now and then a row that comes is refused at first
				IF TG_WHEN = 'BEFORE' AND random() < 0.04 THEN RAISE 'not now' USING ERRCODE = '23503'; END IF;
			ELSIF TG_WHEN = 'AFTER' AND TG_OP <> 'DELETE' AND (TG_OP = 'INSERT' OR new.val <> old.val) THEN
				INSERT INTO public.written VALUES (new.val);
			END IF;
			IF TG_WHEN = 'AFTER' THEN
				IF TG_OP <> 'INSERT' AND current_setting('backfill.applying', true) IS DISTINCT FROM 'maple' AND (TG_OP = 'DELETE' OR new.val <> old.val) THEN
					INSERT INTO public.replaced VALUES (old.val);
				END IF;
				RETURN NULL;
			END IF;
			RETURN coalesce(new, old);
		END $$;
		CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note();
		CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note();`
	duelKeys = 9
)

func duelOf(t *testing.T, seed int64, count *tally) {
	rng := rand.New(rand.NewPCG(uint64(seed), 7))
	p := testkit.NewPair(t, duelSchema, "public.t")
	d := &duel{storm: &storm{world: worldOf(p, Settings{LeaseTTL: 120 * time.Millisecond}), seed: uint64(seed), count: count, workers: map[string]string{}},
		policy: []string{testkit.Source, testkit.Receiver, backfill.Quarantine}[rng.IntN(3)], shifts: rand.New(rand.NewPCG(uint64(seed), 8)).IntN(3) > 0}
	two := twoWayOf(d.world, d.policy, "public.t")

	var writers, workers sync.WaitGroup
	d.writing.Store(true)
	d.working.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for i, dsn := range []string{p.SourceDSN, p.ReceiverDSN, p.SourceDSN, p.ReceiverDSN} {
		writers.Go(func() { d.write(i, dsn) })
	}
	for i, work := range []func(*worker, context.Context) error{
		(*worker).push, (*worker).push, (*worker).push, (*worker).push, (*worker).apply, (*worker).apply, d.walkOwn, d.walkOwn, (*worker).release, (*worker).release, d.decideOn, d.decideOn,
	} {
		k := d.worker(i, []string{testkit.Source, testkit.Receiver}[i%2])
		workers.Go(func() { k.loop(ctx, work) })
		if i < 6 {
			workers.Go(k.trouble)
		}
	}
	time.Sleep(2*time.Second + time.Duration(rng.IntN(1000))*time.Millisecond)
	d.writing.Store(false)
	writers.Wait()
	d.working.Store(false)
	stop()
	workers.Wait()

	d.settle(two)
	d.check(two)
	if len(d.wrong) > 0 {
		t.Log("history:\n" + strings.Join(testkit.Strings(t, d.C, `
			SELECT format('%s %s %s %s %s, stamp %s', e.seq, d.from_side, e.op, e.key, coalesce(e.row[2], '-'), e.stamp)
			       || CASE WHEN e.request_id IS NOT NULL THEN ', released' ELSE '' END || CASE WHEN e.dropped THEN ', never sent' ELSE '' END
			       || coalesce(', lost to ' || CASE WHEN c.seq IS NOT NULL THEN coalesce(c.to_seq::text, 'what was not pushed') END, '') || coalesce(', ' || q.state, '')
			  FROM backfill_control.entry e JOIN backfill_control.direction d ON d.id = e.direction
			  LEFT JOIN backfill_control.conflict c ON c.direction = e.direction AND c.seq = e.seq
			  LEFT JOIN backfill_control.quarantine q ON q.direction = e.direction AND q.seq = e.seq ORDER BY e.seq`), "\n"))
		t.Errorf("seed %d (policy %s, changed: %t) went wrong; run it again with -run 'TestGuarantee2_TwoWayConvergence' -seeds 1 -seed %d\n%s", seed, d.policy, d.shifts, seed, strings.Join(d.wrong[:min(len(d.wrong), 20)], "\n"))
	}
}

// write is an application on one side. What it writes is written once only.
func (d *duel) write(n int, dsn string) {
	rng := rand.New(rand.NewPCG(d.seed, uint64(2000+n)))
	conn, err := pgx.Connect(context.Background(), dsn)
	if err != nil {
		d.complain("writer: %v", err)
		return
	}
	defer func() { _ = conn.Close(context.Background()) }()
	exec := func(sql string) error {
		d.count.statements.Add(1)
		_, err := conn.Exec(context.Background(), sql)
		return err
	}
	err = exec(`SET deadlock_timeout = '50ms'; SET lock_timeout = '2s'`)
	for i := 0; err == nil && d.writing.Load(); i++ {
		key := func() string {
			return fmt.Sprint(1+rng.IntN(duelKeys), []string{"", "", "", ".0"}[rng.IntN(4)])
		}
		err = exec(`BEGIN`)
		for j := range 1 + rng.IntN(3) {
			val := fmt.Sprintf("'w%d.%d.%d", n, i, j)
			var sql string
			switch x := rng.IntN(20); {
			case x < 10:
				sql = `INSERT INTO t VALUES (` + key() + `, ` + val + `') ON CONFLICT (id) DO UPDATE SET val = excluded.val`
			case x < 13:
				sql = `UPDATE t SET val = ` + val + `.' || id WHERE id IN (` + key() + `, ` + key() + `)`
			case x < 16:
				sql = `DELETE FROM t WHERE id = ` + key()
			case x < 17:
				sql = `UPDATE t SET id = round(id, 1 - scale(id)) WHERE id = ` + key()
			case x < 18:
				sql = `UPDATE t SET id = ` + key() + ` + 20 WHERE id = ` + key()
			default:
				sql = `SELECT pg_sleep(0.003)`
			}
			if err = exec(sql); err != nil {
				break
			}
		}
		if err != nil || rng.IntN(12) == 0 {
			err = exec(`ROLLBACK`)
		} else if exec(`COMMIT`) != nil {
			err = exec(`ROLLBACK`)
		}
		nap(rng, 15*time.Millisecond)
	}
	if err != nil {
		d.complain("writer: %v", err)
	}
}

// walkOwn walks a request of the worker's own side for a while.
func (d *duel) walkOwn(k *worker, ctx context.Context) error {
	r, err := k.pick(ctx, backfill.Pending, backfill.InProgress)
	if err != nil {
		return err
	}
	a := k.agent
	if r.Direction.ID != a.Out.ID {
		return nil
	}
	a.PageRows, a.ChunkRows = 1+k.rng.IntN(4), int64(1+k.rng.IntN(8))
	lease, req, err := a.store.Claim(ctx, r.ID, a.ID, a.LeaseTTL)
	if err != nil {
		return err
	}
	w := a.walkUnder(lease, req)
	if err := w.freeze(ctx); err != nil {
		return err
	}
	for range 1 + k.rng.IntN(4) {
		done, err := w.chunk(ctx, nil)
		if err == nil && done {
			return w.settle(ctx)
		}
		if err != nil {
			return err
		}
	}
	return a.store.Hand(ctx, lease)
}

// decideOn is what people do.
func (d *duel) decideOn(k *worker, ctx context.Context) error {
	nap(k.rng, 100*time.Millisecond)
	store := k.agent.store
	if d.shifts && k.rng.IntN(6) == 0 {
		to := []string{testkit.Source, testkit.Receiver, backfill.Quarantine}[k.rng.IntN(3)]
		_, err := store.PutTable(ctx, "duel", testkit.Site, "public.t", control.TableChange{Conflict: &to})
		return err
	}
	switch k.rng.IntN(4) {
	case 0:
		_, err := store.CreateRequest(ctx, control.NewRequest{Direction: k.agent.Out.ID, TableID: d.Tables["public.t"].ID, Mode: backfill.ModeFull, By: "duel"})
		return err
	case 1, 2:
		r, err := k.pick(ctx, backfill.AwaitingReview)
		if err == nil {
			_, err = store.Approve(ctx, r.ID, control.Decision{By: "duel", Revision: r.Revision})
		}
		return err
	}
	return d.wishOne(ctx, k.rng)
}

// wishOne decides one conflict, if there is one.
func (d *duel) wishOne(ctx context.Context, rng *rand.Rand) error {
	all, err := d.Store.Queue(ctx, control.EntryFilter{Site: testkit.Site, State: "quarantined", Limit: 100})
	if err != nil || len(all) == 0 {
		return err
	}
	err = d.Store.Wish(ctx, testkit.Site, all[rng.IntN(len(all))].Seq, []string{"retry", "skip"}[rng.IntN(2)], "duel")
	if backfill.CodeOf(err) == backfill.Conflict {
		return nil
	}
	return err
}

func (d *duel) settle(w *pairOfWriters) {
	for _, c := range []*pgx.Conn{d.S, d.R} {
		testkit.Exec(d, c, `DROP TRIGGER refuse ON t`)
	}
	rng := rand.New(rand.NewPCG(d.seed, 99))
	d.from, d.to = d.agent(testkit.Source), d.agent(testkit.Receiver)
	w.apply0, w.apply1 = &applier{Agent: d.from}, &applier{Agent: d.to}
	quiet := func() {
		for range 200 {
			w.rest()
			all, err := d.Store.Queue(d.Context(), control.EntryFilter{Site: testkit.Site, Limit: 100})
			require.NoError(d, err)
			if len(all) == 0 {
				return
			}
			require.NoError(d, d.wishOne(d.Context(), rng))
		}
		d.complain("it does not come to rest")
	}
	quiet()
	all, err := d.Store.Requests(d.Context(), control.RequestFilter{States: backfill.OpenStates(), Limit: 100})
	require.NoError(d, err)
	for _, r := range all {
		a := d.from
		if r.Direction.ID != a.Out.ID {
			a = d.to
		}
		if r.State == backfill.Pending || r.State == backfill.InProgress {
			d.expire(r.ID)
			d.finish(d.claim(a, r.ID))
		}
		if d.Now(r.ID).State == backfill.AwaitingReview {
			d.Approve(r.ID)
		}
		d.release(r.ID, 3)
	}
	quiet()
}

func (d *duel) check(w *pairOfWriters) {
	source, receiver := rowsByKey(d, d.S, "t"), rowsByKey(d, d.R, "t")
	for key, row := range source {
		if receiver[key] != row {
			d.complain("source %s, receiver %q", row, receiver[key])
		}
	}
	for key, row := range receiver {
		if source[key] == "" {
			d.complain("only the receiver has %s", row)
		}
	}
	known := map[string]bool{}
	for _, c := range []*pgx.Conn{d.S, d.R} {
		for _, v := range testkit.Strings(d, c, `SELECT val FROM replaced UNION SELECT val FROM t`) {
			known[v] = true
		}
	}
	for _, v := range testkit.Strings(d, d.C, `SELECT DISTINCT e.row[2] FROM backfill_control.conflict c JOIN backfill_control.entry e ON e.direction = c.direction AND e.seq = c.seq WHERE e.row IS NOT NULL`) {
		known[v] = true
	}
	for _, c := range []*pgx.Conn{d.S, d.R} {
		for _, v := range testkit.Strings(d, c, `SELECT val FROM written`) {
			if !known[v] {
				d.complain("%s was lost silently", v)
			}
		}
	}
	if n := testkit.Value[int](d, d.C, `
		SELECT count(*) FROM backfill_control.request r WHERE state = 'FINISHED' AND released + superseded + skipped <> staged`); n > 0 {
		d.complain("%d requests whose counts do not add up", n)
	}
	d.count.released.Add(testkit.Value[int64](d, d.C, `SELECT coalesce(sum(released), 0) FROM backfill_control.request`))
	d.count.superseded.Add(testkit.Value[int64](d, d.C, `SELECT coalesce(sum(superseded), 0) FROM backfill_control.request`))
	d.count.staged.Add(testkit.Value[int64](d, d.C, `SELECT coalesce(sum(staged), 0) FROM backfill_control.request`))
	d.count.requests.Add(testkit.Value[int64](d, d.C, `SELECT count(*) FROM backfill_control.request`))
	d.count.pushed.Add(testkit.Value[int64](d, d.C, `SELECT count(*) FROM backfill_control.entry WHERE request_id IS NULL`))
	d.count.skipped.Add(testkit.Value[int64](d, d.C, `SELECT count(*) FROM backfill_control.conflict`))
	for range 3 {
		w.applyOn(w.apply0)
		w.applyOn(w.apply1)
	}
	for name, c := range map[string]*pgx.Conn{"school": d.S, "central": d.R} {
		if n := testkit.Value[int](d, c, `SELECT count(*) FROM backfill_maple_`+name+`.own`); n > 0 {
			d.complain("%d own changes of %s are never forgotten", n, name)
		}
	}
}
