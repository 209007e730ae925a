package ui

import (
	"fmt"
	"html/template"
	"math"
	"net/url"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

// clausePart is one clause of a cutover, as a line of the checklist.
type clausePart struct {
	backfill.Condition
	Title string
	Href  string // where to go on
}

// clauseTitles are what the clauses are called.
var clauseTitles = map[string]string{"backfill": "Backfilled", "capture": "Captured without a gap", "proof": "Proven equal", "quarantine": "Nothing set aside",
	"shadow": "Shadow reads under the objective", "lag": "Lag under its limit", "sequences": "Sequences ahead"}

type cutoverData struct {
	*backfill.Cutover
	Site    string
	Admin   bool
	ReadNew bool
	Clauses []clausePart
	Missing int64
	Shadow  *shadowChart
	Odd     []control.OddRead
	Figures []figure
}

// Path is the cutover's address in the API, and Query names the source side there.
func (d *cutoverData) Path() string {
	return "/api/v1/sites/" + d.Site + "/tables/" + url.PathEscape(d.Panel.Table.Name) + "/cutover"
}

func (d *cutoverData) Query() template.URL {
	return template.URL(url.Values{"from": {d.Panel.Direction.From}}.Encode())
}

// From is the part of a changed policy that the form does not ask for.
func (d *cutoverData) From() map[string]string {
	return map[string]string{"from": d.Panel.Direction.From}
}

// Values are what the form of the policy begins with, as the API takes them.
func (d *cutoverData) Values() map[string]any {
	p := d.Policy
	return map[string]any{"objective": p.Objective, "soak_seconds": p.Soak.Seconds(), "proof_age_seconds": p.ProofAge.Seconds(), "max_lag_seconds": p.MaxLag.Seconds(), "sample_per_minute": p.Sample}
}

// cutoverHref is the address of a table's cutover.
func cutoverHref(site, table, from string) string {
	return "/sites/" + site + "/cutover?" + url.Values{"table": {table}, "from": {from}}.Encode()
}

// cutover shows whether the reads of a table may move. A look at the page is not put
// on record.
func (p *pages) cutover(c echo.Context, a api.Account) (*view, error) {
	ctx, site := c.Request().Context(), c.Param("site")
	v, err := p.service.Shadow(ctx, site, c.QueryParam("table"), c.QueryParam("from"))
	if err != nil {
		return nil, err
	}
	table, n := v.Panel.Table.Name, v.Soak.ShadowCounts
	d := cutoverData{Cutover: v.Cutover, Site: site, Admin: a.Role.Covers(control.Admin), ReadNew: v.ReadNew(), Shadow: drawShadow(v), Odd: v.Odd}
	for _, k := range v.Clauses() {
		part := clausePart{Condition: k, Title: clauseTitles[k.Name]}
		switch {
		case k.Name == "backfill" && v.Backfill != nil:
			part.Href = fmt.Sprintf("/backfills/%d", v.Backfill.ID)
		case k.Name == "proof" && v.Proof != nil:
			part.Href = fmt.Sprintf("/reconciliations/%d", v.Proof.ID)
		case k.Name == "quarantine":
			part.Href = "/sites/" + site + "/proof"
			if v.Open == 0 {
				part.Href = "/sites/" + site + "/queue"
			}
		}
		if d.Clauses = append(d.Clauses, part); !k.OK {
			d.Missing++
		}
	}
	for _, f := range []figure{{Kind: "equal", Label: "Match", Value: n.Match}, {Kind: "counted", Label: "Stale", Value: n.Stale}, {Kind: "different", Label: "Mismatch", Value: n.Mismatch}, {Kind: "unknown", Label: "Unknown", Value: n.Unknown}} {
		f.Why = "reads"
		d.Figures = append(d.Figures, f)
	}
	aside, err := p.service.Aside(ctx, site)
	if err != nil {
		return nil, err
	}
	return &view{template: "cutover", Title: fmt.Sprintf("Cutover of %s", table), Data: &d, Tabs: siteTabs(site, "proof", aside), Events: siteEvents(site), Refresh: 5,
		Crumbs: append(siteCrumbs(site), crumb{"Proof", "/sites/" + site + "/proof"}, crumb{"Cutover of " + table, cutoverHref(site, table, v.Panel.Direction.From)})}, nil
}

// shadowChart is the mismatch rate over the soak, drawn on the server on a
// logarithmic scale, with the objective across it, and the same as a table.
type shadowChart struct {
	Dots         []shadowDot
	Line         string // path
	Goal         string // the height of the objective
	Top, Bottom  string // what the axis says
	Begin        time.Time
	Lines        []shadowLine
	Summary, Was string
}

type shadowDot struct{ X, Y, Tone, Tip string }

type shadowLine struct {
	At   time.Time
	N    backfill.ShadowCounts
	Rate string
}

// decades is how far below the objective the scale goes, and shownAbove how far
// above it at least, in powers of ten.
const decades, shownAbove = 2, 1

// drawShadow draws the points, or returns nil when there is nothing to see. A rate of
// nothing stands on the ground line.
func drawShadow(v *api.Shadow) *shadowChart {
	if len(v.Points) == 0 {
		return nil
	}
	goal := v.Policy.Objective
	top := shownAbove
	for _, p := range v.Points {
		for ; top < 12 && p.Rate() > goal*math.Pow10(top); top++ {
		}
	}
	begin := v.Now.Add(-v.Policy.Soak)
	x := func(t time.Time) float64 {
		return max(0, min(1, t.Sub(begin).Seconds()/v.Policy.Soak.Seconds())) * chartWidth
	}
	y := func(rate float64) float64 {
		if rate <= goal*math.Pow10(-decades) {
			return chartHeight
		}
		return chartHeight * (1 - (math.Log10(rate/goal)+decades)/float64(top+decades))
	}
	c := &shadowChart{Goal: fmt.Sprintf("%.1f", y(goal)), Top: rateText(min(goal*math.Pow10(top), 1)), Bottom: rateText(0), Begin: begin, Was: rateText(v.Soak.Rate())}
	var line strings.Builder
	for i, p := range v.Points {
		rate, tone := p.Rate(), "good"
		if rate > goal {
			tone = "bad"
		}
		at := p.At.Add(v.Step / 2)
		fmt.Fprintf(&line, "%c%.1f %.1f", "ML"[min(i, 1)], x(at), y(rate))
		c.Dots = append(c.Dots, shadowDot{fmt.Sprintf("%.1f", x(at)), fmt.Sprintf("%.1f", y(rate)), tone,
			fmt.Sprintf("%s: %s, %s mismatch", p.At.UTC().Format("2006-01-02 15:04 UTC"), plural(p.Match+p.Mismatch, "read"), num(p.Mismatch))})
		c.Lines = append(c.Lines, shadowLine{p.At, p.ShadowCounts, rateText(rate)})
	}
	c.Line = line.String()
	c.Summary = fmt.Sprintf("%s of %s mismatched", num(v.Soak.Mismatch), plural(v.Soak.Match+v.Soak.Mismatch, "read"))
	return c
}

// rateText writes a share as percent.
func rateText(rate float64) string { return fmt.Sprintf("%.3g %%", 100*rate) }
