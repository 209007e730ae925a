package api

import (
	"context"
	"fmt"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Standstill is a part of the product that is away, so that something stands still.
type Standstill struct {
	What    string     `json:"what"`  // "agent", "temporal" or "control worker"
	Side    string     `json:"side"`  // of an agent, else ""
	Since   *time.Time `json:"since"` // nil: it was never there
	Message string     `json:"message"`
}

// silent is how long an agent or a control worker may say nothing.
const silent = 30 * time.Second

// Standing lists what is away of what a site needs, and what stands still by that.
func (s *Service) Standing(ctx context.Context, site *control.Site) ([]Standstill, error) {
	var out []Standstill
	engine := s.Engine()
	if engine.Away {
		since := engine.Since
		out = append(out, Standstill{What: "temporal", Since: &since,
			Message: "Temporal is away: changes stay in the outboxes and backfills stand still, nothing is lost; it goes on by itself when Temporal is back"})
	}
	seen, err := s.Store.ControlSeen(ctx)
	if err != nil {
		return nil, err
	}
	if seen == nil || time.Since(*seen) > silent || engine.NoWorker {
		out = append(out, Standstill{What: "control worker", Since: seen,
			Message: "no control worker: backfills do not start, decisions are not recorded and nothing is released; start backfill worker --control"})
	}
	for _, side := range site.Sides {
		if side.SeenAt != nil && time.Since(*side.SeenAt) < silent {
			continue
		}
		out = append(out, Standstill{What: "agent", Side: side.Name, Since: side.SeenAt, Message: fmt.Sprintf(
			"no agent of %s: nothing is pushed from it, applied to it or walked on it, and its figures are old; start backfill worker --agent %s/%s beside its database", side.Name, site.Name, side.Name)})
	}
	return out, nil
}

// Waiting is what a request waits for: a gate, a person, its turn, or a part of the
// product that is away; "" when nothing holds it up.
func (s *Service) Waiting(ctx context.Context, r *backfill.Request) (string, error) {
	if r.Waiting != "" || !r.State.Open() || r.State == backfill.AwaitingReview {
		return r.Waiting, nil
	}
	site, err := s.Store.Site(ctx, r.Site)
	if err != nil {
		return "", err
	}
	all, err := s.Standing(ctx, site)
	if err != nil {
		return "", err
	}
	for _, x := range all {
		if x.What != "agent" || x.Side == r.From && r.State != backfill.Releasing {
			return x.Message, nil
		}
	}
	return "", nil
}
