package api

import (
	"context"
	"net/http"
	"net/url"

	"github.com/labstack/echo/v4"

	"backfill/internal/control"
)

// CreateUser adds a person who signs in with a password.
func (s *Service) CreateUser(ctx context.Context, a Account, name string, rights control.Rights, password string) error {
	if err := a.needs(control.Admin, "adding a user"); err != nil {
		return err
	}
	return s.Store.CreateUser(ctx, a.Name, name, rights, password)
}

// SetUser gives a person other rights or another password; nil leaves either.
func (s *Service) SetUser(ctx context.Context, a Account, name string, rights *control.Rights, password *string) error {
	if err := a.needs(control.Admin, "changing a user"); err != nil {
		return err
	}
	return s.Store.SetUser(ctx, a.Name, name, rights, password)
}

// RemoveUser ends a person's account and sessions.
func (s *Service) RemoveUser(ctx context.Context, a Account, name string) error {
	if err := a.needs(control.Admin, "removing a user"); err != nil {
		return err
	}
	return s.Store.RemoveUser(ctx, a.Name, name)
}

// Users lists the people who sign in with a password.
func (s *Service) Users(ctx context.Context, a Account) ([]control.User, error) {
	if err := a.needs(control.Admin, "listing users"); err != nil {
		return nil, err
	}
	return s.Store.Users(ctx)
}

func (s *Server) listUsers(c echo.Context) error {
	all, err := s.service.Users(c.Request().Context(), accountOf(c))
	if err != nil {
		return err
	}
	return listAll(c, all, func(u control.User) control.User { return u })
}

// answerUser shows a user after a change.
func (s *Server) answerUser(c echo.Context, status int, name string) error {
	all, err := s.service.Users(c.Request().Context(), accountOf(c))
	if err != nil {
		return err
	}
	for _, u := range all {
		if u.Name == name {
			return c.JSON(status, u)
		}
	}
	return c.NoContent(http.StatusNoContent) // removed meanwhile
}

func (s *Server) createUser(c echo.Context) error {
	var in struct {
		Name     string `json:"name"`
		Password string `json:"password"`
		control.Rights
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	if err := s.service.CreateUser(c.Request().Context(), accountOf(c), in.Name, in.Rights, in.Password); err != nil {
		return err
	}
	c.Response().Header().Set(echo.HeaderLocation, prefix+"/users/"+url.PathEscape(in.Name))
	return s.answerUser(c, http.StatusCreated, in.Name)
}

func (s *Server) changeUser(c echo.Context) error {
	var in struct {
		Password *string `json:"password"`
		control.Rights
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	var rights *control.Rights
	if in.Role != "" || in.Sites != nil {
		rights = &in.Rights
	}
	if err := s.service.SetUser(c.Request().Context(), accountOf(c), c.Param("name"), rights, in.Password); err != nil {
		return err
	}
	return s.answerUser(c, http.StatusOK, c.Param("name"))
}

func (s *Server) deleteUser(c echo.Context) error {
	if err := s.service.RemoveUser(c.Request().Context(), accountOf(c), c.Param("name")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}
