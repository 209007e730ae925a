package api

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
)

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

// rowJSON is a row as an object by column, in the order of the columns; values are
// PostgreSQL's text, or null.
type rowJSON struct {
	columns []string
	values  []*string
}

// newRow is nil, and so null, when there is no row.
func newRow(columns []string, values []*string) *rowJSON {
	if values == nil || len(columns) != len(values) {
		return nil
	}
	return &rowJSON{columns, values}
}

func (r *rowJSON) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, column := range r.columns {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := json.Marshal(column)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(r.values[i])
		if err != nil {
			return nil, err
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

type stagedJSON struct {
	N          int64           `json:"n"`
	Key        backfill.Key    `json:"key"`
	Row        *rowJSON        `json:"row"`
	Effect     backfill.Effect `json:"effect"`
	Receiver   *rowJSON        `json:"receiver"`
	Changed    []string        `json:"changed"` // columns an overwrite would change
	Superseded bool            `json:"superseded"`
}

func showStaged(columns []string, r control.StagedRow) stagedJSON {
	return stagedJSON{N: r.N, Key: r.Key, Row: newRow(columns, r.Row), Effect: r.Effect, Receiver: newRow(columns, r.Receiver),
		Changed: Changed(columns, r), Superseded: r.SupersededBy != nil}
}

// Changed names the columns in which a staged row differs from the receiver's.
func Changed(columns []string, r control.StagedRow) []string {
	out := []string{}
	if len(r.Receiver) != len(r.Row) || len(columns) != len(r.Row) {
		return out
	}
	for i, column := range columns {
		a, b := r.Row[i], r.Receiver[i]
		if (a == nil) != (b == nil) || a != nil && *a != *b {
			out = append(out, column)
		}
	}
	return out
}

func (s *Server) listRows(c echo.Context) error {
	id, err := idOf(c, "id")
	if err != nil {
		return err
	}
	after, err := positionOf(c)
	if err != nil {
		return err
	}
	rows, err := s.service.Rows(c.Request().Context(), id, backfill.Effect(c.QueryParam("effect")), after, limitOf(c))
	if err != nil {
		return err
	}
	out := struct {
		page[stagedJSON]
		Revision int64 `json:"revision"`
	}{page[stagedJSON]{Data: []stagedJSON{}}, rows.Revision}
	for _, r := range rows.Rows {
		out.Data = append(out.Data, showStaged(rows.Columns(), r))
	}
	if rows.More {
		next := cursor(c, rows.Rows[len(rows.Rows)-1].N)
		out.NextCursor = &next
	}
	return c.JSON(http.StatusOK, out)
}
