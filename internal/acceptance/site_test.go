//go:build linux

package acceptance

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"backfill/internal/copypipe"
)

// site is two databases, a and b, and a `backfill dev` that syncs tables from a
// to b.
type site struct {
	*testing.T
	a, b  *pgxpool.Pool
	dsn   map[string]string // by side
	state string            // the state directory
	args  []string          // of the program
	env   []string          // of the program, beside its own
	url   string            // of the API; the same over restarts
	dev   *process
	token string
}

// setup is what a site begins with.
type setup struct {
	a, b   string   // SQL that makes each side's tables
	tables []string // names as --table takes them
	args   []string // more arguments of the program
}

var sites atomic.Int64

// newSite makes the databases and starts the program on them.
func newSite(t *testing.T, with setup) *site {
	t.Helper()
	s := prepareSite(t, with)
	s.start()
	return s
}

// prepareSite makes the databases, but does not start the program.
func prepareSite(t *testing.T, with setup) *site {
	t.Helper()
	n := sites.Add(1)
	s := &site{T: t, state: filepath.Join(t.TempDir(), "state"), dsn: map[string]string{}}
	s.a = s.database("a", fmt.Sprintf("a%d", n), with.a)
	s.b = s.database("b", fmt.Sprintf("b%d", n), with.b)
	listen := freeAddress(t)
	s.url = "http://" + listen
	s.args = []string{"dev", "--state", s.state, "--listen", listen, "--site", "s", "--from", "a",
		"--side", "a=" + s.dsn["a"], "--side", "b=" + s.dsn["b"]}
	for _, table := range with.tables {
		s.args = append(s.args, "--table", table)
	}
	s.args = append(s.args, with.args...)
	t.Cleanup(s.end)
	return s
}

// freeAddress is a loopback address that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// pinned makes values be printed the same on every connection of the tests.
var pinned = map[string]string{"TimeZone": "UTC", "DateStyle": "ISO, MDY", "IntervalStyle": "postgres", "extra_float_digits": "3",
	"bytea_output": "hex", "lc_monetary": "C", "work_mem": "64MB"}

// database makes a side's database and returns connections to it.
func (s *site) database(side, name, sql string) *pgxpool.Pool {
	s.Helper()
	require.NoError(s, cluster.CreateDatabase(s.Context(), name))
	s.dsn[side] = cluster.DSN(name)
	cfg, err := pgxpool.ParseConfig(s.dsn[side])
	require.NoError(s, err)
	for setting, value := range pinned {
		cfg.ConnConfig.RuntimeParams[setting] = value
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "acceptance"
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	require.NoError(s, err)
	s.Cleanup(pool.Close)
	s.run(pool, sql)
	return pool
}

// controlDatabase makes a control database beside those of the sides, which stays
// when the program ends.
func (s *site) controlDatabase() (dsn string) {
	s.Helper()
	name := fmt.Sprintf("control%d", sites.Add(1))
	require.NoError(s, cluster.CreateDatabase(s.Context(), name))
	return cluster.DSN(name)
}

// start runs the program until it is ready.
func (s *site) start() {
	s.Helper()
	require.NoError(s, os.MkdirAll(s.state, 0o700))
	dev, err := launchWith(s.env, s.output(), s.args...)
	require.NoError(s, err)
	s.dev = dev
	s.await("the program to be ready", func() (bool, string) {
		_, ready := s.dev.printed("token: ")
		if s.dev.gone() {
			s.Fatalf("it ended with %v; it printed:\n%s", s.dev.cmd.ProcessState, s.dev.said())
		}
		return ready, s.dev.said()
	})
	url, _ := s.dev.printed("ready: ")
	require.Equal(s, s.url, url)
	s.token, _ = s.dev.printed("token: ")
}

func (s *site) output() string { return filepath.Join(s.state, "printed.log") }

// end stops what runs and, when the test has failed, shows what was logged.
func (s *site) end() {
	if s.Failed() {
		for _, name := range []string{"printed.log", "backfill.log", "temporal/temporal.log", "postgres.log"} {
			s.Logf("%s ends:\n%s", name, tail(filepath.Join(s.state, name), 40))
		}
	}
	if s.dev != nil {
		_ = s.dev.cmd.Process.Signal(syscall.SIGTERM)
		if s.dev.exit(30*time.Second) == -1 {
			s.killAll()
		}
	}
	// After a kill -9 the control database's server is still there.
	if pid := s.controlPID(); pid != 0 {
		_ = syscall.Kill(pid, syscall.SIGQUIT)
		for deadline := time.Now().Add(10 * time.Second); running(pid) && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
		}
	}
	printed, _ := os.ReadFile(s.output())
	for _, bad := range []string{"DATA RACE", "panic:", "fatal error:"} {
		if strings.Contains(string(printed), bad) {
			s.Errorf("the program printed:\n%s", tail(s.output(), 200))
			break
		}
	}
}

// tail is the last lines of a file, without those of answers that are no failure
// of the program.
func tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := slices.DeleteFunc(strings.Split(strings.TrimSpace(string(text)), "\n"), func(line string) bool {
		return strings.Contains(line, `"msg":"http"`) && !strings.Contains(line, `"status":5`)
	})
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// controlPID is the server of the control database, 0 when it does not run.
func (s *site) controlPID() int {
	text, err := os.ReadFile(filepath.Join(s.state, "postgres", "postmaster.pid"))
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		return 0
	}
	// After a crash the number may be another process's by now.
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil || strings.TrimSpace(string(name)) != "postgres" || !running(pid) {
		return 0
	}
	return pid
}

// control connects to the control database in the state directory.
func (s *site) control() *pgx.Conn {
	s.Helper()
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(s.state, name))
		require.NoError(s, err)
		return strings.TrimSpace(string(text))
	}
	dsn := url.URL{Scheme: "postgres", User: url.UserPassword("postgres", read("postgres.password")),
		Host: net.JoinHostPort("127.0.0.1", read("postgres.port")), Path: "/control", RawQuery: "sslmode=disable"}
	conn, err := pgx.Connect(s.Context(), dsn.String())
	require.NoError(s, err)
	s.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// patience is how long anything may take that is waited for.
func patience() time.Duration {
	d := 2 * time.Minute
	if raceEnabled {
		d *= 3
	}
	return d + time.Duration(ordersRows)*time.Millisecond
}

// await polls until done reports true. The state it describes is shown when that
// does not happen in time.
func (s *site) await(what string, done func() (ok bool, state string)) {
	s.Helper()
	s.awaitEvery(75*time.Millisecond, what, done)
}

func (s *site) awaitEvery(pause time.Duration, what string, done func() (ok bool, state string)) {
	s.Helper()
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	for deadline := time.Now().Add(patience()); ; {
		ok, state := done()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("waited %s for %s; now: %s", patience(), what, state)
		}
		<-ticker.C
	}
}

// run executes SQL, several statements in one transaction.
func (s *site) run(pool *pgxpool.Pool, sql string) {
	s.Helper()
	conn, err := pool.Acquire(s.Context())
	require.NoError(s, err)
	defer conn.Release()
	_, err = conn.Conn().PgConn().Exec(s.Context(), sql).ReadAll()
	require.NoError(s, err, sql)
}

// number reads one number.
func (s *site) number(pool *pgxpool.Pool, sql string, args ...any) (n int64) {
	s.Helper()
	require.NoError(s, pool.QueryRow(s.Context(), sql, args...).Scan(&n), sql)
	return n
}

// drain waits until every change made on a has been applied on b, or set aside.
func (s *site) drain() {
	s.Helper()
	s.await("all changes to be applied", func() (bool, string) {
		// In this order: what leaves the outbox is in the queue by then.
		captured := s.number(s.a, `SELECT count(*) FROM backfill_s_a.outbox`)
		waiting := s.lag("a")
		return captured == 0 && waiting == 0, fmt.Sprintf("%d captured, %d in the queue", captured, waiting)
	})
}

// requireEqual fails unless tables have the same rows on both sides: the same
// text in every column.
func (s *site) requireEqual(tables ...string) {
	s.Helper()
	for _, table := range tables {
		onlyA, onlyB := s.compare(table)
		require.Empty(s, onlyA, "%s has rows only on a, or other values there", table)
		require.Empty(s, onlyB, "%s has rows only on b, or other values there", table)
	}
}

// compare returns the rows, as text, that only one side has; at most a few.
func (s *site) compare(table string) (onlyA, onlyB []string) {
	s.Helper()
	ctx := s.Context()
	a, err := s.a.Acquire(ctx)
	require.NoError(s, err)
	defer a.Release()
	b, err := s.b.Acquire(ctx)
	require.NoError(s, err)
	defer b.Release()
	// In the order of a's columns, which may be another on b. A row's text holds the
	// output text of each column, so it is equal only if each of them is.
	var columns string
	require.NoError(s, a.QueryRow(ctx, `SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
		WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped`, table).Scan(&columns))
	rows := `SELECT ROW(` + columns + `)::text COLLATE "C" AS line FROM ` + table
	_, err = b.Exec(ctx, `CREATE TEMP TABLE theirs (line text COLLATE "C")`)
	require.NoError(s, err)
	defer func() { _, _ = b.Exec(context.WithoutCancel(ctx), `DROP TABLE pg_temp.theirs`) }()
	require.NoError(s, copypipe.Run(func(w io.Writer) error {
		_, err := a.Conn().PgConn().CopyTo(ctx, w, `COPY (`+rows+`) TO STDOUT`)
		return err
	}, func(r io.Reader) error {
		_, err := b.Conn().PgConn().CopyFrom(ctx, r, `COPY pg_temp.theirs FROM STDIN`)
		return err
	}))
	list := func(sql string) []string {
		rows, err := b.Query(ctx, `SELECT left(line, 500) FROM (`+sql+`) d ORDER BY 1 LIMIT 5`)
		require.NoError(s, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(s, err)
		return lines
	}
	return list(`SELECT line FROM pg_temp.theirs EXCEPT ALL ` + rows), list(rows + ` EXCEPT ALL SELECT line FROM pg_temp.theirs`)
}

// kill ends the program as kill -9 does, and leaves what it has started.
func (s *site) kill() { s.dev.kill() }

// killAll ends the program and all that it has started, as a power failure does.
func (s *site) killAll() {
	_ = s.dev.cmd.Process.Signal(syscall.SIGSTOP) // it starts nothing more
	pids := descendants(s.dev.pid())
	// The server of the control database may have outlived the run that started it.
	if pid := s.controlPID(); pid != 0 {
		pids = append(append(pids, pid), descendants(pid)...)
	}
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	s.kill()
	s.await("all processes to be gone", func() (bool, string) {
		left := slices.DeleteFunc(pids, func(pid int) bool { return !running(pid) })
		return len(left) == 0, fmt.Sprint(left)
	})
}

// children are the processes the program has started and that still run.
func (s *site) children() []int {
	return slices.DeleteFunc(descendants(s.dev.pid()), func(pid int) bool { return !running(pid) })
}
