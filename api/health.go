package api

import (
	"context"
	"errors"
	"net/http"
	"sync"
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

// Engine is what is known of the workflow engine and of the worker that decides.
type Engine struct {
	Away     bool      // it does not answer
	Since    time.Time // since when, as far as was asked
	NoWorker bool      // it answers, and no control worker asks it for work
}

const (
	// engineFor is how old an answer about the engine may be.
	engineFor = 5 * time.Second
	// pollFor is how long a control worker may be silent: it asks again each minute.
	pollFor = 90 * time.Second
)

type engineState struct {
	mu     sync.Mutex
	known  Engine
	at     time.Time
	asking bool
}

// Engine returns what was known of the workflow engine a moment ago. It never
// waits: an engine that is away would keep every page waiting.
func (s *Service) Engine() Engine {
	e := &s.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.asking && time.Since(e.at) > engineFor {
		e.asking = true
		go s.askEngine()
	}
	return e.known
}

func (s *Service) askEngine() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*checkTimeout)
	defer cancel()
	var now Engine
	if err := s.Runs.Check(ctx); err != nil {
		now.Away = true
	} else if last, err := s.Runs.Polled(ctx); err == nil {
		now.NoWorker = time.Since(last) > pollFor
	}
	e := &s.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if now.Away {
		if now.Since = e.known.Since; !e.known.Away {
			now.Since = time.Now()
		}
	}
	e.known, e.at, e.asking = now, time.Now(), false
}
