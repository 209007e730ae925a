package side

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"backfill/internal/row"
)

// gauge runs a measurement in a short reading transaction: it gives up rather than
// add to the load that it measures.
func (db *DB) gauge(ctx context.Context, limit time.Duration, fn func(pgx.Tx) error) error {
	return db.in(ctx, reading, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL statement_timeout = %d`, limit.Milliseconds())); err != nil {
			return err
		}
		return fn(tx)
	})
}

// ReplicaPosition is how far a replica has replayed.
type ReplicaPosition struct {
	Name     string
	Replayed int64   // position in the WAL, in bytes
	Lag      float64 // seconds, as PostgreSQL measures it; 0 when it does not know
}

// Replicas tells where the side's WAL ends and how far each streaming replica has
// replayed it. No replica at all is an error, for nobody can tell how far behind
// one is that is not connected.
func (db *DB) Replicas(ctx context.Context, limit time.Duration) (end int64, all []ReplicaPosition, err error) {
	err = db.gauge(ctx, limit, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
			SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint, coalesce(nullif(application_name, ''), client_addr::text, pid::text, ''),
			       pg_wal_lsn_diff(replay_lsn, '0/0')::bigint, coalesce(extract(epoch FROM replay_lag), 0)::float8
			  FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'`)
		if err != nil {
			return err
		}
		var r ReplicaPosition
		var replayed *int64
		_, err = pgx.ForEachRow(rows, []any{&end, &r.Name, &replayed, &r.Lag}, func() error {
			if replayed == nil {
				return errors.New("a replica's position cannot be read: run GRANT pg_monitor TO " + db.role() + ", or wait until the replica streams")
			}
			r.Replayed = *replayed
			all = append(all, r)
			return nil
		})
		return err
	})
	if err == nil && len(all) == 0 {
		err = errors.New("no replica is connected")
	}
	return end, all, err
}

// RunningSessions counts the sessions of others that run a statement, in all
// databases of the server.
func (db *DB) RunningSessions(ctx context.Context, limit time.Duration) (n float64, err error) {
	var hidden bool
	err = db.gauge(ctx, limit, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
			SELECT count(*) FILTER (WHERE backend_type = 'client backend' AND state = 'active' AND application_name NOT LIKE 'backfill-%')::float8,
			       -- of such a session the type is hidden too
			       coalesce(bool_or(query = '<insufficient privilege>' AND datid IS NOT NULL AND usesysid IS NOT NULL), false)
			  FROM pg_stat_activity`).Scan(&n, &hidden)
	})
	if err == nil && hidden {
		err = errors.New("other users' sessions cannot be seen: run GRANT pg_monitor TO " + db.role())
	}
	return n, err
}

// ArchiverBacklog counts the WAL files that are complete and not yet archived.
func (db *DB) ArchiverBacklog(ctx context.Context, limit time.Duration) (n float64, err error) {
	err = db.gauge(ctx, limit, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT count(*)::float8 FROM pg_ls_archive_statusdir() WHERE name LIKE '%.ready'`).Scan(&n)
	})
	if SQLState(err) == "42501" {
		err = errors.New("the archiver's files cannot be listed: run GRANT pg_monitor TO " + db.role())
	}
	return n, err
}

// SlotWAL is how many bytes of WAL are kept for the replication slot that is
// furthest behind, 0 without slots.
func (db *DB) SlotWAL(ctx context.Context, limit time.Duration) (bytes float64, err error) {
	err = db.gauge(ctx, limit, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT coalesce(max(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)), 0)::float8 FROM pg_replication_slots`).Scan(&bytes)
	})
	return bytes, err
}

// role is the role connected, quoted.
func (db *DB) role() string { return row.Ident(db.pool.Config().ConnConfig.User) }

// Number runs a query, read-only and within a time, that returns one number.
func (db *DB) Number(ctx context.Context, query string, limit time.Duration) (v float64, err error) {
	var value *float64
	err = db.gauge(ctx, limit, func(tx pgx.Tx) error {
		// A comment at the query's end must not hide the closing parenthesis.
		return tx.QueryRow(ctx, "SELECT v::float8 FROM (\n"+query+"\n) q(v)").Scan(&value)
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, errors.New("the query returns no row")
	case err != nil:
		return 0, err
	case value == nil:
		return 0, errors.New("the query returns NULL")
	}
	return *value, nil
}

// Stat tells how the connections are used.
func (db *DB) Stat() *pgxpool.Stat { return db.pool.Stat() }
