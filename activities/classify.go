package activities

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
	"backfill/internal/side"
)

// classifyRows is how many staged rows are judged at a time.
const classifyRows = 10_000

// Classify says of every staged row of a request what releasing it would do to
// this side, while the walk goes on, and returns once the walk is over and all its
// rows are judged, or the request is decided.
func (a *Agent) Classify(ctx context.Context, requestID int64) error {
	rung, done := a.bell(fmt.Sprintf("request %d", requestID))
	defer done()
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	req, err := a.store.Request(ctx, requestID)
	if err != nil {
		return surface(err)
	}
	stopping := activity.GetWorkerStopChannel(ctx)
	for {
		after, staged, state, err := a.store.ClassifyFrom(ctx, requestID)
		if err != nil {
			return surface(err)
		}
		if !state.Open() || state == backfill.Releasing || after == staged && state == backfill.AwaitingReview {
			return nil
		}
		if after < staged {
			err := a.classify(ctx, req, after, min(after+classifyRows, staged))
			if errors.Is(err, side.ErrLayout) || side.Permanent(err) {
				// The receiver's table can be mended while the rows wait to be read: look again, but not often.
				return temporal.NewApplicationErrorWithOptions(message(err), "table", temporal.ApplicationErrorOptions{NextRetryDelay: 10 * time.Second})
			}
			if err != nil {
				return surface(err)
			}
			continue
		}
		if staged == 0 {
			// Without an answer the walk begins at the start.
			if err := a.compare(ctx, req); err != nil {
				activity.GetLogger(ctx).Warn("leaves not compared", "request", requestID, "error", message(err))
			}
		}
		select {
		case <-stopping:
			return fmt.Errorf("the agent stops")
		case <-ctx.Done():
			return ctx.Err()
		case <-rung:
		case <-time.After(a.Cycle):
		}
	}
}

func (a *Agent) classify(ctx context.Context, req *backfill.Request, after, to int64) error {
	// The layout is known once a row is staged.
	r, err := a.store.Request(ctx, req.ID)
	if err != nil {
		return err
	}
	layout, err := a.store.Layout(ctx, r.LayoutID)
	if err != nil {
		return err
	}
	table, err := a.store.MappedTable(ctx, req.Site, req.Table)
	if err != nil {
		return err
	}
	keys := func(w io.Writer) error {
		if err := a.store.CopyStagedKeys(ctx, req.ID, after, to, w); err != nil {
			return err
		}
		return a.faults.at("classify: read")
	}
	rows := func(numbers []int64, w io.Writer) error {
		if err := a.store.CopyStagedRows(ctx, req.ID, numbers, w); err != nil {
			return err
		}
		return a.faults.at("classify: rows read")
	}
	here := side.Relation{Name: table.Relation(a.db.Side)}
	mapping := table.Made
	var result int64
	if mapping != nil {
		here.Key = mapping.KeyOrNil()
		if result, err = a.store.PutLayout(ctx, mapping.Layout(nil)); err != nil {
			return err
		}
	}
	store := func(at int64, effects io.Reader) error {
		return a.store.StoreEffects(ctx, req.ID, r.Revision, after, to, at, result, effects)
	}
	fresh := func(at int64) error { return a.store.StoreInserts(ctx, req.ID, r.Revision, after, to, at) }
	var bounds []backfill.Key
	if r.Mode == backfill.ModeFull {
		low, high, err := a.store.StagedBounds(ctx, req.ID, after+1, to)
		if err != nil {
			return err
		}
		bounds = []backfill.Key{low, high}
	}
	err = a.db.Classify(ctx, req.ID, table.ID, here, mapping, layout, bounds, keys, rows, store, fresh)
	if side.Unconvertible(err) {
		if half := after + (to-after)/2; half > after {
			if err := a.classify(ctx, req, after, half); err != nil {
				return err
			}
			return a.classify(ctx, req, half, to)
		}
		// This side's encoding lacks a character of the row: what it would do stays unknown.
		err = a.db.Classify(ctx, req.ID, table.ID, here, mapping, layout, nil, nil, nil, store, nil)
	}
	if err != nil {
		return err
	}
	return a.faults.at("classify: stored")
}
