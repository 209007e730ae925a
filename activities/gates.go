package activities

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
	"backfill/internal/side"
)

const (
	measureBusy = time.Second      // between two measurements while a backfill asks
	measureIdle = 30 * time.Second // and while none does, for people to see
)

// measure keeps the readings of this side's gates fresh until ctx ends. It needs
// neither Temporal nor a walk: a gate must be known before the first page.
func (a *Agent) measure(ctx context.Context) {
	rung, done := a.bell("gates")
	defer done()
	m := &meter{Agent: a}
	for ctx.Err() == nil {
		// A reading that could not be stored grows old, and an old one closes its gate.
		busy, _ := m.measure(ctx)
		last := time.Now()
		if busy {
			sleep(ctx, measureBusy)
			continue
		}
		select {
		case <-ctx.Done():
		case <-rung:
			sleep(ctx, time.Until(last.Add(measureBusy))) // a walk rings with each page
		case <-time.After(measureIdle):
		}
	}
}

// meter measures gates; between measurements it remembers where the WAL was when.
type meter struct {
	*Agent
	wal pace.Tide
}

func (m *meter) measure(ctx context.Context) (busy bool, err error) {
	duty, err := m.store.Duty(ctx, m.db.Site, m.db.Side)
	if err == nil {
		m.gated.Store(len(duty.Gates) > 0)
	}
	if err != nil || len(duty.Gates) == 0 {
		return false, err
	}
	found := make([]control.Measurement, len(duty.Gates))
	one := func(i int) {
		g := duty.Gates[i]
		found[i].Gate = g
		value, err := m.value(ctx, g)
		if err != nil {
			found[i].Problem = problemOf(err)
		}
		found[i].Value = value
	}
	var away sync.WaitGroup
	for i, g := range duty.Gates {
		if g.Kind == pace.HTTP || g.Kind == pace.Prometheus {
			away.Go(func() { one(i) })
		}
	}
	// One after the other on the database: measuring should not be the load.
	for i, g := range duty.Gates {
		if g.Kind != pace.HTTP && g.Kind != pace.Prometheus {
			one(i)
		}
	}
	away.Wait()
	if err := m.faults.at("gates: measured"); err != nil {
		return duty.Busy, err
	}
	if err := m.store.Measured(ctx, m.db.Site, found); err != nil {
		return duty.Busy, err
	}
	return duty.Busy, m.faults.at("gates: stored")
}

// problemOf says why something could not be measured.
func problemOf(err error) string {
	var slow interface{ Timeout() bool }
	if side.SQLState(err) == "57014" || errors.As(err, &slow) && slow.Timeout() {
		return fmt.Sprintf("it took longer than %s", pace.ProbeTimeout)
	}
	return message(err)
}

func (m *meter) value(ctx context.Context, g pace.Gate) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, pace.ProbeTimeout+time.Second)
	defer cancel()
	switch g.Kind {
	case pace.ReplicaLag:
		return m.replicaLag(ctx)
	case pace.Sessions:
		return m.db.RunningSessions(ctx, pace.ProbeTimeout)
	case pace.Archiver:
		return m.db.ArchiverBacklog(ctx, pace.ProbeTimeout)
	case pace.SlotWAL:
		return m.db.SlotWAL(ctx, pace.ProbeTimeout)
	case pace.QueueDepth:
		n, err := m.store.QueueDepth(ctx, m.Out.ID, int64(g.Limit)*2+1000)
		return float64(n), err
	case pace.SQL:
		return m.db.Number(ctx, g.Query, pace.ProbeTimeout)
	case pace.HTTP:
		return pace.AskHTTP(ctx, g.URL)
	case pace.Prometheus:
		return pace.AskPrometheus(ctx, g.URL, g.Query)
	}
	return 0, fmt.Errorf("this version cannot measure %s", g.Kind)
}

// replicaLag is how many seconds the slowest replica is behind. PostgreSQL's own
// figure stands still or vanishes while a replica replays nothing; so the time since
// the WAL was first seen beyond what it has replayed counts too.
func (m *meter) replicaLag(ctx context.Context) (seconds float64, err error) {
	end, replicas, err := m.db.Replicas(ctx, pace.ProbeTimeout)
	if err != nil {
		return 0, err
	}
	now := time.Now()
	m.wal.Mark(end, now)
	for _, r := range replicas {
		seconds = max(seconds, m.wal.Behind(r.Replayed, now).Seconds())
		if r.Replayed < end { // else PostgreSQL's figure is of the past
			seconds = max(seconds, r.Lag)
		}
	}
	return seconds, nil
}

// gatekeeper holds a walk or a release at a page boundary while a gate is closed,
// and to a number of rows a second.
type gatekeeper struct {
	store *control.Store
	req   *backfill.Request
	lease *control.Lease // of a walk, nil for a release
	size  pace.PageSize
	rate  pace.Rate
	speed *pace.Gate // the gate that limits rows per second, nil when none does

	applied   int64     // by the receiver, when a release last looked
	appliedAt time.Time // and since when

	patience time.Duration // default patience
	course   course
	faults   faults

	closed   bool
	held     time.Duration // by gates, all in all
	lastHeld time.Time     // when the time was last counted, zero while open
}

const (
	askAgain = 500 * time.Millisecond // while closed
	// patience is how long a closed gate is waited for before the caller looks after
	// its other duties.
	patience = 3 * time.Second
)

// rows is the size of the next page.
func (k *gatekeeper) rows() int {
	n := k.size.Rows()
	if k.speed != nil {
		n = min(n, max(int(k.speed.Limit), 1)) // a second's worth at most
	}
	return n
}

// took records a page for the sizes and times of the next ones.
func (k *gatekeeper) took(rows int64, bytes int64, d time.Duration) {
	k.size.Took(int(rows), bytes, d)
	limit := 0.0
	if k.speed != nil {
		limit = k.speed.Limit
	}
	k.rate.Spent(time.Now(), rows, limit)
}

// pass asks the gates before a page. It returns true when all of them are open, and
// false when one is still closed after a while, or the worker stops: then nothing
// is to be read or written, and the caller asks again. ErrPaused and ErrFenced end
// the work.
func (k *gatekeeper) pass(ctx context.Context, stopping <-chan struct{}) (bool, error) {
	for end := time.Now().Add(cmp.Or(k.patience, patience)); ; {
		k.note(ctx)
		gate, why, err := k.ask(ctx)
		if err != nil {
			return false, err
		}
		wait := askAgain
		switch due := k.rate.Wait(time.Now()); {
		case gate != nil:
			if err := k.hold(ctx, *gate, why); err != nil {
				return false, err
			}
		case due > 0 && k.speed != nil:
			if wait = min(due, time.Second); wait > 0 {
				k.held += wait
				if err := k.store.Slowed(ctx, k.req.ID, *k.speed, wait); err != nil {
					return false, err
				}
				if err := k.faults.at("gate: slowed"); err != nil {
					return false, err
				}
			}
			fallthrough
		default:
			if err := k.open(ctx); err != nil {
				return false, err
			}
			if due <= 0 || k.speed == nil {
				return true, nil
			}
		}
		if err := k.store.MayGo(ctx, k.req.ID, k.lease); err != nil {
			return false, err
		}
		select {
		case <-stopping:
			return false, nil
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(wait):
		}
		if time.Now().After(end) {
			return false, nil
		}
	}
}

// ask returns the first gate that is closed and why, or nil.
func (k *gatekeeper) ask(ctx context.Context) (closed *pace.Gate, why string, err error) {
	gates, err := k.store.GatesOf(ctx, k.req.Site, k.req.Table)
	if err != nil {
		return nil, "", err
	}
	k.speed = nil
	for _, g := range gates {
		if g.Kind == pace.RowsPerSecond {
			if k.speed == nil || g.Limit < k.speed.Limit {
				k.speed = &g.Gate
			}
			continue
		}
		if v := g.Judge(); !v.Open && closed == nil {
			closed, why = &g.Gate, v.Reason
		}
	}
	return closed, why, nil
}

// hold counts the time a closed gate takes and tells people.
func (k *gatekeeper) hold(ctx context.Context, g pace.Gate, why string) error {
	now := time.Now()
	if !k.closed {
		k.size.Halve()
		k.closed, k.lastHeld = true, now
	}
	d := now.Sub(k.lastHeld)
	k.held, k.lastHeld = k.held+d, now
	if err := k.store.Throttled(ctx, k.req.ID, g, why, d); err != nil {
		return err
	}
	return k.faults.at("gate: held")
}

func (k *gatekeeper) open(ctx context.Context) error {
	if !k.closed && k.req.WaitingSince == nil {
		return nil
	}
	k.closed, k.req.WaitingSince = false, nil
	if err := k.store.Going(ctx, k.req.ID); err != nil {
		return err
	}
	return k.faults.at("gate: opened")
}
