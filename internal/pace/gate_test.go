package pace

import (
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAGateIsOpenOnlyByAFreshKnownReadingWithinItsLimit(t *testing.T) {
	g := Gate{Name: "lag", Side: "a", Kind: ReplicaLag, Limit: 5}
	for name, c := range map[string]struct {
		r    *Reading
		open bool
	}{
		"never measured": {nil, false},
		"within":         {&Reading{Value: 4}, true},
		"at the limit":   {&Reading{Value: 5}, true},
		"over":           {&Reading{Value: 5.1}, false},
		"not a number":   {&Reading{Value: math.NaN()}, false},
		"failing":        {&Reading{Value: 1, Problem: "no replica is connected"}, false},
		"fresh enough":   {&Reading{Value: 1, Age: DefaultMaxAge}, true},
		"stale":          {&Reading{Value: 1, Age: DefaultMaxAge + time.Millisecond}, false},
	} {
		v := g.Judge(c.r)
		require.Equal(t, c.open, v.Open, name)
		require.Equal(t, c.open, v.Reason == "", name)
		require.NotEmpty(t, v.Why, name)
	}
	g.MaxAge = 60
	require.True(t, g.Judge(&Reading{Value: 1, Age: time.Minute}).Open)
	web := Gate{Name: "web", Side: "a", Kind: HTTP}
	require.True(t, web.Judge(&Reading{Value: 200}).Open)
	require.False(t, web.Judge(&Reading{Value: 503}).Open)
	require.True(t, (&Gate{Kind: RowsPerSecond, Limit: 10}).Judge(nil).Open)
}

func TestGateDefinitionsAreChecked(t *testing.T) {
	good := []Gate{
		{Name: "a", Side: "s", Kind: Sessions, Limit: 3}, {Name: "a", Side: "s", Kind: SQL, Query: "SELECT 1"},
		{Name: "a", Side: "s", Kind: HTTP, URL: "http://h/x"}, {Name: "a", Side: "s", Kind: Prometheus, URL: "https://p", Query: "up"},
		{Name: "a", Side: "s", Kind: RowsPerSecond, Limit: 1},
	}
	for _, g := range good {
		_, problem := g.Check()
		require.Empty(t, problem, "%+v", g)
	}
	for field, bad := range map[string]Gate{
		"name": {Name: "No", Side: "s", Kind: Sessions}, "side": {Name: "a", Kind: Sessions}, "kind": {Name: "a", Side: "s", Kind: "moon"},
		"limit": {Name: "a", Side: "s", Kind: Sessions, Limit: -1}, "query": {Name: "a", Side: "s", Kind: SQL},
		"url": {Name: "a", Side: "s", Kind: HTTP, URL: "http://u:secret@h/"}, "max_age": {Name: "a", Side: "s", Kind: Sessions, MaxAge: -1},
	} {
		at, problem := bad.Check()
		require.Equal(t, field, at)
		require.NotEmpty(t, problem)
		require.NotContains(t, problem, "secret")
	}
	_, problem := (&Gate{Name: "a", Side: "s", Kind: RowsPerSecond}).Check()
	require.NotEmpty(t, problem, "no row a second would hold a backfill for ever")
}

func TestProbesOfHTTPAndPrometheus(t *testing.T) {
	var status int
	var body string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/api/v1/query") && r.URL.Query().Get("query") != "up == 1" {
			status = 400
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}))
	defer s.Close()
	for _, code := range []int{200, 429, 503} {
		status = code
		v, err := AskHTTP(t.Context(), s.URL)
		require.NoError(t, err)
		require.Equal(t, float64(code), v)
	}
	for _, code := range []int{201, 302, 404, 500} {
		status = code
		_, err := AskHTTP(t.Context(), s.URL)
		require.Error(t, err, code)
	}
	status = 200
	for given, want := range map[string]float64{
		`{"status":"success","data":{"resultType":"scalar","result":[1700000000.5,"0.25"]}}`:                                                  0.25,
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"3"]},{"metric":{"a":"b"},"value":[1,"7e1"]}]}}`: 70,
	} {
		body = given
		v, err := AskPrometheus(t.Context(), s.URL+"/", "up == 1")
		require.NoError(t, err, given)
		require.Equal(t, want, v)
	}
	for _, bad := range []string{
		`{"status":"success","data":{"resultType":"vector","result":[]}}`,
		`{"status":"success","data":{"resultType":"vector","result":[{"value":[1,"NaN"]}]}}`,
		`{"status":"success","data":{"resultType":"matrix","result":[]}}`,
		`{"status":"error","error":"parse error"}`, `<html>`, `{}`,
		`{"status":"success","data":{"resultType":"scalar","result":[1]}}`,
	} {
		body = bad
		_, err := AskPrometheus(t.Context(), s.URL, "up == 1")
		require.Error(t, err, bad)
	}
	s.Close()
	_, err := AskHTTP(t.Context(), s.URL)
	require.Error(t, err)
}

func TestTideTellsHowLongAPositionIsBehind(t *testing.T) {
	var tide Tide
	start := time.Unix(1000, 0)
	for i := range 5000 {
		tide.Mark(int64(i*10), start.Add(time.Duration(i)*time.Second))
	}
	end := start.Add(4999 * time.Second)
	require.Zero(t, tide.Behind(49_990, end))
	require.Equal(t, 9*time.Second, tide.Behind(49_895, end))
	long := tide.Behind(10_000, end).Seconds()
	require.LessOrEqual(t, long, 3998.0, "never more than it is")
	require.Greater(t, long, 2000.0, "old marks are thinner")
	require.LessOrEqual(t, len(tide.marks), maxMarks+1)
	tide.Mark(5, end) // another server
	require.Zero(t, tide.Behind(5, end))
}

func TestRateSpreadsRows(t *testing.T) {
	var r Rate
	now := time.Unix(1000, 0)
	began, rows := now, 0
	for rows < 1000 {
		now = now.Add(r.Wait(now))
		rows += 50
		r.Spent(now, 50, 100)
		now = now.Add(10 * time.Millisecond) // the page itself
	}
	require.InDelta(t, 10, now.Sub(began).Seconds(), 0.6)
	now = now.Add(time.Hour) // time not used is not saved up
	r.Spent(now, 100, 100)
	require.Equal(t, time.Second, r.Wait(now))
	r.Spent(now, 1e6, 0)
	require.Zero(t, r.Wait(now))
}
