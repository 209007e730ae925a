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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"backfill/internal/backfill"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Store reads and writes the control database. It is safe for concurrent use.
type Store struct {
	pool *pgxpool.Pool
}

// Open connects to a control database and checks that its schema is the one this
// program was built with; Migrate brings it there.
func Open(ctx context.Context, dsn string) (*Store, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		// pgx's own message may quote the connection string.
		return nil, errors.New("control database: the connection string cannot be understood")
	}
	pin(cfg.ConnConfig)
	cfg.MaxConns = max(cfg.MaxConns, 16)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("control database: %w", redact(err))
	}
	s := &Store{pool: pool}
	if err := s.Ping(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return s, nil
}

// pin sets what the store relies on whatever the database or role has as default.
func pin(c *pgx.ConnConfig) {
	for name, value := range map[string]string{
		"application_name": "backfill-control", "synchronous_commit": "on", "timezone": "UTC", "datestyle": "ISO",
		"default_transaction_isolation": "read committed", "default_transaction_read_only": "off",
		"search_path": "pg_catalog", "statement_timeout": "0", "client_encoding": "UTF8",
		// A process that was stopped in the middle must not keep a direction's lock.
		"idle_in_transaction_session_timeout": "5min",
	} {
		c.RuntimeParams[name] = value
	}
}

// Migrate brings the schema of a control database up to date and returns the
// versions applied. Several processes may call it at once.
func Migrate(ctx context.Context, dsn string) ([]int64, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("control database: the connection string cannot be understood")
	}
	pin(cfg)
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	if _, err := db.ExecContext(ctx, `
		SELECT pg_advisory_xact_lock(hashtext('backfill_control'));
		CREATE SCHEMA IF NOT EXISTS backfill_control`); err != nil {
		return nil, fmt.Errorf("control database: %w", redact(err))
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
		goose.WithTableName("backfill_control.schema_version"), goose.WithSessionLocker(turn))
	if err != nil {
		return nil, fmt.Errorf("migrations: %w", err)
	}
	done, err := p.Up(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate control database: %w", err)
	}
	var out []int64
	for _, r := range done {
		out = append(out, r.Source.Version)
	}
	return out, nil
}

// Ping fails when the database is away or its schema is another version's.
func (s *Store) Ping(ctx context.Context) error {
	files, err := fs.ReadDir(migrations, "migrations")
	if err != nil {
		return err
	}
	var have int
	err = s.pool.QueryRow(ctx, `SELECT coalesce(max(version_id), 0) FROM backfill_control.schema_version WHERE is_applied`).Scan(&have)
	switch want := len(files); {
	case sqlState(err) == "42P01" || err == nil && have < want:
		return backfill.Errorf(backfill.Unavailable, "the control database's schema is not up to date: run backfill migrate")
	case err != nil:
		return fmt.Errorf("control database: %w", redact(err))
	case have > want:
		return backfill.Errorf(backfill.Unavailable, "the control database's schema is of version %d, this program knows up to %d: use a newer program", have, want)
	}
	return nil
}

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

func sqlState(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return ""
}

// redact keeps the connection string of a failed connection out of messages:
// pgx's error names user, host and database, never a password, but a parse error
// quotes what it was given.
func redact(err error) error {
	var parse *pgconn.ParseConfigError
	if errors.As(err, &parse) {
		return errors.New("the connection string cannot be understood")
	}
	return err
}

// one turns pgx.ErrNoRows into a NotFound of the thing named.
func one(err error, format string, args ...any) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return backfill.Errorf(backfill.NotFound, "no "+format, args...)
	}
	return err
}
