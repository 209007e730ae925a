package backfill

import (
	"fmt"
	"time"
)

// CutoverPolicy is what has to hold before the reads of a table may move to the receiver.
type CutoverPolicy struct {
	Objective float64       // the mismatch rate of shadow reads stays under it, 0 to 1
	Soak      time.Duration // for that long
	ProofAge  time.Duration // the last reconciliation is no older
	MaxLag    time.Duration // no change waits longer
	Sample    int           // reads a minute that the source's agent makes by itself
	SetBy     string        // "" for the defaults
}

// ShadowCounts counts shadow reads by their verdicts.
type ShadowCounts struct {
	Match    int64 `json:"match"`    // the receiver holds what the old path served
	Stale    int64 `json:"stale"`    // the row has changed since it was read
	Mismatch int64 `json:"mismatch"` // the receiver holds something else
	Unknown  int64 `json:"unknown"`  // it could not be judged
}

// Rate is the share of mismatches among the reads that tell something; 0 when none does.
func (c ShadowCounts) Rate() float64 {
	if c.Match+c.Mismatch == 0 {
		return 0
	}
	return float64(c.Mismatch) / float64(c.Match+c.Mismatch)
}

// Soak is how the shadow reads of a table stand.
type Soak struct {
	ShadowCounts
	Began *time.Time // the last repair, or the first read; nil when there was never one
	Since time.Time  // what counts: Began, or the beginning of the window when that is later
	// Bound is the highest rate that the counts leave possible, at 95 % confidence, reads
	// that could not be judged taken for mismatches.
	Bound   float64
	Silence time.Duration // the longest stretch since then without a read that was judged
	Oldest  *time.Time    // since when the oldest read waits to be judged, nil when none does
}

// Sequence is one that gives a column of a table its values.
type Sequence struct {
	Column  string `json:"column"`
	Name    string `json:"name"`
	Next    int64  `json:"next"`    // the value it gives next
	Highest *int64 `json:"highest"` // in the column; the lowest where Step is negative; nil for an empty table
	Step    int64  `json:"step"`
	Problem string `json:"problem,omitempty"` // why it is not known
}

// SideSeen is when a side's agent was last heard of, and what of.
type SideSeen struct {
	Name        string
	SeenAt      *time.Time
	Problem     string
	OutboxAt    *time.Time // when it told what waits in the outbox
	Shape       string     // of the table
	Sequences   []Sequence
	SequencesAt *time.Time // nil: it never looked
}

// Waived is a reason for which differing keys are let be.
type Waived struct {
	By   string `json:"by"`
	Note string `json:"note"`
	Keys int64  `json:"keys"`
}

// Cutover is everything that the answer to "may reads move?" is drawn from, read at
// one moment.
type Cutover struct {
	Panel    Panel
	Policy   CutoverPolicy
	Now      time.Time
	Backfill *Request        // the last of the whole table, nil when there was none
	Proof    *Reconciliation // the last finished one that compared every leaf, nil when there was none
	GapLast  *time.Time      // when something last went unrecorded or unsent

	Repaired  *time.Time // when rows were last sent again, by a repair or a backfill
	Repairing bool       // that is under way
	Open      int64      // differing keys, neither repaired nor waived
	Waived    []Waived
	Skipped   int64 // refused changes that were skipped since the proof began
	Dropped   bool  // changes were dropped since then

	Soak             Soak
	Source, Receiver SideSeen
}

// seenWithin is how old what an agent last told may be: they tell every few seconds.
// sequencesWithin is the same of sequences, at which they look less often.
const (
	seenWithin      = 30 * time.Second
	sequencesWithin = 2 * time.Minute
	judgedWithin    = 10 * time.Minute
)

// Clauses are what has to hold before reads move, in the order of the work. Whatever
// is not known does not hold.
func (c *Cutover) Clauses() []Condition {
	return []Condition{
		c.clause("backfill", c.backfilled()),
		c.clause("capture", c.captured()),
		c.clause("proof", c.proven()),
		c.clause("quarantine", c.settled()),
		c.clause("shadow", c.soaked()),
		c.clause("lag", c.current()),
		c.clause("sequences", c.ahead()),
	}
}

// ReadNew reports whether every clause holds.
func (c *Cutover) ReadNew() bool { return len(Unmet(c.Clauses())) == 0 }

// clause makes a Condition of what stands against it, "" for nothing.
func (c *Cutover) clause(name, no string) Condition {
	if no != "" {
		return Condition{name, false, no}
	}
	return Condition{name, true, c.holds(name)}
}

func (c *Cutover) holds(name string) string {
	switch name {
	case "backfill":
		if c.Backfill == nil {
			return "no backfill was needed"
		}
		return fmt.Sprintf("backfill %d is %s, and none is open", c.Backfill.ID, c.Backfill.State)
	case "capture":
		return "capture on " + c.Panel.Direction.From + " is unbroken since " + moment(c.Panel.Source.CaptureSince) + ", and every operation is sent"
	case "proof":
		return fmt.Sprintf("reconciliation %d compared every row and ended %s", c.Proof.ID, moment(c.Proof.ClosedAt))
	case "quarantine":
		n := int64(0)
		for _, w := range c.Waived {
			n += w.Keys
		}
		if n > 0 {
			return fmt.Sprintf("nothing is set aside but %s keys that were waived", Thousands(n))
		}
		return "nothing is set aside"
	case "shadow":
		return fmt.Sprintf("%s reads since %s: at most %.4g %% mismatch, the objective is %.4g %%", Thousands(c.Soak.Match+c.Soak.Mismatch+c.Soak.Unknown), moment(&c.Soak.Since), 100*c.Soak.Bound, 100*c.Policy.Objective)
	case "lag":
		return fmt.Sprintf("%s changes wait, none for longer than %s", Thousands(c.Panel.Waiting), c.Policy.MaxLag)
	}
	if len(c.Receiver.Sequences) == 0 {
		return "no sequence gives a column of the table its values on " + c.Panel.Direction.To
	}
	return "sequences on " + c.Panel.Direction.To + " are ahead of the values that are there"
}

func (c *Cutover) backfilled() string {
	b := c.Backfill
	switch {
	case c.Panel.Open != nil:
		return fmt.Sprintf("backfill %d is %s: wait for its end, or decide it", c.Panel.Open.ID, c.Panel.Open.State)
	case b == nil || c.provenAfter(b.RequestedAt):
		return ""
	case b.State != Finished:
		return fmt.Sprintf("backfill %d is %s, and no later reconciliation has found the table equal: ask for another backfill, or reconcile", b.ID, b.State)
	case b.SupersededUndelivered > 0:
		return fmt.Sprintf("backfill %d left %s rows to another one: ask for it, or reconcile", b.ID, Thousands(b.SupersededUndelivered))
	}
	return ""
}

// provenAfter reports whether a reconciliation that began after a time has found the
// table equal, or different in nothing but what was waived.
func (c *Cutover) provenAfter(t time.Time) bool {
	p := c.Proof
	return p != nil && p.StartedAt != nil && p.StartedAt.After(t) && p.agreed()
}

// agreed reports whether a finished run found every row equal, but for keys that were
// waived since. Keys that were repaired need another run.
func (r *Reconciliation) agreed() bool {
	n := r.Counts
	return r.Clean() || r.State == RunFinished && r.Mode == RunFull && n.Waived > 0 && n.Open+n.Repaired+n.Unsettled+n.Unknown+n.Pending == 0
}

func (c *Cutover) captured() string {
	from, source := c.Panel.Direction.From, c.Panel.Source
	switch held := c.Panel.capture(); {
	case !held.OK:
		return held.Message
	case !c.Panel.Table.Active:
		return "the table is not active: its changes are dropped; activate it, then reconcile"
	case !c.Panel.Table.Create || !c.Panel.Table.Update || !c.Panel.Table.Delete:
		return "not every operation is sent, so the sides drift apart: enable create, update and delete, then reconcile"
	case source.CaptureSince == nil:
		return "it is not known since when capture on " + from + " is unbroken: wait until its agent has looked"
	case c.Proof == nil || c.Proof.StartedAt == nil:
		return "" // the proof's clause says so
	case c.Proof.StartedAt.Before(*source.CaptureSince):
		return "capture on " + from + " is unbroken only since " + moment(source.CaptureSince) + ", after the last reconciliation began: reconcile again"
	case c.GapLast != nil && !c.GapLast.Before(*c.Proof.StartedAt):
		return "since the last reconciliation began, at " + moment(c.GapLast) + ": " + source.Gap + ": reconcile again"
	case c.Dropped:
		return "changes were dropped since the last reconciliation began: reconcile again"
	}
	return ""
}

func (c *Cutover) proven() string {
	const again = ": reconcile the whole table"
	p := c.Proof
	// With a mapping what is compared has a layout of its own; another mapping begins a gap.
	mapped := c.Panel.Table.Mapping != nil
	switch {
	case p == nil || p.StartedAt == nil || p.ClosedAt == nil:
		return "every row was never compared" + again
	case c.Repairing:
		return "rows are being sent again: wait for the end, then" + again[1:]
	case !p.agreed():
		n := p.Counts
		if n.Open > 0 {
			return fmt.Sprintf("reconciliation %d found %s of %s leaves different, %s keys are open: backfill reconcile keys %[1]d, repair or waive them, then%[5]s", p.ID, Thousands(n.Different), Thousands(p.LeafCount), Thousands(n.Open), again[1:])
		}
		return fmt.Sprintf("reconciliation %d came to %s, and a later one has not found the table equal%s", p.ID, p.Verdict, again)
	case c.Repaired != nil && !p.StartedAt.After(*c.Repaired):
		return "rows were sent again at " + moment(c.Repaired) + ", after the last reconciliation began" + again
	case c.Now.Sub(*p.ClosedAt) > c.Policy.ProofAge:
		return fmt.Sprintf("reconciliation %d is older than %s%s", p.ID, c.Policy.ProofAge, again)
	case !mapped && p.LayoutID != c.Panel.Source.LayoutID || p.Shape != c.Source.Shape:
		return "the table on " + c.Panel.Direction.From + " was altered since the last reconciliation" + again
	case !mapped && p.ReceiverLayoutID != c.Panel.Receiver.LayoutID || p.ReceiverShape != c.Receiver.Shape:
		return "the table on " + c.Panel.Direction.To + " was altered since the last reconciliation" + again
	}
	return ""
}

func (c *Cutover) settled() string {
	switch {
	case c.Open > 0:
		return fmt.Sprintf("%s differing keys are set aside: repair them, or waive them with a reason (backfill reconcile list shows where)", Thousands(c.Open))
	case c.Panel.Quarantined > 0:
		return fmt.Sprintf("%s has refused %s changes: mend the cause and retry them, or skip them and reconcile", c.Panel.Direction.To, Thousands(c.Panel.Quarantined))
	case c.Panel.Held > 0:
		return fmt.Sprintf("%s changes wait on %s for rows they refer to: wait, or send those", Thousands(c.Panel.Held), c.Panel.Direction.To)
	case c.Skipped > 0:
		return fmt.Sprintf("%s refused changes were skipped since the last reconciliation began: reconcile again", Thousands(c.Skipped))
	}
	return ""
}

// command is one of "backfill cutover" for this table, to be copied.
func (c *Cutover) command(what string) string {
	p := &c.Panel
	return fmt.Sprintf("backfill cutover %s --site %s --table %s --from %s", what, p.Direction.Site, p.Table.Name, p.Direction.From)
}

func (c *Cutover) soaked() string {
	s, goal := &c.Soak, c.Policy.Objective
	known := s.Match + s.Mismatch + s.Unknown
	switch {
	case s.Began == nil || known == 0:
		return "no shadow read was judged: report reads of the application, or let the agent sample (" + c.command("set --sample 60") + ")"
	case s.Rate() > goal:
		return fmt.Sprintf("%.4g %% of the shadow reads mismatch, the objective is %.4g %%: see which (%s), repair, and the soak begins again", 100*s.Rate(), 100*goal, c.command("shadow"))
	case s.Mismatch+s.Unknown > 0 && s.Bound >= goal:
		return fmt.Sprintf("%s mismatches and %s unknown of %s shadow reads leave a rate of %.4g %% possible, the objective is %.4g %%: see which, and go on reading", Thousands(s.Mismatch), Thousands(s.Unknown), Thousands(known), 100*s.Bound, 100*goal)
	case s.Bound >= goal:
		return fmt.Sprintf("%s clean shadow reads leave a rate of %.4g %% possible, the objective is %.4g %%: about %s are needed", Thousands(known), 100*s.Bound, 100*goal, Thousands(int64(3/goal)))
	case c.Now.Sub(*s.Began) < c.Policy.Soak:
		return fmt.Sprintf("the soak of %s goes on until %s", c.Policy.Soak, moment(after(*s.Began, seconds(c.Policy.Soak))))
	case s.Silence > max(c.Policy.Soak/10, 2*time.Minute):
		return fmt.Sprintf("no shadow read was judged for %s within the soak: reads have to go on through all of it", s.Silence.Round(time.Second))
	case s.Oldest != nil && c.Now.Sub(*s.Oldest) > judgedWithin:
		return "shadow reads wait to be judged since " + moment(s.Oldest) + ": are both agents there?"
	}
	return ""
}

func seconds(d time.Duration) *float64 { s := d.Seconds(); return &s }

func (c *Cutover) current() string {
	for _, side := range []SideSeen{c.Source, c.Receiver} {
		switch {
		case side.SeenAt == nil:
			return "the lag is not known: the agent of " + side.Name + " was never seen"
		case c.Now.Sub(*side.SeenAt) > seenWithin:
			return "the lag is not known: the agent of " + side.Name + " was last seen " + moment(side.SeenAt)
		case side.Problem != "":
			return "the agent of " + side.Name + " cannot work: " + side.Problem
		}
	}
	switch {
	case c.Source.OutboxAt == nil || c.Now.Sub(*c.Source.OutboxAt) > seenWithin:
		return "the lag is not known: the agent of " + c.Panel.Direction.From + " has not told what waits in its outbox since " + moment(c.Source.OutboxAt)
	case c.Panel.Stopped != "":
		return "changes of the table are not applied on " + c.Panel.Direction.To + " since " + moment(c.Panel.StoppedSince) + ": " + c.Panel.Stopped
	case c.Panel.Waiting > 0 && (c.Panel.Oldest == nil || c.Now.Sub(*c.Panel.Oldest) > c.Policy.MaxLag):
		return fmt.Sprintf("%s changes wait since %s, the limit is %s", Thousands(c.Panel.Waiting), moment(c.Panel.Oldest), c.Policy.MaxLag)
	}
	return ""
}

func (c *Cutover) ahead() string {
	for _, side := range []SideSeen{c.Source, c.Receiver} {
		if side.SequencesAt == nil || c.Now.Sub(*side.SequencesAt) > sequencesWithin {
			return "the agent of " + side.Name + " has not looked at the sequences since " + moment(side.SequencesAt)
		}
	}
	for _, s := range c.Receiver.Sequences {
		if s.Problem != "" {
			return "sequence " + s.Name + " of column " + s.Column + " on " + c.Panel.Direction.To + ": " + s.Problem
		}
		highest := s.Highest
		for _, o := range c.Source.Sequences {
			if o.Column != s.Column {
				continue
			}
			// Of the source only its column counts.
			if o.Problem != "" && o.Highest == nil {
				return "column " + s.Column + " on " + c.Panel.Direction.From + ": " + o.Problem
			}
			if o.Highest != nil && (highest == nil || (*o.Highest-*highest)*sign(s.Step) > 0) {
				highest = o.Highest
			}
		}
		if highest != nil && (s.Next-*highest)*sign(s.Step) <= 0 {
			return fmt.Sprintf("sequence %s on %s would give %d next, column %s holds %d already: set it well ahead there, as SELECT setval('%s', %d)",
				s.Name, c.Panel.Direction.To, s.Next, s.Column, *highest, s.Name, *highest+10_000*s.Step)
		}
	}
	return ""
}

func sign(step int64) int64 {
	if step < 0 {
		return -1
	}
	return 1
}
