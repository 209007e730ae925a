package activities

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/copypipe"
	"backfill/internal/pace"
	"backfill/internal/row"
	"backfill/internal/side"
)

// Snapshot is a request as the workflow needs it: no row data.
type Snapshot struct {
	State      backfill.State `json:"state"`
	Paused     bool           `json:"paused,omitempty"`
	Staged     int64          `json:"staged"`
	Expected   int64          `json:"expected"`
	Released   int64          `json:"released"`
	Superseded int64          `json:"superseded"`
	Skipped    int64          `json:"skipped,omitempty"`
	Unsent     int64          `json:"superseded_undelivered,omitempty"`
	Insert     int64          `json:"insert"`
	Overwrite  int64          `json:"overwrite"`
	Identical  int64          `json:"identical"`
	Revision   int64          `json:"revision"`
	ReviewedBy string         `json:"reviewed_by,omitempty"`
	Note       string         `json:"note,omitempty"`
	Reason     string         `json:"reason,omitempty"`
}

func snapshot(r *backfill.Request) Snapshot {
	return Snapshot{State: r.State, Paused: r.Paused, Staged: r.Staged, Expected: r.Expected, Released: r.Released,
		Superseded: r.Superseded, Skipped: r.Skipped, Unsent: r.SupersededUndelivered,
		Insert: r.Effects[backfill.Insert], Overwrite: r.Effects[backfill.Overwrite], Identical: r.Effects[backfill.Identical],
		Revision: r.Revision, ReviewedBy: r.ReviewedBy, Note: r.ReviewNote, Reason: r.Reason}
}

// Walked is the progress of a walk: the heartbeat's details, and part of the
// activity's result, because details end with the activity.
type Walked struct {
	ResumeKey backfill.Key `json:"resume_key,omitempty"`
	Rows      int64        `json:"rows"`
	PerSecond int64        `json:"rows_per_second"`
	PageRows  int          `json:"page_rows,omitempty"`
}

// WalkResult is where a walk stands when its activity returns.
type WalkResult struct {
	Snapshot
	Walked Walked `json:"walked"`
}

// Walk walks a request's table chunk by chunk under a lease, until the walk is
// over, the turn is, or a person pauses or closes the request. Before each chunk
// it pushes the changes captured on this side, so that they are never held up.
func (a *Agent) Walk(ctx context.Context, requestID int64) (WalkResult, error) {
	lease, req, err := a.store.Claim(ctx, requestID, a.ID, a.LeaseTTL)
	var held *control.LeaseHeld
	switch {
	case errors.As(err, &held):
		return WalkResult{}, temporal.NewApplicationErrorWithOptions(held.Error(), "lease_held", temporal.ApplicationErrorOptions{NextRetryDelay: held.For})
	case errors.Is(err, control.ErrFenced):
		return a.stands(ctx, requestID, Walked{})
	case err != nil:
		return WalkResult{}, surface(err)
	}
	w := a.walkUnder(lease, req)
	stopBeat := beat(ctx, w.details)
	defer stopBeat()
	stopRenew := w.renew(ctx)
	err = w.run(ctx)
	stopRenew()
	// Whoever comes next, perhaps this very process, need not wait for the lease to run out.
	if err := a.store.Hand(context.WithoutCancel(ctx), lease); err != nil {
		activity.GetLogger(ctx).Warn("lease not handed back", "request", requestID, "error", err)
	}
	switch {
	case err == nil, errors.Is(err, control.ErrFenced), errors.Is(err, control.ErrPaused):
		return a.stands(ctx, requestID, w.details().(Walked))
	}
	return WalkResult{}, permanent(err)
}

func (a *Agent) stands(ctx context.Context, requestID int64, w Walked) (WalkResult, error) {
	req, err := a.store.Request(ctx, requestID)
	if err != nil {
		return WalkResult{}, surface(err)
	}
	return WalkResult{Snapshot: snapshot(req), Walked: w}, nil
}

// walk is one activity's share of a request's walk.
type walk struct {
	*Agent
	lease  *control.Lease
	req    *backfill.Request
	layout *row.Layout
	size   pace.PageSize
	began  time.Time
	rows   int64 // staged by this activity

	mu       sync.Mutex
	progress Walked
}

func (a *Agent) walkUnder(lease *control.Lease, req *backfill.Request) *walk {
	return &walk{Agent: a, lease: lease, req: req, began: time.Now(),
		size:     pace.PageSize{Target: a.PageTarget, Min: 1, Max: a.PageRows, MaxBytes: a.PageBytes},
		progress: Walked{ResumeKey: req.ResumeKey, Rows: req.Staged}}
}

func (w *walk) details() any {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.progress
}

// renew keeps the lease while a page takes its time.
func (w *walk) renew(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sleep(ctx, w.LeaseTTL/3) {
			// A lost lease is noticed at the next page's fence.
			_ = w.store.Renew(ctx, w.lease)
		}
	}()
	return func() { cancel(); <-done }
}

func (w *walk) run(ctx context.Context) error {
	if err := w.ready(ctx); err != nil {
		return err
	}
	if err := w.freeze(ctx); err != nil {
		return err
	}
	stopping := activity.GetWorkerStopChannel(ctx)
	for end := w.began.Add(w.Turn); time.Now().Before(end); {
		if _, err := w.push(ctx); err != nil {
			return err
		}
		done, err := w.chunk(ctx, stopping)
		if err != nil {
			return err
		}
		if done {
			return w.settle(ctx)
		}
		select {
		case <-stopping:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
	}
	return nil
}

// freeze fixes the walk's bounds before its first page: the highest seq so far,
// then a snapshot and with it the last key, the layout and the rows expected.
func (w *walk) freeze(ctx context.Context) error {
	if w.req.LayoutID == 0 {
		if err := w.freezeNow(ctx); err != nil {
			return err
		}
		req, err := w.store.Request(ctx, w.req.ID)
		if err != nil {
			return err
		}
		w.req = req
	}
	layout, err := w.store.Layout(ctx, w.req.LayoutID)
	w.layout = layout
	return err
}

func (w *walk) freezeNow(ctx context.Context) error {
	start, err := w.store.LastSeq(ctx, w.Out.ID)
	if err != nil {
		return err
	}
	t, upper, floor, err := w.db.Frozen(ctx, w.req.Table)
	if err != nil {
		return err
	}
	f := control.Frozen{StartSeq: start, Floor: floor, Upper: upper, Shape: t.Shape}
	if w.req.Key != nil {
		if len(w.req.Key) != len(t.Layout.Key) {
			return fmt.Errorf("%w: the key has %d columns, the request's key %d", side.ErrLayout, len(t.Layout.Key), len(w.req.Key))
		}
		if err := w.db.CheckKey(ctx, t, w.req.Key); err != nil {
			return err
		}
		f.Upper, f.Expected = w.req.Key, 1
	} else {
		panel, err := w.store.Panel(ctx, w.req.Site, w.req.Table, w.req.From)
		if err != nil {
			return err
		}
		if panel.Source.Rows != nil {
			f.Expected = *panel.Source.Rows
		}
	}
	if f.LayoutID, err = w.layoutID(ctx, t.Layout); err != nil {
		return err
	}
	return w.store.Freeze(ctx, w.lease, f)
}

// chunk walks pages up to the chunk's bounds and reports whether the walk has
// reached its end: the frozen last key, or, when that row is gone, an empty page.
func (w *walk) chunk(ctx context.Context, stopping <-chan struct{}) (done bool, err error) {
	if w.req.UpperKey == nil {
		return true, nil // the table was empty
	}
	if w.req.Key != nil && w.req.ResumeKey != nil {
		return true, nil // the one row was staged before somebody took over
	}
	rows := int64(0)
	for end := time.Now().Add(w.ChunkTime); rows < w.ChunkRows && time.Now().Before(end); {
		n, err := w.page(ctx)
		if err != nil {
			return false, err
		}
		rows += n
		if n == 0 || w.req.Key != nil || slices.Equal(w.req.ResumeKey, w.req.UpperKey) {
			return true, nil
		}
		select {
		case <-stopping:
			return false, nil
		default:
		}
	}
	return false, nil
}

// page stages the next page: rows and their snapshot from the source, a
// synchronous write there (at the end of CopyPage), then rows, counters and resume
// key committed together.
func (w *walk) page(ctx context.Context) (int64, error) {
	page := side.Page{RequestID: w.req.ID, Table: w.req.Table, Layout: w.layout, Shape: w.req.Shape, After: w.req.ResumeKey, UpTo: w.req.UpperKey,
		Numbered: w.req.Staged, Limit: w.size.Rows(), OneRow: w.req.Key != nil}
	began := time.Now()
	read := counter{}
	n, resume, err := w.store.StagePage(ctx, w.lease, func(load func(io.Reader) error) error {
		if err := copypipe.Run(func(to io.Writer) error {
			read.to = to
			return w.db.CopyPage(ctx, page, &read)
		}, load); err != nil {
			return err
		}
		return w.faults.at("page: read")
	})
	if err != nil {
		return 0, fmt.Errorf("walk %s after (%s): %w", w.req.Table, w.req.ResumeKey, err)
	}
	w.size.Took(int(n), read.bytes, time.Since(began))
	w.req.ResumeKey, w.req.Staged = resume, w.req.Staged+n
	w.rows += n
	w.mu.Lock()
	defer w.mu.Unlock()
	w.progress = Walked{ResumeKey: resume, Rows: w.req.Staged, PageRows: w.size.Rows(),
		PerSecond: int64(float64(w.rows) / time.Since(w.began).Seconds())}
	return n, nil
}

// settle pushes until nothing captured before the last page is left in the outbox,
// then opens the review: a row that was changed before it was staged must be known
// to be overtaken, or be staged as it is now.
func (w *walk) settle(ctx context.Context) error {
	for {
		p, err := w.push(ctx)
		if err != nil {
			return err
		}
		if p.complete(w.req.Table) {
			if err := w.db.Unchanged(ctx, w.req.Table, w.layout, w.req.Shape); err != nil {
				return err
			}
			return w.store.Reviewable(ctx, w.lease)
		}
		if p.left[w.req.Table] {
			if err := w.store.Waiting(ctx, w.req.ID, "changes captured before the last page cannot be pushed: "+w.problem(ctx)); err != nil {
				return err
			}
			if !sleep(ctx, time.Second) {
				return ctx.Err()
			}
		}
	}
}

// counter counts the bytes of a page as they pass.
type counter struct {
	to    io.Writer
	bytes int64
}

func (c *counter) Write(p []byte) (int, error) {
	c.bytes += int64(len(p))
	return c.to.Write(p)
}
