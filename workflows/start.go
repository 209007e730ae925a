package workflows

import (
	"context"
	"fmt"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
)

// Start starts the workflow of a recorded request. A second open one of the same
// table and direction is refused by its id: the error is then a
// serviceerror.WorkflowExecutionAlreadyStarted.
func Start(ctx context.Context, c client.Client, r *backfill.Request, reviewURL string) error {
	what := "all rows of " + r.Table
	if r.Key != nil {
		what = "one row of " + r.Table
	}
	_, err := c.ExecuteWorkflow(ctx, client.StartWorkflowOptions{
		ID:                                       r.WorkflowID(),
		TaskQueue:                                ControlQueue,
		WorkflowExecutionErrorWhenAlreadyStarted: true,
		WorkflowIDReusePolicy:                    enumspb.WORKFLOW_ID_REUSE_POLICY_ALLOW_DUPLICATE,
		TypedSearchAttributes: temporal.NewSearchAttributes(
			SiteAttribute.ValueSet(r.Site), TableAttribute.ValueSet(r.Table), FromAttribute.ValueSet(r.From),
			StateAttribute.ValueSet(string(r.State)), RowsAttribute.ValueSet(r.Staged)),
		StaticSummary: fmt.Sprintf("Backfill %s of %s, %s → %s", what, r.Site, r.From, r.To),
		StaticDetails: fmt.Sprintf("Request %d, asked for by %s. Nothing reaches %s before somebody approves the staged rows.", r.ID, r.RequestedBy, r.To),
	}, "Backfill", BackfillInput{RequestID: r.ID, Site: r.Site, Table: r.Table, From: r.From, To: r.To, Row: r.Key != nil, ReviewURL: reviewURL})
	return err
}
