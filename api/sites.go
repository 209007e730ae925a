package api

import (
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
)

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
