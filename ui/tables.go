package ui

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

// statePart is a state in words with its shape and tone.
type statePart struct{ Text, Icon, Tone string }

// tableRow is one table and direction of Table Monitoring.
type tableRow struct {
	*backfill.Panel
	ID       string
	Diff     *int64 // rows of the source that the receiver's count lacks; nil when not counted
	Level    int    // the receiver's count in per cent of the source's
	Capture  statePart
	Outdated bool // a backfill has finished since the counts were taken
	Button   button
	RowsOpen []rowButton
	Open     bool
	Detail   *tableDetail
	Admin    bool
}

// Path is the table's address in the API.
func (r *tableRow) Path() string {
	return "/api/v1/sites/" + r.Table.Site + "/tables/" + url.PathEscape(r.Table.Name)
}

// MappingValues is what the form of the table's mapping begins with.
func (r *tableRow) MappingValues() map[string]string {
	m := r.Table.Mapping
	if m == nil {
		m = &backfill.Mapping{}
	}
	var lines []string
	for _, column := range slices.Sorted(maps.Keys(m.Columns)) {
		lines = append(lines, column+" = "+m.Columns[column])
	}
	var claims []string
	for _, name := range slices.Sorted(maps.Keys(m.Prove)) {
		claims = append(claims, name+": "+m.Prove[name].Source+" => "+m.Prove[name].Target)
	}
	return map[string]string{"mapping.prove": strings.Join(claims, "\n"), "mapping.source": m.Source, "mapping.target": m.Target, "mapping.columns": strings.Join(lines, "\n"),
		"mapping.drop": strings.Join(m.Drop, ", "), "mapping.key": strings.Join(m.Key, ", ")}
}

type tableDetail struct {
	Sides      []backfill.TableSide
	KeyTypes   []string // beside the key's columns, "" where unknown
	SameLayout bool
	Layout     []layoutColumn
	Last       []lastRequest
	Gates      []gatePart
}

type layoutColumn struct {
	Name, Type string
	Key        bool
}

// lastRequest is a line of a table's recent requests.
type lastRequest struct {
	*backfill.Request
	Button button
}

// lastRequests is how many of them an opened row shows.
const lastRequests = 5

type tablesData struct {
	sitePart
	SideNotices []notice // those of tables stand at the tables
	Rows        []tableRow
	Open        []string
	Admin       bool
	Gates       []gatePart
}

// Kinds lists what a gate can measure.
func (tablesData) Kinds() any { return kindWords }

// Both are the names of the two sides.
func (d tablesData) Both() (out []string) {
	for _, s := range d.Sides {
		out = append(out, s.Name)
	}
	return out
}

// Names lists the site's tables, each once.
func (d tablesData) Names() (out []string) {
	for _, r := range d.Rows {
		if !slices.Contains(out, r.Table.Name) {
			out = append(out, r.Table.Name)
		}
	}
	return out
}

func (p *pages) tables(c echo.Context, a api.Account) (*view, error) {
	ctx, name := c.Request().Context(), c.Param("site")
	site, err := p.service.Site(ctx, name)
	if err != nil {
		return nil, err
	}
	panels, err := p.service.Panels(ctx, name)
	if err != nil {
		return nil, err
	}
	gates, err := p.service.Gates(ctx, name)
	if err != nil {
		return nil, err
	}
	finished, err := p.service.Backfills(ctx, control.RequestFilter{Site: name, States: []string{string(backfill.Finished)}, Limit: len(panels)})
	if err != nil {
		return nil, err
	}
	d := tablesData{Admin: a.Role.Covers(control.Admin), sitePart: p.sitePart(site, panels), Gates: gateParts(name, gates), Open: opened(c.QueryParams()["open"])}
	d.SideNotices = append(engineNotices(site.Standing), p.sideNotices(d.Sides)...)
	for i := range panels {
		x := &panels[i]
		row := tableRow{Panel: x, ID: rowID(x), Diff: difference(x), Capture: captureOf(x), Button: panelButton(x, a), RowsOpen: rowButtons(x.OpenRows), Admin: d.Admin}
		row.Outdated = slices.ContainsFunc(finished, func(r *backfill.Request) bool { return outdates(r, x) })
		row.Open = slices.Contains(d.Open, row.ID)
		if row.Diff != nil {
			row.Level = level(*x.Receiver.Rows, *x.Source.Rows)
		}
		if row.Open {
			if row.Detail, err = p.detail(ctx, x); err != nil {
				return nil, err
			}
			row.Detail.Gates = gatesOf(d.Gates, x.Table.Name)
		}
		d.Rows = append(d.Rows, row)
	}
	return &view{
		template: "tables", Title: name, Crumbs: siteCrumbs(name), Tabs: siteTabs(name, "", site.Aside),
		Events: siteEvents(name), Refresh: 15, Data: d,
	}, nil
}

func (p *pages) detail(ctx context.Context, x *backfill.Panel) (*tableDetail, error) {
	d := &tableDetail{Sides: []backfill.TableSide{x.Source, x.Receiver}, SameLayout: x.Source.LayoutID == x.Receiver.LayoutID}
	for i := range x.Source.Key {
		typ := ""
		if i < len(x.Source.KeyTypes) {
			typ = x.Source.KeyTypes[i]
		}
		d.KeyTypes = append(d.KeyTypes, typ)
	}
	last, err := p.service.Backfills(ctx, control.RequestFilter{Site: x.Table.Site, Table: x.Table.Name, From: x.Direction.From, Limit: lastRequests})
	if err != nil {
		return nil, err
	}
	for _, r := range last {
		d.Last = append(d.Last, lastRequest{r, openButton(r)})
	}
	if x.Source.LayoutID == 0 {
		return d, nil
	}
	layout, err := p.service.Layout(ctx, x.Source.LayoutID)
	if err != nil {
		return nil, err
	}
	for _, c := range layout.Columns {
		d.Layout = append(d.Layout, layoutColumn{c.Name, c.Declared, slices.Contains(layout.Key, c.Name)})
	}
	return d, nil
}

// rowID names a table and direction within a site's page. It is a number, so that
// it can stand in addresses and ids whatever the table is called.
func rowID(x *backfill.Panel) string {
	return strconv.Itoa(int(x.Table.ID)) + "-" + x.Direction.From
}

// opened are the rows an address has open; one that stands twice was opened and
// closed again.
func opened(values []string) []string {
	var out []string
	for _, v := range values {
		if i := slices.Index(out, v); i >= 0 {
			out = slices.Delete(out, i, i+1)
		} else {
			out = append(out, v)
		}
	}
	return out
}

// difference is how many rows more the source has by its count, or nil.
func difference(x *backfill.Panel) *int64 {
	if x.Source.Rows == nil || x.Receiver.Rows == nil {
		return nil
	}
	d := *x.Source.Rows - *x.Receiver.Rows
	return &d
}

// outdates reports whether a finished request has changed what a panel counts.
func outdates(r *backfill.Request, x *backfill.Panel) bool {
	return r.Table == x.Table.Name && r.From == x.Direction.From && x.Receiver.CountedAt != nil && r.ClosedAt.After(*x.Receiver.CountedAt)
}

// level is part of whole in per cent; it is 100 only when nothing lacks.
func level(part, whole int64) int {
	if part >= whole {
		return 100
	}
	return int(min(part*100/whole, 99))
}

func captureOf(x *backfill.Panel) statePart {
	for _, c := range x.Conditions(true) {
		if c.Name != "capture" {
			continue
		}
		if !c.OK {
			return statePart{c.Message, "alert", "bad"}
		}
		if !x.Table.Active {
			break
		}
		return statePart{"Healthy", "check", "good"}
	}
	return statePart{"Off: the table is not active", "square", "quiet"}
}

func siteCrumbs(site string) []crumb { return []crumb{{"Sites", "/"}, {site, "/sites/" + site}} }

// siteTabs are the views of a site; a further one is a line here and a page.
func siteTabs(site, current string, aside control.Aside) []tab {
	base := "/sites/" + site
	tabs := []tab{{Text: "Tables", Href: base}, {Text: "Queue", Href: base + "/queue"}, {Text: "History", Href: base + "/history"}, {Text: "Proof", Href: base + "/proof"}, {Text: "Audit", Href: base + "/audit"}}
	for i := range tabs {
		tabs[i].Current = tabs[i].Href == strings.TrimSuffix(base+"/"+current, "/")
		if i == 1 && aside.Quarantined > 0 {
			tabs[i].Count = num(aside.Quarantined)
		}
	}
	return tabs
}

func lower(s string) string {
	first, n := utf8.DecodeRuneInString(s)
	if n == 0 {
		return ""
	}
	return string(unicode.ToLower(first)) + s[n:]
}

// Lacking says in words what the two counts tell.
func (r *tableRow) Lacking() string {
	switch {
	case r.Diff == nil:
		return "not counted on both sides"
	case *r.Diff > 0:
		return fmt.Sprintf("%s has fewer", r.Direction.To)
	case *r.Diff < 0:
		return fmt.Sprintf("%s has more", r.Direction.To)
	}
	return "counts agree"
}
