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
	return a.turns(ctx, rung, a.Cycle, func() (bool, error) { return l.apply(ctx) })
}

// applier remembers between batches when to look at the held rows again.
type applier struct {
	*Agent
	held    bool
	retryAt time.Time
	pause   time.Duration
	started bool
	at      int64 // the position when it was last looked at
}

func (l *applier) apply(ctx context.Context) (busy bool, err error) {
	if err := l.ready(ctx); err != nil {
		return false, err
	}
	if err := l.fulfil(ctx); err != nil {
		return false, err
	}
	tables, err := l.tables(ctx)
	if err != nil {
		return false, err
	}
	retry := !l.started || l.held && !time.Now().Before(l.retryAt)
	applied, err := l.db.Apply(ctx, side.Feed{
		Next: func(ctx context.Context, at side.Position) (side.Position, int64, error) {
			b, err := l.store.Next(ctx, l.In, control.Position(at), l.BatchRows, l.BatchBytes)
			return side.Position(b.To), b.Rows, err
		},
		Copy: func(ctx context.Context, after, to int64, w io.Writer) error {
			return l.store.CopyBatch(ctx, l.In.ID, after, to, w)
		},
		Layout:    func(ctx context.Context, id int64) (*row.Layout, error) { return l.store.Layout(ctx, id) },
		Tables:    tables,
		Retry:     retry,
		HoldLimit: l.HoldLimit,
	})
	if err != nil {
		return false, err
	}
	moved := applied.To.Seq > l.at
	l.schedule(retry, moved, applied)
	if applied.SetAside || !l.started {
		if err := l.mirror(ctx); err != nil {
			return false, err
		}
	}
	l.started, l.at = true, applied.To.Seq
	if err := l.faults.at("apply: committed"); err != nil {
		return false, err
	}
	// Acknowledged even when nothing was applied: a crash may have come before it.
	return moved || applied.Written > 0, l.store.Acknowledge(ctx, l.In, applied.To.Seq)
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

func (l *applier) tables(ctx context.Context) (map[int32]backfill.Table, error) {
	all, err := l.store.Tables(ctx, l.In.Site)
	if err != nil {
		return nil, err
	}
	out := make(map[int32]backfill.Table, len(all))
	for _, t := range all {
		out[t.ID] = t
	}
	return out, nil
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
		if err := l.db.Drop(ctx, wishes.Skip); err != nil {
			return err
		}
	}
	if len(wishes.Retry) > 0 {
		if err := l.db.Unquarantine(ctx, wishes.Retry); err != nil {
			return err
		}
		l.held, l.retryAt = true, time.Time{}
	}
	if done := append(wishes.Skip, wishes.Retry...); len(done) > 0 {
		return l.store.WishesDone(ctx, l.In.ID, done)
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
	return l.store.MirrorSetAside(ctx, l.In, all)
}
