//go:build linux

package acceptance

import (
	"net/http"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// A pause holds a walk and a release at once, outlives a restart, and a cancel ends a
// release where it is; a fixed limit of rows a second gives the time to do it in.
func TestPauseOutlivesARestartAndCancelEndsARelease(t *testing.T) {
	t.Parallel()
	s := newSite(t, setup{
		tables: []string{"public.accounts"},
		a:      accounts("accounts", 9000),
		b:      accounts("accounts", 10),
	})
	put := func(path string, body any) {
		t.Helper()
		a, err := s.call(http.MethodPut, path, body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, a.Status, "%s", a.Body)
	}
	slow := map[string]any{"side": "a", "kind": "rows_per_second", "limit": 600}
	put("/sites/s/gates/slow", slow)
	moves := func(id int64, what string, n func(*request) int64) {
		t.Helper()
		from := n(s.show(id))
		s.await(what, func() (bool, string) {
			r := s.show(id)
			return n(r) > from, r.String()
		})
	}
	staged := func(r *request) int64 { return r.Staged }
	released := func(r *request) int64 { return r.Released }
	stands := func(id int64, n func(*request) int64) {
		t.Helper()
		// What was under way when the pause was recorded may still be committed, once.
		at := n(s.show(id))
		s.requireStops(syscall.SIGTERM)
		s.start()
		r := s.show(id)
		require.LessOrEqual(t, n(r)-at, int64(600), "one page at most")
		require.Contains(t, r.Waiting, "paused by dev")
		before := n(r)
		s.await("Temporal to answer again", func() (bool, string) {
			a, err := s.call(http.MethodPost, path(id)+"/resume", map[string]any{})
			if err != nil {
				return false, err.Error()
			}
			return a.Status == http.StatusOK, string(a.Body)
		})
		require.Equal(t, before, n(r))
	}

	id := s.request("public.accounts").ID
	moves(id, "the walk to begin", staged)
	s.post(http.StatusOK, path(id)+"/pause", map[string]any{})
	stands(id, staged)
	moves(id, "the walk to go on", staged)
	put("/sites/s/gates", map[string]any{"gates": []any{}})
	r := s.awaitReview(id)
	require.EqualValues(t, 9000, r.Staged)
	s.requireStagedOnce(r)

	put("/sites/s/gates/slow", slow)
	s.approve(r)
	moves(id, "the release to begin", released)
	s.post(http.StatusOK, path(id)+"/pause", map[string]any{})
	stands(id, released)
	moves(id, "the release to go on", released)
	s.post(http.StatusOK, path(id)+"/cancel", map[string]any{})
	r = s.show(id)
	require.Equal(t, "CANCELLED", r.State)
	require.Less(t, r.Released, r.Staged)
	require.Positive(t, r.Released)
}
