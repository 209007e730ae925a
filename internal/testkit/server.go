// Package testkit gives tests real databases: one PostgreSQL a test process, a
// database of its own for each test, a control store, and pairs of sides that are
// set up. The server is, in this order, the one BACKFILL_TEST_DSN names (its role
// must be a superuser), one started from this machine's programs, or the official
// image in a container.
package testkit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"backfill/internal/local"
)

// image is the PostgreSQL tests fall back to: the official one, or another that
// understands POSTGRES_PASSWORD and a command, such as deploy/images/postgres makes.
func image() string { return cmp.Or(os.Getenv("BACKFILL_POSTGRES_IMAGE"), "postgres:16-alpine") }

// settings of a server started here. Prepared transactions are off by default.
var settings = map[string]string{"max_prepared_transactions": "50", "max_connections": "300", "shared_buffers": "128MB", "max_wal_size": "2GB"}

// server is the PostgreSQL of this process, started when a test first asks for it.
var server struct {
	once sync.Once
	dsn  *url.URL // of the database postgres
	stop func()
	err  error
}

// Main runs a package's tests, ends the server they used, or tidies it up, and exits.
func Main(m *testing.M) {
	code := m.Run()
	switch {
	case server.stop != nil:
		server.stop()
	case server.dsn != nil:
		dropAll()
	}
	os.Exit(code)
}

// dropAll drops the databases of this process's tests on a server that stays.
func dropAll() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, server.dsn.String())
	if err != nil {
		fmt.Fprintln(os.Stderr, "the databases of the tests are still there:", err)
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	for _, name := range made {
		if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

// DSN is the connection string of a database of the tests' server, as superuser.
func DSN(t testing.TB, database string) string {
	t.Helper()
	server.once.Do(start)
	if server.err != nil {
		t.Fatalf("no PostgreSQL for tests: %v", server.err)
	}
	u := *server.dsn
	u.Path = "/" + database
	return u.String()
}

func start() {
	var dsn string
	switch _, err := local.FindPostgres(); {
	case os.Getenv("BACKFILL_TEST_DSN") != "":
		dsn = os.Getenv("BACKFILL_TEST_DSN")
	case err == nil:
		dsn, server.stop, server.err = startHere()
	default:
		dsn, server.stop, server.err = startContainer()
	}
	if server.err == nil {
		server.dsn, server.err = url.Parse(dsn)
	}
	if server.err == nil && server.dsn.Host == "" {
		server.err = errors.New("BACKFILL_TEST_DSN: give an address like postgres://user:password@host:port/postgres")
	}
}

func startHere() (dsn string, stop func(), err error) {
	dir, err := os.MkdirTemp(inMemory(), "backfill-test-")
	if err != nil {
		return "", nil, err
	}
	pg, err := local.StartPostgres(context.Background(), local.PostgresOptions{Dir: filepath.Join(dir, "pg"), Fast: true, Settings: settings})
	if err != nil {
		_ = os.RemoveAll(dir)
		return "", nil, err
	}
	return pg.DSN("postgres"), func() {
		_ = pg.Kill() // nothing in it is wanted any more
		_ = os.RemoveAll(dir)
	}, nil
}

func startContainer() (dsn string, stop func(), err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	command := []string{"postgres", "-c", "fsync=off"}
	for name, value := range settings {
		command = append(command, "-c", name+"="+value)
	}
	c, err := testcontainers.Run(ctx, image(), testcontainers.WithCmd(command...),
		testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": "postgres"}),
		testcontainers.WithExposedPorts("5432/tcp"),
		// Older Dockers give IPv6 a port of its own, and nobody tells which is which.
		testcontainers.WithHostConfigModifier(func(c *container.HostConfig) {
			c.PortBindings = network.PortMap{network.MustParsePort("5432/tcp"): {{HostIP: netip.IPv4Unspecified()}}}
		}),
		// It starts once to be initialised and once to serve.
		testcontainers.WithWaitStrategyAndDeadline(time.Minute,
			wait.ForLog("database system is ready to accept connections").WithOccurrence(2), wait.ForListeningPort("5432/tcp").SkipInternalCheck()))
	if err != nil {
		_ = testcontainers.TerminateContainer(c)
		return "", nil, fmt.Errorf("start %s: %w", image(), err)
	}
	stop = func() { _ = c.Terminate(context.Background()) }
	endpoint, err := c.PortEndpoint(ctx, "5432/tcp", "")
	if err != nil {
		stop()
		return "", nil, err
	}
	return "postgres://postgres:postgres@" + endpoint + "/postgres?sslmode=disable", stop, nil
}
