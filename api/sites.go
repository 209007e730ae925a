package api

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Site is a site and what waits in each direction.
type Site struct {
	control.Site
	Lag      []control.Lag
	Aside    control.Aside
	Standing []Standstill // what is away, and what stands still by that
}

// Sites lists the sites that an account has a role on, by name.
func (s *Service) Sites(ctx context.Context, a Account) ([]Site, error) {
	all, err := s.Store.Sites(ctx)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(x control.Site) bool { return a.At(x.Name) == "" })
	out := make([]Site, len(all))
	for i := range all {
		out[i].Site = all[i]
		if err := s.fill(ctx, &out[i]); err != nil {
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
	out := &Site{Site: *site}
	return out, s.fill(ctx, out)
}

func (s *Service) fill(ctx context.Context, site *Site) (err error) {
	if site.Lag, err = s.Store.Lag(ctx, site.Name); err != nil {
		return err
	}
	if site.Aside, err = s.Store.Aside(ctx, site.Name); err != nil {
		return err
	}
	site.Standing, err = s.Standing(ctx, &site.Site)
	return err
}

// Aside counts the changes of a site that its receivers have set aside.
func (s *Service) Aside(ctx context.Context, site string) (control.Aside, error) {
	return s.Store.Aside(ctx, site)
}

// SetSecondPerson says whether whoever asks for a backfill of a site may approve it too.
func (s *Service) SetSecondPerson(ctx context.Context, a Account, site string, second bool) (*Site, error) {
	if err := a.needs(control.Admin, "changing a site"); err != nil {
		return nil, err
	}
	if err := s.Store.SetSecondPerson(ctx, a.Name, site, second); err != nil {
		return nil, err
	}
	return s.Site(ctx, site)
}

// CreateSite records a site and its two sides.
func (s *Service) CreateSite(ctx context.Context, a Account, name string, sides [2]string, inOne bool) (*Site, error) {
	if err := a.needs(control.Admin, "creating a site"); err != nil {
		return nil, err
	}
	create := s.Store.CreateSite
	if inOne {
		create = s.Store.CreateSiteInOne
	}
	if err := create(ctx, a.Name, name, sides); err != nil {
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
	Second    bool       `json:"second_person"`
	InOne     bool       `json:"one_database"`
	Sides     []sideJSON `json:"sides"`
	Lag       []lagJSON  `json:"lag"`
	Aside     asideJSON  `json:"aside"`

	Standstill []Standstill `json:"standstill"`
}

type asideJSON struct {
	Held        int64 `json:"held"`
	Quarantined int64 `json:"quarantined"`
	Skipped     int64 `json:"skipped"`
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
	Outbox    int64      `json:"outbox"`
	OutboxAt  *time.Time `json:"outbox_at"`
	Oldest    *time.Time `json:"oldest"`
	AppliedAt *time.Time `json:"applied_at"`
}

func showSite(s Site) siteJSON {
	out := siteJSON{Name: s.Name, Epoch: s.Epoch, CreatedAt: s.CreatedAt, Second: s.SecondPerson, InOne: s.OneDatabase, Sides: []sideJSON{}, Lag: []lagJSON{}, Aside: asideJSON(s.Aside), Standstill: orEmpty(s.Standing)}
	for _, x := range s.Sides {
		out.Sides = append(out.Sides, sideJSON{x.Name, orNull(x.Agent), x.SeenAt, orNull(x.Database), orNull(x.Problem)})
	}
	for _, l := range s.Lag {
		out.Lag = append(out.Lag, lagJSON{l.From, l.To, l.Waiting, l.Outbox, l.OutboxAt, l.Oldest, l.AppliedAt})
	}
	return out
}

func (s *Server) listSites(c echo.Context) error {
	all, err := s.service.Sites(c.Request().Context(), accountOf(c))
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
		InOne bool      `json:"one_database"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	site, err := s.service.CreateSite(c.Request().Context(), accountOf(c), in.Name, in.Sides, in.InOne)
	if err != nil {
		return err
	}
	c.Response().Header().Set(echo.HeaderLocation, prefix+"/sites/"+site.Name)
	return c.JSON(http.StatusCreated, showSite(*site))
}

func (s *Server) changeSite(c echo.Context) error {
	var in struct {
		Second *bool `json:"second_person"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	if in.Second == nil {
		return fieldError(backfill.Invalid, "second_person", "is missing: there is nothing to change")
	}
	site, err := s.service.SetSecondPerson(c.Request().Context(), accountOf(c), c.Param("site"), *in.Second)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, showSite(*site))
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
