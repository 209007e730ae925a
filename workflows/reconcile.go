package workflows

import (
	"context"
	"errors"
	"fmt"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"backfill/activities"
	"backfill/internal/backfill"
)

// Reconcile sees one comparison through: both agents do their part side by side,
// then the verdict is drawn. Where the run stands is in the control database alone,
// so that it may be started again at any point.
func Reconcile(ctx workflow.Context, in ReconcileInput) (activities.RunSnapshot, error) {
	if err := workflow.SetQueryHandler(ctx, Status, func() (ReconcileInput, error) { return in, nil }); err != nil {
		return activities.RunSnapshot{}, err
	}
	workflow.SetCurrentDetails(ctx, fmt.Sprintf("Reconciliation %d: both agents compare %s of site %s, %s → %s.", in.ID, in.Table, in.Site, in.From, in.To))
	both, cancel := workflow.WithCancel(ctx)
	defer cancel()
	parts := []workflow.Future{
		workflow.ExecuteActivity(workflow.WithActivityOptions(both, longActivity(AgentQueue(in.Site, in.From), "Hash the leaves of "+in.Table+" on "+in.From)), agent.Hash, in.ID),
		workflow.ExecuteActivity(workflow.WithActivityOptions(both, longActivity(AgentQueue(in.Site, in.To), "Compare the leaves of "+in.Table+" on "+in.To)), agent.Compare, in.ID),
	}
	left, failed := len(parts), error(nil)
	selector := workflow.NewSelector(ctx)
	for _, part := range parts {
		selector.AddFuture(part, func(f workflow.Future) {
			left--
			if err := f.Get(both, nil); err != nil && failed == nil {
				failed = err
				cancel() // the other part would wait for this one for ever
			}
		})
	}
	for left > 0 {
		selector.Select(ctx)
	}
	switch {
	case ctx.Err() != nil || temporal.IsCanceledError(failed):
		disconnected, _ := workflow.NewDisconnectedContext(ctx)
		return endRun(disconnected, activities.RunEnding{ID: in.ID, By: "temporal", To: backfill.RunCancelled, Reason: "cancelled in the Temporal console"})
	case failed != nil:
		reason := failed.Error()
		var app *temporal.ApplicationError
		if errors.As(failed, &app) {
			reason = app.Message()
		}
		return endRun(ctx, activities.RunEnding{ID: in.ID, By: "backfill", To: backfill.RunFailed, Reason: reason})
	}
	var now activities.RunSnapshot
	err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, verdictActivity("Draw the verdict")), controller.Conclude, in.ID).Get(ctx, &now)
	if err != nil {
		return now, err
	}
	return concluded(ctx, now)
}

func endRun(ctx workflow.Context, e activities.RunEnding) (activities.RunSnapshot, error) {
	var now activities.RunSnapshot
	if err := workflow.ExecuteActivity(workflow.WithActivityOptions(ctx, verdictActivity("End the reconciliation")), controller.EndRun, e).Get(ctx, &now); err != nil {
		return now, err
	}
	return concluded(ctx, now)
}

// verdictActivity reads all leaves and keys of a run, which may take a while.
func verdictActivity(summary string) workflow.ActivityOptions {
	return longActivity(ControlQueue, summary)
}

func concluded(ctx workflow.Context, now activities.RunSnapshot) (activities.RunSnapshot, error) {
	c := now.Counts
	workflow.SetCurrentDetails(ctx, fmt.Sprintf("**%s %s** — %d leaves: %d equal, %d different, %d unknown. Keys: %d missing, %d different, %d surplus.\n\n%s",
		now.State, now.Verdict, now.Leaves, c.Equal, c.Different, c.Unknown, c.Missing, c.DifferentValues, c.Surplus, now.Reason))
	return now, workflow.UpsertTypedSearchAttributes(ctx, StateAttribute.ValueSet(string(now.State)), RowsAttribute.ValueSet(c.Rows))
}

// StartReconcile starts the workflow of a recorded run. A second open one of the
// same table and direction is refused by its id.
func StartReconcile(ctx context.Context, c client.Client, r *backfill.Reconciliation) error {
	_, err := c.ExecuteWorkflow(ctx, client.StartWorkflowOptions{
		ID: r.WorkflowID(), TaskQueue: ControlQueue,
		WorkflowExecutionErrorWhenAlreadyStarted: true,
		WorkflowIDReusePolicy:                    enumspb.WORKFLOW_ID_REUSE_POLICY_ALLOW_DUPLICATE,
		TypedSearchAttributes: temporal.NewSearchAttributes(
			SiteAttribute.ValueSet(r.Site), TableAttribute.ValueSet(r.Table), FromAttribute.ValueSet(r.From), StateAttribute.ValueSet(string(r.State))),
		StaticSummary: fmt.Sprintf("Reconcile %s of %s, %s → %s", r.Table, r.Site, r.From, r.To),
		StaticDetails: fmt.Sprintf("Reconciliation %d (%s), asked for by %s.", r.ID, r.Mode, r.RequestedBy),
	}, "Reconcile", ReconcileInput{ID: r.ID, Site: r.Site, Table: r.Table, From: r.From, To: r.To})
	return err
}
