package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// Request asks for a backfill.
type Request struct {
	Remote
	Site  string   `placeholder:"SITE" help:"The site. May be left out when there is only one."`
	Table string   `placeholder:"TABLE" help:"The table, as schema.table. May be left out when the site has only one."`
	From  string   `placeholder:"SIDE" help:"The side that has the rows. May be left out when the table is captured from only one."`
	Key   []string `sep:"none" placeholder:"V" help:"Backfill this one row instead of the table: the values of its key in key order, one flag each, or JSON: an array of them or an object by column."`
	Mode  string   `placeholder:"MODE" help:"How to choose the rows: full (the default: every row up to where the table ends now), differences (those the last reconciliation found missing or different) or row (with --key)."`
	Note  string   `placeholder:"TEXT" help:"Why, for those who review it."`
	Watch bool     `help:"Follow it until it awaits review, like backfill watch."`
}

func (c *Request) Run(ctx context.Context, s *session) error {
	key, err := keyJSON(c.Key)
	if err != nil {
		return err
	}
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	table, from, err := s.tableAndSide(ctx, site, c.Table, c.From)
	if err != nil {
		return err
	}
	a, err := s.c.RequestBackfill(ctx, site, client.RequestBackfillJSONBody{
		Table: table, From: from, Key: key, Mode: given(client.RequestBackfillJSONBodyMode(c.Mode)), Note: given(c.Note)})
	if err != nil {
		return err
	}
	err = answer(s, a, func(b *client.Backfill) {
		s.out.printf("request %s: backfill %s of %s from %s to %s\n", id(b.ID), what(b), b.Table, b.From, b.To)
		if a := b.Alternative; a != nil {
			s.note.printf("both sides are in one database and the table is small (%s): one statement would do the same in about %.0f s, while writers of %s wait; run it and cancel the request, or go on:\n",
				rows(a.Rows, ""), max(a.Seconds, 1), b.Table)
			for _, line := range strings.Split(a.Statement, "\n") {
				s.note.printf("    %s\n", line)
			}
		}
		if !c.Watch {
			s.note.printf("follow it with: backfill watch %s\n", id(b.ID))
		}
	})
	if err != nil || !c.Watch {
		return err
	}
	return s.watch(ctx, a.Value.ID, untilReview)
}

// keyJSON is a key as the API takes it: JSON as it was given, or else the values
// as texts.
func keyJSON(values []string) (json.RawMessage, error) {
	if len(values) == 0 {
		return nil, nil
	}
	for _, v := range values {
		if !utf8.ValidString(v) { // JSON would hold another key
			return nil, usagef("--key %q is not UTF-8", v)
		}
	}
	if v := strings.TrimSpace(values[0]); len(values) == 1 && (strings.HasPrefix(v, "{") || strings.HasPrefix(v, "[")) {
		if !json.Valid([]byte(v)) {
			return nil, usagef(`--key %s is not JSON: write '{"column":"value"}' or '["value"]'; a value that begins like this goes into the array`, v)
		}
		return json.RawMessage(v), nil
	}
	return json.Marshal(values)
}

// keyValues are the values of a key as a list's filter takes them: as they were
// given, or those of a JSON array.
func keyValues(given []string) ([]string, error) {
	raw, err := keyJSON(given)
	if err != nil || raw == nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber() // numbers keep their spelling
	var values []any
	if err := dec.Decode(&values); err != nil {
		return nil, usagef("--key %s: give the values in key order, one flag each, or a JSON array of them", given[0])
	}
	out := make([]string, len(values))
	for i, v := range values {
		switch v := v.(type) {
		case string:
			out[i] = v
		case json.Number, bool:
			out[i] = fmt.Sprint(v)
		default:
			return nil, usagef("--key %s: value %d is neither a text nor a number", given[0], i+1)
		}
	}
	return out, nil
}

// what names the rows a request is about.
func what(b *client.Backfill) string {
	if b.Key != nil {
		return "the row " + keyLine(b.Key)
	}
	if b.Mode == client.BackfillModeDifferences {
		return "the rows that differ"
	}
	return "all rows"
}

// id is a request's number as it is typed, without separators.
func id(n int64) string { return fmt.Sprint(n) }

// List lists requests.
type List struct {
	FilteredRemote
	Paging
	Site  string   `placeholder:"SITE" help:"Of this site only."`
	Table string   `placeholder:"TABLE" help:"Of this table only, as schema.table."`
	State []string `placeholder:"STATE" help:"In these states only: pending, in_progress, awaiting_review, releasing, finished, rejected, cancelled, failed."`
}

// Validate is kong's hook for what a flag's type cannot say.
func (c *List) Validate() error {
	for i, given := range c.State {
		c.State[i] = strings.ToUpper(given)
		if !backfill.State(c.State[i]).Valid() {
			return fmt.Errorf("--state %s is no state of a request (the state directory is --state-dir here)", given)
		}
	}
	return nil
}

func (c *List) Run(ctx context.Context, s *session) error {
	params := client.ListBackfillsParams{Site: given(c.Site), Table: given(c.Table)}
	for _, state := range c.State {
		params.State = append(params.State, client.State(state))
	}
	t := s.table("ID", "SITE", "TABLE", "DIRECTION", "STATE", "STAGED", "RELEASED", "REQUESTED", "BY", "NOTE")
	_, err := list(s, c.Paging, t, func(b *client.Backfill) {
		table := b.Table
		if b.Key != nil {
			table += " (" + keyLine(b.Key) + ")"
		}
		t.row(right(id(b.ID)), b.Site, table, b.From+" → "+b.To, phase(b), b.Staged, b.Released, ago(&b.RequestedAt), b.RequestedBy, remark(b))
	}, func(cursor *client.Cursor, n *client.Limit) (client.Answer[client.Page[client.Backfill]], error) {
		params.Cursor, params.Limit = cursor, n
		return s.c.ListBackfills(ctx, &params)
	})
	return err
}

// phase is a state and how far it has come.
func phase(b *client.Backfill) string {
	text := string(b.State)
	if b.State == client.StateInProgress || b.State == client.StateReleasing {
		text = fmt.Sprintf("%s %d %%", b.State, b.Percent)
	}
	if b.Paused {
		text += ", paused"
	}
	return text
}

// remark is the most telling of a request's texts.
func remark(b *client.Backfill) string {
	for _, text := range []string{b.Reason, b.Waiting, b.ReviewNote, b.RequestNote} {
		if text != "" {
			return text
		}
	}
	return ""
}

// Show shows one request.
type Show struct {
	Remote
	ID int64 `arg:"" help:"The request's number."`
}

func (c *Show) Run(ctx context.Context, s *session) error {
	a, err := s.c.GetBackfill(ctx, c.ID)
	if err != nil {
		return err
	}
	return answer(s, a, s.show)
}

func (s *session) show(b *client.Backfill) {
	line := func(name, format string, args ...any) {
		s.out.printf("  "+fmt.Sprintf("%-12s", name)+format+"\n", args...)
	}
	text := func(name, v string) {
		if v != "" {
			line(name, "%s", v)
		}
	}
	s.out.printf("request %s: backfill %s of %s from %s to %s, site %s\n", id(b.ID), what(b), b.Table, b.From, b.To, b.Site)
	line("state", "%s, revision %s", phase(b), id(b.Revision))
	text("waiting", b.Waiting)
	if b.ThrottledSeconds >= 1 {
		line("held back", "%s by gates", (time.Duration(b.ThrottledSeconds) * time.Second).String())
	}
	text("reason", b.Reason)
	line("staged", "%v of %v expected", b.Staged, b.Expected)
	if b.ProvenRows > 0 {
		line("spared", "%v rows up to %s, which %s provably holds just so", b.ProvenRows, keyLine(b.ProvenKey), b.To)
	}
	line("effects", "%v insert, %v overwrite, %v identical, %v unknown", b.Effects[string(backfill.Insert)], b.Effects[string(backfill.Overwrite)],
		b.Effects[string(backfill.Identical)], b.Effects[string(backfill.Unknown)])
	line("released", "%v, %v superseded, %v skipped as identical", b.Released, b.Superseded, b.Skipped)
	if n := b.SupersededUndelivered; n > 0 {
		line("", "%v of the superseded need another backfill: what overtook them was never delivered", n)
	}
	if open(b.State) && b.Rate > 0 {
		line("pace", "%v/s%s", int64(b.Rate), ends(b.ETA))
		if b.ETAP90 != nil {
			line("", "in nine of ten cases ends %s", at(b.ETAP90))
		}
	}
	if b.ResumeKey != nil {
		text("resume key", keyLine(b.ResumeKey))
	}
	line("requested", "by %s, %s", b.RequestedBy, at(&b.RequestedAt))
	text("", b.RequestNote)
	if b.ReviewedAt != nil {
		via := ""
		if plain(b.ReviewedVia) == "temporal" {
			via = " via Temporal"
		}
		line("reviewed", "by %s%s, %s", plain(b.ReviewedBy), via, at(b.ReviewedAt))
		text("", b.ReviewNote)
	}
	if b.ClosedAt != nil {
		line("closed", "%s", at(b.ClosedAt))
	}
	text("workflow", b.WorkflowID)
	text("console", plain(b.ConsoleURL))
	text("review", b.Links["review"])
}

// at is a time for reading closely.
func at(t *time.Time) string {
	if t == nil {
		return "never"
	}
	return ago(t) + " (" + t.Local().Format("2006-01-02 15:04:05 MST") + ")"
}

// ends is the forecast of a phase's end.
func ends(eta *time.Time) string {
	if eta == nil {
		return ""
	}
	return ", ends in " + short(max(time.Until(*eta), 0))
}

// Rows lists what a request has staged.
type Rows struct {
	Remote
	Paging
	ID     int64    `arg:"" help:"The request's number."`
	Effect string   `placeholder:"EFFECT" help:"Only rows whose release would do this to the receiving side: insert, overwrite, identical, or unknown while its agent is away; or superseded: those that a newer change has overtaken."`
	From   []string `name:"from-key" sep:"none" placeholder:"V" help:"Begin where this key stands: its values in key order, one flag each, or a JSON array of them."`
}

func (c *Rows) Run(ctx context.Context, s *session) error {
	params := client.ListRowsParams{Effect: given(client.ListRowsParamsEffect(c.Effect))}
	var err error
	if params.FromKey, err = keyValues(c.From); err != nil {
		return err
	}
	unjudged := int64(0)
	if !s.json && slices.Contains([]backfill.Effect{backfill.Insert, backfill.Overwrite, backfill.Identical}, backfill.Effect(c.Effect)) {
		b, err := s.c.GetBackfill(ctx, c.ID)
		if err != nil {
			return err
		}
		unjudged = b.Value.Effects[string(backfill.Unknown)]
	}
	t := s.table("KEY", "EFFECT", "ROW")
	last, err := list(s, c.Paging, t, func(r *client.StagedRow) {
		effect := string(r.Effect)
		if r.Superseded {
			effect += ", superseded"
		}
		if o := r.SupersededBy; o != nil {
			effect += fmt.Sprintf(" by %s %d, %s", o.Op, o.Seq, o.State)
		}
		t.row(keyLine(r.Key), effect, content(r))
	}, func(cursor *client.Cursor, n *client.Limit) (client.Answer[client.Page[client.StagedRow]], error) {
		params.Cursor, params.Limit = cursor, n
		return s.c.ListRows(ctx, c.ID, &params)
	})
	if err != nil || s.json {
		return err
	}
	if unjudged > 0 {
		s.note.printf("%s not judged yet: they may belong here too\n", rows(unjudged, ""))
	}
	if last.Revision > 0 {
		s.note.printf("revision %s\n", id(last.Revision))
	}
	return nil
}

// content is what releasing a row would write: the columns that change where the
// receiver has the row, else all.
func content(r *client.StagedRow) string {
	var parts []string
	sent := r.Row
	if r.Result != nil {
		sent = r.Result
	}
	for _, column := range r.Changed {
		parts = append(parts, column+": "+value(r.Receiver.Get(column))+" → "+value(sent.Get(column)))
	}
	switch {
	case r.Problem != nil:
		return line(r.Row) + " → nothing: " + *r.Problem
	case parts != nil:
		return strings.Join(parts, ", ")
	case r.Result != nil:
		return line(r.Row) + " → " + line(r.Result)
	}
	return line(r.Row)
}

// Approve lets staged rows be released.
type Approve struct {
	Remote
	ID            int64  `arg:"" help:"The request's number."`
	Revision      int64  `placeholder:"N" help:"The revision of the staged rows that were read, as backfill rows prints it. Left out: the present one."`
	SkipIdentical bool   `help:"Leave out the rows that the receiving side holds already."`
	Note          string `placeholder:"TEXT" help:"Why, for the record."`
}

func (c *Approve) Run(ctx context.Context, s *session) error {
	revision, err := s.revision(ctx, c.ID, c.Revision)
	if err != nil {
		return err
	}
	a, err := s.c.Approve(ctx, c.ID, client.ApproveJSONBody{Revision: revision, SkipIdentical: given(c.SkipIdentical), Note: given(c.Note)})
	if err != nil {
		return err
	}
	return answer(s, a, func(b *client.Backfill) {
		s.out.printf("approved request %s at revision %s: %s of %s go to %s%s\n", id(b.ID), id(revision), rows(b.Staged, "staged "), b.Table, b.To, c.unjudged(b))
	})
}

// unjudged says what is not known of the rows that were approved.
func (c *Approve) unjudged(b *client.Backfill) string {
	n := b.Effects[string(backfill.Unknown)]
	switch {
	case n == 0 && c.SkipIdentical:
		return fmt.Sprintf(", but for %s", rows(b.Effects[string(backfill.Identical)], "identical "))
	case n == 0:
		return ""
	case c.SkipIdentical:
		return fmt.Sprintf(", but for %s; %s not judged yet cannot be left out, identical or not", rows(b.Effects[string(backfill.Identical)], "identical "), rows(n, ""))
	}
	return fmt.Sprintf("; %s of them not judged yet", thousands(n))
}

// Reject closes a request and sends nothing.
type Reject struct {
	Remote
	ID       int64  `arg:"" help:"The request's number."`
	Revision int64  `placeholder:"N" help:"The revision of the staged rows that were read, as backfill rows prints it. Left out: the present one."`
	Note     string `required:"" placeholder:"TEXT" help:"Why. It stays with the request."`
}

func (c *Reject) Run(ctx context.Context, s *session) error {
	revision, err := s.revision(ctx, c.ID, c.Revision)
	if err != nil {
		return err
	}
	a, err := s.c.Reject(ctx, c.ID, client.RejectJSONBody{Revision: revision, Note: c.Note})
	if err != nil {
		return err
	}
	return answer(s, a, func(b *client.Backfill) {
		s.out.printf("rejected request %s at revision %s: nothing of %s is sent to %s\n", id(b.ID), id(revision), b.Table, b.To)
	})
}

// revision is the one that was given, or the one the staged rows have now; the
// API refuses the decision if they change before it arrives.
func (s *session) revision(ctx context.Context, n, given int64) (int64, error) {
	if given != 0 {
		return given, nil
	}
	a, err := s.c.GetBackfill(ctx, n)
	if err != nil {
		return 0, err
	}
	b := &a.Value
	s.note.printf("deciding revision %s: %s, %s\n", id(b.Revision), rows(b.Staged, "staged "), b.State)
	return b.Revision, nil
}

// Hold has what pausing, resuming and cancelling have in common.
type Hold struct {
	Remote
	ID   int64  `arg:"" help:"The request's number."`
	Note string `placeholder:"TEXT" help:"Why, for the record."`
}

// Judge has the effects of the staged rows judged again.
type Judge struct {
	Remote
	ID int64 `arg:"" help:"The request's number."`
}

func (c *Judge) Run(ctx context.Context, s *session) error {
	a, err := s.c.Judge(ctx, c.ID)
	if err != nil {
		return err
	}
	return answer(s, a, func(b *client.Backfill) {
		s.out.printf("request %s: the agent of %s judges %s again, under revision %s\n", id(b.ID), b.To, rows(b.Staged, "staged "), id(b.Revision))
	})
}

// Pause holds a walk or a release.
type Pause struct{ Hold }

func (c *Pause) Run(ctx context.Context, s *session) error {
	a, err := s.c.Pause(ctx, c.ID, &client.PauseJSONBody{Note: given(c.Note)})
	if err != nil {
		return err
	}
	return answer(s, a, func(b *client.Backfill) {
		s.out.printf("paused request %s, %s: backfill resume %s lets it go on\n", id(b.ID), b.State, id(b.ID))
	})
}

// Resume lets a paused request go on.
type Resume struct{ Hold }

func (c *Resume) Run(ctx context.Context, s *session) error {
	a, err := s.c.Resume(ctx, c.ID, &client.ResumeJSONBody{Note: given(c.Note)})
	if err != nil {
		return err
	}
	return answer(s, a, func(b *client.Backfill) {
		s.out.printf("resumed request %s, %s\n", id(b.ID), phase(b))
	})
}

// Cancel ends an open request.
type Cancel struct{ Hold }

func (c *Cancel) Run(ctx context.Context, s *session) error {
	a, err := s.c.Cancel(ctx, c.ID, &client.CancelJSONBody{Note: given(c.Note)})
	if err != nil {
		return err
	}
	return answer(s, a, func(b *client.Backfill) {
		s.out.printf("cancelled request %s: %s before that, which stay\n", id(b.ID), rows(b.Released, "released "))
	})
}
