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
//
// What a page costs however few rows it has, such as the ways to a far database, is
// told apart from what its rows cost: fewer rows would not save it. Where that is
// half of the target or more, the rows of a page may take as long again. On a machine
// that is busy in fits and starts nothing of few rows can be told apart, and pages would
// shrink to a row each for good: so of small rows a page has some however long it takes.
type PageSize struct {
	Target   time.Duration
	Min, Max int   // rows
	MaxBytes int64 // a page should not hold more, beyond one row

	rows  int
	pages []page  // the last ten
	bytes float64 // per row, of the last page
	line
}

type page struct {
	rows int
	took time.Duration
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
	p.add(float64(rows), d.Seconds())
	fixed := time.Duration(p.fixed * float64(time.Second))
	if d > 5*p.Target && d > 2*fixed {
		p.resize(p.rows / 10)
		p.pages = nil
		return
	}
	p.pages = append(p.pages, page{rows, d})
	p.pages = p.pages[max(0, len(p.pages)-10):]
	perRow := make([]time.Duration, len(p.pages))
	for i, page := range p.pages {
		perRow[i] = (page.took - fixed) / time.Duration(page.rows)
	}
	want := float64(max(p.Target-fixed, fixed)) / float64(max(percentile90(perRow), 1))
	// One row more at least: half of one is none, and the size would stay.
	p.resize(int(min(want, float64(p.rows+max(p.rows/2, 1)))))
}

// A page of fewer rows than leastRows, or of fewer bytes than leastBytes, is not made smaller.
const leastRows, leastBytes = 250, 256 << 10

func (p *PageSize) resize(rows int) {
	least := leastRows
	if p.bytes > 0 {
		least = int(min(leastRows, leastBytes/p.bytes))
	}
	p.rows = min(max(rows, min(least, p.rows+max(p.rows/2, 1)), p.Min), p.Max)
}

// line is the one through the pages' rows and seconds of late that makes the least
// sum of the squares of the relative errors, so that a page that was held up for
// once does not matter much. Its height at no rows is the fixed cost of a page.
type line struct {
	fixed float64 // seconds

	// Sums of weights, and of weighted rows, seconds and products. Older pages count less.
	w, wr, wrr, ws, wrs float64
}

func (l *line) add(rows, seconds float64) {
	const keep = 0.9
	w := 1 / max(seconds*seconds, 1e-12)
	l.w, l.wr, l.wrr, l.ws, l.wrs = keep*l.w+w, keep*l.wr+w*rows, keep*l.wrr+w*rows*rows, keep*l.ws+w*seconds, keep*l.wrs+w*rows*seconds
	det := l.w*l.wrr - l.wr*l.wr
	// Pages of much the same size tell nothing new.
	if det > 0.05*l.w*l.wrr {
		perRow := max((l.w*l.wrs-l.wr*l.ws)/det, 0)
		l.fixed = max((l.ws-perRow*l.wr)/l.w, 0)
	}
	l.fixed = min(l.fixed, seconds)
}

// Halve makes the next page half as large: a gate has closed, so the last ones
// were too much.
func (p *PageSize) Halve() {
	p.rows = max(p.Rows()/2, p.Min)
	p.pages = nil
}

func percentile90(times []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(times))
	return sorted[(len(sorted)*9+9)/10-1]
}
