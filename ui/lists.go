package ui

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

// pageSize is how many lines the lists of a site show at once.
const pageSize = 50

// chip is one choice of a filter.
type chip struct {
	Text, Href string
	Current    bool
	Count      int64
}

// field is one column's value; nil is NULL.
type field struct {
	Name  string
	Value *string
}

// entryPart is one change in the queue or in history.
type entryPart struct {
	api.Entry
	State  statePart
	Fields []field
	// What may be done with it from the Queue.
	SetAside, Stopped, Backfillable bool
}

var entryStates = map[string]statePart{
	"waiting":     {"Waiting", "clock", "quiet"},
	"stopped":     {"Stopped", "alert", "bad"},
	"held":        {"Held", "pause", "warn"},
	"quarantined": {"Quarantined", "alert", "bad"},
	"skipped":     {"Skipped", "slash", "quiet"},
	"applied":     {"Applied", "check", "good"},
	"lost":        {"Lost", "slash", "warn"},
}

func entryParts(list []api.Entry) []entryPart {
	out := make([]entryPart, len(list))
	for i, e := range list {
		x := entryPart{Entry: e, State: entryStates[e.Entry.State]}
		for j, name := range e.Columns {
			if j < len(e.Row) {
				x.Fields = append(x.Fields, field{name, e.Row[j]})
			}
		}
		x.SetAside = (e.Entry.State == "held" || e.Entry.State == "quarantined") && e.Wish == ""
		x.Stopped = e.Entry.State == "stopped"
		x.Backfillable = len(e.Key) > 0 && (e.Entry.State == "skipped" || e.Entry.State == "quarantined")
		out[i] = x
	}
	return out
}

// BackfillBody is what "Backfill this row" asks the API for.
func (e *entryPart) BackfillBody() map[string]any {
	return map[string]any{"table": e.Table, "from": e.From, "key": e.Key}
}

// Life is the address of what happened to the change's row.
func (e *entryPart) Life(site string) string { return lifePath(site, e.Table, e.Key) }

// Wished says what somebody asked the receiving agent to do with the change.
func (e *entryPart) Wished() string {
	if e.Wish == "" {
		return ""
	}
	return fmt.Sprintf("%s asked for by %s: the receiving agent does it on its next cycle", capitalise(e.Wish), e.WishedBy)
}

type queueData struct {
	Site                 string
	Chips                []chip
	Entries              []entryPart
	State                string
	More                 string
	NoDeciding, NoAsking string // why this account may not; "" when it may
}

var queueStates = []string{"", "waiting", "stopped", "held", "quarantined", "skipped"}

func (p *pages) queue(c echo.Context, a api.Account) (*view, error) {
	ctx, site := c.Request().Context(), c.Param("site")
	d := queueData{Site: site, State: c.QueryParam("state")}
	if d.State != "" && entryStates[d.State].Text == "" {
		return nil, redirect("/sites/" + site + "/queue")
	}
	list, err := p.service.Queue(ctx, control.EntryFilter{Site: site, State: d.State, After: position(c, "after"), Limit: pageSize + 1})
	if err != nil {
		return nil, err
	}
	aside, err := p.service.Aside(ctx, site)
	if err != nil {
		return nil, err
	}
	counts := map[string]int64{"held": aside.Held, "quarantined": aside.Quarantined, "skipped": aside.Skipped}
	for _, s := range queueStates {
		x := chip{"Open", "/sites/" + site + "/queue", s == d.State, counts[s]}
		if s != "" {
			x.Text = entryStates[s].Text
			x.Href += "?state=" + s
		}
		d.Chips = append(d.Chips, x)
	}
	if len(list) > pageSize {
		list = list[:pageSize]
		d.More = more(c, "after", list[pageSize-1].Seq)
	}
	d.Entries = entryParts(list)
	if !a.Role.Covers(control.Reviewer) {
		d.NoDeciding = capitalise(lacks(a, control.Reviewer, "retrying or skipping a change"))
	}
	if !a.Role.Covers(control.Requester) {
		d.NoAsking = lacks(a, control.Requester, "requesting a backfill")
	}
	return &view{template: "queue", Title: "Queue of " + site, Crumbs: siteCrumbs(site), Tabs: siteTabs(site, "queue", aside),
		Events: siteEvents(site), Refresh: 15, Data: d}, nil
}

type historyData struct {
	Site       string
	Tables     []string
	Table, Key string
	Origin     string
	Problem    string
	Entries    []entryPart
	More       string
	Filtered   bool
	Lost       bool
}

func (p *pages) history(c echo.Context, _ api.Account) (*view, error) {
	ctx, site := c.Request().Context(), c.Param("site")
	panels, err := p.service.Panels(ctx, site)
	if err != nil {
		return nil, err
	}
	d := historyData{Site: site, Table: c.QueryParam("table"), Key: c.QueryParam("key"), Origin: c.QueryParam("origin")}
	if d.Origin != "captured" && d.Origin != "backfill" {
		d.Origin = ""
	}
	d.Lost = c.QueryParam("state") == "lost"
	d.Filtered = d.Table != "" || d.Key != "" || d.Origin != "" || d.Lost
	var keyColumns []string
	for i := range panels {
		name := panels[i].Table.Name
		if n := len(d.Tables); n == 0 || d.Tables[n-1] != name {
			d.Tables = append(d.Tables, name)
		}
		if name == d.Table {
			keyColumns = panels[i].Source.Key
		}
	}
	f := control.EntryFilter{Site: site, Table: d.Table, Origin: d.Origin, Before: position(c, "before"), Limit: pageSize + 1}
	if d.Lost {
		f.State = "lost"
	}
	f.Key, d.Problem = typedKey(d.Key, keyColumns)
	var list []api.Entry
	if d.Problem == "" {
		if list, err = p.service.History(ctx, f); err != nil {
			return nil, err
		}
	}
	aside, err := p.service.Aside(ctx, site)
	if err != nil {
		return nil, err
	}
	if len(list) > pageSize {
		list = list[:pageSize]
		d.More = more(c, "before", list[pageSize-1].Seq)
	}
	d.Entries = entryParts(list)
	v := &view{template: "history", Title: "History of " + site, Crumbs: siteCrumbs(site), Tabs: siteTabs(site, "history", aside), Data: d}
	// The newest page moves; older ones stay as they are while they are read.
	if f.Before == 0 {
		v.Events = siteEvents(site)
	}
	return v, nil
}

// typedKey reads a key as a person types it: the value of a key of one column as
// it is, several separated by commas, or a JSON array when values hold commas.
func typedKey(s string, columns []string) (key backfill.Key, problem string) {
	if s == "" {
		return nil, ""
	}
	if strings.HasPrefix(s, "[") && json.Unmarshal([]byte(s), &key) == nil {
		return key, ""
	}
	if len(columns) <= 1 {
		return backfill.Key{s}, ""
	}
	for _, part := range strings.Split(s, ",") {
		key = append(key, strings.TrimSpace(part))
	}
	if len(key) != len(columns) {
		return nil, fmt.Sprintf("the key is (%s): give %d values separated by commas, or a JSON array of strings", strings.Join(columns, ", "), len(columns))
	}
	return key, ""
}

type auditData struct {
	Site     string
	Account  string
	Action   string
	Actions  []chip // Href is the value
	Request  string
	Filtered bool
	Entries  []auditPart
	More     string
}

// auditActions are the kinds of actions one may look for.
var auditActions = []chip{{Text: "Everything"}, {Text: "Backfills", Href: "backfill"}, {Text: "Requested", Href: "backfill.request"}, {Text: "Approved", Href: "backfill.approve"},
	{Text: "Rejected", Href: "backfill.reject"}, {Text: "Retried or skipped changes", Href: "queue"}, {Text: "Table configuration", Href: "table"}, {Text: "Site settings", Href: "site"}}

type auditPart struct {
	control.AuditEntry
	Request int64 // the request it is about, 0 for none
	Detail  []field
}

func (p *pages) audit(c echo.Context, _ api.Account) (*view, error) {
	ctx, site := c.Request().Context(), c.Param("site")
	before := position(c, "before")
	d := auditData{Site: site, Account: strings.TrimSpace(c.QueryParam("account")), Action: c.QueryParam("action"), Request: strings.TrimSpace(c.QueryParam("request"))}
	for _, x := range auditActions {
		x.Current = x.Href == d.Action
		d.Actions = append(d.Actions, x)
	}
	f := control.AuditFilter{Site: site, Account: d.Account, Action: d.Action, Before: before, Limit: pageSize + 1}
	if d.Request != "" {
		if f.Request, _ = strconv.ParseInt(strings.TrimPrefix(d.Request, "#"), 10, 64); f.Request == 0 {
			f.Request = -1 // no request is called that
		}
	}
	d.Filtered = d.Account != "" || d.Action != "" || d.Request != ""
	list, err := p.service.Audit(ctx, f)
	if err != nil {
		return nil, err
	}
	aside, err := p.service.Aside(ctx, site)
	if err != nil {
		return nil, err
	}
	if len(list) > pageSize {
		list = list[:pageSize]
		d.More = more(c, "before", list[pageSize-1].ID)
	}
	for _, e := range list {
		d.Entries = append(d.Entries, auditOf(e))
	}
	v := &view{template: "audit", Title: "Audit of " + site, Crumbs: siteCrumbs(site), Tabs: siteTabs(site, "audit", aside), Data: d}
	if before == 0 {
		v.Events = siteEvents(site)
	}
	return v, nil
}

// From is by what way and from where it was done.
func (a auditPart) From() string { return strings.TrimSpace(a.Via + " " + a.Address) }

// auditOf lists an entry's details in the order of their names.
func auditOf(e control.AuditEntry) auditPart {
	out := auditPart{AuditEntry: e}
	if rest, ok := strings.CutPrefix(e.Subject, "request "); ok {
		number, _, _ := strings.Cut(rest, " ")
		out.Request, _ = strconv.ParseInt(number, 10, 64) // 0 when it is none
	}
	for name, v := range e.Detail {
		if text := detailText(v); text != "" {
			out.Detail = append(out.Detail, field{name, &text})
		}
	}
	slices.SortFunc(out.Detail, func(a, b field) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// detailText writes a detail for people; what says nothing is "".
func detailText(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return v
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	case bool:
		if !v {
			return ""
		}
	case []any:
		var parts []string
		for _, x := range v {
			parts = append(parts, detailText(x))
		}
		return strings.Join(parts, ", ")
	case map[string]any:
		var parts []string
		for _, name := range slices.Sorted(maps.Keys(v)) {
			if v[name] != nil {
				parts = append(parts, fmt.Sprintf("%s: %s", name, cmp.Or(detailText(v[name]), "no")))
			}
		}
		return strings.Join(parts, "; ")
	}
	return fmt.Sprint(v)
}

// position is a number of the address's query, 0 when it is none.
func position(c echo.Context, name string) int64 {
	n, err := strconv.ParseInt(c.QueryParam(name), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// more is the present address with the list going on after a position.
func more(c echo.Context, name string, at int64) string {
	q := url.Values{}
	for k, v := range c.QueryParams() {
		q[k] = v
	}
	q.Set(name, strconv.FormatInt(at, 10))
	return c.Request().URL.Path + "?" + q.Encode()
}
