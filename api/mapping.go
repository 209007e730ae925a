package api

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
)

// tryFor is how long a mapping waits for the agents to look at it. It is not set
// unless both have.
const tryFor = 20 * time.Second

// sampleRows is how many rows a mapping is tried on.
const sampleRows = 10

// Tried is what a mapping makes of some rows of the source.
type Tried struct {
	Source *row.Layout
	Made   *row.Mapping
	Rows   []TriedRow
}

// TriedRow is a row of the source and what is made of it, or why nothing can be.
type TriedRow struct {
	Source  []*string `json:"source"`
	Result  []*string `json:"result"`
	Problem string    `json:"problem"`
}

// TryMapping checks a mapping against both sides, as setting it would, and tries it on
// some rows. The error lists everything that is wrong with it.
func (s *Service) TryMapping(ctx context.Context, a Account, site, table, from string, m backfill.Mapping) (*Tried, error) {
	if err := a.needs(control.Admin, "trying a mapping, which shows rows of the source,"); err != nil {
		return nil, err
	}
	return s.tryMapping(ctx, a, site, table, from, m, sampleRows)
}

func (s *Service) tryMapping(ctx context.Context, a Account, site, table, from string, m backfill.Mapping, sample int) (*Tried, error) {
	parsed, err := backfill.ParseTableName(table)
	if err != nil {
		return nil, err
	}
	if err := m.Check(); err != nil {
		return nil, err
	}
	d, err := s.Store.Direction(ctx, site, from)
	if err != nil {
		return nil, err
	}
	id, err := s.Store.StartTrial(ctx, a.Name, control.MappingTrial{Site: site, Source: d.From, Receiver: d.To,
		From: m.SourceOf(parsed.String()), To: m.TargetOf(parsed.String()), Mapping: m, Sample: sample})
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Store.EndTrial(context.WithoutCancel(ctx), id) }()
	t, err := s.tried(ctx, id)
	if err != nil {
		return nil, err
	}
	if len(t.Fields) > 0 {
		return nil, backfill.Unfit(t.Fields)
	}
	out := &Tried{Source: t.Layout, Made: t.Made}
	return out, json.Unmarshal(t.Rows, &out.Rows)
}

// tried waits for both agents.
func (s *Service) tried(ctx context.Context, id int64) (*control.MappingTrial, error) {
	for end := time.Now().Add(tryFor); ; {
		t, err := s.Store.Trial(ctx, id)
		if err != nil || t.Done() {
			return t, err
		}
		if time.Now().After(end) {
			waits := t.Receiver
			if t.Layout == nil || t.Made != nil {
				waits = t.Source
			}
			return nil, backfill.Errorf(backfill.Unavailable, "the mapping cannot be checked: the agent of %s has not answered within %s; nothing was changed", waits, tryFor)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// made checks the mapping of a change against both sides, unless it is empty, and notes
// in the change what the agents have made of it.
func (s *Service) made(ctx context.Context, a Account, site, table string, c *control.TableChange) error {
	if c.Mapping == nil && c.Excluded == nil {
		return nil
	}
	t, err := s.Store.Table(ctx, site, table)
	known := err == nil
	if err != nil && backfill.CodeOf(err) != backfill.NotFound {
		return err
	}
	if !known {
		t = &backfill.Table{}
	}
	if err := excluding(t, c); err != nil {
		return err
	}
	c.Checked = &control.Checked{Version: t.Version}
	if c.Mapping.Empty() {
		return nil
	}
	from := c.CapturedFrom
	if from == nil {
		if !known {
			return fieldError(backfill.Invalid, "captured_from", "name the side whose changes are sent")
		}
		from = t.CapturedFrom
	}
	if len(slices.Compact(slices.Sorted(slices.Values(from)))) != 1 {
		return backfill.Unfit([]backfill.FieldError{{Field: "mapping", Message: "a table with a mapping is captured from one side: set captured_from to that"}})
	}
	tried, err := s.tryMapping(ctx, a, site, table, from[0], *c.Mapping, 0)
	if err != nil {
		return err
	}
	c.Checked.Made, c.Checked.From = tried.Made, from[0]
	return nil
}

// excluding makes the mapping of a change that leaves columns out.
func excluding(t *backfill.Table, c *control.TableChange) error {
	if c.Excluded == nil {
		return nil
	}
	if c.Mapping != nil || t.Mapping != nil && !t.Mapping.Excludes() {
		return fieldError(backfill.Invalid, "excluded", "the table has a mapping: list the columns there, under drop")
	}
	c.Mapping = &backfill.Mapping{Drop: *c.Excluded}
	return nil
}

type mappingJSON struct {
	*backfill.Mapping
	Version int `json:"version"`
}

func showMapping(t *backfill.Table) *mappingJSON {
	if t.Mapping == nil {
		return nil
	}
	return &mappingJSON{t.Mapping, t.Version}
}

type triedJSON struct {
	Key  []string       `json:"key"`
	Data []triedRowJSON `json:"data"`
}

type triedRowJSON struct {
	Source  *rowJSON `json:"source"`
	Result  *rowJSON `json:"result"`
	Problem *string  `json:"problem"`
}

func (s *Server) tryMapping(c echo.Context) error {
	var in struct {
		From    string           `json:"from"`
		Mapping backfill.Mapping `json:"mapping"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	t, err := s.service.TryMapping(c.Request().Context(), accountOf(c), c.Param("site"), c.Param("table"), in.From, in.Mapping)
	if err != nil {
		return err
	}
	out := triedJSON{Key: t.Made.Key, Data: []triedRowJSON{}}
	source, result := columnNames(t.Source), columnNames(t.Made.Layout(nil))
	for _, r := range t.Rows {
		out.Data = append(out.Data, triedRowJSON{newRow(source, r.Source), newRow(result, r.Result), orNull(strings.TrimSpace(r.Problem))})
	}
	return c.JSON(http.StatusOK, out)
}
