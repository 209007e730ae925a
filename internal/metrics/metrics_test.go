package metrics

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
	"backfill/internal/pace"
	"backfill/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// gather returns the figures as lines of name{labels} value.
func gather(t *testing.T, all ...prometheus.Collector) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(all...)
	families, err := r.Gather()
	require.NoError(t, err)
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			name := f.GetName() + "{" + strings.Join(labels, ",") + "}"
			switch {
			case m.Gauge != nil:
				out[name] = m.Gauge.GetValue()
			case m.Counter != nil:
				out[name] = m.Counter.GetValue()
			case m.Histogram != nil:
				out[name] = m.Histogram.GetSampleSum()
			}
		}
	}
	return out
}

func TestFiguresOfTheInstallation(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders")
	ctx := t.Context()
	r := p.Request("public.orders")
	testkit.Exec(t, p.C, `UPDATE backfill_control.request SET state = 'IN_PROGRESS', started_at = now() - interval '10 s', staged = 40 WHERE id = $1`, r.ID)
	gate := pace.Gate{Name: "lag", Side: testkit.Receiver, Kind: pace.ReplicaLag, Limit: 2}
	require.NoError(t, p.Store.PutGates(ctx, "ann", testkit.Site, []pace.Gate{gate}, true))
	require.NoError(t, p.Store.Measured(ctx, testkit.Site, []control.Measurement{{Gate: gate, Value: 3}}))
	require.NoError(t, p.Store.Throttled(ctx, r.ID, gate, "it is late", 5*time.Second))
	half := 0.5
	require.NoError(t, p.Store.Sample(ctx, r.ID, control.Point{Position: &half}, pace.Forecast{Rate: 10, Duty: 0.5, P50: time.Minute, P90: time.Minute}))
	require.NoError(t, p.Store.AgentSeen(ctx, testkit.Site, testkit.Source, "a", "db", "broken"))
	require.NoError(t, p.Store.Attend(ctx, "w"))
	require.NoError(t, p.Store.ReportOutbox(ctx, testkit.Site, testkit.Source, []control.Backlog{{Table: "public.orders", Rows: 7, First: 1, Waited: time.Minute}}))
	away := false
	temporal := NewTemporal()
	temporal.Handler().WithTags(map[string]string{"operation": "Poll"}).Counter("temporal_request").Inc(3)
	temporal.Handler().WithTags(map[string]string{"task_queue": "q"}).Timer("temporal_request_latency").Record(time.Second)
	temporal.Handler().Gauge("temporal_num_pollers").Update(4)
	got := gather(t, Installation{Store: p.Store, Temporal: func(context.Context) error {
		if away {
			return errors.New("away")
		}
		return nil
	}}, Pools{"control": p.Store.Stat, "side school": func() *pgxpool.Stat { return p.From.Stat() }}, temporal,
		Applied{Site: testkit.Site, Side: testkit.Receiver, Rows: func() int64 { return 12 }})

	labels := "{from=school,site=maple,table=public.orders}"
	for name, want := range map[string]float64{
		"backfill_rows_per_second" + labels: 5, "backfill_percent_complete" + labels: 50, "backfill_resume_key_info" + labels: 0.5,
		"backfill_rows_staged_total" + labels: 40, "backfill_rows_released_total" + labels: 0,
		"backfill_throttled_seconds_total{from=school,reason=replica_lag,site=maple,table=public.orders}": 5,
		"replica_lag_seconds{side=central,site=maple}":                                                    3,
		"queue_depth{from=school,site=maple}":                                                             7,
		"quarantined{from=school,site=maple}":                                                             0,
		"apply_rows_total{side=central,site=maple}":                                                       12,
		"backfill_gate_open{gate=lag,kind=replica_lag,side=central,site=maple}":                           0,
		"backfill_agent_ok{side=school,site=maple}":                                                       0,
		"backfill_capture_ok{side=school,site=maple,table=public.orders}":                                 0,
		"backfill_temporal_up{}":                                                                          1,
		"temporal_request_total{operation=Poll}":                                                          3,
		"temporal_request_latency_seconds{task_queue=q}":                                                  1,
		"temporal_num_pollers{}":                                                                          4,
	} {
		require.Contains(t, got, name)
		require.InDelta(t, want, got[name], 0.01, name)
	}
	require.InDelta(t, 60, got["queue_oldest_seconds{from=school,site=maple}"], 30)
	require.Contains(t, got, "pgx_pool_connections{pool=control,state=acquired}")
	for name := range got {
		require.NotContains(t, name, "request_id")
	}

	testkit.Exec(t, p.C, `UPDATE backfill_control.request SET state = 'AWAITING_REVIEW', walked_at = now() - interval '1 h' WHERE id = $1`, r.ID)
	away = true
	got = gather(t, Installation{Store: p.Store, Temporal: func(context.Context) error { return errors.New("away") }})
	require.InDelta(t, 3600, got["awaiting_review_seconds"+labels], 60)
	require.Zero(t, got["backfill_temporal_up{}"])

	gone := testkit.Open(t, p.ControlDSN)
	gone.Disconnect()
	require.Equal(t, map[string]float64{"backfill_figures_up{}": 0}, gather(t, Installation{Store: gone}), "without the database it says just that")
}

// What alerts and dashboards ask for is what is shown.
func TestAlertsAndDashboardsUseFiguresThatExist(t *testing.T) {
	t.Parallel()
	var known []string
	for _, file := range []string{"metrics.go", "proof.go"} {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`desc\("(\w+)"`).FindAllStringSubmatch(string(source), -1) {
			known = append(known, m[1])
		}
	}
	asked := regexp.MustCompile(`\b(backfill_[a-z_]+|queue_[a-z_]+|outbox_[a-z_]+|apply_[a-z_]+|reconcile_[a-z_]+|proof_[a-z_]+|shadow_[a-z_]+|migration_[a-z_]+|replica_[a-z_]+|awaiting_[a-z_]+|pgx_[a-z_]+|quarantined|held)\b`)
	expr := regexp.MustCompile(`(?m)("expr": ".*",?|expr: .*|^            .*)$`)
	for _, file := range []string{"../../deploy/prometheus/alerts.yaml", "../../deploy/grafana/backfill.json"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		n := 0
		for _, line := range expr.FindAllString(string(text), -1) {
			if strings.Contains(line, "legendFormat") {
				continue
			}
			for _, name := range asked.FindAllString(line, -1) {
				if name == "replica_lag" || strings.HasPrefix(name, "held by") {
					continue
				}
				n++
				require.True(t, slices.Contains(known, name), "%s asks for %s", file, name)
			}
		}
		require.Greater(t, n, 10, file)
	}
	rules, err := os.ReadFile("../../deploy/prometheus/alerts.yaml")
	require.NoError(t, err)
	book, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	tests, err := os.ReadFile("../../deploy/prometheus/alerts_test.yaml")
	require.NoError(t, err)
	for _, m := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(string(rules), -1) {
		require.Contains(t, string(book), "### "+m[1]+"\n", "the runbook")
		require.Contains(t, string(tests), "alertname: "+m[1], "the tests of the alerts")
	}
}

func TestAlertRules(t *testing.T) {
	t.Parallel()
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed (Debian: apt-get install prometheus)")
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		cmd := exec.Command(promtool, args...)
		cmd.Dir = filepath.Join("..", "..", "deploy", "prometheus")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
	}
}

func TestFiguresOfProof(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders")
	require.Empty(t, gather(t, Proof{p.Store}))
	id := p.Out.ID
	testkit.Exec(t, p.C, `
		WITH r AS (INSERT INTO backfill_control.reconciliation (direction, table_id, mode, state, verdict, requested_by, closed_at)
		           SELECT $1, t.id, 'full', 'FINISHED', v, 'test', now() - age FROM backfill_control.table_config t, (VALUES ('EQUAL', interval '1 h'), ('DIFFERENT', interval '0')) x (v, age)
		           ORDER BY age DESC RETURNING id, verdict),
		l AS (INSERT INTO backfill_control.run_leaf (run_id, n, state, source_count) SELECT id, 1, lower(verdict), 30 FROM r UNION ALL SELECT id, 2, 'unknown', 10 FROM r WHERE verdict = 'DIFFERENT')
		INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key) SELECT id, 1, 'missing', true, ARRAY['1'] FROM r WHERE verdict = 'DIFFERENT'`, id)
	got := gather(t, Proof{p.Store})
	const labels = "{from=school,site=maple,table=public.orders}"
	require.EqualValues(t, 1, got["reconcile_chunk_mismatch_total"+labels])
	require.EqualValues(t, 0.75, got["reconcile_coverage_ratio"+labels])
	require.EqualValues(t, 1, got["reconcile_open_keys"+labels])
	require.InDelta(t, 3600, got["proof_age_seconds"+labels], 600)

	testkit.Exec(t, p.C, `INSERT INTO backfill_control.cutover (direction, table_id, objective, mismatches) SELECT $1, id, 0.001, 7 FROM backfill_control.table_config`, id)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.shadow_count SELECT direction, table_id, x.at, x.match, 0, x.mismatch, x.unknown
		FROM backfill_control.cutover, (VALUES (now() - interval '1 h', 5, 5, 0), (now() + interval '1 s', 997, 2, 1)) x (at, match, mismatch, unknown)`)
	got = gather(t, Proof{p.Store})
	require.EqualValues(t, 7, got["migration_shadow_mismatch_total"+labels])
	require.NotContains(t, got, "proof_age_limit_seconds"+labels, "nobody has asked for one")
	table := p.Tables["public.orders"]
	require.NoError(t, p.Store.PutPolicy(t.Context(), "ann", p.Out, &table, control.PolicyChange{ProofAge: new(2 * time.Hour)}))
	require.EqualValues(t, 7200, gather(t, Proof{p.Store})["proof_age_limit_seconds"+labels])
	require.EqualValues(t, 0.001, got["shadow_read_objective"+labels])
	require.EqualValues(t, 1000, got["shadow_reads_judged"+labels], "what was read before the soak does not count")
	require.InDelta(t, 2.0/999, got["shadow_read_mismatch_rate"+labels], 1e-9)
	require.InDelta(t, 0.00774, got["shadow_read_mismatch_bound"+labels], 1e-4)

	// Old runs go; what they have found stays counted.
	testkit.Exec(t, p.C, `UPDATE backfill_control.reconciliation SET closed_at = now() - interval '2 d' WHERE verdict = 'DIFFERENT'`)
	testkit.Exec(t, p.C, `
		WITH r AS (INSERT INTO backfill_control.reconciliation (direction, table_id, mode, state, verdict, requested_by, closed_at)
		           SELECT $1, id, 'full', 'FINISHED', 'DIFFERENT', 'test', now() FROM backfill_control.table_config RETURNING id)
		INSERT INTO backfill_control.run_leaf (run_id, n, state, source_count) SELECT id, n, 'different', 1 FROM r, generate_series(1, 3) n`, id)
	require.EqualValues(t, 4, gather(t, Proof{p.Store})["reconcile_chunk_mismatch_total"+labels])
	for more := true; more; {
		var err error
		_, more, err = p.Store.Retain(t.Context(), control.Keep{Requests: 24 * time.Hour}, 1, func() error { return nil })
		require.NoError(t, err)
	}
	require.Equal(t, 2, testkit.Value[int](t, p.C, `SELECT count(*) FROM backfill_control.reconciliation`))
	require.EqualValues(t, 4, gather(t, Proof{p.Store})["reconcile_chunk_mismatch_total"+labels])

	// A table that is configured again begins anew, and is told once.
	_, err := p.Store.RemoveTable(t.Context(), "ann", testkit.Site, "public.orders")
	require.NoError(t, err)
	require.Empty(t, gather(t, Proof{p.Store}))
}
