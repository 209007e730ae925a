package backfill

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Direction is one way between the two sides of a site.
type Direction struct {
	ID   int32  `json:"-"`
	Site string `json:"site"`
	From string `json:"from"`
	To   string `json:"to"`
}

func (d Direction) String() string { return fmt.Sprintf("%s: %s → %s", d.Site, d.From, d.To) }

// Key is the text of a row's key columns in key order, as PostgreSQL printed it
// under the pinned settings. Go never compares or orders keys by value.
type Key []string

// Hash names a key without showing it: 16 hexadecimal digits of a SHA-256 over
// its length-prefixed parts.
func (k Key) Hash() string {
	h := sha256.New()
	for _, part := range k {
		fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

func (k Key) String() string { return strings.Join(k, ", ") }

// Request is one backfill.
type Request struct {
	ID    int64
	Table string // schema.table
	Direction
	Mode        Mode
	Key         Key // the row of a row backfill, else nil
	State       State
	Paused      bool
	RequestedBy string
	RequestedAt time.Time
	StartedAt   *time.Time // the first claim of the walk
	WalkedAt    *time.Time // the walk reached its end
	ReviewedBy  string
	ReviewedVia string // by what way the decision came, "" for the API, "temporal" for a signal
	ReviewedAt  *time.Time
	ClosedAt    *time.Time
	Note        string // the requester's
	ReviewNote  string
	Reason      string // why it FAILED, or what was cancelled
	Waiting     string // what it waits for now, "" when nothing
	Revision    int64  // of the staged set, what a decision is bound to

	WaitingSince *time.Time    // since when closed gates hold it back, nil when none does
	Throttled    time.Duration // for how long gates have held it back in all

	// ProofAt is when it was settled where the walk begins: after ProvenKey, up to which
	// the receiver provably holds the source's ProvenRows rows; nil for the beginning.
	ProofAt    *time.Time
	ProvenKey  Key
	ProvenRows int64

	// Position is the part of the keys that the walk has passed, 0 to 1, as PostgreSQL
	// estimates; nil while that is unknown.
	Position *float64
	// The last forecast, made at ForecastAt: rows per second while no gate holds it
	// back, the part of the time in which none does, and the seconds then left, in one
	// half and in nine tenths of the cases.
	UnthrottledRate, Duty float64
	ForecastAt            *time.Time
	LeftP50, LeftP90      *float64

	Expected              int64 // rows the source had when the walk began
	Staged                int64
	Released              int64
	Superseded            int64
	SupersededUndelivered int64
	Skipped               int64 // identical rows left out at the approver's wish
	Effects               map[Effect]int64
	ResumeKey             Key
	UpperKey              Key
	LeaseHolder           string
	LeaseUntil            *time.Time
	LayoutID              int64
	ResultLayoutID        int64  // of what a mapping makes of the staged rows, 0 without one
	Shape                 string // what the source table was made of when the walk began
	SkipIdentical         bool
	ReleasedUpTo          int64 // the last staged position release has passed
}

// WorkflowID is the id of the request's workflow: one per table and direction,
// so that the workflow engine refuses a second open one by itself.
func (r *Request) WorkflowID() string {
	id := fmt.Sprintf("backfill/%s/%s/%s", r.Site, r.Table, r.From)
	if r.Key != nil {
		id += "/" + r.Key.Hash()
	}
	return id
}

// Percent is how far the present phase has come, 0 to 100: the walk while it
// walks, the release while it releases. A walk never shows 100 before its end.
func (r *Request) Percent() int {
	switch r.State {
	case Pending:
		return 0
	case InProgress:
		if r.Position != nil {
			return max(0, min(int(*r.Position*100), 99))
		}
		return min(percent(r.Staged, r.Expected), 99)
	case Releasing:
		return min(percent(r.ReleasedUpTo, r.Staged), 99)
	default:
		return 100
	}
}

func percent(part, whole int64) int {
	if whole <= 0 {
		return 0
	}
	return int(min(part*100/whole, 100))
}

// forecastLasts is how long a forecast counts without a newer one.
const forecastLasts = time.Minute

// forecast reports whether there is a forecast of the present phase that counts.
func (r *Request) forecast(now time.Time) bool {
	since := r.StartedAt
	if r.State == Releasing {
		since = r.ReviewedAt
	}
	return r.ForecastAt != nil && r.UnthrottledRate > 0 && since != nil && !r.ForecastAt.Before(*since) && now.Sub(*r.ForecastAt) < forecastLasts
}

// Rate is the rows per second of the present phase, time in which gates hold it
// back included; 0 when it is paused or the rate is unknown.
func (r *Request) Rate(now time.Time) float64 {
	switch {
	case r.Paused:
		return 0
	case r.State != InProgress && r.State != Releasing:
		return 0
	case r.forecast(now):
		return r.UnthrottledRate * r.Duty
	case r.ForecastAt != nil:
		return 0 // nobody has looked for a while
	case r.State == InProgress && r.StartedAt != nil:
		return rate(r.Staged, now.Sub(*r.StartedAt))
	case r.State == Releasing && r.ReviewedAt != nil:
		return rate(r.ReleasedUpTo, now.Sub(*r.ReviewedAt))
	}
	return 0
}

func rate(rows int64, d time.Duration) float64 {
	if d < time.Second {
		return 0
	}
	return float64(rows) / d.Seconds()
}

// ETA is when the present phase should end, in one half of the cases; nil when it is
// paused or nothing is known.
func (r *Request) ETA(now time.Time) *time.Time {
	rate := r.Rate(now)
	switch {
	case rate == 0:
		return nil
	case r.forecast(now):
		return after(*r.ForecastAt, r.LeftP50)
	}
	left := r.Expected - r.Staged
	if r.State == Releasing {
		left = r.Staged - r.ReleasedUpTo
	}
	seconds := float64(max(left, 0)) / rate
	return after(now, &seconds)
}

// ETA90 is when the present phase should have ended in nine tenths of the cases, nil
// when nothing is known of that.
func (r *Request) ETA90(now time.Time) *time.Time {
	if r.Rate(now) == 0 || !r.forecast(now) {
		return nil
	}
	return after(*r.ForecastAt, r.LeftP90)
}

func after(t time.Time, seconds *float64) *time.Time {
	if seconds == nil {
		return nil
	}
	t = t.Add(time.Duration(*seconds * float64(time.Second)))
	return &t
}

// Condition is one thing that must hold before a table may be backfilled.
type Condition struct {
	Name    string `json:"name"`
	OK      bool   `json:"ok"`
	Message string `json:"message"` // what does not hold and what to do, or what holds
}

// Table is the configuration of one table of a site.
type Table struct {
	ID           int32
	Site         string
	Name         string // schema.table
	Active       bool
	Create       bool
	Update       bool
	Delete       bool
	CapturedFrom []string // the sides whose changes are sent
	Policies     []Policy // what decides conflicts while both are, oldest first
	ApplyOrder   int      // parents before children
	Excluded     []string // columns that are neither sent nor compared
	Mapping      *Mapping // nil where both sides have the same columns
	Version      int      // of the mapping: how often it was set
	UpdatedAt    time.Time
}

// Policy decides conflicts of which the earlier change was pushed above Since.
type Policy struct {
	Since  int64  `json:"since"`
	Winner string `json:"winner"` // a side, Quarantine, or "" while the table is captured on one side
}

// Quarantine as a policy: neither side wins, a person decides.
const Quarantine = "quarantine"

// TwoWay reports whether the table is captured on both sides.
func (t *Table) TwoWay() bool { return len(t.CapturedFrom) > 1 }

// Conflicts is the policy in force, "" for a table captured on one side.
func (t *Table) Conflicts() string {
	if !t.TwoWay() || len(t.Policies) == 0 {
		return ""
	}
	return t.Policies[len(t.Policies)-1].Winner
}

// TwoWaySince is the seq after which the table has been captured on both sides.
func (t *Table) TwoWaySince() int64 {
	since := int64(0)
	for i, p := range t.Policies {
		if p.Winner != "" && (i == 0 || t.Policies[i-1].Winner == "") {
			since = p.Since
		}
	}
	return since
}

// Captures reports whether the table's changes on a side are sent.
func (t *Table) Captures(side string) bool {
	for _, s := range t.CapturedFrom {
		if s == side {
			return true
		}
	}
	return false
}

// Receives reports whether the other side's changes of the table are applied on a side.
func (t *Table) Receives(side string) bool {
	return slices.ContainsFunc(t.CapturedFrom, func(s string) bool { return s != side })
}

// TableSide is what the agent of a side last reported of a table.
type TableSide struct {
	Side         string
	Key          []string // the key columns, nil when there is no usable key
	KeyTypes     []string
	LayoutID     int64
	Rows         *int64 // nil before the first count
	Estimated    bool
	CountedAt    *time.Time
	CaptureOK    bool
	CaptureSince *time.Time // capture is unbroken since
	Problem      string     // why the table cannot be used or capture is not healthy, "" when all is well
	// Gap is why rows may differ on the other side although every captured change was
	// applied: "" when nothing is known, or a backfill that began later has finished.
	Gap      string
	GapSince *time.Time
}

// Panel is what is known of a table and direction when somebody asks whether a
// backfill may start.
type Panel struct {
	Table     Table
	Direction Direction
	Source    TableSide
	Receiver  TableSide
	Open      *Request // the open whole-table request, if any
	OpenRows  []*Request
	Waiting   int64 // changes not yet acknowledged, those in the outbox included
	Oldest    *time.Time
	// Changes that the receiver has set aside.
	Held, Quarantined int64
	// Stopped is why the receiver does not apply the table's changes for now, "" when it does.
	Stopped      string
	StoppedSince *time.Time
	Proof        *Proof // the last finished reconciliation of the whole table, if any
}

// Proof is what the last reconciliation of a table and direction has found.
type Proof struct {
	ID       int64
	Mode     RunMode
	Verdict  string
	ClosedAt time.Time
	Unequal  int64 // keys missing or different there, neither repaired nor waived; not counted beyond 10,000
}

// Conditions lists what must hold before a backfill of the panel's table may be
// requested; a row backfill needs fewer. An open request is no condition: it is
// a conflict.
func (p *Panel) Conditions(row bool) []Condition {
	t := &p.Table
	out := []Condition{
		check("active", t.Active, "the table is active", "the table is not active: agents do not fetch it; activate it first"),
		check("operations", t.Create && t.Update, "create and update are enabled",
			"create and update must both be enabled, because rows are replayed as upserts: enable "+off(t)),
		p.capture(),
	}
	if !row {
		out = append(out, p.behind())
	}
	return out
}

func check(name string, ok bool, yes, no string) Condition {
	if ok {
		return Condition{name, true, yes}
	}
	return Condition{name, false, no}
}

func off(t *Table) string {
	var missing []string
	if !t.Create {
		missing = append(missing, "create")
	}
	if !t.Update {
		missing = append(missing, "update")
	}
	return strings.Join(missing, " and ")
}

func (p *Panel) capture() Condition {
	from := p.Direction.From
	setup := "run backfill setup --site " + p.Direction.Site + " --side " + from
	switch {
	case !p.Table.Captures(from):
		return Condition{"capture", false, "changes are not captured from " + from + " for this table"}
	case p.Source.LayoutID == 0 && p.Source.Problem == "":
		return Condition{"capture", false, "the agent of " + from + " has not looked at the table yet"}
	case p.Source.LayoutID == 0 || p.Source.CaptureOK && p.Source.Problem != "":
		return Condition{"capture", false, "on " + from + ": " + p.Source.Problem}
	case !p.Source.CaptureOK && p.Source.Problem != "":
		return Condition{"capture", false, "on " + from + " since " + moment(p.Source.GapSince) + ": " + p.Source.Problem + ": " + setup}
	case !p.Source.CaptureOK:
		return Condition{"capture", false, "capture is not installed or not enabled on " + from + ": " + setup}
	}
	return Condition{"capture", true, "capture is installed and enabled on " + p.Direction.From}
}

// moment is a time in a sentence.
func moment(t *time.Time) string {
	if t == nil {
		return "the beginning"
	}
	return t.UTC().Format("2006-01-02 15:04:05 UTC")
}

// behind holds when rows are missing by the counts, and when they may be missing or
// differ although the counts agree, because of a gap in what was sent.
func (p *Panel) behind() Condition {
	from, to := p.Direction.From, p.Direction.To
	switch {
	case p.Source.Gap != "":
		return Condition{"behind", true, to + " may lack rows or changes since " + moment(p.Source.GapSince) + ": " + p.Source.Gap}
	case p.Proof != nil && p.Proof.Unequal > 0:
		return Condition{"behind", true, fmt.Sprintf("reconciliation %d found rows of %s missing or different on %s", p.Proof.ID, from, to)}
	case p.Source.Rows == nil || p.Receiver.Rows == nil:
		return Condition{"behind", false, "the rows have not been counted on both sides yet"}
	case *p.Source.Rows > *p.Receiver.Rows:
		return Condition{"behind", true, fmt.Sprintf("%s reports %s rows more than %s", from, Thousands(*p.Source.Rows-*p.Receiver.Rows), to)}
	}
	return Condition{"behind", false, fmt.Sprintf("%s must report more rows than %s: it has %s, %s has %s; or a reconciliation must have found rows missing or different",
		from, to, Thousands(*p.Source.Rows), to, Thousands(*p.Receiver.Rows))}
}

// CanRequest reports whether all conditions hold and no request is open.
func (p *Panel) CanRequest() bool {
	return p.Open == nil && len(Unmet(p.Conditions(false))) == 0
}

// Unmet keeps the conditions that do not hold.
func Unmet(cs []Condition) []Condition {
	var out []Condition
	for _, c := range cs {
		if !c.OK {
			out = append(out, c)
		}
	}
	return out
}

var namePattern = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,39}$`)

// CheckName refuses names of sites and sides that could not stand in an address,
// a task queue or a workflow id.
func CheckName(what, name string) error {
	if namePattern.MatchString(name) {
		return nil
	}
	return Errorf(Invalid, "%s name %q: use 1 to 40 of a-z, 0-9, _ and -, beginning with a letter", what, name)
}
