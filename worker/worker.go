// Package worker says which workflows and activities a role serves, and on which
// task queue.
package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	"go.uber.org/zap"

	"backfill/activities"
	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/workflows"
)

// stopTimeout is how long a stopping worker waits for its activities, which end
// at a page or batch boundary.
const stopTimeout = 10 * time.Second

// Config is what every role needs.
type Config struct {
	Temporal  client.Client
	Namespace string       // default "default"
	Name      string       // of this process, for people
	Keep      control.Keep // how long a control worker keeps what nothing needs any more
	Store     *control.Store
	PublicURL string // of the web UI, for links in the console; may be empty
	Log       *zap.Logger

	// Deployment and Build, if given, make a control worker a version of a worker
	// deployment: backfills and reconciliations end on the version they began on.
	Deployment, Build string
}

// Control serves all workflows and the activities on the control database until
// ctx ends.
func Control(ctx context.Context, cfg Config) error {
	options := worker.Options{WorkerStopTimeout: stopTimeout, MaxConcurrentActivityExecutionSize: 200}
	if cfg.Deployment != "" {
		options.DeploymentOptions = worker.DeploymentOptions{UseVersioning: true, Version: worker.WorkerDeploymentVersion{DeploymentName: cfg.Deployment, BuildID: cfg.Build}}
	}
	w := worker.New(cfg.Temporal, workflows.ControlQueue, options)
	for _, x := range []struct {
		workflow any
		name     string
		behavior workflow.VersioningBehavior // where this worker is a version of a deployment
	}{
		{workflows.Backfill, "Backfill", workflow.VersioningBehaviorPinned},
		{workflows.Reconcile, "Reconcile", workflow.VersioningBehaviorPinned},
		// These go on for ever, and so from version to version.
		{workflows.Sync, "Sync", workflow.VersioningBehaviorAutoUpgrade},
		{workflows.ShadowRead, "ShadowRead", workflow.VersioningBehaviorAutoUpgrade},
		{workflows.Sweep, "Sweep", workflow.VersioningBehaviorAutoUpgrade},
		{workflows.Retention, "Retention", workflow.VersioningBehaviorAutoUpgrade},
	} {
		w.RegisterWorkflowWithOptions(x.workflow, workflow.RegisterOptions{Name: x.name, VersioningBehavior: x.behavior})
	}
	w.RegisterActivity(&activities.Control{Store: cfg.Store, Log: cfg.Log, SweepEvery: 5 * time.Second, ReleaseRows: 20_000, Lead: 40_000, Keep: cfg.Keep,
		StartBackfill: cfg.startBackfill, StartSync: cfg.startSync, SyncIDs: syncIDs, Running: cfg.running, Refresh: cfg.refresh, StartReconcile: cfg.startReconcile})
	if err := w.Start(); err != nil {
		return fmt.Errorf("control worker: %w", err)
	}
	defer w.Stop()
	go cfg.register(ctx)
	go cfg.startSweep(ctx)
	go cfg.attend(ctx)
	go cfg.scheduleRetention(ctx)
	<-ctx.Done()
	return nil
}

// attendEvery is how often a control worker says that it lives.
const attendEvery = 5 * time.Second

// attend tells the control database that a control worker lives, until ctx ends.
func (cfg Config) attend(ctx context.Context) {
	for ctx.Err() == nil {
		if err := cfg.Store.Attend(ctx, cfg.Name); err != nil && ctx.Err() == nil {
			cfg.Log.Warn("the control database could not be told that this worker lives", zap.Error(err))
		}
		select {
		case <-ctx.Done():
		case <-time.After(attendEvery):
		}
	}
}

// Agent serves the activities beside one side's database until ctx ends.
func Agent(ctx context.Context, cfg Config, agent *activities.Agent) error {
	queue := workflows.AgentQueue(agent.Out.Site, agent.Out.From)
	w := worker.New(cfg.Temporal, queue, worker.Options{WorkerStopTimeout: stopTimeout, DisableWorkflowWorker: true, MaxConcurrentActivityExecutionSize: 50})
	w.RegisterActivity(agent.Push)
	w.RegisterActivity(agent.Apply)
	w.RegisterActivity(agent.Count)
	w.RegisterActivity(agent.Walk)
	w.RegisterActivity(agent.Classify)
	w.RegisterActivity(agent.Hash)
	w.RegisterActivity(agent.Compare)
	w.RegisterActivity(agent.Shadow)
	go agent.Attend(ctx)
	if err := w.Start(); err != nil {
		return fmt.Errorf("agent of %s: %w", queue, err)
	}
	defer w.Stop()
	<-ctx.Done()
	return nil
}

func (cfg Config) startBackfill(ctx context.Context, r *backfill.Request) error {
	url := ""
	if cfg.PublicURL != "" {
		url = fmt.Sprintf("%s/backfills/%d", cfg.PublicURL, r.ID)
	}
	return unlessRunning(workflows.Start(ctx, cfg.Temporal, r, url))
}

func (cfg Config) startReconcile(ctx context.Context, r *backfill.Reconciliation) error {
	return unlessRunning(workflows.StartReconcile(ctx, cfg.Temporal, r))
}

func syncIDs(site, side string) []string {
	return []string{workflows.SyncID(site, side), workflows.ShadowReadID(site, side)}
}

// startSync starts the workflows that keep a side's agent busy.
func (cfg Config) startSync(ctx context.Context, site, side string) error {
	for _, w := range []struct{ id, kind, summary string }{
		{workflows.SyncID(site, side), "Sync", "Sync of side %s of %s: push, apply, count"},
		{workflows.ShadowReadID(site, side), "ShadowRead", "Shadow reads of side %s of %s: sample, judge"},
	} {
		_, err := cfg.Temporal.ExecuteWorkflow(ctx, client.StartWorkflowOptions{ID: w.id, TaskQueue: workflows.ControlQueue,
			WorkflowExecutionErrorWhenAlreadyStarted: true, StaticSummary: fmt.Sprintf(w.summary, side, site)}, w.kind, workflows.SyncInput{Site: site, Side: side})
		if err := unlessRunning(err); err != nil {
			return err
		}
	}
	return nil
}

// startSweep starts the sweep, which starts everything else, once the workflow
// engine can be reached.
func (cfg Config) startSweep(ctx context.Context) {
	for ctx.Err() == nil {
		_, err := cfg.Temporal.ExecuteWorkflow(ctx, client.StartWorkflowOptions{ID: workflows.SweepID, TaskQueue: workflows.ControlQueue,
			WorkflowExecutionErrorWhenAlreadyStarted: true, StaticSummary: "Compare requests with workflows"}, "Sweep")
		if unlessRunning(err) == nil {
			return
		}
		cfg.Log.Warn("the sweep could not be started, trying again", zap.Error(err))
		select {
		case <-ctx.Done():
		case <-time.After(2 * time.Second):
		}
	}
}

// scheduleRetention makes the schedule that starts retention every hour, once the
// workflow engine can be reached. One that is there stays as it is: operators may have
// paused it, or changed its times.
func (cfg Config) scheduleRetention(ctx context.Context) {
	for ctx.Err() == nil {
		_, err := cfg.Temporal.ScheduleClient().Create(ctx, client.ScheduleOptions{
			ID:      workflows.RetentionID,
			Spec:    client.ScheduleSpec{Intervals: []client.ScheduleIntervalSpec{{Every: time.Hour}}, Jitter: 5 * time.Minute},
			Action:  &client.ScheduleWorkflowAction{ID: workflows.RetentionID, Workflow: "Retention", TaskQueue: workflows.ControlQueue, StaticSummary: "Remove what is past its window"},
			Overlap: enumspb.SCHEDULE_OVERLAP_POLICY_SKIP,
			Note:    "Removes closed backfills and history past their windows.",
		})
		if err == nil || errors.Is(err, temporal.ErrScheduleAlreadyRunning) {
			return
		}
		cfg.Log.Warn("the schedule of retention could not be made, trying again", zap.Error(err))
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Second):
		}
	}
}

func unlessRunning(err error) error {
	var started *serviceerror.WorkflowExecutionAlreadyStarted
	if errors.As(err, &started) {
		return nil
	}
	return err
}

func (cfg Config) running(ctx context.Context) (ids []string, err error) {
	req := &workflowservice.ListWorkflowExecutionsRequest{Namespace: cfg.Namespace, PageSize: 1000,
		Query: `WorkflowType IN ("Backfill", "Sync", "ShadowRead") AND ExecutionStatus = "Running"`}
	for {
		page, err := cfg.Temporal.ListWorkflow(ctx, req)
		if err != nil {
			return nil, err
		}
		for _, e := range page.Executions {
			if e.Status == enumspb.WORKFLOW_EXECUTION_STATUS_RUNNING {
				ids = append(ids, e.Execution.WorkflowId)
			}
		}
		if req.NextPageToken = page.NextPageToken; len(req.NextPageToken) == 0 {
			return ids, nil
		}
	}
}

func (cfg Config) refresh(ctx context.Context, workflowID string) error {
	err := cfg.Temporal.SignalWorkflow(ctx, workflowID, "", workflows.Refresh, struct{}{})
	var gone *serviceerror.NotFound
	if errors.As(err, &gone) {
		return nil
	}
	return err
}
