//go:build linux

package acceptance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/exec"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
)

// request is a backfill as the API shows it.
type request struct {
	ID                    int64            `json:"id"`
	Table                 string           `json:"table"`
	State                 string           `json:"state"`
	Staged                int64            `json:"staged"`
	Released              int64            `json:"released"`
	Superseded            int64            `json:"superseded"`
	SupersededUndelivered int64            `json:"superseded_undelivered"`
	Skipped               int64            `json:"skipped"`
	Effects               map[string]int64 `json:"effects"`
	ResumeKey             []string         `json:"resume_key"`
	Revision              int64            `json:"revision"`
	ReviewedBy            *string          `json:"reviewed_by"`
	ReviewNote            string           `json:"review_note"`
	Reason                string           `json:"reason"`
	Waiting               string           `json:"waiting"`
	WorkflowID            string           `json:"workflow_id"`
	StartedAt             *time.Time       `json:"started_at"`
	WalkedAt              *time.Time       `json:"walked_at"`
	ReviewedAt            *time.Time       `json:"reviewed_at"`
	ClosedAt              *time.Time       `json:"closed_at"`
}

func (r *request) String() string {
	text, _ := json.Marshal(r)
	return string(text)
}

// change is an entry of the queue or of history.
type change struct {
	Seq     int64    `json:"seq"`
	Table   string   `json:"table"`
	Op      string   `json:"op"`
	Key     []string `json:"key"`
	Request *int64   `json:"request"`
	State   string   `json:"state"`
	Reason  string   `json:"reason"`
}

// staged is a staged row.
type staged struct {
	N          int64              `json:"n"`
	Key        []string           `json:"key"`
	Row        map[string]*string `json:"row"`
	Effect     string             `json:"effect"`
	Changed    []string           `json:"changed"`
	Superseded bool               `json:"superseded"`
}

// problem is an answer that says why not.
type problem struct {
	Type   string `json:"type"`
	Detail string `json:"detail"`
	Open   string `json:"open"`
	Errors []struct {
		Field   string `json:"field"`
		Message string `json:"message"`
	} `json:"errors"`
}

// answer is what the API said.
type answer struct {
	Status  int
	Header  http.Header
	Body    []byte
	Problem problem // of a status from 400 on
}

// call sends a request to the API. The error is that of the connection.
func (s *site) call(method, path string, body any) (*answer, error) {
	var payload io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		payload = bytes.NewReader(text)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, s.url+"/api/v1"+path, payload)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Authorization", "Bearer "+s.token)
	r.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	a := &answer{Status: res.StatusCode, Header: res.Header}
	if a.Body, err = io.ReadAll(res.Body); err == nil && a.Status >= 400 {
		err = json.Unmarshal(a.Body, &a.Problem)
	}
	return a, err
}

// get reads from the API and requires that it can be read.
func get[T any](s *site, path string) (v T) {
	s.Helper()
	a, err := s.call(http.MethodGet, path, nil)
	require.NoError(s, err, path)
	require.Equal(s, http.StatusOK, a.Status, "%s: %s", path, a.Body)
	require.NoError(s, json.Unmarshal(a.Body, &v), "%s: %s", path, a.Body)
	return v
}

// post sends to the API and requires a status.
func (s *site) post(status int, path string, body any) *answer {
	s.Helper()
	a, err := s.call(http.MethodPost, path, body)
	require.NoError(s, err, path)
	require.Equal(s, status, a.Status, "%s: %s", path, a.Body)
	return a
}

// list reads all pages of a list.
func list[T any](s *site, path string, query url.Values) (all []T) {
	s.Helper()
	query.Set("limit", "1000")
	for {
		page := get[struct {
			Data       []T     `json:"data"`
			NextCursor *string `json:"next_cursor"`
		}](s, path+"?"+query.Encode())
		all = append(all, page.Data...)
		if page.NextCursor == nil {
			return all
		}
		query.Set("cursor", *page.NextCursor)
	}
}

// lag is how many changes wait in the direction from a side.
func (s *site) lag(from string) int64 {
	s.Helper()
	shown := get[struct {
		Lag []struct {
			From    string `json:"from"`
			Waiting int64  `json:"waiting"`
		} `json:"lag"`
	}](s, "/sites/s")
	for _, d := range shown.Lag {
		if d.From == from {
			return d.Waiting
		}
	}
	s.Fatalf("the site shows no lag from %s", from)
	return 0
}

// queue lists the changes of a table in a state, "" for all that are not applied.
func (s *site) queue(table, state string) []change {
	s.Helper()
	query := url.Values{"table": {table}}
	if state != "" {
		query.Set("state", state)
	}
	return list[change](s, "/sites/s/queue", query)
}

func path(id int64) string { return fmt.Sprintf("/backfills/%d", id) }

func (s *site) show(id int64) *request {
	s.Helper()
	return get[*request](s, path(id))
}

// request asks for a backfill of a table.
func (s *site) request(table string) *request {
	s.Helper()
	s.await("the table to be open to requests", func() (bool, string) {
		p := s.panel(table)
		return p.Backfill.CanRequest, fmt.Sprintf("%+v", p)
	})
	return decode[*request](s, s.post(http.StatusCreated, "/sites/s/backfills", wish{Table: table, From: "a", Note: "history is missing"}))
}

// wish is what a backfill is asked for with.
type wish struct {
	Table string   `json:"table"`
	From  string   `json:"from"`
	Key   []string `json:"key,omitempty"`
	Note  string   `json:"note,omitempty"`
}

// panel is a table and direction on the monitoring page.
type panel struct {
	Table        string `json:"table"`
	SourceRows   *int64 `json:"source_rows"`
	ReceiverRows *int64 `json:"receiver_rows"`
	Capture      struct {
		OK      bool    `json:"ok"`
		Problem *string `json:"problem"`
	} `json:"capture"`
	Backfill struct {
		State      *string `json:"state"`
		CanRequest bool    `json:"can_request"`
		Conditions []struct {
			Name    string `json:"name"`
			OK      bool   `json:"ok"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"backfill"`
}

// panel is what the monitoring page shows of a table.
func (s *site) panel(table string) panel {
	s.Helper()
	tables := get[struct{ Data []panel }](s, "/sites/s/tables")
	for _, p := range tables.Data {
		if p.Table == table {
			return p
		}
	}
	s.Fatalf("the site shows no table %s", table)
	return panel{}
}

func decode[T any](s *site, a *answer) (v T) {
	s.Helper()
	require.NoError(s, json.Unmarshal(a.Body, &v), "%s", a.Body)
	return v
}

var closed = []string{"FINISHED", "REJECTED", "CANCELLED", "FAILED"}

// awaitState waits until a request is in a state; it fails at once when the
// request is closed in another.
func (s *site) awaitState(id int64, state string) (r *request) {
	s.Helper()
	s.await(fmt.Sprintf("request %d to be %s", id, state), func() (bool, string) {
		r = s.show(id)
		if r.State != state && slices.Contains(closed, r.State) {
			s.Fatalf("request %d is %s, not %s: %s", id, r.State, state, r)
		}
		return r.State == state, r.String()
	})
	return r
}

// awaitReview waits until a request awaits review and every staged row was judged.
func (s *site) awaitReview(id int64) (r *request) {
	s.Helper()
	s.awaitState(id, "AWAITING_REVIEW")
	s.await("all staged rows to be judged", func() (bool, string) {
		r = s.show(id)
		return r.Effects["unknown"] == 0, r.String()
	})
	return r
}

// decision is the body of an approval or a rejection.
type decision struct {
	Revision int64  `json:"revision"`
	Note     string `json:"note,omitempty"`
}

// approve approves a request as a script has to: when the run does not answer in
// time, it looks whether the decision was taken.
func (s *site) approve(r *request) {
	s.Helper()
	s.await(fmt.Sprintf("the approval of request %d to be taken", r.ID), func() (bool, string) {
		a, err := s.call(http.MethodPost, path(r.ID)+"/approve", decision{Revision: r.Revision, Note: "read it"})
		require.NoError(s, err)
		if a.Status != http.StatusServiceUnavailable {
			require.Equal(s, http.StatusOK, a.Status, "%s", a.Body)
			return true, ""
		}
		return s.show(r.ID).State != "AWAITING_REVIEW", string(a.Body)
	})
}

// awaitFinished waits for the end of a release and requires that every staged row
// is accounted for.
func (s *site) awaitFinished(id int64) *request {
	s.Helper()
	r := s.awaitState(id, "FINISHED")
	require.Equal(s, r.Staged, r.Released+r.Superseded+r.Skipped, "%s", r)
	require.NotNil(s, r.ClosedAt)
	return r
}

// backfill sees a backfill of a table through.
func (s *site) backfill(table string) *request {
	s.Helper()
	r := s.awaitReview(s.request(table).ID)
	s.approve(r)
	return s.awaitFinished(r.ID)
}

// command runs the command line against the site.
func (s *site) command(args ...string) (stdout, stderr string, status int) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), patience())
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(environment(), "BACKFILL_STATE="+s.state)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(s, err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
