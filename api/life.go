package api

import (
	"context"
	"slices"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// What can happen to a row, in the order in which it does.
const (
	RowStaged     = "staged"     // a backfill's walk read it
	RowApproved   = "approved"   // somebody approved the request
	RowRejected   = "rejected"   // somebody rejected the request
	RowSuperseded = "superseded" // a newer change overtook the staged row: it was not sent
	RowReleased   = "released"   // the staged row went into the queue
	RowPushed     = "pushed"     // a captured change went into the queue
	RowDropped    = "dropped"    // a captured change was not sent: the table or the operation was off
	RowHeld       = "held"       // the receiver waits for a row it depends on
	RowQuarantine = "quarantined"
	RowSkipped    = "skipped" // somebody gave the change up
	RowLost       = "lost"    // the other side's change of it won
	RowApplied    = "applied" // the receiver has it
)

// Happening is one thing that happened to a row.
type Happening struct {
	What    string
	At      *time.Time // nil: not known exactly, between the things before and after
	From    string     // the side it came from
	Seq     int64      // the change in the queue, 0 for none
	Op      string     // of the change
	Request int64      // the backfill, 0 for none
	By      string     // the person who decided, with how, when that was not the API
	Note    string     // the person's, or PostgreSQL's
	Row     []*string  // as it was read, on what it came with
	Columns []string
	order   int
}

// lifeLimit is how many changes and stagings of one row are told, the newest.
const lifeLimit = 200

// Life tells what happened to one row of a table, oldest first.
func (s *Service) Life(ctx context.Context, site, table string, key backfill.Key) ([]Happening, error) {
	table, err := s.resolve(ctx, site, table, "")
	if err != nil {
		return nil, err
	}
	life, err := s.Store.Life(ctx, site, table, key, lifeLimit)
	if err != nil {
		return nil, err
	}
	var out []Happening
	for _, stay := range life.Staged {
		more, err := s.stay(ctx, stay)
		if err != nil {
			return nil, err
		}
		out = append(out, more...)
	}
	entries, err := s.withColumns(ctx, life.Entries)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		out = append(out, passage(e)...)
	}
	slices.SortStableFunc(out, func(a, b Happening) int {
		if c := a.at().Compare(b.at()); c != 0 {
			return c
		}
		return a.order - b.order
	})
	return out, nil
}

func (h *Happening) at() time.Time {
	if h.At == nil {
		return time.Time{}
	}
	return *h.At
}

// stay is what happened to a row as one backfill had it staged, but for its release.
func (s *Service) stay(ctx context.Context, stay control.Stay) ([]Happening, error) {
	r := stay.Request
	h := Happening{What: RowStaged, At: r.WalkedAt, From: r.From, Request: r.ID, By: r.RequestedBy, Note: r.Note, Row: stay.Row.Row}
	if h.At == nil {
		h.At = r.StartedAt
	}
	if r.LayoutID != 0 {
		l, err := s.Layout(ctx, r.LayoutID)
		if err != nil {
			return nil, err
		}
		h.Columns = columnNames(l)
	}
	out := []Happening{h}
	if r.ReviewedAt != nil {
		decision := Happening{What: RowApproved, At: r.ReviewedAt, From: r.From, Request: r.ID, By: r.ReviewedBy, Note: r.ReviewNote, order: 1}
		if r.State == backfill.Rejected {
			decision.What = RowRejected
		}
		if r.ReviewedVia != "" {
			decision.By += " via Temporal"
		}
		out = append(out, decision)
	}
	if o := stay.Row.Overtaken; o != nil {
		at := later(r.ReviewedAt, &o.At)
		out = append(out, Happening{What: RowSuperseded, At: at, From: r.From, Request: r.ID, Seq: o.Seq, Op: o.Op, order: 2})
	}
	return out, nil
}

func later(a, b *time.Time) *time.Time {
	if a != nil && a.After(*b) {
		return a
	}
	return b
}

// passage is what happened to a change on its way.
func passage(e Entry) []Happening {
	first := Happening{What: RowPushed, At: &e.CreatedAt, From: e.From, Seq: e.Seq, Op: e.Op, Request: e.RequestID, Row: e.Row, Columns: e.Columns, order: 3}
	if e.RequestID != 0 {
		first.What = RowReleased
	}
	then := Happening{From: e.From, Seq: e.Seq, Op: e.Op, Request: e.RequestID, order: 4}
	switch e.State {
	case "dropped":
		first.What = RowDropped
		return []Happening{first}
	case "held", "quarantined", "skipped", "lost":
		then.What, then.At, then.Note = e.State, e.AsideAt, e.Reason
	case "applied":
		then.What, then.At = RowApplied, e.AppliedAt
	default:
		return []Happening{first}
	}
	return []Happening{first, then}
}

type happeningJSON struct {
	What    string     `json:"what"`
	At      *time.Time `json:"at"`
	From    string     `json:"from"`
	Seq     *int64     `json:"seq"`
	Op      *string    `json:"op"`
	Request *int64     `json:"request"`
	By      *string    `json:"by"`
	Note    string     `json:"note"`
	Row     *rowJSON   `json:"row"`
}

func (s *Server) rowLife(c echo.Context) error {
	all, err := s.service.Life(c.Request().Context(), c.Param("site"), c.Param("table"), c.QueryParams()["key"])
	if err != nil {
		return err
	}
	return listAll(c, all, func(h Happening) happeningJSON {
		out := happeningJSON{What: h.What, At: h.At, From: h.From, Op: orNull(h.Op), By: orNull(h.By), Note: h.Note, Row: newRow(h.Columns, h.Row)}
		if h.Seq != 0 {
			out.Seq = &h.Seq
		}
		if h.Request != 0 {
			out.Request = &h.Request
		}
		return out
	})
}
