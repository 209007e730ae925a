package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"backfill/internal/copypipe"
	"backfill/internal/local"
)

// settings of every server. Durability is the default; checkpoints are made between measurements rather than in them,
// for all contenders alike, and logical decoding is possible. Segments of the log are used again: to make one costs as
// much as to fill it, and whoever came after a checkpoint paid for it.
var settings = map[string]string{"shared_buffers": "512MB", "min_wal_size": "4GB", "max_wal_size": "16GB", "checkpoint_timeout": "1h", "wal_level": "logical"}

// explaining are the settings with which servers tell where their time went: in sum, and in their logs the plan of every
// statement that took a while.
var explaining = map[string]string{"shared_preload_libraries": "pg_stat_statements,auto_explain", "auto_explain.log_min_duration": "20ms",
	"auto_explain.log_analyze": "on", "auto_explain.log_timing": "off", "auto_explain.log_buffers": "on"}

// database is a database on a server of its own.
type database struct {
	*pgxpool.Pool
	server *local.Postgres
	dsn    string
}

// bench is what all parts share.
type bench struct {
	options
	report                    *report
	source, receiver, control *database
	product                   *product
	made                      map[string]bool // workloads whose tables are there
	dirs                      []string        // to be removed at the end
}

func (b *bench) say(format string, args ...any) {
	fmt.Printf(time.Now().Format("15:04:05 ")+format+"\n", args...)
}

// start starts the servers and the program under test. What it returns is to be stopped, also after an error.
func start(ctx context.Context, o options) (*bench, error) {
	b := &bench{options: o, report: newReport(o), made: map[string]bool{}}
	if o.dir == "" {
		dir, err := os.MkdirTemp("", "backfill-bench-")
		if err != nil {
			return b, err
		}
		b.dir, b.dirs = dir, append(b.dirs, dir)
	}
	if o.explain {
		maps.Copy(settings, explaining)
	}
	for name, db := range map[string]**database{"source": &b.source, "receiver": &b.receiver, "control": &b.control} {
		var err error
		if *db, err = b.open(ctx, name); err != nil {
			return b, err
		}
	}
	if err := b.source.QueryRow(ctx, `SELECT current_setting('server_version')`).Scan(&b.report.postgres); err != nil {
		return b, err
	}
	var err error
	b.product, err = startProduct(ctx, b)
	return b, err
}

func (b *bench) open(ctx context.Context, name string) (*database, error) {
	server, err := local.StartPostgres(ctx, local.PostgresOptions{Dir: filepath.Join(b.dir, name), Settings: settings})
	if err != nil {
		return nil, err
	}
	db := &database{server: server, dsn: server.DSN(name)}
	if err := server.CreateDatabase(ctx, name); err != nil {
		return db, err
	}
	cfg, err := pgxpool.ParseConfig(db.dsn)
	if err != nil {
		return db, err
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "bench"
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	if db.Pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return db, err
	}
	if b.explain {
		return db, db.exec(ctx, `CREATE EXTENSION IF NOT EXISTS pg_stat_statements`)
	}
	return db, nil
}

// stop ends everything that start began.
func (b *bench) stop() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if b.product != nil {
		err = b.product.stop(ctx)
	}
	for _, db := range []*database{b.source, b.receiver, b.control} {
		if db == nil {
			continue
		}
		if db.Pool != nil {
			db.Close()
		}
		err = errors.Join(err, db.server.Stop(ctx))
	}
	for _, dir := range b.dirs {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

func (db *database) exec(ctx context.Context, statements ...string) error {
	for _, sql := range statements {
		if _, err := db.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%.80s: %w", sql, err)
		}
	}
	return nil
}

// table makes a workload's table on both sides, with its rows on the source, and has the product capture it.
func (b *bench) table(ctx context.Context, w workload) error {
	if b.made[w.name] {
		return nil
	}
	if err := b.source.exec(ctx, w.create(), w.fill(b.rows/w.part), "VACUUM ANALYZE "+w.name); err != nil {
		return err
	}
	if err := b.receiver.exec(ctx, w.create()); err != nil {
		return err
	}
	b.made[w.name] = true
	return b.product.capture(ctx, w.name)
}

// hold empties the receiver's table and gives it what it is to hold.
func (b *bench) hold(ctx context.Context, w workload, h holding) error {
	if err := b.receiver.exec(ctx, "TRUNCATE "+w.name); err != nil || h == empty {
		return err
	}
	columns, err := b.columns(ctx, w)
	if err != nil {
		return err
	}
	if err := b.pipe(ctx, w.held(h, columns), w.name); err != nil {
		return err
	}
	return b.receiver.exec(ctx, "VACUUM ANALYZE "+w.name)
}

func (b *bench) columns(ctx context.Context, w workload) ([]string, error) {
	rows, err := b.source.Query(ctx, `SELECT attname FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0 ORDER BY attnum`, w.name)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// pipe copies the rows of a query on the source into a table of the receiver.
func (b *bench) pipe(ctx context.Context, query, table string) error {
	return b.receiver.AcquireFunc(ctx, func(to *pgxpool.Conn) error { return b.pipeInto(ctx, query, to.Conn(), table) })
}

func (b *bench) pipeInto(ctx context.Context, query string, to *pgx.Conn, table string) error {
	return b.source.AcquireFunc(ctx, func(from *pgxpool.Conn) error {
		return copypipe.Run(func(w io.Writer) error {
			_, err := from.Conn().PgConn().CopyTo(ctx, w, "COPY ("+query+") TO STDOUT")
			return err
		}, func(r io.Reader) error {
			_, err := to.PgConn().CopyFrom(ctx, r, "COPY "+table+" FROM STDIN")
			return err
		})
	})
}

// settle writes out what earlier work has left, so that it burdens nobody.
func (b *bench) settle(ctx context.Context) error {
	for _, db := range []*database{b.source, b.receiver, b.control} {
		if err := db.exec(ctx, "CHECKPOINT"); err != nil {
			return err
		}
	}
	return nil
}

// await looks again and again until done, or says in vain for what.
func await(ctx context.Context, what string, done func() (bool, error)) error {
	return awaitEvery(ctx, 20*time.Millisecond, what, done)
}

// awaitEvery is await of what costs something to look at.
func awaitEvery(ctx context.Context, every time.Duration, what string, done func() (bool, error)) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for deadline := time.Now().Add(30 * time.Minute); ; {
		if ok, err := done(); err != nil || ok {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("waited half an hour for %s", what)
		}
	}
}

// explained prints what each server has spent its time on since the last call.
func (b *bench) explained(ctx context.Context) error {
	if !b.explain {
		return nil
	}
	for name, db := range map[string]*database{"source": b.source, "receiver": b.receiver, "control": b.control} {
		rows, err := db.Query(ctx, `
			SELECT total_exec_time / 1000, calls, rows, regexp_replace(left(query, 160), '\s+', ' ', 'g') FROM pg_stat_statements
			 WHERE total_exec_time > 50 ORDER BY 1 DESC LIMIT 12`)
		if err != nil {
			return err
		}
		var seconds float64
		var calls, n int64
		var query string
		if _, err := pgx.ForEachRow(rows, []any{&seconds, &calls, &n, &query}, func() error {
			b.say("%-8s %7.2f s %6d calls %9d rows  %s", name, seconds, calls, n, strings.TrimSpace(query))
			return nil
		}); err != nil {
			return err
		}
		if err := db.exec(ctx, `SELECT pg_stat_statements_reset()`); err != nil {
			return err
		}
	}
	return nil
}
