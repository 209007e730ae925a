package api

import (
	"context"
	"errors"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/workflows"
)

// Runs is what the API asks of the workflow engine. Every method but Start waits
// for the run's answer: nil means done, and an error is a *backfill.Error when a
// person can act on it.
type Runs interface {
	Start(ctx context.Context, r *backfill.Request, reviewURL string) error
	Approve(ctx context.Context, r *backfill.Request, by string, d Decision) error
	Reject(ctx context.Context, r *backfill.Request, by string, d Decision) error
	Pause(ctx context.Context, r *backfill.Request, by, note string) error
	Resume(ctx context.Context, r *backfill.Request, by, note string) error
	Cancel(ctx context.Context, r *backfill.Request, by, note string) error
	// Judge has the effects of the staged rows judged again.
	Judge(ctx context.Context, r *backfill.Request, by string) error
	// Polled is when a control worker last asked for work, as far as the engine
	// knows; the zero time when none has for minutes.
	Polled(ctx context.Context) (time.Time, error)
	// Reconcile starts a reconciliation's workflow.
	Reconcile(ctx context.Context, r *backfill.Reconciliation) error
	// Check fails while the engine is away.
	Check(ctx context.Context) error
}

// NewRuns uses a Temporal client, best a lazy one: Temporal may be away now and later.
func NewRuns(c client.Client) Runs { return runs{c} }

type runs struct{ client client.Client }

const (
	checkTimeout  = 2 * time.Second
	answerTimeout = 20 * time.Second
)

// errNoRun is the cause when the workflow of a request is not running.
var errNoRun = errors.New("no such run")

func (t runs) Start(ctx context.Context, r *backfill.Request, reviewURL string) error {
	return workflows.Start(ctx, t.client, r, reviewURL)
}

func (t runs) Reconcile(ctx context.Context, r *backfill.Reconciliation) error {
	return workflows.StartReconcile(ctx, t.client, r)
}

func (t runs) Approve(ctx context.Context, r *backfill.Request, by string, d Decision) error {
	return t.update(ctx, r, workflows.Approve, workflows.Decision{By: by, Revision: d.Revision, Note: d.Note, SkipIdentical: d.SkipIdentical, Origin: control.OriginOf(ctx)})
}

func (t runs) Reject(ctx context.Context, r *backfill.Request, by string, d Decision) error {
	return t.update(ctx, r, workflows.Reject, workflows.Decision{By: by, Revision: d.Revision, Note: d.Note, Origin: control.OriginOf(ctx)})
}

func (t runs) Pause(ctx context.Context, r *backfill.Request, by, note string) error {
	return t.update(ctx, r, workflows.Pause, workflows.By{By: by, Note: note, Origin: control.OriginOf(ctx)})
}

func (t runs) Resume(ctx context.Context, r *backfill.Request, by, note string) error {
	return t.update(ctx, r, workflows.Resume, workflows.By{By: by, Note: note, Origin: control.OriginOf(ctx)})
}

func (t runs) Cancel(ctx context.Context, r *backfill.Request, by, note string) error {
	return t.update(ctx, r, workflows.Cancel, workflows.By{By: by, Note: note, Origin: control.OriginOf(ctx)})
}

func (t runs) Judge(ctx context.Context, r *backfill.Request, by string) error {
	return t.update(ctx, r, workflows.Judge, workflows.By{By: by, Origin: control.OriginOf(ctx)})
}

func (t runs) Polled(ctx context.Context) (last time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	q, err := t.client.DescribeTaskQueue(ctx, workflows.ControlQueue, enumspb.TASK_QUEUE_TYPE_WORKFLOW)
	if err != nil {
		return last, err
	}
	for _, p := range q.Pollers {
		if at := p.GetLastAccessTime().AsTime(); at.After(last) {
			last = at
		}
	}
	return last, nil
}

func (t runs) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	_, err := t.client.CheckHealth(ctx, &client.CheckHealthRequest{})
	return err
}

func (t runs) update(ctx context.Context, r *backfill.Request, name string, arg any) error {
	// Asked first, so that "nothing was decided" is known to be true when Temporal
	// is away: an update that only timed out may still be taken later.
	if err := t.Check(ctx); err != nil {
		return &backfill.Error{Code: backfill.Unavailable, Cause: err, Message: "Temporal is away: nothing was decided, try again"}
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	h, err := t.client.UpdateWorkflow(ctx, client.UpdateWorkflowOptions{
		WorkflowID: r.WorkflowID(), UpdateName: name, Args: []any{arg}, WaitForStage: client.WorkflowUpdateStageCompleted,
	})
	if err == nil {
		err = h.Get(ctx, nil)
	}
	return updateError(err)
}

// updateError turns what an update ended with into what a person can act on.
func updateError(err error) error {
	var app *temporal.ApplicationError
	var none *serviceerror.NotFound
	switch {
	case err == nil:
		return nil
	case errors.As(err, &app):
		switch app.Type() {
		case workflows.ErrConflict, workflows.ErrInvalid, workflows.ErrNotFound, workflows.ErrRefused, workflows.ErrForbidden:
			return &backfill.Error{Code: backfill.Code(app.Type()), Message: app.Message()}
		case endedMeanwhile:
			return unanswered(err)
		}
		return err
	case errors.As(err, &none):
		return &backfill.Error{Code: backfill.Unavailable, Cause: errors.Join(errNoRun, err),
			Message: "the run has not started yet: nothing was decided, try again"}
	}
	return unanswered(err)
}

// endedMeanwhile is the server's type of error when a run ended with an update
// accepted and not answered.
const endedMeanwhile = "AcceptedUpdateCompletedWorkflow"

func unanswered(err error) error {
	return &backfill.Error{Code: backfill.Unavailable, Cause: err,
		Message: "the run did not answer in time: read the request again to see whether this was taken"}
}
