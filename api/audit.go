package api

import (
	"context"

	"github.com/labstack/echo/v4"

	"backfill/internal/control"
)

// Audit lists what was decided and configured, newest first, entries with an id
// below before (0: from the newest); site "" means all.
func (s *Service) Audit(ctx context.Context, site string, before int64, limit int) ([]control.AuditEntry, error) {
	if _, err := s.resolve(ctx, site, "", ""); err != nil {
		return nil, err
	}
	return s.Store.Audit(ctx, site, before, limit)
}

func (s *Server) listAudit(c echo.Context) error {
	before, err := positionOf(c)
	if err != nil {
		return err
	}
	all, err := s.service.Audit(c.Request().Context(), c.QueryParam("site"), before, limitOf(c)+1)
	if err != nil {
		return err
	}
	return listPage(c, all, func(e control.AuditEntry) int64 { return e.ID }, func(e control.AuditEntry) control.AuditEntry { return e })
}
