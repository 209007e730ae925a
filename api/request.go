package api

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// RequestInput is what somebody asks to be backfilled.
type RequestInput struct {
	Site  string
	Table string // any spelling
	From  string // the source side
	// Key is the one row wanted: a JSON array in key order, or an object by column,
	// of strings, numbers and booleans. Empty: the whole table.
	Key  []byte
	Mode string // "" or "full"; "differences"; "row" with a key
	Note string
}

// RequestBackfill records a request and returns at once; the workflow is started
// now when the engine answers, and by a sweep when it does not. It is a Conflict
// that names the open request when there is one, and Refused with every condition
// that does not hold.
func (s *Service) RequestBackfill(ctx context.Context, a Account, in RequestInput) (*backfill.Request, error) {
	if err := a.needs(control.Requester, "requesting a backfill"); err != nil {
		return nil, err
	}
	if err := checkNote(in.Note); err != nil {
		return nil, err
	}
	p, err := s.Store.Panel(ctx, in.Site, in.Table, in.From)
	if err != nil {
		return nil, err
	}
	mode, err := modeOf(in)
	if err != nil {
		return nil, err
	}
	var key backfill.Key
	if mode == backfill.ModeRow && len(p.Source.Key) > 0 {
		if key, err = s.keyOf(ctx, p, in.Key); err != nil {
			return nil, err
		}
	}
	if err := alreadyOpen(p, mode, key); err != nil {
		return nil, err
	}
	if err := refused(p.Conditions(mode == backfill.ModeRow)); err != nil {
		return nil, err
	}
	proof := int64(0)
	if mode == backfill.ModeDifferences {
		if p.Proof == nil || p.Proof.Unequal == 0 {
			return nil, fieldError(backfill.Refused, "mode", "differences needs a reconciliation of the table that found rows missing or different: run one, or use full")
		}
		proof = p.Proof.ID
	}
	if mode == backfill.ModeRow && key == nil {
		return nil, backfill.Errorf(backfill.Refused, "%s has no key known yet: the agent of %s has to look at it first", p.Table.Name, in.From)
	}
	r, err := s.Store.CreateRequest(ctx, control.NewRequest{
		Proof: proof, Direction: p.Direction.ID, TableID: p.Table.ID, Key: key, Mode: mode, By: a.Name, Note: in.Note,
	})
	if err != nil {
		return nil, err
	}
	s.start(ctx, r)
	r.Waiting, err = s.Waiting(ctx, r)
	return r, err
}

func modeOf(in RequestInput) (backfill.Mode, error) {
	row := len(in.Key) > 0
	switch mode := backfill.Mode(in.Mode); {
	case in.Mode != "" && mode != backfill.ModeFull && mode != backfill.ModeRow && mode != backfill.ModeDifferences:
		return "", fieldError(backfill.Invalid, "mode", "use full, row or differences")
	case mode == backfill.ModeDifferences && row:
		return "", fieldError(backfill.Invalid, "mode", "differences is for the table, but a key was given: leave one of them out")
	case mode == backfill.ModeDifferences:
		return mode, nil
	case mode == backfill.ModeFull && row:
		return "", fieldError(backfill.Invalid, "mode", "full is for the whole table, but a key was given: leave one of them out")
	case mode == backfill.ModeRow && !row:
		return "", fieldError(backfill.Invalid, "key", "mode row needs the key of the row")
	case row:
		return backfill.ModeRow, nil
	}
	return backfill.ModeFull, nil
}

func alreadyOpen(p *backfill.Panel, mode backfill.Mode, key backfill.Key) error {
	open := p.Open
	if mode == backfill.ModeRow {
		open = nil
		if i := slices.IndexFunc(p.OpenRows, func(r *backfill.Request) bool { return slices.Equal(r.Key, key) }); i >= 0 {
			open = p.OpenRows[i]
		}
	}
	if open == nil {
		return nil
	}
	e := backfill.Errorf(backfill.Conflict, "request %d is open for this table and direction: decide or cancel it first", open.ID)
	e.Open = open.ID
	return e
}

func refused(conditions []backfill.Condition) error {
	unmet := backfill.Unmet(conditions)
	if len(unmet) == 0 {
		return nil
	}
	e := backfill.Errorf(backfill.Refused, "the table cannot be backfilled now: %s", unmet[0].Message)
	for _, c := range unmet {
		e.Fields = append(e.Fields, backfill.FieldError{Field: c.Name, Message: c.Message})
	}
	return e
}

// startTimeout bounds how long a request waits for the workflow engine.
const startTimeout = 2 * time.Second

func (s *Service) start(ctx context.Context, r *backfill.Request) {
	// The request is recorded: a caller that goes away now must not keep it from starting.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
	defer cancel()
	if err := s.Runs.Start(ctx, r, s.ReviewURL(r.ID)); err != nil {
		s.Log.Warn("the workflow was not started; the next sweep will", zap.Int64("request", r.ID), zap.String("workflow", r.WorkflowID()), zap.Error(err))
	}
}

// Backfills lists requests newest first. A site, table or side that does not
// exist is NotFound rather than an empty list.
func (s *Service) Backfills(ctx context.Context, f control.RequestFilter) ([]*backfill.Request, error) {
	var err error
	if f.Table, err = s.resolve(ctx, f.Site, f.Table, f.From); err != nil {
		return nil, err
	}
	return s.Store.Requests(ctx, f)
}

// resolve checks the parts of a filter that are given and returns the table in
// the spelling it is stored in.
func (s *Service) resolve(ctx context.Context, site, table, from string) (string, error) {
	if site != "" {
		if _, err := s.Store.Site(ctx, site); err != nil {
			return "", err
		}
		if from != "" {
			if _, err := s.Store.Direction(ctx, site, from); err != nil {
				return "", err
			}
		}
		if table != "" {
			return s.Store.TableName(ctx, site, table)
		}
	}
	if table == "" {
		return "", nil
	}
	t, err := backfill.ParseTableName(table)
	return t.String(), err
}

// Backfill returns one request, or NotFound.
func (s *Service) Backfill(ctx context.Context, id int64) (*backfill.Request, error) {
	r, err := s.Store.Request(ctx, id)
	if err != nil {
		return nil, err
	}
	r.Waiting, err = s.Waiting(ctx, r)
	return r, err
}

// Delivery says how much of what a request has released the receiver does not have yet.
func (s *Service) Delivery(ctx context.Context, id int64) (control.Delivery, error) {
	return s.Store.Delivery(ctx, id)
}
