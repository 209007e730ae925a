package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// within is far longer than anything here takes.
const within = 20 * time.Second

type event struct {
	id, name string
	data     map[string]any
	comment  string
}

// events reads a stream in the background, until it ends.
type events struct {
	*testing.T
	status int
	header http.Header
	list   chan event
	cancel context.CancelFunc
}

func (w *world) listen(base, path string, headers ...header) *events {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	w.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, "GET", base+path, nil)
	require.NoError(w, err)
	r.Header.Set("Authorization", "Bearer "+secret(control.Viewer))
	for _, h := range headers {
		r.Header.Set(h[0], h[1])
	}
	resp, err := http.DefaultClient.Do(r)
	require.NoError(w, err)
	s := &events{T: w.T, status: resp.StatusCode, header: resp.Header, list: make(chan event), cancel: cancel}
	go func() {
		defer close(s.list)
		defer resp.Body.Close()
		readEvents(ctx, resp.Body, s.list)
	}()
	return s
}

func readEvents(ctx context.Context, body io.Reader, out chan<- event) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, maxBody)
	var e event
	for lines.Scan() {
		line := lines.Text()
		name, value, _ := strings.Cut(line, ": ")
		switch {
		case line == "":
			select {
			case out <- e:
			case <-ctx.Done():
				return
			}
			e = event{}
		case name == "":
			e.comment = value
		case name == "id":
			e.id = value
		case name == "event":
			e.name = value
		case name == "data":
			if json.Unmarshal([]byte(value), &e.data) != nil {
				return
			}
		}
	}
}

// next is the next event that is no comment; ok is false at the stream's end.
func (s *events) next() (event, bool) {
	s.Helper()
	for {
		select {
		case e, ok := <-s.list:
			if ok && e.name == "" {
				continue
			}
			return e, ok
		case <-time.After(within):
			s.Fatal("no event")
		}
	}
}

// until reads events until one is of that state.
func (s *events) until(state backfill.State) event {
	s.Helper()
	for {
		e, ok := s.next()
		require.True(s, ok, "the stream ended before %s", state)
		if e.data["state"] == string(state) {
			return e
		}
	}
}

func (s *events) ends() {
	s.Helper()
	_, ok := s.next()
	require.False(s, ok, "the stream goes on")
}

func TestBackfillEvents(t *testing.T) {
	w := newWorld(t)
	w.server.timing.poll = within // only the database's word counts here
	id := w.staged(3)
	s := w.listen(w.url, path("/backfills/%d/events", id))
	require.Equal(t, 200, s.status)
	require.Equal(t, eventStream, s.header.Get("Content-Type"))
	require.Equal(t, "no", s.header.Get("X-Accel-Buffering"))
	require.Equal(t, "no-store", s.header.Get("Cache-Control"))
	first, _ := s.next()
	require.Equal(t, "backfill", first.name)
	require.Equal(t, "AWAITING_REVIEW", first.data["state"])
	require.NotEmpty(t, first.id)
	w.hubReady()

	_, err := w.store.Approve(t.Context(), id, control.Decision{By: "ana", Revision: 7})
	require.NoError(t, err)
	s.until(backfill.Releasing)
	_, err = w.store.Close(t.Context(), id, "ana", backfill.Cancelled, "enough")
	require.NoError(t, err)
	last := s.until(backfill.Cancelled)
	require.Equal(t, "backfill", last.name)
	end, _ := s.next()
	require.Equal(t, "end", end.name)
	require.Equal(t, "CANCELLED", end.data["state"])
	s.ends()

	s = w.listen(w.url, path("/backfills/%d/events", id), header{"Last-Event-ID", last.id})
	end, _ = s.next()
	require.Equal(t, "end", end.name, "what was seen is not sent again")
	s.ends()
	s = w.listen(w.url, path("/backfills/%d/events", id), header{"Last-Event-ID", end.id})
	require.Equal(t, 204, s.status)
	s = w.listen(w.url, path("/backfills/%d/events", id), header{"Last-Event-ID", first.id})
	again, _ := s.next()
	require.Equal(t, last.id, again.id)
}

// hubReady waits until the hub listens: what changes before that is made up for
// by a waking, what changes after it is told.
func (w *world) hubReady() {
	w.Helper()
	sub := &subscription{topics: []topic{{site: "maple"}}}
	defer w.server.changes.subscribe(sub)()
	require.Eventually(w, func() bool {
		w.touch()
		select {
		case <-sub.dirty:
			return true
		default:
			return false
		}
	}, within, 10*time.Millisecond)
}

// touch tells of a change of maple.
func (w *world) touch() {
	w.Helper()
	w.exec(`SELECT pg_notify('backfill_control', 'site maple')`)
}

// Progress shows even when nobody tells of it.
func TestBackfillEventsByPolling(t *testing.T) {
	w := newWorld(t)
	server := httptest.NewServer(w.server.Handler()) // its hub may listen, but nothing is notified below
	t.Cleanup(server.Close)
	id := w.backfill()
	s := w.listen(server.URL, path("/backfills/%d/events", id))
	s.until(backfill.Pending)
	w.exec(`UPDATE backfill_control.request SET state = 'IN_PROGRESS', started_at = now(), staged = 5, expected = 10 WHERE id = $1`, id)
	e := s.until(backfill.InProgress)
	require.EqualValues(t, 50, e.data["percent"])
	w.exec(`UPDATE backfill_control.request SET lease_until = now(), holder = 'x' WHERE id = $1`, id)
	w.exec(`UPDATE backfill_control.request SET staged = 6 WHERE id = $1`, id)
	e, _ = s.next()
	require.EqualValues(t, 6, e.data["staged"], "a lease shows nowhere, so its renewal is no change")
	s.cancel()
}

func TestSiteEvents(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.store.CreateSite(t.Context(), "test", "oak", [2]string{"a", "b"}))
	w.hubReady()
	s := w.listen(w.url, "/api/v1/sites/oak/events")
	first, _ := s.next()
	require.Equal(t, "site", first.name)
	require.Equal(t, map[string]any{"site": "oak"}, first.data)

	_, err := w.store.PutTable(t.Context(), "test", "oak", "public.t", control.TableChange{CapturedFrom: []string{"a"}})
	require.NoError(t, err)
	e, _ := s.next()
	require.Equal(t, "oak", e.data["site"])
}

// An event wakes those who show what it is about, and nobody else.
func TestHubDelivers(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.store.CreateSite(t.Context(), "test", "oak", [2]string{"a", "b"}))
	id := w.backfill()
	d, err := w.store.Direction(t.Context(), "maple", "school")
	require.NoError(t, err)
	h := NewChanges(w.store, w.service.Log)
	maple, oak, request := &subscription{topics: []topic{{site: "maple"}}}, &subscription{topics: []topic{{site: "oak"}}}, &subscription{topics: []topic{{request: id}}}
	for _, s := range []*subscription{maple, oak, request} {
		defer h.subscribe(s)()
	}
	tests := []struct {
		event control.Event
		woken []*subscription
	}{
		{control.Event{Kind: "request", ID: id}, []*subscription{maple, request}},
		{control.Event{Kind: "request", ID: id}, []*subscription{maple, request}}, // as remembered
		{control.Event{Kind: "queue", ID: int64(d.ID)}, []*subscription{maple}},
		{control.Event{Kind: "site", Name: "oak"}, []*subscription{oak}},
		{control.Event{Kind: "request", ID: 999}, []*subscription{maple, oak, request}}, // whose it is cannot be told
	}
	for _, x := range tests {
		h.deliver(t.Context(), x.event)
		h.deliver(t.Context(), x.event) // one mark, however often
		var woken []*subscription
		for _, s := range []*subscription{maple, oak, request} {
			select {
			case <-s.dirty:
				woken = append(woken, s)
			default:
			}
		}
		require.Equal(t, x.woken, woken, "%v", x.event)
	}
}

// One stream tells of everything that a page shows, and of nothing twice: who comes
// back is told at once only what happened meanwhile.
func TestOneStreamForAll(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.store.CreateSite(t.Context(), "test", "oak", [2]string{"a", "b"}))
	id := w.backfill()
	w.hubReady()
	for _, query := range []string{"", "?site=maple", fmt.Sprintf("?site=oak&request=%d", id)} {
		s := w.listen(w.url, "/api/v1/events"+query)
		first, _ := s.next()
		require.Equal(t, "change", first.name)
		w.exec(fmt.Sprintf(`SELECT pg_notify('backfill_control', 'request %d')`, id))
		second, _ := s.next()
		require.NotEqual(t, first.id, second.id, query)
		s.cancel()

		s = w.listen(w.url, "/api/v1/events"+query, header{"Last-Event-ID", second.id})
		w.exec(`SELECT pg_notify('backfill_control', 'site birch')`) // which only those who hear of all see
		w.exec(fmt.Sprintf(`SELECT pg_notify('backfill_control', 'request %d')`, id))
		third, _ := s.next()
		require.NotEqual(t, second.id, third.id)
		s.cancel()
		w.exec(fmt.Sprintf(`SELECT pg_notify('backfill_control', 'request %d')`, id))
		require.Eventually(t, func() bool { return w.server.changes.mark(Topics{Requests: []int64{id}, All: query == ""}) != third.id }, within, 5*time.Millisecond)
		s = w.listen(w.url, "/api/v1/events"+query, header{"Last-Event-ID", third.id})
		missed, _ := s.next()
		require.NotEqual(t, third.id, missed.id, "what happened while it was away is told at once")
		s.cancel()
	}
	require.Equal(t, 422, w.get(control.Viewer, "/api/v1/events?request=x").status)
}

// Changes that come faster than the gap are one event.
func TestSiteEventsAreCoalesced(t *testing.T) {
	w := newWorld(t)
	w.server.timing.gap = 2 * time.Second
	w.hubReady()
	s := w.listen(w.url, "/api/v1/sites/maple/events")
	_, _ = s.next()
	first := time.Now()
	for range 30 {
		w.touch()
	}
	_, ok := s.next()
	require.True(t, ok)
	require.Greater(t, time.Since(first), w.server.timing.gap/2, "the second event waits for its turn")
}

// The more streams there are, the longer each waits: what their clients ask for has a bound.
func TestManyStreamsTakeTurns(t *testing.T) {
	w := newWorld(t)
	w.server.timing.share = 500 * time.Millisecond
	w.hubReady()
	for range 3 {
		_, _ = w.listen(w.url, "/api/v1/events?site=maple").next()
	}
	s := w.listen(w.url, "/api/v1/events?site=maple")
	_, _ = s.next()
	first := time.Now()
	w.touch()
	_, ok := s.next()
	require.True(t, ok)
	require.Greater(t, time.Since(first), 4*w.server.timing.share-200*time.Millisecond)
}

func TestStreamsEndOnShutdown(t *testing.T) {
	w := newWorld(t)
	id := w.backfill()
	a, b := w.listen(w.url, path("/backfills/%d/events", id)), w.listen(w.url, "/api/v1/sites/maple/events")
	_, _ = a.next()
	_, _ = b.next()
	w.stop()
	a.ends()
	b.ends()
	select {
	case err := <-w.stopped:
		require.NoError(t, err)
	case <-time.After(drainWithin / 3):
		t.Fatal("the server waits for streams")
	}
}

// A stream ends when its token is revoked or given other rights, and says that it lives
// until then.
func TestStreamsEndWithTheirToken(t *testing.T) {
	for name, change := range map[string]string{
		"revoked":        `UPDATE backfill_control.token SET revoked_at = now() WHERE name = 'viewer'`,
		"of a requester": `UPDATE backfill_control.token SET role = 'requester' WHERE name = 'viewer'`,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.server.timing.keepalive = 50 * time.Millisecond
			s := w.listen(w.url, "/api/v1/sites/maple/events")
			first := <-s.list
			require.Equal(t, "site", first.name)
			require.Equal(t, "keepalive", (<-s.list).comment)
			w.exec(change)
			for range s.list {
			}
		})
	}
}

// The hub comes back after its connection broke, and wakes everybody then.
func TestHubComesBack(t *testing.T) {
	w := newWorld(t)
	w.hubReady()
	sub := &subscription{topics: []topic{{site: "maple"}}}
	defer w.server.changes.subscribe(sub)()
	w.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN backfill_control' AND datname = current_database()`)
	select {
	case <-sub.dirty:
	case <-time.After(within):
		t.Fatal("nobody was woken")
	}
	w.hubReady()
}

func TestServeFails(t *testing.T) {
	w := newWorld(t)
	server := New(Config{Service: w.service, Auth: w.server.auth, Log: w.service.Log})
	err := server.Serve(t.Context(), brokenListener{})
	require.ErrorIs(t, err, errBroken)
}

var errBroken = errors.New("broken")

type brokenListener struct{}

func (brokenListener) Accept() (net.Conn, error) { return nil, errBroken }
func (brokenListener) Close() error              { return nil }
func (brokenListener) Addr() net.Addr            { return &net.TCPAddr{} }
