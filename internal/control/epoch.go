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
		// A control database that was restored may know of fewer epochs than the sides.
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.site SET epoch = 1 + greatest(epoch, (SELECT max(n.epoch) FROM backfill_control.side n WHERE n.site = $1)) WHERE name = $1`, site)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return backfill.Errorf(backfill.NotFound, "no site %q", site)
		}
		// Requests and reconciliations come before directions, as everywhere.
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
		if err := s.endRuns(ctx, tx, site, 0, "a new epoch was opened for the site"); err != nil {
			return err
		}
		for _, sql := range []string{
			`UPDATE backfill_control.side SET system_identifier = NULL, timeline = NULL, halted = NULL WHERE site = $1`,
			// What was not delivered is history that says so.
			`UPDATE backfill_control.entry e SET dropped = true FROM backfill_control.direction d
			  WHERE d.site = $1 AND e.direction = d.id AND ` + undelivered + ` AND NOT e.dropped`,
			`DELETE FROM backfill_control.stopped st USING backfill_control.direction d WHERE d.site = $1 AND st.direction = d.id`,
			`DELETE FROM backfill_control.quarantine q USING backfill_control.direction d WHERE d.site = $1 AND q.direction = d.id AND q.state <> 'skipped'`,
			`UPDATE backfill_control.direction d SET applied_seq = e.last, epoch_seq = e.last, reads = 0
			   FROM (SELECT d.id, coalesce((SELECT max(last_seq) FROM backfill_control.batch b WHERE b.direction = d.id), 0) AS last FROM backfill_control.direction d) e
			  WHERE e.id = d.id AND d.site = $1`,
			// Whatever is known of capture: what was lost with a database is not captured again.
			`UPDATE backfill_control.table_side s SET capture_since = CASE WHEN capture_ok THEN clock_timestamp() END, gap_last = clock_timestamp(), gap_xid = NULL,
			        gap = 'a new epoch was opened: what had not been delivered is not delivered any more', gap_since = coalesce(gap_since, clock_timestamp())
			   FROM backfill_control.table_config t WHERE t.id = s.table_id AND t.site = $1 AND s.side = ANY (t.captured_from)`,
		} {
			if _, err := tx.Exec(ctx, sql, site); err != nil {
				return err
			}
		}
		if err := audit(ctx, tx, by, "site.new_epoch", site, site, map[string]any{"note": note, "failed_requests": failed}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", site)
	})
}

// Beginning is where a side stands as the control database has it, and where it
// starts in a new epoch: its pushes go on after the control database's last, and
// the other side's changes are applied from here on.
type Beginning struct {
	Epoch    int // the site's
	Seen     int // the latest epoch the side was seen in
	Batch    int64
	Nonce    string
	Reads    int64 // how many reads the side remembers at least
	Position Position
	Halted   string // what was last found wrong with the side, "" when nothing was
}

// Beginning returns where a side starts in the site's present epoch, given its
// outgoing and incoming directions. It applies what was pushed since the epoch was
// opened, however late it comes.
func (s *Store) Beginning(ctx context.Context, out, in backfill.Direction) (b Beginning, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT site.epoch, n.epoch, o.push_batch, o.push_nonce, o.reads, i.epoch_seq, coalesce(last.nonce, ''), coalesce(n.halted, '')
		  FROM backfill_control.site
		  JOIN backfill_control.side n ON n.site = site.name AND n.name = $4
		  JOIN backfill_control.direction o ON o.id = $2
		  JOIN backfill_control.direction i ON i.id = $3
		  LEFT JOIN backfill_control.batch last ON last.direction = i.id AND last.last_seq = i.epoch_seq
		 WHERE site.name = $1`, out.Site, out.ID, in.ID, out.From).
		Scan(&b.Epoch, &b.Seen, &b.Batch, &b.Nonce, &b.Reads, &b.Position.Seq, &b.Position.Nonce, &b.Halted)
	return b, one(err, "site %q", out.Site)
}

// SeenIn records the epoch that a side was found in.
func (s *Store) SeenIn(ctx context.Context, site, side string, epoch int) error {
	_, err := s.pool.Exec(ctx, `UPDATE backfill_control.side SET epoch = $3 WHERE site = $1 AND name = $2 AND epoch < $3`, site, side, epoch)
	return err
}

// Halt records why a side may not go on, or, with "", that it may.
func (s *Store) Halt(ctx context.Context, site, side, why string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.side SET halted = nullif($3, '') WHERE site = $1 AND name = $2 AND coalesce(halted, '') <> $3`, site, side, why)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return notify(ctx, tx, "site", site)
	})
}

// Identify compares the cluster a side is on with the one it was first met on, and
// remembers it the first time. Snapshots mean nothing on another cluster or
// timeline, so where changes are captured a difference stops everything. A side
// that only receives may move: its position, which is verified before each pull,
// says where it stands. Refused too is a side whose database makes a table's changes
// go round for ever.
func (s *Store) Identify(ctx context.Context, site, side, system, timeline string, database uint32) error {
	m, err := s.met(ctx, site, side)
	if err != nil {
		return err
	}
	same := m.system == system && m.timeline == timeline
	if same && m.database == database {
		return nil
	}
	if err := m.elsewhere(site, side, system, timeline); err != nil {
		return err
	}
	moved, err := s.move(ctx, site, side, [2]string{m.system, m.timeline}, [2]string{system, timeline}, database)
	if err != nil || moved {
		return err
	}
	return s.Identify(ctx, site, side, system, timeline, database)
}

// Elsewhere is Identify that remembers nothing.
func (s *Store) Elsewhere(ctx context.Context, site, side, system, timeline string) error {
	m, err := s.met(ctx, site, side)
	if err != nil {
		return err
	}
	return m.elsewhere(site, side, system, timeline)
}

// met is the cluster a side was met on, "" where it was not, and whether changes are
// captured there.
type met struct {
	system, timeline string
	database         uint32
	source           bool
}

func (s *Store) met(ctx context.Context, site, side string) (m met, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT coalesce(system_identifier, ''), coalesce(timeline, ''), coalesce(database_oid, 0),
		       EXISTS (SELECT FROM backfill_control.table_config t WHERE t.site = $1 AND t.removed_at IS NULL AND $2 = ANY (t.captured_from))
		  FROM backfill_control.side WHERE site = $1 AND name = $2`, site, side).Scan(&m.system, &m.timeline, &m.database, &m.source)
	return m, one(err, "side %q of a site %q", side, site)
}

func (m met) elsewhere(site, side, system, timeline string) error {
	switch {
	case m.system == "" || !m.source || m.system == system && m.timeline == timeline:
		return nil
	case m.system == system:
		return backfill.Errorf(backfill.Refused,
			"%s is on timeline %s, it was on %s: it was failed over or restored, and what was committed last before that may be lost; %s", side, timeline, m.timeline, backfill.NewEpoch(site))
	}
	return backfill.Errorf(backfill.Refused,
		"%s is another cluster than before (system %s, it was %s): it was restored into a new one, or the agent's connection string leads elsewhere, which is to be corrected; %s",
		side, system, m.system, backfill.NewEpoch(site))
}

// move remembers the cluster, timeline and database of a side, unless somebody was faster.
func (s *Store) move(ctx context.Context, site, side string, from, to [2]string, database uint32) (moved bool, err error) {
	err = s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.side SET system_identifier = $3, timeline = $4, database_oid = $7
			 WHERE site = $1 AND name = $2 AND coalesce(system_identifier, '') = $5 AND coalesce(timeline, '') = $6`, site, side, to[0], to[1], from[0], from[1], database)
		if moved = tag.RowsAffected() == 1; err != nil || !moved {
			return err
		}
		if err := goesRound(ctx, tx, site, ""); err != nil || from[0] == "" || from == to {
			return err
		}
		return audit(ctx, tx, "backfill", "side.moved", site, side, map[string]any{"from_system": from[0], "from_timeline": from[1], "to_system": to[0], "to_timeline": to[1]})
	})
	return moved, err
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
