package ui

import (
	"fmt"
	"strconv"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

var verdictLooks = map[string]look{
	"EQUAL":     {"Equal", "check", "good"},
	"DIFFERENT": {"Different", "alert", "bad"},
	"UNKNOWN":   {"Unknown", "gap", "warn"},
}

// lookOf is how a run is shown: by its verdict once it has one, unless it failed.
func lookOf(r *backfill.Reconciliation) look {
	switch r.State {
	case backfill.RunPending:
		return look{"Pending", "dashed", "quiet"}
	case backfill.RunRunning:
		return look{fmt.Sprintf("Running %d %%", r.Percent()), "half", "info"}
	case backfill.RunFailed:
		return look{"Failed", "alert", "bad"}
	case backfill.RunCancelled:
		return look{"Cancelled", "square", "quiet"}
	}
	return verdictLooks[r.Verdict]
}

// runPart is one line of the list of reconciliations.
type runPart struct {
	*backfill.Reconciliation
	look
	Coverage string
}

func runPartOf(r *backfill.Reconciliation) runPart {
	return runPart{r, lookOf(r), fmt.Sprintf("%.4g %%", 100*control.TallyOf(r).Coverage())}
}

// proofTable is a table and direction that may be reconciled.
type proofTable struct {
	backfill.Panel
	Last *runPart // the last finished run of the whole table
	Open *runPart
}

type proofData struct {
	Site     string
	Tables   []proofTable
	Runs     []runPart
	More     string
	NoAsking string
}

// Body is what "Reconcile" asks the API for.
func (t *proofTable) Body() map[string]any {
	return map[string]any{"table": t.Table.Name, "from": t.Direction.From}
}

// Cutover is the address of the page that says whether the table's reads may move.
func (t *proofTable) Cutover() string {
	return cutoverHref(t.Table.Site, t.Table.Name, t.Direction.From)
}

func (p *pages) proof(c echo.Context, a api.Account) (*view, error) {
	ctx, site := c.Request().Context(), c.Param("site")
	panels, err := p.service.Panels(ctx, site)
	if err != nil {
		return nil, err
	}
	d := proofData{Site: site}
	open, err := p.service.Reconciliations(ctx, control.RunFilter{Site: site, Open: true, Limit: 1000})
	if err != nil {
		return nil, err
	}
	for _, panel := range panels {
		t := proofTable{Panel: panel}
		for _, r := range open {
			if r.TableID == panel.Table.ID && r.Direction.ID == panel.Direction.ID {
				part := runPartOf(r)
				t.Open = &part
			}
		}
		if panel.Proof != nil {
			r, err := p.service.Reconciliation(ctx, panel.Proof.ID)
			if err != nil {
				return nil, err
			}
			part := runPartOf(r)
			t.Last = &part
		}
		d.Tables = append(d.Tables, t)
	}
	runs, err := p.service.Reconciliations(ctx, control.RunFilter{Site: site, Before: position(c, "before"), Limit: pageSize + 1})
	if err != nil {
		return nil, err
	}
	if len(runs) > pageSize {
		runs = runs[:pageSize]
		d.More = more(c, "before", runs[pageSize-1].ID)
	}
	for _, r := range runs {
		d.Runs = append(d.Runs, runPartOf(r))
	}
	if !a.Role.Covers(control.Requester) {
		d.NoAsking = capitalise(lacks(a, control.Requester, "reconciling"))
	}
	aside, err := p.service.Aside(ctx, site)
	if err != nil {
		return nil, err
	}
	return &view{template: "proof", Title: "Proof of " + site, Crumbs: siteCrumbs(site), Tabs: siteTabs(site, "proof", aside),
		Events: siteEvents(site), Refresh: 5, Data: &d}, nil
}

// cell is one square of the map of leaves.
type cell struct {
	X, Y         int
	Kind, Tip    string
	Width        int
	First, Final int64
}

// differenceRow is a differing key with both values of the columns that differ.
type differenceRow struct {
	control.Difference
	State   statePart
	Columns []bothValues
	Whole   []field // of a key that only one side has
}

type bothValues struct {
	Name             string
	Source, Receiver *string
}

type reconciliationData struct {
	runPart
	Cells                  []cell
	MapWidth, MapHeight    int
	PerCell                int64
	Figures                []figure
	Keys                   []differenceRow
	Chips                  []chip
	Filter                 string
	More                   string
	Missed                 string
	Console                string
	Cancel, Repair, Settle bool
	Repairable             int64
	Refused                string
}

const (
	mapColumns = 80
	mapCells   = 2400
	mapStep    = 14
)

var differenceStates = map[string]statePart{
	"open":     {"Open", "alert", "bad"},
	"repaired": {"Repaired", "check", "good"},
	"waived":   {"Waived", "slash", "quiet"},
	"unknown":  {"Never at rest", "gap", "warn"},
}

func (p *pages) reconciliation(c echo.Context, a api.Account) (*view, error) {
	ctx := c.Request().Context()
	id, err := strconv.ParseInt(c.Param("id"), 10, 64)
	if err != nil {
		return nil, backfill.Errorf(backfill.NotFound, "no reconciliation %q", c.Param("id"))
	}
	r, err := p.service.Reconciliation(ctx, id)
	if err != nil {
		return nil, err
	}
	d := reconciliationData{runPart: runPartOf(r), Filter: c.QueryParam("kind"), Console: p.service.RunConsole(r)}
	if m := api.Missed(r); m > 0 {
		d.Missed = fmt.Sprintf("%.3g %%", 100*m)
	}
	cells, per, err := p.service.LeafMap(ctx, r, mapCells)
	if err != nil {
		return nil, err
	}
	d.draw(cells, per)
	n := r.Counts
	for _, f := range []figure{{Kind: "equal", Label: "Equal", Value: n.Equal}, {Kind: "different", Label: "Different", Value: n.Different}, {Kind: "unknown", Label: "Unknown", Value: n.Unknown},
		{Kind: "counted", Label: "Counted only", Value: n.Counted}, {Kind: "pending", Label: "To come", Value: n.Pending}} {
		f.Why = "leaves"
		d.Figures = append(d.Figures, f)
	}
	if err := d.list(c, p); err != nil {
		return nil, err
	}
	d.allowed(a)
	v := &view{template: "reconciliation", Title: fmt.Sprintf("%s: %s", r.Table, lower(d.Word)), Data: &d,
		Crumbs: append(siteCrumbs(r.Site), crumb{"Proof", "/sites/" + r.Site + "/proof"}, crumb{fmt.Sprintf("Reconciliation %d", r.ID), fmt.Sprintf("/reconciliations/%d", r.ID)})}
	if r.State.Open() {
		v.Events, v.Refresh = siteEvents(r.Site), 5
	}
	return v, nil
}

// draw lays the leaves out in lines.
func (d *reconciliationData) draw(cells []control.MapCell, per int64) {
	d.PerCell, d.MapWidth = per, mapColumns*mapStep
	for i, m := range cells {
		x := cell{X: i % mapColumns * mapStep, Y: i / mapColumns * mapStep, Width: mapStep - 2, Kind: m.State, First: m.First, Final: m.Last}
		name := fmt.Sprintf("leaf %d", m.First)
		if m.Last > m.First {
			name = fmt.Sprintf("leaves %d to %d", m.First, m.Last)
		}
		x.Tip = fmt.Sprintf("%s: %s, %s", name, m.State, plural(m.Rows, "row"))
		d.Cells, d.MapHeight = append(d.Cells, x), x.Y+mapStep
	}
}

var differenceKinds = []struct{ kind, text string }{{"", "All"}, {"missing", "Missing"}, {"different", "Different"}, {"surplus", "Surplus"}}

// list reads the keys that differ.
func (d *reconciliationData) list(c echo.Context, p *pages) error {
	path := fmt.Sprintf("/reconciliations/%d", d.ID)
	for _, k := range differenceKinds {
		x := chip{Text: k.text, Href: path, Current: k.kind == d.Filter}
		if k.kind != "" {
			x.Href += "?kind=" + k.kind
		}
		d.Chips = append(d.Chips, x)
	}
	found, err := p.service.Differences(c.Request().Context(), d.ID, control.DifferenceFilter{Kind: d.Filter, After: position(c, "after"), Limit: pageSize + 1})
	if err != nil {
		return err
	}
	if len(found.Keys) > pageSize {
		found.Keys = found.Keys[:pageSize]
		d.More = more(c, "after", found.Keys[pageSize-1].N)
	}
	for _, k := range found.Keys {
		row := differenceRow{Difference: k, State: differenceStates[k.State]}
		for i, name := range found.Columns {
			switch {
			case k.Source != nil && k.Receiver != nil:
				a, b := k.Source[i], k.Receiver[i]
				if (a == nil) != (b == nil) || a != nil && *a != *b {
					row.Columns = append(row.Columns, bothValues{name, a, b})
				}
			case k.Source != nil:
				row.Whole = append(row.Whole, field{name, k.Source[i]})
			case k.Receiver != nil:
				row.Whole = append(row.Whole, field{name, k.Receiver[i]})
			}
		}
		d.Keys = append(d.Keys, row)
	}
	return nil
}

// Fields is the whole row of a key that only one side has.
func (r *differenceRow) Fields() []field { return r.Whole }

// allowed says what the state and the account allow.
func (d *reconciliationData) allowed(a api.Account) {
	d.Cancel = d.Reconciliation.State.Open() && a.Role.Covers(control.Requester)
	if d.Reconciliation.State != backfill.RunFinished || d.Parent != 0 || d.Counts.Open == 0 {
		return
	}
	if !a.Role.Covers(control.Reviewer) {
		d.Refused = capitalise(lacks(a, control.Reviewer, "repairing or waiving"))
		return
	}
	d.Settle = true
	d.Repair = d.Counts.Missing+d.Counts.DifferentValues > 0
}
