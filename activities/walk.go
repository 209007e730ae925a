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
	if err := a.admit(ctx, requestID); err != nil {
		return WalkResult{}, err
	}
	lease, req, err := a.store.Claim(ctx, requestID, a.ID, a.LeaseTTL)
	var held *control.LeaseHeld
	switch {
	case errors.As(err, &held):
		return WalkResult{}, temporal.NewApplicationErrorWithOptions(held.Error(), "lease_held", temporal.ApplicationErrorOptions{NextRetryDelay: held.For, Category: temporal.ApplicationErrorCategoryBenign})
	case errors.Is(err, control.ErrFenced):
		return a.stands(ctx, requestID, Walked{})
	case err != nil:
		return WalkResult{}, surface(err)
	}
	if err := a.faults.at("walk: claimed"); err != nil {
		return WalkResult{}, surface(err)
	}
	w := a.walkUnder(lease, req)
	stopBeat := beat(ctx, w.details)
	defer stopBeat()
	stopRenew := w.renew(ctx)
	err = w.run(ctx)
	stopRenew()
	if err := a.faults.at("walk: ended"); err != nil {
		return WalkResult{}, surface(err)
	}
	if err := a.store.Vacate(context.WithoutCancel(ctx), requestID); err != nil {
		activity.GetLogger(ctx).Warn("place not given back", "request", requestID, "error", err)
	}
	// Whoever comes next, perhaps this very process, need not wait for the lease to run out.
	if err := a.store.Hand(context.WithoutCancel(ctx), lease); err != nil {
		activity.GetLogger(ctx).Warn("lease not handed back", "request", requestID, "error", err)
	}
	if err := a.faults.at("walk: handed back"); err != nil {
		return WalkResult{}, surface(err)
	}
	switch {
	case err == nil, errors.Is(err, control.ErrFenced), errors.Is(err, control.ErrPaused):
		return a.stands(ctx, requestID, w.details().(Walked))
	case backfill.CodeOf(err) == backfill.Refused:
		// What is to be mended is said where people look; the walk is tried again.
		if err := a.store.Waiting(ctx, requestID, message(err)); err != nil {
			return WalkResult{}, surface(err)
		}
	}
	return WalkResult{}, permanent(err)
}

// admit waits for a place among the walks that may go on at once. The attempt ends
// and is made again: a worker's slots are for work.
func (a *Agent) admit(ctx context.Context, requestID int64) error {
	req, err := a.store.Request(ctx, requestID)
	if err != nil {
		return surface(err)
	}
	if req.Key != nil || req.Paused || req.State != backfill.Pending && req.State != backfill.InProgress {
		return nil
	}
	err = a.store.Admit(ctx, requestID, a.Walks)
	var later *control.NotYet
	if errors.As(err, &later) {
		return temporal.NewApplicationErrorWithOptions(later.Error(), "not_yet", temporal.ApplicationErrorOptions{NextRetryDelay: later.AskAgain(), Category: temporal.ApplicationErrorCategoryBenign})
	}
	return surface(err)
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
	lease   *control.Lease
	req     *backfill.Request
	layout  *row.Layout
	tableID int32
	table   string // on the source
	mapped  bool   // it has another shape on the receiver
	keeper  gatekeeper
	began   time.Time
	rows    int64 // staged by this activity
	at      int64 // of mode differences: the last differing key walked, -1 when that is to be found out
	more    bool  // and whether there were any after it

	mu       sync.Mutex
	progress Walked
}

func (a *Agent) walkUnder(lease *control.Lease, req *backfill.Request) *walk {
	w := &walk{Agent: a, lease: lease, req: req, began: time.Now(), at: -1,
		keeper: gatekeeper{store: a.store, req: req, lease: lease, faults: a.faults,
			size: pace.PageSize{Target: a.PageTarget, Min: 1, Max: a.PageRows, MaxBytes: a.PageBytes}},
		progress: Walked{ResumeKey: req.ResumeKey, Rows: req.Staged}}
	w.keeper.course.stands = w.standsAt
	return w
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
	if err := w.prove(ctx, stopping); err != nil {
		return err
	}
	for end := w.began.Add(w.Turn); time.Now().Before(end); {
		if _, err := w.push(ctx); err != nil {
			return err
		}
		if err := w.faults.at("walk: pushed"); err != nil {
			return err
		}
		done, err := w.chunk(ctx, stopping)
		if err != nil {
			return err
		}
		if done {
			return w.settle(ctx)
		}
		if time.Since(w.began) > w.Share {
			if wanted, err := w.store.Wanted(ctx, w.req.ID, w.Walks); err != nil || wanted {
				return err
			}
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
	t, err := w.store.Table(ctx, w.req.Site, w.req.Table)
	if err != nil {
		return err
	}
	w.tableID, w.table, w.mapped = t.ID, t.Relation(w.db.Side), t.Mapping != nil
	if w.req.LayoutID == 0 {
		if err := w.freezeNow(ctx); err != nil {
			return err
		}
		req, err := w.store.Request(ctx, w.req.ID)
		if err != nil {
			return err
		}
		w.req, w.keeper.req = req, req
	}
	w.layout, err = w.store.Layout(ctx, w.req.LayoutID)
	return err
}

func (w *walk) freezeNow(ctx context.Context) error {
	start, err := w.store.LastSeq(ctx, w.Out.ID)
	if err != nil {
		return err
	}
	t, upper, floor, seen, err := w.db.Frozen(ctx, w.table)
	if err != nil {
		return err
	}
	f := control.Frozen{StartSeq: start, Floor: floor, Upper: upper, Shape: t.Shape, Stamp: seen}
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
		if w.req.Mode == backfill.ModeDifferences && panel.Proof != nil {
			f.Expected = panel.Proof.Unequal
		}
	}
	if f.LayoutID, err = w.store.PutLayout(ctx, t.Layout); err != nil {
		return err
	}
	if err := w.faults.at("walk: bounds read"); err != nil {
		return err
	}
	if err := w.store.Freeze(ctx, w.lease, f); err != nil {
		return err
	}
	return w.faults.at("walk: frozen")
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
	before := w.committed()
	rows := int64(0)
	for end := time.Now().Add(w.ChunkTime); rows < w.ChunkRows && time.Now().Before(end); {
		if pass, err := w.keeper.pass(ctx, stopping); err != nil || !pass {
			return false, errors.Join(w.commit(before), err)
		}
		p, err := w.stage(ctx, before)
		if err != nil {
			return false, err
		}
		before = p
		rows += p.rows
		end := p.rows == 0 || w.req.Key != nil || slices.Equal(p.last, w.req.UpperKey)
		if w.req.Mode == backfill.ModeDifferences {
			end = !w.more // keys are not in order, and the rows of some may be gone
		}
		if end {
			return true, w.commit(before)
		}
		select {
		case <-stopping:
			return false, w.commit(before)
		default:
		}
	}
	return false, w.commit(before)
}

// staging is a page whose rows are staged, and may not be committed yet.
type staging struct {
	numbered int64        // the number of its last row
	last     backfill.Key // and that row's key
	rows     int64
	at       int64      // of mode differences: the last differing key
	ended    chan error // nil once it is known how its commit ended
	err      error      // and then how
}

// committed is where the walk stands when every page is.
func (w *walk) committed() *staging {
	return &staging{numbered: w.req.Staged, last: w.req.ResumeKey, at: w.at}
}

// stage stages the next page: rows and their snapshot from the source, a
// synchronous write there (at the end of CopyPage), then rows, counters and resume
// key committed together. It reads and copies while the page before is being committed,
// goes on when that is, and returns when its own rows and their last key are there:
// commit waits for the rest.
func (w *walk) stage(ctx context.Context, before *staging) (*staging, error) {
	page := side.Page{RequestID: w.req.ID, Table: w.table, TableID: w.tableID, Layout: w.layout, Shape: w.req.Shape, After: before.last, UpTo: w.req.UpperKey,
		Numbered: before.numbered, Limit: w.keeper.rows(), Bytes: w.PageBytes, OneRow: w.req.Key != nil}
	p := &staging{numbered: before.numbered, last: before.last, at: before.at, ended: make(chan error, 1)}
	if w.req.Mode == backfill.ModeDifferences {
		keys, last, err := w.store.DifferingKeys(ctx, w.req.ID, before.at, page.Limit)
		if w.more = len(keys) > 0; err != nil || !w.more {
			p.ended <- nil
			return p, errors.Join(w.commit(before), err)
		}
		// Not cut by bytes: the next page begins after the last key, whether it was read or not.
		page.Keys, page.Limit, page.Bytes = keys, len(keys), 0
		p.at = last
	}
	began := time.Now()
	read := counter{}
	var reads int64
	pipe := copypipe.Start(func(to io.Writer) (err error) {
		read.to = to
		reads, err = w.db.CopyPage(ctx, page, &read)
		return err
	})
	copied := make(chan struct{})
	go func() {
		p.ended <- w.store.StagePage(ctx, w.lease, page.Numbered, func(load func(io.Reader) error) (int64, error) {
			err := pipe.Into(load)
			if err := w.commit(before); err != nil {
				return 0, err
			}
			if err != nil {
				return 0, err
			}
			return reads, w.faults.at("page: read")
		}, func(rows int64, last backfill.Key) {
			p.rows, p.numbered = rows, page.Numbered+rows
			if last != nil && rows > 0 {
				p.last = last
			}
			close(copied)
		})
	}()
	select {
	case <-copied:
	case err := <-p.ended:
		select {
		case <-copied:
			p.ended <- err // for commit
		default:
			pipe.Stop()
			if err := w.commit(before); err != nil {
				return nil, err
			}
			return nil, w.stagingFailed(err)
		}
	}
	w.keeper.took(p.rows, read.bytes, time.Since(began))
	return p, nil
}

func (w *walk) stagingFailed(err error) error {
	return fmt.Errorf("walk %s after (%s): %w", w.req.Table, w.req.ResumeKey, err)
}

// commit waits until a page is committed. The staging of the next page calls it too, while
// stage waits for that.
func (w *walk) commit(p *staging) error {
	if p.ended == nil {
		return p.err // it was, before the chunk began or the last time
	}
	p.err = <-p.ended
	p.ended = nil
	if p.err != nil {
		p.err = w.stagingFailed(p.err)
		return p.err
	}
	if p.err = w.faults.at("page: committed"); p.err != nil {
		return p.err
	}
	w.req.ResumeKey, w.req.Staged, w.at = p.last, p.numbered, p.at
	w.rows += p.rows
	w.mu.Lock()
	defer w.mu.Unlock()
	w.progress = Walked{ResumeKey: p.last, Rows: p.numbered, PageRows: w.keeper.rows(),
		PerSecond: int64(float64(w.rows) / time.Since(w.began).Seconds())}
	return nil
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
		if p.complete(w.table) {
			// With nothing to push nobody has asked whether the source is still what was read.
			if err := w.ready(ctx); err != nil {
				return err
			}
			if err := w.db.Unchanged(ctx, w.table, w.layout, w.req.Shape); err != nil {
				return err
			}
			if err := w.faults.at("walk: at its end"); err != nil {
				return err
			}
			if err := w.store.Reviewable(ctx, w.lease); err != nil {
				return err
			}
			return w.faults.at("walk: reviewable")
		}
		if p.left[w.table] {
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
