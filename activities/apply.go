package activities

import (
	"context"
	"fmt"
	"io"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
	"backfill/internal/side"
)

// Apply applies the other side's changes here, turn after turn.
func (a *Agent) Apply(ctx context.Context) error {
	rung, done := a.bell(fmt.Sprintf("queue %d", a.In.ID))
	defer done()
	l := &applier{Agent: a}
	return a.turns(ctx, rung, l.idle, func() (bool, error) {
		busy, err := l.apply(ctx)
		a.trouble("changes cannot be applied", err)
		return busy, err
	})
}

// idleApply is how long an agent whom events wake waits for one: they may be lost
// with a connection that breaks unnoticed.
const idleApply = 10 * time.Second

// idle is how long to wait for changes: at most until held rows or stopped tables are
// tried again.
func (l *applier) idle() time.Duration {
	if !l.listening.Load() {
		return l.Cycle
	}
	wait := idleApply
	if l.held {
		wait = min(wait, time.Until(l.retryAt))
	}
	if l.stopped > 0 {
		wait = min(wait, time.Until(l.again.at))
	}
	return max(wait, l.Cycle)
}

// applier remembers between batches when to look at the held rows and at stopped
// tables again.
type applier struct {
	*Agent
	held    bool
	stopped int   // tables that are
	again   pacer // when they are tried again
	retryAt time.Time
	pause   time.Duration
	started bool
	at      int64 // the position when it was last looked at
	conflicts
}

func (l *applier) apply(ctx context.Context) (busy bool, err error) {
	if err := l.ready(ctx); err != nil {
		return false, err
	}
	if err := l.fulfil(ctx); err != nil {
		return false, err
	}
	retry := !l.started || l.held && !time.Now().Before(l.retryAt)
	var b control.Batch
	feed := side.Feed{
		Next: func(ctx context.Context, at side.Position) (_ side.Position, _ int64, err error) {
			b, err = l.store.Next(ctx, l.In, control.Position(at), l.BatchRows, l.BatchBytes)
			if err == nil {
				err = l.faults.at("apply: pulled")
			}
			return side.Position(b.To), b.Rows, err
		},
		NextOf: func(ctx context.Context, table int32, after, upTo int64) (int64, error) {
			return l.store.NextOf(ctx, l.In.ID, table, after, upTo, l.BatchRows, l.BatchBytes)
		},
		Copy: func(ctx context.Context, p side.Part, w io.Writer) error {
			return l.store.CopyBatch(ctx, l.In.ID, control.Part(p), w)
		},
		Released: func() (int32, int64, bool) { return b.TableID, b.LayoutID, b.Released },
		CopyValues: func(ctx context.Context, p side.Part, columns int, w io.Writer) error {
			return l.store.CopyValues(ctx, l.In.ID, control.Part(p), columns, w)
		},
		Entry: func(ctx context.Context, seq int64) (side.Entry, error) {
			e, err := l.store.Entry(ctx, l.In.ID, seq)
			return side.Entry(e), err
		},
		Layout: func(ctx context.Context, id int64) (*row.Layout, error) { return l.store.Layout(ctx, id) },
		Tables: l.tables,
		Sent: func(ctx context.Context) (int64, string, func(io.Writer) error, error) {
			batch, nonce, err := l.store.LastPush(ctx, l.Out.ID)
			return batch, nonce, l.sent(ctx, nonce), err
		},
		Retry:        retry,
		HoldLimit:    l.HoldLimit,
		RefusedLimit: l.RefusedLimit,
	}
	applied, err := l.db.Apply(ctx, feed)
	if err == nil {
		err = l.faults.at("apply: committed")
	}
	if err != nil {
		return false, err
	}
	if err := l.catchUp(ctx, feed, &applied); err != nil {
		return false, err
	}
	l.applied.Add(applied.Written)
	moved := applied.To.Seq > l.at
	l.schedule(retry, moved, applied)
	if applied.SetAside || !l.started || applied.To.Seq < l.at || applied.Stopped > l.stopped {
		if err := l.mirror(ctx); err != nil {
			return false, err
		}
		if err := l.faults.at("apply: mirrored"); err != nil {
			return false, err
		}
	}
	if err := l.tell(ctx, applied); err != nil {
		return false, err
	}
	l.started, l.at = true, applied.To.Seq
	// Acknowledged even when nothing was applied: a crash may have come before it.
	if err := l.store.Acknowledge(ctx, l.In, applied.To.Seq); err != nil {
		return false, err
	}
	if err := l.settle(ctx); err != nil {
		return false, err
	}
	return moved || applied.Written > 0, l.faults.at("apply: acknowledged")
}

// catchUp tries the tables that are stopped, when it is time to.
func (l *applier) catchUp(ctx context.Context, feed side.Feed, applied *side.Applied) error {
	if l.started && !(l.stopped > 0 && l.again.due()) {
		return nil
	}
	caught, err := l.db.CatchUp(ctx, feed)
	if err != nil {
		return err
	}
	l.again.tried(caught.SetAside)
	applied.Written += caught.Written
	applied.SetAside = applied.SetAside || l.stopped > 0 // the reason may be another now
	return nil
}

// schedule decides when held rows are tried again: soon after something was
// written, else ever less often.
func (l *applier) schedule(retried, moved bool, applied side.Applied) {
	if retried || moved {
		l.held = applied.Held // a cycle that had nothing to do does not know
	}
	switch {
	case applied.Written > 0:
		l.pause = 2 * time.Second
	case retried:
		l.pause = min(max(l.pause*2, 2*time.Second), time.Minute)
	}
	if retried || l.retryAt.After(time.Now().Add(l.pause)) {
		l.retryAt = time.Now().Add(l.pause)
	}
}

func (l *applier) tables(ctx context.Context) (map[int32]backfill.Table, map[int32]*row.Mapping, error) {
	all, err := l.store.MappedTables(ctx, l.In.Site, "")
	if err != nil {
		return nil, nil, err
	}
	byID, made := map[int32]backfill.Table{}, map[int32]*row.Mapping{}
	for _, t := range all {
		byID[t.ID], made[t.ID] = t.Table, t.Made
	}
	return byID, made, l.begin(ctx, control.Tables(all))
}

// fulfil does what people asked for with changes that are set aside here.
func (l *applier) fulfil(ctx context.Context) error {
	wishes, err := l.store.Wishes(ctx, l.In.ID)
	if err != nil {
		return err
	}
	if len(wishes.Skip) > 0 {
		if err := l.store.Skipped(ctx, l.In.ID, wishes.Skip); err != nil {
			return err
		}
		if err := l.faults.at("apply: skips shown"); err != nil {
			return err
		}
		tables, _, err := l.tables(ctx)
		if err != nil {
			return err
		}
		if err := l.db.Drop(ctx, wishes.Skip, tables); err != nil {
			return err
		}
		if err := l.recordLost(ctx); err != nil {
			return err
		}
		if err := l.faults.at("apply: skips dropped"); err != nil {
			return err
		}
	}
	if len(wishes.Retry) > 0 {
		if err := l.db.Unquarantine(ctx, wishes.Retry); err != nil {
			return err
		}
		if err := l.faults.at("apply: retries asked for"); err != nil {
			return err
		}
		l.held, l.retryAt = true, time.Time{}
	}
	if len(wishes.Retry) > 0 || wishes.CatchUp {
		l.again = pacer{}
	}
	if done := append(wishes.Skip, wishes.Retry...); len(done) > 0 || wishes.CatchUp {
		if err := l.store.WishesDone(ctx, l.In.ID, done); err != nil {
			return err
		}
		return l.faults.at("apply: wishes done")
	}
	return nil
}

// mirror shows in the control database what is set aside here.
func (l *applier) mirror(ctx context.Context) error {
	rows, err := l.db.SetAside(ctx)
	if err != nil {
		return err
	}
	all := make([]control.SetAside, len(rows))
	for i, r := range rows {
		all[i] = control.SetAside(r)
	}
	if err := l.store.MirrorSetAside(ctx, l.In, all); err != nil {
		return err
	}
	stops, err := l.db.Stops(ctx)
	if err != nil {
		return err
	}
	stopped := make([]control.Stopped, len(stops))
	for i, s := range stops {
		stopped[i] = control.Stopped(s)
	}
	if len(stops) > l.stopped {
		l.again.tried(false)
	}
	l.stopped = len(stops)
	return l.store.MirrorStopped(ctx, l.In, stopped)
}

// pacer spaces tries that fail ever further apart, from 2 s to a minute.
type pacer struct {
	at    time.Time
	pause time.Duration
}

func (p *pacer) due() bool { return !time.Now().Before(p.at) }

func (p *pacer) tried(well bool) {
	p.pause = min(max(p.pause*2, 2*time.Second), time.Minute)
	if well {
		p.pause = 0
	}
	p.at = time.Now().Add(p.pause)
}
