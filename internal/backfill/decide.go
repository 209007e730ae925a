package backfill

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
	if !r.State.Open() || r.State == AwaitingReview {
		return Errorf(Conflict, "request %d is %s: only a walk or a release can be paused", r.ID, r.State)
	}
	if r.Paused == paused {
		return Errorf(Conflict, "request %d is %s already", r.ID, map[bool]string{true: "paused", false: "running"}[paused])
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
