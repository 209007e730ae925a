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

// Database makes an empty database for the length of a test and returns its
// connection string.
func Database(t testing.TB) string { return databaseLike(t, "template0") }

func databaseLike(t testing.TB, template string) string {
	t.Helper()
	name := "t_" + strings.ToLower(rand.Text()[:12])
	admin(t, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, template))
	t.Cleanup(func() { admin(t, "DROP DATABASE "+name+" WITH (FORCE)") })
	return DSN(t, name)
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

// ControlDSN makes a migrated control database for the length of a test.
func ControlDSN(t testing.TB) string {
	t.Helper()
	dsn := DSN(t, "postgres") // before once: it may end the test
	migrated.once.Do(func() {
		ctx := context.Background()
		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			migrated.err = err
			return
		}
		defer func() { _ = conn.Close(ctx) }()
		name := "t_control_" + strings.ToLower(rand.Text()[:12])
		if _, migrated.err = conn.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE template0"); migrated.err != nil {
			return
		}
		if _, migrated.err = control.Migrate(ctx, DSN(t, name)); migrated.err != nil {
			return
		}
		migrated.name = name
	})
	require.NoError(t, migrated.err)
	return databaseLike(t, migrated.name)
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
// within half a minute.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); {
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
	_, err := conn.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)
	require.NoError(t, err)
}
