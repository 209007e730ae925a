package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/control"
)

// Site is a site and what waits in each direction.
type Site struct {
	control.Site
	Lag []control.Lag
}

// Sites lists all sites by name.
func (s *Service) Sites(ctx context.Context) ([]Site, error) {
	all, err := s.Store.Sites(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]Site, len(all))
	for i := range all {
		out[i].Site = all[i]
		if out[i].Lag, err = s.Store.Lag(ctx, all[i].Name); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Site returns one site, or NotFound.
func (s *Service) Site(ctx context.Context, name string) (*Site, error) {
	site, err := s.Store.Site(ctx, name)
	if err != nil {
		return nil, err
	}
	lag, err := s.Store.Lag(ctx, name)
	return &Site{Site: *site, Lag: lag}, err
}

// CreateSite records a site and its two sides.
func (s *Service) CreateSite(ctx context.Context, a Account, name string, sides [2]string) (*Site, error) {
	if err := a.needs(control.Admin, "creating a site"); err != nil {
		return nil, err
	}
	if err := s.Store.CreateSite(ctx, a.Name, name, sides); err != nil {
		return nil, err
	}
	return s.Site(ctx, name)
}

// NewEpoch declares a new beginning for a site after a restore or a failover.
func (s *Service) NewEpoch(ctx context.Context, a Account, site, note string) (*Site, error) {
	if err := a.needs(control.Admin, "opening a new epoch"); err != nil {
		return nil, err
	}
	if err := s.Store.NewEpoch(ctx, a.Name, site, note); err != nil {
		return nil, err
	}
	return s.Site(ctx, site)
}

type siteJSON struct {
	Name      string     `json:"name"`
	Epoch     int        `json:"epoch"`
	CreatedAt time.Time  `json:"created_at"`
	Sides     []sideJSON `json:"sides"`
	Lag       []lagJSON  `json:"lag"`
}

type sideJSON struct {
	Name     string     `json:"name"`
	Agent    *string    `json:"agent"`
	SeenAt   *time.Time `json:"seen_at"`
	Database *string    `json:"database"`
	Problem  *string    `json:"problem"`
}

type lagJSON struct {
	From      string     `json:"from"`
	To        string     `json:"to"`
	Waiting   int64      `json:"waiting"`
	Oldest    *time.Time `json:"oldest"`
	AppliedAt *time.Time `json:"applied_at"`
}

func showSite(s Site) siteJSON {
	out := siteJSON{Name: s.Name, Epoch: s.Epoch, CreatedAt: s.CreatedAt, Sides: []sideJSON{}, Lag: []lagJSON{}}
	for _, x := range s.Sides {
		out.Sides = append(out.Sides, sideJSON{x.Name, orNull(x.Agent), x.SeenAt, orNull(x.Database), orNull(x.Problem)})
	}
	for _, l := range s.Lag {
		out.Lag = append(out.Lag, lagJSON{l.From, l.To, l.Waiting, l.Oldest, l.AppliedAt})
	}
	return out
}

func (s *Server) listSites(c echo.Context) error {
	all, err := s.service.Sites(c.Request().Context())
	if err != nil {
		return err
	}
	return listAll(c, all, showSite)
}

func (s *Server) getSite(c echo.Context) error {
	site, err := s.service.Site(c.Request().Context(), c.Param("site"))
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, showSite(*site))
}

func (s *Server) createSite(c echo.Context) error {
	var in struct {
		Name  string    `json:"name"`
		Sides [2]string `json:"sides"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	site, err := s.service.CreateSite(c.Request().Context(), accountOf(c), in.Name, in.Sides)
	if err != nil {
		return err
	}
	c.Response().Header().Set(echo.HeaderLocation, prefix+"/sites/"+site.Name)
	return c.JSON(http.StatusCreated, showSite(*site))
}

func (s *Server) newEpoch(c echo.Context) error {
	var in struct {
		Note string `json:"note"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	site, err := s.service.NewEpoch(c.Request().Context(), accountOf(c), c.Param("site"), in.Note)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, showSite(*site))
}
