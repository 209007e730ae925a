// Package client speaks Backfill's HTTP API. Its types and the methods of Client are
// generated from the API's document. An answer that says why not is a *Problem; no
// answer at all is an *Unreachable.
package client

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
	"reflect"
	"strings"
	"time"
)

//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2 -config oapi-codegen.yaml ../openapi.yaml

// Client speaks the HTTP API.
type Client struct {
	base  string // the API's address, without a trailing slash
	token string
	http  *http.Client
}

// New returns a client of the API at an address such as http://127.0.0.1:8080.
func New(address, token string) (*Client, error) {
	u, err := url.Parse(address)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fmt.Errorf("the API's address %q: write it like http://127.0.0.1:8080", address)
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

// Answer is what the API answered.
type Answer[T any] struct {
	Value T
	Raw   json.RawMessage // as it came
}

// Page is one answer of a list.
type Page[T any] struct {
	Data       []T     `json:"data"`
	NextCursor *string `json:"next_cursor"` // nil on the last
	Revision   int64   `json:"revision"`    // of staged rows
}

// Pages reads a list answer by answer, until limit entries were read (0: all) or an
// error; read asks for the page after a cursor, with so many entries.
func Pages[T any](limit int, read func(cursor *Cursor, n *Limit) (Answer[Page[T]], error)) iter.Seq2[Answer[Page[T]], error] {
	return func(yield func(Answer[Page[T]], error) bool) {
		var cursor *Cursor
		for left := limit; ; {
			n := maxPage
			if limit > 0 {
				n = min(n, left)
			}
			a, err := read(cursor, &n)
			left -= len(a.Value.Data)
			if !yield(a, err) || err != nil || a.Value.NextCursor == nil || (limit > 0 && left <= 0) {
				return
			}
			cursor = a.Value.NextCursor
		}
	}
}

// maxPage is how many entries are asked for at once: rows can be wide.
const maxPage = 200

func (p *Problem) Error() string {
	switch {
	case p.Detail != nil && *p.Detail != "":
		return *p.Detail
	case p.Title != "":
		return p.Title
	}
	return fmt.Sprintf("the API answered %d %s", p.Status, http.StatusText(p.Status))
}

// Temporary reports whether the same request may succeed later.
func (p *Problem) Temporary() bool {
	return p.Status >= 500 || p.Status == http.StatusTooManyRequests || p.Status == http.StatusRequestTimeout
}

// Unreachable is a request that got no answer from the API.
type Unreachable struct {
	Address string
	Err     error
}

func (e *Unreachable) Error() string {
	return fmt.Sprintf("cannot reach the API at %s: %v", e.Address, e.Err)
}

func (e *Unreachable) Unwrap() error { return e.Err }

const (
	// callTimeout is longer than the API waits for a decision to be taken.
	callTimeout = time.Minute
	maxAnswer   = 64 << 20
	tries       = 3
)

// call sends one request and reads its answer. When the connection fails it tries
// again: that is safe for writes too, because each POST carries an Idempotency-Key
// that stays the same, and the others may be repeated.
func call[T any](ctx context.Context, c *Client, method, path string, params, body any) (a Answer[T], err error) {
	var payload []byte
	if body != nil {
		if payload, err = json.Marshal(body); err != nil {
			return a, err
		}
	}
	if query := queryOf(params); len(query) > 0 {
		path += "?" + query.Encode()
	}
	key := rand.Text()
	for try := 1; ; try++ {
		a.Raw, err = c.once(ctx, method, path, payload, key)
		var lost *Unreachable
		if !errors.As(err, &lost) || errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || try == tries {
			break
		}
		if err := sleep(ctx, time.Duration(try)*200*time.Millisecond); err != nil {
			return a, err
		}
	}
	if err == nil && len(a.Raw) > 0 {
		err = a.decode()
	}
	return a, err
}

func (a *Answer[T]) decode() error {
	if err := json.Unmarshal(a.Raw, &a.Value); err != nil {
		return fmt.Errorf("the API's answer cannot be read, its version may differ from this program's: %w", err)
	}
	return nil
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
		return nil, &Unreachable{c.base, err}
	case len(raw) > maxAnswer:
		return nil, fmt.Errorf("the answer to %s %s is longer than %d MiB: ask for less with limit", method, path, maxAnswer>>20)
	case len(raw) > 0 && !json.Valid(raw):
		return nil, fmt.Errorf("the API at %s answered with something else than JSON: is that Backfill's address?", c.base)
	}
	return bytes.TrimSpace(raw), nil
}

// send returns an answer of 200 to 299, or an error that is a *Problem or an
// *Unreachable.
func (c *Client) send(ctx context.Context, method, path string, payload []byte, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(payload))
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
		return nil, &Unreachable{c.base, err}
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

// address fills the {names} of a path, in their order.
func address(path string, params ...any) string {
	for _, p := range params {
		before, rest, _ := strings.Cut(path, "{")
		_, after, _ := strings.Cut(rest, "}")
		path = before + url.PathEscape(fmt.Sprint(p)) + after
	}
	return path
}

// optional is a body, or nil for none: a nil pointer would be sent as null.
func optional[T any](body *T) any {
	if body == nil {
		return nil
	}
	return body
}

// queryOf is what is set of the generated parameters, under the names in their tags.
func queryOf(params any) url.Values {
	v := reflect.ValueOf(params)
	if !v.IsValid() || v.IsNil() {
		return nil
	}
	v = v.Elem()
	query := url.Values{}
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("form"), ",")
		switch f := v.Field(i); {
		case f.Kind() == reflect.Slice:
			for j := range f.Len() {
				query.Add(name, fmt.Sprint(f.Index(j).Interface()))
			}
		case f.Kind() != reflect.Pointer:
			query.Set(name, fmt.Sprint(f.Interface()))
		case !f.IsNil():
			query.Set(name, fmt.Sprint(f.Elem().Interface()))
		}
	}
	return query
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
