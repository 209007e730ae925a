// Package control is the control database: sites and tables, requests and their
// staged rows, the queue with its history, and who decided what. All its SQL is
// here, one file a noun.
package control

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"backfill/internal/backfill"
	"backfill/internal/connect"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Store reads and writes the control database. It is safe for concurrent use.
type Store struct {
	pool     *pgxpool.Pool
	releases sync.Map // direction's id → chan struct{}, full while a release has its turn
}

// Open connects to a control database and checks that its schema is the one this
// program was built with; Migrate brings it there.
func Open(ctx context.Context, dsn string) (*Store, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, explain(err)
	}
	pin(cfg.ConnConfig)
	cfg.MaxConns = max(cfg.MaxConns, 16)
	// What a busy moment needed is given back: a control database may have thousands of these pools.
	cfg.MaxConnIdleTime = min(cfg.MaxConnIdleTime, time.Minute)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, explain(err)
	}
	s := &Store{pool: pool}
	if err := s.Ping(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return s, nil
}

// oldest is the oldest server version the schema is written for. A test may raise it.
var oldest = 140000

// explain says of what could not be done with the control database why, and what to do.
func explain(err error) error {
	if sqlState(err) == "42501" {
		return fmt.Errorf("control database: %w: let its role own the schema backfill_control, and have CREATE on the database", err)
	}
	if e := connect.Explain("the control database", err); e != err {
		return e
	}
	return fmt.Errorf("control database: %w", err)
}

// pin sets what the store relies on whatever the database or role has as default.
func pin(c *pgx.ConnConfig) {
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = 10 * time.Second
	}
	for name, value := range map[string]string{
		"application_name": "backfill-control", "synchronous_commit": "on", "timezone": "UTC", "datestyle": "ISO",
		"default_transaction_isolation": "read committed", "default_transaction_read_only": "off",
		"search_path": "pg_catalog", "statement_timeout": "0", "client_encoding": "UTF8",
		// Our statements read few rows of large tables. Compiling one takes longer than it
		// does, and the planner would from some size of the tables on.
		"jit": "off",
		// A process that was stopped in the middle must not keep a direction's lock.
		"idle_in_transaction_session_timeout": "5min",
	} {
		c.RuntimeParams[name] = value
	}
	connect.BeWatched(c)
}

// Migrate brings the schema of a control database up to date and returns the
// versions applied. Several processes may call it at once.
func Migrate(ctx context.Context, dsn string) ([]int64, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, explain(err)
	}
	pin(cfg)
	// Programs that work meanwhile never queue behind a migration for long: it comes again.
	cfg.RuntimeParams["lock_timeout"] = "3s"
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	var version int
	if err := db.QueryRowContext(ctx, `SELECT current_setting('server_version_num')::int`).Scan(&version); err != nil {
		return nil, explain(err)
	}
	if version < oldest {
		return nil, fmt.Errorf("the control database's server is of version %d, at least %d is needed: use a newer server", version/10000, oldest/10000)
	}
	if _, err := db.ExecContext(ctx, `
		SELECT pg_advisory_xact_lock(hashtext('backfill_control'));
		CREATE SCHEMA IF NOT EXISTS backfill_control`); err != nil {
		return nil, explain(err)
	}
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	// Two processes that start at once take turns.
	turn, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return nil, err
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName("backfill_control.schema_version"), goose.WithSessionLocker(turn), goose.WithAllowOutofOrder(true))
	if err != nil {
		return nil, fmt.Errorf("migrations: %w", err)
	}
	var out []int64
	for deadline := time.Now().Add(time.Minute); ; {
		done, err := p.Up(ctx)
		var partial *goose.PartialError
		if errors.As(err, &partial) {
			done = partial.Applied
		}
		for _, r := range done {
			out = append(out, r.Source.Version)
		}
		if err == nil {
			break
		}
		if sqlState(err) != "55P03" || time.Now().After(deadline) {
			return out, fmt.Errorf("migrate: %w", explain(err))
		}
		select {
		case <-ctx.Done():
			return out, ctx.Err()
		case <-time.After(time.Second):
		}
	}
	s, err := Open(ctx, dsn) // which has been migrated further than this program can work with, perhaps
	if err != nil {
		return out, err
	}
	s.Disconnect()
	return out, nil
}

// Ping fails when the database is away, lacks a migration of this program, or has one
// that needs a newer program.
func (s *Store) Ping(ctx context.Context) error {
	files, err := fs.ReadDir(migrations, "migrations")
	if err != nil {
		return err
	}
	known := make([]int64, 0, len(files))
	for _, f := range files {
		version, err := goose.NumericComponent(f.Name())
		if err != nil {
			return err
		}
		known = append(known, version)
	}
	// Versions may have gaps, and one that was written later may have a lower number.
	var missing bool
	var unknown, needed int64
	err = s.pool.QueryRow(ctx, `
		WITH have AS (SELECT version_id FROM backfill_control.schema_version WHERE is_applied AND version_id > 0)
		SELECT EXISTS (SELECT FROM unnest($1::bigint[]) k WHERE k NOT IN (SELECT version_id FROM have)),
		       coalesce((SELECT max(version_id) FROM have WHERE version_id <> ALL ($1)), 0),
		       coalesce((SELECT oldest FROM backfill_control.compatible), 0)`, known).Scan(&missing, &unknown, &needed)
	switch {
	case sqlState(err) == "42P01" || err == nil && missing:
		return backfill.Errorf(backfill.Unavailable, "the control database's schema is not up to date: run backfill migrate of this version")
	case err != nil:
		return explain(err)
	case unknown > 0 && needed > slices.Max(known):
		return backfill.Errorf(backfill.Unavailable, "the control database's schema has version %d, this program knows %d and at least %d is needed: use a newer program", unknown, slices.Max(known), needed)
	}
	return nil
}

// WhileKnown runs what works on the control database, and ends it when that is migrated
// to a schema that this program cannot work with.
func (s *Store) WhileKnown(ctx context.Context, run func(context.Context) error) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	tick := time.NewTicker(lookAtSchema)
	defer tick.Stop()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if err := s.Ping(ctx); backfill.CodeOf(err) == backfill.Unavailable {
					end(err)
				}
			}
		}
	}()
	err := run(ctx)
	if cause := context.Cause(ctx); backfill.CodeOf(cause) == backfill.Unavailable {
		return cause
	}
	return err
}

// lookAtSchema is how often a process looks whether it still knows the schema. A test
// may shorten it.
var lookAtSchema = 10 * time.Second

// Disconnect ends all connections.
func (s *Store) Disconnect() { s.pool.Close() }

// Now is the control database's clock, the one leases are counted by.
func (s *Store) Now(ctx context.Context) (now time.Time, err error) {
	err = s.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	return now, err
}

// in runs fn in one READ COMMITTED transaction.
func (s *Store) in(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, s.pool, fn)
}

// inOrder is like in, for taking a few of very many rows in the order of an index. The planner,
// which knows nothing of rows just added, or has planned for an empty table, would gather
// all of them and sort those. It holds for all of the transaction's statements.
func (s *Store) inOrder(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, s.pool, ordered, fn)
}

var ordered = pgx.TxOptions{BeginQuery: "BEGIN; SET LOCAL enable_sort = off"}

// lastSeq is the SELECT of the highest seq of a direction's queue and history. It is no
// max(), which may read all of them.
func lastSeq(direction string) string {
	return `SELECT seq FROM backfill_control.entry WHERE direction = ` + direction + ` ORDER BY seq DESC LIMIT 1`
}

func sqlState(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return ""
}

// one turns pgx.ErrNoRows into a NotFound of the thing named.
func one(err error, format string, args ...any) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return backfill.Errorf(backfill.NotFound, "no "+format, args...)
	}
	return err
}
