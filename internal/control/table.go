package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// TableChange is what a configuration changes; nil fields stay as they are, or
// take their default when the table is new.
type TableChange struct {
	Active       *bool    `json:"active"`
	Create       *bool    `json:"create"`
	Update       *bool    `json:"update"`
	Delete       *bool    `json:"delete"`
	CapturedFrom []string `json:"captured_from"`
	Conflict     *string  `json:"conflict"` // the side that wins, or quarantine, for a table captured on both
	ApplyOrder   *int     `json:"apply_order"`
	// Excluded columns are neither sent nor compared: a mapping leaves them out, which is
	// given too.
	Excluded *[]string `json:"excluded"`
	// Mapping makes the receiver's rows where its table has another shape; an empty one
	// removes it. Checked is what the agents have made of it, see MappingTrial.
	Mapping *backfill.Mapping `json:"mapping"`
	Checked *Checked          `json:"-"`
}

// PutTable adds or changes a table's configuration.
//
// Turning a table or an operation off makes changes be dropped from then on, so
// rows already staged become doubtful: dropped entries overtake them, see Release.
func (s *Store) PutTable(ctx context.Context, by, site, name string, c TableChange) (*backfill.Table, error) {
	parsed, err := backfill.ParseTableName(name)
	if err != nil {
		return nil, err
	}
	st, err := s.Site(ctx, site)
	if err != nil {
		return nil, err
	}
	for _, side := range c.CapturedFrom {
		if !slices.ContainsFunc(st.Sides, func(x Side) bool { return x.Name == side }) {
			return nil, backfill.Errorf(backfill.NotFound, "no side %q of site %q: its sides are %s and %s", side, site, st.Sides[0].Name, st.Sides[1].Name)
		}
	}
	if len(c.CapturedFrom) > 1 {
		c.CapturedFrom = slices.Compact(slices.Sorted(slices.Values(c.CapturedFrom)))
	}
	if w := c.Conflict; w != nil && *w != backfill.Quarantine && !slices.ContainsFunc(st.Sides, func(x Side) bool { return x.Name == *w }) {
		return nil, invalidConflict("name the side whose change wins, %s or %s, or %s", st.Sides[0].Name, st.Sides[1].Name, backfill.Quarantine)
	}
	if c.Mapping != nil {
		if err := c.Mapping.Check(); err != nil {
			return nil, err
		}
		if c.Excluded == nil {
			c.Excluded = &[]string{}
		}
	}
	err = s.in(ctx, func(tx pgx.Tx) error {
		if c.CapturedFrom != nil || c.Conflict != nil || c.Mapping != nil {
			// What is being pushed is judged by the old policy or the new one, and goes to the
			// table of the old mapping or the new one.
			if err := lockSite(ctx, tx, site); err != nil {
				return err
			}
		}
		before, err := tableIn(ctx, tx, site, parsed.String())
		known := err == nil
		standsAs, e := standing(ctx, tx, standingTable, site, parsed.String())
		if e != nil {
			return e
		}
		if err != nil && backfill.CodeOf(err) != backfill.NotFound {
			return err
		}
		if !known && len(c.CapturedFrom) == 0 {
			return backfill.Errorf(backfill.Invalid, "captured_from: name the side whose changes of %s are sent", parsed)
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.table_config AS t (site, name, active, op_create, op_update, op_delete, captured_from, apply_order, excluded)
			VALUES ($1, $2, coalesce($3, true), coalesce($4, true), coalesce($5, true), coalesce($6, true), coalesce($7::text[], '{}'), coalesce($8, 0), coalesce($9::text[], '{}'))
			ON CONFLICT (site, name) WHERE removed_at IS NULL DO UPDATE SET
			    active = coalesce($3, t.active), op_create = coalesce($4, t.op_create), op_update = coalesce($5, t.op_update),
			    op_delete = coalesce($6, t.op_delete), captured_from = coalesce($7, t.captured_from),
			    apply_order = coalesce($8, t.apply_order), excluded = coalesce($9, t.excluded), updated_at = clock_timestamp()`,
			site, parsed.String(), c.Active, c.Create, c.Update, c.Delete, c.CapturedFrom, c.ApplyOrder, c.Excluded); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.table_side (table_id, side)
			SELECT t.id, s.name FROM backfill_control.table_config t JOIN backfill_control.side s ON s.site = t.site
			 WHERE t.site = $1 AND t.name = $2 AND t.removed_at IS NULL ON CONFLICT DO NOTHING`, site, parsed.String()); err != nil {
			return err
		}
		if err := putPolicy(ctx, tx, site, parsed.String(), c); err != nil {
			return err
		}
		now, err := tableIn(ctx, tx, site, parsed.String())
		if err != nil {
			return err
		}
		if known {
			if err := mappingStays(before, now, c.Mapping != nil); err != nil {
				return err
			}
		}
		if c.Mapping != nil {
			if err := c.Checked.stillHolds(now, c.Mapping); err != nil {
				return err
			}
			if err := s.putMapping(ctx, tx, now, c.Mapping, c.Checked); err != nil {
				return err
			}
			if now, err = tableIn(ctx, tx, site, parsed.String()); err != nil {
				return err
			}
		}
		if c.CapturedFrom != nil || c.Mapping != nil {
			if err := meets(ctx, tx, st, now); err != nil {
				return err
			}
		}
		if st.OneDatabase && (now.Mapping == nil || now.Mapping.SourceOf(now.Name) == now.Mapping.TargetOf(now.Name)) {
			return invalidMapping("the sides of site " + site + " are in one database: give a mapping whose target is another table than its source")
		}
		if err := goesRound(ctx, tx, site, parsed.String()); err != nil {
			return err
		}
		if err := audit(ctx, tx, by, "table.put", site, parsed.String(), map[string]any{"change": c, "before": standsAs}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", site)
	})
	if err != nil {
		return nil, err
	}
	return s.Table(ctx, site, parsed.String())
}

func invalidConflict(format string, args ...any) error {
	message := fmt.Sprintf(format, args...)
	return &backfill.Error{Code: backfill.Invalid, Message: "conflict: " + message, Fields: []backfill.FieldError{{Field: "conflict", Message: message}}}
}

// putPolicy records what decides conflicts from now on. The locks of both directions
// are held, so everything pushed later gets a higher seq.
func putPolicy(ctx context.Context, tx pgx.Tx, site, table string, c TableChange) error {
	t, err := tableIn(ctx, tx, site, table)
	if err != nil {
		return err
	}
	before, winner := "", ""
	if n := len(t.Policies); n > 0 {
		before = t.Policies[n-1].Winner
	}
	switch {
	case t.TwoWay() && c.Conflict != nil:
		winner = *c.Conflict
	case t.TwoWay() && before != "":
		winner = before
	case t.TwoWay():
		return invalidConflict("%s is to be captured from both sides: name the side whose change wins when both have changed a row, %s or %s, or %s",
			table, t.CapturedFrom[0], t.CapturedFrom[1], backfill.Quarantine)
	case c.Conflict != nil:
		return invalidConflict("%s is captured from %s alone: name both sides in captured_from", table, t.CapturedFrom[0])
	}
	if winner == before {
		return nil
	}
	if before == "" {
		var reason string
		err := tx.QueryRow(ctx, `SELECT reason FROM backfill_control.stopped WHERE table_id = $1 LIMIT 1`, t.ID).Scan(&reason)
		if err == nil {
			return backfill.Errorf(backfill.Refused, "changes of %s have been stopped, by: %s; let them catch up before it is captured from both sides, as conflicts are told by what was applied", table, reason)
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO backfill_control.conflict_policy (table_id, since, winner)
		SELECT $1, coalesce(max(e.seq), 0), $3 FROM backfill_control.direction d
		  CROSS JOIN LATERAL (SELECT seq FROM backfill_control.entry WHERE direction = d.id ORDER BY seq DESC LIMIT 1) e WHERE d.site = $2
		ON CONFLICT (table_id, since) DO UPDATE SET winner = excluded.winner`, t.ID, site, winner)
	return err
}

// goesRound is Refused when the rows of a table of a site, of any with "", come back to
// where they are captured, by way of other sites: no site takes what another has applied
// for its own, so one change would go round for ever. Where the databases are is known
// once the agents have looked.
func goesRound(ctx context.Context, tx pgx.Tx, site, table string) error {
	// Of two sites configured at once, one sees the other.
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(20012)`); err != nil {
		return err
	}
	var name, from, to, other string
	// A place is a table of a database, under whatever name a site has it.
	err := tx.QueryRow(ctx, `
		WITH RECURSIVE step AS (
		    SELECT t.site, t.name, a.name AS from_side, b.name AS to_side,
		           (a.system_identifier, a.database_oid::text, coalesce(t.mapping ->> 'source', t.name))::text AS place,
		           (b.system_identifier, b.database_oid::text, coalesce(t.mapping ->> 'target', t.name))::text AS next
		      FROM backfill_control.table_config t
		      JOIN backfill_control.side a ON a.site = t.site AND a.name = ANY (t.captured_from)
		      JOIN backfill_control.side b ON b.site = t.site AND b.name <> a.name
		     WHERE t.removed_at IS NULL AND a.database_oid IS NOT NULL AND b.database_oid IS NOT NULL),
		way AS (
		    SELECT s.name, s.from_side, s.to_side, s.place AS start, s.next, s.site FROM step s WHERE s.site = $1 AND ($2 = '' OR s.name = $2)
		    UNION
		    SELECT w.name, w.from_side, w.to_side, w.start, s.next, s.site FROM way w JOIN step s ON s.place = w.next AND s.site <> w.site)
		SELECT name, from_side, to_side, site FROM way WHERE next = start AND site <> $1 LIMIT 1`, site, table).Scan(&name, &from, &to, &other)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	return backfill.Errorf(backfill.Refused, "%s goes from %s to %s in site %s and comes back to where it was in site %s: its changes would go round for ever; remove it from one of the sites, and capture it from both sides in the other if both write it",
		name, from, to, site, other)
}

// Look is what a side's agent found of a newly configured table.
type Look struct {
	Side    string
	Problem string // why the table cannot be synced at all, "" when it can
	Awaited bool   // the agent lives and has not looked yet
}

// Looks tells how far the agents have looked at a table.
func (s *Store) Looks(ctx context.Context, t *backfill.Table) ([]Look, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT n.name, CASE WHEN s.layout_id IS NULL THEN coalesce(s.problem, '') ELSE '' END,
		       s.layout_id IS NULL AND s.problem IS NULL AND coalesce(n.agent_seen_at > clock_timestamp() - interval '30 s', false)
		  FROM backfill_control.side n JOIN backfill_control.table_side s ON s.side = n.name AND s.table_id = $1
		 WHERE n.site = $2 ORDER BY n.name`, t.ID, t.Site)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Look])
}

// ForgetTable takes back the configuration of a table that turned out not to be
// usable, before anything was sent of it.
func (s *Store) ForgetTable(ctx context.Context, by string, id int32, why string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.table_side WHERE table_id = $1`, id); err != nil {
			return err
		}
		var site, name string
		if err := tx.QueryRow(ctx, `DELETE FROM backfill_control.table_config WHERE id = $1 RETURNING site, name`, id).Scan(&site, &name); err != nil {
			return one(err, "table %d", id)
		}
		if err := audit(ctx, tx, by, "table.refused", site, name, map[string]any{"why": why}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", site)
	})
}

// standingTable is how a table ($2) of a site ($1) is configured, for the audit.
const standingTable = `
	SELECT t.active, t.op_create AS "create", t.op_update AS "update", t.op_delete AS "delete", t.captured_from, t.apply_order, t.mapping,
	       (SELECT winner FROM backfill_control.conflict_policy p WHERE p.table_id = t.id ORDER BY since DESC LIMIT 1) AS conflict
	  FROM backfill_control.table_config t WHERE t.site = $1 AND t.name = $2 AND t.removed_at IS NULL`

// RemoveTable takes a table out of a site: its captured changes are forgotten from
// then on, those on their way are dropped, and those set aside are skipped. History,
// closed requests and audit stay. Setting the sides up again drops its triggers.
// While a request is open it is a Conflict that names the request.
//
// Configured again later, the table begins anew, with the gap in between.
func (s *Store) RemoveTable(ctx context.Context, by, site, name string) (*backfill.Table, error) {
	t, err := s.Table(ctx, site, name)
	if err != nil {
		return nil, err
	}
	var open int64
	err = s.in(ctx, func(tx pgx.Tx) error {
		// A push or release under way knows the table still.
		if err := lockSite(ctx, tx, site); err != nil {
			return err
		}
		// CreateRequest takes a share of this lock.
		var id int32
		if err := tx.QueryRow(ctx, `SELECT id FROM backfill_control.table_config WHERE id = $1 AND removed_at IS NULL FOR UPDATE`, t.ID).Scan(&id); err != nil {
			return one(err, "table %s of a site %q", t.Name, site)
		}
		before, err := standing(ctx, tx, standingTable, site, t.Name)
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, `SELECT id FROM backfill_control.request WHERE table_id = $1 AND state = ANY ($2) ORDER BY id LIMIT 1`, t.ID, backfill.OpenStates()).Scan(&open)
		if !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		dropped, err := tx.Exec(ctx, `
			UPDATE backfill_control.entry e SET dropped = true FROM backfill_control.direction d
			 WHERE d.site = $1 AND e.direction = d.id AND `+undelivered+` AND e.table_id = $2 AND NOT e.dropped`, site, t.ID)
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			UPDATE backfill_control.quarantine SET wish = 'skip', wished_by = $2
			 WHERE table_id = $1 AND state IN ('held', 'quarantined') RETURNING direction`, t.ID, by)
		if err != nil {
			return err
		}
		skipped, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return err
		}
		for _, direction := range skipped {
			if err := notifyID(ctx, tx, "queue", direction); err != nil {
				return err
			}
		}
		for _, sql := range []string{`DELETE FROM backfill_control.table_side WHERE table_id = $1`, `DELETE FROM backfill_control.gate WHERE table_id = $1`,
			`DELETE FROM backfill_control.reconcile_schedule WHERE table_id = $1`, `DELETE FROM backfill_control.cutover WHERE table_id = $1`,
			`DELETE FROM backfill_control.shadow_read WHERE table_id = $1`,
			`DELETE FROM backfill_control.mapping_trial r USING backfill_control.table_config t WHERE t.id = $1 AND r.site = t.site
			    AND (r.source, r.target) = (coalesce(t.mapping ->> 'source', t.name), coalesce(t.mapping ->> 'target', t.name))`} {
			if _, err := tx.Exec(ctx, sql, t.ID); err != nil {
				return err
			}
		}
		if err := s.endRuns(ctx, tx, site, t.ID, "the table was removed from the site"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.table_config SET removed_at = clock_timestamp() WHERE id = $1`, t.ID); err != nil {
			return err
		}
		if err := audit(ctx, tx, by, "table.remove", site, t.Name, map[string]any{"before": before, "dropped": dropped.RowsAffected(), "skipped": len(skipped)}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", site)
	})
	if open != 0 && err == nil {
		return nil, &backfill.Error{Code: backfill.Conflict, Open: open,
			Message: fmt.Sprintf("request %d of %s is open: decide or cancel it first", open, t.Name)}
	}
	return t, err
}

const tableColumns = `t.id, t.site, t.name, t.active, t.op_create, t.op_update, t.op_delete, t.captured_from, t.apply_order, t.excluded, t.updated_at, t.mapping, t.mapping_version,
	coalesce((SELECT jsonb_agg(jsonb_build_object('since', p.since, 'winner', p.winner) ORDER BY p.since) FROM backfill_control.conflict_policy p WHERE p.table_id = t.id), '[]')`

func tableFields(t *backfill.Table) []any {
	return []any{&t.ID, &t.Site, &t.Name, &t.Active, &t.Create, &t.Update, &t.Delete, &t.CapturedFrom, &t.ApplyOrder, &t.Excluded, &t.UpdatedAt, &t.Mapping, &t.Version, &t.Policies}
}

// Tables lists the tables of a site in apply order.
func (s *Store) Tables(ctx context.Context, site string) ([]backfill.Table, error) {
	return tablesIn(ctx, s.pool, site)
}

func tablesIn(ctx context.Context, db interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}, site string) ([]backfill.Table, error) {
	rows, err := db.Query(ctx, `SELECT `+tableColumns+` FROM backfill_control.table_config t WHERE t.site = $1 AND t.removed_at IS NULL ORDER BY t.apply_order, t.name`, site)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (t backfill.Table, err error) {
		return t, r.Scan(tableFields(&t)...)
	})
}

// Mapped is a table and how the receiver's rows of it are made, both as they were at one
// moment. Made is nil where both sides have the same columns.
type Mapped struct {
	backfill.Table
	Made *row.Mapping
}

// MappedTables lists the tables of a site, or one of them, by the stored spelling of its
// name, with how their rows are made.
func (s *Store) MappedTables(ctx context.Context, site, only string) ([]Mapped, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+tableColumns+`, t.made FROM backfill_control.table_config t
		 WHERE t.site = $1 AND ($2 = '' OR t.name = $2) AND t.removed_at IS NULL ORDER BY t.apply_order, t.name`, site, only)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (t Mapped, err error) {
		return t, r.Scan(append(tableFields(&t.Table), &t.Made)...)
	})
}

// Tables are the tables alone.
func Tables(all []Mapped) []backfill.Table {
	out := make([]backfill.Table, len(all))
	for i, t := range all {
		out[i] = t.Table
	}
	return out
}

// MappedTable is the one of MappedTables, or NotFound.
func (s *Store) MappedTable(ctx context.Context, site, name string) (Mapped, error) {
	all, err := s.MappedTables(ctx, site, name)
	if err == nil && len(all) == 0 {
		err = backfill.Errorf(backfill.NotFound, "no table %s of a site %q", name, site)
	}
	if err != nil {
		return Mapped{}, err
	}
	return all[0], nil
}

// Table returns one table of a site by any spelling of its name, or NotFound.
func (s *Store) Table(ctx context.Context, site, name string) (*backfill.Table, error) {
	parsed, err := backfill.ParseTableName(name)
	if err != nil {
		return nil, err
	}
	return tableIn(ctx, s.pool, site, parsed.String())
}

// tableIn returns a table by the stored spelling of its name, or NotFound.
func tableIn(ctx context.Context, db interface {
	QueryRow(context.Context, string, ...any) pgx.Row
}, site, name string) (*backfill.Table, error) {
	var t backfill.Table
	err := db.QueryRow(ctx, `SELECT `+tableColumns+` FROM backfill_control.table_config t WHERE t.site = $1 AND t.name = $2 AND t.removed_at IS NULL`,
		site, name).Scan(tableFields(&t)...)
	return &t, one(err, "table %s of a site %q", name, site)
}

// TableName returns the stored spelling of a table's name that a site has, or had
// until it was removed: history knows both. Or NotFound.
func (s *Store) TableName(ctx context.Context, site, name string) (string, error) {
	parsed, err := backfill.ParseTableName(name)
	if err != nil {
		return "", err
	}
	err = s.pool.QueryRow(ctx, `SELECT name FROM backfill_control.table_config WHERE site = $1 AND name = $2 LIMIT 1`, site, parsed.String()).Scan(&name)
	return name, one(err, "table %s of a site %q", parsed, site)
}

// Panels returns what is known of each table and captured direction of a site,
// in apply order.
func (s *Store) Panels(ctx context.Context, site string) ([]backfill.Panel, error) {
	if _, err := s.Site(ctx, site); err != nil {
		return nil, err
	}
	return s.panels(ctx, site, "", "")
}

// Panel returns what is known of one table and direction, or NotFound.
func (s *Store) Panel(ctx context.Context, site, table, from string) (*backfill.Panel, error) {
	t, err := s.Table(ctx, site, table)
	if err != nil {
		return nil, err
	}
	d, err := s.Direction(ctx, site, from)
	if err != nil {
		return nil, err
	}
	all, err := s.panels(ctx, site, t.Name, from)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		// Configured, but not captured this way: the conditions say so.
		return &backfill.Panel{Table: *t, Direction: d}, nil
	}
	return &all[0], nil
}

func (s *Store) panels(ctx context.Context, site, table, from string) ([]backfill.Panel, error) {
	sideColumns := func(a string) string {
		return `, ` + a + `.side, ` + a + `.key, ` + a + `.key_types, coalesce(` + a + `.layout_id, 0), ` + a + `.row_count, ` + a + `.estimated, ` +
			a + `.counted_at, ` + a + `.capture_ok, ` + a + `.capture_since, coalesce(` + a + `.problem, ''), coalesce(` + a + `.gap, ''), ` + a + `.gap_since`
	}
	rows, err := s.pool.Query(ctx, `
		WITH waiting AS MATERIALIZED (
		    SELECT e.direction, e.table_id, count(*) AS waiting, min(e.created_at) AS oldest
		      FROM backfill_control.direction d JOIN backfill_control.entry e ON e.direction = d.id AND `+undelivered+` AND NOT e.dropped
		     WHERE d.site = $1 GROUP BY 1, 2),
		aside AS MATERIALIZED (
		    SELECT q.direction, q.table_id, count(*) FILTER (WHERE q.state = 'held') AS held, count(*) FILTER (WHERE q.state = 'quarantined') AS quarantined
		      FROM backfill_control.direction d JOIN backfill_control.quarantine q ON q.direction = d.id
		     WHERE d.site = $1 GROUP BY 1, 2)
		SELECT `+tableColumns+`, d.id, d.site, d.from_side, d.to_side`+sideColumns("a")+sideColumns("b")+`, coalesce(w.waiting, 0) + a.outbox, least(w.oldest, a.outbox_oldest), coalesce(q.held, 0), coalesce(q.quarantined, 0), coalesce(st.reason, ''), st.since
		  FROM backfill_control.table_config t
		  JOIN backfill_control.direction d ON d.site = t.site AND d.from_side = ANY (t.captured_from)
		  JOIN backfill_control.table_side a ON a.table_id = t.id AND a.side = d.from_side
		  JOIN backfill_control.table_side b ON b.table_id = t.id AND b.side = d.to_side
		  LEFT JOIN waiting w ON w.direction = d.id AND w.table_id = t.id
		  LEFT JOIN aside q ON q.direction = d.id AND q.table_id = t.id
		  LEFT JOIN backfill_control.stopped st ON st.direction = d.id AND st.table_id = t.id
		 WHERE t.site = $1 AND t.removed_at IS NULL AND ($2 = '' OR t.name = $2) AND ($3 = '' OR d.from_side = $3)
		 ORDER BY t.apply_order, t.name, d.from_side`, site, table, from)
	if err != nil {
		return nil, err
	}
	out, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (p backfill.Panel, err error) {
		fields := append(tableFields(&p.Table), &p.Direction.ID, &p.Direction.Site, &p.Direction.From, &p.Direction.To)
		for _, t := range []*backfill.TableSide{&p.Source, &p.Receiver} {
			fields = append(fields, &t.Side, &t.Key, &t.KeyTypes, &t.LayoutID, &t.Rows, &t.Estimated, &t.CountedAt, &t.CaptureOK, &t.CaptureSince, &t.Problem, &t.Gap, &t.GapSince)
		}
		return p, r.Scan(append(fields, &p.Waiting, &p.Oldest, &p.Held, &p.Quarantined, &p.Stopped, &p.StoppedSince)...)
	})
	if err != nil {
		return nil, err
	}
	if err := s.proofs(ctx, site, out); err != nil {
		return nil, err
	}
	open, err := s.Requests(ctx, RequestFilter{Site: site, Table: table, States: backfill.OpenStates(), Limit: 1000})
	if err != nil {
		return nil, err
	}
	for _, r := range open {
		for i := range out {
			p := &out[i]
			if p.Table.Name != r.Table || p.Direction.ID != r.Direction.ID {
				continue
			}
			if r.Key == nil {
				p.Open = r
			} else {
				p.OpenRows = append(p.OpenRows, r)
			}
		}
	}
	return out, nil
}

// SideReport is what an agent found out about a table on its side.
type SideReport struct {
	TableID   int32
	Key       []string
	KeyTypes  []string
	LayoutID  int64
	Rows      *int64 // nil: not counted this time
	Estimated bool
	CountedAt time.Time
	CaptureOK bool
	Shape     string // what the table is made of
	Problem   string
	Unseen    bool // the agent could not look: only Problem says something
}

// ReportSide stores an agent's findings. Capture counts as unbroken since the
// first report of it after a report without; a report without, and one of another
// shape, ends open requests whose rows it makes doubtful.
//
// Each table is stored for itself: a push goes through several in an order of its own.
func (s *Store) ReportSide(ctx context.Context, site, side string, reports []SideReport) error {
	asBefore, err := s.found(ctx, side, reports)
	if err != nil {
		return err
	}
	for _, r := range reports {
		if asBefore[r.TableID] {
			continue
		}
		if err := s.in(ctx, func(tx pgx.Tx) error { return report(ctx, tx, side, r) }); err != nil {
			return err
		}
	}
	return s.in(ctx, func(tx pgx.Tx) error { return notify(ctx, tx, "site", site) })
}

func report(ctx context.Context, tx pgx.Tx, side string, r SideReport) error {
	if r.Unseen {
		_, err := tx.Exec(ctx, `UPDATE backfill_control.table_side SET problem = $3 WHERE table_id = $1 AND side = $2`, r.TableID, side, r.Problem)
		return err
	}
	if !r.CaptureOK {
		if err := broken(ctx, tx, r.TableID, side, r.Problem); err != nil {
			return err
		}
	}
	if r.Shape != "" {
		if err := reshaped(ctx, tx, r.TableID, side, r.Shape); err != nil {
			return err
		}
	}
	var layout *int64
	if r.LayoutID != 0 {
		layout = &r.LayoutID
	}
	_, err := tx.Exec(ctx, `
		UPDATE backfill_control.table_side SET
		       key = $3, key_types = $4, layout_id = $5,
		       row_count = coalesce($6, row_count), estimated = CASE WHEN $6::bigint IS NULL THEN estimated ELSE $7 END,
		       counted_at = CASE WHEN $6::bigint IS NULL THEN counted_at ELSE $8 END,
		       capture_since = CASE WHEN NOT $9 THEN NULL WHEN capture_ok THEN capture_since ELSE clock_timestamp() END,
		       capture_seen = CASE WHEN $9 THEN clock_timestamp() ELSE capture_seen END,
		       capture_ok = $9, problem = nullif($10, '')
		 WHERE table_id = $1 AND side = $2`,
		r.TableID, side, r.Key, r.KeyTypes, layout, r.Rows, r.Estimated, r.CountedAt, r.CaptureOK, r.Problem)
	return err
}

// found stores, in one statement, the counts of tables of which nothing else has changed
// since they were last reported, and returns those. An agent reports each of its tables
// twice a minute, and of most there is never more to be said.
func (s *Store) found(ctx context.Context, side string, reports []SideReport) (map[int32]bool, error) {
	type report struct {
		ID        int32     `json:"id"`
		Key       []string  `json:"key"`
		KeyTypes  []string  `json:"key_types"`
		Layout    int64     `json:"layout"`
		Rows      *int64    `json:"rows"`
		Estimated bool      `json:"estimated"`
		At        time.Time `json:"at"`
		Capture   bool      `json:"capture"`
		Shape     string    `json:"shape"`
		Problem   string    `json:"problem"`
	}
	all := []report{}
	for _, r := range reports {
		if !r.Unseen {
			all = append(all, report{r.TableID, r.Key, r.KeyTypes, r.LayoutID, r.Rows, r.Estimated, r.CountedAt, r.CaptureOK, r.Shape, r.Problem})
		}
	}
	text, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	// An open request that the report makes doubtful is ended, whatever was known before.
	rows, err := s.pool.Query(ctx, `
		WITH r AS MATERIALIZED (
		    SELECT * FROM json_to_recordset($2::text::json) r (id int, key text[], key_types text[], layout bigint, rows bigint, estimated bool, at timestamptz, capture bool, shape text, problem text)),
		free AS MATERIALIZED (
		    SELECT s.table_id FROM backfill_control.table_side s JOIN r ON r.id = s.table_id
		     WHERE s.side = $1
		       AND (s.key, s.key_types, coalesce(s.layout_id, 0), s.capture_ok, coalesce(s.shape, ''), coalesce(s.problem, ''))
		           IS NOT DISTINCT FROM (r.key, r.key_types, r.layout, r.capture, r.shape, r.problem)
		       AND NOT EXISTS (SELECT FROM backfill_control.request q JOIN backfill_control.direction d ON d.id = q.direction AND d.from_side = s.side
		                        WHERE q.table_id = s.table_id AND q.state = ANY ($3) AND (NOT r.capture OR q.shape IS DISTINCT FROM r.shape))`+skipBusy+`)
		UPDATE backfill_control.table_side s
		   SET row_count = coalesce(r.rows, s.row_count), estimated = CASE WHEN r.rows IS NULL THEN s.estimated ELSE r.estimated END,
		       counted_at = CASE WHEN r.rows IS NULL THEN s.counted_at ELSE r.at END, capture_seen = CASE WHEN r.capture THEN clock_timestamp() ELSE s.capture_seen END
		  FROM r JOIN free ON free.table_id = r.id WHERE s.table_id = r.id AND s.side = $1
		RETURNING s.table_id`, side, string(text), backfill.OpenStates())
	if err != nil {
		return nil, err
	}
	same := map[int32]bool{}
	var id int32
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error { same[id] = true; return nil })
	return same, err
}
