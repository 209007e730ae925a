package activities

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/testkit"
)

// The sweep starts the syncs that do not run, and asks nothing about those that do; when
// it cannot be told what runs, all of them.
func TestTheSweepStartsTheSyncsThatDoNotRun(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, orders, "public.orders")
	running, unlisted := []string{}, error(nil)
	var started []string
	c := &Control{Store: p.Store, Log: zap.NewNop(),
		Running:        func(context.Context) ([]string, error) { return running, unlisted },
		SyncIDs:        func(site, side string) []string { return []string{"sync/" + side, "shadow/" + side} },
		StartSync:      func(_ context.Context, _, side string) error { started = append(started, side); return nil },
		StartBackfill:  func(context.Context, *backfill.Request) error { return nil },
		StartReconcile: func(context.Context, *backfill.Reconciliation) error { return nil },
		Refresh:        func(_ context.Context, id string) error { return errors.New("told to look: " + id) }}
	sweep := func() []string {
		started = nil
		require.NoError(t, c.sweep(t.Context()))
		return started
	}
	require.ElementsMatch(t, []string{"school", "central"}, sweep())
	running = []string{"sync/school", "shadow/school", "sync/central"}
	require.Equal(t, []string{"central"}, sweep())
	running = append(running, "shadow/central")
	require.Empty(t, sweep())
	running, unlisted = nil, errors.New("visibility is away")
	started = nil
	require.ErrorIs(t, c.sweep(t.Context()), unlisted)
	require.Len(t, started, 2)
}
