// Package pace decides how fast a walk may go.
package pace

import (
	"slices"
	"time"
)

// PageSize finds the number of rows that a page should have to take about Target.
// The law is the one of adaptive batch sizes in online schema changes: multiply by
// target over the 90th percentile of the last ten pages, at most 1.5 at a time, and
// fall to a tenth when a page takes five times too long.
type PageSize struct {
	Target   time.Duration
	Min, Max int   // rows
	MaxBytes int64 // a page should not hold more, beyond one row

	rows  int
	times []time.Duration // per row, newest last
	bytes float64         // per row, of the last page
}

// Rows is the size of the next page.
func (p *PageSize) Rows() int {
	if p.rows == 0 {
		p.rows = min(max(1000, p.Min), p.Max)
	}
	rows := p.rows
	if p.bytes > 0 {
		rows = int(min(float64(rows), float64(p.MaxBytes)/p.bytes))
	}
	return min(max(rows, p.Min), p.Max)
}

// Took records what a page of rows and bytes has taken.
func (p *PageSize) Took(rows int, bytes int64, d time.Duration) {
	if rows == 0 {
		return
	}
	p.bytes = float64(bytes) / float64(rows)
	p.times = append(p.times, d/time.Duration(rows))
	if len(p.times) > 10 {
		p.times = p.times[1:]
	}
	if d > 5*p.Target {
		p.rows = max(p.rows/10, p.Min)
		p.times = nil
		return
	}
	perRow := percentile90(p.times)
	want := int(float64(p.Target) / float64(max(perRow, 1)))
	// One row more at least: half of one is none, and the size would stay.
	p.rows = min(max(min(want, p.rows+max(p.rows/2, 1)), p.Min), p.Max)
}

// Halve makes the next page half as large: a gate has closed, so the last ones
// were too much.
func (p *PageSize) Halve() {
	p.rows = max(p.Rows()/2, p.Min)
	p.times = nil
}

func percentile90(times []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(times))
	return sorted[(len(sorted)*9)/10]
}
