//go:build linux

package acceptance

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// progress is how far a request had come when the program was killed.
type progress struct {
	state    string
	staged   int64
	released int64 // the last staged position that the release has passed
	resume   []string
}

// killOnce waits until a request is in a state and has staged or released a number
// of rows, and kills the program at that moment, in the middle of its work.
func (s *site) killOnce(id int64, state string, rows int, kill func()) (at progress) {
	s.Helper()
	control := s.control()
	s.awaitEvery(2*time.Millisecond, fmt.Sprintf("request %d to be %s with %d rows", id, state, rows), func() (bool, string) {
		require.NoError(s, control.QueryRow(s.Context(), `SELECT state, staged, released_up_to, resume_key FROM backfill_control.request WHERE id = $1`, id).
			Scan(&at.state, &at.staged, &at.released, &at.resume))
		done := at.staged
		if state == "RELEASING" {
			done = at.released
			require.NotEqual(s, "FINISHED", at.state, "the release was over before it could be killed")
		} else {
			require.NotEqual(s, "AWAITING_REVIEW", at.state, "the walk was over before it could be killed")
		}
		return at.state == state && done >= int64(rows), fmt.Sprintf("%s, %d", at.state, done)
	})
	kill()
	s.Logf("killed it when %s, %d rows staged up to %v, %d released", at.state, at.staged, at.resume, at.released)
	return at
}

// requireContinues starts the program again and requires that a request stands
// where it stood, or further.
func (s *site) requireContinues(id int64, at progress) {
	s.Helper()
	began := time.Now()
	s.start()
	r := s.show(id)
	require.GreaterOrEqual(s, r.Staged, at.staged)
	require.GreaterOrEqual(s, orderID(s, r.ResumeKey), orderID(s, at.resume))
	s.await("the request to go on", func() (bool, string) {
		r := s.show(id)
		return r.State != at.state || r.Staged > at.staged || r.Released > at.released, r.String()
	})
	s.Logf("it went on %s after it was started again", time.Since(began).Round(time.Millisecond))
}

func orderID(s *site, key []string) int64 {
	s.Helper()
	require.Len(s, key, 1)
	return number(s, key[0])
}

func number(s *site, text string) int64 {
	s.Helper()
	n, err := strconv.ParseInt(text, 10, 64)
	require.NoError(s, err)
	return n
}

// kill -9 in the middle of a walk and of a release: nothing is staged or released
// twice, nothing is skipped, and the two databases end up equal.
func TestKillsLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	s := newSite(t, ordersSetup(ordersRows))
	app := s.openShop(ordersRows)
	app.deletes.Store(true)

	id := s.request(orders).ID
	at := s.killOnce(id, "IN_PROGRESS", ordersRows/10, s.kill)
	require.NotZero(t, s.controlPID(), "the control database outlives the program")
	s.requireContinues(id, at)
	at = s.killOnce(id, "IN_PROGRESS", ordersRows/3, s.killAll)
	require.Zero(t, s.controlPID())
	s.requireContinues(id, at)
	r := s.awaitReview(id)
	s.requireUntouched()
	s.requireStagedOnce(r)

	s.approve(r)
	at = s.killOnce(id, "RELEASING", ordersRows/5, s.kill)
	s.requireContinues(id, at)
	r = s.awaitFinished(id)
	t.Logf("%d staged, %d released, %d superseded", r.Staged, r.Released, r.Superseded)

	app.close()
	s.drain()
	s.requireReleasedOnce(r)
	s.requireEqual(orders)
	require.Empty(t, s.queue(orders, ""))
}

// requireReleasedOnce looks into the control database: no staged row is in queue
// or history twice.
func (s *site) requireReleasedOnce(r *request) {
	s.Helper()
	var rows, keys int64
	require.NoError(s, s.control().QueryRow(s.Context(), `SELECT count(*), count(DISTINCT key) FROM backfill_control.entry WHERE request_id = $1`, r.ID).
		Scan(&rows, &keys))
	require.Equal(s, r.Released, rows)
	require.Equal(s, rows, keys, "a staged row was released twice")
}
