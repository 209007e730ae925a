package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// ShadowReport is what the old path served of a key, as it is reported.
type ShadowReport struct {
	Table string                     `json:"table"`
	Key   json.RawMessage            `json:"key"`
	Row   map[string]json.RawMessage `json:"row"` // by column, those that were served; nil: there was no such row
	AgeMS *int64                     `json:"age_ms"`
}

// unknownAge is how old a read may be whose age is not told.
const unknownAge = time.Minute

// ReportReads stores reads of an application to be judged, and returns how many were
// taken: those of a table of which too many wait already are not.
func (s *Service) ReportReads(ctx context.Context, a Account, site, from string, reports []ShadowReport) (taken int64, err error) {
	if err := a.needs(control.Requester, "reporting reads"); err != nil {
		return 0, err
	}
	panels := map[string]*backfill.Panel{}
	columns := map[string][]string{}
	reads := make([]control.ShadowRead, len(reports))
	var direction int32
	for i, r := range reports {
		p := panels[r.Table]
		if p == nil {
			if p, err = s.Store.Panel(ctx, site, r.Table, from); err != nil {
				return 0, err
			}
			if !p.Table.Captures(from) || p.Source.LayoutID == 0 {
				return 0, backfill.Errorf(backfill.Refused, "reads of %s from %s cannot be judged: it is not captured there, or its agent has not looked at the table yet", p.Table.Name, from)
			}
			l, err := s.Layout(ctx, p.Source.LayoutID)
			if err != nil {
				return 0, err
			}
			panels[r.Table], columns[r.Table], direction = p, columnNames(l), p.Direction.ID
		}
		if reads[i], err = r.read(p, columns[r.Table]); err != nil {
			return 0, err
		}
	}
	return s.Store.ReportReads(ctx, direction, reads, false)
}

// read checks a report against the table's columns.
func (r *ShadowReport) read(p *backfill.Panel, columns []string) (control.ShadowRead, error) {
	key, err := parseKey(p, r.Key)
	if err != nil {
		return control.ShadowRead{}, err
	}
	read := control.ShadowRead{TableID: p.Table.ID, Key: key, Found: r.Row != nil, Columns: []string{}, Values: []*string{}, Age: unknownAge}
	if r.AgeMS != nil {
		read.Age = time.Duration(*r.AgeMS) * time.Millisecond
	}
	// In the table's order, and each is looked for once: what is left is not of the table.
	for _, name := range columns {
		raw, ok := r.Row[name]
		if !ok {
			continue
		}
		text, problem := valueText(raw)
		if problem != "" {
			return read, fieldError(backfill.Invalid, "row."+name, problem)
		}
		read.Columns, read.Values = append(read.Columns, name), append(read.Values, text)
		delete(r.Row, name)
	}
	for name := range r.Row {
		return read, fieldError(backfill.Invalid, "row."+name, fmt.Sprintf("is no column of %s that is synced", p.Table.Name))
	}
	return read, nil
}

// valueText is the text of a reported value, for PostgreSQL to read as the column's
// type: numbers keep their spelling, objects and arrays stay JSON.
func valueText(raw json.RawMessage) (text *string, problem string) {
	s := string(bytes.TrimSpace(raw))
	switch {
	case s == "null":
		return nil, ""
	case s[0] == '"':
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, "is no text"
		}
	}
	if !storable(s) {
		return nil, "holds characters that no text in PostgreSQL can hold"
	}
	return &s, ""
}

func (s *Server) reportReads(c echo.Context) error {
	var in struct {
		Site  string         `json:"site"`
		From  string         `json:"from"`
		Reads []ShadowReport `json:"reads"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	a, err := accountOf(c).On(in.Site)
	if err != nil {
		return err
	}
	taken, err := s.service.ReportReads(c.Request().Context(), a, in.Site, in.From, in.Reads)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusAccepted, map[string]int64{"accepted": taken, "dropped": int64(len(in.Reads)) - taken})
}

// Shadow is how the shadow reads of a table stand, and how they went.
type Shadow struct {
	*backfill.Cutover
	Step   time.Duration // of the points
	Points []control.ShadowPoint
	Odd    []control.OddRead // the last that mismatched, or could not be judged
}

const (
	shadowPoints = 60
	oddReads     = 20
)

// Shadow returns how the shadow reads of a table stand and went within the window of
// its soak.
func (s *Service) Shadow(ctx context.Context, site, table, from string) (*Shadow, error) {
	c, err := s.Store.Cutover(ctx, site, table, from)
	if err != nil {
		return nil, err
	}
	out := &Shadow{Cutover: c, Step: max(c.Policy.Soak/shadowPoints, time.Minute).Truncate(time.Minute)}
	if out.Points, err = s.Store.ShadowCourse(ctx, c.Panel.Direction, c.Panel.Table.ID, c.Now.Add(-c.Policy.Soak), out.Step); err != nil {
		return nil, err
	}
	out.Odd, err = s.Store.OddReads(ctx, c.Panel.Direction, c.Panel.Table.ID, oddReads)
	return out, err
}

type shadowPointJSON struct {
	At time.Time `json:"at"`
	backfill.ShadowCounts
	Rate float64 `json:"rate"`
}

type oddReadJSON struct {
	N              int64        `json:"n"`
	At             time.Time    `json:"at"`
	Sampled        bool         `json:"sampled"`
	Key            backfill.Key `json:"key"`
	Verdict        string       `json:"verdict"`
	Problem        string       `json:"problem"`
	Reconciliation *int64       `json:"reconciliation"`
}

func (s *Server) getShadow(c echo.Context) error {
	v, err := s.service.Shadow(c.Request().Context(), c.Param("site"), c.Param("table"), c.QueryParam("from"))
	if err != nil {
		return err
	}
	points, odd := make([]shadowPointJSON, len(v.Points)), make([]oddReadJSON, len(v.Odd))
	for i, p := range v.Points {
		points[i] = shadowPointJSON{p.At, p.ShadowCounts, p.Rate()}
	}
	for i, o := range v.Odd {
		odd[i] = oddReadJSON{o.N, o.At, o.Sampled, o.Key, o.Verdict, o.Problem, o.Run}
	}
	return c.JSON(http.StatusOK, struct {
		soakJSON
		Step   int64             `json:"step_seconds"`
		Points []shadowPointJSON `json:"points"`
		Odd    []oddReadJSON     `json:"odd"`
	}{showSoak(v.Cutover), int64(v.Step / time.Second), points, odd})
}

// soakJSON is how the shadow reads of a table stand.
type soakJSON struct {
	Site      string                `json:"site"`
	Table     string                `json:"table"`
	From      string                `json:"from"`
	Began     *time.Time            `json:"began"`
	Since     *time.Time            `json:"since"`
	Reads     backfill.ShadowCounts `json:"reads"`
	Rate      float64               `json:"rate"`
	Bound     *float64              `json:"bound"`
	Objective float64               `json:"objective"`
}

func showSoak(c *backfill.Cutover) soakJSON {
	out := soakJSON{Site: c.Panel.Direction.Site, Table: c.Panel.Table.Name, From: c.Panel.Direction.From, Began: c.Soak.Began, Reads: c.Soak.ShadowCounts, Rate: c.Soak.Rate(), Objective: c.Policy.Objective}
	if c.Soak.Began != nil {
		out.Since, out.Bound = &c.Soak.Since, &c.Soak.Bound
	}
	return out
}
