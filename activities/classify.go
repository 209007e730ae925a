package activities

import (
	"context"
	"fmt"
	"io"
	"time"

	"go.temporal.io/sdk/activity"

	"backfill/internal/backfill"
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
			if err := a.classify(ctx, req, after, min(after+classifyRows, staged)); err != nil {
				return permanent(err)
			}
			continue
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
	table, err := a.store.Table(ctx, req.Site, req.Table)
	if err != nil {
		return err
	}
	return a.db.Classify(ctx, req.ID, table.ID, req.Table, layout,
		func(w io.Writer) error { return a.store.CopyStaged(ctx, req.ID, after, to, w) },
		func(at int64, r io.Reader) error { return a.store.StoreEffects(ctx, req.ID, after, to, at, r) })
}
