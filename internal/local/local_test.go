//go:build unix

package local

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"
)

// helper names, in the environment, what this binary runs instead of the tests: a parent to be killed.
const helper = "BACKFILL_LOCAL_TEST_PARENT"

func TestMain(m *testing.M) {
	if kind := os.Getenv(helper); kind != "" {
		runParent(kind, os.Args[1])
	}
	os.Exit(m.Run())
}

// runParent starts a server, prints its process id, and waits to be killed.
func runParent(kind, dir string) {
	var pid int
	switch kind {
	case "postgres", "fast postgres":
		p, err := StartPostgres(context.Background(), PostgresOptions{Dir: dir, Fast: kind != "postgres"})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		pid = p.PID()
	case "temporal":
		p, err := StartTemporal(context.Background(), TemporalOptions{Dir: dir})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		pid = p.PID()
	}
	fmt.Println(pid)
	select {}
}

// parent starts a server under another process, and returns that process and the server's id.
func parent(t *testing.T, kind, dir string) (*exec.Cmd, int) {
	t.Helper()
	cmd := exec.Command(os.Args[0], dir)
	cmd.Env = append(os.Environ(), helper+"="+kind)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	return cmd, pid
}

func killParent(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
}

func startPostgres(t *testing.T, opts PostgresOptions) *Postgres {
	t.Helper()
	p, err := StartPostgres(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

func query(t *testing.T, p *Postgres, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), p.DSN("app"))
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	var text string
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&text))
	return text
}

// publicDir is a directory everybody may walk to, unlike t.TempDir.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "backfill-local-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

func TestPostgresKeepsItsDataAndItsPort(t *testing.T) {
	t.Parallel()
	private := filepath.Join(t.TempDir(), "private")
	require.NoError(t, os.Mkdir(private, 0o700))
	empty := filepath.Join(publicDir(t), "empty")
	require.NoError(t, os.Mkdir(empty, 0o755))
	for name, dir := range map[string]string{
		"anybody may walk to it":        filepath.Join(publicDir(t), "new", "data"),
		"it is there and empty":         empty,
		"only root may, by a way round": filepath.Join(symlink(t, private), `it's "quoted" 100%`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts := PostgresOptions{Dir: dir, Fast: true, Settings: map[string]string{"work_mem": "7MB"}}
			p := startPostgres(t, opts)
			port := p.port
			require.NoError(t, p.CreateDatabase(t.Context(), "app"))
			require.NoError(t, p.CreateDatabase(t.Context(), "app"))
			require.Equal(t, "UTF8", query(t, p, "SHOW server_encoding"))
			require.Equal(t, "7MB", query(t, p, "SHOW work_mem"))
			require.Equal(t, "on", query(t, p, "SHOW synchronous_commit"))
			require.Contains(t, []string{"C.UTF-8", "C"}, query(t, p, "SELECT datcollate FROM pg_database WHERE datname = 'app'"))
			execute(t, p, "CREATE TABLE t AS SELECT g FROM generate_series(1, 1000) g")
			require.NotEqual(t, "0", owner(t, p.PID()), "PostgreSQL does not run as root")

			require.NoError(t, p.Stop(t.Context()))
			require.NoError(t, p.Stop(t.Context()))
			require.Zero(t, p.PID())
			require.Empty(t, running(p.owns))

			p = startPostgres(t, opts)
			require.Equal(t, port, p.port)
			require.Equal(t, "1000", query(t, p, "SELECT count(*)::text FROM t"))
			// Files of the directory are found again later, by whatever path it goes.
			execute(t, p, "ALTER SYSTEM SET maintenance_work_mem = '77MB'")
			execute(t, p, "SELECT pg_reload_conf()")
			require.Eventually(t, func() bool { return query(t, p, "SHOW maintenance_work_mem") == "77MB" }, 30*time.Second, 10*time.Millisecond)
			require.NoError(t, p.Kill())
			require.Empty(t, running(p.owns))

			p = startPostgres(t, opts)
			require.Equal(t, port, p.port)
			require.Equal(t, "1000", query(t, p, "SELECT count(*)::text FROM t"))
			require.NoError(t, p.Stop(t.Context()))
		})
	}
}

func symlink(t *testing.T, target string) string {
	t.Helper()
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(target, link))
	return link
}

func execute(t *testing.T, p *Postgres, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), p.DSN("app"))
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	_, err = conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}

// owner returns the user id that a process runs as, "" where that cannot be told.
func owner(t *testing.T, pid int) string {
	t.Helper()
	if runtime.GOOS != "linux" {
		return ""
	}
	info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	require.NoError(t, err)
	return strconv.FormatUint(uint64(info.Sys().(*syscall.Stat_t).Uid), 10)
}

func TestPostgresLetsInOnlyThePassword(t *testing.T) {
	t.Parallel()
	p := startPostgres(t, PostgresOptions{Dir: filepath.Join(t.TempDir(), "data"), Fast: true})
	info, err := os.Stat(p.passwordFile())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())

	config, err := pgx.ParseConfig(p.DSN("postgres"))
	require.NoError(t, err)
	config.Password = "guess"
	_, err = pgx.ConnectConfig(t.Context(), config)
	require.Equal(t, "28P01", sqlState(err))

	// A password file that does not fit is found out, whether the server has to be started or not.
	require.NoError(t, p.Stop(t.Context()))
	require.NoError(t, os.WriteFile(p.passwordFile(), []byte("guess\n"), 0o600))
	_, err = StartPostgres(t.Context(), PostgresOptions{Dir: p.dir, Fast: true})
	require.ErrorContains(t, err, "does not know the password in "+p.passwordFile())
	require.NotContains(t, err.Error(), "guess")
	require.Empty(t, running(p.owns))
}

func TestPostgresThatOutlivedItsParentIsTakenOver(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	cmd, pid := parent(t, "postgres", dir)
	killParent(t, cmd)

	p := startPostgres(t, PostgresOptions{Dir: dir})
	require.Equal(t, pid, p.PID())
	require.NoError(t, p.CreateDatabase(t.Context(), "app"))
	require.Equal(t, "1", query(t, p, "SELECT '1'"))
	require.NoError(t, p.Stop(t.Context()))
	require.Empty(t, running(p.owns))

	// With other options it is started anew.
	cmd, pid = parent(t, "postgres", dir)
	killParent(t, cmd)
	p = startPostgres(t, PostgresOptions{Dir: dir, Settings: map[string]string{"work_mem": "7MB"}})
	require.NotEqual(t, pid, p.PID())
	require.Equal(t, "7MB", query(t, p, "SHOW work_mem"))

	// So is one whose parent and postmaster died at the same time, and left its children behind.
	require.NoError(t, p.Stop(t.Context()))
	cmd, pid = parent(t, "postgres", dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	killParent(t, cmd)
	p = startPostgres(t, PostgresOptions{Dir: dir})
	require.NotEqual(t, pid, p.PID())
	require.NoError(t, p.Stop(t.Context()))
}

func TestAFastPostgresEndsWithItsParent(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells a process of its parent's end")
	}
	cmd, pid := parent(t, "fast postgres", filepath.Join(t.TempDir(), "data"))
	killParent(t, cmd)
	requireGone(t, pid)
}

// requireGone waits until a process that is not our child has ended.
func requireGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return !slices.Contains(running(func([]string) bool { return true }), pid)
	}, 30*time.Second, 10*time.Millisecond)
}

func TestOneProcessServesADirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	p := startPostgres(t, PostgresOptions{Dir: dir, Fast: true})
	_, err := StartPostgres(t.Context(), PostgresOptions{Dir: dir, Fast: true})
	require.ErrorContains(t, err, fmt.Sprintf("in use by process %d", os.Getpid()))
	require.NoError(t, p.Kill())
	startPostgres(t, PostgresOptions{Dir: dir, Fast: true})
}

func TestPostgresThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	_, err := StartPostgres(t.Context(), PostgresOptions{Dir: dir, Fast: true, Settings: map[string]string{"work_mem": "plenty"}})
	require.ErrorContains(t, err, "work_mem")
	require.NotContains(t, err.Error(), "\n")

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	port := taken.Addr().(*net.TCPAddr).Port
	_, err = StartPostgres(t.Context(), PostgresOptions{Dir: dir, Fast: true, Port: port})
	require.ErrorContains(t, err, "Address already in use")

	// The port of last time is given up when it is taken.
	p := startPostgres(t, PostgresOptions{Dir: dir, Fast: true})
	require.NotEqual(t, port, p.port)

	stranger := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(stranger, "thesis.txt"), []byte("chapter one"), 0o600))
	_, err = StartPostgres(t.Context(), PostgresOptions{Dir: stranger})
	require.ErrorContains(t, err, "neither empty nor PostgreSQL's")

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = StartPostgres(ended, PostgresOptions{Dir: filepath.Join(t.TempDir(), "data"), Fast: true})
	require.ErrorIs(t, err, context.Canceled)
}

func TestPostgresStartsOverWhatACrashLeft(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.MkdirAll(filepath.Join(dir+unfinished, "base"), 0o700)) // initdb was killed
	p := startPostgres(t, PostgresOptions{Dir: dir, Fast: true})
	require.NoError(t, p.Kill())
	if runtime.GOOS != "linux" {
		return
	}

	// The process id in the lock file now belongs to a zombie of the same account.
	zombie := exec.Command("true")
	zombie.SysProcAttr = sysProcAttr(p.account, 0)
	require.NoError(t, zombie.Start())
	t.Cleanup(func() { _ = zombie.Wait() })
	requireGone(t, zombie.Process.Pid)
	lock := filepath.Join(p.dir, "postmaster.pid")
	text, err := os.ReadFile(lock)
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(text), "\n")
	require.NoError(t, os.WriteFile(lock, []byte(strconv.Itoa(zombie.Process.Pid)+"\n"+rest), 0o600))
	startPostgres(t, PostgresOptions{Dir: dir, Fast: true})
}

func TestFindPostgresHeedsTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("BACKFILL_PG_BIN", dir)
	_, err := FindPostgres()
	require.ErrorContains(t, err, "holds no initdb and postgres")
	for _, name := range []string{"initdb", "postgres"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o700))
	}
	found, err := FindPostgres()
	require.NoError(t, err)
	require.Equal(t, dir, found)
}

func TestNewestVersionFirst(t *testing.T) {
	require.Greater(t, version("/usr/lib/postgresql/15/bin"), version("/usr/lib/postgresql/9.6/bin"))
	require.Greater(t, version("/opt/homebrew/opt/postgresql@18/bin"), version("/opt/homebrew/opt/postgresql@17/bin"))
	require.Zero(t, version("/usr/local/pgsql/bin"))
}

func TestFindTemporal(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "temporal")
	require.NoError(t, os.WriteFile(program, nil, 0o700))
	t.Setenv("BACKFILL_TEMPORAL_BIN", "")
	t.Setenv("PATH", dir)
	found, err := FindTemporal()
	require.NoError(t, err)
	require.Equal(t, Command{Path: program, CLI: true}, found)

	t.Setenv("BACKFILL_TEMPORAL_BIN", filepath.Join(dir, "nothing"))
	_, err = FindTemporal()
	require.ErrorContains(t, err, "is not a program")

	t.Setenv("BACKFILL_TEMPORAL_BIN", "")
	t.Setenv("PATH", "")
	t.Chdir(t.TempDir())
	_, err = FindTemporal()
	require.ErrorContains(t, err, "make build")

	require.NoError(t, os.MkdirAll("bin", 0o700))
	require.NoError(t, os.MkdirAll("internal/deep", 0o700))
	require.NoError(t, os.WriteFile("go.mod", []byte("module backfill\n\ngo 1.26.0\n"), 0o600))
	require.NoError(t, os.WriteFile("bin/backfill-temporal", nil, 0o700))
	t.Chdir("internal/deep")
	found, err = FindTemporal()
	require.NoError(t, err)
	require.False(t, found.CLI)
	require.Equal(t, "backfill-temporal", filepath.Base(found.Path))
}

func needTemporal(t *testing.T) {
	t.Helper()
	if _, err := FindTemporal(); err != nil {
		t.Skip(err)
	}
}

func startTemporal(t *testing.T, dir string) *Temporal {
	t.Helper()
	s, err := StartTemporal(t.Context(), TemporalOptions{Dir: dir})
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Kill() })
	return s
}

func dial(t *testing.T, s *Temporal) client.Client {
	t.Helper()
	c, err := client.DialContext(t.Context(), client.Options{HostPort: s.HostPort, Logger: quiet()})
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func TestTemporalKeepsItsWorkflowsAndItsPorts(t *testing.T) {
	needTemporal(t)
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "new", "state")
	s := startTemporal(t, dir)
	hostPort, console := s.HostPort, s.ConsoleURL
	page, err := http.Get(console)
	require.NoError(t, err)
	require.NoError(t, page.Body.Close())
	require.Equal(t, http.StatusOK, page.StatusCode)

	run, err := dial(t, s).ExecuteWorkflow(t.Context(), client.StartWorkflowOptions{
		ID: "backfill/north/public.orders/school", TaskQueue: "nobody",
		TypedSearchAttributes: temporal.NewSearchAttributes(
			temporal.NewSearchAttributeKeyKeyword("BackfillSite").ValueSet("north"),
			temporal.NewSearchAttributeKeyKeyword("BackfillTable").ValueSet("public.orders"),
			temporal.NewSearchAttributeKeyKeyword("BackfillFrom").ValueSet("school"),
			temporal.NewSearchAttributeKeyKeyword("BackfillState").ValueSet("PENDING"),
			temporal.NewSearchAttributeKeyInt64("BackfillRows").ValueSet(7),
		),
	}, "Backfill")
	require.NoError(t, err)
	found := func(s *Temporal) {
		t.Helper()
		c := dial(t, s)
		require.Eventually(t, func() bool {
			count, err := countWorkflows(t.Context(), c, "BackfillSite = 'north' AND BackfillState = 'PENDING' AND BackfillRows > 6")
			return err == nil && count == 1
		}, 30*time.Second, 10*time.Millisecond)
		_, err := c.DescribeWorkflowExecution(t.Context(), run.GetID(), run.GetRunID())
		require.NoError(t, err)
	}
	found(s)
	_, err = StartTemporal(t.Context(), TemporalOptions{Dir: dir})
	require.ErrorContains(t, err, fmt.Sprintf("in use by process %d", os.Getpid()))
	require.NoError(t, s.Stop(t.Context()))
	require.NoError(t, s.Stop(t.Context()))

	s = startTemporal(t, dir)
	require.Equal(t, hostPort, s.HostPort)
	require.Equal(t, console, s.ConsoleURL)
	found(s)
	require.NoError(t, s.Kill())

	s = startTemporal(t, dir)
	require.Equal(t, hostPort, s.HostPort)
	found(s)
	require.NoError(t, s.Stop(t.Context()))
	require.Empty(t, running(s.owns))
}

func TestTemporalDoesNotOutliveItsParent(t *testing.T) {
	needTemporal(t)
	t.Parallel()
	dir := t.TempDir()
	cmd, pid := parent(t, "temporal", dir)
	killParent(t, cmd)
	requireGone(t, pid)

	// Starting again need not wait for that.
	cmd, pid = parent(t, "temporal", dir)
	killParent(t, cmd)
	s := startTemporal(t, dir)
	require.NotEqual(t, pid, s.PID())
	requireGone(t, pid)

	// Nor does one that hangs stand in the way.
	require.NoError(t, s.Stop(t.Context()))
	cmd, pid = parent(t, "temporal", dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	killParent(t, cmd)
	s = startTemporal(t, dir)
	requireGone(t, pid)
	require.NoError(t, s.Stop(t.Context()))
}

func TestTemporalThatCannotStartSaysWhy(t *testing.T) {
	needTemporal(t)
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "temporal.db"), []byte("this is no database, but long enough to look like one"), 0o600))
	_, err := StartTemporal(t.Context(), TemporalOptions{Dir: dir})
	require.ErrorContains(t, err, "not a database")
	require.NotContains(t, err.Error(), "\n")

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	_, err = StartTemporal(t.Context(), TemporalOptions{Dir: t.TempDir(), Port: taken.Addr().(*net.TCPAddr).Port})
	require.ErrorContains(t, err, "address already in use")
}
