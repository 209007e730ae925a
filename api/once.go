package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"net/http"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/internal/control"
)

// once answers a POST that carries an Idempotency-Key and was answered before with
// the same answer again. A call that failed changed nothing and leaves its key free.
func (s *Server) once(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		r := c.Request()
		key := r.Header.Get("Idempotency-Key")
		if key == "" {
			return next(c)
		}
		hash := sha256.Sum256(bodyOf(c))
		call := control.Call{Account: accountOf(c).Name, Key: key, Method: r.Method, Path: r.URL.EscapedPath(), BodyHash: hash[:]}
		earlier, err := s.service.Store.BeginCall(r.Context(), call)
		if err != nil {
			return err
		}
		if earlier != nil {
			c.Response().Header().Set("Idempotency-Replayed", "true")
			return send(c, *earlier)
		}
		answer, err := s.record(c, call, next)
		if err != nil {
			return err
		}
		return send(c, answer)
	}
}

// record runs a call and stores its answer before the client has it: a client
// that repeats the call at once must find it.
func (s *Server) record(c echo.Context, call control.Call, next echo.HandlerFunc) (control.Answer, error) {
	out := c.Response()
	kept := &recorder{header: out.Header()}
	c.SetResponse(echo.NewResponse(kept, c.Echo()))
	done := false
	// A client that went away must not leave its key claimed.
	ctx := context.WithoutCancel(c.Request().Context())
	defer func() {
		c.SetResponse(out)
		if done {
			return
		}
		if err := s.service.Store.DropCall(ctx, call); err != nil {
			s.log.Warn("an idempotency key stays claimed for a while", zap.Error(err))
		}
	}()
	if err := next(c); err != nil {
		return control.Answer{}, err
	}
	answer := control.Answer{Status: kept.status, Location: kept.header.Get(echo.HeaderLocation), Body: kept.body.Bytes()}
	// It is done whether or not that can be recorded, so the claim is kept.
	done = true
	if err := s.service.Store.EndCall(ctx, call, answer); err != nil {
		s.log.Warn("an answer was not stored under its idempotency key", zap.Error(err))
	}
	return answer, nil
}

func send(c echo.Context, a control.Answer) error {
	if a.Location != "" {
		c.Response().Header().Set(echo.HeaderLocation, a.Location)
	}
	return c.JSONBlob(a.Status, a.Body)
}

// recorder keeps an answer back.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(b []byte) (int, error) { return r.body.Write(b) }
