package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/proof"
)

// Reconcile compares a table of both sides, and has what belongs to that.
type Reconcile struct {
	Start       ReconcileStart    `cmd:"" group:"commands" default:"withargs" help:"Compare a table of both sides (the default)."`
	List        ReconcileList     `cmd:"" group:"commands" help:"List reconciliations, newest first."`
	Show        ReconcileShow     `cmd:"" group:"commands" help:"Show one reconciliation."`
	Keys        ReconcileKeys     `cmd:"" group:"commands" help:"List the keys that differ, with both values."`
	Repair      ReconcileRepair   `cmd:"" group:"commands" help:"Send the rows of missing and different keys again, and compare their leaves again."`
	Waive       ReconcileWaive    `cmd:"" group:"commands" help:"Let differences be, for a reason."`
	Cancel      ReconcileCancel   `cmd:"" group:"commands" help:"End a reconciliation."`
	Certificate Certificate       `cmd:"" group:"commands" help:"Print the signed certificate of a finished reconciliation."`
	Schedule    ReconcileSchedule `cmd:"" group:"commands" help:"Reconcile a table by the clock."`
}

// reconciliation is a run as the API shows it.
type reconciliation struct {
	ID          int64             `json:"id"`
	Site        string            `json:"site"`
	Table       string            `json:"table"`
	From        string            `json:"from"`
	To          string            `json:"to"`
	Mode        string            `json:"mode"`
	Of          int64             `json:"of"`
	State       backfill.RunState `json:"state"`
	Verdict     proof.Verdict     `json:"verdict"`
	Clean       bool              `json:"clean"`
	Coverage    float64           `json:"coverage"`
	Missed      float64           `json:"missed"`
	Percent     int               `json:"percent"`
	Leaves      map[string]int64  `json:"leaves"`
	Rows        map[string]int64  `json:"rows"`
	Keys        map[string]int64  `json:"keys"`
	Root        string            `json:"root"`
	Excluded    []string          `json:"excluded"`
	RequestedBy string            `json:"requested_by"`
	RequestedAt *time.Time        `json:"requested_at"`
	ClosedAt    *time.Time        `json:"closed_at"`
	Note        string            `json:"note"`
	Reason      string            `json:"reason"`
	Waiting     string            `json:"waiting"`
}

func runPath(n int64, rest ...string) string {
	return strings.Join(append([]string{fmt.Sprintf("/reconciliations/%d", n)}, rest...), "/")
}

// ReconcileStart asks for a comparison.
type ReconcileStart struct {
	Remote
	Site   string `placeholder:"SITE" help:"The site. May be left out when there is only one."`
	Table  string `placeholder:"TABLE" help:"The table, as schema.table. May be left out when the site has only one."`
	From   string `placeholder:"SIDE" help:"The side that has the rows. May be left out when the table is captured from only one."`
	Mode   string `placeholder:"MODE" help:"full (the default: every leaf), sampled (some drawn at random), or leaves (--of and --leaf: one again)."`
	Sample int    `placeholder:"N" help:"How many leaves a sampled reconciliation compares in full (100)."`
	Of     int64  `placeholder:"ID" help:"With --mode leaves: the reconciliation the leaf is of."`
	Leaf   int64  `placeholder:"N" help:"With --mode leaves: the leaf's number."`
	Note   string `placeholder:"TEXT" help:"Why, for the record."`
	Watch  bool   `help:"Follow it to its end; succeed only if the verdict is EQUAL."`
}

func (c *ReconcileStart) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	table, from, err := s.tableAndSide(ctx, site, c.Table, c.From)
	if err != nil {
		return err
	}
	return s.run(ctx, sitePath(site, "reconciliations"), struct {
		Table  string `json:"table"`
		From   string `json:"from"`
		Mode   string `json:"mode,omitempty"`
		Sample int    `json:"sample,omitempty"`
		Of     int64  `json:"of,omitempty"`
		Leaf   int64  `json:"leaf,omitempty"`
		Note   string `json:"note,omitempty"`
	}{table, from, c.Mode, c.Sample, c.Of, c.Leaf, c.Note}, c.Watch)
}

// run asks for a run and follows it if it is wanted.
func (s *session) run(ctx context.Context, path string, body any, watch bool) error {
	raw, err := s.c.call(ctx, http.MethodPost, path, body)
	if err != nil {
		return err
	}
	r, err := decode[*reconciliation](raw)
	if err != nil {
		return err
	}
	if err := answer(s, raw, func(r *reconciliation) {
		s.out.printf("reconciliation %s: %s of %s from %s to %s\n", id(r.ID), r.Mode, r.Table, r.From, r.To)
		if !watch {
			s.note.printf("see how it goes with: backfill reconcile show %s\n", id(r.ID))
		}
	}); err != nil || !watch {
		return err
	}
	return s.watchRun(ctx, r.ID)
}

// watchRun follows a run until it is closed. It fails unless the verdict is EQUAL.
func (s *session) watchRun(ctx context.Context, n int64) error {
	last := ""
	for {
		raw, err := s.c.call(ctx, http.MethodGet, runPath(n), nil)
		var lost *connectionError
		if err != nil && !errors.As(err, &lost) {
			return err
		}
		if err == nil {
			r, err := decode[*reconciliation](raw)
			if err != nil {
				return err
			}
			if line := runLine(r); line != last && !s.json {
				last = line
				s.out.printf("%s\n", line)
			}
			if !r.State.Open() {
				if s.json {
					fmt.Fprintf(s.Out, "%s\n", raw)
				}
				return s.verdict(r)
			}
		}
		if err := sleep(ctx, time.Second); err != nil {
			s.note.printf("reconciliation %s goes on, unwatched\n", id(n))
			return err
		}
	}
}

// runLine is a run on one line.
func runLine(r *reconciliation) string {
	parts := []string{string(r.State)}
	if r.State.Open() {
		parts = append(parts, fmt.Sprintf("%d %%", r.Percent))
	} else {
		parts = append(parts, string(r.Verdict))
	}
	parts = append(parts, fmt.Sprintf("%s leaves, %s equal", thousands(r.Leaves["total"]), thousands(r.Leaves["equal"])))
	for _, kind := range []string{"missing", "different", "surplus", "unknown"} {
		if k := r.Keys[kind]; k > 0 {
			parts = append(parts, thousands(k)+" "+kind)
		}
	}
	if r.Waiting != "" {
		parts = append(parts, "waiting: "+r.Waiting)
	}
	return strings.Join(parts, "  ")
}

func (s *session) verdict(r *reconciliation) error {
	switch {
	case r.State != backfill.RunFinished:
		return fmt.Errorf("reconciliation %d is %s: %s", r.ID, r.State, r.Reason)
	case r.Verdict == proof.Equal:
		return nil
	case r.Keys["open"] > 0:
		s.note.printf("see the keys with: backfill reconcile keys %s\nsend them again with: backfill reconcile repair %s\n", id(r.ID), id(r.ID))
	}
	return fmt.Errorf("reconciliation %d: the verdict is %s", r.ID, r.Verdict)
}

// ReconcileList lists runs.
type ReconcileList struct {
	Remote
	Paging
	Site  string `placeholder:"SITE" help:"Of this site only."`
	Table string `placeholder:"TABLE" help:"Of this table only, as schema.table."`
}

func (c *ReconcileList) Run(ctx context.Context, s *session) error {
	t := s.table("ID", "SITE", "TABLE", "DIRECTION", "MODE", "STATE", "VERDICT", "COVERAGE", "OPEN", "ASKED FOR", "BY")
	_, err := list(ctx, s, c.Paging, "/reconciliations", filters("site", c.Site, "table", c.Table), t, func(r reconciliation) {
		t.row(right(id(r.ID)), r.Site, r.Table, r.From+" → "+r.To, r.Mode, string(r.State), dash(string(r.Verdict)),
			right(fmt.Sprintf("%.4g %%", 100*r.Coverage)), r.Keys["open"], ago(r.RequestedAt), r.RequestedBy)
	})
	return err
}

// ReconcileShow shows one run.
type ReconcileShow struct {
	Remote
	ID    int64 `arg:"" help:"The reconciliation's number."`
	Watch bool  `help:"Follow it to its end; succeed only if the verdict is EQUAL."`
}

func (c *ReconcileShow) Run(ctx context.Context, s *session) error {
	if c.Watch {
		return s.watchRun(ctx, c.ID)
	}
	raw, err := s.c.call(ctx, http.MethodGet, runPath(c.ID), nil)
	if err != nil {
		return err
	}
	return answer(s, raw, s.showRun)
}

func (s *session) showRun(r *reconciliation) {
	line := func(name, format string, args ...any) {
		s.out.printf("  "+fmt.Sprintf("%-12s", name)+format+"\n", args...)
	}
	s.out.printf("reconciliation %s: %s of %s from %s to %s, site %s\n", id(r.ID), r.Mode, r.Table, r.From, r.To, r.Site)
	line("state", "%s", string(r.State))
	if r.Verdict != "" {
		clean := ""
		if r.Clean {
			clean = ", clean"
		}
		line("verdict", "%s%s", string(r.Verdict), clean)
	}
	line("coverage", "%s", fmt.Sprintf("%.4g %% of %s rows", 100*r.Coverage, thousands(r.Rows["source"])))
	if r.Missed > 0 {
		line("", "%s", fmt.Sprintf("up to %.3g %% of the leaves may differ unseen, at 95 %% confidence", 100*r.Missed))
	}
	line("leaves", "%v: %v equal, %v different, %v unknown, %v counted only, %v to come", r.Leaves["total"], r.Leaves["equal"], r.Leaves["different"],
		r.Leaves["unknown"], r.Leaves["counted"], r.Leaves["pending"])
	line("keys", "%v missing, %v different, %v surplus, %v unknown", r.Keys["missing"], r.Keys["different"], r.Keys["surplus"], r.Keys["unknown"])
	line("", "%v open, %v repaired, %v waived", r.Keys["open"], r.Keys["repaired"], r.Keys["waived"])
	for _, text := range []struct{ name, value string }{{"excluded", strings.Join(r.Excluded, ", ")}, {"root", r.Root}, {"waiting", r.Waiting}, {"reason", r.Reason}, {"note", r.Note}} {
		if text.value != "" {
			line(text.name, "%s", text.value)
		}
	}
	line("asked for", "by %s, %s", r.RequestedBy, at(r.RequestedAt))
	if r.ClosedAt != nil {
		line("closed", "%s", at(r.ClosedAt))
	}
}

// difference is a differing key as the API shows it.
type difference struct {
	N        int64        `json:"n"`
	Kind     string       `json:"kind"`
	State    string       `json:"state"`
	Key      backfill.Key `json:"key"`
	Source   row          `json:"source"`
	Receiver row          `json:"receiver"`
	Columns  []string     `json:"columns"`
	Cause    string       `json:"cause"`
}

// ReconcileKeys lists differing keys.
type ReconcileKeys struct {
	Remote
	Paging
	ID    int64  `arg:"" help:"The reconciliation's number."`
	Kind  string `placeholder:"KIND" help:"Only these: missing, different or surplus."`
	Which string `placeholder:"STATE" help:"Only these: open, repaired, waived, or unknown for keys that never came to rest."`
}

func (c *ReconcileKeys) Run(ctx context.Context, s *session) error {
	t := s.table("N", "KEY", "KIND", "STATE", "CAUSE", "VALUES")
	_, err := list(ctx, s, c.Paging, runPath(c.ID, "keys"), filters("kind", c.Kind, "state", c.Which), t, func(d difference) {
		t.row(right(id(d.N)), d.Key.String(), d.Kind, d.State, d.Cause, content(&stagedRow{Row: orOther(d.Source, d.Receiver), Receiver: d.Receiver, Changed: d.Columns}))
	})
	return err
}

func orOther(a, b row) row {
	if a == nil {
		return b
	}
	return a
}

// settle has what repairing and waiving have in common.
type settle struct {
	Remote
	ID   int64   `arg:"" help:"The reconciliation's number."`
	Key  []int64 `placeholder:"N" help:"Only the difference of this number, as reconcile keys lists it; may be repeated."`
	Note string  `placeholder:"TEXT" help:"Why, for the record."`
}

func (c *settle) body() any {
	return struct {
		Keys []int64 `json:"keys,omitempty"`
		Note string  `json:"note,omitempty"`
	}{c.Key, c.Note}
}

// ReconcileRepair sends differing rows again.
type ReconcileRepair struct {
	settle
	Watch bool `help:"Follow the comparison of their leaves to its end; succeed only if the verdict is EQUAL."`
}

func (c *ReconcileRepair) Run(ctx context.Context, s *session) error {
	return s.run(ctx, runPath(c.ID, "repair"), c.body(), c.Watch)
}

// ReconcileWaive lets differences be.
type ReconcileWaive struct{ settle }

func (c *ReconcileWaive) Run(ctx context.Context, s *session) error {
	raw, err := s.c.call(ctx, http.MethodPost, runPath(c.ID, "waive"), c.body())
	if err != nil {
		return err
	}
	return answer(s, raw, func(r *reconciliation) {
		s.out.printf("reconciliation %s: %v waived, %v still open\n", id(r.ID), r.Keys["waived"], r.Keys["open"])
	})
}

// ReconcileCancel ends a run.
type ReconcileCancel struct{ Hold }

func (c *ReconcileCancel) Run(ctx context.Context, s *session) error {
	raw, err := s.c.call(ctx, http.MethodPost, runPath(c.ID, "cancel"), struct {
		Note string `json:"note,omitempty"`
	}{c.Note})
	if err != nil {
		return err
	}
	return answer(s, raw, func(r *reconciliation) {
		s.out.printf("cancelled reconciliation %s: %s\n", id(r.ID), runLine(r))
	})
}

// Certificate prints a certificate.
type Certificate struct {
	Remote
	ID int64 `arg:"" help:"The reconciliation's number."`
}

func (c *Certificate) Run(ctx context.Context, s *session) error {
	raw, err := s.c.call(ctx, http.MethodGet, runPath(c.ID, "certificate"), nil)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(s.Out, "%s\n", raw)
	return err
}

// VerifyCertificate checks a certificate.
type VerifyCertificate struct {
	Remote
	File string `arg:"" help:"The certificate, - for standard input."`
	Key  string `placeholder:"BASE64" help:"The public key of the installation that is said to have made it. Left out: the API is asked for its own."`
}

// ProvideSession is how kong makes the *session that a Run method asks for: with the
// key given, no API is needed.
func (c *VerifyCertificate) ProvideSession(s *Streams) (*session, error) {
	if c.Key != "" {
		return &session{Streams: s, out: printer{s.Out}, note: printer{s.Err}, json: c.JSON}, nil
	}
	return c.Remote.ProvideSession(s)
}

func (c *VerifyCertificate) Run(ctx context.Context, s *session) error {
	var raw []byte
	var err error
	if c.File == "-" {
		raw, err = io.ReadAll(os.Stdin)
	} else {
		raw, err = os.ReadFile(c.File)
	}
	if err != nil {
		return fmt.Errorf("read the certificate: %w", err)
	}
	key := c.Key
	if key == "" {
		k, err := get[struct {
			Key string `json:"key"`
		}](ctx, s.c, "/certificate-key")
		if err != nil {
			return err
		}
		key = k.Key
	}
	signed, err := proof.Verify(raw, key)
	if err != nil {
		return fmt.Errorf("the certificate is not valid: %w", err)
	}
	if s.json {
		_, err := fmt.Fprintf(s.Out, "%s\n", signed.Statement)
		return err
	}
	var v struct {
		Reconciliation int64  `json:"reconciliation"`
		Table          string `json:"table"`
		From           string `json:"from"`
		To             string `json:"to"`
		Mode           string `json:"mode"`
		Verdict        string `json:"verdict"`
		Clean          bool   `json:"clean"`
		ClosedAt       string `json:"closed_at"`
		Rows           struct {
			Source  int64 `json:"source"`
			Covered int64 `json:"covered"`
		} `json:"rows"`
	}
	if err := json.Unmarshal(signed.Statement, &v); err != nil {
		return fmt.Errorf("the statement cannot be read: %w", err)
	}
	s.out.printf("valid: reconciliation %s (%s) of %s from %s to %s, closed %s\n", id(v.Reconciliation), v.Mode, v.Table, v.From, v.To, v.ClosedAt)
	s.out.printf("verdict %s, %v of %v rows covered\n", v.Verdict, v.Rows.Covered, v.Rows.Source)
	return nil
}

// ReconcileSchedule makes a table be reconciled by the clock.
type ReconcileSchedule struct {
	Remote
	Site   string        `placeholder:"SITE" help:"The site. May be left out when there is only one."`
	Table  string        `placeholder:"TABLE" help:"The table, as schema.table. May be left out when the site has only one."`
	From   string        `placeholder:"SIDE" help:"The side that has the rows. May be left out when the table is captured from only one."`
	Every  time.Duration `placeholder:"TIME" help:"How often, for example 24h; at least 1m."`
	Mode   string        `placeholder:"MODE" help:"full (the default) or sampled."`
	Sample int           `placeholder:"N" help:"How many leaves a sampled reconciliation compares in full (100)."`
	Off    bool          `help:"No longer by the clock."`
}

// Validate is kong's hook for what a flag's type cannot say.
func (c *ReconcileSchedule) Validate() error {
	if c.Off == (c.Every != 0) {
		return errors.New("give --every TIME or --off")
	}
	return nil
}

func (c *ReconcileSchedule) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	table, from, err := s.tableAndSide(ctx, site, c.Table, c.From)
	if err != nil {
		return err
	}
	body := struct {
		From   string `json:"from"`
		Every  *int64 `json:"every_seconds"`
		Mode   string `json:"mode,omitempty"`
		Sample int    `json:"sample,omitempty"`
	}{From: from, Mode: c.Mode, Sample: c.Sample}
	if !c.Off {
		seconds := int64(c.Every / time.Second)
		body.Every = &seconds
	}
	raw, err := s.c.call(ctx, http.MethodPut, sitePath(site, "tables", table, "schedule"), body)
	if err != nil {
		return err
	}
	return answer(s, raw, func(v struct {
		Every *int64 `json:"every_seconds"`
		Mode  string `json:"mode"`
	}) {
		if v.Every == nil {
			s.out.printf("%s is no longer reconciled by the clock\n", table)
			return
		}
		s.out.printf("%s is reconciled (%s) every %s\n", table, v.Mode, short(time.Duration(*v.Every)*time.Second))
	})
}
