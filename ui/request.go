package ui

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
)

// inlineColumns is how many of a row's columns stand in the list.
const inlineColumns = 5

// requestData is the page of one request, from asking to the outcome.
type requestData struct {
	*backfill.Request
	look
	Whole    bool // the whole table, not one row
	Steps    []step
	Phase    *phase   // the walk or release that runs
	Effects  []figure // of the staged rows
	EffectOf string   // the effect that the list shows, "" for all
	Outcome  []figure // once rows were released or given up
	Bar      []segment
	Final    []segment
	Layout   *row.Layout
	Inline   []string
	Columns  []string
	Version  string // changes when rows that were read may have changed
	Judged   int64  // rows with a known effect; when it grows, unknown ones may have become known
	Growing  bool   // more rows may come
	Charts   []*chart
	Held     []string         // how long which gate has held it back
	Delivery control.Delivery // of what was released
	Life     string           // the page of a row's life, to which its key is added

	Decide, Pause, Resume, Cancel, Judge bool // what the state and the account allow

	Refused             string // why this account may not decide
	Console             string
	Approval, Rejection signal
	Alternative         *api.Alternative
}

// step is one station of a request's life.
type step struct {
	Name, Class string
	At          *time.Time
	Text        string
}

// phase is the progress of a walk or a release.
type phase struct {
	Name       string
	Done, Of   int64
	Percent    int
	Rate       string
	Left       string     // how long it should still take
	ETA        *time.Time // exactly
	Spoken     string     // for announcing; it changes every tenth
	Indefinite bool       // how much there is to do is not known
}

// figure is a number with its name; those of effects filter the list.
type figure struct {
	Kind, Label, Why string
	Value            int64
	Href             string
	Current          bool
}

// Filter is the effect a figure narrows the list to, "" for all.
func (f figure) Filter() string {
	if f.Kind == "all" {
		return ""
	}
	return f.Kind
}

// segment is a part of a bar, in per cent of its width.
type segment struct {
	Kind     string
	X, Width string
}

// signal is what decides a request from the workflow engine's console.
type signal struct{ Name, Payload string }

func (p *pages) request(c echo.Context, a api.Account) (*view, error) {
	ctx := c.Request().Context()
	id, err := strconv.ParseInt(c.Param("id"), 10, 64)
	if err != nil {
		return nil, backfill.Errorf(backfill.NotFound, "no request %q", c.Param("id"))
	}
	r, err := p.service.Backfill(ctx, id)
	if err != nil {
		return nil, err
	}
	var layout *row.Layout
	if r.LayoutID != 0 {
		if layout, err = p.service.Layout(ctx, r.LayoutID); err != nil {
			return nil, err
		}
	}
	second, err := p.service.NeedsSecond(ctx, a, r)
	if err != nil {
		return nil, err
	}
	if r.Waiting, err = p.service.Waiting(ctx, r); err != nil {
		return nil, err
	}
	d := requestData{
		Request: r, look: looks[r.State], Whole: r.Key == nil, Steps: steps(r), Phase: phaseOf(r, p.Now()),
		EffectOf: c.QueryParam("effect"), Layout: layout, Console: p.service.Console(r),
		Version: fmt.Sprintf("%d-%d", r.Revision, r.Superseded), Judged: r.Staged - r.Effects[backfill.Unknown],
		Growing: r.State == backfill.Pending || r.State == backfill.InProgress,
	}
	if r.Released > 0 {
		if d.Delivery, err = p.service.Delivery(ctx, id); err != nil {
			return nil, err
		}
	}
	if r.StartedAt != nil {
		if err := p.course(ctx, &d); err != nil {
			return nil, err
		}
	}
	d.Life = "/sites/" + r.Site + "/row?" + url.Values{"table": {r.Table}}.Encode()
	d.effects()
	d.outcome()
	d.columns()
	d.allowed(second, a)
	d.Approval, d.Rejection = signals(r, a.Name)
	if d.Alternative, err = p.service.Alternative(ctx, r); err != nil {
		return nil, err
	}

	v := &view{template: "request", Title: fmt.Sprintf("%s: %s", r.Table, lower(d.Word)), Data: &d, Personal: r.State == backfill.AwaitingReview,
		Crumbs: append(siteCrumbs(r.Site), crumb{fmt.Sprintf("Request %d", r.ID), fmt.Sprintf("/backfills/%d", r.ID)})}
	if r.State.Open() {
		v.Events = api.Topics{Requests: []int64{r.ID}}
		v.Refresh = 15
	} else if d.Delivery.Waiting > 0 || d.Delivery.Held > 0 {
		v.Events = api.Topics{Sites: []string{r.Site}}
	}
	return v, nil
}

// steps are the stations a request has passed, is at, and has before it. A closed
// one ends where it ended.
func steps(r *backfill.Request) []step {
	all := []step{
		{Name: "Requested", Class: "done", At: &r.RequestedAt, Text: "by " + r.RequestedBy},
		{Name: "Walk", At: r.WalkedAt},
		{Name: "Review", At: r.ReviewedAt},
		{Name: "Release"},
	}
	at := 1 // the station it stands at
	switch {
	case r.ReviewedAt != nil:
		at = 3
	case r.WalkedAt != nil:
		at = 2
	}
	for i := 1; i < at; i++ {
		all[i].Class = "done"
	}
	if r.WalkedAt != nil {
		all[1].Text = plural(r.Staged, "row") + " staged"
	} else if r.StartedAt != nil {
		all[1].At, all[1].Text = r.StartedAt, "began"
	}
	if r.ReviewedAt != nil {
		all[2].Text = "by " + reviewer(r)
	}
	if r.State.Open() {
		all[at].Class = "now"
		if r.State == backfill.Pending {
			all[1].Text = "waits for the agent of " + r.From
			if r.Waiting != "" {
				all[1].Text = "not begun" // what it waits for is said beside
			}
		}
		if r.State == backfill.AwaitingReview {
			all[2].Text = "waits for a person"
		}
		return append(all, step{Name: "Finished"})
	}
	end := step{Name: looks[r.State].Word, Class: "stop", At: r.ClosedAt}
	switch r.State {
	case backfill.Finished:
		all[3].Class, end.Class = "done", "done"
		all[3].Text = plural(r.Released, "row") + " released"
		return append(all, end)
	case backfill.Rejected:
		return append(all[:2], step{Name: "Rejected", Class: "stop", At: r.ReviewedAt, Text: "by " + reviewer(r)})
	case backfill.Failed:
		end.Class = "failed"
	}
	// The station it was at when it ended counts only when something happened there.
	if at == 1 && r.StartedAt != nil {
		all[1].Class, all[1].Text, all[1].At = "stop", plural(r.Staged, "row")+" staged", nil
		at++
	} else if at == 3 {
		all[3].Class, all[3].Text = "stop", plural(r.Released, "row")+" released"
		at++
	}
	return append(all[:at], end)
}

// course draws how the walk and the release went, and says what held them back.
func (p *pages) course(ctx context.Context, d *requestData) error {
	progress, err := p.service.Progress(ctx, d.ID)
	if err != nil {
		return err
	}
	var walk, release []point
	for _, x := range progress.Points {
		to := &walk
		if x.Releasing {
			to = &release
		}
		*to = append(*to, point{x.At, x.Rows, x.Throttled.Seconds()})
	}
	// Where it ended was recorded with the request.
	if n := len(walk); n > 0 && d.WalkedAt != nil {
		walk = append(walk, point{*d.WalkedAt, d.Staged, walk[n-1].Throttled})
	}
	if n := len(release); n > 0 && d.State == backfill.Finished {
		release = append(release, point{*d.ClosedAt, d.ReleasedUpTo, release[n-1].Throttled})
	}
	for _, c := range []*chart{drawChart("walk", "Walk", walk), drawChart("release", "Release", release)} {
		if c != nil {
			d.Charts = append(d.Charts, c)
		}
	}
	for _, x := range progress.Throttles {
		if x.Seconds >= 1 {
			d.Held = append(d.Held, fmt.Sprintf("%s (%s) for %s", x.Gate, x.Kind, spell(time.Duration(x.Seconds*float64(time.Second)))))
		}
	}
	return nil
}

// reviewer is who decided, and by what way when no account stands behind the name.
func reviewer(r *backfill.Request) string {
	if r.ReviewedVia == backfill.ViaTemporal {
		return r.ReviewedBy + " via Temporal"
	}
	return r.ReviewedBy
}

func phaseOf(r *backfill.Request, now time.Time) *phase {
	p := &phase{Percent: r.Percent(), ETA: r.ETA(now)}
	switch r.State {
	case backfill.InProgress:
		p.Name, p.Done, p.Of = "staged", r.Staged, r.Expected
		p.Indefinite = r.Expected == 0
	case backfill.Releasing:
		p.Name, p.Done, p.Of = "gone through", r.ReleasedUpTo, r.Staged
	default:
		return nil
	}
	if rate := r.Rate(now); rate >= 1 {
		p.Rate = num(int64(math.Round(rate))) + " rows/s"
	}
	if p.ETA != nil {
		p.Left = "about " + spell(p.ETA.Sub(now)) + " left"
		if late := r.ETA90(now); late != nil && late.Sub(*p.ETA) > p.ETA.Sub(now)/5 {
			p.Left += ", " + spell(late.Sub(now)) + " at worst"
		}
	}
	p.Spoken = fmt.Sprintf("%s %d %%", looks[r.State].Word, p.Percent/10*10)
	return p
}

var effectFigures = []struct {
	effect backfill.Effect
	label  string
	why    string
}{
	{backfill.Insert, "Insert", "%s lacks the row"},
	{backfill.Overwrite, "Overwrite", "%s holds other values"},
	{backfill.Identical, "Identical", "%s holds the same"},
	{backfill.Unknown, "Unknown", "not compared with %s yet"},
}

func (d *requestData) effects() {
	href := fmt.Sprintf("/backfills/%d", d.ID)
	d.Effects = []figure{{Kind: "all", Label: "Staged", Why: "rows read from " + d.From, Value: d.Staged, Href: href, Current: true}}
	for _, e := range effectFigures {
		f := figure{string(e.effect), e.label, fmt.Sprintf(e.why, d.To), d.Request.Effects[e.effect], href + "?effect=" + string(e.effect), d.EffectOf == string(e.effect)}
		if f.Current || d.EffectOf == string(backfill.Superseded) {
			d.Effects[0].Current = false
		}
		d.Effects = append(d.Effects, f)
	}
	if d.Effects[0].Current {
		d.EffectOf = "" // whatever else the address said
	}
	d.Bar = bar(d.Effects[1:])
}

// outcome says what became of the staged rows; together they are all of them.
func (d *requestData) outcome() {
	if d.ReviewedAt == nil || d.State == backfill.Rejected {
		return
	}
	d.Outcome = []figure{
		{Kind: "released", Label: "Released", Why: d.delivered(), Value: d.Released},
		{Kind: "superseded", Label: "Superseded", Why: "a newer change overtook them", Value: d.Superseded},
	}
	if d.Superseded > 0 {
		d.Outcome[1].Href = fmt.Sprintf("/backfills/%d?effect=superseded", d.ID)
		d.Outcome[1].Current = d.EffectOf == "superseded"
	}
	if d.SkipIdentical || d.Skipped > 0 {
		d.Outcome = append(d.Outcome, figure{Kind: "skipped", Label: "Skipped", Why: d.To + " held the same", Value: d.Skipped})
	}
	if left := d.Staged - d.Released - d.Superseded - d.Skipped; left > 0 {
		why := "still to be released"
		if !d.State.Open() {
			why = "not sent"
		}
		d.Outcome = append(d.Outcome, figure{Kind: "left", Label: "Left", Why: why, Value: left})
	}
	d.Final = bar(d.Outcome)
}

// delivered says where the released rows are.
func (d *requestData) delivered() string {
	x := d.Delivery
	var parts []string
	if x.Waiting > 0 {
		parts = append(parts, num(x.Waiting)+" on the way to "+d.To)
	}
	if x.Held > 0 {
		parts = append(parts, num(x.Held)+" held")
	}
	if x.Quarantined > 0 {
		parts = append(parts, num(x.Quarantined)+" quarantined")
	}
	if x.Skipped > 0 {
		parts = append(parts, num(x.Skipped)+" skipped")
	}
	switch {
	case len(parts) > 0:
		return strings.Join(parts, ", ")
	case d.Released == 0:
		return "none sent to " + d.To + " yet"
	}
	return "all have arrived at " + d.To
}

// bar lays figures side by side. Whatever is not zero can be seen.
func bar(figures []figure) []segment {
	const least = 0.6
	var total, wide float64
	for _, f := range figures {
		total += float64(f.Value)
	}
	if total == 0 {
		return nil
	}
	widths := make([]float64, len(figures))
	for i, f := range figures {
		if f.Value > 0 {
			widths[i] = max(float64(f.Value)*100/total, least)
			wide += widths[i]
		}
	}
	var out []segment
	x := 0.0
	for i, f := range figures {
		w := widths[i] * 100 / wide
		if w > 0 {
			out = append(out, segment{f.Kind, fmt.Sprintf("%.3f%%", x), fmt.Sprintf("%.3f%%", w)})
		}
		x += w
	}
	return out
}

// columns chooses what stands in the list: the key, then the first other columns.
func (d *requestData) columns() {
	if d.Layout == nil {
		return
	}
	isKey := map[string]bool{}
	for _, name := range d.Layout.Key {
		isKey[name] = true
		if len(d.Inline) < inlineColumns-1 {
			d.Inline = append(d.Inline, name)
		}
	}
	for _, c := range d.Layout.Columns {
		d.Columns = append(d.Columns, c.Name)
		if !isKey[c.Name] && len(d.Inline) < inlineColumns {
			d.Inline = append(d.Inline, c.Name)
		}
	}
}

// Walking reports whether where the walk stands is of interest.
func (d *requestData) Walking() bool {
	return d.State == backfill.InProgress || !d.State.Open() && d.WalkedAt == nil && d.ResumeKey != nil
}

// Uncompared is how many staged rows nobody has compared with the receiver.
func (d *requestData) Uncompared() int64 { return d.Request.Effects[backfill.Unknown] }

// Identical is how many staged rows the receiver holds already.
func (d *requestData) Identical() int64 { return d.Request.Effects[backfill.Identical] }

// Summary says what an approval will do, in words.
func (d *requestData) Summary() string {
	e := d.Request.Effects
	var parts []string
	if n := e[backfill.Insert]; n > 0 {
		parts = append(parts, plural(n, "row")+" will be inserted")
	}
	if n := e[backfill.Overwrite]; n > 0 {
		parts = append(parts, plural(n, "row")+" of "+d.To+" will be overwritten")
	}
	if n := e[backfill.Identical]; n > 0 {
		parts = append(parts, plural(n, "row")+" will stay as they are")
	}
	if len(parts) == 0 && d.Staged == 0 {
		return "There is nothing to send."
	}
	if len(parts) == 0 {
		return ""
	}
	return strings.Join(parts, ", ") + "."
}

// Reviewer is who decided, and by what way.
func (d *requestData) Reviewer() string { return reviewer(d.Request) }

// Shown is how many rows the list has under its filter.
func (d *requestData) Shown() int64 {
	if d.EffectOf == string(backfill.Superseded) {
		return d.Superseded
	}
	for _, f := range d.Effects {
		if f.Current {
			return f.Value
		}
	}
	return d.Staged
}

func (d *requestData) allowed(second bool, a api.Account) {
	may := a.Role.Covers(control.Requester)
	d.Pause = may && d.Pausable(true) == nil
	d.Resume = may && d.Pausable(false) == nil
	d.Cancel = may && d.Cancellable() == nil
	d.Judge = may && d.Judgeable() == nil
	if d.State != backfill.AwaitingReview {
		return
	}
	switch {
	case !a.Role.Covers(control.Reviewer):
		d.Refused = capitalise(lacks(a, control.Reviewer, "deciding"))
	case second:
		d.Decide = true
		d.Refused = "You asked for this backfill: another reviewer has to approve it."
	default:
		d.Decide = true
	}
}

// signals are the signals that decide a request from the workflow engine's
// console, with just the payloads its workflow reads.
func signals(r *backfill.Request, by string) (approval, rejection signal) {
	payload := func(note string) string {
		b, err := json.MarshalIndent(struct {
			By       string `json:"by"`
			Revision int64  `json:"revision"`
			Note     string `json:"note"`
		}{by, r.Revision, note}, "", "  ")
		if err != nil {
			panic(err) // strings and a number always marshal
		}
		return string(b)
	}
	return signal{"approve", payload("")}, signal{"reject", payload("why")}
}
