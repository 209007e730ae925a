package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
)

// Gates lists the gates of a site by name, with what was last measured.
func (s *Service) Gates(ctx context.Context, site string) ([]control.Gate, error) {
	if _, err := s.Store.Site(ctx, site); err != nil {
		return nil, err
	}
	return s.Store.Gates(ctx, site)
}

// GatesOf lists the gates that hold back backfills of a table.
func (s *Service) GatesOf(ctx context.Context, site, table string) ([]control.Gate, error) {
	return s.Store.GatesOf(ctx, site, table)
}

// PutGates adds or changes gates of a site; with only, all others are removed.
func (s *Service) PutGates(ctx context.Context, a Account, site string, gates []pace.Gate, only bool) error {
	if err := a.needs(control.Admin, "configuring gates"); err != nil {
		return err
	}
	return s.Store.PutGates(ctx, a.Name, site, gates, only)
}

// DeleteGate removes a gate.
func (s *Service) DeleteGate(ctx context.Context, a Account, site, name string) error {
	if err := a.needs(control.Admin, "configuring gates"); err != nil {
		return err
	}
	return s.Store.DeleteGate(ctx, a.Name, site, name)
}

type gateJSON struct {
	Name       string     `json:"name"`
	Side       string     `json:"side"`
	Table      *string    `json:"table"`
	Kind       pace.Kind  `json:"kind"`
	Limit      float64    `json:"limit"`
	URL        *string    `json:"url"`
	Query      *string    `json:"query"`
	MaxAge     float64    `json:"max_age"` // seconds
	State      string     `json:"state"`
	Open       bool       `json:"open"`
	Why        string     `json:"why"`
	Value      *float64   `json:"value"`
	MeasuredAt *time.Time `json:"measured_at"`
	Age        *float64   `json:"age"` // seconds
}

func showGate(g control.Gate) gateJSON {
	state, v := g.State()
	out := gateJSON{Name: g.Name, Side: g.Side, Table: orNull(g.Table), Kind: g.Kind, Limit: g.Limit, URL: orNull(g.URL), Query: orNull(g.Query),
		MaxAge: g.MaxAge, State: string(state), Open: v.Open, Why: v.Why, MeasuredAt: g.MeasuredAt}
	if out.MaxAge == 0 {
		out.MaxAge = pace.DefaultMaxAge.Seconds()
	}
	if r := g.Reading; r != nil {
		age := r.Age.Seconds()
		out.Age = &age
		if r.Problem == "" {
			out.Value = &r.Value
		}
	}
	return out
}

func (s *Server) listGates(c echo.Context) error {
	all, err := s.service.Gates(c.Request().Context(), c.Param("site"))
	if err != nil {
		return err
	}
	return listAll(c, all, showGate)
}

func (s *Server) replaceGates(c echo.Context) error {
	var in struct {
		Gates []pace.Gate `json:"gates"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	if err := s.service.PutGates(c.Request().Context(), accountOf(c), c.Param("site"), in.Gates, true); err != nil {
		return err
	}
	return s.listGates(c)
}

func (s *Server) putGate(c echo.Context) error {
	ctx, site, name := c.Request().Context(), c.Param("site"), c.Param("gate")
	var g pace.Gate
	if err := decode(c, &g); err != nil {
		return err
	}
	if g.Name != "" && g.Name != name {
		return fieldError(backfill.Invalid, "name", "is another than in the address: leave it out")
	}
	g.Name = name
	if err := s.service.PutGates(ctx, accountOf(c), site, []pace.Gate{g}, false); err != nil {
		return err
	}
	all, err := s.service.Gates(ctx, site)
	if err != nil {
		return err
	}
	for _, g := range all {
		if g.Name == name {
			return c.JSON(http.StatusOK, showGate(g))
		}
	}
	return backfill.Errorf(backfill.NotFound, "gate %q was removed meanwhile", name)
}

func (s *Server) deleteGate(c echo.Context) error {
	if err := s.service.DeleteGate(c.Request().Context(), accountOf(c), c.Param("site"), c.Param("gate")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}
