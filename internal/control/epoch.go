package control

import (
	"context"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// NewEpoch declares a new beginning for a site after one of its databases, or the
// control database, was restored or failed over: whoever calls it has decided that
// the sides are the ones to go on with. Open requests end FAILED, the clusters are
// met anew, and what had not been delivered is not delivered any more, because
// nobody can tell what the receiver already had: every table has to be reconciled.
func (s *Store) NewEpoch(ctx context.Context, by, site, note string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		// What is being pushed or released belongs to one epoch or the other.
		if err := lockSite(ctx, tx, site); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `UPDATE backfill_control.site SET epoch = epoch + 1 WHERE name = $1`, site)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return backfill.Errorf(backfill.NotFound, "no site %q", site)
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.side SET system_identifier = NULL, timeline = NULL WHERE site = $1`, site); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.direction d SET applied_seq = e.last, epoch_seq = e.last
			  FROM (SELECT d.id, coalesce((SELECT max(last_seq) FROM backfill_control.batch b WHERE b.direction = d.id), 0) AS last FROM backfill_control.direction d) e
			 WHERE e.id = d.id AND d.site = $1`, site); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.table_side s SET capture_since = clock_timestamp()
			  FROM backfill_control.table_config t WHERE t.id = s.table_id AND t.site = $1 AND s.capture_ok`, site); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			UPDATE backfill_control.request r SET state = 'FAILED', reason = 'a new epoch was opened for the site', closed_at = clock_timestamp(), paused = false, waiting = ''
			  FROM backfill_control.direction d WHERE d.id = r.direction AND d.site = $1 AND r.state = ANY ($2) RETURNING r.id`, site, backfill.OpenStates())
		if err != nil {
			return err
		}
		failed, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return err
		}
		for _, id := range failed {
			if err := notifyID(ctx, tx, "request", id); err != nil {
				return err
			}
		}
		if err := audit(ctx, tx, by, "site.new_epoch", site, site, map[string]any{"note": note, "failed_requests": failed}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", site)
	})
}

// Beginning is where a side starts in a new epoch: its pushes go on after the
// control database's last, and the other side's changes are applied from here on.
type Beginning struct {
	Epoch    int
	Batch    int64
	Nonce    string
	Position Position
}

// Beginning returns where a side starts in the site's present epoch, given its
// outgoing and incoming directions. It applies what was pushed since the epoch was
// opened, however late it comes.
func (s *Store) Beginning(ctx context.Context, out, in backfill.Direction) (b Beginning, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT site.epoch, o.push_batch, o.push_nonce, i.epoch_seq, coalesce(last.nonce, '')
		  FROM backfill_control.site
		  JOIN backfill_control.direction o ON o.id = $2
		  JOIN backfill_control.direction i ON i.id = $3
		  LEFT JOIN backfill_control.batch last ON last.direction = i.id AND last.last_seq = i.epoch_seq
		 WHERE site.name = $1`, out.Site, out.ID, in.ID).Scan(&b.Epoch, &b.Batch, &b.Nonce, &b.Position.Seq, &b.Position.Nonce)
	return b, one(err, "site %q", out.Site)
}

// lockSite takes the locks of both directions of a site.
func lockSite(ctx context.Context, tx pgx.Tx, site string) error {
	rows, err := tx.Query(ctx, `SELECT id FROM backfill_control.direction WHERE site = $1 ORDER BY id`, site)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := lockDirection(ctx, tx, id); err != nil {
			return err
		}
	}
	return nil
}
