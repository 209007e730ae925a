package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

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
	if err := s.fitsKey(ctx, f); err != nil {
		return nil, err
	}
	all, err := list(ctx, f)
	if err != nil {
		return nil, err
	}
	return s.withColumns(ctx, all)
}

func (s *Service) withColumns(ctx context.Context, all []control.Entry) ([]Entry, error) {
	out := make([]Entry, len(all))
	for i, e := range all {
		out[i].Entry = e
		if e.Row == nil || e.LayoutID == 0 {
			continue
		}
		l, err := s.Layout(ctx, e.LayoutID)
		if err != nil {
			return nil, err
		}
		out[i].Columns = columnNames(l)
	}
	return out, nil
}

// fitsKey refuses a key with more or fewer values than the table's: its list would
// be empty, which says something else.
func (s *Service) fitsKey(ctx context.Context, f control.EntryFilter) error {
	if f.Key == nil || f.Table == "" {
		return nil
	}
	t, err := s.Store.Table(ctx, f.Site, f.Table)
	if err != nil {
		return err
	}
	for _, from := range t.CapturedFrom {
		p, err := s.Store.Panel(ctx, f.Site, f.Table, from)
		if err != nil {
			return err
		}
		if n := len(p.Source.Key); n > 0 && n != len(f.Key) {
			return wrongArity(p, len(f.Key))
		}
	}
	return nil
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

type entryJSON struct {
	Seq       int64        `json:"seq"`
	Table     string       `json:"table"`
	From      string       `json:"from"`
	Op        string       `json:"op"`
	Key       backfill.Key `json:"key"`
	Row       *rowJSON     `json:"row"`
	Request   *int64       `json:"request"` // the backfill it came from
	CreatedAt time.Time    `json:"created_at"`
	State     string       `json:"state"`
	Reason    string       `json:"reason"`
	AppliedAt *time.Time   `json:"applied_at"`
	Wish      *string      `json:"wish"` // retry or skip: asked for, and not done yet
	WishedBy  *string      `json:"wished_by"`
}

func showEntry(e Entry) entryJSON {
	out := entryJSON{Seq: e.Seq, Table: e.Table, From: e.From, Op: e.Op, Key: e.Key, Row: newRow(e.Columns, e.Row),
		CreatedAt: e.CreatedAt, State: e.State, Reason: e.Reason, AppliedAt: e.AppliedAt, Wish: orNull(e.Wish)}
	if e.Wish != "" {
		out.WishedBy = orNull(e.WishedBy)
	}
	if e.RequestID != 0 {
		out.Request = &e.RequestID
	}
	return out
}

func entryFilter(c echo.Context) control.EntryFilter {
	return control.EntryFilter{Site: c.Param("site"), Table: c.QueryParam("table"), From: c.QueryParam("from"),
		Key: c.QueryParams()["key"], Limit: limitOf(c) + 1}
}

func seqOf(e Entry) int64 { return e.Seq }

func (s *Server) listQueue(c echo.Context) error {
	f := entryFilter(c)
	f.State = c.QueryParam("state")
	var err error
	if f.After, err = positionOf(c); err != nil {
		return err
	}
	all, err := s.service.Queue(c.Request().Context(), f)
	if err != nil {
		return err
	}
	return listPage(c, all, seqOf, showEntry)
}

func (s *Server) listHistory(c echo.Context) error {
	f := entryFilter(c)
	f.Origin, f.State = c.QueryParam("origin"), c.QueryParam("state")
	var err error
	if f.Before, err = positionOf(c); err != nil {
		return err
	}
	all, err := s.service.History(c.Request().Context(), f)
	if err != nil {
		return err
	}
	return listPage(c, all, seqOf, showEntry)
}

// wish handles retry and skip, and answers 202: the receiving agent does it on its
// next cycle.
func wish(name string, do func(ctx context.Context, a Account, site string, seq int64) error) echo.HandlerFunc {
	return func(c echo.Context) error {
		seq, err := idOf(c, "seq")
		if err != nil {
			return err
		}
		if err := do(c.Request().Context(), accountOf(c), c.Param("site"), seq); err != nil {
			return err
		}
		return c.JSON(http.StatusAccepted, struct {
			Seq  int64  `json:"seq"`
			Wish string `json:"wish"`
		}{seq, name})
	}
}
