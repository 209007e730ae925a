package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// Watch follows a request.
type Watch struct {
	Remote
	ID    int64  `arg:"" help:"The request's number."`
	Until string `placeholder:"STATE" help:"When to stop: review (the default), when its rows wait to be read or it is closed; judged, when it is known besides what each would do; or closed."`
}

// Validate is kong's hook for what a flag's type cannot say.
func (c *Watch) Validate() error {
	if c.Until != "" && c.Until != untilReview && c.Until != untilJudged && c.Until != untilClosed {
		return fmt.Errorf("--until %s: use review, judged or closed", c.Until)
	}
	return nil
}

// What watch waits for.
const (
	untilReview = "review"
	untilJudged = "judged"
	untilClosed = "closed"
)

func (c *Watch) Run(ctx context.Context, s *session) error {
	return s.watch(ctx, c.ID, cmp.Or(c.Until, untilReview))
}

// view shows how a request goes on.
type view interface {
	show(a *client.Answer[client.Backfill], trouble string) // after a change, a nil before the first answer
	tick()                                                  // now and then
	end()                                                   // once
}

// watch follows a request until it awaits review or is closed. It fails if the
// request ended in any other way than it was meant to.
func (s *session) watch(ctx context.Context, n int64, until string) error {
	type news struct {
		a   client.Answer[client.Backfill]
		err error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	updates := make(chan news)
	go func() {
		defer close(updates)
		for a, err := range s.c.Watch(ctx, n) {
			select {
			case updates <- news{a, err}:
			case <-ctx.Done():
				return
			}
		}
	}()
	v := s.view()
	defer v.end()
	redraw := time.NewTicker(time.Second)
	defer redraw.Stop()
	var last *client.Answer[client.Backfill]
	for {
		select {
		case <-redraw.C:
			v.tick()
		case u, more := <-updates:
			switch {
			case !more:
				v.end()
				s.note.printf("request %s goes on, unwatched\n", id(n))
				return ctx.Err()
			case client.Lasting(u.err):
				return u.err
			case u.err != nil:
				v.show(last, "the API is away, trying again")
				continue
			}
			last = &u.a
			v.show(last, "")
			if b := &last.Value; !open(b.State) || b.State == client.StateAwaitingReview && (until == untilReview || until == untilJudged && b.Effects["unknown"] == 0) {
				v.end()
				return s.outcome(b)
			}
		}
	}
}

// outcome says what to do next, or what went wrong.
func (s *session) outcome(b *client.Backfill) error {
	switch b.State {
	case client.StateAwaitingReview:
		s.note.printf("read the rows with: backfill rows %s\ndecide with: backfill approve %s, or backfill reject %s --note WHY\n", id(b.ID), id(b.ID), id(b.ID))
		if b.Links["review"] != "" {
			s.note.printf("or on %s\n", b.Links["review"])
		}
	case client.StateFinished:
		if n := b.SupersededUndelivered; n > 0 {
			s.note.printf("%s to backfill again: what overtook them was never delivered\n", rows(n, "superseded "))
		}
	case client.StateRejected, client.StateCancelled, client.StateFailed:
		why := b.Reason
		if why == "" {
			why = b.ReviewNote
		}
		if why != "" {
			why = ": " + why
		}
		return fmt.Errorf("request %d is %s%s", b.ID, b.State, why)
	}
	return nil
}

func (s *session) view() view {
	switch {
	case s.json:
		return &jsonView{w: s.Out}
	case s.terminal != nil:
		return &barView{w: s.Out, width: s.width}
	}
	return &lineView{out: s.out, now: time.Now}
}

// jsonView prints each state as it came, one a line.
type jsonView struct {
	w    io.Writer
	last []byte
}

func (v *jsonView) show(a *client.Answer[client.Backfill], _ string) {
	if a != nil && !bytes.Equal(a.Raw, v.last) {
		v.last = a.Raw
		fmt.Fprintf(v.w, "%s\n", a.Raw)
	}
}

func (v *jsonView) tick() {}
func (v *jsonView) end()  {}

// lineView prints a line when something has changed that is worth one: at once
// for what people wait for, now and then for progress.
type lineView struct {
	out     printer
	now     func() time.Time
	last    time.Time
	notable string
	text    string
}

// linesEvery bounds how often mere progress makes a line.
const linesEvery = 5 * time.Second

func (v *lineView) show(a *client.Answer[client.Backfill], trouble string) {
	notable, text := trouble, trouble
	if a != nil {
		b := &a.Value
		notable = strings.Join([]string{string(b.State), b.Waiting, trouble}, "\n")
		text = strings.Join(progress(b, trouble, v.now()), "  ")
	}
	if text == v.text || (notable == v.notable && v.now().Sub(v.last) < linesEvery) {
		return
	}
	v.notable, v.text, v.last = notable, text, v.now()
	v.out.printf("%s  %s\n", v.last.Format(time.TimeOnly), text)
}

func (v *lineView) tick() {}
func (v *lineView) end()  {}

// progress is how a request stands, part by part, the most important first.
func progress(b *client.Backfill, trouble string, now time.Time) []string {
	parts := []string{phase(b)}
	switch b.State {
	case client.StatePending:
	case client.StateInProgress:
		if b.Expected > 0 {
			parts = append(parts, thousands(b.Staged)+" of "+rows(b.Expected, ""))
		}
	case client.StateAwaitingReview:
		parts = append(parts, rows(b.Staged, "")+" to read")
	default:
		parts = append(parts, thousands(b.Released)+" of "+rows(b.Staged, "")+" released")
		if b.Superseded > 0 {
			parts = append(parts, thousands(b.Superseded)+" superseded")
		}
		if b.Skipped > 0 {
			parts = append(parts, thousands(b.Skipped)+" identical left out")
		}
	}
	if moving(b) && !b.Paused && trouble == "" {
		if b.Rate >= 1 {
			parts = append(parts, thousands(int64(b.Rate))+"/s")
		}
		if b.ETA != nil {
			parts = append(parts, short(max(b.ETA.Sub(now), 0))+" left")
		}
	}
	switch {
	case trouble != "":
		parts = append(parts, trouble)
	case b.Waiting != "":
		parts = append(parts, "waiting: "+b.Waiting)
	}
	return parts
}

// moving reports whether rows are being walked or released.
func moving(b *client.Backfill) bool {
	return b.State == client.StateInProgress || b.State == client.StateReleasing
}

// barView draws one line in place for each phase of a request, with a bar as wide
// as the terminal leaves room for.
type barView struct {
	w       io.Writer
	width   func() int
	b       *client.Backfill
	trouble string
	drawn   bool // a line is begun
}

func (v *barView) show(a *client.Answer[client.Backfill], trouble string) {
	var b *client.Backfill
	if a != nil {
		b = &a.Value
	}
	if v.b != nil && b != nil && v.b.State != b.State {
		v.end() // the line of the phase that is over stays
	}
	v.b, v.trouble = b, trouble
	v.tick()
}

func (v *barView) tick() {
	text := v.trouble
	// One column less: a full line makes some terminals wrap.
	width := v.width() - 1
	if v.b != nil {
		text = bar(v.b, v.trouble, width, time.Now())
	}
	if text == "" {
		return
	}
	// Back to the first column, write, clear what is left of the line before.
	fmt.Fprintf(v.w, "\r%s\x1b[K", clip(safe(text), width))
	v.drawn = true
}

func (v *barView) end() {
	if v.drawn {
		io.WriteString(v.w, "\n")
		v.drawn = false
	}
}

const (
	shortestBar = 10
	longestBar  = 40
)

// bar is a request on one line of at most width columns.
func bar(b *client.Backfill, trouble string, width int, now time.Time) string {
	parts := progress(b, trouble, now)
	for i := range parts {
		parts[i] = safe(parts[i])
	}
	line := strings.Join(parts, "  ")
	if room := min(width-columns(line)-len("[]  "), longestBar); moving(b) && room >= shortestBar {
		done := room * min(max(b.Percent, 0), 100) / 100
		drawing := "[" + strings.Repeat("=", done) + strings.Repeat(" ", room-done) + "]"
		line = strings.Join(append([]string{parts[0], drawing}, parts[1:]...), "  ")
	}
	return clip(line, width)
}

func open(s client.State) bool { return backfill.State(s).Open() }
