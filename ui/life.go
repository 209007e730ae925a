package ui

import (
	"encoding/json"
	"net/url"
	"strings"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
)

// lifePath is the address of what happened to a row, "" for what has no key.
func lifePath(site, table string, key backfill.Key) string {
	if len(key) == 0 {
		return ""
	}
	b, err := json.Marshal(key)
	if err != nil {
		panic(err) // strings always marshal
	}
	return "/sites/" + site + "/row?" + url.Values{"table": {table}, "key": {string(b)}}.Encode()
}

type lifeData struct {
	Site       string
	Tables     []string
	Table, Key string
	Named      backfill.Key
	Problem    string
	Happenings []happening
}

type happening struct {
	api.Happening
	look   statePart
	Fields []field
}

// Look is how what happened is shown.
func (h happening) Look() statePart { return h.look }

var happenings = map[string]statePart{
	api.RowStaged:     {"Staged", "row", "quiet"},
	api.RowApproved:   {"Approved", "check", "good"},
	api.RowRejected:   {"Rejected", "slash", "warn"},
	api.RowSuperseded: {"Superseded", "forward", "quiet"},
	api.RowReleased:   {"Released", "forward", "info"},
	api.RowPushed:     {"Captured and pushed", "forward", "info"},
	api.RowDropped:    {"Dropped", "slash", "warn"},
	api.RowHeld:       {"Held", "pause", "warn"},
	api.RowQuarantine: {"Quarantined", "alert", "bad"},
	api.RowSkipped:    {"Skipped", "slash", "warn"},
	api.RowLost:       {"Lost", "slash", "warn"},
	api.RowApplied:    {"Applied", "check", "good"},
}

func (p *pages) life(c echo.Context, _ api.Account) (*view, error) {
	ctx, site := c.Request().Context(), c.Param("site")
	panels, err := p.service.Panels(ctx, site)
	if err != nil {
		return nil, err
	}
	aside, err := p.service.Aside(ctx, site)
	if err != nil {
		return nil, err
	}
	d := lifeData{Site: site, Table: c.QueryParam("table"), Key: c.QueryParam("key")}
	var columns []string
	for i := range panels {
		name := panels[i].Table.Name
		if n := len(d.Tables); n == 0 || d.Tables[n-1] != name {
			d.Tables = append(d.Tables, name)
		}
		if name == d.Table {
			columns = panels[i].Source.Key
		}
	}
	d.Named, d.Problem = typedKey(d.Key, columns)
	switch {
	case d.Problem != "" || d.Key == "":
	case d.Table == "":
		d.Problem = "choose a table: a key says nothing without one"
	default:
		all, err := p.service.Life(ctx, site, d.Table, d.Named)
		if err != nil {
			return nil, err
		}
		for _, h := range all {
			x := happening{Happening: h, look: happenings[h.What]}
			for i, name := range h.Columns {
				if i < len(h.Row) {
					x.Fields = append(x.Fields, field{name, h.Row[i]})
				}
			}
			d.Happenings = append(d.Happenings, x)
		}
	}
	if d.Named != nil {
		d.Key = strings.Join(d.Named, ", ")
	}
	return &view{template: "life", Title: "A row of " + site, Crumbs: append(siteCrumbs(site), crumb{"History", "/sites/" + site + "/history"}, crumb{"Row", c.Request().URL.RequestURI()}),
		Tabs: siteTabs(site, "history", aside), Events: siteEvents(site), Refresh: 15, Data: d}, nil
}
