package activities

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/activity"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
)

// Control works on the control database only.
type Control struct {
	Store *control.Store
	Log   *zap.Logger

	// What the sweep needs of the workflow engine. Each may be called again and again.
	StartBackfill func(context.Context, *backfill.Request) error          // starts a request's workflow unless it runs
	StartSync     func(ctx context.Context, site, side string) error      // starts a side's sync unless it runs
	SyncIDs       func(site, side string) []string                        // the workflows that are a side's sync; nil: not known
	Running       func(context.Context) (workflowIDs []string, err error) // the workflows of backfills and syncs that run
	Refresh       func(ctx context.Context, workflowID string) error      // tells one to look at its request again
	// StartReconcile starts a reconciliation's workflow unless it runs.
	StartReconcile func(context.Context, *backfill.Reconciliation) error

	// SweepEvery is how often requests and workflows are compared; default 5 s.
	SweepEvery time.Duration
	// ReleaseRows is the most rows a release batch copies under the direction's lock; default 20,000.
	ReleaseRows int
	// Lead is how many changes may be queued before a release waits for the receiver.
	// 40,000, two batches of the receiver's, keeps one ready while it applies the other.
	// 0 is any number.
	Lead int
	// Keep says how long what nothing needs any more is kept.
	Keep control.Keep

	faults faults
	ending map[string]bool // workflows that the last sweep found running for a closed request
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

// recorded answers what a person asked for. When it is a conflict on a retry, the
// very same may have been recorded by an attempt whose answer was lost: as says so.
func (c *Control) recorded(ctx context.Context, requestID int64, r *backfill.Request, err error, point string, as func(*backfill.Request) bool) (Snapshot, error) {
	if backfill.CodeOf(err) == backfill.Conflict && activity.GetInfo(ctx).Attempt > 1 {
		if now, e := c.Store.Request(ctx, requestID); e == nil && as(now) {
			return snapshot(now), nil
		}
	}
	if err == nil {
		err = c.faults.at(point)
	}
	return c.answer(r, err)
}

// Verdict is a decision about a request's staged rows.
type Verdict struct {
	RequestID int64            `json:"request_id"`
	Approve   bool             `json:"approve"`
	Decision  control.Decision `json:"decision"`
	Origin    control.Origin   `json:"origin,omitzero"`
}

// Decide records a decision. The first one wins; any other is a conflict and
// changes nothing.
func (c *Control) Decide(ctx context.Context, v Verdict) (Snapshot, error) {
	decide := c.Store.Reject
	if v.Approve {
		decide = c.Store.Approve
	}
	r, err := decide(control.WithOrigin(ctx, v.Origin), v.RequestID, v.Decision)
	return c.recorded(ctx, v.RequestID, r, err, "decide: recorded", func(now *backfill.Request) bool { return decidedBy(now, v) })
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
	Note      string `json:"note,omitempty"`
	Paused    bool   `json:"paused"`

	Origin control.Origin `json:"origin,omitzero"`
}

// Pause holds a walk or a release at its next page or batch, or lets it go on.
func (c *Control) Pause(ctx context.Context, h Hold) (Snapshot, error) {
	r, err := c.Store.Pause(control.WithOrigin(ctx, h.Origin), h.RequestID, h.By, h.Note, h.Paused)
	return c.recorded(ctx, h.RequestID, r, err, "pause: recorded", func(now *backfill.Request) bool { return now.Paused == h.Paused && now.State.Open() })
}

// Judgement asks for the effects of a request's staged rows to be judged again.
type Judgement struct {
	RequestID int64  `json:"request_id"`
	Revision  int64  `json:"revision"` // as it was when somebody asked
	By        string `json:"by"`

	Origin control.Origin `json:"origin,omitzero"`
}

// Rejudge forgets the effects of a request's staged rows and gives the set a new revision.
func (c *Control) Rejudge(ctx context.Context, j Judgement) (Snapshot, error) {
	now, err := c.Store.Request(ctx, j.RequestID)
	if err != nil || now.Revision > j.Revision {
		return c.answer(now, err) // done already, by an attempt whose answer was lost, or by somebody else
	}
	if now, err = c.Store.Rejudge(control.WithOrigin(ctx, j.Origin), j.RequestID, j.By); err == nil {
		err = c.faults.at("judge: recorded")
	}
	return c.answer(now, err)
}

// Closing ends a request before its time.
type Closing struct {
	RequestID int64          `json:"request_id"`
	By        string         `json:"by"`
	To        backfill.State `json:"to"` // CANCELLED or FAILED
	Reason    string         `json:"reason"`
	Origin    control.Origin `json:"origin,omitzero"`
}

// Close cancels or fails a request. What was released stays released.
func (c *Control) Close(ctx context.Context, v Closing) (Snapshot, error) {
	r, err := c.Store.Close(control.WithOrigin(ctx, v.Origin), v.RequestID, v.By, v.To, v.Reason)
	return c.recorded(ctx, v.RequestID, r, err, "close: recorded", func(now *backfill.Request) bool { return now.State == v.To && now.Reason == v.Reason })
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
	req, err := c.Store.Request(ctx, requestID)
	if err != nil {
		return Snapshot{}, surface(err)
	}
	// Fewer than 20 rows take no less time.
	keeper := gatekeeper{store: c.Store, req: req, faults: c.faults, size: pace.PageSize{Target: releaseTarget, Min: min(20, c.ReleaseRows), Max: c.ReleaseRows, MaxBytes: math.MaxInt64}}
	keeper.course.stands = func(context.Context) (standing, error) {
		return standing{rows: keeper.req.ReleasedUpTo, left: keeper.req.Staged - keeper.req.ReleasedUpTo}, nil
	}
	for {
		done, err := c.releaseBatch(ctx, &keeper, stopping)
		switch {
		case errors.Is(err, control.ErrPaused), errors.Is(err, control.ErrFenced):
			return c.Look(ctx, requestID)
		case err != nil:
			return Snapshot{}, permanent(fmt.Errorf("release request %d: %w", requestID, err))
		case done:
			if err := c.faults.at("release: finished"); err != nil {
				return Snapshot{}, surface(err)
			}
			return c.Look(ctx, requestID)
		}
		if err := c.faults.at("release: batch committed"); err != nil {
			return Snapshot{}, surface(err)
		}
		select {
		case report <- Released{Rows: keeper.req.Released, Of: keeper.req.Staged}:
		default:
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

// releaseTarget is what a batch of a release should take, under the direction's
// lock: a push waits for it.
const releaseTarget = 250 * time.Millisecond

// absence is how long a release waits for a receiver that applies nothing.
const absence = 3 * time.Second

// follow waits while the queue is as long as a release may make it, and the receiver
// gets on with it: a live change comes after what is queued, and would wait for all
// of it. A receiver that is away holds nothing up.
func (c *Control) follow(ctx context.Context, k *gatekeeper, stopping <-chan struct{}) error {
	direction := k.req.Direction.ID
	for c.Lead > 0 {
		ahead, err := c.Store.Lead(ctx, direction)
		if err != nil || ahead.Away || ahead.Rows < int64(c.Lead) {
			return err
		}
		if ahead.Applied != k.applied || k.appliedAt.IsZero() {
			k.applied, k.appliedAt = ahead.Applied, time.Now()
		} else if time.Since(k.appliedAt) > absence {
			return nil
		}
		if err := c.Store.MayGo(ctx, k.req.ID, nil); err != nil {
			return err
		}
		select {
		case <-stopping:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// releaseBatch asks the gates and releases a batch if they are open.
func (c *Control) releaseBatch(ctx context.Context, k *gatekeeper, stopping <-chan struct{}) (done bool, err error) {
	if pass, err := k.pass(ctx, stopping); err != nil || !pass {
		return false, err
	}
	if err := c.follow(ctx, k, stopping); err != nil {
		return false, err
	}
	end, err := c.Store.ReleaseTurn(ctx, k.req.Direction.ID)
	if err != nil {
		return false, err
	}
	defer end()
	before := k.req.ReleasedUpTo
	done, held, err := c.Store.ReleaseBatch(ctx, k.req.ID, k.rows())
	if err != nil || done {
		return done, err
	}
	now, err := c.Store.Request(ctx, k.req.ID)
	if err != nil {
		return false, err
	}
	k.req = now
	k.took(now.ReleasedUpTo-before, 0, held)
	return false, nil
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

// newRequest is how old a request is whose workflow must have been listed.
const newRequest = time.Minute

func (c *Control) sweep(ctx context.Context) error {
	sites, err := c.Store.Sites(ctx)
	if err != nil {
		return err
	}
	running, unlisted := c.Running(ctx) // when it cannot be told, every sync is started that does not run
	alive := map[string]bool{}
	for _, id := range running {
		alive[id] = true
	}
	for _, site := range sites {
		for _, side := range site.Sides {
			// One that has ended meanwhile is not listed the next time.
			if c.SyncIDs != nil && !slices.ContainsFunc(c.SyncIDs(site.Name, side.Name), func(id string) bool { return !alive[id] }) {
				continue
			}
			if err := c.StartSync(ctx, site.Name, side.Name); err != nil {
				return err
			}
			if err := c.faults.at("sweep: sync started"); err != nil {
				return err
			}
		}
	}
	if unlisted != nil {
		return unlisted
	}
	if err := c.Store.EndOldTrials(ctx); err != nil {
		return err
	}
	if err := c.reconcile(ctx); err != nil {
		return err
	}
	open, err := c.Store.Requests(ctx, control.RequestFilter{States: backfill.OpenStates(), Limit: 100_000})
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, r := range open {
		id := r.WorkflowID()
		wanted[id] = true
		if alive[id] {
			continue
		}
		if err := c.StartBackfill(ctx, r); err != nil {
			return err
		}
		// One that was just asked for had not been started yet, and what lists the running
		// ones is a little behind.
		if time.Since(r.RequestedAt) > newRequest {
			c.Log.Warn("an open request had no workflow", zap.Int64("request", r.ID), zap.String("workflow", id))
			if err := c.Store.Disagreed(ctx, r.Site, id, "the request was open and had no workflow: one was started"); err != nil {
				return err
			}
		}
		if err := c.faults.at("sweep: backfill started"); err != nil {
			return err
		}
	}
	again := map[string]bool{}
	for _, id := range running {
		if strings.HasPrefix(id, "backfill/") && !wanted[id] {
			if err := c.Refresh(ctx, id); err != nil {
				return err
			}
			// One that has just ended may still be listed: what is met again was real.
			if again[id] = true; c.ending[id] {
				c.Log.Warn("a workflow runs whose request is closed", zap.String("workflow", id))
				if err := c.Store.Disagreed(ctx, "", id, "the workflow ran and its request was closed: it was told to look"); err != nil {
					return err
				}
			}
			if err := c.faults.at("sweep: refreshed"); err != nil {
				return err
			}
		}
	}
	c.ending = again
	return nil
}

// reconcile starts the reconciliations that are due, and those that the workflow
// engine has not heard of or has lost.
func (c *Control) reconcile(ctx context.Context) error {
	if err := c.Store.StartDue(ctx); err != nil {
		return err
	}
	open, err := c.Store.Reconciliations(ctx, control.RunFilter{Open: true, Limit: 100_000})
	if err != nil {
		return err
	}
	for _, r := range open {
		if err := c.StartReconcile(ctx, r); err != nil {
			return err
		}
	}
	return nil
}
