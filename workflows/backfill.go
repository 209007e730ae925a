package workflows

import (
	"errors"
	"fmt"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"backfill/activities"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Backfill sees one request through: walk, review, release. The control database
// holds the truth; this decides what happens next and waits for people. It may
// begin at any state, so that a lost run can be started again.
func Backfill(ctx workflow.Context, in BackfillInput) (BackfillStatus, error) {
	b := &run{in: in, log: workflow.GetLogger(ctx)}
	if err := b.listen(ctx); err != nil {
		return BackfillStatus{}, err
	}
	if err := b.look(ctx); err != nil {
		return b.status(), err
	}
	b.classify(ctx)
	for b.now.State.Open() {
		if err := b.next(ctx); err != nil {
			return b.status(), err
		}
		if b.now.State.Open() && workflow.GetInfo(ctx).GetContinueAsNewSuggested() {
			b.drain(ctx)
			return b.status(), workflow.NewContinueAsNewError(ctx, Backfill, in)
		}
	}
	b.drain(ctx)
	return b.status(), nil
}

// run is one request's run.
type run struct {
	in      BackfillInput
	log     interface{ Warn(string, ...any) }
	now     activities.Snapshot
	learned int // how often now was replaced
	walked  activities.Walked
	ignored string // why the last signal was ignored
	judging bool   // the receiver's agent is at the staged rows
	again   bool   // and has to go over them once more
}

// agent and controller name activities for the compiler; they are never called.
var (
	agent      *activities.Agent
	controller *activities.Control
)

// next does what the request's state asks for.
func (b *run) next(ctx workflow.Context) error {
	if ctx.Err() != nil {
		return b.cancelledByConsole(ctx)
	}
	switch {
	case b.now.Paused:
		return b.await(ctx, func() bool { return !b.now.Paused })
	case b.now.State == backfill.Pending || b.now.State == backfill.InProgress:
		return b.walk(ctx)
	case b.now.State == backfill.AwaitingReview:
		return b.review(ctx)
	default:
		return b.release(ctx)
	}
}

// walk lets the source's agent walk one turn.
func (b *run) walk(ctx workflow.Context) error {
	var result activities.WalkResult
	asked := b.learned
	opts := longActivity(AgentQueue(b.in.Site, b.in.From), "Walk "+b.in.Table+" on "+b.in.From)
	if err := b.whileOpen(ctx, opts, agent.Walk, &result); err != nil || result.State == "" {
		return err
	}
	b.walked = result.Walked
	return b.learn(ctx, asked, result.Snapshot)
}

// review waits for a person.
func (b *run) review(ctx workflow.Context) error {
	return b.await(ctx, func() bool { return b.now.State != backfill.AwaitingReview })
}

// release lets a control worker copy the approved rows into the queue.
func (b *run) release(ctx workflow.Context) error {
	var result activities.Snapshot
	asked := b.learned
	opts := longActivity(ControlQueue, "Release the approved rows of "+b.in.Table)
	if err := b.whileOpen(ctx, opts, controller.Release, &result); err != nil || result.State == "" {
		return err
	}
	return b.learn(ctx, asked, result)
}

// classify lets the receiver's agent judge the staged rows beside the walk. The
// review does not depend on it: rows not judged are of unknown effect.
func (b *run) classify(ctx workflow.Context) {
	if b.now.State == backfill.Releasing || !b.now.State.Open() {
		return
	}
	if b.again = true; b.judging {
		return
	}
	b.judging = true
	workflow.Go(ctx, func(ctx workflow.Context) {
		defer func() { b.judging = false }()
		ctx, cancel := workflow.WithCancel(ctx)
		defer cancel()
		ctx = workflow.WithActivityOptions(ctx, longActivity(AgentQueue(b.in.Site, b.in.To), "Judge the effect of the staged rows on "+b.in.To))
		for b.again {
			b.again = false
			done := workflow.ExecuteActivity(ctx, agent.Classify, b.in.RequestID)
			if workflow.Await(ctx, func() bool { return done.IsReady() || !b.now.State.Open() }) != nil || !done.IsReady() {
				return
			}
			if err := done.Get(ctx, nil); err != nil {
				b.log.Warn("effects stay unknown", "request", b.in.RequestID, "error", err)
				return
			}
			if b.now.State == backfill.AwaitingReview {
				_ = b.look(ctx) // for the totals in the details; the next look will do as well
			}
		}
	})
}

// whileOpen runs an activity until it returns or the request is closed by a
// handler meanwhile; an error that trying again cannot mend fails the request.
func (b *run) whileOpen(ctx workflow.Context, opts workflow.ActivityOptions, act, result any) error {
	ctx, cancel := workflow.WithCancel(workflow.WithActivityOptions(ctx, opts))
	defer cancel()
	done := workflow.ExecuteActivity(ctx, act, b.in.RequestID)
	if err := workflow.Await(ctx, func() bool { return done.IsReady() || !b.now.State.Open() }); err != nil {
		return b.cancelledByConsole(ctx)
	}
	if !done.IsReady() {
		return nil // the control database fences what still runs
	}
	err := done.Get(ctx, result)
	var app *temporal.ApplicationError
	switch {
	case err == nil:
		return nil
	case temporal.IsCanceledError(err):
		return b.cancelledByConsole(ctx)
	case errors.As(err, &app):
		return b.close(ctx, activities.Closing{By: "backfill", To: backfill.Failed, Reason: app.Message()})
	}
	return b.close(ctx, activities.Closing{By: "backfill", To: backfill.Failed, Reason: err.Error()})
}

// await waits for a condition that handlers bring about.
func (b *run) await(ctx workflow.Context, condition func() bool) error {
	if err := workflow.Await(ctx, func() bool { return condition() || !b.now.State.Open() }); err != nil {
		return b.cancelledByConsole(ctx)
	}
	return nil
}

// cancelledByConsole answers the workflow engine's own cancellation.
func (b *run) cancelledByConsole(ctx workflow.Context) error {
	ctx, _ = workflow.NewDisconnectedContext(ctx)
	return b.close(ctx, activities.Closing{By: "temporal", To: backfill.Cancelled, Reason: "cancelled in the Temporal console"})
}

func (b *run) close(ctx workflow.Context, c activities.Closing) error {
	c.RequestID = b.in.RequestID
	var now activities.Snapshot
	asked := b.learned
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, shortActivity("Close the request")), controller.Close, c).Get(ctx, &now)
	if isConflict(err) {
		return b.look(ctx) // somebody else closed it
	}
	if err != nil {
		return err
	}
	return b.learn(ctx, asked, now)
}

// look reads the request afresh.
func (b *run) look(ctx workflow.Context) error {
	var now activities.Snapshot
	asked := b.learned
	if err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, shortActivity("Look at the request")), controller.Look, b.in.RequestID).Get(ctx, &now); err != nil {
		return err
	}
	return b.learn(ctx, asked, now)
}

// learn takes over what an activity found, and shows it to operators. asked is
// b.learned when the activity was begun: what several find beside each other may
// arrive in another order than they found it, and is looked at again.
func (b *run) learn(ctx workflow.Context, asked int, now activities.Snapshot) error {
	if asked != b.learned {
		return b.look(ctx)
	}
	b.learned++
	before := b.now.State
	b.now = now
	if before != now.State {
		if err := workflow.UpsertTypedSearchAttributes(ctx, StateAttribute.ValueSet(string(now.State)), RowsAttribute.ValueSet(now.Staged)); err != nil {
			b.log.Warn("search attributes not updated", "error", err)
		}
	}
	workflow.SetCurrentDetails(ctx, b.details())
	return nil
}

func (b *run) status() BackfillStatus {
	return BackfillStatus{RequestID: b.in.RequestID, State: b.now.State, Paused: b.now.Paused, Staged: b.now.Staged, Released: b.now.Released,
		Superseded: b.now.Superseded, Revision: b.now.Revision, ReviewedBy: b.now.ReviewedBy, Reason: b.now.Reason}
}

// listen answers queries, updates and signals. Updates answer their caller;
// signals, which cannot, say in the details why one was ignored.
func (b *run) listen(ctx workflow.Context) error {
	if err := workflow.SetQueryHandler(ctx, Status, func() (BackfillStatus, error) { return b.status(), nil }); err != nil {
		return err
	}
	decide := func(approve bool) func(workflow.Context, Decision, string) (BackfillStatus, error) {
		return func(ctx workflow.Context, d Decision, via string) (BackfillStatus, error) {
			return b.decide(ctx, approve, d, via)
		}
	}
	hold := func(paused bool) func(workflow.Context, By, string) (BackfillStatus, error) {
		return func(ctx workflow.Context, by By, via string) (BackfillStatus, error) {
			return b.hold(ctx, paused, by, via)
		}
	}
	if err := errors.Join(
		handle(ctx, b, Approve, decide(true), b.undecidable),
		handle(ctx, b, Reject, decide(false), b.undecidable),
		handle(ctx, b, Pause, hold(true), nil),
		handle(ctx, b, Resume, hold(false), nil),
		handle(ctx, b, Cancel, b.cancel, nil),
		handle(ctx, b, Judge, b.judge, nil),
	); err != nil {
		return err
	}
	onSignal(ctx, b, Refresh, func(ctx workflow.Context, _ struct{}, _ string) (BackfillStatus, error) {
		return b.status(), b.look(ctx)
	})
	return nil
}

// handle answers updates and signals of one name; validate, if any, refuses an
// update before it reaches history. The handler is told by what way it was called.
func handle[T any](ctx workflow.Context, b *run, name string, handler func(workflow.Context, T, string) (BackfillStatus, error), validate func(T) error) error {
	opts := workflow.UpdateHandlerOptions{}
	if validate != nil {
		opts.Validator = func(_ workflow.Context, payload T) error { return validate(payload) }
	}
	onSignal(ctx, b, name, handler)
	return workflow.SetUpdateHandlerWithOptions(ctx, name, func(ctx workflow.Context, payload T) (BackfillStatus, error) {
		return handler(ctx, payload, "")
	}, opts)
}

// onSignal handles every signal of a name as the update of that name.
func onSignal[T any](ctx workflow.Context, b *run, name string, handler func(workflow.Context, T, string) (BackfillStatus, error)) {
	workflow.Go(ctx, func(ctx workflow.Context) {
		for {
			var payload T
			if more := workflow.GetSignalChannel(ctx, name).Receive(ctx, &payload); !more {
				return
			}
			b.ignored = ""
			if _, err := handler(ctx, payload, backfill.ViaTemporal); err != nil {
				var app *temporal.ApplicationError
				b.ignored = fmt.Sprintf("signal %s was ignored: %v", name, err)
				if errors.As(err, &app) {
					b.ignored = fmt.Sprintf("signal %s was ignored: %s", name, app.Message())
				}
				b.log.Warn(b.ignored, "request", b.in.RequestID)
			}
			workflow.SetCurrentDetails(ctx, b.details())
		}
	})
}

// undecidable spares history a decision that is surely refused. What it lets
// through is decided by the control database.
func (b *run) undecidable(d Decision) error {
	if b.now.State == backfill.AwaitingReview && d.Revision != b.now.Revision {
		return temporal.NewApplicationError(fmt.Sprintf("request %d stands at revision %d, the decision is for revision %d: read the rows again",
			b.in.RequestID, b.now.Revision, d.Revision), ErrConflict)
	}
	return nil
}

func (b *run) decide(ctx workflow.Context, approve bool, d Decision, via string) (BackfillStatus, error) {
	v := activities.Verdict{RequestID: b.in.RequestID, Approve: approve, Origin: origin(d.Origin, via),
		Decision: control.Decision{By: d.By, Revision: d.Revision, Note: d.Note, SkipIdentical: d.SkipIdentical, Via: via}}
	return b.record(ctx, d.By, "Record "+d.By+"'s decision", controller.Decide, v)
}

// origin is from where something was asked for, as the audit has it.
func origin(said control.Origin, via string) control.Origin {
	if via != "" {
		return control.Origin{Via: via}
	}
	return said
}

func (b *run) hold(ctx workflow.Context, paused bool, by By, via string) (BackfillStatus, error) {
	return b.record(ctx, by.By, map[bool]string{true: "Pause for ", false: "Resume for "}[paused]+by.By, controller.Pause,
		activities.Hold{RequestID: b.in.RequestID, By: by.By, Note: by.Note, Paused: paused, Origin: origin(by.Origin, via)})
}

// judge has the receiver's agent go over the staged rows again.
func (b *run) judge(ctx workflow.Context, by By, via string) (BackfillStatus, error) {
	_, err := b.record(ctx, by.By, "Judge the staged rows again for "+by.By, controller.Rejudge,
		activities.Judgement{RequestID: b.in.RequestID, Revision: b.now.Revision, By: by.By, Origin: origin(by.Origin, via)})
	if err == nil {
		b.classify(ctx)
	}
	return b.status(), err
}

func (b *run) cancel(ctx workflow.Context, by By, via string) (BackfillStatus, error) {
	reason := "cancelled by " + by.By
	if by.Note != "" {
		reason += ": " + by.Note
	}
	return b.record(ctx, by.By, "Cancel for "+by.By, controller.Close,
		activities.Closing{RequestID: b.in.RequestID, By: by.By, To: backfill.Cancelled, Reason: reason, Origin: origin(by.Origin, via)})
}

// record runs a short activity for a person and learns from its answer.
func (b *run) record(ctx workflow.Context, by, summary string, act, arg any) (BackfillStatus, error) {
	if err := backfill.CheckPerson(by); err != nil {
		return BackfillStatus{}, temporal.NewApplicationError(err.Error(), ErrInvalid)
	}
	var now activities.Snapshot
	asked := b.learned
	if err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, shortActivity(summary)), act, arg).Get(ctx, &now); err != nil {
		var app *temporal.ApplicationError
		if errors.As(err, &app) {
			return BackfillStatus{}, temporal.NewApplicationError(app.Message(), app.Type())
		}
		return BackfillStatus{}, err
	}
	err := b.learn(ctx, asked, now)
	return b.status(), err
}

// drain lets handlers finish before the run ends.
func (b *run) drain(ctx workflow.Context) {
	ctx, _ = workflow.NewDisconnectedContext(ctx)
	_ = workflow.Await(ctx, func() bool { return workflow.AllHandlersFinished(ctx) })
}

func isConflict(err error) bool {
	var app *temporal.ApplicationError
	return errors.As(err, &app) && app.Type() == ErrConflict
}

// longActivity heartbeats and may take long; its attempts are made until it
// succeeds or fails for good. A dead worker is noticed by its heartbeat.
func longActivity(queue, summary string) workflow.ActivityOptions {
	return workflow.ActivityOptions{TaskQueue: queue, Summary: summary, StartToCloseTimeout: 24 * time.Hour, HeartbeatTimeout: 10 * time.Second,
		RetryPolicy: &temporal.RetryPolicy{InitialInterval: time.Second, MaximumInterval: 15 * time.Second}}
}

// shortActivity is one transaction on the control database.
func shortActivity(summary string) workflow.ActivityOptions {
	return workflow.ActivityOptions{TaskQueue: ControlQueue, Summary: summary, StartToCloseTimeout: 10 * time.Second,
		RetryPolicy: &temporal.RetryPolicy{InitialInterval: 200 * time.Millisecond, MaximumInterval: 10 * time.Second}}
}
