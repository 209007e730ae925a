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
	// engineOld is how old one may be that is given while it is asked again.
	engineOld = 20 * time.Second
	// pollFor is how long a control worker may be silent: it asks again each minute.
	pollFor = 90 * time.Second
)

type engineState struct {
	mu     sync.Mutex
	known  Engine
	at     time.Time
	asking chan struct{} // closed when the answer is there; nil while nobody asks
}

// Engine returns what was known of the workflow engine a moment ago. It waits only when
// nobody has looked for a while: an engine that is away would keep every page waiting.
func (s *Service) Engine() Engine {
	e := &s.engine
	e.mu.Lock()
	age, known := time.Since(e.at), e.known
	if e.asking == nil && age > engineFor {
		e.asking = make(chan struct{})
		go s.askEngine()
	}
	asking := e.asking
	e.mu.Unlock()
	if age <= engineOld {
		return known
	}
	<-asking
	e.mu.Lock()
	defer e.mu.Unlock()
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
	e.known, e.at = now, time.Now()
	close(e.asking)
	e.asking = nil
}
