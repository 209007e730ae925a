package backfill

import (
	"fmt"
	"time"
)

// RunState is where a reconciliation stands.
type RunState string

// The states of a reconciliation.
const (
	RunPending   RunState = "PENDING" // recorded, waiting for both agents
	RunRunning   RunState = "RUNNING"
	RunFinished  RunState = "FINISHED"  // every leaf is judged; the verdict says how
	RunCancelled RunState = "CANCELLED" // a verdict of a run that did not finish is never EQUAL
	RunFailed    RunState = "FAILED"
)

// Open reports whether a run in this state is still under way.
func (s RunState) Open() bool { return s == RunPending || s == RunRunning }

// RunMode says which leaves a reconciliation compares.
type RunMode string

// The modes of a reconciliation.
const (
	RunFull    RunMode = "full"    // every leaf
	RunSampled RunMode = "sampled" // leaves drawn at random, of the others the counts
	RunLeaves  RunMode = "leaves"  // one leaf of an earlier run again
	RunRepair  RunMode = "repair"  // the differing keys of an earlier run are sent, their leaves compared again
	RunShadow  RunMode = "shadow"  // the keys of shadow reads
)

// DifferenceKind says how a key differs.
type DifferenceKind string

// The ways in which a key differs.
const (
	Missing         DifferenceKind = "missing"   // the receiver has no such row
	DifferentValues DifferenceKind = "different" // in at least one column
	Surplus         DifferenceKind = "surplus"   // only the receiver has the row
)

// Reconciliation is one run that compares a table of both sides.
type Reconciliation struct {
	ID    int64
	Table string
	Direction
	TableID     int32
	Mode        RunMode
	Sample      int   // of a sampled run: leaves compared in full
	Parent      int64 // of modes leaves and repair: the run whose leaves they are
	State       RunState
	RequestedBy string
	RequestedAt time.Time
	StartedAt   *time.Time
	ClosedAt    *time.Time
	Note        string
	Reason      string // why it FAILED or was cancelled
	Waiting     string // what it waits for now, "" when nothing

	LayoutID         int64 // 0 until the source's agent has begun
	Shape            string
	ReceiverLayoutID int64 // 0 until the receiver's agent has looked
	ReceiverShape    string
	ReceiverOrder    []string
	Normaliser       int
	Excluded         []string
	Buckets          int32
	LeafRows         int
	Floor            string
	Touched          bool
	Cut              bool
	LeafCount        int64
	Both             bool // the table is captured on the receiver too
	ByKey            bool // its leaves are single keys: those of shadow reads

	Verdict      string // "" while it is open
	Root         string
	Counts       RunCounts
	ReceiverRows int64
}

// RunCounts is how a run's leaves and keys stand.
type RunCounts struct {
	Equal     int64 `json:"equal"` // leaves
	Different int64 `json:"different"`
	Unknown   int64 `json:"unknown"`
	Counted   int64 `json:"counted"`
	Pending   int64 `json:"pending"`
	Rows      int64 `json:"rows"` // on the source
	Covered   int64 `json:"covered"`

	Missing         int64 `json:"missing"` // keys
	DifferentValues int64 `json:"different_values"`
	Surplus         int64 `json:"surplus"`
	Unsettled       int64 `json:"unsettled"`
	Open            int64 `json:"open"` // neither repaired nor waived
	Repaired        int64 `json:"repaired"`
	Waived          int64 `json:"waived"`
}

// WorkflowID is the id of the run's workflow: one per table and direction.
func (r *Reconciliation) WorkflowID() string {
	return fmt.Sprintf("reconcile/%s/%s/%s", r.Site, r.Table, r.From)
}

// Percent is how far the run has come, 0 to 100, by leaves; the cutting of leaves
// goes on while they are judged, so it is an upper estimate until they are all cut.
func (r *Reconciliation) Percent() int {
	if !r.State.Open() {
		return 100
	}
	c := r.Counts
	done := c.Equal + c.Different + c.Unknown + c.Counted
	return min(percent(done, done+c.Pending), 99)
}

// Clean reports whether the run proves the table: the whole of it was found equal,
// without anything having been repaired in between.
func (r *Reconciliation) Clean() bool {
	return r.State == RunFinished && r.Mode == RunFull && r.Verdict == "EQUAL"
}
