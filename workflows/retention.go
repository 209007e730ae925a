package workflows

import (
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"backfill/internal/control"
)

// Retention removes what is past its window, once. A schedule starts it.
func Retention(ctx workflow.Context) (control.Removed, error) {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{TaskQueue: ControlQueue, Summary: "Remove what is past its window",
		StartToCloseTimeout: 6 * time.Hour, HeartbeatTimeout: 10 * time.Second,
		RetryPolicy: &temporal.RetryPolicy{InitialInterval: 10 * time.Second, MaximumInterval: 5 * time.Minute, MaximumAttempts: 20}})
	var removed control.Removed
	err := workflow.ExecuteActivity(ctx, controller.Retain).Get(ctx, &removed)
	return removed, err
}
