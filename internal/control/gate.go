package control

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/pace"
)

// Gate is a gate with what was last measured for it.
type Gate struct {
	pace.Gate
	Reading    *pace.Reading // nil before the first
	MeasuredAt *time.Time
	Asked      bool // a backfill or a reconciliation is under way that asks it
}

// Judge says whether the gate is open.
func (g *Gate) Judge() pace.Verdict { return g.Gate.Judge(g.Reading) }

// GateState is how a gate is shown.
type GateState string

// The states of gates.
const (
	GateOpen   GateState = "open"
	GateClosed GateState = "closed"
	GateIdle   GateState = "idle"  // nothing asks it: the verdict is of the last time it was measured
	GateLimit  GateState = "limit" // it is no gate that closes, but a limit of rows per second
)

// idleReading is how old a reading may be while nothing asks: agents then measure
// twice a minute, for people to see.
const idleReading = 45 * time.Second

// State is what people are told of the gate. A walk that asks for it goes by Judge.
func (g *Gate) State() (GateState, pace.Verdict) {
	v := g.Judge()
	switch r := g.Reading; {
	case !g.Measured():
		return GateLimit, v
	case v.Open:
		return GateOpen, v
	case g.Asked || r == nil || r.Age > idleReading:
		return GateClosed, v
	default:
		last := g.Gate.Judge(&pace.Reading{Value: r.Value, Problem: r.Problem})
		if last.Why == v.Why {
			return GateClosed, v // it is not its age that closes it
		}
		return GateIdle, last
	}
}

const gateColumns = `g.name, g.side, coalesce(t.name, ''), g.kind, g."limit", g.url, g.query, g.max_age,
	g.value, g.problem, g.measured_at, extract(epoch FROM clock_timestamp() - g.measured_at)::float8,
	EXISTS (SELECT FROM backfill_control.request r JOIN backfill_control.direction d ON d.id = r.direction
	         WHERE d.site = g.site AND (g.table_id IS NULL OR r.table_id = g.table_id) AND r.state IN ('PENDING', 'IN_PROGRESS', 'RELEASING') AND NOT r.paused)
	OR EXISTS (SELECT FROM backfill_control.reconciliation r JOIN backfill_control.direction d ON d.id = r.direction
	         WHERE d.site = g.site AND (g.table_id IS NULL OR r.table_id = g.table_id) AND r.state IN ('PENDING', 'RUNNING') AND r.mode <> 'shadow')`

const gateFrom = ` FROM backfill_control.gate g LEFT JOIN backfill_control.table_config t ON t.id = g.table_id `

func scanGate(row pgx.CollectableRow) (g Gate, err error) {
	var value, age *float64
	var problem string
	err = row.Scan(&g.Name, &g.Side, &g.Table, &g.Kind, &g.Limit, &g.URL, &g.Query, &g.MaxAge, &value, &problem, &g.MeasuredAt, &age, &g.Asked)
	if age != nil {
		g.Reading = &pace.Reading{Problem: problem, Age: time.Duration(*age * float64(time.Second))}
		if value != nil {
			g.Reading.Value = *value
		} else if problem == "" {
			g.Reading.Problem = "there is no value"
		}
	}
	return g, err
}

// Gates lists the gates of a site by name.
func (s *Store) Gates(ctx context.Context, site string) ([]Gate, error) {
	return s.gates(ctx, `WHERE g.site = $1 ORDER BY g.name`, site)
}

// GatesOf lists the gates that hold back backfills and reconciliations of a table, by name.
func (s *Store) GatesOf(ctx context.Context, site, table string) ([]Gate, error) {
	return s.gates(ctx, `WHERE g.site = $1 AND (g.table_id IS NULL OR t.name = $2) ORDER BY g.name`, site, table)
}

func (s *Store) gates(ctx context.Context, where string, args ...any) ([]Gate, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+gateColumns+gateFrom+where, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanGate)
}

// PutGates adds or changes gates of a site, all or none of them; with only, gates
// that are not named are removed. A changed gate has to be measured anew.
func (s *Store) PutGates(ctx context.Context, by, site string, gates []pace.Gate, only bool) error {
	st, err := s.Site(ctx, site)
	if err != nil {
		return err
	}
	gates = slices.Clone(gates)
	names := []string{}
	for i := range gates {
		g := &gates[i]
		if field, problem := g.Check(); problem != "" {
			return &backfill.Error{Code: backfill.Invalid, Message: fmt.Sprintf("gate %q: %s: %s", g.Name, field, problem),
				Fields: []backfill.FieldError{{Field: fmt.Sprintf("gates.%d.%s", i, field), Message: problem}}}
		}
		if slices.Contains(names, g.Name) {
			return backfill.Errorf(backfill.Invalid, "two gates are named %q", g.Name)
		}
		names = append(names, g.Name)
		if !slices.ContainsFunc(st.Sides, func(x Side) bool { return x.Name == g.Side }) {
			return backfill.Errorf(backfill.NotFound, "gate %q: no side %q of site %q: its sides are %s and %s", g.Name, g.Side, site, st.Sides[0].Name, st.Sides[1].Name)
		}
		if g.Table != "" {
			t, err := s.Table(ctx, site, g.Table)
			if err != nil {
				return err
			}
			g.Table = t.Name
		}
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		for _, g := range gates {
			before, err := standing(ctx, tx, gateStanding, site, g.Name)
			if err != nil {
				return err
			}
			tag, err := tx.Exec(ctx, `
				INSERT INTO backfill_control.gate AS g (site, name, side, table_id, kind, "limit", url, query, max_age)
				VALUES ($1, $2, $3, (SELECT id FROM backfill_control.table_config WHERE site = $1 AND name = $4 AND removed_at IS NULL), $5, $6, $7, $8, $9)
				ON CONFLICT (site, name) DO UPDATE SET side = excluded.side, table_id = excluded.table_id, kind = excluded.kind, "limit" = excluded."limit",
				    url = excluded.url, query = excluded.query, max_age = excluded.max_age, value = NULL, problem = '', measured_at = NULL
				 WHERE (g.side, g.table_id, g.kind, g."limit", g.url, g.query, g.max_age)
				       IS DISTINCT FROM (excluded.side, excluded.table_id, excluded.kind, excluded."limit", excluded.url, excluded.query, excluded.max_age)`,
				site, g.Name, g.Side, g.Table, g.Kind, g.Limit, g.URL, g.Query, g.MaxAge)
			if err != nil {
				return err
			}
			if tag.RowsAffected() > 0 {
				if err := audit(ctx, tx, by, "gate.put", site, g.Name, map[string]any{"gate": g, "before": before}); err != nil {
					return err
				}
			}
		}
		if only {
			rows, err := tx.Query(ctx, `DELETE FROM backfill_control.gate WHERE site = $1 AND name <> ALL ($2) RETURNING name, side, kind, "limit", url, query, max_age::text AS max_age`, site, names)
			if err != nil {
				return err
			}
			gone, err := pgx.CollectRows(rows, pgx.RowToMap)
			if err != nil {
				return err
			}
			for _, before := range gone {
				name := before["name"].(string)
				delete(before, "name")
				if err := audit(ctx, tx, by, "gate.remove", site, name, map[string]any{"before": before}); err != nil {
					return err
				}
			}
		}
		return s.gatesChanged(ctx, tx, site)
	})
}

const gateStanding = `SELECT side, kind, "limit", url, query, max_age::text AS max_age FROM backfill_control.gate WHERE site = $1 AND name = $2`

// DeleteGate removes a gate, or says NotFound.
func (s *Store) DeleteGate(ctx context.Context, by, site, name string) error {
	if _, err := s.Site(ctx, site); err != nil {
		return err
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		before, err := standing(ctx, tx, gateStanding, site, name)
		if err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `DELETE FROM backfill_control.gate WHERE site = $1 AND name = $2`, site, name)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return backfill.Errorf(backfill.NotFound, "no gate %q of site %q", name, site)
		}
		if err := audit(ctx, tx, by, "gate.remove", site, name, map[string]any{"before": before}); err != nil {
			return err
		}
		return s.gatesChanged(ctx, tx, site)
	})
}

// gatesChanged makes agents measure at once, and pages look.
func (s *Store) gatesChanged(ctx context.Context, tx pgx.Tx, site string) error {
	if err := notify(ctx, tx, "gates", site); err != nil {
		return err
	}
	return notify(ctx, tx, "site", site)
}

// Measurement is what an agent found for a gate: a value, or why there is none.
type Measurement struct {
	Gate    pace.Gate
	Value   float64
	Problem string
}

// Measured stores what an agent has just measured, unless the gate was changed
// since it read what to measure.
func (s *Store) Measured(ctx context.Context, site string, all []Measurement) error {
	batch := &pgx.Batch{}
	for _, m := range all {
		var value *float64
		if m.Problem == "" {
			value = &m.Value
		}
		batch.Queue(`UPDATE backfill_control.gate SET value = $3, problem = $4, measured_at = clock_timestamp()
			WHERE site = $1 AND name = $2 AND side = $5 AND kind = $6 AND url = $7 AND query = $8`,
			site, m.Gate.Name, value, m.Problem, m.Gate.Side, m.Gate.Kind, m.Gate.URL, m.Gate.Query)
	}
	return s.pool.SendBatch(ctx, batch).Close()
}

// Duty is what an agent has to measure: the gates of its side, and whether something
// is under way that asks one of them.
type Duty struct {
	Gates []pace.Gate
	Busy  bool
}

// Duty returns what the agent of a side has to measure.
func (s *Store) Duty(ctx context.Context, site, side string) (d Duty, err error) {
	all, err := s.gates(ctx, `WHERE g.site = $1 AND g.side = $2 ORDER BY g.name`, site, side)
	for _, g := range all {
		if g.Measured() {
			d.Gates = append(d.Gates, g.Gate)
			d.Busy = d.Busy || g.Asked
		}
	}
	return d, err
}

// QueueDepth counts the changes of a direction that are not yet acknowledged, up to
// a number that is enough to tell.
func (s *Store) QueueDepth(ctx context.Context, direction int32, enough int64) (n int64, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT count(*) FROM (
		    SELECT FROM backfill_control.direction d JOIN backfill_control.entry e ON e.direction = d.id AND e.seq > d.applied_seq AND NOT e.dropped
		     WHERE d.id = $1 LIMIT $2) q`, direction, enough).Scan(&n)
	return n, err
}

// Lead is how far a direction's queue is ahead of its receiver.
type Lead struct {
	Rows    int64 // queued and not acknowledged; some more where directions push at once
	Applied int64 // the receiver has acknowledged up to here
	Away    bool  // the receiver's agent has given no sign of life for some time
}

// Lead tells how far a direction's queue is ahead, from the batches it came in.
func (s *Store) Lead(ctx context.Context, direction int32) (l Lead, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT coalesce((SELECT sum(b.last_seq - greatest(b.first_seq, d.applied_seq + 1) + 1) FROM backfill_control.batch b WHERE b.direction = d.id AND b.last_seq > d.applied_seq), 0)::bigint,
		       d.applied_seq, coalesce(n.agent_seen_at < clock_timestamp() - interval '15 s', false)
		  FROM backfill_control.direction d JOIN backfill_control.side n ON n.site = d.site AND n.name = d.to_side WHERE d.id = $1`, direction).
		Scan(&l.Rows, &l.Applied, &l.Away)
	return l, err
}

// MayGo tells whether a request's walk (under a lease) or release (lease nil) may go
// on as far as people are concerned: nil, ErrPaused or ErrFenced.
func (s *Store) MayGo(ctx context.Context, id int64, l *Lease) error {
	var state backfill.State
	var paused bool
	var epoch int64
	if err := s.pool.QueryRow(ctx, `SELECT state, paused, epoch FROM backfill_control.request WHERE id = $1`, id).Scan(&state, &paused, &epoch); err != nil {
		return one(err, "request %d", id)
	}
	switch {
	case l != nil && (epoch != l.Epoch || state != backfill.InProgress), l == nil && state != backfill.Releasing:
		return ErrFenced
	case paused:
		return ErrPaused
	}
	return nil
}

// Throttled records that a request was held back by a closed gate for a while, and
// says why, for people to read.
func (s *Store) Throttled(ctx context.Context, id int64, g pace.Gate, why string, d time.Duration) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.request SET waiting = $2, waiting_since = coalesce(waiting_since, clock_timestamp() - $3::interval)
			 WHERE id = $1 AND NOT paused AND state IN ('IN_PROGRESS', 'RELEASING')`, id, "gate "+g.Name+": "+why, d)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if err := addThrottled(ctx, tx, id, g, d); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
}

// Slowed records time a request has spent keeping to a number of rows a second.
func (s *Store) Slowed(ctx context.Context, id int64, g pace.Gate, d time.Duration) error {
	return s.in(ctx, func(tx pgx.Tx) error { return addThrottled(ctx, tx, id, g, d) })
}

func addThrottled(ctx context.Context, tx pgx.Tx, id int64, g pace.Gate, d time.Duration) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO backfill_control.throttled AS t (request_id, gate, kind, seconds) VALUES ($1, $2, $3, $4)
		ON CONFLICT (request_id, gate) DO UPDATE SET seconds = t.seconds + excluded.seconds, kind = excluded.kind`, id, g.Name, g.Kind, d.Seconds())
	return err
}

// Going says that no gate holds a request back any more.
func (s *Store) Going(ctx context.Context, id int64) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE backfill_control.request SET waiting = '', waiting_since = NULL WHERE id = $1 AND NOT paused AND waiting_since IS NOT NULL`, id)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
}

// Throttle is how long a gate has held a request back in all.
type Throttle struct {
	Gate    string
	Kind    pace.Kind
	Seconds float64
}

// Throttles lists what has held a request back, longest first.
func (s *Store) Throttles(ctx context.Context, id int64) ([]Throttle, error) {
	rows, err := s.pool.Query(ctx, `SELECT gate, kind, seconds FROM backfill_control.throttled WHERE request_id = $1 ORDER BY seconds DESC, gate`, id)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Throttle])
}
