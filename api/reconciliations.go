package api

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/proof"
)

// ReconcileInput is a comparison that somebody asks for.
type ReconcileInput struct {
	Site, Table, From string
	Mode              string // "" or "full"; sampled; leaves
	Sample            int    // of mode sampled
	Of, Leaf          int64  // of mode leaves: a run and one of its leaves
	Note              string
}

// defaultSample is how many leaves a sampled run compares unless told otherwise.
const defaultSample = 100

// RequestReconciliation records a comparison and returns at once; both agents do the
// work. It is a Conflict that names the open run when there is one.
func (s *Service) RequestReconciliation(ctx context.Context, a Account, in ReconcileInput) (*backfill.Reconciliation, error) {
	if err := a.needs(control.Requester, "requesting a reconciliation"); err != nil {
		return nil, err
	}
	if err := checkNote(in.Note); err != nil {
		return nil, err
	}
	p, err := s.Store.Panel(ctx, in.Site, in.Table, in.From)
	if err != nil {
		return nil, err
	}
	n := control.NewReconciliation{Direction: p.Direction.ID, TableID: p.Table.ID, Mode: backfill.RunMode(in.Mode), Sample: in.Sample, By: a.Name, Note: in.Note}
	if in.Mode == "" {
		n.Mode = backfill.RunFull
	}
	switch n.Mode {
	case backfill.RunFull:
	case backfill.RunSampled:
		if n.Sample == 0 {
			n.Sample = defaultSample
		}
	case backfill.RunLeaves:
		if site, err := s.Store.SiteOf(ctx, control.Event{Kind: "reconciliation", ID: in.Of}); err != nil || site != in.Site {
			return nil, cmp.Or(err, error(backfill.Errorf(backfill.NotFound, "no reconciliation %d", in.Of)))
		}
		of, err := s.parent(ctx, in.Of)
		if err != nil {
			return nil, err
		}
		if of.Direction.ID != n.Direction || of.TableID != n.TableID {
			return nil, fieldError(backfill.Invalid, "of", "is a reconciliation of another table or direction")
		}
		n.Parent, n.Leaf = in.Of, in.Leaf
	default:
		return nil, fieldError(backfill.Invalid, "mode", "use full, sampled or leaves")
	}
	if n.Mode != backfill.RunSampled && n.Sample != 0 {
		return nil, fieldError(backfill.Invalid, "sample", "is for mode sampled")
	}
	if n.Mode != backfill.RunLeaves && (in.Of != 0 || in.Leaf != 0) {
		return nil, fieldError(backfill.Invalid, "of", "is for mode leaves")
	}
	if !p.Table.Captures(in.From) {
		return nil, backfill.Errorf(backfill.Refused, "changes of %s are not captured from %s: rows in flight could not be told from differences", p.Table.Name, in.From)
	}
	return s.startRun(ctx, n)
}

func (s *Service) startRun(ctx context.Context, n control.NewReconciliation) (*backfill.Reconciliation, error) {
	r, err := s.Store.CreateReconciliation(ctx, n)
	if err != nil {
		return nil, err
	}
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
	defer cancel()
	if err := s.Runs.Reconcile(limit, r); err != nil {
		s.Log.Warn("the workflow was not started; the next sweep will", zap.Int64("reconciliation", r.ID), zap.String("workflow", r.WorkflowID()), zap.Error(err))
	}
	return r, nil
}

// parent is a run whose leaves can be looked at again.
func (s *Service) parent(ctx context.Context, id int64) (*backfill.Reconciliation, error) {
	r, err := s.Store.Reconciliation(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case r.Parent != 0:
		return nil, backfill.Errorf(backfill.Refused, "reconciliation %d looked at leaves of reconciliation %d again: go on from that one", id, r.Parent)
	case r.State != backfill.RunFinished:
		return nil, backfill.Errorf(backfill.Refused, "reconciliation %d is %s: only a finished one can be gone on from", id, r.State)
	}
	return r, nil
}

// Repair sends the rows of a run's missing and different keys again, as they are
// then, and compares their leaves again in a run of its own, which is returned. keys
// are the numbers of differences, nil for all that are open. Surplus rows are never
// deleted. The decision is recorded with the keys.
func (s *Service) Repair(ctx context.Context, a Account, id int64, keys []int64, note string) (*backfill.Reconciliation, error) {
	if err := a.needs(control.Reviewer, "repairing"); err != nil {
		return nil, err
	}
	if err := checkNote(note); err != nil {
		return nil, err
	}
	r, err := s.parent(ctx, id)
	if err != nil {
		return nil, err
	}
	p, err := s.Store.Panel(ctx, r.Site, r.Table, r.From)
	if err != nil {
		return nil, err
	}
	if err := refused(p.Conditions(true)); err != nil {
		return nil, err
	}
	return s.startRun(ctx, control.NewReconciliation{Direction: r.Direction.ID, TableID: r.TableID, Mode: backfill.RunRepair, Parent: id, Keys: keys, By: a.Name, Note: note})
}

// Waive records that differences are let be, and why.
func (s *Service) Waive(ctx context.Context, a Account, id int64, keys []int64, note string) (*backfill.Reconciliation, error) {
	if err := a.needs(control.Reviewer, "waiving a difference"); err != nil {
		return nil, err
	}
	if err := checkNote(note); err != nil {
		return nil, err
	}
	if strings.TrimSpace(note) == "" {
		return nil, fieldError(backfill.Invalid, "note", "is empty: a difference is let be for a reason")
	}
	if _, err := s.parent(ctx, id); err != nil {
		return nil, err
	}
	n, err := s.Store.Waive(ctx, id, keys, a.Name, note)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, backfill.Errorf(backfill.Refused, "reconciliation %d has none of these keys open: there is nothing to waive", id)
	}
	return s.Store.Reconciliation(ctx, id)
}

// EndReconciliation cancels an open run. What it has found stays readable.
func (s *Service) EndReconciliation(ctx context.Context, a Account, id int64, note string) (*backfill.Reconciliation, error) {
	if err := a.needs(control.Requester, "cancelling"); err != nil {
		return nil, err
	}
	if err := checkNote(note); err != nil {
		return nil, err
	}
	reason := "cancelled by " + a.Name
	if note != "" {
		reason += ": " + note
	}
	return s.Store.EndRun(ctx, id, a.Name, backfill.RunCancelled, reason)
}

// Schedule makes a table be reconciled by the clock; nil ends that.
func (s *Service) Schedule(ctx context.Context, a Account, site, table, from string, c *control.Schedule) error {
	if err := a.needs(control.Admin, "scheduling reconciliations"); err != nil {
		return err
	}
	p, err := s.Store.Panel(ctx, site, table, from)
	if err != nil {
		return err
	}
	if c != nil && !p.Table.Captures(from) {
		return backfill.Errorf(backfill.Refused, "changes of %s are not captured from %s", p.Table.Name, from)
	}
	return s.Store.PutSchedule(ctx, a.Name, p.Direction, &p.Table, c)
}

// Certificate is the signed statement of what a finished run has found. Its numbers
// are integers, so that it has one text only.
func (s *Service) Certificate(ctx context.Context, id int64) (*proof.Signed, error) {
	r, err := s.Store.Reconciliation(ctx, id)
	if err != nil {
		return nil, err
	}
	if r.State != backfill.RunFinished {
		return nil, backfill.Errorf(backfill.Conflict, "reconciliation %d is %s: only a finished one is certified", id, r.State)
	}
	decisions, err := s.Store.Decisions(ctx, id)
	if err != nil {
		return nil, err
	}
	source, err := s.Layout(ctx, r.LayoutID)
	if err != nil {
		return nil, err
	}
	receiver, err := s.Layout(ctx, r.ReceiverLayoutID)
	if err != nil {
		return nil, err
	}
	key, err := s.Store.SigningKey(ctx)
	if err != nil {
		return nil, err
	}
	columns := slices.DeleteFunc(columnNames(source), func(c string) bool { return slices.Contains(r.Excluded, c) })
	c := r.Counts
	return proof.Sign(key, map[string]any{
		"version": 1, "reconciliation": r.ID, "mode": r.Mode, "site": r.Site, "table": r.Table, "from": r.From, "to": r.To,
		"requested_by": r.RequestedBy, "started_at": stamp(r.StartedAt), "closed_at": stamp(r.ClosedAt),
		"verdict": r.Verdict, "clean": r.Clean(), "root": r.Root,
		"normaliser": r.Normaliser, "columns": columns, "excluded": orEmpty(r.Excluded), "key": source.Key,
		"source_layout": source.Fingerprint(), "receiver_layout": receiver.Fingerprint(), "snapshot": r.Floor,
		"leaves":  map[string]any{"total": r.LeafCount, "equal": c.Equal, "different": c.Different, "unknown": c.Unknown, "counted": c.Counted, "buckets": r.Buckets},
		"rows":    map[string]any{"source": c.Rows, "receiver": r.ReceiverRows, "covered": c.Covered},
		"keys":    map[string]any{"missing": c.Missing, "different": c.DifferentValues, "surplus": c.Surplus, "unknown": c.Unsettled},
		"open":    c.Open,
		"missed":  int64(math.Ceil(Missed(r) * 1e6)), // leaves in a million that may differ unseen, at 95 %
		"repairs": decisions.Repairs, "waived": decisions.Waivers,
	})
}

func stamp(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// Missed is the highest share of leaves that may differ without the run having seen
// it, at 95 % confidence: 0 when all were compared.
func Missed(r *backfill.Reconciliation) float64 {
	if r.Mode != backfill.RunSampled {
		return 0
	}
	return proof.Missed(r.LeafCount-r.Counts.Counted, r.LeafCount)
}

func reconciliationPath(id int64) string {
	return prefix + "/reconciliations/" + strconv.FormatInt(id, 10)
}

type reconciliationJSON struct {
	ID          int64             `json:"id"`
	Site        string            `json:"site"`
	Table       string            `json:"table"`
	From        string            `json:"from"`
	To          string            `json:"to"`
	Mode        backfill.RunMode  `json:"mode"`
	Sample      *int              `json:"sample"`
	Of          *int64            `json:"of"`
	State       backfill.RunState `json:"state"`
	Verdict     *string           `json:"verdict"`
	Clean       bool              `json:"clean"`
	Coverage    float64           `json:"coverage"`
	Missed      float64           `json:"missed"`
	Percent     int               `json:"percent"`
	Leaves      map[string]int64  `json:"leaves"`
	Rows        map[string]int64  `json:"rows"`
	Keys        map[string]int64  `json:"keys"`
	Root        *string           `json:"root"`
	Ranges      string            `json:"ranges"`
	LeafRows    int               `json:"leaf_rows"`
	Excluded    []string          `json:"excluded"`
	RequestedBy string            `json:"requested_by"`
	RequestedAt time.Time         `json:"requested_at"`
	StartedAt   *time.Time        `json:"started_at"`
	ClosedAt    *time.Time        `json:"closed_at"`
	Note        string            `json:"note"`
	Reason      string            `json:"reason"`
	Waiting     string            `json:"waiting"`
	WorkflowID  string            `json:"workflow_id"`
	ConsoleURL  *string           `json:"console_url"`
	Links       map[string]string `json:"links"`
}

func (s *Server) showRun(r *backfill.Reconciliation) reconciliationJSON {
	c := r.Counts
	out := reconciliationJSON{
		ID: r.ID, Site: r.Site, Table: r.Table, From: r.From, To: r.To, Mode: r.Mode, State: r.State, Verdict: orNull(r.Verdict), Clean: r.Clean(),
		Coverage: control.TallyOf(r).Coverage(), Missed: Missed(r), Percent: r.Percent(),
		Leaves: map[string]int64{"total": c.Equal + c.Different + c.Unknown + c.Counted + c.Pending, "equal": c.Equal, "different": c.Different, "unknown": c.Unknown, "counted": c.Counted, "pending": c.Pending},
		Rows:   map[string]int64{"source": c.Rows, "receiver": r.ReceiverRows, "covered": c.Covered},
		Keys: map[string]int64{"missing": c.Missing, "different": c.DifferentValues, "surplus": c.Surplus, "unknown": c.Unsettled,
			"open": c.Open, "repaired": c.Repaired, "waived": c.Waived},
		Root: orNull(r.Root), Ranges: "keys", LeafRows: r.LeafRows, Excluded: orEmpty(r.Excluded),
		RequestedBy: r.RequestedBy, RequestedAt: r.RequestedAt, StartedAt: r.StartedAt, ClosedAt: r.ClosedAt, Note: r.Note, Reason: r.Reason, Waiting: r.Waiting,
		WorkflowID: r.WorkflowID(), ConsoleURL: orNull(s.service.RunConsole(r)), Links: map[string]string{},
	}
	if r.Sample > 0 {
		out.Sample = &r.Sample
	}
	if r.Parent > 0 {
		out.Of = &r.Parent
	}
	if r.Buckets > 0 {
		out.Ranges = "buckets"
	}
	self := reconciliationPath(r.ID)
	out.Links["self"], out.Links["leaves"], out.Links["keys"] = self, self+"/leaves", self+"/keys"
	switch {
	case r.State.Open():
		out.Links["cancel"] = self + "/cancel"
	case r.State == backfill.RunFinished:
		out.Links["certificate"] = self + "/certificate"
		if c.Open > 0 && r.Parent == 0 {
			out.Links["repair"], out.Links["waive"] = self+"/repair", self+"/waive"
		}
	}
	return out
}

// answerRun shows a run, or fails.
func (s *Server) answerRun(c echo.Context, status int) func(*backfill.Reconciliation, error) error {
	return func(r *backfill.Reconciliation, err error) error {
		if err != nil {
			return err
		}
		if status == http.StatusCreated {
			c.Response().Header().Set(echo.HeaderLocation, reconciliationPath(r.ID))
		}
		return c.JSON(status, s.showRun(r))
	}
}

func (s *Server) requestReconciliation(c echo.Context) error {
	var in struct {
		Table  string `json:"table"`
		From   string `json:"from"`
		Mode   string `json:"mode"`
		Sample int    `json:"sample"`
		Of     int64  `json:"of"`
		Leaf   int64  `json:"leaf"`
		Note   string `json:"note"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	return s.answerRun(c, http.StatusCreated)(s.service.RequestReconciliation(c.Request().Context(), accountOf(c),
		ReconcileInput{Site: c.Param("site"), Table: in.Table, From: in.From, Mode: in.Mode, Sample: in.Sample, Of: in.Of, Leaf: in.Leaf, Note: in.Note}))
}

// Reconciliations lists runs newest first.
func (s *Service) Reconciliations(ctx context.Context, f control.RunFilter) ([]*backfill.Reconciliation, error) {
	var err error
	if f.Table, err = s.resolve(ctx, f.Site, f.Table, f.From); err != nil {
		return nil, err
	}
	return s.Store.Reconciliations(ctx, f)
}

func (s *Server) listReconciliations(c echo.Context) error {
	before, err := positionOf(c)
	if err != nil {
		return err
	}
	site, only, err := siteFilter(c)
	if err != nil {
		return err
	}
	all, err := s.service.Reconciliations(c.Request().Context(), control.RunFilter{
		Site: site, Sites: only, Table: c.QueryParam("table"), From: c.QueryParam("from"), Before: before, Limit: limitOf(c) + 1})
	if err != nil {
		return err
	}
	return listPage(c, all, func(r *backfill.Reconciliation) int64 { return r.ID }, s.showRun)
}

// Reconciliation returns one run, or NotFound.
func (s *Service) Reconciliation(ctx context.Context, id int64) (*backfill.Reconciliation, error) {
	return s.Store.Reconciliation(ctx, id)
}

// RunConsole is the address of a run's workflow in the engine's web console, or "".
func (s *Service) RunConsole(r *backfill.Reconciliation) string { return s.console(r.WorkflowID()) }

// LeafMap shows a run's leaves in at most limit cells of per leaves each.
func (s *Service) LeafMap(ctx context.Context, r *backfill.Reconciliation, limit int64) (cells []control.MapCell, per int64, err error) {
	per = max((r.LeafCount+limit-1)/limit, 1)
	cells, err = s.Store.LeafMap(ctx, r.ID, per)
	return cells, per, err
}

// ofRun handles what is asked of one run.
func (s *Server) ofRun(do func(c echo.Context, id int64) error) echo.HandlerFunc {
	return func(c echo.Context) error {
		id, err := idOf(c, "id")
		if err != nil {
			return err
		}
		return do(c, id)
	}
}

func (s *Server) getReconciliation(c echo.Context, id int64) error {
	return s.answerRun(c, http.StatusOK)(s.service.Reconciliation(c.Request().Context(), id))
}

type leafJSON struct {
	N        int64        `json:"n"`
	State    string       `json:"state"`
	Lower    backfill.Key `json:"lower"`
	Upper    backfill.Key `json:"upper"`
	Bucket   *int32       `json:"bucket"`
	Sampled  bool         `json:"sampled"`
	Source   sideOfLeaf   `json:"source"`
	Receiver sideOfLeaf   `json:"receiver"`
	Keys     int64        `json:"keys"`
	Open     int64        `json:"open"`
	Attempts int          `json:"attempts"`
	JudgedAt *time.Time   `json:"judged_at"`
}

type sideOfLeaf struct {
	Rows int64   `json:"rows"`
	Hash *string `json:"hash"`
}

func showLeaf(l control.RunLeaf) leafJSON {
	out := leafJSON{N: l.N, State: l.Shown, Lower: l.Lower, Upper: l.Upper, Sampled: l.Sampled, Keys: l.Keys, Open: l.OpenKeys, Attempts: l.Attempts, JudgedAt: l.JudgedAt,
		Source: sideOfLeaf{l.Count, orNull(l.Digest)}, Receiver: sideOfLeaf{l.Receiver.Count, orNull(l.Receiver.Digest)}}
	if l.Buckets > 0 {
		out.Bucket = &l.Bucket
	}
	return out
}

func (s *Server) listLeaves(c echo.Context, id int64) error {
	after, err := positionOf(c)
	if err != nil {
		return err
	}
	if _, err := s.service.Store.Run(c.Request().Context(), id); err != nil {
		return err
	}
	all, err := s.service.Store.RunLeaves(c.Request().Context(), id, control.LeafFilter{State: c.QueryParam("state"), After: after, Limit: limitOf(c) + 1})
	if err != nil {
		return err
	}
	return listPage(c, all, func(l control.RunLeaf) int64 { return l.N }, showLeaf)
}

type differenceJSON struct {
	N         int64                   `json:"n"`
	Leaf      int64                   `json:"leaf"`
	Kind      backfill.DifferenceKind `json:"kind"`
	State     string                  `json:"state"`
	Key       backfill.Key            `json:"key"`
	Source    *rowJSON                `json:"source"`
	Receiver  *rowJSON                `json:"receiver"`
	Columns   []string                `json:"columns"`
	Cause     string                  `json:"cause"`
	DecidedBy *string                 `json:"decided_by"`
	DecidedAt *time.Time              `json:"decided_at"`
	Note      string                  `json:"note"`
}

// Differing is a run's differing keys, and the columns of their rows in order.
type Differing struct {
	Columns []string
	Keys    []control.Difference
}

// Differences lists a run's differing keys.
func (s *Service) Differences(ctx context.Context, id int64, f control.DifferenceFilter) (*Differing, error) {
	r, err := s.Store.Run(ctx, id)
	if err != nil {
		return nil, err
	}
	out := &Differing{}
	if r.LayoutID == 0 {
		return out, nil
	}
	l, err := s.Layout(ctx, r.LayoutID)
	if err != nil {
		return nil, err
	}
	out.Columns = slices.DeleteFunc(columnNames(l), func(c string) bool { return slices.Contains(r.Excluded, c) })
	out.Keys, err = s.Store.Differences(ctx, id, f)
	return out, err
}

// Unlike names the columns in which the two rows of a differing key differ.
func (d *Differing) Unlike(k control.Difference) []string {
	return Changed(d.Columns, control.StagedRow{Row: k.Source, Receiver: k.Receiver})
}

func (s *Server) listDifferences(c echo.Context, id int64) error {
	after, err := positionOf(c)
	if err != nil {
		return err
	}
	d, err := s.service.Differences(c.Request().Context(), id, control.DifferenceFilter{Kind: c.QueryParam("kind"), State: c.QueryParam("state"), After: after, Limit: limitOf(c) + 1})
	if err != nil {
		return err
	}
	return listPage(c, d.Keys, func(k control.Difference) int64 { return k.N }, func(k control.Difference) differenceJSON {
		return differenceJSON{N: k.N, Leaf: k.Leaf, Kind: k.Kind, State: k.State, Key: k.Key, Source: newRow(d.Columns, k.Source), Receiver: newRow(d.Columns, k.Receiver),
			Columns: d.Unlike(k), Cause: k.Cause, DecidedBy: orNull(k.DecidedBy), DecidedAt: k.DecidedAt, Note: k.Note}
	})
}

// settleKeys handles repair and waive.
func (s *Server) settleKeys(status int, do func(context.Context, Account, int64, []int64, string) (*backfill.Reconciliation, error)) echo.HandlerFunc {
	return s.ofRun(func(c echo.Context, id int64) error {
		var in struct {
			Keys []int64 `json:"keys"`
			Note string  `json:"note"`
		}
		if err := decode(c, &in); err != nil {
			return err
		}
		return s.answerRun(c, status)(do(c.Request().Context(), accountOf(c), id, in.Keys, in.Note))
	})
}

func (s *Server) endReconciliation(c echo.Context, id int64) error {
	var in struct {
		Note string `json:"note"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	return s.answerRun(c, http.StatusOK)(s.service.EndReconciliation(c.Request().Context(), accountOf(c), id, in.Note))
}

func (s *Server) certificate(c echo.Context, id int64) error {
	signed, err := s.service.Certificate(c.Request().Context(), id)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, signed)
}

func (s *Server) certificateKey(c echo.Context) error {
	key, err := s.service.Store.SigningKey(c.Request().Context())
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, map[string]string{"key": proof.PublicKey(key.Public().(ed25519.PublicKey))})
}

type scheduleJSON struct {
	From   string           `json:"from"`
	Every  *int64           `json:"every_seconds"` // null: not by the clock
	Mode   backfill.RunMode `json:"mode"`
	Sample int              `json:"sample,omitempty"`
	SetBy  string           `json:"set_by,omitempty"`
}

func (s *Server) getSchedule(c echo.Context) error {
	from := c.QueryParam("from")
	p, err := s.service.Store.Panel(c.Request().Context(), c.Param("site"), c.Param("table"), from)
	if err != nil {
		return err
	}
	now, err := s.service.Store.Schedule(c.Request().Context(), p.Direction, p.Table.ID)
	if err != nil {
		return err
	}
	out := scheduleJSON{From: from, Mode: backfill.RunFull}
	if now != nil {
		seconds := int64(now.Every / time.Second)
		out = scheduleJSON{From: from, Every: &seconds, Mode: now.Mode, Sample: now.Sample, SetBy: now.SetBy}
	}
	return c.JSON(http.StatusOK, out)
}

func (s *Server) putSchedule(c echo.Context) error {
	in := scheduleJSON{Mode: backfill.RunFull}
	if err := decode(c, &in); err != nil {
		return err
	}
	var want *control.Schedule
	if in.Every != nil {
		want = &control.Schedule{Every: time.Duration(*in.Every) * time.Second, Mode: in.Mode, Sample: in.Sample}
		if in.Mode == backfill.RunSampled && in.Sample == 0 {
			want.Sample = defaultSample
		}
		if in.Mode == backfill.RunFull && in.Sample != 0 {
			return fieldError(backfill.Invalid, "sample", "is for mode sampled")
		}
	}
	a := accountOf(c)
	if err := s.service.Schedule(c.Request().Context(), a, c.Param("site"), c.Param("table"), in.From, want); err != nil {
		return err
	}
	in.SetBy = a.Name
	if want != nil {
		in.Sample = want.Sample
	}
	return c.JSON(http.StatusOK, in)
}
