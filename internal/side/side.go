// Package side is one side's database: the setup that captures keys, the outbox,
// the keyset pages of a walk, the apply of incoming changes, counts and checks.
// All its SQL is here; only an agent uses it.
package side

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"backfill/internal/connect"
	"backfill/internal/row"
)

// DB is the database of one side. It is safe for concurrent use.
type DB struct {
	Site, Side string
	pool       *pgxpool.Pool
	beats      *pgxpool.Pool // see Beat
	schema     string        // quoted
	met        atomic.Pointer[met]
	shared     atomic.Bool // with the other side
	detours    detours
}

// Open connects to the database of a side. The error names host and database but
// never the connection string.
func Open(ctx context.Context, site, name, dsn string) (*DB, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, connect.Explain("the database of "+site+"/"+name, err)
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "backfill-agent"
	cfg.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
	// No prepared statements: the connection may pass a transaction pooler.
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	cfg.ConnConfig.ConnectTimeout = 10 * time.Second
	cfg.MaxConns = max(cfg.MaxConns, 8)
	connect.Watch(cfg.ConnConfig)
	cfg.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		// A pooler may refuse; then its own limits hold.
		_, _ = c.PgConn().Exec(ctx, connect.Statement()).ReadAll()
		return ctx.Err()
	}
	cfg.MaxConnIdleTime = min(cfg.MaxConnIdleTime, time.Minute)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("database of %s/%s: %w", site, name, err)
	}
	// Beats have connections of their own: they are made while others are held.
	cfg = cfg.Copy()
	cfg.MaxConns, cfg.MinConns = 2, 0
	beats, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		pool.Close()
		return nil, fmt.Errorf("database of %s/%s: %w", site, name, err)
	}
	db := &DB{Site: site, Side: name, pool: pool, beats: beats, schema: row.Ident(SchemaName(site, name))}
	if err := db.check(ctx); err != nil {
		db.Close()
		if _, ok := err.(*connect.Failure); ok {
			return nil, err
		}
		return nil, fmt.Errorf("database of %s/%s: %w", site, name, err)
	}
	return db, nil
}

// oldest is the oldest server version the statements here are written for. A test
// may raise it.
var oldest = 140000

func (db *DB) check(ctx context.Context) error {
	var version int
	var recovery bool
	// Not yet under the pinned settings, which an old server may not know.
	if err := db.in(ctx, "BEGIN READ ONLY; SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0", func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT current_setting('server_version_num')::int, pg_is_in_recovery()`).Scan(&version, &recovery)
	}); err != nil {
		return err
	}
	if version < oldest {
		return fmt.Errorf("the server is of version %d, at least %d is needed: use a newer server", version/10000, oldest/10000)
	}
	if recovery {
		return errors.New("the server is a standby: an agent works on the primary, because a standby's snapshots cannot be compared: let the connection string lead there")
	}
	return nil
}

// Close ends all connections.
func (db *DB) Close() {
	db.pool.Close()
	db.beats.Close()
}

// Ping says whether the database answers.
func (db *DB) Ping(ctx context.Context) error { return db.pool.Ping(ctx) }

// Where names the database without credentials: host:port/database.
func (db *DB) Where() string {
	c := db.pool.Config().ConnConfig
	return connect.Address(c.Host, c.Port) + "/" + c.Database
}

// SchemaName is the schema that holds our objects on a side. It has site and side
// in it, so that a database can be a side of several sites.
func SchemaName(site, side string) string { return bounded("backfill_" + site + "_" + side) }

// bounded keeps a derived name within PostgreSQL's 63 bytes without letting two
// long names become one.
func bounded(name string) string {
	if len(name) <= 63 {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return name[:46] + "_" + hex.EncodeToString(sum[:8])
}

// pinned are the settings that decide how values are printed and read, and those
// that a role or database could have set against us. They are set in every
// transaction, because a session may be another's after a pooler.
const pinned = `
	SET LOCAL statement_timeout = 0;
	SET LOCAL search_path = pg_catalog, pg_temp;
	SET LOCAL row_security = off;
	SET LOCAL synchronous_commit = on;
	SET LOCAL standard_conforming_strings = on;
	SET LOCAL datestyle = 'ISO, MDY';
	SET LOCAL intervalstyle = 'postgres';
	SET LOCAL timezone = 'UTC';
	SET LOCAL extra_float_digits = 3;
	SET LOCAL bytea_output = 'hex';
	SET LOCAL lc_monetary = 'C';
	SET LOCAL xmloption = 'content';
	SET LOCAL array_nulls = on;
	SET LOCAL quote_all_identifiers = off;
	SET LOCAL lock_timeout = '3s';
	SET LOCAL idle_in_transaction_session_timeout = '5min';
	SET LOCAL jit = off`

// byIndex makes the planner look rows up by their key. What is looked up is bounded
// and the table may be large, but our temporary tables have no statistics, and a
// hash of the whole table for each batch would make a walk slower the longer it is.
const byIndex = `SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off;`

// Transactions of a side, all under the pinned settings.
const (
	// reading sees one snapshot, taken by its first query: locks come before it.
	reading = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;" + pinned + ";" + byIndex
	writing = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;" + pinned
)

func (db *DB) in(ctx context.Context, begin string, fn func(pgx.Tx) error) error {
	return db.over(ctx, db.pool, begin, fn)
}

// queryCanceled is PostgreSQL's error code of a statement that took too long.
const queryCanceled = "57014"

// over runs fn in a transaction of the pool. A statement_timeout that came with the
// session can cancel the statements that put it off: these are tried again.
func (db *DB) over(ctx context.Context, pool *pgxpool.Pool, begin string, fn func(pgx.Tx) error) error {
	var err error
	for range 20 {
		began := false
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: begin}, func(tx pgx.Tx) error {
			began = true
			return fn(tx)
		})
		if began || SQLState(err) != queryCanceled {
			break
		}
	}
	return connect.Explain("the database of "+db.Site+"/"+db.Side, err)
}

// do runs one statement in a writing transaction of its own.
func (db *DB) do(ctx context.Context, sql string, args ...any) error {
	return db.in(ctx, writing, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

// lock takes ACCESS SHARE on a table, before the transaction's snapshot: a
// snapshot older than a rewriting ALTER TABLE or a TRUNCATE would read no rows.
func lock(ctx context.Context, tx pgx.Tx, table string) error {
	_, err := tx.Exec(ctx, "LOCK TABLE "+table+" IN ACCESS SHARE MODE")
	return err
}

// SQLState is PostgreSQL's error code of err, or "".
func SQLState(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return ""
}

// Permanent reports whether trying again cannot help: PostgreSQL refuses the
// statement, the value, the login or the name.
func Permanent(err error) bool {
	code := SQLState(err)
	if code == "42P05" || code == "55P03" {
		return false
	}
	for _, class := range []string{"42", "22", "28", "3D", "3F"} {
		if strings.HasPrefix(code, class) {
			return true
		}
	}
	return false
}

// Message is PostgreSQL's own message of err, or err's text.
func Message(err error) string {
	var failed *connect.Failure
	if errors.As(err, &failed) {
		return failed.Error()
	}
	var pe *pgconn.PgError
	if errors.As(err, &pe) && pe.Detail != "" {
		return pe.Message + " (" + pe.Detail + ")"
	}
	return brief(err)
}

// brief is Message without the detail, which can hold the row.
func brief(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Message
	}
	return err.Error()
}
