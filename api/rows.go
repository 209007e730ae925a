package api

import (
	"bytes"
	"encoding/json"
	"net/http"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

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
