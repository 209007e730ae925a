package workflows

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"

	"backfill/activities"
	"backfill/internal/backfill"
)

func TestReconcileWorkflow(t *testing.T) {
	in := ReconcileInput{ID: 4, Site: "maple", Table: "public.orders", From: "school", To: "central"}
	for name, c := range map[string]struct {
		hash, compare error
		cancel        bool
		want          backfill.RunState
		reason        string
	}{
		"both parts are done":        {nil, nil, false, backfill.RunFinished, ""},
		"the source cannot go on":    {temporal.NewNonRetryableApplicationError("the table is gone", "permanent", nil), nil, false, backfill.RunFailed, "the table is gone"},
		"the receiver cannot go on":  {nil, temporal.NewNonRetryableApplicationError("no such column", "permanent", nil), false, backfill.RunFailed, "no such column"},
		"cancelled from the console": {nil, nil, true, backfill.RunCancelled, "cancelled in the Temporal console"},
	} {
		t.Run(name, func(t *testing.T) {
			var suite testsuite.WorkflowTestSuite
			env := suite.NewTestWorkflowEnvironment()
			env.SetTestTimeout(20 * time.Second)
			a, ctl := &activities.Agent{}, &activities.Control{}
			for name, act := range map[string]any{"Hash": a.Hash, "Compare": a.Compare, "Conclude": ctl.Conclude, "EndRun": ctl.EndRun} {
				env.RegisterActivityWithOptions(act, activity.RegisterOptions{Name: name})
			}
			part := func(err error) func(context.Context, int64) error {
				return func(ctx context.Context, id int64) error {
					require.EqualValues(t, 4, id)
					if err == nil && (c.hash != nil || c.compare != nil || c.cancel) {
						<-ctx.Done() // the other part fails, and this one would wait for it
						return ctx.Err()
					}
					return err
				}
			}
			env.SetOnActivityStartedListener(func(info *activity.Info, _ context.Context, _ converter.EncodedValues) {
				require.Equal(t, 10*time.Second, info.HeartbeatTimeout, "%s: a worker that dies is noticed", info.ActivityType.Name)
			})
			env.OnActivity("Hash", mock.Anything, int64(4)).Return(part(c.hash))
			env.OnActivity("Compare", mock.Anything, int64(4)).Return(part(c.compare))
			var ended []activities.RunEnding
			env.OnActivity("EndRun", mock.Anything, mock.Anything).Return(func(_ context.Context, e activities.RunEnding) (activities.RunSnapshot, error) {
				ended = append(ended, e)
				return activities.RunSnapshot{State: e.To, Verdict: "UNKNOWN", Reason: e.Reason}, nil
			}).Maybe()
			env.OnActivity("Conclude", mock.Anything, int64(4)).Return(activities.RunSnapshot{State: backfill.RunFinished, Verdict: "EQUAL"}, nil).Maybe()
			if c.cancel {
				env.RegisterDelayedCallback(env.CancelWorkflow, time.Second)
			}
			env.ExecuteWorkflow(Reconcile, in)
			require.NoError(t, env.GetWorkflowError())
			var got activities.RunSnapshot
			require.NoError(t, env.GetWorkflowResult(&got))
			require.Equal(t, c.want, got.State)
			require.Equal(t, c.reason, got.Reason)
			require.Equal(t, c.want == backfill.RunFinished, len(ended) == 0)
		})
	}
}
