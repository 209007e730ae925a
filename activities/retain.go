package activities

import (
	"context"
	"time"

	"go.temporal.io/sdk/activity"

	"backfill/internal/control"
)

// retainRows is how many things of a kind are removed in one transaction.
const retainRows = 2000

// Retain removes what is past its window in small batches, until nothing is left to
// remove, and puts on record what it removed.
func (c *Control) Retain(ctx context.Context) (control.Removed, error) {
	all := control.Removed{}
	stopBeat := beat(ctx, func() any { return nil })
	defer stopBeat()
	stopping := activity.GetWorkerStopChannel(ctx)
	err := c.retain(ctx, stopping, all)
	if e := c.Store.Retained(context.WithoutCancel(ctx), all); err == nil {
		err = e
	}
	if err == nil {
		err = c.faults.at("retain: recorded")
	}
	return all, surface(err)
}

func (c *Control) retain(ctx context.Context, stopping <-chan struct{}, all control.Removed) error {
	for {
		removed, more, err := c.Store.Retain(ctx, c.Keep, retainRows, func() error { return c.faults.at("retain: removed") })
		for kind, n := range removed {
			all[kind] += n
		}
		if err != nil || !more {
			return err
		}
		select {
		case <-stopping:
			return nil // the next run goes on
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond): // others want the disk too
		}
	}
}
