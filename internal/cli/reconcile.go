package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"backfill/api/client"
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
	a, err := s.c.RequestReconciliation(ctx, site, client.RequestReconciliationJSONBody{Table: table, From: from,
		Mode: given(client.RequestReconciliationJSONBodyMode(c.Mode)), Sample: given(c.Sample), Of: given(c.Of), Leaf: given(c.Leaf), Note: given(c.Note)})
	if err != nil {
		return err
	}
	return s.run(ctx, a, c.Watch)
}

// run shows a run that was asked for, and follows it if that is wanted.
func (s *session) run(ctx context.Context, a client.Answer[client.Reconciliation], watch bool) error {
	if err := answer(s, a, func(r *client.Reconciliation) {
		s.out.printf("reconciliation %s: %s of %s from %s to %s\n", id(r.ID), r.Mode, r.Table, r.From, r.To)
		if !watch {
			s.note.printf("see how it goes with: backfill reconcile show %s\n", id(r.ID))
		}
	}); err != nil || !watch {
		return err
	}
	return s.watchRun(ctx, a.Value.ID)
}

// watchRun follows a run until it is closed. It fails unless the verdict is EQUAL.
func (s *session) watchRun(ctx context.Context, n int64) error {
	last := ""
	for {
		a, err := s.c.GetReconciliation(ctx, n)
		var lost *client.Unreachable
		if err != nil && !errors.As(err, &lost) {
			return err
		}
		if err == nil {
			r := &a.Value
			if line := runLine(r); line != last && !s.json {
				last = line
				s.out.printf("%s\n", line)
			}
			if !running(r) {
				if s.json {
					fmt.Fprintf(s.Out, "%s\n", a.Raw)
				}
				return s.verdict(r)
			}
		}
		if err := wait(ctx, time.Second); err != nil {
			s.note.printf("reconciliation %s goes on, unwatched\n", id(n))
			return err
		}
	}
}

func running(r *client.Reconciliation) bool { return backfill.RunState(r.State).Open() }

// wait is a pause that ctx can end.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// runLine is a run on one line.
func runLine(r *client.Reconciliation) string {
	parts := []string{string(r.State)}
	if running(r) {
		parts = append(parts, fmt.Sprintf("%d %%", r.Percent))
	} else {
		parts = append(parts, string(plain(r.Verdict)))
	}
	parts = append(parts, fmt.Sprintf("%s leaves, %s equal", thousands(int64(r.Leaves["total"])), thousands(int64(r.Leaves["equal"]))))
	for _, kind := range []string{"missing", "different", "surplus", "unknown"} {
		if k := r.Keys[kind]; k > 0 {
			parts = append(parts, thousands(int64(k))+" "+kind)
		}
	}
	if r.Waiting != "" {
		parts = append(parts, "waiting: "+r.Waiting)
	}
	return strings.Join(parts, "  ")
}

func (s *session) verdict(r *client.Reconciliation) error {
	switch {
	case r.State != client.ReconciliationStateFinished:
		return fmt.Errorf("reconciliation %d is %s: %s", r.ID, r.State, r.Reason)
	case plain(r.Verdict) == client.ReconciliationVerdictEqual:
		return nil
	case r.Keys["open"] > 0:
		s.note.printf("see the keys with: backfill reconcile keys %s\nsend them again with: backfill reconcile repair %s\n", id(r.ID), id(r.ID))
	}
	return fmt.Errorf("reconciliation %d: the verdict is %s", r.ID, plain(r.Verdict))
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
	params := client.ListReconciliationsParams{Site: given(c.Site), Table: given(c.Table)}
	_, err := list(s, c.Paging, t, func(r *client.Reconciliation) {
		t.row(right(id(r.ID)), r.Site, r.Table, r.From+" → "+r.To, string(r.Mode), string(r.State), dash(string(plain(r.Verdict))),
			right(fmt.Sprintf("%.4g %%", 100*r.Coverage)), int64(r.Keys["open"]), ago(&r.RequestedAt), r.RequestedBy)
	}, func(cursor *client.Cursor, n *client.Limit) (client.Answer[client.Page[client.Reconciliation]], error) {
		params.Cursor, params.Limit = cursor, n
		return s.c.ListReconciliations(ctx, &params)
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
	a, err := s.c.GetReconciliation(ctx, c.ID)
	if err != nil {
		return err
	}
	return answer(s, a, s.showRun)
}

func (s *session) showRun(r *client.Reconciliation) {
	line := func(name, format string, args ...any) {
		s.out.printf("  "+fmt.Sprintf("%-12s", name)+format+"\n", args...)
	}
	s.out.printf("reconciliation %s: %s of %s from %s to %s, site %s\n", id(r.ID), r.Mode, r.Table, r.From, r.To, r.Site)
	line("state", "%s", string(r.State))
	if r.Verdict != nil {
		clean := ""
		if r.Clean {
			clean = ", clean"
		}
		line("verdict", "%s%s", string(*r.Verdict), clean)
	}
	line("coverage", "%s", fmt.Sprintf("%.4g %% of %s rows", 100*r.Coverage, thousands(int64(r.Rows["source"]))))
	if r.Missed > 0 {
		line("", "%s", fmt.Sprintf("up to %.3g %% of the leaves may differ unseen, at 95 %% confidence", 100*r.Missed))
	}
	line("leaves", "%v: %v equal, %v different, %v unknown, %v counted only, %v to come", int64(r.Leaves["total"]), int64(r.Leaves["equal"]), int64(r.Leaves["different"]),
		int64(r.Leaves["unknown"]), int64(r.Leaves["counted"]), int64(r.Leaves["pending"]))
	line("keys", "%v missing, %v different, %v surplus, %v unknown", int64(r.Keys["missing"]), int64(r.Keys["different"]), int64(r.Keys["surplus"]), int64(r.Keys["unknown"]))
	line("", "%v open, %v repaired, %v waived", int64(r.Keys["open"]), int64(r.Keys["repaired"]), int64(r.Keys["waived"]))
	for _, text := range []struct{ name, value string }{{"excluded", strings.Join(r.Excluded, ", ")}, {"root", plain(r.Root)}, {"waiting", r.Waiting}, {"reason", r.Reason}, {"note", r.Note}} {
		if text.value != "" {
			line(text.name, "%s", text.value)
		}
	}
	line("asked for", "by %s, %s", r.RequestedBy, at(&r.RequestedAt))
	if r.ClosedAt != nil {
		line("closed", "%s", at(r.ClosedAt))
	}
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
	params := client.ListDifferencesParams{Kind: given(client.ListDifferencesParamsKind(c.Kind)), State: given(client.ListDifferencesParamsState(c.Which))}
	_, err := list(s, c.Paging, t, func(d *client.Difference) {
		t.row(right(id(d.N)), keyLine(d.Key), string(d.Kind), string(d.State), d.Cause,
			content(&client.StagedRow{Row: orOther(d.Source, d.Receiver), Receiver: d.Receiver, Changed: d.Columns}))
	}, func(cursor *client.Cursor, n *client.Limit) (client.Answer[client.Page[client.Difference]], error) {
		params.Cursor, params.Limit = cursor, n
		return s.c.ListDifferences(ctx, c.ID, &params)
	})
	return err
}

func orOther(a, b client.Row) client.Row {
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

// ReconcileRepair sends differing rows again.
type ReconcileRepair struct {
	settle
	Watch bool `help:"Follow the comparison of their leaves to its end; succeed only if the verdict is EQUAL."`
}

func (c *ReconcileRepair) Run(ctx context.Context, s *session) error {
	a, err := s.c.Repair(ctx, c.ID, client.RepairJSONBody{Keys: c.Key, Note: given(c.Note)})
	if err != nil {
		return err
	}
	return s.run(ctx, a, c.Watch)
}

// ReconcileWaive lets differences be.
type ReconcileWaive struct{ settle }

func (c *ReconcileWaive) Run(ctx context.Context, s *session) error {
	a, err := s.c.Waive(ctx, c.ID, client.WaiveJSONBody{Keys: c.Key, Note: given(c.Note)})
	if err != nil {
		return err
	}
	return answer(s, a, func(r *client.Reconciliation) {
		s.out.printf("reconciliation %s: %v waived, %v still open\n", id(r.ID), int64(r.Keys["waived"]), int64(r.Keys["open"]))
	})
}

// ReconcileCancel ends a run.
type ReconcileCancel struct{ Hold }

func (c *ReconcileCancel) Run(ctx context.Context, s *session) error {
	a, err := s.c.CancelReconciliation(ctx, c.ID, &client.CancelReconciliationJSONBody{Note: given(c.Note)})
	if err != nil {
		return err
	}
	return answer(s, a, func(r *client.Reconciliation) {
		s.out.printf("cancelled reconciliation %s: %s\n", id(r.ID), runLine(r))
	})
}

// Certificate prints a certificate.
type Certificate struct {
	Remote
	ID int64 `arg:"" help:"The reconciliation's number."`
}

func (c *Certificate) Run(ctx context.Context, s *session) error {
	a, err := s.c.Certificate(ctx, c.ID)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(s.Out, "%s\n", a.Raw)
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
		a, err := s.c.CertificateKey(ctx)
		if err != nil {
			return err
		}
		key = a.Value.Key
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
	body := client.PutScheduleJSONBody{From: from, Mode: given(client.PutScheduleJSONBodyMode(c.Mode)), Sample: given(c.Sample)}
	if !c.Off {
		body.EverySeconds = new(int(c.Every / time.Second))
	}
	a, err := s.c.PutSchedule(ctx, site, table, body)
	if err != nil {
		return err
	}
	return answer(s, a, func(v *client.Schedule) {
		if v.EverySeconds == nil {
			s.out.printf("%s is no longer reconciled by the clock\n", table)
			return
		}
		s.out.printf("%s is reconciled (%s) every %s\n", table, v.Mode, short(time.Duration(*v.EverySeconds)*time.Second))
	})
}
