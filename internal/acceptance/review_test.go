//go:build linux

package acceptance

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	sdkpb "go.temporal.io/api/sdk/v1"
	"go.temporal.io/sdk/client"
)

// accounts is SQL that makes a table of accounts with a number of rows on a side.
func accounts(name string, rows int) string {
	return fmt.Sprintf(`
		CREATE TABLE %[1]s (id integer PRIMARY KEY, owner text NOT NULL, balance numeric(10, 2) NOT NULL);
		INSERT INTO %[1]s SELECT n, 'owner ' || n, n * 1.5 FROM generate_series(1, %[2]d) n;`, name, rows)
}

// TestDecisions shares one site between tests that each have a table of their own.
func TestDecisions(t *testing.T) {
	t.Parallel()
	tables := []string{"newer", "unsent", "race", "twice", "rejected", "walking", "signalled", "typed", "proven"}
	var with setup
	for _, name := range tables {
		with.tables = append(with.tables, "public."+name)
		with.a += accounts(name, 20)
		with.b += accounts(name, 10)
	}
	s := newSite(t, with)
	for _, test := range []struct {
		name string
		run  func(*site)
	}{
		{"what was changed after it was read is superseded", testSuperseded},
		{"a change that is not sent yet comes after the release", testUnsent},
		{"of twenty requests at once one is made", testRace},
		{"an approval counts once", testApproveTwice},
		{"a rejection stays one", testApproveRejected},
		{"a walk cannot be approved", testApproveWalking},
		{"a signal approves, one for another revision does not", testSignal},
		{"the command line approves", testCommandLine},
		{"what is missing is found, repaired and proven", testProven},
	} {
		t.Run(test.name, func(t *testing.T) {
			one := *s
			one.T = t
			test.run(&one)
		})
	}
}

// A row updated and one deleted between staging and approval: the new value stays
// and the deleted row does not come back.
func testSuperseded(s *site) {
	const table = "public.newer"
	r := s.awaitReview(s.request(table).ID)
	s.run(s.a, `UPDATE newer SET owner = 'changed later' WHERE id = 13`)
	s.run(s.a, `DELETE FROM newer WHERE id = 14`)
	s.run(s.a, `UPDATE newer SET id = 30 WHERE id = 15; UPDATE newer SET id = 15 WHERE id = 30`)
	s.drain()
	require.EqualValues(s, 1, s.number(s.b, `SELECT count(*) FROM newer WHERE id = 13 AND owner = 'changed later'`))
	s.approve(r)
	r = s.awaitFinished(r.ID)
	require.EqualValues(s, 3, r.Superseded, "the row updated, the row deleted, and the row whose key went and came back")
	require.EqualValues(s, 17, r.Released)
	require.Zero(s, r.SupersededUndelivered)
	var superseded []string
	for _, x := range list[staged](s, path(r.ID)+"/rows", map[string][]string{}) {
		if x.Superseded {
			superseded = append(superseded, x.Key...)
		}
	}
	require.Equal(s, []string{"13", "14", "15"}, superseded)
	s.drain()
	s.requireEqual(table)
	require.Zero(s, s.number(s.b, `SELECT count(*) FROM newer WHERE id = 14`))
}

// Changes that are still in the outbox when the approval comes.
func testUnsent(s *site) {
	const table = "public.unsent"
	r := s.awaitReview(s.request(table).ID)
	s.run(s.a, `UPDATE unsent SET owner = 'changed now' WHERE id IN (3, 13); DELETE FROM unsent WHERE id IN (4, 14)`)
	s.approve(r)
	s.awaitFinished(r.ID)
	s.drain()
	s.requireEqual(table)
}

func testRace(s *site) {
	const table, n = "public.race", 20
	answers := make([]*answer, n)
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			<-start
			answers[i], _ = s.call(http.MethodPost, "/sites/s/backfills", wish{Table: table, From: "a"})
		})
	}
	close(start)
	all.Wait()
	var made, refused []string
	for _, a := range answers {
		require.NotNil(s, a)
		switch a.Status {
		case http.StatusCreated:
			made = append(made, a.Header.Get("Location"))
		case http.StatusConflict:
			require.Equal(s, "urn:backfill:problem:conflict", a.Problem.Type)
			require.Equal(s, a.Problem.Open, a.Header.Get("Location"))
			refused = append(refused, a.Problem.Open)
		default:
			s.Fatalf("%d %s", a.Status, a.Body)
		}
	}
	require.Len(s, made, 1)
	require.Len(s, refused, n-1)
	for _, open := range refused {
		require.Equal(s, made[0], open)
	}
	r := s.awaitReview(get[*request](s, strings.TrimPrefix(made[0], "/api/v1")).ID)
	s.post(http.StatusOK, path(r.ID)+"/reject", decision{Revision: r.Revision, Note: "only a test"})
	require.EqualValues(s, 10, s.number(s.b, `SELECT count(*) FROM race`), "a rejected backfill sends nothing")
}

// requireConflict sends a decision that must be refused and change nothing.
func (s *site) requireConflict(id int64, verb string, revision int64) {
	s.Helper()
	before := s.show(id)
	a := s.post(http.StatusConflict, path(id)+"/"+verb, decision{Revision: revision, Note: "must not count"})
	require.Equal(s, "urn:backfill:problem:conflict", a.Problem.Type)
	require.NotEmpty(s, a.Problem.Detail)
	after := s.show(id)
	// A walk or release may have gone on meanwhile; what was decided must not have changed.
	for _, r := range []*request{before, after} {
		r.Staged, r.Released, r.Superseded, r.Skipped, r.Effects, r.ResumeKey, r.ClosedAt, r.Waiting = 0, 0, 0, 0, nil, nil, nil, ""
		if r.State == "FINISHED" {
			r.State = "RELEASING"
		}
	}
	require.Equal(s, before.String(), after.String())
}

func testApproveTwice(s *site) {
	const table = "public.twice"
	r := s.awaitReview(s.request(table).ID)
	for _, other := range []int64{r.Revision - 1, r.Revision + 1} {
		s.requireConflict(r.ID, "approve", other)
		s.requireConflict(r.ID, "reject", other)
	}
	require.Equal(s, "AWAITING_REVIEW", s.show(r.ID).State)
	s.approve(r)
	s.requireConflict(r.ID, "approve", r.Revision)
	s.requireConflict(r.ID, "reject", r.Revision)
	r = s.awaitFinished(r.ID)
	require.EqualValues(s, 20, r.Released)
	s.requireConflict(r.ID, "approve", r.Revision)
	s.drain()
	s.requireEqual(table)
}

func testApproveRejected(s *site) {
	const table = "public.rejected"
	r := s.awaitReview(s.request(table).ID)
	s.post(http.StatusOK, path(r.ID)+"/reject", decision{Revision: r.Revision, Note: "wrong table"})
	r = s.show(r.ID)
	require.Equal(s, "REJECTED", r.State)
	s.requireConflict(r.ID, "approve", r.Revision)
	s.requireConflict(r.ID, "reject", r.Revision)
	require.Len(s, list[staged](s, path(r.ID)+"/rows", map[string][]string{}), 20, "staged rows stay readable")
	require.EqualValues(s, 10, s.number(s.b, `SELECT count(*) FROM rejected`))
	// It is closed, so there may be another.
	s.backfill(table)
	s.drain()
	s.requireEqual(table)
}

func testApproveWalking(s *site) {
	const table = "public.walking"
	ctx := s.Context()
	s.awaitCount(table, 20, 10)
	// A lock on the table keeps the walk from its first page.
	tx, err := s.a.Begin(ctx)
	require.NoError(s, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, `LOCK TABLE walking IN ACCESS EXCLUSIVE MODE`)
	require.NoError(s, err)
	id := s.request(table).ID
	r := s.awaitState(id, "IN_PROGRESS")
	s.requireConflict(id, "approve", r.Revision)
	s.requireConflict(id, "approve", r.Revision+1)
	s.requireConflict(id, "reject", r.Revision)
	require.Equal(s, "IN_PROGRESS", s.show(id).State)
	require.NoError(s, tx.Rollback(ctx))
	r = s.awaitReview(id)
	s.approve(r)
	s.awaitFinished(id)
	s.drain()
	s.requireEqual(table)
}

// awaitCount waits until both sides' rows were counted.
func (s *site) awaitCount(table string, source, receiver int64) {
	s.Helper()
	s.await("the rows to be counted", func() (bool, string) {
		p := s.panel(table)
		return p.SourceRows != nil && p.ReceiverRows != nil && *p.SourceRows == source && *p.ReceiverRows == receiver, fmt.Sprintf("%+v", p)
	})
}

// temporal connects to the Temporal server that the program has started.
func (s *site) temporal() client.Client {
	s.Helper()
	port, err := os.ReadFile(filepath.Join(s.state, "temporal", "temporal.port"))
	require.NoError(s, err)
	c, err := client.Dial(client.Options{HostPort: "127.0.0.1:" + strings.TrimSpace(string(port))})
	require.NoError(s, err)
	s.Cleanup(c.Close)
	return c
}

func testSignal(s *site) {
	const table = "public.signalled"
	ctx, c := s.Context(), s.temporal()
	r := s.awaitReview(s.request(table).ID)
	type payload struct {
		By       string `json:"by"`
		Revision int64  `json:"revision"`
		Note     string `json:"note"`
	}
	require.NoError(s, c.SignalWorkflow(ctx, r.WorkflowID, "", "approve", payload{"night shift", r.Revision + 1, "of what I did not read"}))
	s.await("the console to say that the signal was ignored", func() (bool, string) {
		answer, err := c.QueryWorkflow(ctx, r.WorkflowID, "", "__temporal_workflow_metadata")
		require.NoError(s, err)
		var metadata sdkpb.WorkflowMetadata
		require.NoError(s, answer.Get(&metadata))
		return strings.Contains(metadata.CurrentDetails, "signal approve was ignored"), metadata.CurrentDetails
	})
	require.Equal(s, r.String(), s.show(r.ID).String())

	require.NoError(s, c.SignalWorkflow(ctx, r.WorkflowID, "", "approve", payload{"night shift", r.Revision, "read in the console"}))
	r = s.awaitFinished(r.ID)
	require.NotNil(s, r.ReviewedBy)
	require.Equal(s, "night shift", *r.ReviewedBy)
	require.Equal(s, "read in the console", r.ReviewNote)
	var result struct {
		State    string `json:"state"`
		Released int64  `json:"released"`
	}
	require.NoError(s, c.GetWorkflow(ctx, r.WorkflowID, "").Get(ctx, &result))
	require.Equal(s, "FINISHED", result.State)
	require.EqualValues(s, 20, result.Released)
	s.drain()
	s.requireEqual(table)
}

func testCommandLine(s *site) {
	const table = "public.typed"
	s.awaitCount(table, 20, 10)
	out, errs, status := s.command("request", "--table", table, "--note", "typed")
	require.Zero(s, status, errs)
	require.Contains(s, out, "backfill all rows of "+table+" from a to b")
	id := strings.TrimSuffix(strings.Fields(out)[1], ":")
	_, errs, status = s.command("request", "--table", table)
	require.Equal(s, 3, status, "a second request is refused")
	require.Contains(s, errs, "request "+id+" is open")
	_, errs, status = s.command("watch", id, "--until", "review")
	require.Zero(s, status, errs)
	s.awaitReview(number(s, id))
	out, errs, status = s.command("rows", id, "--all", "--effect", "insert")
	require.Zero(s, status, errs)
	require.Contains(s, out, "owner 20")
	_, errs, status = s.command("approve", id, "--revision", "99")
	require.Equal(s, 3, status, "another revision is refused")
	require.Contains(s, errs, "revision 99")
	out, errs, status = s.command("approve", id, "--note", "read in the terminal")
	require.Zero(s, status, errs)
	require.Contains(s, out, "approved request "+id)
	_, errs, status = s.command("watch", id)
	require.Zero(s, status, errs)
	out, _, status = s.command("show", id)
	require.Zero(s, status)
	require.Contains(s, out, "FINISHED")
	require.Contains(s, out, "read in the terminal")
	s.drain()
	s.requireEqual(table)
	out, errs, status = s.command("queue")
	require.Zero(s, status, errs)
	require.NotContains(s, out, table)
}
