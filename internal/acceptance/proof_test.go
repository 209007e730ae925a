//go:build linux

package acceptance

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"

	"github.com/stretchr/testify/require"
)

// reconciliation is what these tests read of one.
type reconciliation struct {
	ID      int64            `json:"id"`
	State   string           `json:"state"`
	Verdict string           `json:"verdict"`
	Clean   bool             `json:"clean"`
	Reason  string           `json:"reason"`
	Keys    map[string]int64 `json:"keys"`
}

func (s *site) awaitVerdict(a *answer) (r reconciliation) {
	s.Helper()
	require.NoError(s, json.Unmarshal(a.Body, &r))
	s.await("the reconciliation ends", func() (bool, string) {
		r = get[reconciliation](s, fmt.Sprintf("/reconciliations/%d", r.ID))
		return r.State != "PENDING" && r.State != "RUNNING", fmt.Sprintf("%+v", r)
	})
	require.Equal(s, "FINISHED", r.State, r.Reason)
	return r
}

// What is missing is found, repaired through the queue, and then proven, by the
// agents' real processes.
func testProven(s *site) {
	const table = "public.proven"
	s.run(s.a, `UPDATE proven SET owner = 'on its way' WHERE id = 3`)
	r := s.awaitVerdict(s.post(http.StatusCreated, "/sites/s/reconciliations", wish{Table: table, From: "a"}))
	require.Equal(s, "DIFFERENT", r.Verdict)
	require.EqualValues(s, 10, r.Keys["missing"])
	require.EqualValues(s, 10, r.Keys["open"])
	repair := s.awaitVerdict(s.post(http.StatusCreated, fmt.Sprintf("/reconciliations/%d/repair", r.ID), struct{}{}))
	require.Equal(s, "EQUAL", repair.Verdict)
	require.False(s, repair.Clean, "a repair proves no table")
	s.requireEqual(table)

	out, errs, status := s.command("reconcile", "--table", table, "--from", "a", "--watch")
	require.Zero(s, status, "%s%s", out, errs)
	require.Contains(s, out, "FINISHED  EQUAL")
	clean := list[reconciliation](s, "/reconciliations", map[string][]string{"site": {"s"}, "table": {table}})[0]
	require.True(s, clean.Clean)
	out, errs, status = s.command("reconcile", "certificate", fmt.Sprint(clean.ID))
	require.Zero(s, status, errs)
	file := filepath.Join(s.TempDir(), "certificate.json")
	require.NoError(s, os.WriteFile(file, []byte(out), 0o600))
	out, errs, status = s.command("verify-certificate", file)
	require.Zero(s, status, errs)
	require.Contains(s, out, "verdict EQUAL, 20 of 20 rows covered")

	// The source's agent samples reads, both judge them, and the gate knows what is missing.
	out, errs, status = s.command("cutover", "set", "--table", table, "--from", "a", "--sample", "600")
	require.Zero(s, status, "%s%s", out, errs)
	s.await("shadow reads to match", func() (bool, string) {
		v := get[struct {
			Reads map[string]int64 `json:"reads"`
		}](s, "/sites/s/tables/"+table+"/shadow?from=a")
		require.Zero(s, v.Reads["mismatch"])
		return v.Reads["match"] > 0, fmt.Sprint(v.Reads)
	})
	out, errs, status = s.command("cutover", "--table", table, "--from", "a")
	require.Equal(s, 3, status, "%s%s", out, errs)
	require.Contains(s, out, "yes proof")
	require.Contains(s, out, "no  shadow     ")
	require.Contains(s, out, "clean shadow reads leave a rate of")
	require.Contains(s, errs, "reads may not move yet")
}
