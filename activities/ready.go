package activities

import (
	"context"
	"fmt"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// ready fails while the side may not be touched. When it is Refused the side is not
// the database it was, or one of it and the control database was restored; then the
// control database knows, and nothing of the side is released or applied either.
func (a *Agent) ready(ctx context.Context) error {
	before, err := a.standing(ctx)
	why := ""
	switch {
	case backfill.CodeOf(err) == backfill.Refused:
		why = message(err)
	case err != nil || before == "":
		return err
	}
	if e := a.faults.at("halt: found"); e != nil {
		return e
	}
	if e := a.store.Halt(ctx, a.db.Site, a.db.Side, why); e != nil {
		return e
	}
	if e := a.faults.at("halt: recorded"); e != nil {
		return e
	}
	return err
}

// standing looks whether the side may go on, and returns what was wrong the last
// time. When an admin has opened a new epoch, the side begins it.
func (a *Agent) standing(ctx context.Context) (before string, err error) {
	// The side is asked first: it never remembers a push before the control database does.
	now, err := a.db.Standing(ctx)
	if err != nil {
		return "", err
	}
	if err := a.faults.at("identity: read"); err != nil {
		return "", err
	}
	if err := a.store.Identify(ctx, a.db.Site, a.db.Side, now.System, now.Timeline, now.Database); err != nil {
		return "", err
	}
	if err := a.faults.at("identity: known"); err != nil {
		return "", err
	}
	begin, err := a.store.Beginning(ctx, a.Out, a.In)
	if err != nil {
		return "", err
	}
	if now.Epoch != begin.Seen {
		if err := a.store.SeenIn(ctx, a.db.Site, a.db.Side, now.Epoch); err != nil {
			return "", err
		}
		if err := a.faults.at("epoch: noted"); err != nil {
			return "", err
		}
	}
	if now.Epoch < begin.Epoch && begin.Seen < begin.Epoch {
		if err := a.faults.at("epoch: met"); err != nil {
			return "", err
		}
		if err := a.db.Begin(ctx, begin.Epoch, begin.Batch, begin.Nonce, side.Position(begin.Position)); err != nil {
			return "", err
		}
		if err := a.faults.at("epoch: begun"); err != nil {
			return "", err
		}
		if err := a.store.SeenIn(ctx, a.db.Site, a.db.Side, begin.Epoch); err != nil {
			return "", err
		}
		if err := a.faults.at("epoch: seen"); err != nil {
			return "", err
		}
		a.db.Meet(now.Identity, begin.Reads)
		return begin.Halted, nil
	}
	reads := now.Reads
	if reads < begin.Reads {
		// One may have been made and recorded since the side was asked.
		again, err := a.db.Standing(ctx)
		if err != nil {
			return "", err
		}
		reads = again.Reads
	}
	if why := setBack(a.db.Side, now, reads, begin); why != "" {
		return "", backfill.Errorf(backfill.Refused, "%s; %s", why, backfill.NewEpoch(a.db.Site))
	}
	a.db.Meet(now.Identity, begin.Reads)
	return begin.Halted, nil
}

// setBack says which of a side and the control database has lost what the other
// remembers, "" when neither has.
func setBack(name string, s side.Standing, reads int64, c control.Beginning) string {
	switch {
	case s.Epoch > c.Epoch:
		return fmt.Sprintf("%s is in epoch %d, the control database in %d: the control database was restored from a backup", name, s.Epoch, c.Epoch)
	case s.Epoch < c.Epoch:
		return fmt.Sprintf("%s is in epoch %d, but it had begun epoch %d: it was restored from a backup", name, s.Epoch, c.Seen)
	case s.Batch > c.Batch:
		return fmt.Sprintf("%s remembers push %d, the control database push %d as the last: the control database was restored from a backup", name, s.Batch, c.Batch)
	case s.Batch == c.Batch && s.Nonce != c.Nonce:
		return fmt.Sprintf("%s and the control database remember two different pushes of number %d: one of them was restored from a backup", name, s.Batch)
	case reads < c.Reads:
		return fmt.Sprintf("%s was read %d times, but remembers %d: it was restored from a backup, or set up anew", name, c.Reads, reads)
	}
	return ""
}
