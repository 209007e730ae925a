package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Progress is how a request goes: what it took so far, apart from what it was held
// back and from waiting for people, and its course.
type Progress struct {
	*backfill.Request
	Now       time.Time
	Throttles []control.Throttle // by gate, longest first
	Points    []control.Point    // oldest first
}

// Progress returns how a request goes, or NotFound.
func (s *Service) Progress(ctx context.Context, id int64) (*Progress, error) {
	r, err := s.Store.Request(ctx, id)
	if err != nil {
		return nil, err
	}
	p := &Progress{Request: r, Now: time.Now()}
	if p.Throttles, err = s.Store.Throttles(ctx, id); err != nil {
		return nil, err
	}
	p.Points, err = s.Store.Course(ctx, id)
	return p, err
}

// Phase is how long a phase of a request has lasted; it is 0 before it began.
func (p *Progress) Phase(from, to *time.Time) time.Duration {
	end := p.Now
	for _, t := range []*time.Time{to, p.ClosedAt} {
		if t != nil && t.Before(end) {
			end = *t
		}
	}
	if from == nil {
		return 0
	}
	return max(end.Sub(*from), 0)
}

// Walking, Reviewing and Releasing are how long the phases have lasted; time in which
// gates held it back is in them.
func (p *Progress) Walking() time.Duration   { return p.Phase(p.StartedAt, p.WalkedAt) }
func (p *Progress) Reviewing() time.Duration { return p.Phase(p.WalkedAt, p.ReviewedAt) }
func (p *Progress) Releasing() time.Duration {
	if p.State == backfill.Rejected {
		return 0
	}
	return p.Phase(p.ReviewedAt, p.ClosedAt)
}

type progressJSON struct {
	ID               int64          `json:"id"`
	State            backfill.State `json:"state"`
	Paused           bool           `json:"paused"`
	Percent          int            `json:"percent"`
	Position         *float64       `json:"position"`
	Rate             float64        `json:"rate"`
	UnthrottledRate  float64        `json:"unthrottled_rate"`
	Duty             float64        `json:"duty"`
	ETA              *time.Time     `json:"eta"`
	ETA90            *time.Time     `json:"eta_p90"`
	Waiting          string         `json:"waiting"`
	WaitingSince     *time.Time     `json:"waiting_since"`
	WalkSeconds      float64        `json:"walk_seconds"`
	ReviewSeconds    float64        `json:"review_seconds"`
	ReleaseSeconds   float64        `json:"release_seconds"`
	ThrottledSeconds float64        `json:"throttled_seconds"`
	Throttled        []throttleJSON `json:"throttled"`
	Points           []pointJSON    `json:"points"`
}

type throttleJSON struct {
	Gate    string  `json:"gate"`
	Kind    string  `json:"kind"`
	Seconds float64 `json:"seconds"`
}

type pointJSON struct {
	At        time.Time `json:"at"`
	Phase     string    `json:"phase"`
	Rows      int64     `json:"rows"`
	Throttled float64   `json:"throttled_seconds"`
	Position  *float64  `json:"position"`
}

func (s *Server) getProgress(c echo.Context) error {
	id, err := idOf(c, "id")
	if err != nil {
		return err
	}
	p, err := s.service.Progress(c.Request().Context(), id)
	if err != nil {
		return err
	}
	out := progressJSON{ID: p.ID, State: p.State, Paused: p.Paused, Percent: p.Percent(), Position: p.Position, Rate: p.Rate(p.Now),
		ETA: p.ETA(p.Now), ETA90: p.ETA90(p.Now), Waiting: p.Waiting, WaitingSince: p.WaitingSince,
		WalkSeconds: p.Walking().Seconds(), ReviewSeconds: p.Reviewing().Seconds(), ReleaseSeconds: p.Releasing().Seconds(),
		ThrottledSeconds: p.Throttled.Seconds(), Throttled: []throttleJSON{}, Points: []pointJSON{}}
	if out.Rate > 0 {
		out.UnthrottledRate, out.Duty = p.UnthrottledRate, p.Duty
	}
	for _, t := range p.Throttles {
		out.Throttled = append(out.Throttled, throttleJSON{t.Gate, string(t.Kind), t.Seconds})
	}
	for _, x := range p.Points {
		phase := "walk"
		if x.Releasing {
			phase = "release"
		}
		out.Points = append(out.Points, pointJSON{x.At, phase, x.Rows, x.Throttled.Seconds(), x.Position})
	}
	return c.JSON(http.StatusOK, out)
}
