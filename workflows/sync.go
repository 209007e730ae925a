package workflows

import (
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"
)

// SyncInput names the side whose agent a Sync or ShadowRead workflow keeps busy.
type SyncInput struct {
	Site string `json:"site"`
	Side string `json:"side"`
}

// Sync keeps one side's agent pushing, applying and counting, for ever. Each duty
// is one long activity after the other that cycles inside, so that an idle sync
// costs hardly any history.
func Sync(ctx workflow.Context, in SyncInput) error {
	queue := AgentQueue(in.Site, in.Side)
	return duties(ctx, Sync, in,
		duty{queue, "Push changes captured on " + in.Side, agent.Push},
		duty{queue, "Apply changes on " + in.Side, agent.Apply},
		duty{queue, "Count rows and check capture on " + in.Side, agent.Count})
}

// ShadowRead keeps one side's agent sampling and judging shadow reads, for ever.
func ShadowRead(ctx workflow.Context, in SyncInput) error {
	return duties(ctx, ShadowRead, in, duty{AgentQueue(in.Site, in.Side), "Sample and judge shadow reads on " + in.Side, agent.Shadow})
}

// Sweep brings requests and workflows together, for ever.
func Sweep(ctx workflow.Context) error {
	return duties(ctx, Sweep, nil, duty{ControlQueue, "Compare requests with workflows", controller.Sweep})
}

type duty struct {
	queue, summary string
	activity       any
}

// duties runs each duty again and again beside the others, and goes on in a new
// run when history has grown.
func duties(ctx workflow.Context, self any, in any, all ...duty) error {
	var stopped error
	running := len(all)
	for _, d := range all {
		workflow.Go(ctx, func(ctx workflow.Context) {
			defer func() { running-- }()
			ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{TaskQueue: d.queue, Summary: d.summary,
				StartToCloseTimeout: 2 * time.Hour, HeartbeatTimeout: 10 * time.Second,
				RetryPolicy: &temporal.RetryPolicy{InitialInterval: time.Second, MaximumInterval: 10 * time.Second}})
			for !workflow.GetInfo(ctx).GetContinueAsNewSuggested() {
				err := workflow.ExecuteActivity(ctx, d.activity).Get(ctx, nil)
				if temporal.IsCanceledError(err) {
					stopped = err
					return
				}
				if err != nil && workflow.Sleep(ctx, 10*time.Second) != nil {
					return
				}
			}
		})
	}
	if err := workflow.Await(ctx, func() bool { return running == 0 }); err != nil {
		return err // cancelled, which the history is to say
	}
	if stopped != nil {
		return stopped
	}
	if in == nil {
		return workflow.NewContinueAsNewError(ctx, self)
	}
	return workflow.NewContinueAsNewError(ctx, self, in)
}
