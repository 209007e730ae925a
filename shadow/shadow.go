// Package shadow is for applications that are to move their reads from one side of
// a table to the other. It wraps the read of the old path: the application goes on
// with what that served, and a share of the reads is reported to Backfill, which
// compares it with what the other side holds.
//
//	reporter := shadow.New(shadow.Config{URL: "https://backfill.example", Token: token, Site: "shop", From: "a"})
//	defer reporter.Close(ctx)
//	order := shadow.Wrap(reporter, "public.orders", readOrder, func(id int64, o *Order) shadow.Read {
//		return shadow.Read{Key: []any{id}, Row: map[string]any{"note": o.Note, "total": o.Total}}
//	})
//
// A report never holds a read up: what cannot be taken at once is dropped and counted.
//
// What is reported has to be the row as it was committed when the read began. Do not
// wrap reads of a transaction that has written, and where the old path serves from a
// snapshot, a cache or a replica, use Report with the time that it is as old as.
package shadow

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Config says where reads are reported, and how many. Zero fields take their default.
type Config struct {
	URL   string // of the API, without /api/v1; no default
	Token string // of role requester; no default
	Site  string // no default
	From  string // the side that the old path reads from; no default

	Percent float64       // of the reads that are reported, 0 to 100; default 1
	Rate    float64       // the most reports a second, whatever Percent; default 50
	Queue   int           // reports that may wait to be sent; more are dropped. Default 1,000
	Every   time.Duration // how often they are sent; default 2 s
	Client  *http.Client  // default: one that gives up after 10 s
	OnError func(error)   // told why reports could not be sent; default: nobody is
}

// Read is what the old path served. Values may be of any type that JSON has; a text
// is read by PostgreSQL as the column's type, and so are numbers, as they are spelled.
type Read struct {
	Key []any          // in the order of the key's columns
	Row map[string]any // by column, those that were served; nil: there is no such row
}

// Counts is what became of reads so far.
type Counts struct {
	Sent    uint64 // taken by the API
	Dropped uint64 // chosen to be reported, and then not: too many, or the API was away
}

// Reporter sends reads to Backfill. It is safe for concurrent use; a nil one reports
// nothing.
type Reporter struct {
	cfg           Config
	queue         chan report
	stop, stopped chan struct{}
	once          sync.Once
	sent, dropped atomic.Uint64

	mu     sync.Mutex
	tokens float64 // reports that may be made now
	filled time.Time
}

type report struct {
	Table string         `json:"table"`
	Key   []any          `json:"key"`
	Row   map[string]any `json:"row"`
	AgeMS int64          `json:"age_ms"`
	began time.Time
}

// atOnce is how many reports are sent together.
const atOnce = 200

// New starts a reporter. Close ends it.
func New(c Config) *Reporter {
	if c.Percent == 0 {
		c.Percent = 1
	}
	if c.Rate == 0 {
		c.Rate = 50
	}
	if c.Queue == 0 {
		c.Queue = 1000
	}
	if c.Every == 0 {
		c.Every = 2 * time.Second
	}
	if c.Client == nil {
		c.Client = &http.Client{Timeout: 10 * time.Second}
	}
	r := &Reporter{cfg: c, queue: make(chan report, c.Queue), stop: make(chan struct{}), stopped: make(chan struct{}), tokens: max(c.Rate, 1), filled: time.Now()}
	go r.run()
	return r
}

// Counts tells what became of reads so far.
func (r *Reporter) Counts() Counts {
	if r == nil {
		return Counts{}
	}
	return Counts{Sent: r.sent.Load(), Dropped: r.dropped.Load()}
}

// Close sends what waits, until ctx ends, and ends the reporter.
func (r *Reporter) Close(ctx context.Context) error {
	if r == nil {
		return nil
	}
	r.once.Do(func() { close(r.stop) })
	select {
	case <-r.stopped:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Wrap makes a read that serves what the old one does, and reports a share of it.
// describe says what was served of a key, for those reads that are reported; it must
// not keep the value. Reads that fail are not reported.
func Wrap[K, V any](r *Reporter, table string, read func(context.Context, K) (V, error), describe func(K, V) Read) func(context.Context, K) (V, error) {
	if r == nil {
		return read
	}
	return func(ctx context.Context, key K) (V, error) {
		began := time.Now()
		v, err := read(ctx, key)
		if err == nil && r.chosen() {
			r.offer(table, began, func() Read { return describe(key, v) })
		}
		return v, err
	}
}

// Report reports one read, if it is chosen; for those who cannot wrap theirs. What it
// served was true at the time given, or later.
func (r *Reporter) Report(table string, began time.Time, read Read) {
	if r != nil && r.chosen() {
		r.offer(table, began, func() Read { return read })
	}
}

// chosen draws whether a read is reported.
func (r *Reporter) chosen() bool { return rand.Float64()*100 < r.cfg.Percent }

// offer puts a read into the queue, or drops it.
func (r *Reporter) offer(table string, began time.Time, describe func() Read) {
	defer func() {
		if p := recover(); p != nil { // the application's read was served; its description must not undo that
			r.drop(1, fmt.Errorf("describe a read of %s: %v", table, p))
		}
	}()
	if len(r.queue) == cap(r.queue) || !r.allowed() {
		r.dropped.Add(1)
		return
	}
	read := describe()
	select {
	case r.queue <- report{Table: table, Key: read.Key, Row: read.Row, began: began}:
	default:
		r.dropped.Add(1)
	}
}

// allowed takes a token of the bucket that Rate fills.
func (r *Reporter) allowed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.tokens = min(r.tokens+now.Sub(r.filled).Seconds()*r.cfg.Rate, max(r.cfg.Rate, 1))
	r.filled = now
	if r.tokens < 1 {
		return false
	}
	r.tokens--
	return true
}

func (r *Reporter) drop(n int, err error) {
	r.dropped.Add(uint64(n))
	if r.cfg.OnError != nil && err != nil {
		r.cfg.OnError(err)
	}
}

// run sends what is in the queue, every now and then, until it is stopped.
func (r *Reporter) run() {
	defer close(r.stopped)
	tick := time.NewTicker(r.cfg.Every)
	defer tick.Stop()
	for {
		select {
		case <-r.stop:
			r.flush()
			return
		case <-tick.C:
			r.flush()
		}
	}
}

func (r *Reporter) flush() {
	for {
		var batch []report
		for len(batch) < atOnce && len(r.queue) > 0 { // it alone takes from the queue
			batch = append(batch, <-r.queue)
		}
		if len(batch) == 0 {
			return
		}
		taken, err := r.send(batch)
		r.sent.Add(uint64(taken))
		if taken < len(batch) {
			r.drop(len(batch)-taken, err)
		}
	}
}

// send posts reports. What the API does not take is not sent again: newer reads tell
// as much.
func (r *Reporter) send(batch []report) (taken int, err error) {
	for i := range batch {
		batch[i].AgeMS = time.Since(batch[i].began).Milliseconds()
	}
	body, err := json.Marshal(map[string]any{"site": r.cfg.Site, "from": r.cfg.From, "reads": batch})
	if err != nil {
		return 0, fmt.Errorf("report reads: %w", err)
	}
	target, err := url.JoinPath(r.cfg.URL, "api/v1/shadow-reads")
	if err != nil {
		return 0, fmt.Errorf("report reads: %w", err)
	}
	req, err := http.NewRequest(http.MethodPost, target, bytes.NewReader(body))
	if err != nil {
		return 0, fmt.Errorf("report reads: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+r.cfg.Token)
	req.Header.Set("Content-Type", "application/json")
	res, err := r.cfg.Client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("report reads: %w", err)
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if err != nil {
		return 0, fmt.Errorf("report reads: %w", err)
	}
	if res.StatusCode != http.StatusAccepted {
		return 0, fmt.Errorf("report reads: the API answers %s: %s", res.Status, strings.TrimSpace(string(answer)))
	}
	var a struct {
		Accepted int `json:"accepted"`
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return 0, fmt.Errorf("report reads: %w", err)
	}
	return a.Accepted, nil
}
