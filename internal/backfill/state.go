// Package backfill is the domain: requests and the states they pass through,
// directions, effects, conditions and the errors callers decide by. It knows no
// database, no network and no workflow engine.
package backfill

import "slices"

// State is where a request stands.
type State string

// The states of a request, in the order in which it passes through them.
const (
	Pending        State = "PENDING"         // recorded, waiting for the source agent
	InProgress     State = "IN_PROGRESS"     // an agent holds the lease and walks
	AwaitingReview State = "AWAITING_REVIEW" // staged, waiting for a person
	Releasing      State = "RELEASING"       // approved, being copied into the queue
	Finished       State = "FINISHED"
	Rejected       State = "REJECTED"
	Cancelled      State = "CANCELLED"
	Failed         State = "FAILED"
)

// transitions is the one table of what may follow what. SQL, API and UI use it
// through the functions below and hold no copy.
var transitions = map[State][]State{
	Pending:        {InProgress, Cancelled, Failed},
	InProgress:     {AwaitingReview, Cancelled, Failed},
	AwaitingReview: {Releasing, Rejected, Cancelled, Failed},
	Releasing:      {Finished, Cancelled, Failed},
}

// States lists every state in the order of a request's life.
func States() []State {
	return []State{Pending, InProgress, AwaitingReview, Releasing, Finished, Rejected, Cancelled, Failed}
}

// Open reports whether a request in this state is still under way.
func (s State) Open() bool { return len(transitions[s]) > 0 }

// Valid reports whether s is one of the states.
func (s State) Valid() bool { return slices.Contains(States(), s) }

// CanBecome reports whether to may follow s.
func (s State) CanBecome(to State) bool { return slices.Contains(transitions[s], to) }

// OpenStates lists the states of requests that are under way.
func OpenStates() []string {
	return names(func(s State) bool { return s.Open() })
}

// Before lists the states from which to can be reached in one step.
func Before(to State) []string {
	return names(func(s State) bool { return s.CanBecome(to) })
}

func names(keep func(State) bool) []string {
	var out []string
	for _, s := range States() {
		if keep(s) {
			out = append(out, string(s))
		}
	}
	return out
}

// Effect is what releasing a staged row would do to the receiving side.
type Effect string

// The effects a staged row can have.
const (
	Insert    Effect = "insert"
	Overwrite Effect = "overwrite"
	Identical Effect = "identical"
	Unknown   Effect = "unknown" // the receiving agent has not looked yet
)

// Superseded is no effect of a row, but lists of rows can be narrowed to it: what
// overtook the row says that it is not sent.
const Superseded Effect = "superseded"

// Effects lists every effect.
func Effects() []Effect { return []Effect{Insert, Overwrite, Identical, Unknown} }

// Mode says how a walk chooses its rows.
type Mode string

// The modes of a request.
const (
	ModeFull Mode = "full" // every row up to the frozen upper key
	ModeRow  Mode = "row"  // the one row of the request's key
	// ModeDifferences walks the keys that the last reconciliation found missing or different.
	ModeDifferences Mode = "differences"
)
