// Package activities is what the workflows call, one file a verb: the work beside
// a side's database (Agent) and on the control database (Control). Every activity
// may run again at any time, whole or in part, with the same result.
package activities

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
	"backfill/internal/side"
)

// Settings bound an agent's work. The zero value of a field means its default.
type Settings struct {
	Cycle        time.Duration  // pause between looks for changes when idle; default 500 ms
	CountEvery   time.Duration  // the slow clock of row counts; default 30 s
	CountLimit   time.Duration  // a count that takes longer becomes an estimate; default 5 s
	LeaseTTL     time.Duration  // how long a walk's lease lasts without renewal; default 10 s
	HoldLimit    time.Duration  // how long a row may wait for its parent before it is quarantined; default 1 h
	RefusedLimit int64          // how many rows of a table may be refused in a row before the table is stopped; default 1,000
	PageTarget   time.Duration  // what a page of a walk should take; default 250 ms
	PageRows     int            // the most rows of a page; default 50,000
	PageBytes    int64          // the most bytes of a page, beyond one row; default 32 MiB
	ChunkRows    int64          // the most rows walked between two pushes; default 200,000
	ChunkTime    time.Duration  // the longest time walked between two pushes; default 2 s
	BatchRows    int            // the most rows of a push or apply; default 20,000
	BatchBytes   int64          // the most bytes of an apply, beyond one row; default 64 MiB
	LeafRows     int            // rows of a leaf when the resume point is looked for; smaller tables are walked from the start; default 20,000
	AnswerWithin time.Duration  // how long the receiver's agent may take over leaves; default 20 s
	Walks        control.Limits // how many whole-table walks go on at once; default 2 on a side, 8 in all
	Share        time.Duration  // after which a walk makes place for one that waits; default 15 s
	ProofRows    int            // the most rows of a leaf of a reconciliation; default 5,000
	ProofBytes   int64          // about the most bytes of one; default 8 MiB
	Turn         time.Duration  // when an activity returns to its workflow; default 20 min
}

func (s *Settings) defaults() {
	set(&s.Cycle, 500*time.Millisecond)
	set(&s.CountEvery, 30*time.Second)
	set(&s.CountLimit, 5*time.Second)
	set(&s.LeaseTTL, 10*time.Second)
	set(&s.HoldLimit, time.Hour)
	set(&s.RefusedLimit, 1000)
	set(&s.PageTarget, 250*time.Millisecond)
	set(&s.PageRows, 50_000)
	set(&s.PageBytes, 32<<20)
	set(&s.ChunkRows, 200_000)
	set(&s.ChunkTime, 2*time.Second)
	set(&s.BatchRows, 20_000)
	set(&s.BatchBytes, 64<<20)
	set(&s.LeafRows, 20_000)
	set(&s.AnswerWithin, answerWithin)
	set(&s.Walks.Side, 2)
	set(&s.Walks.All, 8)
	set(&s.Share, 15*time.Second)
	set(&s.ProofRows, 5000)
	set(&s.ProofBytes, 8<<20)
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
	blocked map[string]blocked // tables whose changes cannot be pushed now
	failing map[string]string  // what cannot be done now, and why
	bells   map[chan struct{}]string

	applied    atomic.Int64  // rows written for the other side's changes
	listening  atomic.Bool   // events ring the bells
	gated      atomic.Bool   // there are gates to be measured here
	pushedSome chan struct{} // tells Attend that the outbox has shrunk

	faults faults
}

// AppliedRows is how many rows this process has written for the other side's changes.
func (a *Agent) AppliedRows() int64 { return a.applied.Load() }

type blocked struct {
	until time.Time
	why   string
}

// NewAgent makes the agent of a side. The site must be known to the control database.
func NewAgent(ctx context.Context, store *control.Store, db *side.DB, id string, s Settings) (*Agent, error) {
	s.defaults()
	site, err := store.Site(ctx, db.Site)
	if err != nil {
		return nil, err
	}
	if site.OneDatabase {
		db.ShareDatabase()
	}
	out, err := store.Direction(ctx, db.Site, db.Side)
	if err != nil {
		return nil, err
	}
	in, err := store.Direction(ctx, db.Site, out.To)
	if err != nil {
		return nil, err
	}
	return &Agent{ID: id, Out: out, In: in, Settings: s, store: store, db: db,
		blocked: map[string]blocked{}, failing: map[string]string{}, bells: map[chan struct{}]string{}, pushedSome: make(chan struct{}, 1)}, nil
}

// Attend tells the control database that the agent lives, and rings the agent's
// loops when something is there for them, until ctx ends. It goes on through
// outages of the control database.
func (a *Agent) Attend(ctx context.Context) {
	go a.listen(ctx)
	go a.measure(ctx)
	go a.tryMappings(ctx)
	outbox := &outboxWatch{Agent: a}
	var next time.Time
	for ctx.Err() == nil {
		// What can be done about an error here is to try again; people see the agent's age.
		if !time.Now().Before(next) {
			_ = a.store.AgentSeen(ctx, a.db.Site, a.db.Side, a.ID, a.db.Where(), a.problem(ctx))
			next = time.Now().Add(seenEvery)
		}
		began := time.Now()
		_ = outbox.report(ctx)
		took := time.Since(began)
		select {
		case <-ctx.Done():
		case <-a.pushedSome:
			sleep(ctx, min(max(time.Second, 20*took), seenEvery)) // counting what is much must not hold up sending it
		case <-time.After(time.Until(next)):
		}
	}
}

// seenEvery is how often an agent says that it lives and what its outbox holds.
const seenEvery = 5 * time.Second

// outboxWatch tells how much waits in the outbox, and for how long at least.
type outboxWatch struct {
	*Agent
	seen pace.Tide
}

// backlogLimit is how many records are counted; people see that many when there are more.
const backlogLimit = 200_000

func (o *outboxWatch) report(ctx context.Context) error {
	backlog, err := o.db.Backlog(ctx, backlogLimit)
	if err != nil {
		return err
	}
	now, newest := time.Now(), int64(0)
	for _, b := range backlog {
		newest = max(newest, b.Last)
	}
	if newest > 0 {
		o.seen.Mark(newest, now)
	}
	all := make([]control.Backlog, len(backlog))
	for i, b := range backlog {
		all[i] = control.Backlog{Table: b.Table, Rows: b.Rows, First: b.First, Waited: o.seen.Behind(b.First-1, now)}
	}
	return o.store.ReportOutbox(ctx, o.db.Site, o.db.Side, all)
}

func (a *Agent) problem(ctx context.Context) string {
	if err := a.ready(ctx); err != nil {
		return message(err)
	}
	var all []string
	stops, err := a.store.Stops(ctx, a.In.ID)
	if err != nil {
		return message(err)
	}
	for _, s := range stops {
		all = append(all, fmt.Sprintf("changes of %s have stopped, because too many of its rows in a row were refused here, the last with: %s; mend it, and they go on by themselves within a minute, or at once when one of them is retried", s.Table, s.Reason))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for what, why := range a.failing {
		all = append(all, what+": "+why)
	}
	for table, b := range a.blocked {
		if time.Now().Before(b.until) {
			all = append(all, fmt.Sprintf("changes of %s wait: %s", table, b.why))
		}
	}
	slices.Sort(all)
	return strings.Join(all, "; ")
}

// trouble remembers that something cannot be done because a database refuses it, or
// that it can.
func (a *Agent) trouble(what string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err == nil:
		delete(a.failing, what)
	case side.SQLState(err) != "" || backfill.CodeOf(err) != "":
		a.failing[what] = message(err)
	}
}

func (a *Agent) listen(ctx context.Context) {
	for ctx.Err() == nil {
		_ = a.store.Listen(ctx, func() { a.listening.Store(true); a.ring("") }, a.hear)
		a.listening.Store(false)
		sleep(ctx, time.Second)
	}
}

// hear rings for what an event tells of. Events of all sites are heard: those of others
// must not make this one ask the control database anything.
func (a *Agent) hear(e control.Event) {
	switch e.Kind {
	case "site":
		if e.Name == a.db.Site {
			a.ring("site")
		}
	case "gates":
		if e.Name == a.db.Site {
			a.ring("gates")
		}
	case "shadow":
		if id := int64(a.Out.ID); e.ID == id || e.ID == int64(a.In.ID) {
			a.ring("shadow")
		}
	case "mapping":
		a.ring("mapping")
	case "request", "reconciliation":
		a.ring(fmt.Sprintf("%s %d", e.Kind, e.ID))
		if a.gated.Load() {
			a.ring("gates")
		}
	default:
		a.ring(fmt.Sprintf("%s %d", e.Kind, e.ID))
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

// turns runs fn again and again inside one activity, so that an idle sync costs
// hardly any history: at once while there is work, else after a pause or when the
// bell rings. It returns nil when the turn is over or the worker stops, and at the
// first error, which the workflow engine shows and retries.
func (a *Agent) turns(ctx context.Context, rung <-chan struct{}, pause func() time.Duration, fn func() (busy bool, err error)) error {
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	stopping := activity.GetWorkerStopChannel(ctx)
	for end := time.Now().Add(a.Turn); time.Now().Before(end); {
		busy, err := fn()
		if err != nil {
			return surface(err)
		}
		wait := pause()
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
	if !activity.IsActivity(ctx) {
		return func() {} // nobody listens
	}
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
