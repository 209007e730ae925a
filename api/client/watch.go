package client

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

// Pace of watching; a variable so that tests need not wait.
var Pace = struct{ Poll, Pause, LongestPause, Silence time.Duration }{
	Poll:         time.Second,      // where events cannot be had
	Pause:        time.Second / 2,  // before a lost connection is tried again, doubled each time
	LongestPause: 10 * time.Second, // between two tries
	Silence:      45 * time.Second, // without a byte after which an event stream counts as dead
}

// Watch yields a request as it is now and again when it changes, until the caller
// has seen enough or ctx ends. It lives through restarts of the API: an error that
// passes is yielded, and watching goes on. Only one that does not pass (see
// Lasting) is the last thing it yields.
func (c *Client) Watch(ctx context.Context, id int64) iter.Seq2[Answer[Backfill], error] {
	return func(yield func(Answer[Backfill], error) bool) {
		w := watch{c: c, id: id, yield: yield, events: true}
		for pause := Pace.Pause; ; {
			if w.events {
				w.stream(ctx)
			}
			if w.enough || ctx.Err() != nil {
				return
			}
			// Where there are no events, or no more of them, reading tells how things are.
			a, err := c.GetBackfill(ctx, id)
			if ctx.Err() != nil || !yield(a, err) || Lasting(err) {
				return
			}
			wait := Pace.Pause
			switch {
			case err != nil:
				wait, pause = pause, min(2*pause, Pace.LongestPause)
			case !w.events:
				wait = Pace.Poll
			}
			if err == nil {
				pause = Pace.Pause
			}
			if sleep(ctx, wait) != nil {
				return
			}
		}
	}
}

// Lasting reports whether asking again cannot help.
func Lasting(err error) bool {
	var lost *Unreachable
	var p *Problem
	switch {
	case err == nil, errors.As(err, &lost):
		return false
	case errors.As(err, &p):
		return !p.Temporary()
	}
	return true
}

type watch struct {
	c      *Client
	id     int64
	yield  func(Answer[Backfill], error) bool
	last   string // id of the last event seen
	events bool   // whether the API, and what lies between, can stream
	enough bool   // the caller stopped
}

// stream follows the request's events until the stream ends, for whatever reason.
func (w *watch) stream(ctx context.Context) {
	if !w.events {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := time.AfterFunc(Pace.Silence, cancel)
	defer quiet.Stop()
	heard := false

	header := http.Header{"Accept": {"text/event-stream"}}
	if w.last != "" {
		header.Set("Last-Event-ID", w.last)
	}
	res, err := w.c.send(ctx, http.MethodGet, address("/api/v1/backfills/{id}/events", w.id), nil, header)
	if err != nil {
		var p *Problem
		w.events = !errors.As(err, &p) || p.Temporary()
		return
	}
	defer res.Body.Close()
	if kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type")); kind != "text/event-stream" {
		w.events = false
		return
	}
	_ = readEvents(res.Body, func() { heard = true; quiet.Reset(Pace.Silence) }, func(e event) bool {
		w.last = e.id
		if e.name != "backfill" {
			return true // "end", which the state says too, or of a later version
		}
		a := Answer[Backfill]{Raw: json.RawMessage(e.data)}
		w.enough = !w.yield(a, a.decode())
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
