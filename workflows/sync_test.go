package workflows

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/workflow"

	"backfill/activities"
)

// dutyRun runs a workflow of duties whose activities return what turn says of the
// nth, and tells when, by the workflow's clock, each was started.
type dutyRun struct {
	env     *testsuite.TestWorkflowEnvironment
	mu      sync.Mutex
	started map[string][]time.Time
	infos   map[string]activity.Info
	// suggest says, by how many turns of each duty have ended, whether the workflow is to
	// continue as new; nil for never.
	suggest func(turns map[string]int) bool
}

func newDutyRun(t *testing.T, turn func(name string, n int) error) *dutyRun {
	t.Helper()
	var suite testsuite.WorkflowTestSuite
	d := &dutyRun{env: suite.NewTestWorkflowEnvironment(), started: map[string][]time.Time{}, infos: map[string]activity.Info{}}
	d.env.SetTestTimeout(20 * time.Second)
	a, c := &activities.Agent{}, &activities.Control{}
	duties := map[string]any{"Push": a.Push, "Apply": a.Apply, "Count": a.Count, "Shadow": a.Shadow, "Sweep": c.Sweep}
	for name, duty := range duties {
		d.env.RegisterActivityWithOptions(duty, activity.RegisterOptions{Name: name})
	}
	for name := range duties {
		d.env.OnActivity(name, mock.Anything).Return(func(context.Context) error {
			d.mu.Lock()
			n := len(d.started[name])
			d.mu.Unlock()
			return turn(name, n)
		})
	}
	d.env.SetOnActivityStartedListener(func(info *activity.Info, _ context.Context, _ converter.EncodedValues) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.started[info.ActivityType.Name] = append(d.started[info.ActivityType.Name], d.env.Now())
		d.infos[info.ActivityType.Name] = *info
	})
	// In the environment's own thread: the workflow reads it there.
	ended := map[string]int{}
	d.env.SetOnActivityCompletedListener(func(info *activity.Info, _ converter.EncodedValue, _ error) {
		ended[info.ActivityType.Name]++
		if d.suggest != nil && d.suggest(ended) {
			d.env.SetContinueAsNewSuggested(true)
		}
	})
	return d
}

// A workflow of duties has one turn after the other, rests after one that failed for
// good, and goes on in a new run once history has grown.
func TestDutiesGoOnForEver(t *testing.T) {
	in := SyncInput{Site: "maple", Side: "school"}
	for name, c := range map[string]struct {
		workflow any
		args     []any
		queue    string
		duties   []string
	}{
		"ShadowRead": {ShadowRead, []any{in}, AgentQueue("maple", "school"), []string{"Shadow"}},
		"Sync":       {Sync, []any{in}, AgentQueue("maple", "school"), []string{"Apply", "Count", "Push"}},
		"Sweep":      {Sweep, nil, ControlQueue, []string{"Sweep"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDutyRun(t, func(_ string, n int) error {
				if n == 2 {
					return temporal.NewNonRetryableApplicationError("the table is gone", "permanent", nil)
				}
				return nil
			})
			d.suggest = func(turns map[string]int) bool {
				third := 0
				for _, n := range turns {
					if n >= 3 {
						third++
					}
				}
				return third == len(c.duties)
			}
			d.env.ExecuteWorkflow(c.workflow, c.args...)
			var again *workflow.ContinueAsNewError
			require.ErrorAs(t, d.env.GetWorkflowError(), &again)
			require.Equal(t, name, again.WorkflowType.Name)
			if c.args != nil {
				var got SyncInput
				require.NoError(t, converter.GetDefaultDataConverter().FromPayloads(again.Input, &got))
				require.Equal(t, in, got, "the new run is of the same side")
			}
			var names []string
			for name, at := range d.started {
				names = append(names, name)
				require.GreaterOrEqual(t, len(at), 3, name)
				require.Less(t, at[1].Sub(at[0]), time.Second, "%s: the next turn follows at once", name)
				require.GreaterOrEqual(t, at[2].Sub(at[1]), 10*time.Second, "%s: what failed for good is not tried again at once", name)
				require.Equal(t, c.queue, d.infos[name].TaskQueue, name)
				require.Equal(t, 10*time.Second, d.infos[name].HeartbeatTimeout, "%s: a dead agent is noticed", name)
			}
			require.Equal(t, c.duties, slices.Sorted(slices.Values(names)))
		})
	}
}

// An attempt that failed is made again by Temporal, without the workflow being told.
func TestDutiesAreTriedAgain(t *testing.T) {
	d := newDutyRun(t, func(_ string, n int) error {
		if n < 4 {
			return errors.New("connection refused")
		}
		return nil
	})
	d.suggest = func(map[string]int) bool { return true }
	d.env.ExecuteWorkflow(ShadowRead, SyncInput{Site: "maple", Side: "school"})
	require.True(t, workflow.IsContinueAsNewError(d.env.GetWorkflowError()))
	require.Len(t, d.started["Shadow"], 4)
}

func TestDutiesEndWhenCancelled(t *testing.T) {
	for name, w := range map[string]any{"while an activity runs": ShadowRead, "several": Sync} {
		t.Run(name, func(t *testing.T) {
			d := newDutyRun(t, func(string, int) error { return activity.ErrResultPending }) // none ever ends
			d.env.RegisterDelayedCallback(d.env.CancelWorkflow, time.Minute)
			d.env.ExecuteWorkflow(w, SyncInput{Site: "maple", Side: "school"})
			require.True(t, temporal.IsCanceledError(d.env.GetWorkflowError()), "%v", d.env.GetWorkflowError())
		})
	}
	t.Run("while it rests", func(t *testing.T) {
		d := newDutyRun(t, func(string, int) error { return temporal.NewNonRetryableApplicationError("no", "permanent", nil) })
		d.env.RegisterDelayedCallback(d.env.CancelWorkflow, 5*time.Second)
		d.env.ExecuteWorkflow(ShadowRead, SyncInput{Site: "maple", Side: "school"})
		require.True(t, temporal.IsCanceledError(d.env.GetWorkflowError()), "%v", d.env.GetWorkflowError())
		require.Len(t, d.started["Shadow"], 1)
	})
}
