package testkit

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

// Database gives a test an empty database and returns its connection string.
func Database(t testing.TB) string {
	t.Helper()
	return sides.take(t, "template0", `
		CREATE SCHEMA IF NOT EXISTS public; GRANT USAGE ON SCHEMA public TO PUBLIC`)
}

// DatabaseWith gives a test a database with options of CREATE DATABASE, such as its
// encoding. It ends with the test.
func DatabaseWith(t testing.TB, options string) string {
	t.Helper()
	name := newName()
	admin(t, "CREATE DATABASE "+name+" TEMPLATE template0 "+options)
	t.Cleanup(func() { admin(t, "DROP DATABASE "+name+" WITH (FORCE)") })
	return DSN(t, name)
}

// shelf holds databases that tests have given back. To empty one takes a fraction of
// the time that it takes to drop it, which is a checkpoint, and to make another.
type shelf struct {
	mu   sync.Mutex
	free []shelved
}

// shelved is a database with the session that empties it, which knows its catalogs by now.
type shelved struct {
	name string
	conn *pgx.Conn
}

var sides, controls shelf

func (s *shelf) take(t testing.TB, template, afresh string) string {
	t.Helper()
	s.mu.Lock()
	var d shelved
	if n := len(s.free); n > 0 {
		d, s.free = s.free[n-1], s.free[:n-1]
	}
	s.mu.Unlock()
	if d.name == "" {
		d.name = newName()
		admin(t, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", d.name, template))
	}
	t.Cleanup(func() {
		if t.Failed() {
			return // it may be in any state
		}
		d.empty(t, afresh)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.free = append(s.free, d)
	})
	return DSN(t, d.name)
}

// made are the databases of this process's tests.
var (
	made   []string
	makers sync.Mutex
)

func newName() string {
	makers.Lock()
	defer makers.Unlock()
	made = append(made, "backfill_test_"+strings.ToLower(rand.Text()[:12]))
	return made[len(made)-1]
}

// empty ends what still runs in a database and drops everything that tests have made.
func (d *shelved) empty(t testing.TB, afresh string) {
	t.Helper()
	if d.conn == nil || d.conn.IsClosed() {
		d.conn = Connect(t, DSN(t, d.name))
	}
	conn, ctx := d.conn, context.Background()
	Eventually(t, "the sessions of a test's database end", func() bool {
		var left int
		require.NoError(t, conn.QueryRow(ctx, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`).Scan(&left))
		return left == 0
	})
	rows, err := conn.Query(ctx, `
		SELECT format('ROLLBACK PREPARED %L', gid) FROM pg_prepared_xacts WHERE database = current_database()
		UNION ALL SELECT format('DROP SCHEMA %I CASCADE', nspname) FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema$|backfill_control$)'`)
	require.NoError(t, err)
	steps, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, sql := range append(steps, afresh) {
		_, err := conn.Exec(ctx, sql)
		require.NoError(t, err, sql)
	}
}

// admin runs a statement on the server. Cleanups come after the test's own context.
func admin(t testing.TB, sql string) {
	t.Helper()
	conn := Connect(t, DSN(t, "postgres"))
	defer func() { _ = conn.Close(context.Background()) }()
	_, err := conn.Exec(context.Background(), sql)
	require.NoError(t, err)
}

// Connect opens a session; the caller closes it.
func Connect(t testing.TB, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(context.Background(), dsn)
	require.NoError(t, err)
	return conn
}

// Session opens a session that ends with the test.
func Session(t testing.TB, dsn string) *pgx.Conn {
	t.Helper()
	conn := Connect(t, dsn)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// Exec runs statements in a session.
func Exec(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

// Value reads one value in a session.
func Value[T any](t testing.TB, conn *pgx.Conn, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), sql, args...).Scan(&v), sql)
	return v
}

// Strings reads one text column in a session.
func Strings(t testing.TB, conn *pgx.Conn, sql string, args ...any) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), sql, args...)
	require.NoError(t, err, sql)
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err, sql)
	return out
}

// migrated is the name of a migrated control database, of which tests get copies.
var migrated struct {
	once sync.Once
	name string
	err  error
}

// ControlDSN gives a test a migrated control database.
func ControlDSN(t testing.TB) string {
	t.Helper()
	dsn := DSN(t, "postgres") // before once: it may end the test
	migrated.once.Do(func() { migrated.name, migrated.err = migrate(t, dsn) })
	require.NoError(t, migrated.err)
	return controls.take(t, migrated.name, `
		CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC;
		DO $$ BEGIN EXECUTE (SELECT 'TRUNCATE ' || string_agg(format('%I.%I', schemaname, tablename), ', ') || ' RESTART IDENTITY'
			FROM pg_tables WHERE schemaname = 'backfill_control' AND tablename NOT IN ('schema_version', 'compatible')); END $$`)
}

func migrate(t testing.TB, dsn string) (name string, err error) {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	name = newName()
	if _, err = conn.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE template0"); err != nil {
		return "", err
	}
	_, err = control.Migrate(ctx, DSN(t, name))
	return name, err
}

// Control opens a migrated control database that ends with the test.
func Control(t testing.TB) *control.Store {
	t.Helper()
	return Open(t, ControlDSN(t))
}

// Open opens a control database that is migrated already.
func Open(t testing.TB, dsn string) *control.Store {
	t.Helper()
	store, err := control.Open(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(store.Disconnect)
	return store
}

// Eventually waits until a condition holds, and fails the test when it does not
// within two minutes.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !holds(); {
		if time.Now().After(deadline) {
			t.Fatalf("it did not come about that %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// LockWaiters counts the sessions of a connection's database that wait for a lock.
func LockWaiters(t testing.TB, conn *pgx.Conn) int {
	t.Helper()
	return Value[int](t, conn, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)
}

// As is a connection string for another role.
func As(t testing.TB, dsn, role, password string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	u.User = url.UserPassword(role, password)
	return u.String()
}

// DropRole drops a role and what it has and may do in a database, after a test.
func DropRole(t testing.TB, dsn, role string) {
	t.Helper()
	conn := Connect(t, dsn)
	defer func() { _ = conn.Close(context.Background()) }()
	_, err := conn.Exec(context.Background(), "DROP OWNED BY "+role+" CASCADE; DROP ROLE "+role)
	require.NoError(t, err)
}
