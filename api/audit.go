package api

import (
	"context"
	"strconv"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Audit lists what was decided and configured, newest first.
func (s *Service) Audit(ctx context.Context, f control.AuditFilter) ([]control.AuditEntry, error) {
	if _, err := s.resolve(ctx, f.Site, "", ""); err != nil {
		return nil, err
	}
	return s.Store.Audit(ctx, f)
}

func (s *Server) listAudit(c echo.Context) error {
	before, err := positionOf(c)
	if err != nil {
		return err
	}
	site, only, err := siteFilter(c)
	if err != nil {
		return err
	}
	f := control.AuditFilter{Site: site, Sites: only, Account: c.QueryParam("account"), Action: c.QueryParam("action"), Before: before, Limit: limitOf(c) + 1}
	if given := c.QueryParam("request"); given != "" {
		if f.Request, err = strconv.ParseInt(given, 10, 64); err != nil {
			return fieldError(backfill.Invalid, "request", "is no number of a request")
		}
	}
	all, err := s.service.Audit(c.Request().Context(), f)
	if err != nil {
		return err
	}
	return listPage(c, all, func(e control.AuditEntry) int64 { return e.ID }, func(e control.AuditEntry) control.AuditEntry { return e })
}
