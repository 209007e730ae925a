package control

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/connect"
)

// Site is a pair of databases kept in sync.
type Site struct {
	Name      string
	Epoch     int
	CreatedAt time.Time
	// SecondPerson says that whoever asked for a backfill may not approve it.
	SecondPerson bool
	// OneDatabase says that the sides are in one database: each table goes to another one
	// there, by a mapping.
	OneDatabase bool
	Sides       []Side // exactly two, by name
}

// Side is one of a site's databases as its agent last described it.
type Side struct {
	Name     string
	Agent    string
	SeenAt   *time.Time
	Database string
	Problem  string
}

// Lag is what waits in one direction.
type Lag struct {
	backfill.Direction
	Waiting   int64      // changes not yet acknowledged, those in the outbox and those of stopped tables included
	Outbox    int64      // of them in the source's outbox, not yet pushed
	OutboxAt  *time.Time // when the source's agent last told that, nil when it never did
	Oldest    *time.Time // since when the oldest of them has waited
	AppliedAt *time.Time
}

// CreateSite records a site and its two sides, which are two databases.
func (s *Store) CreateSite(ctx context.Context, by, name string, sides [2]string) error {
	return s.createSite(ctx, by, name, sides, false)
}

// CreateSiteInOne records a site whose two sides are in one database.
func (s *Store) CreateSiteInOne(ctx context.Context, by, name string, sides [2]string) error {
	return s.createSite(ctx, by, name, sides, true)
}

func (s *Store) createSite(ctx context.Context, by, name string, sides [2]string, inOne bool) error {
	if err := backfill.CheckName("site", name); err != nil {
		return err
	}
	for _, side := range sides {
		if err := backfill.CheckName("side", side); err != nil {
			return err
		}
	}
	if sides[0] == sides[1] {
		return backfill.Errorf(backfill.Invalid, "a site has two sides with different names, both are %q", sides[0])
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO backfill_control.site (name, one_database) VALUES ($1, $2)`, name, inOne)
		if sqlState(err) == "23505" {
			return backfill.Errorf(backfill.Conflict, "site %s exists already", name)
		}
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO backfill_control.side (site, name) VALUES ($1, $2), ($1, $3)`,
			name, sides[0], sides[1]); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO backfill_control.direction (site, from_side, to_side) VALUES ($1, $2, $3), ($1, $3, $2)`,
			name, sides[0], sides[1]); err != nil {
			return err
		}
		if err := audit(ctx, tx, by, "site.create", name, name, map[string]any{"sides": sides, "one_database": inOne}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", name)
	})
}

// SetSecondPerson says whether whoever asks for a backfill of a site may approve it too.
func (s *Store) SetSecondPerson(ctx context.Context, by, name string, second bool) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		var before bool
		if err := tx.QueryRow(ctx, `SELECT second_person FROM backfill_control.site WHERE name = $1 FOR UPDATE`, name).Scan(&before); err != nil {
			return one(err, "site %q", name)
		}
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.site SET second_person = $2 WHERE name = $1`, name, second); err != nil {
			return err
		}
		word := map[bool]string{true: "on", false: "off"}
		if err := audit(ctx, tx, by, "site.change", name, name, map[string]any{"second_person": word[second], "before": word[before]}); err != nil {
			return err
		}
		return notify(ctx, tx, "site", name)
	})
}

// Sites lists all sites by name.
func (s *Store) Sites(ctx context.Context) ([]Site, error) {
	return s.sites(ctx, "")
}

// Site returns one site, or NotFound.
func (s *Store) Site(ctx context.Context, name string) (*Site, error) {
	all, err := s.sites(ctx, name)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, backfill.Errorf(backfill.NotFound, "no site %q", name)
	}
	return &all[0], nil
}

func (s *Store) sites(ctx context.Context, only string) ([]Site, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT site.name, site.epoch, site.created_at, site.second_person, site.one_database,
		       side.name, coalesce(side.agent, ''), side.agent_seen_at, coalesce(side.database, ''), coalesce(side.problem, '')
		  FROM backfill_control.site JOIN backfill_control.side ON side.site = site.name
		 WHERE $1 = '' OR site.name = $1
		 ORDER BY site.name, side.name`, only)
	if err != nil {
		return nil, err
	}
	var out []Site
	var site Site
	var side Side
	_, err = pgx.ForEachRow(rows, []any{&site.Name, &site.Epoch, &site.CreatedAt, &site.SecondPerson, &site.OneDatabase,
		&side.Name, &side.Agent, &side.SeenAt, &side.Database, &side.Problem}, func() error {
		if len(out) == 0 || out[len(out)-1].Name != site.Name {
			out = append(out, site)
		}
		last := &out[len(out)-1]
		last.Sides = append(last.Sides, side)
		return nil
	})
	return out, err
}

// Direction returns the direction from a side of a site, or NotFound.
func (s *Store) Direction(ctx context.Context, site, from string) (backfill.Direction, error) {
	d := backfill.Direction{Site: site, From: from}
	err := s.pool.QueryRow(ctx, `SELECT id, to_side FROM backfill_control.direction WHERE site = $1 AND from_side = $2`,
		site, from).Scan(&d.ID, &d.To)
	return d, one(err, "side %q of a site %q", from, site)
}

// Lag returns what waits in both directions of a site. Staged rows are not in it.
func (s *Store) Lag(ctx context.Context, site string) ([]Lag, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT d.id, d.site, d.from_side, d.to_side, d.applied_at, q.waiting + o.waiting, o.waiting, n.outbox_at, least(q.oldest, o.oldest)
		  FROM backfill_control.direction d
		  JOIN backfill_control.side n ON n.site = d.site AND n.name = d.from_side,
		       LATERAL (SELECT coalesce(sum(s.outbox), 0)::bigint AS waiting, min(s.outbox_oldest) AS oldest
		                  FROM backfill_control.table_config t JOIN backfill_control.table_side s ON s.table_id = t.id AND s.side = d.from_side
		                 WHERE t.site = d.site) o,
		       LATERAL (SELECT count(*) AS waiting, min(created_at) AS oldest
		                  FROM backfill_control.entry e
		                 WHERE e.direction = d.id AND `+undelivered+` AND NOT e.dropped) q
		 WHERE d.site = $1 ORDER BY d.from_side`, site)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (l Lag, err error) {
		err = r.Scan(&l.ID, &l.Site, &l.From, &l.To, &l.AppliedAt, &l.Waiting, &l.Outbox, &l.OutboxAt, &l.Oldest)
		return l, err
	})
}

// AgentSeen records that an agent of a side is alive, where it looks, and what
// keeps it from working ("" when nothing does).
func (s *Store) AgentSeen(ctx context.Context, site, side, agent, database, problem string) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		var changed bool
		err := tx.QueryRow(ctx, `
			UPDATE backfill_control.side n
			   SET agent = $3, agent_seen_at = clock_timestamp(), database = $4, problem = nullif($5, '')
			  FROM backfill_control.side o
			 WHERE n.site = $1 AND n.name = $2 AND o.site = n.site AND o.name = n.name
			RETURNING coalesce(o.problem, '') <> $5 OR o.agent_seen_at IS NULL`,
			site, side, agent, database, problem).Scan(&changed)
		if err != nil {
			return one(err, "side %q of a site %q", side, site)
		}
		if !changed {
			return nil
		}
		return notify(ctx, tx, "site", site)
	})
}

// Where names the control database without credentials, and tells its size for people.
func (s *Store) Where(ctx context.Context) (where, size string, err error) {
	c := s.pool.Config().ConnConfig
	err = s.pool.QueryRow(ctx, `SELECT pg_size_pretty(pg_database_size(current_database()))`).Scan(&size)
	return connect.Address(c.Host, c.Port) + "/" + c.Database, size, err
}
