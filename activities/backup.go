package activities

import (
	"context"
	"errors"
	"fmt"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// Match says how a side and the control database stand to one another, as after one of
// them was restored. It reads, and changes nothing on either. The error is Refused when
// they do not fit, with what is to be done.
func Match(ctx context.Context, store *control.Store, db *side.DB) (stands string, err error) {
	out, err := store.Direction(ctx, db.Site, db.Side)
	if err != nil {
		return "", err
	}
	in, err := store.Direction(ctx, db.Site, out.To)
	if err != nil {
		return "", err
	}
	now, err := db.Standing(ctx)
	if err != nil {
		return "", err
	}
	var all []error
	if err := store.Elsewhere(ctx, db.Site, db.Side, now.System, now.Timeline); err != nil {
		all = append(all, err)
	}
	begin, err := store.Beginning(ctx, out, in)
	if err != nil {
		return "", err
	}
	if begin.Epoch > now.Epoch && begin.Seen < begin.Epoch {
		return fmt.Sprintf("epoch %d begins when its agent starts", begin.Epoch), nil
	}
	if why := setBack(db.Side, now, now.Reads, begin); why != "" {
		all = append(all, backfill.Errorf(backfill.Refused, "%s; %s", why, backfill.NewEpoch(db.Site)))
	}
	at, err := db.AppliedPosition(ctx)
	if err != nil {
		return "", err
	}
	applied, err := store.GivenOut(ctx, in, control.Position(at))
	if err != nil {
		all = append(all, err)
	}
	for _, err := range all {
		if backfill.CodeOf(err) != backfill.Refused {
			return "", err
		}
	}
	if len(all) > 0 {
		return "", errors.Join(all...)
	}
	stands = fmt.Sprintf("push %d of both, change %d applied", now.Batch, at.Seq)
	switch {
	case begin.Batch > now.Batch:
		stands = fmt.Sprintf("push %d, of which the side has not heard and which it sends again; change %d applied", begin.Batch, at.Seq)
	case at.Seq < applied:
		stands += fmt.Sprintf(", %d was acknowledged: those between are sent to it again from history", applied)
	}
	waits, err := db.Backlog(ctx, backlogLimit)
	if err != nil {
		return "", err
	}
	keys := int64(0)
	for _, b := range waits {
		keys += b.Rows
	}
	depth, err := store.QueueDepth(ctx, in.ID, backlogLimit)
	if err != nil {
		return "", err
	}
	return stands + fmt.Sprintf("; %d keys wait in its outbox, %d changes for it in the queue", keys, depth), nil
}
