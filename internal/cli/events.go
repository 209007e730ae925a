package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"mime"
	"net/http"
	"strings"
	"time"
)

// Pace of watching; variables so that tests need not wait.
var (
	pollEvery   = time.Second      // where events cannot be had
	firstPause  = time.Second / 2  // before a lost connection is tried again, doubled each time
	longestWait = 10 * time.Second // between two tries
	silence     = 45 * time.Second // without a byte after which an event stream counts as dead
)

// Watch yields a request as it is now and again when it changes, until the caller
// has seen enough or ctx ends. It lives through restarts of the API: an error that
// passes is yielded, and watching goes on. Only one that does not pass (see
// lasting) is the last thing it yields.
func (c *Client) Watch(ctx context.Context, id int64) iter.Seq2[*Backfill, error] {
	return func(yield func(*Backfill, error) bool) {
		w := watch{c: c, path: requestPath(id), yield: yield, events: true}
		for pause := firstPause; ; {
			if w.events {
				w.stream(ctx)
			}
			if w.enough || ctx.Err() != nil {
				return
			}
			// Where there are no events, or no more of them, reading tells how things are.
			raw, err := c.call(ctx, http.MethodGet, w.path, nil)
			if ctx.Err() != nil || !w.give(raw, err) || lasting(err) {
				return
			}
			wait := firstPause
			switch {
			case err != nil:
				wait, pause = pause, min(2*pause, longestWait)
			case !w.events:
				wait = pollEvery
			}
			if err == nil {
				pause = firstPause
			}
			if sleep(ctx, wait) != nil {
				return
			}
		}
	}
}

// lasting reports whether asking again cannot help.
func lasting(err error) bool {
	var lost *connectionError
	var p *Problem
	switch {
	case err == nil, errors.As(err, &lost):
		return false
	case errors.As(err, &p):
		return !p.temporary()
	}
	return true
}

type watch struct {
	c      *Client
	path   string
	yield  func(*Backfill, error) bool
	last   string // id of the last event seen
	events bool   // whether the API, and what lies between, can stream
	enough bool   // the caller stopped
}

// give yields an answer of the API.
func (w *watch) give(raw json.RawMessage, err error) bool {
	if err != nil {
		return w.yield(nil, err)
	}
	b, err := decode[*Backfill](raw)
	if err != nil {
		return w.yield(nil, err)
	}
	b.raw = raw
	return w.yield(b, nil)
}

// stream follows the request's events until the stream ends, for whatever reason.
func (w *watch) stream(ctx context.Context) {
	if !w.events {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := time.AfterFunc(silence, cancel)
	defer quiet.Stop()
	heard := false

	header := http.Header{"Accept": {"text/event-stream"}}
	if w.last != "" {
		header.Set("Last-Event-ID", w.last)
	}
	res, err := w.c.send(ctx, http.MethodGet, w.path+"/events", nil, header)
	if err != nil {
		var p *Problem
		w.events = !errors.As(err, &p) || p.temporary()
		return
	}
	defer res.Body.Close()
	if kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type")); kind != "text/event-stream" {
		w.events = false
		return
	}
	_ = readEvents(res.Body, func() { heard = true; quiet.Reset(silence) }, func(e event) bool {
		w.last = e.id
		if e.name != "backfill" {
			return true // "end", which the state says too, or of a later version
		}
		w.enough = !w.give(json.RawMessage(e.data), nil)
		return !w.enough
	})
	if ctx.Err() != nil && !heard {
		w.events = false // something in between holds the stream back
	}
}

// event is one server-sent event.
type event struct{ id, name, data string }

// maxEvent bounds the length of a line of an event.
const maxEvent = 1 << 20

// readEvents calls each for every event until it returns false or the stream ends,
// and line for every line, be it only a comment that keeps the connection open.
func readEvents(r io.Reader, line func(), each func(event) bool) error {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxEvent)
	var e event
	var data []string
	for s.Scan() {
		line()
		text := string(bytes.TrimSuffix(s.Bytes(), []byte("\r")))
		if text == "" {
			if data != nil {
				e.data = strings.Join(data, "\n")
				if !each(e) {
					return nil
				}
			}
			e.name, data = "", nil // the id stays, as the standard has it
			continue
		}
		name, value, _ := strings.Cut(text, ":")
		value = strings.TrimPrefix(value, " ")
		switch name {
		case "id":
			e.id = value
		case "event":
			e.name = value
		case "data":
			data = append(data, value)
		}
	}
	return s.Err()
}
