package api

import (
	"github.com/labstack/echo/v4"

	"backfill/internal/control"
)

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
