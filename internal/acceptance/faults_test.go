//go:build linux

package acceptance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/client"

	"backfill/activities"
	"backfill/internal/local"
	"backfill/workflows"
)

// kill -9 at named points between any two transactions, again and again in the life
// of a few backfills: nothing is lost or doubled, and the two databases end up equal.
//
// Each death costs the ten seconds after which Temporal gives its work to the next
// process. So a run tries a few points, others each time; with BACKFILL_SOAK all of
// them. BACKFILL_SEED picks the same ones again.
func TestKillsAtAnyPointLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	if os.Getenv("BACKFILL_BIN") != "" {
		t.Skip("the program given cannot be made to kill itself")
	}
	seed, err := strconv.ParseUint(os.Getenv("BACKFILL_SEED"), 10, 64)
	if err != nil {
		seed = rand.Uint64() % 1_000_000
	}
	t.Logf("seed %d", seed)
	order := rand.New(rand.NewPCG(seed, 0)).Perm(len(activities.Points))
	deaths, runs := 2, 1
	if os.Getenv("BACKFILL_SOAK") != "" {
		deaths, runs = 4, (len(order)+3)/4
	}
	for i := range runs {
		var points []string
		for _, n := range order[i*deaths : min((i+1)*deaths, len(order))] {
			points = append(points, activities.Points[n])
		}
		if slices.Contains(points, "push: caught up") && !slices.Contains(points, "push: committed") {
			points = append(points, "push: committed") // what is caught up with
		}
		if slices.Contains(points, "epoch: noted") && !slices.Contains(points, "epoch: begun") {
			points = append(points, "epoch: begun") // what is noted
		}
		t.Run(strings.Join(points, ", "), func(t *testing.T) { dieAt(t, points) })
	}
}

// mortal is a site whose program dies at points.
type mortal struct {
	*site
	c      *pgx.Conn // to the control database, which stays, as Temporal does
	engine client.Client
	faults string // the file of points still to be died at
}

func dieAt(t *testing.T, points []string) {
	server := startTemporal(t, filepath.Join(t.TempDir(), "temporal"))
	m := newMortal(t, server, setup{
		tables: []string{"public.accounts", "public.others", "public.strangers"},
		a:      accounts("accounts", 12_000) + accounts("others", 50) + accounts("strangers", 1),
		b:      accounts("accounts", 100) + accounts("others", 10) + accounts("strangers", 1) + `ALTER TABLE others ADD CONSTRAINT never_in_debt CHECK (balance >= 0)`,
	})
	m.arm(points)

	// Changes, some of them of a table that is no longer configured.
	m.sql(`UPDATE backfill_control.table_config SET captured_from = '{}' WHERE name = 'public.strangers'`)
	m.run(m.site.a, `INSERT INTO strangers VALUES (2, 'nobody', 0); UPDATE accounts SET owner = 'changed' WHERE id % 1000 = 0; INSERT INTO others VALUES (60, 'new', 1)`)
	m.delivered()

	// A backfill, found by the sweep; what it has staged changes before it is approved.
	id := m.ask("public.accounts")
	gated := m.armed("gate")
	if gated {
		m.gates("SELECT 11") // over the limit
	}
	m.until("the request to go on", func() bool {
		m.post("resume", id, nil)
		return !m.value(`SELECT paused::int FROM backfill_control.request WHERE id = $1`, id)
	})
	if gated {
		m.until("the gate to hold the walk", func() bool {
			return m.value(`SELECT (waiting LIKE 'gate load%')::int FROM backfill_control.request WHERE id = $1`, id) && !m.armed("gate: held")
		})
		m.gates("SELECT 0")
	}
	m.until("all rows to be judged", func() bool {
		return m.state(id) == "AWAITING_REVIEW" && m.value(`SELECT (classified = staged)::int FROM backfill_control.request WHERE id = $1`, id)
	})
	m.until("them to be judged again", func() bool {
		m.post("judge", id, nil)
		return m.value(`SELECT (revision > 1)::int FROM backfill_control.request WHERE id = $1`, id)
	})
	m.run(m.site.a, `UPDATE accounts SET owner = 'changed again' WHERE id IN (5, 2000); DELETE FROM accounts WHERE id IN (6, 3000)`)
	m.delivered()
	m.until("the approval to be recorded", func() bool {
		var revision int64
		require.NoError(m, m.c.QueryRow(m.Context(), `SELECT revision FROM backfill_control.request WHERE id = $1`, id).Scan(&revision))
		m.post("approve", id, decision{Revision: revision, Note: "read it"})
		return m.state(id) != "AWAITING_REVIEW"
	})
	m.until("the release to be finished", func() bool { return m.state(id) == "FINISHED" })
	m.delivered()
	m.requireEqual("accounts")

	// One that is given up, and one that is closed behind the workflow's back.
	given := m.ask("public.others")
	m.until("the request to be cancelled", func() bool { m.post("cancel", given, nil); return m.state(given) == "CANCELLED" })
	if slices.Contains(points, "sweep: refreshed") {
		// A workflow may notice by itself, when something that it began ends just then: then
		// the workflow is gone, and another request is closed.
		m.until("the sweep to notice", func() bool {
			closed := m.ask("public.others")
			m.until("its rows to be judged", func() bool {
				m.post("resume", closed, nil)
				return m.state(closed) == "AWAITING_REVIEW" && m.value(`SELECT (classified = staged)::int FROM backfill_control.request WHERE id = $1`, closed)
			})
			m.sql(`UPDATE backfill_control.request SET state = 'CANCELLED', closed_at = now() WHERE id = $1`, closed)
			m.until("the workflow to end", func() bool { return !m.armed("sweep: refreshed") || !m.runs("public.others") })
			return !m.armed("sweep: refreshed")
		})
	}

	// Changes that are set aside: one is skipped, one tried again.
	m.run(m.site.a, `UPDATE others SET balance = -1 WHERE id IN (1, 2)`)
	m.until("the changes to be set aside", func() bool {
		return m.value(`SELECT (count(*) = 2)::int FROM backfill_control.quarantine WHERE state = 'quarantined'`)
	})
	m.run(m.site.b, `ALTER TABLE others DROP CONSTRAINT never_in_debt`)
	var first, second int64
	require.NoError(m, m.c.QueryRow(m.Context(), `SELECT min(seq), max(seq) FROM backfill_control.quarantine`).Scan(&first, &second))
	m.until("them to be dealt with", func() bool {
		_, _ = m.call(http.MethodPost, wishPath(first, "skip"), nil)
		_, _ = m.call(http.MethodPost, wishPath(second, "retry"), nil)
		return m.value(`SELECT (count(*) = 1 AND bool_and(state = 'skipped' AND wish IS NULL))::int FROM backfill_control.quarantine`)
	})

	if m.armed("halt") {
		// A source that may not go on, and then may.
		var timeline string
		require.NoError(m, m.c.QueryRow(m.Context(), `SELECT timeline FROM backfill_control.side WHERE name = 'a'`).Scan(&timeline))
		m.sql(`UPDATE backfill_control.side SET timeline = 'another' WHERE name = 'a'`)
		m.until("the source to be halted", func() bool {
			return m.value(`SELECT (halted IS NOT NULL)::int FROM backfill_control.side WHERE name = 'a'`)
		})
		m.sql(`UPDATE backfill_control.side SET timeline = $1 WHERE name = 'a'`, timeline)
		m.until("it to go on", func() bool {
			return m.value(`SELECT (halted IS NULL)::int FROM backfill_control.side WHERE name = 'a'`) && !m.armed("halt")
		})
	}
	if m.armed("retain") {
		require.NoError(m, m.engine.ScheduleClient().GetHandle(m.Context(), workflows.RetentionID).Trigger(m.Context(), client.ScheduleTriggerOptions{}))
		m.until("retention to be over", func() bool { return !m.armed("retain") })
	}
	if m.armed("epoch: ") {
		m.until("a new epoch", func() bool {
			_, _ = m.call(http.MethodPost, "/sites/s/epoch", map[string]string{"note": "restored"})
			return m.value(`SELECT (epoch > 1)::int FROM backfill_control.site`)
		})
	}
	for walks := 0; (m.armed("walk: ") || m.armed("page: ")) && walks < 6; walks++ {
		// Who died with the walk's last word to say has said it, and walks no more: another walks.
		again := m.ask("public.others")
		m.until("its rows to be judged", func() bool {
			m.post("resume", again, nil)
			return m.state(again) == "AWAITING_REVIEW"
		})
		m.until("it to be cancelled", func() bool {
			m.post("cancel", again, nil)
			return m.state(again) == "CANCELLED"
		})
	}
	n := 0
	m.until("all points to be passed", func() bool {
		n++
		m.run(m.site.a, fmt.Sprintf(`UPDATE others SET owner = 'round %d'`, n))
		return !m.armed("")
	})
	m.delivered()
	m.requireEqual("accounts", "others")

	var staged, released, superseded, skipped, entries, keys, rows int64
	require.NoError(m, m.c.QueryRow(m.Context(), `
		SELECT r.staged, r.released, r.superseded, r.skipped, (SELECT count(*) FROM backfill_control.entry e WHERE e.request_id = r.id),
		       (SELECT count(DISTINCT key) FROM backfill_control.entry e WHERE e.request_id = r.id), (SELECT count(DISTINCT key) FROM backfill_control.staged s WHERE s.request_id = r.id)
		  FROM backfill_control.request r WHERE id = $1`, id).Scan(&staged, &released, &superseded, &skipped, &entries, &keys, &rows))
	require.Equal(m, []int64{12_000, 12_000, 4, 0, 11_996, 11_996, 11_996}, []int64{staged, rows, superseded, skipped, released, entries, keys})
	require.EqualValues(m, 12_000-2, m.number(m.site.b, `SELECT count(*) FROM accounts`))
}

func newMortal(t *testing.T, server *local.Temporal, with setup) *mortal {
	t.Helper()
	m := &mortal{site: prepareSite(t, with), faults: filepath.Join(t.TempDir(), "faults")}
	dsn := m.controlDatabase()
	m.args = append(m.args, "--control", dsn, "--temporal", server.HostPort)
	m.env = []string{"BACKFILL_FAULTS=" + m.faults}
	m.start()
	var err error
	m.c, err = pgx.Connect(m.Context(), dsn)
	require.NoError(m, err)
	m.Cleanup(func() { _ = m.c.Close(context.Background()) })
	m.engine, err = client.Dial(client.Options{HostPort: server.HostPort})
	require.NoError(m, err)
	m.Cleanup(m.engine.Close)
	return m
}

// gates sets a gate on what a query answers, of at most 10, and one on speed.
func (m *mortal) gates(query string) {
	m.Helper()
	type gate map[string]any
	m.until("the gates to be set", func() bool {
		a, err := m.call(http.MethodPut, "/sites/s/gates", map[string]any{"gates": []gate{
			{"name": "load", "side": "a", "kind": "sql", "query": query, "limit": 10}, {"name": "speed", "side": "a", "kind": "rows_per_second", "limit": 4000}}})
		return err == nil && a.Status == http.StatusOK
	})
}

// runs reports whether a workflow runs for the whole of a table.
func (m *mortal) runs(table string) bool {
	m.Helper()
	about, err := m.engine.DescribeWorkflowExecution(m.Context(), "backfill/s/"+table+"/a", "")
	require.NoError(m, err)
	return about.GetWorkflowExecutionInfo().GetStatus() == enums.WORKFLOW_EXECUTION_STATUS_RUNNING
}

func (m *mortal) arm(points []string) {
	m.Helper()
	var lines []string
	for _, p := range points {
		lines = append(lines, "1 "+p)
	}
	require.NoError(m, os.WriteFile(m.faults, []byte(strings.Join(lines, "\n")), 0o600))
}

// armed says whether a point, "" for any, has not been passed yet.
func (m *mortal) armed(point string) bool {
	text, err := os.ReadFile(m.faults)
	require.NoError(m, err)
	return strings.Contains(string(text), point) && len(text) > 0
}

// until waits, and starts the program again whenever it has died.
func (m *mortal) until(what string, done func() bool) {
	m.Helper()
	m.await(what, func() (bool, string) {
		if m.dev.gone() {
			m.revive()
			return false, "started again"
		}
		text, _ := os.ReadFile(m.faults)
		return done(), fmt.Sprintf("%s; still to die at %q; requests %v", m.dev.said(), text, m.requests())
	})
}

func (m *mortal) requests() (all []string) {
	rows, err := m.c.Query(m.Context(), `SELECT r::text FROM backfill_control.request r`)
	require.NoError(m, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(m, err)
	return all
}

// revive starts the program again; it may die while it starts.
func (m *mortal) revive() {
	m.Helper()
	status, ok := m.dev.cmd.ProcessState.Sys().(syscall.WaitStatus)
	require.True(m, ok && status.Signaled() && status.Signal() == syscall.SIGKILL, "it ended with %v; it printed:\n%s", m.dev.cmd.ProcessState, m.dev.said())
	dev, err := launchWith(m.env, m.output(), m.args...)
	require.NoError(m, err)
	m.dev = dev
	m.await("the program to be ready or dead", func() (bool, string) {
		_, ready := m.dev.printed("token: ")
		return ready || m.dev.gone(), m.dev.said()
	})
}

func (m *mortal) sql(sql string, args ...any) {
	m.Helper()
	_, err := m.c.Exec(m.Context(), sql, args...)
	require.NoError(m, err, sql)
}

func (m *mortal) value(sql string, args ...any) bool {
	m.Helper()
	var v int
	require.NoError(m, m.c.QueryRow(m.Context(), sql, args...).Scan(&v), sql)
	return v == 1
}

func (m *mortal) state(id int64) (state string) {
	m.Helper()
	require.NoError(m, m.c.QueryRow(m.Context(), `SELECT state FROM backfill_control.request WHERE id = $1`, id).Scan(&state))
	return state
}

// ask records a request as the API does when it dies right after: paused, so that
// it does not run away, and unknown to the workflow engine until the sweep finds it.
func (m *mortal) ask(table string) (id int64) {
	m.Helper()
	require.NoError(m, m.c.QueryRow(m.Context(), `
		INSERT INTO backfill_control.request (direction, table_id, mode, requested_by, paused)
		SELECT d.id, t.id, 'full', 'test', true FROM backfill_control.direction d, backfill_control.table_config t WHERE d.from_side = 'a' AND t.name = $1 RETURNING id`, table).Scan(&id))
	return id
}

// post asks for something to be done with a request. Whether it was is seen elsewhere.
func (m *mortal) post(what string, id int64, body any) {
	_, _ = m.call(http.MethodPost, path(id)+"/"+what, body)
}

// delivered waits until every change made on a is applied on b.
func (m *mortal) delivered() {
	m.Helper()
	m.until("all changes to be applied", func() bool {
		return m.number(m.site.a, `SELECT count(*) FROM backfill_s_a.outbox`) == 0 &&
			m.value(`SELECT (applied_seq = coalesce((SELECT max(seq) FROM backfill_control.entry e WHERE e.direction = d.id), 0))::int FROM backfill_control.direction d WHERE from_side = 'a'`)
	})
}
