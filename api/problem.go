package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Problem is an error as RFC 9457 has it. Its type and title are fixed for a kind
// of problem; detail says what happened to what, and what to do.
type Problem struct {
	Type     string                `json:"type"`
	Title    string                `json:"title"`
	Status   int                   `json:"status"`
	Detail   string                `json:"detail,omitempty"`
	Instance string                `json:"instance,omitempty"` // names this occurrence, also in the log
	Errors   []backfill.FieldError `json:"errors,omitempty"`
	Request  int64                 `json:"request,omitempty"` // the open request in the way
	Open     string                `json:"open,omitempty"`    // and its address
}

// kinds are the problems there are, by the last part of their type.
var kinds = map[string]struct {
	status int
	title  string
}{
	"malformed":                   {http.StatusBadRequest, "The request cannot be read"},
	string(backfill.Unauthorized): {http.StatusUnauthorized, "A valid token is needed"},
	string(backfill.Forbidden):    {http.StatusForbidden, "Not allowed"},
	string(backfill.NotFound):     {http.StatusNotFound, "Not found"},
	"method_not_allowed":          {http.StatusMethodNotAllowed, "This address does not take that method"},
	string(backfill.Conflict):     {http.StatusConflict, "In conflict with the present state"},
	"too_large":                   {http.StatusRequestEntityTooLarge, "The request is too large"},
	"unsupported_media_type":      {http.StatusUnsupportedMediaType, "The body must be JSON"},
	string(backfill.Invalid):      {http.StatusUnprocessableEntity, "The input is not valid"},
	string(backfill.Refused):      {http.StatusUnprocessableEntity, "A condition does not hold"},
	string(backfill.TooMany):      {http.StatusTooManyRequests, "Tried too often"},
	"internal":                    {http.StatusInternalServerError, "Internal error"},
	string(backfill.Unavailable):  {http.StatusServiceUnavailable, "A part that is needed is away"},
}

func problemOf(kind, detail string) Problem {
	k := kinds[kind]
	return Problem{Type: "urn:backfill:problem:" + kind, Title: k.title, Status: k.status, Detail: detail}
}

// ProblemOf turns any error into what a client may see of it. The cause of an
// unexpected one is not in it.
func ProblemOf(err error) Problem {
	var domain *backfill.Error
	var web *echo.HTTPError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &domain):
		p := problemOf(string(domain.Code), domain.Message)
		p.Errors = domain.Fields
		if domain.Open != 0 {
			p.Request, p.Open = domain.Open, backfillPath(domain.Open)
		}
		return p
	case errors.As(err, &tooLarge):
		return problemOf("too_large", fmt.Sprintf("the body may have %d bytes", tooLarge.Limit))
	case errors.As(err, &web):
		return webProblem(web)
	case control.Away(err):
		return problemOf(string(backfill.Unavailable), "the control database is away: nothing is lost, try again")
	}
	return problemOf("internal", "something went wrong here; the log has the cause under this instance")
}

// webDetails say more than Echo does.
var webDetails = map[int]string{
	http.StatusNotFound:         "there is nothing at this address: /openapi.yaml lists what there is",
	http.StatusMethodNotAllowed: "the Allow header names the methods this address takes",
}

func webProblem(err *echo.HTTPError) Problem {
	for kind, k := range kinds {
		// 422 and others of more than one kind come from the domain, never from Echo.
		if k.status == err.Code && k.status != http.StatusUnprocessableEntity {
			detail, _ := err.Message.(string)
			if better, ok := webDetails[err.Code]; ok && detail == http.StatusText(err.Code) {
				detail = better
			}
			return problemOf(kind, detail)
		}
	}
	return problemOf("internal", "")
}

// malformed is a request that cannot even be checked.
func malformed(detail string) error { return echo.NewHTTPError(http.StatusBadRequest, detail) }

// fail is the one place where an error becomes an answer.
func (s *Server) fail(err error, c echo.Context) {
	p := ProblemOf(err)
	id := c.Response().Header().Get(echo.HeaderXRequestID)
	gone := errors.Is(err, context.Canceled) && c.Request().Context().Err() != nil
	switch log := s.log.With(zap.String("request_id", id), zap.String("method", c.Request().Method), zap.String("path", c.Request().URL.Path)); {
	case gone:
	case p.Status == http.StatusInternalServerError:
		log.Error("request failed", zap.Error(err))
	case p.Status == http.StatusServiceUnavailable:
		log.Warn("request could not be served", zap.Error(err))
	}
	if c.Response().Committed {
		return
	}
	p.Instance = "urn:backfill:occurrence:" + id
	h := c.Response().Header()
	h.Set(echo.HeaderContentType, "application/problem+json")
	switch {
	case p.Open != "":
		h.Set(echo.HeaderLocation, p.Open)
	case p.Status == http.StatusUnauthorized:
		h.Set(echo.HeaderWWWAuthenticate, "Bearer")
	case p.Status == http.StatusServiceUnavailable:
		h.Set(echo.HeaderRetryAfter, "2")
	}
	c.Response().WriteHeader(p.Status)
	if err := json.NewEncoder(c.Response()).Encode(p); err != nil {
		s.log.Debug("the client went away", zap.Error(err))
	}
}
