// Package activities is what the workflows call, one file a verb: the work beside
// a side's database (Agent) and on the control database (Control). Every activity
// may run again at any time, whole or in part, with the same result.
package activities

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
	"backfill/internal/side"
)

// Settings bound an agent's work. The zero value of a field means its default.
type Settings struct {
	Cycle      time.Duration // pause between looks for changes when idle; default 500 ms
	CountEvery time.Duration // the slow clock of row counts; default 30 s
	CountLimit time.Duration // a count that takes longer becomes an estimate; default 5 s
	LeaseTTL   time.Duration // how long a walk's lease lasts without renewal; default 10 s
	HoldLimit  time.Duration // how long a row may wait for its parent before it is quarantined; default 1 h
	PageTarget time.Duration // what a page of a walk should take; default 250 ms
	PageRows   int           // the most rows of a page; default 20,000
	PageBytes  int64         // the most bytes of a page, beyond one row; default 32 MiB
	ChunkRows  int64         // the most rows walked between two pushes; default 50,000
	ChunkTime  time.Duration // the longest time walked between two pushes; default 2 s
	BatchRows  int           // the most rows of a push or apply; default 20,000
	BatchBytes int64         // the most bytes of an apply, beyond one row; default 64 MiB
	Turn       time.Duration // when an activity returns to its workflow; default 20 min
}

func (s *Settings) defaults() {
	set(&s.Cycle, 500*time.Millisecond)
	set(&s.CountEvery, 30*time.Second)
	set(&s.CountLimit, 5*time.Second)
	set(&s.LeaseTTL, 10*time.Second)
	set(&s.HoldLimit, time.Hour)
	set(&s.PageTarget, 250*time.Millisecond)
	set(&s.PageRows, 20_000)
	set(&s.PageBytes, 32<<20)
	set(&s.ChunkRows, 50_000)
	set(&s.ChunkTime, 2*time.Second)
	set(&s.BatchRows, 20_000)
	set(&s.BatchBytes, 64<<20)
	set(&s.Turn, 20*time.Minute)
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Agent works beside one side's database: it pushes that side's changes, applies
// the other side's, walks, counts and classifies.
type Agent struct {
	ID  string // names this process in leases
	Out backfill.Direction
	In  backfill.Direction
	Settings

	store *control.Store
	db    *side.DB

	mu      sync.Mutex
	layouts map[string]int64   // ids by fingerprint
	blocked map[string]blocked // tables whose changes cannot be pushed now
	bells   map[chan struct{}]string

	faults faults
}

// faults lets a test step in between two steps of a push, a page or an apply: to
// look, to let something else happen first, or to fail as a crash would. Otherwise
// it is nil.
type faults func(point string) error

func (f faults) at(point string) error {
	if f == nil {
		return nil
	}
	return f(point)
}

type blocked struct {
	until time.Time
	why   string
}

// NewAgent makes the agent of a side. The site must be known to the control database.
func NewAgent(ctx context.Context, store *control.Store, db *side.DB, id string, s Settings) (*Agent, error) {
	s.defaults()
	out, err := store.Direction(ctx, db.Site, db.Side)
	if err != nil {
		return nil, err
	}
	in, err := store.Direction(ctx, db.Site, out.To)
	if err != nil {
		return nil, err
	}
	return &Agent{ID: id, Out: out, In: in, Settings: s, store: store, db: db,
		layouts: map[string]int64{}, blocked: map[string]blocked{}, bells: map[chan struct{}]string{}}, nil
}

// Attend tells the control database that the agent lives, and rings the agent's
// loops when something is there for them, until ctx ends. It goes on through
// outages of the control database.
func (a *Agent) Attend(ctx context.Context) {
	go a.listen(ctx)
	for ctx.Err() == nil {
		// What can be done about an error here is to try again; people see the agent's age.
		_ = a.store.AgentSeen(ctx, a.db.Site, a.db.Side, a.ID, a.db.Where(), a.problem(ctx))
		sleep(ctx, 5*time.Second)
	}
}

func (a *Agent) problem(ctx context.Context) string {
	if err := a.ready(ctx); err != nil {
		return message(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for table, b := range a.blocked {
		if time.Now().Before(b.until) {
			return fmt.Sprintf("changes of %s wait: %s", table, b.why)
		}
	}
	return ""
}

// ready fails while the side may not be touched: not set up, not the cluster and
// timeline it was, or of a later epoch or push than the control database knows. When
// an admin has opened a new epoch, the side begins it.
func (a *Agent) ready(ctx context.Context) error {
	// The side is asked first: it never remembers a push before the control database does.
	last, err := a.db.LastPush(ctx)
	if err != nil {
		return err
	}
	id, err := a.db.Identity(ctx)
	if err != nil {
		return err
	}
	if err := a.store.CheckIdentity(ctx, a.db.Site, a.db.Side, id.System, id.Timeline); err != nil {
		return err
	}
	a.db.Meet(id)
	begin, err := a.store.Beginning(ctx, a.Out, a.In)
	switch {
	case err != nil:
		return err
	case begin.Epoch < last.Epoch:
		return backfill.Errorf(backfill.Refused, "%s is in epoch %d, the control database in %d: it was restored; open a new epoch with backfill site new-epoch %s",
			a.db.Side, last.Epoch, begin.Epoch, a.db.Site)
	case begin.Epoch == last.Epoch && (last.Batch > begin.Batch || last.Batch == begin.Batch && last.Nonce != begin.Nonce):
		return backfill.Errorf(backfill.Refused, "%s remembers push %d, the control database another one or none of that number: it was restored; open a new epoch with backfill site new-epoch %s",
			a.db.Side, last.Batch, a.db.Site)
	case begin.Epoch == last.Epoch:
		return nil
	}
	return a.db.Begin(ctx, begin.Epoch, begin.Batch, begin.Nonce, side.Position(begin.Position))
}

func (a *Agent) listen(ctx context.Context) {
	for ctx.Err() == nil {
		_ = a.store.Listen(ctx, func() { a.ring("") }, func(e control.Event) {
			a.ring(fmt.Sprintf("%s %d", e.Kind, e.ID))
		})
		sleep(ctx, time.Second)
	}
}

// bell returns a channel that is rung when an event of that name comes.
func (a *Agent) bell(name string) (rung <-chan struct{}, done func()) {
	c := make(chan struct{}, 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bells[c] = name
	return c, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.bells, c)
	}
}

func (a *Agent) ring(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for c, n := range a.bells {
		if name == "" || n == name {
			select {
			case c <- struct{}{}:
			default: // it rings already
			}
		}
	}
}

// layoutID records a layout and remembers its id.
func (a *Agent) layoutID(ctx context.Context, l *row.Layout) (int64, error) {
	fp := l.Fingerprint()
	a.mu.Lock()
	id := a.layouts[fp]
	a.mu.Unlock()
	if id != 0 {
		return id, nil
	}
	id, err := a.store.PutLayout(ctx, l)
	if err == nil {
		a.mu.Lock()
		a.layouts[fp] = id
		a.mu.Unlock()
	}
	return id, err
}

// turns runs fn again and again inside one activity, so that an idle sync costs
// hardly any history: at once while there is work, else after a pause or when the
// bell rings. It returns nil when the turn is over or the worker stops, and at the
// first error, which the workflow engine shows and retries.
func (a *Agent) turns(ctx context.Context, rung <-chan struct{}, pause time.Duration, fn func() (busy bool, err error)) error {
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	stopping := activity.GetWorkerStopChannel(ctx)
	for end := time.Now().Add(a.Turn); time.Now().Before(end); {
		busy, err := fn()
		if err != nil {
			return surface(err)
		}
		wait := pause
		if busy {
			wait = 0
		}
		select {
		case <-stopping:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-rung:
		case <-time.After(wait):
		}
	}
	return nil
}

// beat heartbeats by time until stopped, so that one slow statement does not look
// like a dead agent. details may carry counts and keys of progress.
func beat(ctx context.Context, details func() any) (stop func()) {
	// Only the pauses are cut short: a heartbeat on its way is let through.
	pauses, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			activity.RecordHeartbeat(ctx, details())
			if !sleep(pauses, 2*time.Second) {
				return
			}
		}
	}()
	return func() { cancel(); <-done }
}

// sleep waits and reports whether it did so to the end.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// ErrPermanent is the type of errors that trying again cannot mend.
const ErrPermanent = "permanent"

// surface turns an error into what the workflow engine shows: domain errors by
// their code, what PostgreSQL refuses for good as permanent, the rest as it is, to
// be retried. Causes stay out of it when they could hold row data.
func surface(err error) error {
	var e *backfill.Error
	switch {
	case err == nil || errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &e) && e.Code == backfill.Refused:
		// An admin can mend it: look again, but not often.
		return temporal.NewApplicationErrorWithOptions(e.Message, string(e.Code), temporal.ApplicationErrorOptions{NextRetryDelay: 10 * time.Second})
	case errors.As(err, &e):
		return temporal.NewNonRetryableApplicationError(e.Message, string(e.Code), nil)
	}
	return err
}

// permanent is surface for activities that end a request when it cannot go on.
func permanent(err error) error {
	if errors.Is(err, side.ErrLayout) || side.Permanent(err) {
		return temporal.NewNonRetryableApplicationError(message(err), ErrPermanent, nil)
	}
	return surface(err)
}

// message is an error for people: PostgreSQL's or the domain's own words.
func message(err error) string {
	var e *backfill.Error
	if errors.As(err, &e) {
		return e.Message
	}
	return side.Message(err)
}
