//go:build linux

package acceptance

import (
	"net/http"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/local"
)

// A Temporal that is away: requests wait for it, decisions are refused and change
// nothing, and everything goes on by itself when it is back.
func TestTemporalMayBeAway(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "temporal")
	server := startTemporal(t, dir)
	with := setup{tables: []string{"public.early", "public.midway", "public.reviewed"}}
	for _, name := range []string{"early", "reviewed"} {
		with.a += accounts(name, 20)
		with.b += accounts(name, 10)
	}
	with.a += accounts("midway", 30_000)
	with.b += accounts("midway", 10)
	with.args = []string{"--temporal", server.HostPort}
	s := newSite(t, with)
	reviewed := s.awaitReview(s.request("public.reviewed").ID)
	s.awaitCount("public.early", 20, 10)

	require.NoError(t, server.Stop(t.Context()))
	early := s.request("public.early")
	require.Equal(t, "PENDING", early.State)
	a := s.post(http.StatusServiceUnavailable, path(reviewed.ID)+"/approve", decision{Revision: reviewed.Revision})
	require.Equal(t, "urn:backfill:problem:unavailable", a.Problem.Type)
	require.Contains(t, a.Problem.Detail, "Temporal is away")
	require.Equal(t, reviewed.String(), s.show(reviewed.ID).String())
	require.Equal(t, "PENDING", s.show(early.ID).State)
	// Changes are sent all the same.
	s.run(s.a, `UPDATE early SET owner = 'changed while Temporal was away' WHERE id = 15`)
	s.drain()
	require.EqualValues(t, 1, s.number(s.b, `SELECT count(*) FROM early WHERE id = 15`))

	server = startTemporal(t, dir)
	s.approve(reviewed)
	s.awaitFinished(reviewed.ID)
	early = s.awaitReview(early.ID)
	s.approve(early)
	s.awaitFinished(early.ID)
	s.drain()
	s.requireEqual("public.early", "public.reviewed")

	// In the middle of a walk, and this time it crashes.
	midway := s.request("public.midway")
	s.await("the walk to begin", func() (bool, string) {
		midway = s.show(midway.ID)
		return midway.Staged > 0, midway.String()
	})
	t.Logf("Temporal ends after %d rows, when %s", midway.Staged, midway.State)
	require.NoError(t, server.Kill())
	server = startTemporal(t, dir)
	midway = s.awaitReview(midway.ID)
	require.EqualValues(t, 30_000, midway.Staged)
	s.requireStagedOnce(midway)

	// And in the middle of a release.
	s.approve(midway)
	require.NoError(t, server.Kill())
	startTemporal(t, dir)
	midway = s.awaitFinished(midway.ID)
	s.drain()
	s.requireReleasedOnce(midway)
	s.requireEqual("public.midway")
}

func startTemporal(t *testing.T, dir string) *local.Temporal {
	t.Helper()
	server, err := local.StartTemporal(t.Context(), local.TemporalOptions{Dir: dir})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Kill() })
	return server
}
