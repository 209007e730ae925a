package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Panels returns what is known of each table and direction of a site.
func (s *Service) Panels(ctx context.Context, site string) ([]backfill.Panel, error) {
	return s.Store.Panels(ctx, site)
}

// Panel returns what is known of one table and direction, or NotFound.
func (s *Service) Panel(ctx context.Context, site, table, from string) (*backfill.Panel, error) {
	return s.Store.Panel(ctx, site, table, from)
}

// PutTable adds or changes a table's configuration; with onlyNew it is a Conflict when
// the site has the table already.
func (s *Service) PutTable(ctx context.Context, a Account, site, table string, c control.TableChange, onlyNew bool) (*backfill.Table, error) {
	if err := a.needs(control.Admin, "configuring a table"); err != nil {
		return nil, err
	}
	if _, err := backfill.ParseTableName(table); err != nil {
		return nil, tableError(backfill.Invalid, err.Error())
	}
	_, err := s.Store.Table(ctx, site, table)
	added := backfill.CodeOf(err) == backfill.NotFound
	if onlyNew && !added {
		if err != nil {
			return nil, err
		}
		return nil, tableError(backfill.Conflict, "the site has this table already")
	}
	if err := s.made(ctx, a, site, table, &c); err != nil {
		return nil, err
	}
	t, err := s.Store.PutTable(ctx, a.Name, site, table, c)
	if err != nil || !added {
		return t, err
	}
	if problem := s.inspected(ctx, t); problem != "" {
		if err := s.Store.ForgetTable(ctx, a.Name, t.ID, problem); err != nil {
			return nil, err
		}
		return nil, tableError(backfill.Refused, problem)
	}
	return t, nil
}

// tableError is an error about the table's name, which stands in the address.
func tableError(code backfill.Code, message string) error {
	return &backfill.Error{Code: code, Message: message, Fields: []backfill.FieldError{{Field: "table", Message: message}}}
}

// RemoveTable takes a table out of a site.
func (s *Service) RemoveTable(ctx context.Context, a Account, site, table string) (*backfill.Table, error) {
	if err := a.needs(control.Admin, "removing a table"); err != nil {
		return nil, err
	}
	return s.Store.RemoveTable(ctx, a.Name, site, table)
}

// inspectFor is how long a new table's configuration waits for the agents to look
// at the table. Those that are away look later, and the conditions tell.
const inspectFor = 5 * time.Second

// inspected waits until both agents have looked at a new table, and returns why it
// cannot be synced, or "".
func (s *Service) inspected(ctx context.Context, t *backfill.Table) string {
	ctx, cancel := context.WithTimeout(ctx, inspectFor)
	defer cancel()
	for {
		looks, err := s.Store.Looks(ctx, t)
		if err != nil {
			return ""
		}
		waiting := false
		for _, l := range looks {
			if l.Problem != "" {
				return "side " + l.Side + ": " + l.Problem
			}
			waiting = waiting || l.Awaited
		}
		if !waiting {
			return ""
		}
		select {
		case <-ctx.Done():
			return ""
		case <-time.After(100 * time.Millisecond):
		}
	}
}

type operationsJSON struct {
	Create bool `json:"create"`
	Update bool `json:"update"`
	Delete bool `json:"delete"`
}

type tableJSON struct {
	Site           string         `json:"site"`
	Table          string         `json:"table"`
	Active         bool           `json:"active"`
	Operations     operationsJSON `json:"operations"`
	operationsJSON                // the same, flat, as PUT takes them
	CapturedFrom   []string       `json:"captured_from"`
	Conflict       *string        `json:"conflict"` // null unless captured from both
	ApplyOrder     int            `json:"apply_order"`
	Excluded       []string       `json:"excluded"`
	Mapping        *mappingJSON   `json:"mapping"` // null where both sides have the same columns
	UpdatedAt      time.Time      `json:"updated_at"`
}

func showTable(t *backfill.Table) tableJSON {
	ops := operationsJSON{t.Create, t.Update, t.Delete}
	return tableJSON{Site: t.Site, Table: t.Name, Active: t.Active, Operations: ops, operationsJSON: ops,
		CapturedFrom: orEmpty(t.CapturedFrom), Conflict: orNull(t.Conflicts()), ApplyOrder: t.ApplyOrder, Excluded: orEmpty(t.Excluded), Mapping: showMapping(t), UpdatedAt: t.UpdatedAt}
}

// panelJSON is one row of the monitoring panel: a table in one direction.
type panelJSON struct {
	tableJSON
	From              string         `json:"from"`
	To                string         `json:"to"`
	Key               []string       `json:"key"`
	SourceRows        *int64         `json:"source_rows"`
	ReceiverRows      *int64         `json:"receiver_rows"`
	SourceCountedAt   *time.Time     `json:"source_counted_at"`
	ReceiverCountedAt *time.Time     `json:"receiver_counted_at"`
	CountedAt         *time.Time     `json:"counted_at"` // of the older count
	Estimated         bool           `json:"estimated"`
	Capture           captureJSON    `json:"capture"`
	Lag               panelLagJSON   `json:"lag"`
	Stopped           *stoppedJSON   `json:"stopped"` // why the receiver does not apply the table's changes for now
	Backfill          panelOpenJSON  `json:"backfill"`
	RowBackfills      []panelRowJSON `json:"row_backfills"`
}

type captureJSON struct {
	OK       bool       `json:"ok"`
	Since    *time.Time `json:"since"`
	Problem  *string    `json:"problem"`
	Gap      *string    `json:"gap"`
	GapSince *time.Time `json:"gap_since"`
}

type stoppedJSON struct {
	Since  time.Time `json:"since"`
	Reason string    `json:"reason"`
}

type panelLagJSON struct {
	Waiting     int64      `json:"waiting"`
	Oldest      *time.Time `json:"oldest"`
	Held        int64      `json:"held"`
	Quarantined int64      `json:"quarantined"`
}

// panelOpenJSON is what the table's button shows: the open request, or whether
// one may be made.
type panelOpenJSON struct {
	State      *backfill.State      `json:"state"`
	ID         *int64               `json:"id"`
	Staged     int64                `json:"staged"`
	Percent    int                  `json:"percent"`
	CanRequest bool                 `json:"can_request"`
	Conditions []backfill.Condition `json:"conditions"`
	ConsoleURL *string              `json:"console_url"`
}

type panelRowJSON struct {
	ID    int64          `json:"id"`
	Key   backfill.Key   `json:"key"`
	State backfill.State `json:"state"`
}

func (s *Server) showPanel(p backfill.Panel) panelJSON {
	out := panelJSON{
		tableJSON: showTable(&p.Table), From: p.Direction.From, To: p.Direction.To, Key: orEmpty(p.Source.Key),
		SourceRows: p.Source.Rows, ReceiverRows: p.Receiver.Rows,
		SourceCountedAt: p.Source.CountedAt, ReceiverCountedAt: p.Receiver.CountedAt,
		CountedAt: older(p.Source.CountedAt, p.Receiver.CountedAt), Estimated: p.Source.Estimated || p.Receiver.Estimated,
		Capture:      captureJSON{p.Source.CaptureOK, p.Source.CaptureSince, orNull(p.Source.Problem), orNull(p.Source.Gap), p.Source.GapSince},
		Lag:          panelLagJSON{p.Waiting, p.Oldest, p.Held, p.Quarantined},
		Backfill:     panelOpenJSON{CanRequest: p.CanRequest(), Conditions: p.Conditions(false)},
		RowBackfills: []panelRowJSON{},
	}
	if p.Stopped != "" {
		out.Stopped = &stoppedJSON{*p.StoppedSince, p.Stopped}
	}
	if r := p.Open; r != nil {
		b := &out.Backfill
		b.State, b.ID, b.Staged, b.Percent, b.ConsoleURL = &r.State, &r.ID, r.Staged, r.Percent(), orNull(s.service.Console(r))
	}
	for _, r := range p.OpenRows {
		out.RowBackfills = append(out.RowBackfills, panelRowJSON{r.ID, r.Key, r.State})
	}
	return out
}

// older is the earlier of two times, nil unless both are known.
func older(a, b *time.Time) *time.Time {
	if a == nil || b == nil {
		return nil
	}
	if b.Before(*a) {
		return b
	}
	return a
}

func (s *Server) listTables(c echo.Context) error {
	all, err := s.service.Panels(c.Request().Context(), c.Param("site"))
	if err != nil {
		return err
	}
	return listAll(c, all, s.showPanel)
}

func (s *Server) putTable(c echo.Context) error {
	var in control.TableChange
	if err := decode(c, &in); err != nil {
		return err
	}
	t, err := s.service.PutTable(c.Request().Context(), accountOf(c), c.Param("site"), c.Param("table"), in, c.Request().Header.Get("If-None-Match") == "*")
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, showTable(t))
}

func (s *Server) deleteTable(c echo.Context) error {
	t, err := s.service.RemoveTable(c.Request().Context(), accountOf(c), c.Param("site"), c.Param("table"))
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, showTable(t))
}
