// Package api is the HTTP API: JSON under /api/v1, server-sent events, health,
// metrics, and the document that describes it all.
package api

import (
	"context"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
)

// Account is who asks, and what it may do.
type Account struct {
	control.Identity
	Address string // of the client, without its port

	// Role is the one on the site that the request is about, and for what is of no one
	// site the one on every site. An account of some sites has none elsewhere.
	Role control.Role
}

// needs is Forbidden unless the account's role covers the one needed.
func (a Account) needs(role control.Role, what string) error {
	switch {
	case a.Role.Covers(role):
		return nil
	case a.Role == "":
		return backfill.Errorf(backfill.Forbidden, "%s needs role %s on every site, %s has %s", what, role, a.Name, a.Rights)
	}
	return backfill.Errorf(backfill.Forbidden, "%s needs role %s, %s has %s", what, role, a.Name, a.Role)
}

// On is the account with the role it has on a site. To whoever has none there, the
// site does not exist.
func (a Account) On(site string) (Account, error) {
	if a.Role = a.At(site); a.Role == "" {
		return a, backfill.Errorf(backfill.NotFound, "no site %q", site)
	}
	return a, nil
}

// anywhere are the addresses that are of no one site, and show an account of some
// sites no more than those.
var anywhere = []string{"/", "/sites", "/sites/*", "/backfills", "/backfills/*", "/reconciliations", "/reconciliations/*",
	"/shadow-reads", "/certificate-key", "/audit", "/events"}

// Place is the account with the role it has where a request goes: path is the route's
// pattern, and param its parameters. What is of another site is NotFound, as if it
// were not there.
func (s *Service) Place(ctx context.Context, a Account, path string, param func(string) string) (Account, error) {
	if a.Sites == nil {
		return a, nil
	}
	path = strings.TrimPrefix(path, prefix)
	kind := ""
	switch {
	case strings.HasPrefix(path, "/sites/:site"):
		return a.On(param("site"))
	case strings.HasPrefix(path, "/backfills/:id"):
		kind = "request"
	case strings.HasPrefix(path, "/reconciliations/:id"):
		kind = "reconciliation"
	case a.Role != "" || slices.Contains(anywhere, path):
		return a, nil
	default:
		return a, backfill.Errorf(backfill.Forbidden, "this address needs a role on every site, %s has %s", a.Name, a.Rights)
	}
	id, err := strconv.ParseInt(param("id"), 10, 64)
	if err != nil {
		return a, backfill.Errorf(backfill.NotFound, "no %s %.100q", kind, param("id"))
	}
	site, err := s.Store.SiteOf(ctx, control.Event{Kind: kind, ID: id})
	if err != nil {
		return a, err
	}
	if a, err = a.On(site); err != nil {
		return a, backfill.Errorf(backfill.NotFound, "no %s %d", kind, id)
	}
	return a, nil
}

// Service is what the API and the web pages do, with the rules of who may do it.
// It is safe for concurrent use; its fields are set before the first call.
type Service struct {
	Store *control.Store
	Runs  Runs        // the workflow engine, which may be away
	Log   *zap.Logger // no default

	// PublicURL is where people reach this process, without a trailing slash. It
	// goes into the workflow console's details. Default "": no such link.
	PublicURL string
	// ConsoleURL is the base of the workflow engine's web console, without a
	// trailing slash. Default "": no links to it.
	ConsoleURL string
	// Namespace is the one the workflows run in. Default "default".
	Namespace string

	engine  engineState
	layouts sync.Map // id → *row.Layout; a recorded layout never changes
}

// Layout returns a recorded layout.
func (s *Service) Layout(ctx context.Context, id int64) (*row.Layout, error) {
	if l, ok := s.layouts.Load(id); ok {
		return l.(*row.Layout), nil
	}
	l, err := s.Store.Layout(ctx, id)
	if err != nil {
		return nil, err
	}
	s.layouts.Store(id, l)
	return l, nil
}

func columnNames(l *row.Layout) []string {
	names := make([]string, len(l.Columns))
	for i, c := range l.Columns {
		names[i] = c.Name
	}
	return names
}

// Console is the address of a request's workflow in the engine's web console, or "".
func (s *Service) Console(r *backfill.Request) string { return s.console(r.WorkflowID()) }

func (s *Service) console(workflowID string) string {
	if s.ConsoleURL == "" {
		return ""
	}
	namespace := s.Namespace
	if namespace == "" {
		namespace = "default"
	}
	return s.ConsoleURL + "/namespaces/" + url.PathEscape(namespace) + "/workflows/" + url.PathEscape(workflowID)
}

// ReviewURL is the address of the page where a request is read and decided, or "".
func (s *Service) ReviewURL(id int64) string {
	if s.PublicURL == "" {
		return ""
	}
	return s.PublicURL + "/backfills/" + strconv.FormatInt(id, 10)
}

// maxNote is the longest note, in characters: it travels through the workflow engine.
const maxNote = 4000

func checkNote(note string) error {
	switch {
	case utf8.RuneCountInString(note) > maxNote:
		return fieldError(backfill.Invalid, "note", "is longer than "+strconv.Itoa(maxNote)+" characters")
	case !storable(note):
		return fieldError(backfill.Invalid, "note", "holds characters that cannot be stored")
	}
	return nil
}

// storable reports whether PostgreSQL can hold s as text.
func storable(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

func fieldError(code backfill.Code, field, message string) error {
	return &backfill.Error{Code: code, Message: field + ": " + message, Fields: []backfill.FieldError{{Field: field, Message: message}}}
}
