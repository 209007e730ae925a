package activities

import (
	"context"
	"io"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// conflicts is what an applier keeps about tables captured on both sides: since when
// the own changes of each are known, and how far they may be forgotten.
type conflicts struct {
	known    map[int32]int64
	twoWay   bool
	reach    int64
	settleAt time.Time
	upTo, to int64 // own changes up to upTo may be forgotten once this side stands at to
}

// settleEvery is how often own changes that nobody can be in conflict with any more
// are looked for.
const settleEvery = 3 * time.Second

// lostRows is how many versions that lost a conflict go into history at a time.
const lostRows = 500

// begin makes the own changes of tables known that have come to be captured on both
// sides: what was pushed before and the other side may not have seen.
func (l *applier) begin(ctx context.Context, tables []backfill.Table) error {
	l.twoWay = false
	for _, t := range tables {
		if !t.TwoWay() {
			continue
		}
		l.twoWay = true
		if l.known == nil {
			known, err := l.db.TwoWay(ctx)
			if err != nil {
				return err
			}
			l.known = known
		}
		since := t.TwoWaySince()
		if at, ok := l.known[t.ID]; ok && at == since {
			continue
		}
		if err := l.db.BeginTwoWay(ctx, t.ID, since, func(w io.Writer) error { return l.store.CopyUnseen(ctx, l.Out.ID, t.ID, w) }); err != nil {
			return err
		}
		l.known[t.ID] = since
	}
	return nil
}

// tell takes the versions that lost a conflict here into history, and tells how far
// the other side's changes have been seen.
func (l *applier) tell(ctx context.Context, applied side.Applied) error {
	if applied.Lost || !l.started {
		if err := l.recordLost(ctx); err != nil {
			return err
		}
	}
	if !applied.TwoWay || applied.Reach <= l.reach {
		return nil
	}
	if err := l.store.Reached(ctx, l.In.ID, applied.Reach); err != nil {
		return err
	}
	l.reach = applied.Reach
	return nil
}

func (l *applier) recordLost(ctx context.Context) error {
	layouts := map[string]int64{}
	for {
		rows, err := l.db.Lost(ctx, lostRows)
		if err != nil || len(rows) == 0 {
			return err
		}
		lost := make([]control.Lost, len(rows))
		notes := make([]string, len(rows))
		for i, r := range rows {
			notes[i] = r.Note
			lost[i] = control.Lost{Note: r.Note, TableID: r.TableID, Own: r.Own, Seq: r.Seq, ToSeq: r.ToSeq, Op: r.Op, Key: r.Key, Row: r.Row}
			if r.Row == nil || r.Layout == nil {
				continue
			}
			shape := r.Layout.Fingerprint()
			if layouts[shape] == 0 {
				if layouts[shape], err = l.store.PutLayout(ctx, r.Layout); err != nil {
					return err
				}
			}
			lost[i].LayoutID = layouts[shape]
		}
		if err := l.store.RecordLost(ctx, l.Out, l.In, lost, l.db.Snapshot); err != nil {
			return err
		}
		if err := l.faults.at("apply: lost recorded"); err != nil {
			return err
		}
		if err := l.db.ForgetLost(ctx, notes); err != nil {
			return err
		}
	}
}

// settle forgets own changes, now and then.
func (l *applier) settle(ctx context.Context) error {
	if !l.twoWay || time.Now().Before(l.settleAt) {
		return nil
	}
	l.settleAt = time.Now().Add(settleEvery)
	left, err := l.db.ForgetOwn(ctx, l.upTo, l.to)
	if err != nil || !left {
		return err
	}
	upTo, to, ok, err := l.store.Settled(ctx, l.Out, l.In)
	if ok {
		l.upTo, l.to = upTo, to
	}
	return err
}
