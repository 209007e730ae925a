package ui

import (
	"fmt"
	"strings"
	"time"
)

// point is how far a walk or a release had come at a moment.
type point struct {
	At        time.Time
	Rows      int64
	Throttled float64 // seconds that gates had taken so far
}

// chart is the course of a walk or a release: rows over time, with the times in
// which a gate held it back, drawn on the server, and the same as a table.
type chart struct {
	ID, Title, Summary string
	Line, Area         string // paths
	Bands              []band
	Top, Begin, End    string // what the axes say
	Lines              []chartLine
}

// band is a stretch of time in which gates held it back.
type band struct{ X, Width string }

type chartLine struct {
	At        *time.Time
	Rows      int64
	Rate      string
	Throttled string
}

const (
	chartWidth  = 600.0
	chartHeight = 110.0
	chartLines  = 12 // of the table
	// shortest is how long a course must be for a picture to say more than its figures.
	shortest = 10 * time.Second
)

// drawChart draws points, oldest first, or returns nil when there is nothing to see.
func drawChart(id, title string, points []point) *chart {
	if len(points) < 2 {
		return nil
	}
	first, last := points[0], points[len(points)-1]
	if last.At.Sub(first.At) < shortest || last.Rows <= 0 {
		return nil
	}
	span := last.At.Sub(first.At).Seconds()
	x := func(p point) float64 { return p.At.Sub(first.At).Seconds() / span * chartWidth }
	y := func(p point) float64 { return chartHeight - float64(p.Rows)/float64(last.Rows)*chartHeight }
	c := &chart{ID: id, Title: title, Top: num(last.Rows) + " rows", End: spell(last.At.Sub(first.At))}
	var line strings.Builder
	for i, p := range points {
		fmt.Fprintf(&line, "%c%.1f %.1f", "ML"[min(i, 1)], x(p), y(p))
		if i == 0 {
			continue
		}
		before := points[i-1]
		held, took := p.Throttled-before.Throttled, p.At.Sub(before.At).Seconds()
		if held <= 0 || took <= 0 {
			continue
		}
		// Where in the stretch it was held is not known: the band is as wide as the time was long.
		width := min(held/took, 1) * (x(p) - x(before))
		c.Bands = append(c.Bands, band{fmt.Sprintf("%.1f", x(p)-width), fmt.Sprintf("%.1f", max(width, 1))})
	}
	c.Line = line.String()
	c.Area = fmt.Sprintf("%sL%.1f %.1fL0 %.1fZ", c.Line, chartWidth, chartHeight, chartHeight)
	held := time.Duration((last.Throttled - first.Throttled) * float64(time.Second))
	c.Summary = fmt.Sprintf("%s in %s", plural(last.Rows-first.Rows, "row"), spell(last.At.Sub(first.At)))
	if held >= time.Second {
		c.Summary += ", of which gates held it back for " + spell(held)
	}
	step := max(1, (len(points)+chartLines-2)/(chartLines-1))
	before := first
	for i := 0; i < len(points); i++ {
		if i%step != 0 && i != len(points)-1 {
			continue
		}
		p := points[i]
		l := chartLine{At: &p.At, Rows: p.Rows, Rate: "–", Throttled: "–"}
		if took := p.At.Sub(before.At).Seconds(); took > 0 {
			l.Rate = num(int64(float64(p.Rows-before.Rows)/took)) + "/s"
		}
		if held := p.Throttled - before.Throttled; held >= 0.5 {
			l.Throttled = spell(time.Duration(held * float64(time.Second)))
		}
		c.Lines = append(c.Lines, l)
		before = p
	}
	return c
}
