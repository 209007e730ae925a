package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"backfill/internal/backfill"
)

// Figures are the numbers of the whole installation, for monitoring. They hold no
// row data, and as many of each as there are sites, tables and gates.
type Figures struct {
	Open     []*backfill.Request // whole-table requests that are open
	Totals   []Total
	Lag      []Lag
	Sides    []SideFigures
	Gates    []SiteGate
	Capture  []CaptureFigure
	Aside    []AsideFigure
	Control  *time.Time // when a control worker was last seen
	Now      time.Time  // by the control database
	Disputes int64      // requests and workflows that disagreed, ever
}

// Total sums up all requests of a table and direction, those removed since too.
// What is "staged", "released", or "throttled " and a kind of gate.
type Total struct {
	backfill.Direction
	Table, What string
	Value       float64
}

// SideFigures is when a side's agent was last seen and whether it has a problem.
type SideFigures struct {
	Site, Side string
	SeenAt     *time.Time
	Problem    bool
}

// SiteGate is a gate and its site.
type SiteGate struct {
	Site string
	Gate
}

// CaptureFigure tells whether capture of a table is healthy on a side it is captured on.
type CaptureFigure struct {
	Site, Table, Side string
	OK                bool
	Dropped           int64
}

// AsideFigure counts changes set aside by the receiver of a direction.
type AsideFigure struct {
	Site, From, State string
	Count             int64
}

// Figures reads the numbers of the whole installation.
func (s *Store) Figures(ctx context.Context) (f Figures, err error) {
	if f.Now, err = s.Now(ctx); err != nil {
		return f, err
	}
	if f.Control, err = s.ControlSeen(ctx); err != nil {
		return f, err
	}
	open, err := s.Requests(ctx, RequestFilter{States: backfill.OpenStates(), Limit: 100_000})
	if err != nil {
		return f, err
	}
	for _, r := range open {
		if r.Key == nil {
			f.Open = append(f.Open, r)
		}
	}
	if f.Totals, err = list[Total](ctx, s, `
		SELECT d.id, d.site, d.from_side, d.to_side, t.name, x.what, sum(x.value)::float8
		  FROM (SELECT direction, table_id, what, value FROM backfill_control.tally
		        UNION ALL SELECT direction, table_id, 'staged', staged FROM backfill_control.request
		        UNION ALL SELECT direction, table_id, 'released', released FROM backfill_control.request
		        UNION ALL SELECT r.direction, r.table_id, 'throttled ' || h.kind, h.seconds FROM backfill_control.throttled h JOIN backfill_control.request r ON r.id = h.request_id) x
		  JOIN backfill_control.direction d ON d.id = x.direction JOIN backfill_control.table_config t ON t.id = x.table_id
		 GROUP BY d.id, t.name, x.what`); err != nil {
		return f, err
	}
	if f.Sides, err = list[SideFigures](ctx, s, `SELECT site, name, agent_seen_at, problem IS NOT NULL FROM backfill_control.side ORDER BY 1, 2`); err != nil {
		return f, err
	}
	if f.Capture, err = list[CaptureFigure](ctx, s, `
		SELECT t.site, t.name, s.side, s.capture_ok, s.dropped FROM backfill_control.table_config t JOIN backfill_control.table_side s ON s.table_id = t.id
		 WHERE t.active AND s.side = ANY (t.captured_from)`); err != nil {
		return f, err
	}
	if f.Aside, err = list[AsideFigure](ctx, s, `
		SELECT d.site, d.from_side, k.state, (SELECT count(*) FROM backfill_control.quarantine q WHERE q.direction = d.id AND q.state = k.state)
		  FROM backfill_control.direction d, unnest(ARRAY['held', 'quarantined']) k (state)`); err != nil {
		return f, err
	}
	if err := s.pool.QueryRow(ctx, `SELECT count(*) FROM backfill_control.audit WHERE action = 'sweep.disagreement'`).Scan(&f.Disputes); err != nil {
		return f, err
	}
	sites, err := s.Sites(ctx)
	if err != nil {
		return f, err
	}
	for _, site := range sites {
		lag, err := s.Lag(ctx, site.Name)
		if err != nil {
			return f, err
		}
		f.Lag = append(f.Lag, lag...)
		gates, err := s.Gates(ctx, site.Name)
		if err != nil {
			return f, err
		}
		for _, g := range gates {
			f.Gates = append(f.Gates, SiteGate{site.Name, g})
		}
	}
	return f, nil
}

func list[T any](ctx context.Context, s *Store, sql string, args ...any) ([]T, error) {
	rows, err := s.pool.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[T])
}

// Stat tells how the connections are used.
func (s *Store) Stat() *pgxpool.Stat { return s.pool.Stat() }
