// Package metrics shows Backfill's figures to Prometheus: those of the whole
// installation, read from the control database when they are asked for, and those of
// one process. No label can take values without bound, and none holds row data.
package metrics

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"backfill/internal/control"
	"backfill/internal/pace"
)

// Registry makes a registry with the figures of the process itself.
func Registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Handler serves a registry at /metrics. What one collector cannot tell does not keep
// the others from it.
func Handler(r *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	return mux
}

// readWithin is how long the figures may take: Prometheus gives up after ten seconds.
const readWithin = 8 * time.Second

// Installation collects the figures of the whole installation. One process should
// show them; where several do, take the maximum rather than the sum.
type Installation struct {
	Store *control.Store
	// Temporal fails while the workflow engine is away. Default: not asked.
	Temporal func(context.Context) error
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	up         = desc("backfill_figures_up", "1 when the control database could be read for the figures.")
	temporalUp = desc("backfill_temporal_up", "1 when Temporal answers.")
	controlAge = desc("backfill_control_worker_seen_seconds", "Since a control worker was last seen.")
	agentAge   = desc("backfill_agent_seen_seconds", "Since the agent of a side was last seen.", "site", "side")
	agentWell  = desc("backfill_agent_ok", "0 when the agent of a side cannot work.", "site", "side")
	disputes   = desc("backfill_sweep_disagreements_total", "Requests and workflows that disagreed and were brought together.")

	rate      = desc("backfill_rows_per_second", "Rows per second of the present walk or release, throttled time included.", "site", "table", "from")
	percent   = desc("backfill_percent_complete", "How far the present walk or release is.", "site", "table", "from")
	resumeKey = desc("backfill_resume_key_info", "Where the resume key stands among the keys, from 0 to 1.", "site", "table", "from")
	state     = desc("backfill_request_state", "1 for the state of the open request.", "site", "table", "from", "state")
	review    = desc("awaiting_review_seconds", "For how long staged rows have waited for a person.", "site", "table", "from")
	staged    = desc("backfill_rows_staged_total", "Rows staged by all requests.", "site", "table", "from")
	released  = desc("backfill_rows_released_total", "Rows released by all requests.", "site", "table", "from")
	throttled = desc("backfill_throttled_seconds_total", "Time that gates have held requests back, by kind of gate.", "site", "table", "from", "reason")

	depth     = desc("queue_depth", "Changes not yet acknowledged, those in the outbox included.", "site", "from")
	outbox    = desc("outbox_depth", "Changes captured and not yet pushed, as the agent last told.", "site", "from")
	oldest    = desc("queue_oldest_seconds", "For how long the oldest of them has waited, 0 without any.", "site", "from")
	aside     = desc("quarantined", "Changes that the receiver has refused.", "site", "from")
	held      = desc("held", "Changes that wait for a row they refer to.", "site", "from")
	captureOK = desc("backfill_capture_ok", "0 when capture of an active table is not healthy.", "site", "table", "side")
	dropped   = desc("backfill_changes_dropped_total", "Changes captured and not sent, because their operation or table is off.", "site", "table", "side")

	gateOpen   = desc("backfill_gate_open", "1 while a gate is open.", "site", "side", "gate", "kind")
	gateValue  = desc("backfill_gate_value", "What was last measured for a gate.", "site", "side", "gate", "kind")
	replicaLag = desc("replica_lag_seconds", "Lag of the slowest replica of a side, where a gate measures it.", "site", "side")
)

// Describe sends nothing: what there is depends on what is configured.
func (Installation) Describe(chan<- *prometheus.Desc) {}

// Collect reads the figures.
func (i Installation) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readWithin)
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	if i.Temporal != nil {
		gauge(temporalUp, truth(i.Temporal(ctx) == nil))
	}
	f, err := i.Store.Figures(ctx)
	gauge(up, truth(err == nil))
	if err != nil {
		return
	}
	since := func(t *time.Time) float64 { return max(f.Now.Sub(*t).Seconds(), 0) }
	if f.Control != nil {
		gauge(controlAge, since(f.Control))
	}
	count(disputes, float64(f.Disputes))
	for _, s := range f.Sides {
		if s.SeenAt != nil {
			gauge(agentAge, since(s.SeenAt), s.Site, s.Side)
		}
		gauge(agentWell, truth(!s.Problem), s.Site, s.Side)
	}
	for _, r := range f.Open {
		gauge(rate, r.Rate(f.Now), r.Site, r.Table, r.From)
		gauge(percent, float64(r.Percent()), r.Site, r.Table, r.From)
		gauge(state, 1, r.Site, r.Table, r.From, string(r.State))
		if r.Position != nil {
			gauge(resumeKey, *r.Position, r.Site, r.Table, r.From)
		}
		if r.WalkedAt != nil && r.ReviewedAt == nil {
			gauge(review, since(r.WalkedAt), r.Site, r.Table, r.From)
		}
	}
	for _, t := range f.Totals {
		switch kind, isThrottled := strings.CutPrefix(t.What, "throttled "); {
		case isThrottled:
			count(throttled, t.Value, t.Site, t.Table, t.From, kind)
		case t.What == "staged":
			count(staged, t.Value, t.Site, t.Table, t.From)
		case t.What == "released":
			count(released, t.Value, t.Site, t.Table, t.From)
		}
	}
	for _, l := range f.Lag {
		gauge(depth, float64(l.Waiting), l.Site, l.From)
		gauge(outbox, float64(l.Outbox), l.Site, l.From)
		age := 0.0
		if l.Oldest != nil {
			age = since(l.Oldest)
		}
		gauge(oldest, age, l.Site, l.From)
	}
	for _, a := range f.Aside {
		gauge(map[string]*prometheus.Desc{"held": held, "quarantined": aside}[a.State], float64(a.Count), a.Site, a.From)
	}
	for _, c := range f.Capture {
		gauge(captureOK, truth(c.OK), c.Site, c.Table, c.Side)
		count(dropped, float64(c.Dropped), c.Site, c.Table, c.Side)
	}
	lags := map[[2]string]float64{}
	for _, g := range f.Gates {
		_, v := g.State()
		gauge(gateOpen, truth(v.Open), g.Site, g.Side, g.Name, string(g.Kind))
		if g.Reading == nil || g.Reading.Problem != "" {
			continue
		}
		gauge(gateValue, g.Reading.Value, g.Site, g.Side, g.Name, string(g.Kind))
		if at := [2]string{g.Site, g.Side}; g.Kind == pace.ReplicaLag {
			lags[at] = max(lags[at], g.Reading.Value)
		}
	}
	for at, lag := range lags {
		gauge(replicaLag, lag, at[0], at[1])
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Pools collects how the connections of pools are used, by their names.
type Pools map[string]func() *pgxpool.Stat

var (
	poolConns    = desc("pgx_pool_connections", "Connections of a pool by what they do.", "pool", "state")
	poolMax      = desc("pgx_pool_max_connections", "The most connections a pool may have.", "pool")
	poolAcquired = desc("pgx_pool_acquires_total", "Connections taken from a pool.", "pool")
	poolWaits    = desc("pgx_pool_empty_acquires_total", "Of them those that had to wait for a connection.", "pool")
	poolWaited   = desc("pgx_pool_empty_acquire_seconds_total", "How long they waited.", "pool")
	poolCanceled = desc("pgx_pool_canceled_acquires_total", "Those that gave up waiting.", "pool")
)

// Describe sends nothing, see Installation.
func (Pools) Describe(chan<- *prometheus.Desc) {}

// Collect reads the pools' counters.
func (p Pools) Collect(out chan<- prometheus.Metric) {
	for name, stat := range p {
		s := stat()
		for state, n := range map[string]int32{"acquired": s.AcquiredConns(), "idle": s.IdleConns(), "constructing": s.ConstructingConns()} {
			out <- prometheus.MustNewConstMetric(poolConns, prometheus.GaugeValue, float64(n), name, state)
		}
		out <- prometheus.MustNewConstMetric(poolMax, prometheus.GaugeValue, float64(s.MaxConns()), name)
		for d, v := range map[*prometheus.Desc]float64{poolAcquired: float64(s.AcquireCount()), poolWaits: float64(s.EmptyAcquireCount()),
			poolWaited: s.EmptyAcquireWaitTime().Seconds(), poolCanceled: float64(s.CanceledAcquireCount())} {
			out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, name)
		}
	}
}

// Applied collects the rows that an agent's process has applied.
type Applied struct {
	Site, Side string
	Rows       func() int64
}

var applied = desc("apply_rows_total", "Rows written by the agent of a side for the other's changes, since its process began.", "site", "side")

// Describe sends the one figure there is.
func (Applied) Describe(out chan<- *prometheus.Desc) {}

// Collect reads the counter.
func (a Applied) Collect(out chan<- prometheus.Metric) {
	out <- prometheus.MustNewConstMetric(applied, prometheus.CounterValue, float64(a.Rows()), a.Site, a.Side)
}
