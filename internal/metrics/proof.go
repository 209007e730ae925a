package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"backfill/internal/control"
)

// Proof collects what reconciliations have come to.
type Proof struct{ Store *control.Store }

var (
	mismatches = desc("reconcile_chunk_mismatch_total", "Leaves that reconciliations have found to differ.", "site", "table", "from")
	coverage   = desc("reconcile_coverage_ratio", "The share of the rows that the last reconciliation of the whole table has judged.", "site", "table", "from")
	openKeys   = desc("reconcile_open_keys", "Keys that differ, neither repaired nor waived.", "site", "table", "from")
	proofAge   = desc("proof_age_seconds", "Since the whole table was last found equal.", "site", "table", "from")
)

// Describe sends nothing, see Installation.
func (Proof) Describe(chan<- *prometheus.Desc) {}

// Collect reads the figures.
func (p Proof) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readWithin)
	defer cancel()
	all, err := p.Store.ProvenTables(ctx)
	if err != nil {
		return // backfill_figures_up tells
	}
	now := time.Now()
	for _, t := range all {
		labels := []string{t.Site, t.Table, t.From}
		out <- prometheus.MustNewConstMetric(mismatches, prometheus.CounterValue, float64(t.Mismatches), labels...)
		out <- prometheus.MustNewConstMetric(coverage, prometheus.GaugeValue, t.Coverage, labels...)
		out <- prometheus.MustNewConstMetric(openKeys, prometheus.GaugeValue, float64(t.Open), labels...)
		if t.CleanAt != nil {
			out <- prometheus.MustNewConstMetric(proofAge, prometheus.GaugeValue, max(now.Sub(*t.CleanAt).Seconds(), 0), labels...)
		}
	}
}
