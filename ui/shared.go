package ui

import (
	"bytes"
	"compress/gzip"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/api"
)

// shared keeps the changing parts of pages for as long as nothing they show has
// changed. When something does, every page that shows it asks for itself: of
// hundreds of those only the first costs anything.
type shared struct {
	mu    sync.Mutex
	parts map[string]*sharedPart
}

type sharedPart struct {
	personal atomic.Bool // what stood here last was for one person: each has a part of their own

	mu     sync.Mutex // held while it is made: the others wait for it
	html   []byte
	zipped []byte // the same, once somebody takes it so
	topics api.Topics
	seen   int64     // the last change before it was made
	until  time.Time // what ages by itself is made again
}

const (
	sharedMax = 2000
	sharedFor = 3 * time.Second
)

func (s *shared) part(key string) *sharedPart {
	s.mu.Lock()
	defer s.mu.Unlock()
	if part, ok := s.parts[key]; ok {
		return part
	}
	if len(s.parts) >= sharedMax || s.parts == nil {
		s.parts = map[string]*sharedPart{}
	}
	part := &sharedPart{}
	s.parts[key] = part
	return part
}

// fragment answers with the changing part of a page, as it was made for the last who
// asked for the same with the same role, or of a personal page under the same name,
// when that is still true.
func (p *pages) fragment(c echo.Context, a api.Account, h handler) error {
	status, html, zipped, err := p.fresh(c, a, h)
	var to redirect
	if errors.As(err, &to) {
		return c.Redirect(http.StatusSeeOther, string(to))
	}
	if err != nil {
		return err
	}
	// Only now, when nobody waits for the part any more: a slow browser holds up itself.
	if zipped != nil {
		c.Response().Header().Set("Content-Encoding", "gzip")
		html = zipped
	}
	return whole(c, status, html)
}

// fresh is the part that somebody asks for, compressed too if their browser takes it
// so and others may ask for it: that is done once for all, for what a part costs is
// then mostly its bytes on their way.
func (p *pages) fresh(c echo.Context, a api.Account, h handler) (status int, html, zipped []byte, err error) {
	key := string(a.Role) + " " + a.Rights.String() + " " + c.Request().URL.RequestURI()
	all := p.shared.part(key)
	part := all
	if all.personal.Load() {
		part = p.shared.part(a.Name + " " + key)
	}
	part.mu.Lock()
	defer part.mu.Unlock()
	if part.html == nil || !p.Now().Before(part.until) || p.Changes.Last(part.topics) > part.seen {
		part.html, part.zipped = nil, nil
		seen := p.Changes.Now()
		status = http.StatusOK
		v, err := h(c, a)
		var to redirect
		if errors.As(err, &to) {
			return 0, nil, nil, to
		}
		if err != nil {
			status, v = p.failure(c, err)
		}
		v.Account = a
		var b bytes.Buffer
		if err := p.templates[v.template].ExecuteTemplate(&b, "fragment", v); err != nil {
			return 0, nil, nil, err
		}
		if err == nil {
			all.personal.Store(v.Personal)
		}
		if err != nil || v.Events.None() || part == all && v.Personal {
			return status, b.Bytes(), nil, nil
		}
		part.html, part.topics, part.seen, part.until = b.Bytes(), v.Events, seen, p.Now().Add(sharedFor)
	}
	c.Response().Header().Add("Vary", "Accept-Encoding")
	if !strings.Contains(c.Request().Header.Get("Accept-Encoding"), "gzip") {
		return http.StatusOK, part.html, nil, nil
	}
	if part.zipped == nil {
		var b bytes.Buffer
		z, _ := gzip.NewWriterLevel(&b, gzip.BestSpeed) // the level is a valid one
		if _, err := z.Write(part.html); err != nil {
			return 0, nil, nil, err
		}
		if err := z.Close(); err != nil {
			return 0, nil, nil, err
		}
		part.zipped = b.Bytes()
	}
	return http.StatusOK, part.html, part.zipped, nil
}
