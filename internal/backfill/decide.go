package backfill

import (
	"slices"
	"strings"
)

// Decidable returns why the request cannot be approved or rejected now by someone
// who read its staged rows at a revision, or nil. The database decides a race;
// this answers early.
func (r *Request) Decidable(revision int64) error {
	if r.State != AwaitingReview {
		return Errorf(Conflict, "request %d is %s: only a request that is %s can be decided", r.ID, r.State, AwaitingReview)
	}
	if r.Revision != revision {
		return Errorf(Conflict, "request %d stands at revision %d, the decision is for revision %d: read the rows again", r.ID, r.Revision, revision)
	}
	return nil
}

// Pausable returns why the request cannot be paused now (or resumed, with paused
// false), or nil.
func (r *Request) Pausable(paused bool) error {
	switch {
	case (!r.State.Open() || r.State == AwaitingReview) && paused:
		return Errorf(Conflict, "request %d is %s: only a walk or a release can be paused", r.ID, r.State)
	case !r.State.Open() || r.State == AwaitingReview:
		return Errorf(Conflict, "request %d is %s: only a paused walk or release can be resumed", r.ID, r.State)
	case r.Paused && paused:
		return Errorf(Conflict, "request %d is paused already", r.ID)
	case !r.Paused && !paused:
		return Errorf(Conflict, "request %d is not paused: there is nothing to resume", r.ID)
	}
	return nil
}

// Cancellable returns why the request cannot be cancelled now, or nil.
func (r *Request) Cancellable() error {
	if !r.State.CanBecome(Cancelled) {
		return Errorf(Conflict, "request %d is %s already", r.ID, r.State)
	}
	return nil
}

// Judgeable returns why the effects of the staged rows cannot be judged again now, or nil.
func (r *Request) Judgeable() error {
	if r.State != AwaitingReview {
		return Errorf(Conflict, "request %d is %s: only rows of a request that is %s are judged again", r.ID, r.State, AwaitingReview)
	}
	return nil
}

// ViaTemporal marks a decision that came as a signal to the workflow rather than
// through the API, where an account stands behind the name.
const ViaTemporal = "temporal"

// SecondPerson is why somebody who asked for a backfill may not approve it.
func SecondPerson(id int64) error {
	return Errorf(Forbidden, "request %d was asked for by the same person: its site wants another reviewer to approve it", id)
}

// SamePerson reports whether two names are one person's: case and blanks around them
// do not tell people apart.
func SamePerson(a, b string) bool {
	return strings.EqualFold(strings.TrimSpace(a), strings.TrimSpace(b))
}

// placeholders stand in examples of payloads until somebody writes a name.
var placeholders = []string{"", "your name", "yourname", "name", "me", "someone", "somebody", "nobody", "user", "username", "string", "todo", "xxx"}

// CheckPerson refuses a decision's name that is nobody's.
func CheckPerson(name string) error {
	plain := strings.ToLower(strings.Trim(strings.TrimSpace(name), "<>[]{}()\"'. \t"))
	if slices.Contains(placeholders, plain) {
		return Errorf(Invalid, "a decision needs the name of whoever made it, and %q is nobody's: use an account or token named after a person", name)
	}
	return nil
}
