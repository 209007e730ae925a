package workflows

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	commonpb "go.temporal.io/api/common/v1"
	enumspb "go.temporal.io/api/enums/v1"
	historypb "go.temporal.io/api/history/v1"
	workflowpb "go.temporal.io/api/workflow/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	"google.golang.org/protobuf/encoding/protojson"
)

var record = flag.String("record", "", "HOST:PORT of a Temporal whose histories are to be kept in testdata")

// all are the workflows by the names they are registered under.
var all = map[string]any{"Backfill": Backfill, "Reconcile": Reconcile, "Sync": Sync, "ShadowRead": ShadowRead, "Sweep": Sweep, "Retention": Retention}

func replay(t *testing.T, file string, workflows map[string]any) error {
	t.Helper()
	r := worker.NewWorkflowReplayer()
	for name, w := range workflows {
		r.RegisterWorkflowWithOptions(w, workflow.RegisterOptions{Name: name})
	}
	return r.ReplayWorkflowHistoryFromJSONFile(nil, file)
}

// TestDeployedHistoriesReplay holds changed workflows to the histories of those that
// may be running when they are deployed: a worker that cannot replay such a history
// leaves its workflow standing still.
func TestDeployedHistoriesReplay(t *testing.T) {
	files, err := filepath.Glob("testdata/*.json")
	require.NoError(t, err)
	have := map[string]bool{}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		t.Run(name, func(t *testing.T) { require.NoError(t, replay(t, file, all)) })
		kind, _, _ := strings.Cut(name, "-")
		have[kind] = true
	}
	for name := range all {
		require.True(t, have[name], "there is a history of %s", name)
	}
}

// A workflow that does something else than the recorded one is noticed.
func TestOtherWorkflowsDoNotReplay(t *testing.T) {
	for name, w := range map[string]any{
		"another activity": func(ctx workflow.Context, in SyncInput) error {
			return duties(ctx, ShadowRead, in, duty{AgentQueue(in.Site, in.Side), "", agent.Count})
		},
		"one activity more": func(ctx workflow.Context, in SyncInput) error {
			return duties(ctx, ShadowRead, in, duty{AgentQueue(in.Site, in.Side), "", agent.Shadow}, duty{AgentQueue(in.Site, in.Side), "", agent.Count})
		},
		"a rest between turns": func(ctx workflow.Context, in SyncInput) error {
			if err := workflow.Sleep(ctx, 1); err != nil {
				return err
			}
			return ShadowRead(ctx, in)
		},
	} {
		t.Run(name, func(t *testing.T) {
			require.Error(t, replay(t, "testdata/ShadowRead-Running.json", map[string]any{"ShadowRead": w}))
		})
	}
}

// TestRecord keeps the newest history of each workflow and state that a Temporal has,
// under a name of both. Run it before a release:
//
//	go test ./workflows -run TestRecord -record 127.0.0.1:7233
func TestRecord(t *testing.T) {
	if *record == "" {
		t.Skip("no -record")
	}
	c, err := client.Dial(client.Options{HostPort: *record})
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.ScheduleClient().GetHandle(t.Context(), RetentionID).Trigger(t.Context(), client.ScheduleTriggerOptions{}))
	var found *workflowservice.ListWorkflowExecutionsResponse
	require.Eventually(t, func() bool {
		found, err = c.ListWorkflow(t.Context(), &workflowservice.ListWorkflowExecutionsRequest{PageSize: 1000})
		return err == nil && slices.ContainsFunc(found.Executions, func(x *workflowpb.WorkflowExecutionInfo) bool {
			return x.Type.Name == "Retention" && x.Status == enumspb.WORKFLOW_EXECUTION_STATUS_COMPLETED
		})
	}, time.Minute, 100*time.Millisecond, "the hourly workflow has run")
	kept := map[string]bool{}
	for _, x := range found.Executions { // newest first
		name := x.Type.Name + "-" + x.Status.String()
		var state string
		if p := x.SearchAttributes.GetIndexedFields()[StateAttribute.GetName()]; p != nil {
			require.NoError(t, converter.GetDefaultDataConverter().FromPayload(p, &state))
			name = x.Type.Name + "-" + state
		}
		if kept[name] || all[x.Type.Name] == nil {
			continue
		}
		kept[name] = true
		require.NoError(t, os.WriteFile(filepath.Join("testdata", name+".json"), historyOf(t, c, x.Execution), 0o644))
		fmt.Println(name)
	}
}

// hosts are the parts of a history that name machines and processes.
var hosts = regexp.MustCompile(`("identity": *|"name": *)"(\d+@[^"]*|[^"]*:[0-9a-f]{8}-[0-9a-f-]{27})"`)

func historyOf(t *testing.T, c client.Client, x *commonpb.WorkflowExecution) []byte {
	t.Helper()
	var h historypb.History
	for events := c.GetWorkflowHistory(t.Context(), x.WorkflowId, x.RunId, false, 0); events.HasNext(); {
		e, err := events.Next()
		require.NoError(t, err)
		h.Events = append(h.Events, e)
	}
	text, err := protojson.MarshalOptions{Indent: " "}.Marshal(&h)
	require.NoError(t, err)
	return hosts.ReplaceAll(text, []byte(`$1"worker"`))
}
