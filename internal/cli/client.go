package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"backfill/internal/backfill"
)

// Client speaks the HTTP API.
type Client struct {
	base  string // the API's address, without a trailing slash
	token string
	http  *http.Client
}

// NewClient returns a client of the API at an address such as http://127.0.0.1:8080.
func NewClient(address, token string) (*Client, error) {
	u, err := url.Parse(address)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, usagef("the API's address %q: write it like http://127.0.0.1:8080", address)
	}
	u = &url.URL{Scheme: u.Scheme, Host: u.Host, Path: strings.TrimRight(u.Path, "/")}
	return &Client{
		base:  strings.TrimSuffix(u.String(), "/api/v1"),
		token: token,
		http: &http.Client{
			// A redirect would turn a POST into a GET and could carry the token elsewhere.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// Problem is an answer of the API that says why not (RFC 9457).
type Problem struct {
	Type    string                `json:"type"`
	Title   string                `json:"title"`
	Status  int                   `json:"status"`
	Detail  string                `json:"detail"`
	Errors  []backfill.FieldError `json:"errors"`
	Request int64                 `json:"request"` // the open request in the way
}

func (p *Problem) Error() string {
	switch {
	case p.Detail != "":
		return p.Detail
	case p.Title != "":
		return p.Title
	}
	return fmt.Sprintf("the API answered %d %s", p.Status, http.StatusText(p.Status))
}

// is reports whether the problem is of a kind.
func (p *Problem) is(code backfill.Code) bool {
	return strings.HasSuffix(p.Type, ":"+string(code)) || strings.HasSuffix(p.Type, "/"+string(code))
}

// temporary reports whether the same request may succeed later.
func (p *Problem) temporary() bool {
	return p.Status >= 500 || p.Status == http.StatusTooManyRequests || p.Status == http.StatusRequestTimeout
}

// connectionError is a request that got no answer from the API.
type connectionError struct {
	address string
	err     error
}

func (e *connectionError) Error() string {
	return fmt.Sprintf("cannot reach the API at %s: %v: is it running there? backfill dev or backfill api starts it, --api gives another address", e.address, e.err)
}

func (e *connectionError) Unwrap() error { return e.err }

const (
	// callTimeout is longer than the API waits for a decision to be taken.
	callTimeout = time.Minute
	maxAnswer   = 64 << 20
	tries       = 3
)

// call sends one request and returns the body of its answer. When the connection
// fails it tries again: that is safe for writes too, because each carries an
// Idempotency-Key that stays the same.
func (c *Client) call(ctx context.Context, method, path string, body any) (json.RawMessage, error) {
	var payload []byte
	if body != nil {
		var err error
		if payload, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	key := rand.Text()
	for try := 1; ; try++ {
		raw, err := c.once(ctx, method, path, payload, key)
		var lost *connectionError
		if !errors.As(err, &lost) || errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || try == tries {
			return raw, err
		}
		if err := sleep(ctx, time.Duration(try)*200*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

func (c *Client) once(ctx context.Context, method, path string, payload []byte, key string) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	header := http.Header{"Accept": {"application/json"}}
	if payload != nil {
		header.Set("Content-Type", "application/json")
	}
	if method == http.MethodPost {
		header.Set("Idempotency-Key", key)
	}
	res, err := c.send(ctx, method, path, payload, header)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, &connectionError{c.base, err}
	case len(raw) > maxAnswer:
		return nil, fmt.Errorf("the answer to %s %s is longer than %d MiB: ask for less with --limit", method, path, maxAnswer>>20)
	case len(raw) > 0 && !json.Valid(raw):
		return nil, fmt.Errorf("the API at %s answered with something else than JSON: is that Backfill's address?", c.base)
	}
	return bytes.TrimSpace(raw), nil
}

// send returns an answer of 200 to 299, or an error that is a *Problem or a
// *connectionError.
func (c *Client) send(ctx context.Context, method, path string, payload []byte, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+"/api/v1"+path, bytes.NewReader(payload))
	if err != nil {
		return nil, err
	}
	req.Header = header
	req.Header.Set("Authorization", "Bearer "+c.token)
	res, err := c.http.Do(req)
	if err != nil {
		// What wraps the cause repeats the address.
		var outer *url.Error
		var dial *net.OpError
		switch {
		case errors.As(err, &dial):
			err = dial.Err
		case errors.As(err, &outer):
			err = outer.Err
		}
		return nil, &connectionError{c.base, err}
	}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer res.Body.Close()
	return nil, problem(res)
}

// problem reads why the API did not do what was asked. A proxy in between answers
// without a problem document; then the status has to do.
func problem(res *http.Response) *Problem {
	p := &Problem{}
	if kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type")); kind == "application/problem+json" {
		if raw, err := io.ReadAll(io.LimitReader(res.Body, 1<<20)); err != nil || json.Unmarshal(raw, p) != nil {
			p = &Problem{}
		}
	}
	p.Status = res.StatusCode
	return p
}

// get reads one thing.
func get[T any](ctx context.Context, c *Client, path string) (T, error) {
	raw, err := c.call(ctx, http.MethodGet, path, nil)
	if err != nil {
		return *new(T), err
	}
	return decode[T](raw)
}

func decode[T any](raw json.RawMessage) (T, error) {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("the API's answer cannot be read, its version may differ from this program's: %w", err)
	}
	return v, nil
}

// page is one answer of a list, and what it said verbatim.
type page[T any] struct {
	Data       []T    `json:"data"`
	NextCursor string `json:"next_cursor"`
	Revision   int64  `json:"revision"` // of staged rows
	raw        json.RawMessage
}

// maxPage is how many entries are asked for at once: rows can be wide.
const maxPage = 200

// pages reads a list answer by answer until limit entries were read; 0 is no limit.
func pages[T any](ctx context.Context, c *Client, path string, query url.Values, limit int) iter.Seq2[page[T], error] {
	return func(yield func(page[T], error) bool) {
		for left := limit; ; {
			n := maxPage
			if limit > 0 {
				n = min(n, left)
			}
			query.Set("limit", fmt.Sprint(n))
			raw, err := c.call(ctx, http.MethodGet, path+"?"+query.Encode(), nil)
			var p page[T]
			if err == nil {
				p, err = decode[page[T]](raw)
				p.raw = raw
			}
			left -= len(p.Data)
			if !yield(p, err) || err != nil || p.NextCursor == "" || (limit > 0 && left <= 0) {
				return
			}
			query.Set("cursor", p.NextCursor)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
