package activities

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/activity"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/copypipe"
	"backfill/internal/proof"
	"backfill/internal/row"
	"backfill/internal/side"
)

// RunSnapshot is a reconciliation as its workflow needs it: no row data.
type RunSnapshot struct {
	State   backfill.RunState  `json:"state"`
	Verdict string             `json:"verdict,omitempty"`
	Counts  backfill.RunCounts `json:"counts"`
	Leaves  int64              `json:"leaves"`
	Reason  string             `json:"reason,omitempty"`
}

func runSnapshot(r *backfill.Reconciliation) RunSnapshot {
	return RunSnapshot{State: r.State, Verdict: r.Verdict, Counts: r.Counts, Leaves: r.LeafCount, Reason: r.Reason}
}

// leavesAhead is how many leaves the source reads before the receiver has looked at
// them: the longer a leaf waits, the more of its keys are in flight.
const leavesAhead = 64

// judgedAtOnce is how many leaves are read, listed or compared in one transaction.
const judgedAtOnce = 16

// Hash does the source's part of a reconciliation: it cuts the table into leaves,
// hashes them, lists the rows of those that turn out to differ, and pushes what was
// captured before each read, so that the receiver knows what to wait for. It returns
// when every leaf is judged or the run is closed. Everything it has done is in the
// control database, so that it goes on where an earlier attempt was interrupted; an
// attempt that still runs elsewhere finds that another was faster and changes nothing.
func (a *Agent) Hash(ctx context.Context, id int64) error {
	h := &hashing{comparison{Agent: a, id: id}}
	return a.reconcile(ctx, id, h.step)
}

// Compare does the receiver's part: it waits until everything captured before a leaf
// was read on the source is applied here, and compares.
func (a *Agent) Compare(ctx context.Context, id int64) error {
	c := &comparing{comparison: comparison{Agent: a, id: id}}
	return a.reconcile(ctx, id, c.step)
}

func (a *Agent) reconcile(ctx context.Context, id int64, step func(context.Context, *backfill.Reconciliation) (progress, error)) error {
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	return a.untilJudged(ctx, id, step, activity.GetWorkerStopChannel(ctx))
}

// progress is what a step came to.
type progress int

const (
	idle progress = iota // there is nothing to do until something happens
	busy
	shut // a gate is closed
	over
)

func (a *Agent) untilJudged(ctx context.Context, id int64, step func(context.Context, *backfill.Reconciliation) (progress, error), stopping <-chan struct{}) error {
	rung, done := a.bell(fmt.Sprintf("reconciliation %d", id))
	defer done()
	for {
		run, err := a.store.Run(ctx, id)
		if err != nil {
			return surface(err)
		}
		if !run.State.Open() {
			return nil
		}
		if err := a.ready(ctx); err != nil {
			return surface(err)
		}
		did, err := step(ctx, run)
		switch {
		case errors.Is(err, control.ErrFenced), errors.Is(err, side.ErrNotThere):
			did = idle // look again
		case err != nil:
			return permanent(fmt.Errorf("reconcile %s: %w", run.Table, err))
		}
		pause := time.Duration(0)
		switch did {
		case over:
			return nil
		case idle:
			pause = 100 * time.Millisecond
		case shut:
			pause = askAgain
		}
		select {
		case <-stopping:
			return errors.New("the agent stops")
		case <-ctx.Done():
			return ctx.Err()
		case <-rung:
		case <-time.After(pause):
		}
	}
}

// comparison is what both sides know of a run.
type comparison struct {
	*Agent
	id     int64
	table  *backfill.Table
	made   *row.Mapping // nil where both sides have the same columns
	source *row.Layout  // and the receiver's, once the run has begun
	there  *row.Layout
	rows   *row.Encoding
}

// meet reads how the table is configured. A mapping that changes ends the run.
func (c *comparison) meet(ctx context.Context, run *backfill.Reconciliation) error {
	if c.table != nil {
		return nil
	}
	t, err := c.store.MappedTable(ctx, run.Site, run.Table)
	if err != nil {
		return err
	}
	c.table, c.made = &t.Table, t.Made
	return nil
}

// relation is this side's table as it is compared: the source's through the mapping.
func (c *comparison) relation() side.Relation {
	r := side.Relation{Name: c.table.Relation(c.db.Side)}
	if c.table.Captures(c.db.Side) {
		r.Made = c.made
	} else {
		r.Key, r.Claimed = c.made.KeyOrNil(), c.made
	}
	return r
}

// gates asks the gates before the table is read, as a walk does before a page. While
// one is closed nothing is read, and the run says why. The few keys of shadow reads
// are no load, and have to be judged while they are fresh.
func (c *comparison) gates(ctx context.Context, run *backfill.Reconciliation) (open bool, err error) {
	if run.Mode == backfill.RunShadow {
		return true, nil
	}
	all, err := c.store.GatesOf(ctx, run.Site, run.Table)
	if err != nil {
		return false, err
	}
	for _, g := range all {
		if v := g.Judge(); !v.Open {
			return false, c.store.RunWaits(ctx, c.id, waitsForGate+g.Name+": "+v.Reason)
		}
	}
	if strings.HasPrefix(run.Waiting, waitsForGate) {
		err = c.store.RunWaits(ctx, c.id, "")
	}
	return true, err
}

const waitsForGate = "gate "

// learn reads how rows are compared.
func (c *comparison) learn(ctx context.Context, run *backfill.Reconciliation) (err error) {
	if c.rows != nil {
		return nil
	}
	if run.Normaliser != row.Normaliser {
		return backfill.Errorf(backfill.Invalid, "the run compares by rules %d, this agent by rules %d: let both agents be of one version, and start another run", run.Normaliser, row.Normaliser)
	}
	if c.source, err = c.store.Layout(ctx, run.LayoutID); err != nil {
		return err
	}
	if c.there, err = c.store.Layout(ctx, run.ReceiverLayoutID); err != nil {
		return err
	}
	c.rows, err = encoding(c.source, c.there, run.Excluded)
	return err
}

func encoding(source, receiver *row.Layout, excluded []string) (*row.Encoding, error) {
	e, err := row.NewEncoding(source, receiver, excluded)
	if err != nil {
		return nil, backfill.Errorf(backfill.Invalid, "the tables cannot be compared: %v", err)
	}
	return e, nil
}

// hashing is the source's part.
type hashing struct{ comparison }

func (h *hashing) compared(run *backfill.Reconciliation) side.Compared {
	return side.Compared{Relation: h.relation(), TableID: run.TableID, Layout: h.source, Shape: run.Shape, Rows: h.rows.Source("t"), Bytes: h.rows.SourceBytes("t")}
}

func (h *hashing) step(ctx context.Context, run *backfill.Reconciliation) (progress, error) {
	if err := h.meet(ctx, run); err != nil {
		return idle, err
	}
	switch {
	case run.ReceiverLayoutID == 0:
		return idle, h.store.RunWaits(ctx, h.id, "the agent of "+run.To+" has not looked at the table yet")
	case run.LayoutID == 0:
		return busy, h.begin(ctx, run)
	case run.Mode == backfill.RunRepair && !run.Touched:
		if open, err := h.gates(ctx, run); !open || err != nil {
			return shut, err
		}
		return busy, h.send(ctx, run)
	}
	if err := h.learn(ctx, run); err != nil {
		return idle, err
	}
	if run.Mode == backfill.RunShadow && !run.Cut {
		return busy, h.readAsServed(ctx, run)
	}
	left, err := h.store.Remaining(ctx, h.id)
	switch {
	case err != nil:
		return idle, err
	case left.Unsent > 0:
		return h.settle(ctx, run)
	case run.Cut && left.Done():
		return over, nil
	}
	more := (!run.Cut || left.Cut > 0) && (left.Ahead < leavesAhead || run.Buckets > 0)
	if left.Listing == 0 && !more {
		return idle, nil
	}
	if open, err := h.gates(ctx, run); !open || err != nil {
		return shut, err
	}
	if left.Listing > 0 {
		if did, err := h.list(ctx, run); did || err != nil {
			return busy, err
		}
	}
	switch {
	case !more:
		return idle, nil
	case !run.Cut:
		return busy, h.cut(ctx, run, left)
	}
	return busy, h.hash(ctx, run)
}

// begin fixes how the table is compared. Ranges of keys are used where both sides
// sort keys alike; else buckets by a hash of the key's text, which need a pass over
// the whole table each time but mean the same anywhere.
func (h *hashing) begin(ctx context.Context, run *backfill.Reconciliation) error {
	f, err := h.db.Find(ctx, h.relation())
	if err != nil {
		return err
	}
	there, err := h.store.Layout(ctx, run.ReceiverLayoutID)
	if err != nil {
		return err
	}
	if _, err := encoding(f.Layout, there, run.Excluded); err != nil {
		return err
	}
	panel, err := h.store.Panel(ctx, run.Site, run.Table, run.From)
	if err != nil {
		return err
	}
	rows := int64(0)
	if panel.Source.Rows != nil {
		rows = *panel.Source.Rows
	}
	b := control.Begun{Shape: f.Shape, Normaliser: row.Normaliser, Excluded: run.Excluded, Floor: f.Snapshot, LeafRows: h.ProofRows}
	if f.Bytes > 0 && rows > 0 {
		b.LeafRows = int(min(max(h.ProofBytes*rows/f.Bytes, 1), int64(h.ProofRows)))
	}
	if alike := sameOrder(f.Order, run.ReceiverOrder); !alike && !run.ByKey {
		if run.Parent != 0 && run.Buckets == 0 {
			return backfill.Errorf(backfill.Invalid, "the sides do not sort the keys of %s alike any more: start a reconciliation of the whole table", run.Table)
		}
		b.Buckets = int32(min(rows/int64(b.LeafRows)+1, 100_000))
	}
	if b.LayoutID, err = h.store.PutLayout(ctx, f.Layout); err != nil {
		return err
	}
	if err := h.store.BeginRun(ctx, h.id, b); err != nil {
		return err
	}
	return h.faults.at("run: begun")
}

// sameOrder reports whether two sides sort keys alike. A wider integer sorts as a
// narrower one does.
func sameOrder(source, receiver []string) bool {
	width := map[string]int{"int2": 2, "int4": 4, "int8": 8}
	return len(source) == len(receiver) && !slices.ContainsFunc(source, func(o string) bool { return o == "" }) &&
		slices.EqualFunc(source, receiver, func(a, b string) bool { return a == b || width[a] > 0 && width[b] >= width[a] })
}

// send records the keys of a repair in the outbox, so that the next push sends their
// rows as they are then.
func (h *hashing) send(ctx context.Context, run *backfill.Reconciliation) error {
	for last := int64(0); ; {
		keys, next, err := h.store.RepairKeys(ctx, run, last, 5000)
		if err != nil {
			return err
		}
		if len(keys) == 0 {
			if err := h.store.Touched(ctx, h.id); err != nil {
				return err
			}
			return h.faults.at("repair: noted")
		}
		if _, err := h.db.Touch(ctx, h.relation().Name, keys); err != nil {
			return err
		}
		if err := h.faults.at("repair: touched"); err != nil {
			return err
		}
		last = next
	}
}

// evidence notes the highest seq before a read: whatever is read later gets a higher one.
func (h *hashing) evidence(ctx context.Context, read func() (side.Reading, error)) (control.Evidence, error) {
	seq, err := h.store.LastSeq(ctx, h.Out.ID)
	if err != nil {
		return control.Evidence{}, err
	}
	r, err := read()
	return control.Evidence{Snapshot: r.Snapshot, AfterSeq: seq, Position: r.Position, Reads: r.Reads}, err
}

// cut reads the next leaves of the table. To list a leaf's rows costs what ten hashes of
// it do; where more than three quarters of the leaves differ, hashes spare nothing, and
// the rows are listed at once.
func (h *hashing) cut(ctx context.Context, run *backfill.Reconciliation, left control.Remaining) error {
	after, err := h.store.LastUpper(ctx, h.id, run.LeafCount)
	if err != nil {
		return err
	}
	size := run.LeafRows
	most := min(max(h.PageRows/size, 1), judgedAtOnce)
	state := "hashed"
	switch {
	case run.Mode == backfill.RunSampled:
		state = "cut"
	case left.Final >= 20 && left.Bad*4 > left.Final*3:
		state = "suspect"
	}
	var leaves []proof.Leaf
	var end bool
	e, err := h.evidence(ctx, func() (r side.Reading, err error) {
		leaves, r, end, err = h.db.CutLeaves(ctx, h.compared(run), after, run.LeafCount+1, size, most, state != "cut")
		return r, err
	})
	if err != nil {
		return err
	}
	if err := h.faults.at("leaf: read"); err != nil {
		return err
	}
	if err := h.store.AddLeaves(ctx, h.id, run.LeafCount, leaves, state, e, end); err != nil {
		return err
	}
	return h.faults.at("leaf: cut")
}

// hash reads leaves that are cut already.
func (h *hashing) hash(ctx context.Context, run *backfill.Reconciliation) error {
	all, err := h.store.LeavesFor(ctx, h.id, "cut", atOnce(run))
	if err != nil || len(all) == 0 {
		return err
	}
	var read []proof.Leaf
	e, err := h.evidence(ctx, func() (r side.Reading, err error) {
		read, r, err = h.db.HashLeaves(ctx, h.compared(run), ranges(all), sampled(all))
		return r, err
	})
	if err != nil {
		return err
	}
	if err := h.faults.at("leaf: read"); err != nil {
		return err
	}
	if err := h.store.Hashed(ctx, h.id, read, e); err != nil {
		return err
	}
	return h.faults.at("leaf: hashed")
}

// atOnce is how many leaves are read together: buckets cost a pass over the table,
// however few of them are asked for, and single keys hardly anything.
func atOnce(run *backfill.Reconciliation) int {
	switch {
	case run.Mode == backfill.RunShadow:
		return 1000
	case run.Buckets > 0:
		return int(run.Buckets)
	}
	return judgedAtOnce
}

func ranges(all []control.RunLeaf) []proof.Leaf {
	out := make([]proof.Leaf, len(all))
	for i, l := range all {
		out[i] = l.Leaf
	}
	return out
}

func sampled(all []control.RunLeaf) func(proof.Leaf) bool {
	in := map[int64]bool{}
	for _, l := range all {
		in[l.N] = l.Sampled
	}
	return func(l proof.Leaf) bool { return in[l.N] }
}

func numbersOf(all []control.RunLeaf) []int64 {
	out := make([]int64, len(all))
	for i, l := range all {
		out[i] = l.N
	}
	return out
}

// list reads the rows of suspect leaves: at first all of them, then the keys that
// were in flight. It reports whether there were any to list now.
func (h *hashing) list(ctx context.Context, run *backfill.Reconciliation) (bool, error) {
	all, err := h.store.LeavesFor(ctx, h.id, "suspect", atOnce(run))
	if err != nil || len(all) == 0 {
		return false, err
	}
	var keys []side.Keys
	if all[0].Attempts > 0 {
		if run.Buckets > 0 {
			all = all[:min(len(all), judgedAtOnce)] // keys are looked up, in buckets too
		}
		unsettled, err := h.store.UnsettledKeys(ctx, h.id, numbersOf(all))
		if err != nil {
			return false, err
		}
		keys = []side.Keys{}
		for _, l := range all {
			keys = append(keys, side.Keys{Leaf: l.N, Keys: unsettled[l.N]})
		}
	}
	err = h.store.Listed(ctx, h.id, numbersOf(all), func(load func(io.Reader) error) (control.Evidence, error) {
		return h.evidence(ctx, func() (r side.Reading, err error) {
			err = copypipe.Run(func(w io.Writer) error {
				r, err = h.db.CopyLeafRows(ctx, h.compared(run), h.id, ranges(all), keys, w)
				return err
			}, load)
			if err == nil {
				err = h.faults.at("leaf: listed")
			}
			return r, err
		})
	})
	if err == nil {
		err = h.faults.at("leaf: rows stored")
	}
	return true, err
}

// settle pushes until nothing captured before the leaves were read is left in the
// outbox; then the queue's end is what the receiver has to have applied.
func (h *hashing) settle(ctx context.Context, run *backfill.Reconciliation) (progress, error) {
	leaves, err := h.store.Unsent(ctx, h.id)
	if err != nil || len(leaves) == 0 {
		return idle, err
	}
	if err := h.faults.at("leaf: unsent"); err != nil {
		return idle, err
	}
	for {
		p, err := h.push(ctx)
		if err != nil {
			return idle, err
		}
		if p.complete(h.relation().Name) {
			break
		}
		if p.left[h.relation().Name] {
			sleep(ctx, time.Second)
			return idle, h.store.RunWaits(ctx, h.id, "changes captured before a leaf was read cannot be pushed: "+h.problem(ctx))
		}
	}
	last, err := h.store.LastSeq(ctx, h.Out.ID)
	if err != nil {
		return idle, err
	}
	if err := h.store.Await(ctx, h.id, leaves, last); err != nil {
		return idle, err
	}
	return busy, h.faults.at("leaf: sent")
}

// comparing is the receiver's part.
type comparing struct {
	comparison
	since time.Time // when it began to wait for changes to be applied
}

func (c *comparing) compared(run *backfill.Reconciliation) side.Compared {
	return side.Compared{Relation: c.relation(), TableID: run.TableID, Layout: c.there, Shape: run.ReceiverShape, Rows: c.rows.Receiver("t"), Bytes: c.rows.ReceiverBytes("t"), Both: run.Both}
}

func (c *comparing) step(ctx context.Context, run *backfill.Reconciliation) (progress, error) {
	if err := c.meet(ctx, run); err != nil {
		return idle, err
	}
	switch {
	case run.ReceiverLayoutID == 0:
		return busy, c.introduce(ctx, run)
	case run.LayoutID == 0:
		return idle, c.store.RunWaits(ctx, c.id, "the agent of "+run.From+" has not looked at the table yet")
	}
	if err := c.learn(ctx, run); err != nil {
		return idle, err
	}
	waits := false
	for _, next := range []struct {
		state   string
		compare func(context.Context, *backfill.Reconciliation, []control.RunLeaf) error
	}{{"listed", c.compareRows}, {"hashed", c.compareHashes}} {
		all, err := c.store.LeavesFor(ctx, c.id, next.state, atOnce(run))
		if err != nil {
			return idle, err
		}
		if len(all) == 0 {
			continue
		}
		at, err := c.db.AppliedTo(ctx, run.TableID)
		if err != nil {
			return idle, err
		}
		all = slices.DeleteFunc(all, func(l control.RunLeaf) bool { return l.WaitSeq > at })
		if len(all) == 0 {
			waits = true
			continue
		}
		if open, err := c.gates(ctx, run); !open || err != nil {
			return shut, err
		}
		if c.since = (time.Time{}); run.Waiting != "" {
			if err := c.store.RunWaits(ctx, c.id, ""); err != nil {
				return idle, err
			}
		}
		return busy, next.compare(ctx, run, all)
	}
	if waits {
		return idle, c.wait(ctx, run)
	}
	left, err := c.store.Remaining(ctx, c.id)
	if err == nil && run.Cut && left.Done() {
		return over, nil
	}
	return idle, err
}

// wait says so when changes take long to be applied.
func (c *comparing) wait(ctx context.Context, run *backfill.Reconciliation) error {
	if c.since.IsZero() {
		c.since = time.Now()
	}
	if time.Since(c.since) < 2*time.Second || strings.HasPrefix(run.Waiting, waitsForGate) {
		return nil // what the source waits for is said first: the two would wake each other for ever
	}
	return c.store.RunWaits(ctx, c.id, "changes of the table captured before a leaf was read have to be applied on "+run.To)
}

// introduce tells how the table is made here.
func (c *comparing) introduce(ctx context.Context, run *backfill.Reconciliation) error {
	f, err := c.db.Find(ctx, c.relation())
	if err != nil {
		return err
	}
	layout, err := c.store.PutLayout(ctx, f.Layout)
	if err != nil {
		return err
	}
	if err := c.store.ReceiverReady(ctx, c.id, layout, f.Shape, f.Order); err != nil {
		return err
	}
	return c.faults.at("run: introduced")
}

func (c *comparing) compareHashes(ctx context.Context, run *backfill.Reconciliation, all []control.RunLeaf) error {
	read, at, err := c.db.HashLeaves(ctx, c.compared(run), ranges(all), sampled(all))
	if err != nil {
		return err
	}
	if slices.ContainsFunc(all, func(l control.RunLeaf) bool { return l.WaitSeq > at.Position }) {
		return side.ErrNotThere
	}
	if err := c.faults.at("leaf: compared"); err != nil {
		return err
	}
	if err := c.store.Compared(ctx, c.id, read); err != nil {
		return err
	}
	return c.faults.at("leaf: answered")
}

func (c *comparing) compareRows(ctx context.Context, run *backfill.Reconciliation, all []control.RunLeaf) error {
	upTo := slices.MaxFunc(all, func(a, b control.RunLeaf) int { return int(a.WaitSeq - b.WaitSeq) }).WaitSeq
	numbers := numbersOf(all)
	err := c.db.CompareRows(ctx, c.compared(run), ranges(all), all[0].Attempts > 1, upTo,
		func(w io.Writer) error { return c.store.CopyListed(ctx, c.id, numbers, w) },
		func(at int64, r io.Reader) error {
			if err := c.faults.at("leaf: rows compared"); err != nil {
				return err
			}
			return c.store.Judge(ctx, run, numbers, at, r)
		})
	if err != nil {
		return err
	}
	return c.faults.at("leaf: judged")
}

// Conclude closes a reconciliation whose leaves are all judged.
func (c *Control) Conclude(ctx context.Context, id int64) (RunSnapshot, error) {
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	r, err := c.Store.Conclude(ctx, id)
	if err == nil {
		err = c.faults.at("run: concluded")
	}
	if err != nil {
		return RunSnapshot{}, surface(err)
	}
	return runSnapshot(r), nil
}

// RunEnding ends a reconciliation before its time.
type RunEnding struct {
	ID     int64             `json:"id"`
	By     string            `json:"by"`
	To     backfill.RunState `json:"to"` // CANCELLED or FAILED
	Reason string            `json:"reason"`
}

// EndRun cancels or fails a reconciliation. What it has found stays.
func (c *Control) EndRun(ctx context.Context, e RunEnding) (RunSnapshot, error) {
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	r, err := c.Store.EndRun(ctx, e.ID, e.By, e.To, e.Reason)
	if backfill.CodeOf(err) == backfill.Conflict {
		r, err = c.Store.Reconciliation(ctx, e.ID)
	}
	if err == nil {
		err = c.faults.at("run: ended")
	}
	if err != nil {
		return RunSnapshot{}, surface(err)
	}
	return runSnapshot(r), nil
}
