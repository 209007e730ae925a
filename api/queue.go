package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

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
}

func showEntry(e Entry) entryJSON {
	out := entryJSON{Seq: e.Seq, Table: e.Table, From: e.From, Op: e.Op, Key: e.Key, Row: newRow(e.Columns, e.Row),
		CreatedAt: e.CreatedAt, State: e.State, Reason: e.Reason, AppliedAt: e.AppliedAt}
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

func (s *Server) retryChange(c echo.Context) error { return wish(c, "retry", s.service.Retry) }
func (s *Server) skipChange(c echo.Context) error  { return wish(c, "skip", s.service.Skip) }

// wish answers 202: the receiving agent does it on its next cycle.
func wish(c echo.Context, name string, do func(ctx context.Context, a Account, site string, seq int64) error) error {
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
