package ui

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

// sidePart is one side of a site.
type sidePart struct {
	control.Side
	Site string
	Away bool // its agent has been silent for too long, or was never seen
}

// lagPart is what waits in one direction.
type lagPart struct {
	control.Lag
	Captured bool // some table is captured this way; the other direction is quiet by nature
	Old      bool // the source's agent is silent: what it last told may have changed
}

// notice is something that wants attention.
type notice struct {
	rank       int // the lower the sooner
	Tone, Icon string
	Text, More string
	Since      *time.Time // goes on where Text ends
	Href, Go   string
}

type sitePart struct {
	Name    string
	Sides   []sidePart
	Lag     []lagPart
	Notices []notice
	// The tables summed up.
	Tables, Behind, Equal, Ahead, Uncounted, Inactive int
	Missing                                           int64 // rows that receivers have fewer than their sources
	SecondPerson, OneDatabase                         bool
}

func (p *pages) sites(c echo.Context, a api.Account) (*view, error) {
	ctx := c.Request().Context()
	all, err := p.service.Sites(ctx, a)
	if err != nil {
		return nil, err
	}
	parts := make([]sitePart, 0, len(all))
	v := &view{template: "sites", Title: "Sites", Crumbs: []crumb{{"Sites", "/"}}, Events: api.Topics{All: true}, Refresh: 15}
	for i := range all {
		panels, err := p.service.Panels(ctx, all[i].Name)
		if err != nil {
			return nil, err
		}
		parts = append(parts, p.sitePart(&all[i], panels))
	}
	// What needs somebody comes first; otherwise the order of names stays.
	slices.SortStableFunc(parts, func(a, b sitePart) int { return a.urgency() - b.urgency() })
	d := sitesData{Sites: parts}
	if len(all) > 0 {
		d.Engine = engineNotices(all[0].Standing) // the same for all
	}
	v.Data = d
	return v, nil
}

type sitesData struct {
	Engine []notice
	Sites  []sitePart
}

func siteEvents(site string) api.Topics { return api.Topics{Sites: []string{site}} }

// engineNotices says when nothing can be decided, or nobody does the deciding. Of
// agents the sides tell.
func engineNotices(standing []api.Standstill) (out []notice) {
	for _, x := range standing {
		if x.What != "agent" {
			what, more, _ := strings.Cut(x.Message, ": ")
			out = append(out, notice{Tone: "bad", Icon: "plug", Text: capitalise(what), More: capitalise(more)})
		}
	}
	return out
}

func (s *sitePart) urgency() int {
	if len(s.Notices) == 0 {
		return 100
	}
	return s.Notices[0].rank
}

func (p *pages) sitePart(s *api.Site, panels []backfill.Panel) sitePart {
	out := sitePart{Name: s.Name, SecondPerson: s.SecondPerson, OneDatabase: s.OneDatabase, Sides: p.sideParts(s), Tables: len(panels)}
	from := map[string]int{}
	for i := range panels {
		x := &panels[i]
		if x.Table.Active {
			from[x.Direction.From]++
		}
		switch d := difference(x); {
		case !x.Table.Active:
			out.Inactive++
		case d == nil:
			out.Uncounted++
		case *d > 0:
			out.Behind++
			out.Missing += *d
		case *d == 0:
			out.Equal++
		default:
			out.Ahead++
		}
	}
	for _, l := range s.Lag {
		old := slices.ContainsFunc(out.Sides, func(x sidePart) bool { return x.Name == l.From && x.Away })
		out.Lag = append(out.Lag, lagPart{l, from[l.From] > 0, old})
	}
	// The side that most is captured from stands on the left: rows flow as one reads.
	slices.SortStableFunc(out.Sides, func(a, b sidePart) int { return from[b.Name] - from[a.Name] })
	slices.SortStableFunc(out.Lag, func(a, b lagPart) int { return from[b.From] - from[a.From] })
	out.Notices = append(p.sideNotices(out.Sides), tableNotices(panels)...)
	if n := s.Aside.Quarantined; n > 0 {
		out.Notices = append(out.Notices, notice{rank: 3, Tone: "warn", Icon: "alert", Text: plural(n, "change") + " quarantined",
			More: "The receiver refused " + map[bool]string{true: "it", false: "them"}[n == 1] + ": see why, then retry, or skip and backfill the row.",
			Href: "/sites/" + s.Name + "/queue?state=quarantined", Go: "Queue"})
	}
	if n := s.Aside.Held; n > 0 {
		out.Notices = append(out.Notices, notice{rank: 7, Tone: "quiet", Icon: "pause", Text: plural(n, "change") + " held",
			More: "Each waits for a row it depends on, and is tried again after other changes.", Href: "/sites/" + s.Name + "/queue?state=held", Go: "Queue"})
	}
	out.Notices = append(out.Notices, gaps(panels)...)
	slices.SortStableFunc(out.Notices, func(a, b notice) int { return a.rank - b.rank })
	return out
}

func (p *pages) sideParts(s *api.Site) []sidePart {
	out := make([]sidePart, len(s.Sides))
	for i, side := range s.Sides {
		out[i] = sidePart{side, s.Name, side.SeenAt == nil || p.Now().Sub(*side.SeenAt) > p.AgentAway}
	}
	return out
}

// sideNotices says which agents are away or kept from working.
func (p *pages) sideNotices(sides []sidePart) []notice {
	var out []notice
	for _, s := range sides {
		name := s.Site + "/" + s.Name
		switch {
		case s.SeenAt == nil:
			out = append(out, notice{rank: 0, Tone: "bad", Icon: "plug", Text: "No agent for " + name + " yet",
				More: "Start one beside that database: backfill worker --agent " + name + " --database DSN"})
		case s.Away:
			out = append(out, notice{rank: 0, Tone: "bad", Icon: "plug",
				Text: fmt.Sprintf("No agent for %s since", name), Since: s.SeenAt,
				More: fmt.Sprintf("Silent for %s. Nothing is pushed from or applied to %s until it is back; nothing is lost.", spell(p.Now().Sub(*s.SeenAt).Truncate(time.Second)), s.Name)})
		}
		if s.Problem != "" {
			out = append(out, notice{rank: 1, Tone: "bad", Icon: "alert", Text: "The agent of " + name + " cannot work", More: s.Problem})
		}
	}
	return out
}

// tableNotices says which tables want attention, and lists what is open.
func tableNotices(panels []backfill.Panel) []notice {
	var out []notice
	for i := range panels {
		x := &panels[i]
		table := "/sites/" + x.Direction.Site + "?open=" + rowID(x) + "#" + rowID(x)
		if c := captureOf(x); c.Tone == "bad" && x.Table.Active {
			out = append(out, notice{rank: 2, Tone: "bad", Icon: "alert", Text: "Capture of " + x.Table.Name + " is not healthy", More: capitalise(c.Text), Href: table, Go: "Table"})
		}
		if x.Stopped != "" {
			out = append(out, notice{rank: 1, Tone: "bad", Icon: "alert", Text: "Changes of " + x.Table.Name + " have stopped: " + x.Direction.To + " refuses its rows, since", Since: x.StoppedSince,
				More: capitalise(x.Stopped), Href: "/sites/" + x.Direction.Site + "/queue?state=stopped", Go: "Queue"})
		}
		open := x.OpenRows
		if x.Open != nil {
			open = append([]*backfill.Request{x.Open}, open...)
		}
		for _, r := range open {
			b := openButton(r)
			n := notice{rank: 5, Tone: b.Tone, Icon: b.Icon, Text: r.Table + ": " + lower(b.Label), More: subject(r), Href: b.Href, Go: "Open"}
			if r.State == backfill.AwaitingReview {
				n.rank, n.Text, n.Go = 4, fmt.Sprintf("%s of %s await review", plural(r.Staged, "staged row"), r.Table), "Review"
				if r.Staged == 1 {
					n.Text = "1 staged row of " + r.Table + " awaits review"
				}
			}
			out = append(out, n)
		}
	}
	return out
}

// gaps says which sides report fewer rows than their sources, in tables that no
// request is open for.
func gaps(panels []backfill.Panel) []notice {
	missing, tables := map[string]int64{}, map[string]int64{}
	for i := range panels {
		x := &panels[i]
		if d := difference(x); d != nil && *d > 0 && x.Table.Active && x.Open == nil {
			missing[x.Direction.To] += *d
			tables[x.Direction.To]++
		}
	}
	var out []notice
	for _, side := range slices.Sorted(maps.Keys(missing)) {
		out = append(out, notice{rank: 6, Tone: "warn", Icon: "gap", Text: fmt.Sprintf("%s has %s fewer in %s", side, plural(missing[side], "row"), plural(tables[side], "table")),
			More: "A gap that stays for several counts is a case for a backfill.", Href: "/sites/" + panels[0].Direction.Site, Go: "Tables"})
	}
	return out
}

// subject is what a request is about, beside its table.
func subject(r *backfill.Request) string {
	s := fmt.Sprintf("request %d, %s → %s, by %s", r.ID, r.From, r.To, r.RequestedBy)
	if r.Key != nil {
		s = "row " + shorten(r.Key.String()) + ", " + s
	}
	return capitalise(s)
}
