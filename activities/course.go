package activities

import (
	"context"
	"time"

	"backfill/internal/control"
	"backfill/internal/pace"
)

// sampleEvery is how often a walk or release notes where it stands.
const sampleEvery = 2 * time.Second

// standing is where a walk or release is.
type standing struct {
	rows     int64    // staged, or passed by the release
	position *float64 // part of the keys passed, nil when unknown
	left     int64    // rows that are still to come, about
}

// course notes where a walk or release stands and what is to be expected of it.
type course struct {
	stands  func(context.Context) (standing, error)
	samples []pace.Sample // nil before the earlier ones were read
	last    time.Time
}

// note stores a point if the last one is old enough. It is for people to look at, so
// what goes wrong here does not end the work.
func (k *gatekeeper) note(ctx context.Context) {
	c := &k.course
	if c.stands == nil || time.Since(c.last) < sampleEvery {
		return
	}
	c.last = time.Now()
	releasing := k.lease == nil
	if c.samples == nil {
		before, err := k.store.Course(ctx, k.req.ID)
		if err != nil {
			return
		}
		c.samples = []pace.Sample{}
		for _, p := range before {
			if p.Releasing == releasing {
				c.samples = append(c.samples, p.Sample)
			}
		}
	}
	at, err := c.stands(ctx)
	if err != nil {
		return
	}
	now := pace.Sample{At: time.Now(), Rows: at.rows, Throttled: k.req.Throttled + k.held}
	c.samples = append(c.samples, now)
	if n := len(c.samples); n > 1000 {
		c.samples = c.samples[n-500:]
	}
	_ = k.store.Sample(ctx, k.req.ID, control.Point{Sample: now, Releasing: releasing, Position: at.position}, pace.Predict(c.samples, at.left))
}

// standsAt is where a walk stands by its resume key: what is left is told from the
// rows staged so far and the part of the keys that PostgreSQL holds them to be, not
// from counts, which may be old.
func (w *walk) standsAt(ctx context.Context) (standing, error) {
	at := standing{rows: w.req.Staged, left: max(w.req.Expected-w.req.Staged, 0)}
	if w.req.Key != nil || w.req.UpperKey == nil || w.req.ResumeKey == nil {
		return at, nil
	}
	done, left, known, err := w.db.Position(ctx, w.table, w.layout, w.req.ResumeKey, w.req.UpperKey)
	if err != nil || !known || done+left == 0 {
		return at, err
	}
	position := done / (done + left)
	at.position, at.left = &position, int64(left)
	if position > 0.05 {
		at.left = int64(float64(w.req.Staged+w.req.ProvenRows) * (1 - position) / position)
	}
	return at, nil
}
