package activities

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/activity"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Control works on the control database only.
type Control struct {
	Store *control.Store
	Log   *zap.Logger

	// What the sweep needs of the workflow engine. Each may be called again and again.
	StartBackfill func(context.Context, *backfill.Request) error          // starts a request's workflow unless it runs
	StartSync     func(ctx context.Context, site, side string) error      // starts a side's sync unless it runs
	Running       func(context.Context) (workflowIDs []string, err error) // the Backfill workflows that run
	Refresh       func(ctx context.Context, workflowID string) error      // tells one to look at its request again

	// SweepEvery is how often requests and workflows are compared; default 5 s.
	SweepEvery time.Duration
	// ReleaseRows is the most rows a release batch copies under the direction's lock; default 10,000.
	ReleaseRows int
}

// Look returns a request as it stands.
func (c *Control) Look(ctx context.Context, requestID int64) (Snapshot, error) {
	return c.answer(c.Store.Request(ctx, requestID))
}

func (c *Control) answer(r *backfill.Request, err error) (Snapshot, error) {
	if err != nil {
		return Snapshot{}, surface(err)
	}
	return snapshot(r), nil
}

// Verdict is a decision about a request's staged rows.
type Verdict struct {
	RequestID int64            `json:"request_id"`
	Approve   bool             `json:"approve"`
	Decision  control.Decision `json:"decision"`
}

// Decide records a decision. The first one wins; any other is a conflict and
// changes nothing.
func (c *Control) Decide(ctx context.Context, v Verdict) (Snapshot, error) {
	decide := c.Store.Reject
	if v.Approve {
		decide = c.Store.Approve
	}
	r, err := decide(ctx, v.RequestID, v.Decision)
	if backfill.CodeOf(err) == backfill.Conflict {
		// This very decision may have been recorded by an attempt whose answer was lost.
		if now, e := c.Store.Request(ctx, v.RequestID); e == nil && activity.GetInfo(ctx).Attempt > 1 && decidedBy(now, v) {
			return snapshot(now), nil
		}
	}
	return c.answer(r, err)
}

func decidedBy(r *backfill.Request, v Verdict) bool {
	approved := r.State == backfill.Releasing || r.State == backfill.Finished
	return r.ReviewedBy == v.Decision.By && r.Revision == v.Decision.Revision && r.ReviewNote == v.Decision.Note &&
		(v.Approve && approved || !v.Approve && r.State == backfill.Rejected)
}

// Hold pauses or resumes a request.
type Hold struct {
	RequestID int64  `json:"request_id"`
	By        string `json:"by"`
	Paused    bool   `json:"paused"`
}

// Pause holds a walk or a release at its next page or batch, or lets it go on.
func (c *Control) Pause(ctx context.Context, h Hold) (Snapshot, error) {
	return c.answer(c.Store.Pause(ctx, h.RequestID, h.By, h.Paused))
}

// Closing ends a request before its time.
type Closing struct {
	RequestID int64          `json:"request_id"`
	By        string         `json:"by"`
	To        backfill.State `json:"to"` // CANCELLED or FAILED
	Reason    string         `json:"reason"`
}

// Close cancels or fails a request. What was released stays released.
func (c *Control) Close(ctx context.Context, v Closing) (Snapshot, error) {
	return c.answer(c.Store.Close(ctx, v.RequestID, v.By, v.To, v.Reason))
}

// Released is the progress of a release.
type Released struct {
	Rows int64 `json:"rows"`
	Of   int64 `json:"of"`
}

// Release copies a request's approved rows into the queue, batch after batch,
// until all are through, or a person pauses or closes the request.
func (c *Control) Release(ctx context.Context, requestID int64) (Snapshot, error) {
	progress := Released{}
	report := make(chan Released, 1)
	stopBeat := beat(ctx, func() any {
		select {
		case progress = <-report:
		default:
		}
		return progress
	})
	defer stopBeat()
	stopping := activity.GetWorkerStopChannel(ctx)
	for {
		done, err := c.Store.ReleaseBatch(ctx, requestID, c.ReleaseRows)
		switch {
		case errors.Is(err, control.ErrPaused), errors.Is(err, control.ErrFenced):
			return c.Look(ctx, requestID)
		case err != nil:
			return Snapshot{}, permanent(fmt.Errorf("release request %d: %w", requestID, err))
		case done:
			return c.Look(ctx, requestID)
		}
		if r, err := c.Store.Request(ctx, requestID); err == nil {
			select {
			case report <- Released{Rows: r.Released, Of: r.Staged}:
			default:
			}
		}
		select {
		case <-stopping:
			return Snapshot{}, fmt.Errorf("the worker stops")
		case <-ctx.Done():
			return Snapshot{}, ctx.Err()
		default:
		}
	}
}

// Sweep brings requests and workflows together, again and again for a while: it
// starts what the workflow engine has not heard of, or has lost, keeps every
// side's sync running, and wakes workflows whose request was closed elsewhere.
func (c *Control) Sweep(ctx context.Context) error {
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	stopping := activity.GetWorkerStopChannel(ctx)
	for end := time.Now().Add(20 * time.Minute); time.Now().Before(end); {
		if err := c.sweep(ctx); err != nil {
			return surface(err)
		}
		select {
		case <-stopping:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(c.SweepEvery):
		}
	}
	return nil
}

func (c *Control) sweep(ctx context.Context) error {
	sites, err := c.Store.Sites(ctx)
	if err != nil {
		return err
	}
	for _, site := range sites {
		for _, side := range site.Sides {
			if err := c.StartSync(ctx, site.Name, side.Name); err != nil {
				return err
			}
		}
	}
	running, err := c.Running(ctx)
	if err != nil {
		return err
	}
	open, err := c.Store.Requests(ctx, control.RequestFilter{States: backfill.OpenStates(), Limit: 100_000})
	if err != nil {
		return err
	}
	var wanted []string
	for _, r := range open {
		id := r.WorkflowID()
		wanted = append(wanted, id)
		if slices.Contains(running, id) {
			continue
		}
		if err := c.StartBackfill(ctx, r); err != nil {
			return err
		}
	}
	for _, id := range running {
		if !slices.Contains(wanted, id) {
			c.Log.Info("a workflow runs whose request is closed", zap.String("workflow", id))
			if err := c.Refresh(ctx, id); err != nil {
				return err
			}
		}
	}
	return nil
}
