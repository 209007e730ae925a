package containers

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience is how long anything may take, on a busy machine. A lost host is noticed after
// the 10 s of a heartbeat, a dead connection after connect.Lost.
const patience = 3 * time.Minute

// TestFaultsOfHostsAndNetworks backfills a table over each fault, while an application
// keeps writing, and holds all that is promised of a backfill against what came of it.
func TestFaultsOfHostsAndNetworks(t *testing.T) {
	s := newStack(t)
	s.must(http.StatusOK, http.MethodPut, "/sites/s/gates", map[string]any{"gates": []map[string]any{{"name": "speed", "side": "a", "kind": "rows_per_second", "limit": rate}}}, nil)
	s.agent("agent-a1", "a")
	s.agent("agent-b1", "b")
	for name, port := range map[string]string{"api-1": "8080", "control-1": "9090", "agent-a1": "9090", "agent-b1": "9090"} {
		s.well(name, port, "")
	}
	faults := []struct {
		name               string
		prepare            func(*stack)
		walking, releasing func(*stack)
	}{
		{name: "the host of an agent is lost in mid-walk, another takes over",
			prepare: func(s *stack) { s.agent("agent-a2", "a") },
			walking: func(s *stack) { s.lose("agent-a1") }},
		{name: "the source's database is cut off in mid-walk and the receiver's during the release, and back",
			walking:   func(s *stack) { s.blink("db-a", sideA, "agent-a2", "side") },
			releasing: func(s *stack) { s.blink("db-b", sideB, "agent-b1", "side") }},
		{name: "agents and control database are apart during the release",
			releasing: func(s *stack) { s.blink("agent-b1", data, "agent-b1", "database") }},
		{name: "the control plane is restarted part by part",
			walking: func(s *stack) { s.restart("api-1"); s.restart("control-1"); s.restart("temporal") },
			releasing: func(s *stack) {
				s.restart("control-2")
				s.restart("api-2")
				s.restart("agent-a2")
				s.restart("agent-b1")
			}},
		{name: "a whole control host is lost, another takes over",
			walking:   func(s *stack) { s.lose("control-1"); s.lose("api-1") },
			releasing: func(s *stack) { s.controlWorker("control-3"); s.lose("control-2") }},
	}
	require.Len(t, faults, tables)
	for i, fault := range faults {
		t.Run(fault.name, func(t *testing.T) {
			s.T = t
			if fault.prepare != nil {
				fault.prepare(s)
			}
			b := s.backfill(i)
			at := func(what func(*stack)) {
				if what != nil {
					began := time.Now()
					what(s)
					t.Logf("the fault took %s", time.Since(began).Round(time.Millisecond))
				}
			}
			b.until("a third of the rows to be staged", func(r request) bool { return r.Staged >= rows/3 })
			at(fault.walking)
			b.until("all rows to wait for review", func(r request) bool { return r.State == "AWAITING_REVIEW" && r.Effects["unknown"] == 0 })
			b.nothingToSee()
			b.approve()
			b.until("the release to begin", func(r request) bool { return r.Released > 0 || r.State == "FINISHED" })
			at(fault.releasing)
			b.until("the release to be finished", func(r request) bool { return r.State == "FINISHED" })
			b.holds()
		})
	}
}

const (
	tables = 5      // one for each fault
	rows   = 12_000 // in the source when the walk begins
	there  = 500    // of them on the receiver
	rate   = 2_000  // rows a second
)

// run is a backfill of a table of its own, which is written to until it is over.
type run struct {
	*stack
	table string
	id    int64
	last  request

	began   time.Time
	stop    context.CancelFunc
	stopped sync.WaitGroup
}

type request struct {
	ID                                               int64
	State, Reason                                    string
	Staged, Released, Superseded, Identical, Skipped int64
	Revision                                         int64
	Effects                                          map[string]int64
	SupersededUndelivered                            int64 `json:"superseded_undelivered"`
}

// table makes a table, most of whose rows b lacks, and configures it.
func (s *stack) table(n int) {
	s.Helper()
	const create = `CREATE TABLE accounts_%d (id bigint PRIMARY KEY, owner text NOT NULL, balance numeric NOT NULL); INSERT INTO accounts_%[1]d SELECT i, 'owner ' || i, i FROM generate_series(1, %d) i`
	s.exec(s.a, fmt.Sprintf(create, n, rows))
	s.exec(s.b, fmt.Sprintf(create, n, there))
	s.must(http.StatusOK, http.MethodPut, fmt.Sprintf("/sites/s/tables/public.accounts_%d", n), map[string]any{"captured_from": []string{"a"}}, nil)
}

// backfill asks for a backfill of a table that is written to on a.
func (s *stack) backfill(n int) *run {
	s.Helper()
	b := &run{stack: s, table: fmt.Sprintf("accounts_%d", n), began: time.Now()}
	b.write()
	s.await("the backfill to be allowed", patience, func() (bool, string) {
		var r request
		status, err := s.call(http.MethodPost, "/sites/s/backfills", map[string]any{"table": "public." + b.table, "from": "a"}, &r)
		b.id = r.ID
		return status == http.StatusCreated, fmt.Sprint(err)
	})
	return b
}

// write is the application: every 20 ms it adds a row, changes one and deletes one. It
// leaves every tenth row as it is.
func (b *run) write() {
	ctx, stop := context.WithCancel(b.Context())
	b.stop = stop
	b.Cleanup(b.quiet)
	b.stopped.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for n := 1; ; n++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			add, change, remove := rows+n, (n*37%rows)/10*10+1+n%9, (n*53%rows)/10*10+9
			if _, err := b.a.Exec(context.WithoutCancel(ctx), fmt.Sprintf(`
				INSERT INTO %[1]s VALUES (%[2]d, 'new', 0) ON CONFLICT DO NOTHING;
				UPDATE %[1]s SET balance = balance + 1, owner = 'changed' WHERE id = %[3]d;
				DELETE FROM %[1]s WHERE id = %[4]d`, b.table, add, change, remove)); err != nil {
				b.Errorf("the application's write failed: %v", err)
				return
			}
		}
	})
}

// quiet ends the writing.
func (b *run) quiet() {
	b.stop()
	b.stopped.Wait()
}

func (b *run) until(what string, done func(request) bool) {
	b.Helper()
	b.await(what, patience, func() (bool, string) {
		var r request
		_, err := b.call(http.MethodGet, fmt.Sprintf("/backfills/%d", b.id), nil, &r)
		if err == nil {
			b.last = r
			require.NotContains(b, []string{"FAILED", "CANCELLED", "REJECTED"}, r.State, r.Reason)
		}
		return err == nil && done(r), fmt.Sprintf("%+v, %v", b.last, err)
	})
	b.Logf("after %s: %s", time.Since(b.began).Round(100*time.Millisecond), what)
}

// nothingToSee holds that nothing the walk has read is visible before approval.
func (b *run) nothingToSee() {
	b.Helper()
	require.Zero(b, b.number(b.control, `SELECT count(*) FROM backfill_control.entry WHERE request_id = $1`, b.id), "staged rows are in the queue or in history")
	// The application leaves these alone, so only a release can bring them.
	require.Zero(b, b.number(b.b, `SELECT count(*) FROM `+b.table+` WHERE id % 10 = 0 AND id BETWEEN $1 AND $2`, there+1, rows), "staged rows are on the receiver")
}

func (b *run) approve() {
	b.Helper()
	b.await("the approval to be taken", patience, func() (bool, string) {
		var r request
		status, err := b.call(http.MethodPost, fmt.Sprintf("/backfills/%d/approve", b.id), map[string]any{"revision": b.last.Revision, "note": "read"}, &r)
		if status == http.StatusConflict {
			_, _ = b.call(http.MethodGet, fmt.Sprintf("/backfills/%d", b.id), nil, &b.last)
			return b.last.State == "RELEASING" || b.last.State == "FINISHED", fmt.Sprint(err)
		}
		return status == http.StatusOK, fmt.Sprint(err)
	})
}

// holds checks what is promised of a backfill that is finished.
func (b *run) holds() {
	b.Helper()
	b.quiet()
	b.await("all changes to be applied", patience, func() (bool, string) {
		captured := b.number(b.a, `SELECT count(*) FROM backfill_s_a.outbox`)
		waiting := b.number(b.control, `SELECT count(*) FROM backfill_control.entry e JOIN backfill_control.direction d ON d.id = e.direction WHERE e.seq > d.applied_seq`)
		return captured+waiting == 0, fmt.Sprintf("%d captured, %d in the queue", captured, waiting)
	})
	// The receiver equals the source.
	sum := `SELECT count(*) || ' ' || coalesce(sum(('x' || substr(md5(r::text), 1, 15))::bit(60)::bigint::numeric), 0) FROM ` + b.table + ` r`
	var onA, onB string
	require.NoError(b, b.a.QueryRow(b.Context(), sum).Scan(&onA))
	require.NoError(b, b.b.QueryRow(b.Context(), sum).Scan(&onB))
	require.Equal(b, onA, onB, "the receiver differs from the source")
	require.Zero(b, b.number(b.control, `SELECT count(*) FROM backfill_control.quarantine WHERE state = 'quarantined'`), "changes were set aside")

	// Each key was staged once, and none that was there all along was skipped.
	var staged, keys, untouched, released, superseded, skipped, entries, sent int64
	require.NoError(b, b.control.QueryRow(b.Context(), `
		SELECT r.staged, r.released, r.superseded, r.skipped,
		       (SELECT count(DISTINCT key) FROM backfill_control.staged s WHERE s.request_id = r.id),
		       (SELECT count(*) FROM backfill_control.staged s WHERE s.request_id = r.id AND key[1]::bigint % 10 = 0 AND key[1]::bigint <= $2),
		       (SELECT count(*) FROM backfill_control.entry e WHERE e.request_id = r.id),
		       (SELECT count(DISTINCT key) FROM backfill_control.entry e WHERE e.request_id = r.id)
		  FROM backfill_control.request r WHERE id = $1`, b.id, rows).Scan(&staged, &released, &superseded, &skipped, &keys, &untouched, &entries, &sent))
	require.Equal(b, staged, keys, "keys were staged twice, or rows counted that are not there")
	require.EqualValues(b, rows/10, untouched, "rows were skipped")
	// Each was released once, and what was not is accounted for.
	require.Equal(b, staged, released+superseded+skipped, "the counts do not add up")
	require.Equal(b, []int64{released, released}, []int64{entries, sent}, "rows were released twice, or counted that were not")
	b.Logf("%d staged, %d released, %d superseded; %s on both sides", staged, released, superseded, onA)
}
