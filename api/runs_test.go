package api

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
	"backfill/workflows"
)

func TestUpdateErrors(t *testing.T) {
	app := func(typ string) error {
		return fmt.Errorf("update: %w", temporal.NewNonRetryableApplicationError("request 1 is FINISHED", typ, errors.New("secret cause")))
	}
	tests := []struct {
		err     error
		code    backfill.Code
		message string
		noRun   bool
	}{
		{nil, "", "", false},
		{app(workflows.ErrConflict), backfill.Conflict, "request 1 is FINISHED", false},
		{app(workflows.ErrInvalid), backfill.Invalid, "request 1 is FINISHED", false},
		{app(workflows.ErrNotFound), backfill.NotFound, "request 1 is FINISHED", false},
		{app(workflows.ErrRefused), backfill.Refused, "request 1 is FINISHED", false},
		{app("panic"), "", "", false},
		{app(endedMeanwhile), backfill.Unavailable, "read the request again", false},
		{serviceerror.NewNotFound("workflow not found"), backfill.Unavailable, "nothing was decided", true},
		{context.DeadlineExceeded, backfill.Unavailable, "read the request again", false},
		{serviceerror.NewUnavailable("connection lost"), backfill.Unavailable, "read the request again", false},
	}
	for _, x := range tests {
		err := updateError(x.err)
		require.Equal(t, x.code, backfill.CodeOf(err), "%v", x.err)
		require.Equal(t, x.noRun, errors.Is(err, errNoRun))
		if x.code != "" {
			p := ProblemOf(err)
			require.Contains(t, p.Detail, x.message)
			require.NotContains(t, p.Detail, "secret cause")
		}
	}
	require.Equal(t, 500, ProblemOf(updateError(app("panic"))).Status)
}

func TestRunsAway(t *testing.T) {
	c, err := client.NewLazyClient(client.Options{HostPort: "127.0.0.1:1"})
	require.NoError(t, err)
	defer c.Close()
	runs := NewRuns(c)
	r := &backfill.Request{ID: 1, Table: "public.orders", Direction: backfill.Direction{Site: "maple", From: "school", To: "central"}}
	err = runs.Approve(t.Context(), r, "ana", Decision{Revision: 1})
	require.Equal(t, backfill.Unavailable, backfill.CodeOf(err))
	require.ErrorContains(t, err, "nothing was decided")
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	require.Error(t, runs.Start(ctx, r, ""))
}
