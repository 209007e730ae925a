package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
)

// Rows is a page of a request's staged rows.
type Rows struct {
	Revision int64       // of the staged set, what a decision is bound to
	Layout   *row.Layout // of Row; nil when there are no rows
	Result   *row.Layout // of Receiver and of Result, which is what a mapping makes; Layout without one
	Rows     []control.StagedRow
	More     bool  // there are rows after the last of these
	Position int64 // how many rows of the effect come before these
}

// RowsFilter says which staged rows are wanted. At most one of After, Position,
// FromKey and Key is given.
type RowsFilter struct {
	Effect   backfill.Effect // "" means all; backfill.Superseded the overtaken ones
	After    int64           // the rows after this staged position
	Position int64           // the rows after so many of the effect
	FromKey  backfill.Key    // the rows from where this key stands
	Key      backfill.Key    // the row of this key alone
	Limit    int
}

// Columns names the columns of Row in order.
func (r *Rows) Columns() []string { return columnsOf(r.Layout) }

// ResultColumns names the columns of Receiver and Result in order.
func (r *Rows) ResultColumns() []string { return columnsOf(r.Result) }

func columnsOf(l *row.Layout) []string {
	if l == nil {
		return nil
	}
	return columnNames(l)
}

// Rows returns staged rows in key order. Keys are placed by PostgreSQL.
func (s *Service) Rows(ctx context.Context, id int64, f RowsFilter) (*Rows, error) {
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
	if out.Layout, err = s.Layout(ctx, r.LayoutID); err != nil {
		return nil, err
	}
	if out.Result = out.Layout; r.ResultLayoutID != 0 {
		if out.Result, err = s.Layout(ctx, r.ResultLayoutID); err != nil {
			return nil, err
		}
	}
	after, limit := f.After, f.Limit
	key := f.FromKey
	if key == nil {
		key = f.Key
	}
	switch {
	case key != nil:
		if len(key) != len(out.Layout.Key) {
			return nil, fieldError(backfill.Invalid, "key", fmt.Sprintf("the key is (%s), %d values: got %d", strings.Join(out.Layout.Key, ", "), len(out.Layout.Key), len(key)))
		}
		var exact bool
		if after, exact, err = s.Store.StagedKey(ctx, id, out.Layout, key); err != nil {
			return nil, err
		}
		if f.Key != nil {
			if limit = 0; exact {
				limit = 1
			}
		}
	case f.Position > 0:
		if after, err = s.Store.StagedAt(ctx, id, f.Effect, f.Position); err != nil {
			return nil, err
		}
	}
	if out.Position, err = s.Store.StagedRank(ctx, id, f.Effect, after); err != nil {
		return nil, err
	}
	if limit == 0 {
		return out, nil
	}
	out.Rows, err = s.Store.StagedRows(ctx, id, f.Effect, after, limit+1)
	out.Rows, out.More = cut(out.Rows, limit)
	if f.Key != nil {
		out.More = false
		if len(out.Rows) == 1 && !slices.Equal(out.Rows[0].Key, f.Key) {
			out.Rows = nil // the row has another effect
		}
	}
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
	Result     *rowJSON        `json:"result"`  // what a mapping makes of the row, null without one
	Problem    *string         `json:"problem"` // why it cannot
	Changed    []string        `json:"changed"` // columns an overwrite would change
	Superseded bool            `json:"superseded"`
	Overtaken  *overtakingJSON `json:"superseded_by"` // by which change, while history has it
}

type overtakingJSON struct {
	Seq   int64     `json:"seq"`
	Op    string    `json:"op"`
	At    time.Time `json:"at"`
	State string    `json:"state"`
}

func showStaged(columns, result []string, r control.StagedRow) stagedJSON {
	return stagedJSON{N: r.N, Key: r.Key, Row: newRow(columns, r.Row), Effect: r.Effect, Receiver: newRow(result, r.Receiver),
		Result: newRow(result, r.Result), Problem: orNull(r.Problem), Changed: Changed(result, r), Superseded: r.SupersededBy != nil, Overtaken: (*overtakingJSON)(r.Overtaken)}
}

// Changed names the columns in which a staged row, or what a mapping makes of it,
// differs from the receiver's.
func Changed(columns []string, r control.StagedRow) []string {
	out := []string{}
	sent := r.Sent()
	if len(r.Receiver) != len(sent) || len(columns) != len(sent) {
		return out
	}
	for i, column := range columns {
		a, b := sent[i], r.Receiver[i]
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
	f := RowsFilter{Effect: backfill.Effect(c.QueryParam("effect")), FromKey: c.QueryParams()["from_key"], Key: c.QueryParams()["key"], Limit: limitOf(c)}
	if f.After, err = positionOf(c); err != nil {
		return err
	}
	if given := c.QueryParam("position"); given != "" {
		if f.Position, err = strconv.ParseInt(given, 10, 64); err != nil {
			return fieldError(backfill.Invalid, "position", "is no whole number")
		}
	}
	if f.After > 0 {
		f.Position, f.FromKey = 0, nil // where the list began
	}
	if count(f.Position > 0, f.FromKey != nil, f.Key != nil) > 1 {
		return fieldError(backfill.Invalid, "position", "give one of position, from_key and key")
	}
	rows, err := s.service.Rows(c.Request().Context(), id, f)
	if err != nil {
		return err
	}
	out := struct {
		page[stagedJSON]
		Revision int64 `json:"revision"`
		Position int64 `json:"position"`
	}{page[stagedJSON]{Data: []stagedJSON{}}, rows.Revision, rows.Position}
	for _, r := range rows.Rows {
		out.Data = append(out.Data, showStaged(rows.Columns(), rows.ResultColumns(), r))
	}
	if rows.More {
		next := cursor(c, rows.Rows[len(rows.Rows)-1].N)
		out.NextCursor = &next
	}
	return c.JSON(http.StatusOK, out)
}

func count(conditions ...bool) (n int) {
	for _, c := range conditions {
		if c {
			n++
		}
	}
	return n
}
