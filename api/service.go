// Package api is the HTTP API: JSON under /api/v1, server-sent events, health,
// metrics, and the document that describes it all.
package api

import (
	"context"
	"errors"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
)

// Account is who asks, and what it may do.
type Account struct {
	Name string
	Role control.Role
}

// needs is Forbidden unless the account's role covers the one needed.
func (a Account) needs(role control.Role, what string) error {
	if a.Role.Covers(role) {
		return nil
	}
	return backfill.Errorf(backfill.Forbidden, "%s needs role %s, %s has %s", what, role, a.Name, a.Role)
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
	// SecondPerson refuses an approval by the account that asked for the
	// backfill. Default false.
	SecondPerson bool

	layouts sync.Map // id → *row.Layout; a recorded layout never changes
}

// Site is a site and what waits in each direction.
type Site struct {
	control.Site
	Lag []control.Lag
}

// Sites lists all sites by name.
func (s *Service) Sites(ctx context.Context) ([]Site, error) {
	all, err := s.Store.Sites(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]Site, len(all))
	for i := range all {
		out[i].Site = all[i]
		if out[i].Lag, err = s.Store.Lag(ctx, all[i].Name); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Site returns one site, or NotFound.
func (s *Service) Site(ctx context.Context, name string) (*Site, error) {
	site, err := s.Store.Site(ctx, name)
	if err != nil {
		return nil, err
	}
	lag, err := s.Store.Lag(ctx, name)
	return &Site{Site: *site, Lag: lag}, err
}

// CreateSite records a site and its two sides.
func (s *Service) CreateSite(ctx context.Context, a Account, name string, sides [2]string) (*Site, error) {
	if err := a.needs(control.Admin, "creating a site"); err != nil {
		return nil, err
	}
	if err := s.Store.CreateSite(ctx, a.Name, name, sides); err != nil {
		return nil, err
	}
	return s.Site(ctx, name)
}

// Panels returns what is known of each table and direction of a site.
func (s *Service) Panels(ctx context.Context, site string) ([]backfill.Panel, error) {
	return s.Store.Panels(ctx, site)
}

// Panel returns what is known of one table and direction, or NotFound.
func (s *Service) Panel(ctx context.Context, site, table, from string) (*backfill.Panel, error) {
	return s.Store.Panel(ctx, site, table, from)
}

// PutTable adds or changes a table's configuration.
func (s *Service) PutTable(ctx context.Context, a Account, site, table string, c control.TableChange) (*backfill.Table, error) {
	if err := a.needs(control.Admin, "configuring a table"); err != nil {
		return nil, err
	}
	if c.CapturedFrom == nil {
		// The store takes the sides of a known table from here when they are to stay.
		if t, err := s.Store.Table(ctx, site, table); err == nil {
			c.CapturedFrom = t.CapturedFrom
		}
	}
	return s.Store.PutTable(ctx, a.Name, site, table, c)
}

// RequestInput is what somebody asks to be backfilled.
type RequestInput struct {
	Site  string
	Table string // any spelling
	From  string // the source side
	// Key is the one row wanted: a JSON array in key order, or an object by column,
	// of strings, numbers and booleans. Empty: the whole table.
	Key  []byte
	Mode string // "" or "full"; "row" with a key
	Note string
}

// RequestBackfill records a request and returns at once; the workflow is started
// now when the engine answers, and by a sweep when it does not. It is a Conflict
// that names the open request when there is one, and Refused with every condition
// that does not hold.
func (s *Service) RequestBackfill(ctx context.Context, a Account, in RequestInput) (*backfill.Request, error) {
	if err := a.needs(control.Requester, "requesting a backfill"); err != nil {
		return nil, err
	}
	if err := checkNote(in.Note); err != nil {
		return nil, err
	}
	p, err := s.Store.Panel(ctx, in.Site, in.Table, in.From)
	if err != nil {
		return nil, err
	}
	mode, err := modeOf(in)
	if err != nil {
		return nil, err
	}
	var key backfill.Key
	if mode == backfill.ModeRow && len(p.Source.Key) > 0 {
		if key, err = parseKey(p, in.Key); err != nil {
			return nil, err
		}
	}
	if err := alreadyOpen(p, mode, key); err != nil {
		return nil, err
	}
	if err := refused(p.Conditions(mode == backfill.ModeRow)); err != nil {
		return nil, err
	}
	if mode == backfill.ModeRow && key == nil {
		return nil, backfill.Errorf(backfill.Refused, "%s has no key known yet: the agent of %s has to look at it first", p.Table.Name, in.From)
	}
	r, err := s.Store.CreateRequest(ctx, control.NewRequest{
		Direction: p.Direction.ID, TableID: p.Table.ID, Key: key, Mode: mode, By: a.Name, Note: in.Note,
	})
	if err != nil {
		return nil, err
	}
	s.start(ctx, r)
	return r, nil
}

func modeOf(in RequestInput) (backfill.Mode, error) {
	row := len(in.Key) > 0
	switch mode := backfill.Mode(in.Mode); {
	case in.Mode == "differences":
		return "", fieldError(backfill.Refused, "mode", "differences is not available yet: use full")
	case in.Mode != "" && mode != backfill.ModeFull && mode != backfill.ModeRow:
		return "", fieldError(backfill.Invalid, "mode", "use full or row")
	case mode == backfill.ModeFull && row:
		return "", fieldError(backfill.Invalid, "mode", "full is for the whole table, but a key was given: leave one of them out")
	case mode == backfill.ModeRow && !row:
		return "", fieldError(backfill.Invalid, "key", "mode row needs the key of the row")
	case row:
		return backfill.ModeRow, nil
	}
	return backfill.ModeFull, nil
}

func alreadyOpen(p *backfill.Panel, mode backfill.Mode, key backfill.Key) error {
	open := p.Open
	if mode == backfill.ModeRow {
		open = nil
		if i := slices.IndexFunc(p.OpenRows, func(r *backfill.Request) bool { return slices.Equal(r.Key, key) }); i >= 0 {
			open = p.OpenRows[i]
		}
	}
	if open == nil {
		return nil
	}
	e := backfill.Errorf(backfill.Conflict, "request %d is open for this table and direction: decide or cancel it first", open.ID)
	e.Open = open.ID
	return e
}

func refused(conditions []backfill.Condition) error {
	unmet := backfill.Unmet(conditions)
	if len(unmet) == 0 {
		return nil
	}
	e := backfill.Errorf(backfill.Refused, "the table cannot be backfilled now: %s", unmet[0].Message)
	for _, c := range unmet {
		e.Fields = append(e.Fields, backfill.FieldError{Field: c.Name, Message: c.Message})
	}
	return e
}

// startTimeout bounds how long a request waits for the workflow engine.
const startTimeout = 2 * time.Second

func (s *Service) start(ctx context.Context, r *backfill.Request) {
	// The request is recorded: a caller that goes away now must not keep it from starting.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
	defer cancel()
	if err := s.Runs.Start(ctx, r, s.ReviewURL(r.ID)); err != nil {
		s.Log.Warn("the workflow was not started; the next sweep will", zap.Int64("request", r.ID), zap.String("workflow", r.WorkflowID()), zap.Error(err))
	}
}

// Backfills lists requests newest first. A site, table or side that does not
// exist is NotFound rather than an empty list.
func (s *Service) Backfills(ctx context.Context, f control.RequestFilter) ([]*backfill.Request, error) {
	var err error
	if f.Table, err = s.resolve(ctx, f.Site, f.Table, f.From); err != nil {
		return nil, err
	}
	return s.Store.Requests(ctx, f)
}

// resolve checks the parts of a filter that are given and returns the table in
// the spelling it is stored in.
func (s *Service) resolve(ctx context.Context, site, table, from string) (string, error) {
	if site != "" {
		if _, err := s.Store.Site(ctx, site); err != nil {
			return "", err
		}
		if from != "" {
			if _, err := s.Store.Direction(ctx, site, from); err != nil {
				return "", err
			}
		}
		if table != "" {
			t, err := s.Store.Table(ctx, site, table)
			if err != nil {
				return "", err
			}
			return t.Name, nil
		}
	}
	if table == "" {
		return "", nil
	}
	t, err := backfill.ParseTableName(table)
	return t.String(), err
}

// Backfill returns one request, or NotFound.
func (s *Service) Backfill(ctx context.Context, id int64) (*backfill.Request, error) {
	return s.Store.Request(ctx, id)
}

// Rows is a page of a request's staged rows.
type Rows struct {
	Revision int64       // of the staged set, what a decision is bound to
	Layout   *row.Layout // of Row and Receiver; nil when there are no rows
	Rows     []control.StagedRow
	More     bool // there are rows after the last of these
}

// Columns names the columns of Row and Receiver in order.
func (r *Rows) Columns() []string {
	if r.Layout == nil {
		return nil
	}
	return columnNames(r.Layout)
}

// Rows returns up to limit staged rows after position after, in key order; effect
// "" means all.
func (s *Service) Rows(ctx context.Context, id int64, effect backfill.Effect, after int64, limit int) (*Rows, error) {
	// The revision is read before the rows: rows that change in between make a
	// decision on it a Conflict, never a decision on rows that nobody saw.
	r, err := s.Store.Request(ctx, id)
	if err != nil {
		return nil, err
	}
	out := &Rows{Revision: r.Revision}
	if r.LayoutID == 0 {
		return out, nil
	}
	if out.Layout, err = s.layout(ctx, r.LayoutID); err != nil {
		return nil, err
	}
	out.Rows, err = s.Store.StagedRows(ctx, id, effect, after, limit+1)
	out.Rows, out.More = cut(out.Rows, limit)
	return out, err
}

// cut drops what was read beyond limit only to learn that there is more.
func cut[T any](list []T, limit int) ([]T, bool) {
	if len(list) > limit {
		return list[:limit], true
	}
	return list, false
}

func (s *Service) layout(ctx context.Context, id int64) (*row.Layout, error) {
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

// Decision is what a person decides about the staged rows of a request.
type Decision struct {
	Revision      int64 // of the staged set that was read
	Note          string
	SkipIdentical bool // approve all but the rows the receiver holds already
}

// Approve lets the staged rows be released. It is a Conflict, and changes nothing,
// unless the request awaits review at just that revision.
func (s *Service) Approve(ctx context.Context, a Account, id int64, d Decision) (*backfill.Request, error) {
	if err := a.needs(control.Reviewer, "approving"); err != nil {
		return nil, err
	}
	if err := checkNote(d.Note); err != nil {
		return nil, err
	}
	return s.change(ctx, id, func(r *backfill.Request) error {
		if s.SecondPerson && r.RequestedBy == a.Name {
			return backfill.Errorf(backfill.Forbidden, "request %d was asked for by %s: another reviewer has to approve it", id, a.Name)
		}
		return r.Decidable(d.Revision)
	}, func(ctx context.Context, r *backfill.Request) error { return s.Runs.Approve(ctx, r, a.Name, d) })
}

// Reject closes a request and sends nothing. The note must say why.
func (s *Service) Reject(ctx context.Context, a Account, id int64, d Decision) (*backfill.Request, error) {
	if err := a.needs(control.Reviewer, "rejecting"); err != nil {
		return nil, err
	}
	if strings.TrimSpace(d.Note) == "" {
		return nil, &backfill.Error{Code: backfill.Invalid, Message: "a rejection needs a note that says why",
			Fields: []backfill.FieldError{{Field: "note", Message: "is empty"}}}
	}
	if err := checkNote(d.Note); err != nil {
		return nil, err
	}
	return s.change(ctx, id, func(r *backfill.Request) error { return r.Decidable(d.Revision) },
		func(ctx context.Context, r *backfill.Request) error { return s.Runs.Reject(ctx, r, a.Name, d) })
}

// Pause holds a walk or a release at its next page or batch.
func (s *Service) Pause(ctx context.Context, a Account, id int64, note string) (*backfill.Request, error) {
	return s.hold(ctx, a, id, note, "pausing", func(r *backfill.Request) error { return r.Pausable(true) }, s.Runs.Pause)
}

// Resume lets a paused request go on.
func (s *Service) Resume(ctx context.Context, a Account, id int64, note string) (*backfill.Request, error) {
	return s.hold(ctx, a, id, note, "resuming", func(r *backfill.Request) error { return r.Pausable(false) }, s.Runs.Resume)
}

// Cancel ends an open request. What was released stays released.
func (s *Service) Cancel(ctx context.Context, a Account, id int64, note string) (*backfill.Request, error) {
	return s.hold(ctx, a, id, note, "cancelling", (*backfill.Request).Cancellable, s.Runs.Cancel)
}

func (s *Service) hold(ctx context.Context, a Account, id int64, note, what string, possible func(*backfill.Request) error,
	run func(context.Context, *backfill.Request, string, string) error) (*backfill.Request, error) {
	if err := a.needs(control.Requester, what); err != nil {
		return nil, err
	}
	if err := checkNote(note); err != nil {
		return nil, err
	}
	return s.change(ctx, id, possible, func(ctx context.Context, r *backfill.Request) error { return run(ctx, r, a.Name, note) })
}

// change asks the request's workflow to do what the request's state allows. The
// workflow decides; asking the state first gives a plain answer while it is away.
func (s *Service) change(ctx context.Context, id int64, possible func(*backfill.Request) error,
	run func(context.Context, *backfill.Request) error) (*backfill.Request, error) {
	r, err := s.Store.Request(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := possible(r); err != nil {
		return nil, err
	}
	if err := run(ctx, r); err != nil {
		if !errors.Is(err, errNoRun) {
			return nil, err
		}
		// The run may have ended since the state was read.
		if r, err := s.Store.Request(ctx, id); err == nil {
			if err := possible(r); err != nil {
				return nil, err
			}
		}
		return nil, err
	}
	return s.Store.Request(ctx, id)
}

// Entry is one change in the queue or in history, and the columns of its row.
type Entry struct {
	control.Entry
	Columns []string // nil when the change carries no row
}

// Queue lists the changes of a site that the receiver has not applied, oldest first.
func (s *Service) Queue(ctx context.Context, f control.EntryFilter) ([]Entry, error) {
	return s.entries(ctx, f, s.Store.Queue)
}

// History lists the acknowledged changes of a site, newest first.
func (s *Service) History(ctx context.Context, f control.EntryFilter) ([]Entry, error) {
	return s.entries(ctx, f, s.Store.History)
}

func (s *Service) entries(ctx context.Context, f control.EntryFilter,
	list func(context.Context, control.EntryFilter) ([]control.Entry, error)) ([]Entry, error) {
	var err error
	if f.Table, err = s.resolve(ctx, f.Site, f.Table, f.From); err != nil {
		return nil, err
	}
	all, err := list(ctx, f)
	if err != nil {
		return nil, err
	}
	out := make([]Entry, len(all))
	for i, e := range all {
		out[i].Entry = e
		if e.Row == nil || e.LayoutID == 0 {
			continue
		}
		l, err := s.layout(ctx, e.LayoutID)
		if err != nil {
			return nil, err
		}
		out[i].Columns = columnNames(l)
	}
	return out, nil
}

func columnNames(l *row.Layout) []string {
	names := make([]string, len(l.Columns))
	for i, c := range l.Columns {
		names[i] = c.Name
	}
	return names
}

// Retry asks the receiving agent to try a change again that it has set aside.
func (s *Service) Retry(ctx context.Context, a Account, site string, seq int64) error {
	return s.wish(ctx, a, site, seq, "retry", "retrying a change")
}

// Skip asks the receiving agent to give up a change that it has set aside.
func (s *Service) Skip(ctx context.Context, a Account, site string, seq int64) error {
	return s.wish(ctx, a, site, seq, "skip", "skipping a change")
}

func (s *Service) wish(ctx context.Context, a Account, site string, seq int64, wish, what string) error {
	if err := a.needs(control.Reviewer, what); err != nil {
		return err
	}
	if _, err := s.Store.Site(ctx, site); err != nil {
		return err
	}
	return s.Store.Wish(ctx, site, seq, wish, a.Name)
}

// Audit lists what was decided and configured, newest first, entries with an id
// below before (0: from the newest); site "" means all.
func (s *Service) Audit(ctx context.Context, site string, before int64, limit int) ([]control.AuditEntry, error) {
	if _, err := s.resolve(ctx, site, "", ""); err != nil {
		return nil, err
	}
	return s.Store.Audit(ctx, site, before, limit)
}

// Console is the address of a request's workflow in the engine's web console, or "".
func (s *Service) Console(r *backfill.Request) string {
	if s.ConsoleURL == "" {
		return ""
	}
	namespace := s.Namespace
	if namespace == "" {
		namespace = "default"
	}
	return s.ConsoleURL + "/namespaces/" + url.PathEscape(namespace) + "/workflows/" + url.PathEscape(r.WorkflowID())
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
