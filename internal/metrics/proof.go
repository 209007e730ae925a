package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"backfill/internal/control"
)

// Proof collects what reconciliations and shadow reads have come to.
type Proof struct{ Store *control.Store }

var (
	mismatches = desc("reconcile_chunk_mismatch_total", "Leaves that reconciliations have found to differ.", "site", "table", "from")
	coverage   = desc("reconcile_coverage_ratio", "The share of the rows that the last reconciliation of the whole table has judged.", "site", "table", "from")
	openKeys   = desc("reconcile_open_keys", "Keys that differ, neither repaired nor waived.", "site", "table", "from")
	proofAge   = desc("proof_age_seconds", "Since the whole table was last found equal.", "site", "table", "from")

	proofLimit = desc("proof_age_limit_seconds", "How old that may be, of tables for which somebody has set what a cutover needs.", "site", "table", "from")

	shadowRate      = desc("shadow_read_mismatch_rate", "The share of shadow reads of the soak so far that mismatch, of those that match or mismatch.", "site", "table", "from")
	shadowBound     = desc("shadow_read_mismatch_bound", "The highest rate that the reads of the soak leave possible, at 95 % confidence.", "site", "table", "from")
	shadowObjective = desc("shadow_read_objective", "What the rate has to stay under.", "site", "table", "from")
	shadowJudged    = desc("shadow_reads_judged", "Reads of the soak so far that match, mismatch or could not be judged.", "site", "table", "from")
	shadowMismatch  = desc("migration_shadow_mismatch_total", "Shadow reads that mismatched.", "site", "table", "from")
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
	soaks, err := p.Store.ShadowFigures(ctx)
	if err != nil {
		return
	}
	for _, f := range soaks {
		labels := []string{f.Site, f.Table, f.From}
		if f.ProofAge > 0 {
			out <- prometheus.MustNewConstMetric(proofLimit, prometheus.GaugeValue, f.ProofAge.Seconds(), labels...)
		}
		out <- prometheus.MustNewConstMetric(shadowMismatch, prometheus.CounterValue, float64(f.Mismatches), labels...)
		out <- prometheus.MustNewConstMetric(shadowObjective, prometheus.GaugeValue, f.Objective, labels...)
		out <- prometheus.MustNewConstMetric(shadowJudged, prometheus.GaugeValue, float64(f.Known), labels...)
		out <- prometheus.MustNewConstMetric(shadowRate, prometheus.GaugeValue, f.Rate, labels...)
		out <- prometheus.MustNewConstMetric(shadowBound, prometheus.GaugeValue, f.Bound, labels...)
	}
}
