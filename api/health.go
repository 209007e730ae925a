package api

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/internal/backfill"
)

// healthz says that the process answers.
func (s *Server) healthz(c echo.Context) error {
	return c.JSON(http.StatusOK, map[string]string{"status": "ok"})
}

// readyz says whether requests can be served: without the control database they
// cannot. Without Temporal all but decisions can, so it only tells.
func (s *Server) readyz(c echo.Context) error {
	ctx, cancel := context.WithTimeout(c.Request().Context(), 3*time.Second)
	defer cancel()
	out := map[string]string{"status": "ready", "database": "ok", "temporal": "ok"}
	if err := s.service.Runs.Check(ctx); err != nil {
		out["temporal"] = "away"
	}
	if err := s.service.Store.Ping(ctx); err != nil {
		s.log.Warn("not ready", zap.Error(err))
		out["status"], out["database"] = "not ready", "away"
		var told *backfill.Error
		if errors.As(err, &told) {
			out["database"] = told.Message
		}
		return c.JSON(http.StatusServiceUnavailable, out)
	}
	return c.JSON(http.StatusOK, out)
}
