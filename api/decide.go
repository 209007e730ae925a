package api

import (
	"context"
	"errors"
	"strings"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Decision is what a person decides about the staged rows of a request.
type Decision struct {
	Revision      int64 // of the staged set that was read
	Note          string
	SkipIdentical bool // approve all but the rows the receiver holds already
}

// Approve lets the staged rows be released. It is a Conflict, and changes nothing,
// unless the request awaits review at just that revision.
func (s *Service) Approve(ctx context.Context, a Account, id int64, d Decision) (*backfill.Request, error) {
	if err := a.needs(control.Reviewer, "approving"); err != nil {
		return nil, err
	}
	if err := checkNote(d.Note); err != nil {
		return nil, err
	}
	return s.change(ctx, id, func(r *backfill.Request) error {
		second, err := s.NeedsSecond(ctx, a, r)
		if err == nil && second {
			err = backfill.SecondPerson(id)
		}
		if err != nil {
			return err
		}
		return r.Decidable(d.Revision)
	}, func(ctx context.Context, r *backfill.Request) error { return s.Runs.Approve(ctx, r, a.Name, d) })
}

// NeedsSecond reports whether an account may not approve a request because it asked
// for it, and its site wants two people.
func (s *Service) NeedsSecond(ctx context.Context, a Account, r *backfill.Request) (bool, error) {
	if !backfill.SamePerson(a.Name, r.RequestedBy) {
		return false, nil
	}
	site, err := s.Store.Site(ctx, r.Site)
	return err == nil && site.SecondPerson, err
}

// Judge has the receiver's agent judge the effects of the staged rows again, as its
// rows are now. The staged set gets a new revision: who wants to decide reads again.
func (s *Service) Judge(ctx context.Context, a Account, id int64) (*backfill.Request, error) {
	if err := a.needs(control.Requester, "judging again"); err != nil {
		return nil, err
	}
	return s.change(ctx, id, (*backfill.Request).Judgeable,
		func(ctx context.Context, r *backfill.Request) error { return s.Runs.Judge(ctx, r, a.Name) })
}

// Reject closes a request and sends nothing. The note must say why.
func (s *Service) Reject(ctx context.Context, a Account, id int64, d Decision) (*backfill.Request, error) {
	if err := a.needs(control.Reviewer, "rejecting"); err != nil {
		return nil, err
	}
	if strings.TrimSpace(d.Note) == "" {
		return nil, &backfill.Error{Code: backfill.Invalid, Message: "a rejection needs a note that says why",
			Fields: []backfill.FieldError{{Field: "note", Message: "is empty: say why"}}}
	}
	if err := checkNote(d.Note); err != nil {
		return nil, err
	}
	return s.change(ctx, id, func(r *backfill.Request) error { return r.Decidable(d.Revision) },
		func(ctx context.Context, r *backfill.Request) error { return s.Runs.Reject(ctx, r, a.Name, d) })
}

// Pause holds a walk or a release at its next page or batch.
func (s *Service) Pause(ctx context.Context, a Account, id int64, note string) (*backfill.Request, error) {
	return s.hold(ctx, a, id, note, "pausing", func(r *backfill.Request) error { return r.Pausable(true) }, s.Runs.Pause)
}

// Resume lets a paused request go on.
func (s *Service) Resume(ctx context.Context, a Account, id int64, note string) (*backfill.Request, error) {
	return s.hold(ctx, a, id, note, "resuming", func(r *backfill.Request) error { return r.Pausable(false) }, s.Runs.Resume)
}

// Cancel ends an open request. What was released stays released.
func (s *Service) Cancel(ctx context.Context, a Account, id int64, note string) (*backfill.Request, error) {
	return s.hold(ctx, a, id, note, "cancelling", (*backfill.Request).Cancellable, s.Runs.Cancel)
}

func (s *Service) hold(ctx context.Context, a Account, id int64, note, what string, possible func(*backfill.Request) error,
	run func(context.Context, *backfill.Request, string, string) error) (*backfill.Request, error) {
	if err := a.needs(control.Requester, what); err != nil {
		return nil, err
	}
	if err := checkNote(note); err != nil {
		return nil, err
	}
	return s.change(ctx, id, possible, func(ctx context.Context, r *backfill.Request) error { return run(ctx, r, a.Name, note) })
}

// change asks the request's workflow to do what the request's state allows. The
// workflow decides; asking the state first gives a plain answer while it is away.
func (s *Service) change(ctx context.Context, id int64, possible func(*backfill.Request) error,
	run func(context.Context, *backfill.Request) error) (*backfill.Request, error) {
	r, err := s.Store.Request(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := possible(r); err != nil {
		return nil, err
	}
	if err := run(ctx, r); err != nil {
		if !errors.Is(err, errNoRun) {
			return nil, err
		}
		// The run may have ended since the state was read.
		if r, err := s.Store.Request(ctx, id); err == nil {
			if err := possible(r); err != nil {
				return nil, err
			}
		}
		return nil, err
	}
	return s.Store.Request(ctx, id)
}
