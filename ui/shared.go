package ui

import (
	"bytes"
	"errors"
	"net/http"
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
	key := string(a.Role) + " " + a.Rights.String() + " " + c.Request().URL.RequestURI()
	all := p.shared.part(key)
	part := all
	if all.personal.Load() {
		part = p.shared.part(a.Name + " " + key)
	}
	part.mu.Lock()
	defer part.mu.Unlock()
	if part.html != nil && p.Now().Before(part.until) && p.Changes.Last(part.topics) <= part.seen {
		return whole(c, http.StatusOK, part.html)
	}
	part.html = nil
	seen := p.Changes.Now()
	v, err := h(c, a)
	var to redirect
	if errors.As(err, &to) {
		return c.Redirect(http.StatusSeeOther, string(to))
	}
	if err != nil {
		status, v := p.failure(c, err)
		v.Account = a
		return p.render(c, status, v)
	}
	v.Account = a
	var b bytes.Buffer
	if err := p.templates[v.template].ExecuteTemplate(&b, "fragment", v); err != nil {
		return err
	}
	all.personal.Store(v.Personal)
	if !v.Events.None() && (part != all || !v.Personal) {
		part.html, part.topics, part.seen, part.until = b.Bytes(), v.Events, seen, p.Now().Add(sharedFor)
	}
	return whole(c, http.StatusOK, b.Bytes())
}
