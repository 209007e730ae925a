package api

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

const eventStream = "text/event-stream"

// timing is how often streams do what.
type timing struct {
	poll      time.Duration // an open request is read at least this often
	gap       time.Duration // between two events of a stream, or more where there are many
	keepalive time.Duration // between comments, and checks of the token
	write     time.Duration // within which a client must take an event
	share     time.Duration // of each stream in the time between two of its events
	header    time.Duration // within which a request's header has to be there
	read      time.Duration // and its body
}

var defaultTiming = timing{poll: time.Second, gap: 500 * time.Millisecond, keepalive: 15 * time.Second, write: 10 * time.Second, share: 10 * time.Millisecond,
	header: 10 * time.Second, read: 30 * time.Second}

// Changes tells streams that something they show has changed. One connection
// listens for all of them, however many there are.
type Changes struct {
	store *control.Store
	log   *zap.Logger

	mu     sync.Mutex
	subs   map[*subscription]struct{}
	sites  map[control.Event]string // whose event it is; requests and directions never move
	epoch  string                   // tells the numbers of this process from another's
	seq    int64                    // of the last change
	all    int64                    // of the last change that may concern everybody
	lastOf map[topic]int64          // of the last change of each
}

// Topics are what somebody wants to hear of. None at all means everything.
type Topics struct {
	Sites    []string // anything of these sites
	Requests []int64  // these requests
	All      bool     // anything of any site
}

// None reports whether there is nothing to hear of.
func (t Topics) None() bool { return !t.All && len(t.Sites) == 0 && len(t.Requests) == 0 }

// Path is the address of the stream that tells of them.
func (t Topics) Path() string {
	q := url.Values{"site": t.Sites}
	for _, id := range t.Requests {
		q.Add("request", strconv.FormatInt(id, 10))
	}
	if len(t.Sites) == 0 {
		q.Del("site")
	}
	if t.All {
		q = nil
	}
	return strings.TrimSuffix(prefix+"/events?"+q.Encode(), "?")
}

// topic is a site, a request, or, empty, everything.
type topic struct {
	site    string
	request int64
}

func (t Topics) list() (out []topic) {
	if t.All {
		return []topic{{}}
	}
	for _, site := range t.Sites {
		out = append(out, topic{site: site})
	}
	for _, request := range t.Requests {
		out = append(out, topic{request: request})
	}
	return out
}

// subscription is woken by changes of its topics. More changes than its reader
// keeps up with are one: the reader reads the state afresh.
type subscription struct {
	topics []topic
	dirty  chan struct{}
}

// relisten is the pause before listening again, and meanwhile between two wakings.
const relisten = 2 * time.Second

const (
	sitesMax  = 10_000
	topicsMax = 100_000
)

// NewChanges makes a Changes that hears of nothing until Listen runs.
func NewChanges(store *control.Store, log *zap.Logger) *Changes {
	return &Changes{store: store, log: log, subs: map[*subscription]struct{}{}, sites: map[control.Event]string{},
		epoch: rand.Text()[:10], lastOf: map[topic]int64{}}
}

func (h *Changes) subscribe(s *subscription) (cancel func()) {
	s.dirty = make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.subs[s] = struct{}{}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.subs, s)
	}
}

// subscribers is how many streams there are.
func (h *Changes) subscribers() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.subs)
}

// Now is the number of the last change.
func (h *Changes) Now() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seq
}

// Last is the number of the last change of some topics. As long as it is not above
// what Now was, what was read since is true.
func (h *Changes) Last(t Topics) int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := h.all
	for _, t := range t.list() {
		last = max(last, h.lastOf[t])
	}
	return last
}

// mark is Last for a client, who may come back to another process.
func (h *Changes) mark(t Topics) string { return h.epoch + "-" + strconv.FormatInt(h.Last(t), 10) }

// Listen hears of changes until ctx ends. Whatever happened while it did not listen
// is made up for by waking everybody.
func (h *Changes) Listen(ctx context.Context) {
	for ctx.Err() == nil {
		err := h.store.Listen(ctx, h.wakeAll, func(e control.Event) { h.deliver(ctx, e) })
		if ctx.Err() != nil {
			return
		}
		h.log.Warn("not listening for changes, looking every now and then", zap.Error(err))
		h.wakeAll()
		select {
		case <-ctx.Done():
		case <-time.After(relisten):
		}
	}
}

func (h *Changes) wakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seq++
	h.all = h.seq
	for s := range h.subs {
		s.wake()
	}
}

func (s *subscription) wake() {
	select {
	case s.dirty <- struct{}{}:
	default: // it is dirty already
	}
}

func (h *Changes) deliver(ctx context.Context, e control.Event) {
	if e.Kind == "shadow" {
		return // for the agents: pages show what the reads come to
	}
	site, err := h.siteOf(ctx, e)
	if err != nil {
		h.log.Debug("an event of an unknown site", zap.String("kind", e.Kind), zap.Error(err))
		h.wakeAll()
		return
	}
	concerned := []topic{{}, {site: site}}
	if e.Kind == "request" {
		concerned = append(concerned, topic{request: e.ID})
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.lastOf) >= topicsMax {
		clear(h.lastOf)
		h.all = h.seq
	}
	h.seq++
	for _, t := range concerned {
		h.lastOf[t] = h.seq
	}
	for s := range h.subs {
		if slices.ContainsFunc(s.topics, func(t topic) bool { return slices.Contains(concerned, t) }) {
			s.wake()
		}
	}
}

func (h *Changes) siteOf(ctx context.Context, e control.Event) (string, error) {
	if e.Kind == "site" {
		return e.Name, nil
	}
	h.mu.Lock()
	site, ok := h.sites[e]
	h.mu.Unlock()
	if ok {
		return site, nil
	}
	ctx, cancel := context.WithTimeout(ctx, relisten)
	defer cancel()
	site, err := h.store.SiteOf(ctx, e)
	if err != nil {
		return "", err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.sites) >= sitesMax {
		clear(h.sites)
	}
	h.sites[e] = site
	return site, nil
}

// stream writes server-sent events.
type stream struct {
	out   *echo.Response
	conn  *http.ResponseController
	write time.Duration
}

func (s *Server) openStream(c echo.Context) *stream {
	h := c.Response().Header()
	h.Set(echo.HeaderContentType, eventStream)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // proxies would hold events back
	st := &stream{c.Response(), http.NewResponseController(c.Response()), s.timing.write}
	// The server's limits are for requests that end.
	_ = st.conn.SetReadDeadline(time.Time{})
	return st
}

// send writes an event; id "" gives it none.
func (st *stream) send(id, event string, data any) error {
	b, err := json.Marshal(data)
	if err != nil {
		return err
	}
	if id != "" {
		id = "id: " + id + "\n"
	}
	return st.flush(fmt.Sprintf("%sevent: %s\ndata: %s\n\n", id, event, b))
}

func (st *stream) keepalive() error { return st.flush(": keepalive\n\n") }

func (st *stream) flush(text string) error {
	// Not every writer has deadlines; those of a real connection do.
	_ = st.conn.SetWriteDeadline(time.Now().Add(st.write))
	if _, err := st.out.Write([]byte(text)); err != nil {
		return err
	}
	return st.conn.Flush()
}

// tick keeps a stream alive, and ends one whose token was revoked or given other rights.
func (s *Server) tick(c echo.Context, st *stream) error {
	now, err := s.auth.Authenticate(c.Request())
	switch before := accountOf(c); {
	case backfill.CodeOf(err) == backfill.Unauthorized:
		return err
	case err == nil && (now.Name != before.Name || !now.Rights.Equal(before.Rights)):
		return backfill.Errorf(backfill.Unauthorized, "the rights have changed: ask again")
	}
	return st.keepalive()
}

// backfillEvents streams a request: an event whenever it has changed, and one
// named end when it is closed. An event's id stands for its content, so that a
// client that comes back is sent only what it has not seen.
func (s *Server) backfillEvents(c echo.Context) error {
	id, err := idOf(c, "id")
	if err != nil {
		return err
	}
	sub := &subscription{topics: []topic{{request: id}}}
	defer s.changes.subscribe(sub)()
	r, err := s.readBackfill(c, id)
	if err != nil {
		return err
	}
	seen := c.Request().Header.Get("Last-Event-ID")
	if !r.State.Open() && seen == "end-"+s.version(r) {
		return c.NoContent(http.StatusNoContent) // tells an EventSource to stop coming back
	}
	s.streams.Inc()
	defer s.streams.Dec()
	st := s.openStream(c)
	poll, alive := time.NewTicker(s.timing.poll), time.NewTicker(s.timing.keepalive)
	defer poll.Stop()
	defer alive.Stop()
	for {
		if version := s.version(r); version != seen {
			if err := st.send(version, "backfill", s.showBackfill(r)); err != nil {
				return err
			}
			seen = version
		}
		if !r.State.Open() {
			return st.send("end-"+seen, "end", map[string]any{"id": r.ID, "state": r.State})
		}
		select {
		case <-c.Request().Context().Done():
			return nil
		case <-s.closing:
			return nil
		case <-alive.C:
			if err := s.tick(c, st); err != nil {
				return err
			}
			continue
		case <-sub.dirty:
		case <-poll.C:
		}
		switch now, err := s.readBackfill(c, id); {
		case err == nil:
			r = now
		case backfill.CodeOf(err) == backfill.NotFound:
			return nil // past its retention
		default:
			s.log.Debug("a stream waits for the control database", zap.Int64("request", id), zap.Error(err))
		}
	}
}

func (s *Server) readBackfill(c echo.Context, id int64) (*backfill.Request, error) {
	ctx, cancel := context.WithTimeout(c.Request().Context(), handleWithin)
	defer cancel()
	return s.service.Backfill(ctx, id)
}

// version stands for what a request shows, but for what only time changes.
func (s *Server) version(r *backfill.Request) string {
	v := s.showBackfill(r)
	v.Rate, v.ETA = 0, nil
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // texts, numbers and times always marshal
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// siteEvents tells that something of a site has changed: its tables, requests or
// queue. What, is to be read. The first event comes at once, because what a
// client has read may be older than its stream.
func (s *Server) siteEvents(c echo.Context) error {
	ctx, cancel := context.WithTimeout(c.Request().Context(), handleWithin)
	defer cancel()
	site, err := s.service.Store.Site(ctx, c.Param("site"))
	if err != nil {
		return err
	}
	sub := &subscription{topics: []topic{{site: site.Name}}}
	defer s.changes.subscribe(sub)()
	return s.follow(c, sub, true, func(st *stream) error {
		return st.send("", "site", map[string]string{"site": site.Name})
	})
}

// events is the one stream of a page: it tells that something the page shows has
// changed, whatever that is. Coming back with the id of the last event it has seen,
// a client is told at once only when something has changed since.
func (s *Server) events(c echo.Context) error {
	topics := Topics{Sites: c.QueryParams()["site"]}
	for _, given := range c.QueryParams()["request"] {
		id, err := strconv.ParseInt(given, 10, 64)
		if err != nil {
			return fieldError(backfill.Invalid, "request", "is no number of a request")
		}
		topics.Requests = append(topics.Requests, id)
	}
	if topics.None() {
		topics.Sites = accountOf(c).Only()
		topics.All = topics.Sites == nil
	}
	if err := s.mayHear(c, topics); err != nil {
		return err
	}
	sub := &subscription{topics: topics.list()}
	defer s.changes.subscribe(sub)()
	seen := c.Request().Header.Get("Last-Event-ID")
	return s.follow(c, sub, seen != s.changes.mark(topics), func(st *stream) error {
		mark := s.changes.mark(topics)
		return st.send(mark, "change", map[string]string{"at": mark})
	})
}

// mayHear is NotFound when a topic is of a site that the account has no role on.
func (s *Server) mayHear(c echo.Context, t Topics) error {
	a := accountOf(c)
	if a.Sites == nil {
		return nil
	}
	for _, site := range t.Sites {
		if _, err := a.On(site); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), handleWithin)
	defer cancel()
	for _, id := range t.Requests {
		if _, err := s.service.Place(ctx, a, "/backfills/:id", func(string) string { return strconv.FormatInt(id, 10) }); err != nil {
			return err
		}
	}
	return nil
}

// follow sends an event when a subscription is woken, at most one each gap, until
// the client leaves. Most clients ask for something at each event; the more streams
// there are, the longer the gap, so that what they ask for has a bound.
func (s *Server) follow(c echo.Context, sub *subscription, dirty bool, tell func(*stream) error) error {
	s.streams.Inc()
	defer s.streams.Dec()
	st := s.openStream(c)
	if err := st.conn.Flush(); err != nil { // so that the client knows at once that it is heard
		return err
	}
	alive := time.NewTicker(s.timing.keepalive)
	defer alive.Stop()
	gap := time.NewTimer(0)
	defer gap.Stop()
	calm := false
	for {
		if dirty && calm {
			if err := tell(st); err != nil {
				return err
			}
			dirty, calm = false, false
			gap.Reset(max(s.timing.gap, time.Duration(s.changes.subscribers())*s.timing.share))
		}
		select {
		case <-c.Request().Context().Done():
			return nil
		case <-s.closing:
			return nil
		case <-alive.C:
			if err := s.tick(c, st); err != nil {
				return err
			}
		case <-sub.dirty:
			dirty = true
		case <-gap.C:
			calm = true
		}
	}
}
