package shadow

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type order struct{ note string }

var errRead = errors.New("no such database")

func readOrder(_ context.Context, id int) (order, error) {
	if id < 0 {
		return order{}, errRead
	}
	return order{"note"}, nil
}

func describeOrder(id int, o order) Read {
	return Read{Key: []any{id}, Row: map[string]any{"note": o.note}}
}

// api takes reports.
type api struct {
	mu    sync.Mutex
	got   []map[string]any
	hold  chan struct{} // answers wait for it
	fails bool
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if a.hold != nil {
		<-a.hold
	}
	var in struct {
		Site, From string
		Reads      []map[string]any
	}
	if a.fails || r.URL.Path != "/api/v1/shadow-reads" || r.Header.Get("Authorization") != "Bearer t" || json.NewDecoder(r.Body).Decode(&in) != nil || in.Site != "s" || in.From != "a" {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.got = append(a.got, in.Reads...)
	w.WriteHeader(http.StatusAccepted)
	_ = json.NewEncoder(w).Encode(map[string]int{"accepted": len(in.Reads)})
}

func reporterTo(t *testing.T, a *api, c Config) *Reporter {
	server := httptest.NewServer(a)
	t.Cleanup(server.Close)
	c.URL, c.Token, c.Site, c.From = server.URL, "t", "s", "a"
	return New(c)
}

func TestReadsAreServedAndReported(t *testing.T) {
	a := &api{}
	r := reporterTo(t, a, Config{Percent: 100, Rate: 1000})
	read := Wrap(r, "public.orders", readOrder, describeOrder)
	for i := range 300 {
		o, err := read(t.Context(), i)
		require.NoError(t, err)
		require.Equal(t, "note", o.note)
	}
	_, err := read(t.Context(), -1)
	require.ErrorIs(t, err, errRead)
	r.Report("public.orders", time.Now().Add(-time.Minute), Read{Key: []any{"x"}})
	require.NoError(t, r.Close(t.Context()))
	require.Equal(t, Counts{Sent: 301}, r.Counts())
	require.Len(t, a.got, 301)
	require.Equal(t, map[string]any{"note": "note"}, a.got[0]["row"])
	require.Nil(t, a.got[300]["row"])
	require.GreaterOrEqual(t, a.got[300]["age_ms"], 60_000.0)
	require.NoError(t, r.Close(t.Context()), "twice is no matter")
}

// However slow the API is, and whatever goes wrong, reads are served at once.
func TestAReportNeverHoldsAReadUp(t *testing.T) {
	a := &api{hold: make(chan struct{})}
	r := reporterTo(t, a, Config{Percent: 100, Rate: 1e9, Queue: 10, Every: time.Millisecond})
	read := Wrap(r, "public.orders", readOrder, func(id int, o order) Read {
		if id == 0 { // while there is room in the queue
			panic("it cannot be told")
		}
		return describeOrder(id, o)
	})
	began := time.Now()
	for i := range 1000 {
		_, err := read(t.Context(), i)
		require.NoError(t, err)
	}
	require.Less(t, time.Since(began), time.Second)
	require.Greater(t, r.Counts().Dropped, uint64(500))
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.Error(t, r.Close(short), "it does not wait for ever")
	close(a.hold)
	require.NoError(t, r.Close(t.Context()))
	n := r.Counts()
	require.EqualValues(t, 1000, n.Sent+n.Dropped)
}

func TestReportsAreBounded(t *testing.T) {
	a := &api{fails: true}
	var told []error
	r := reporterTo(t, a, Config{Percent: 10, Rate: 20, Every: time.Hour, OnError: func(err error) { told = append(told, err) }})
	read := Wrap(r, "public.orders", readOrder, describeOrder)
	for i := range 10_000 {
		_, err := read(t.Context(), i)
		require.NoError(t, err)
	}
	require.LessOrEqual(t, len(r.queue), 25, "the rate is kept")
	require.InDelta(t, 1000, float64(r.Counts().Dropped)+float64(len(r.queue)), 200, "a tenth was chosen")
	require.NoError(t, r.Close(t.Context()))
	require.Zero(t, r.Counts().Sent)
	require.ErrorContains(t, told[0], "503")

	var none *Reporter
	_, err := Wrap(none, "public.orders", readOrder, describeOrder)(t.Context(), 1)
	require.NoError(t, err)
	require.NoError(t, none.Close(t.Context()))
}
