package local

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// PostgresOptions says where and how a PostgreSQL runs.
type PostgresOptions struct {
	// Dir is the data directory; it is created when it is missing or empty. Beside it lie Dir.password, Dir.port,
	// Dir.log and Dir.lock.
	Dir string
	// Port on 127.0.0.1. 0 takes the one used before in this Dir when it is free, else a free one.
	Port int
	// Settings are PostgreSQL's settings by name. They win over the ones made here.
	Settings map[string]string
	// Log is the file PostgreSQL's log is appended to; default Dir.log.
	Log string
	// Fast gives up durability, for tests only: data may not survive a crash of the machine, and on Linux the server ends
	// with this process, however that ends.
	Fast bool
}

// Postgres is a PostgreSQL server of this machine. It listens on 127.0.0.1 only, and only the password kept beside its
// data directory lets one in, as superuser "postgres".
type Postgres struct {
	server   *server
	bin      string
	dir      string // resolved
	tag      string // in the command line of every process of the server
	opts     PostgresOptions
	account  *account
	hidden   bool // the account cannot walk to dir
	password string
	port     int
}

// StartPostgres starts PostgreSQL on opts.Dir and returns when it answers. A server that still runs there with the same
// options is taken over, one with other options is stopped first. When this process is root the server runs as the owner
// of the directory, else as "postgres", else as "nobody". Starting takes at most a minute.
//
// An error says which step failed, with the last lines of the server's log; nothing that was started is left running.
func StartPostgres(ctx context.Context, opts PostgresOptions) (_ *Postgres, err error) {
	bin, err := FindPostgres()
	if err != nil {
		return nil, err
	}
	dir, err := resolve(opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w", opts.Dir, err)
	}
	if opts.Log == "" {
		opts.Log = dir + ".log"
	}
	lock, err := lockDir(ctx, dir+".lock")
	if err != nil {
		return nil, fmt.Errorf("start postgresql: %w", err)
	}
	defer func() {
		if err != nil {
			lock.release()
		}
	}()

	p := &Postgres{bin: bin, dir: dir, opts: opts}
	p.tag = fmt.Sprintf("backfill-%x", sha256.Sum256([]byte(dir)))[:len("backfill-")+12]
	p.server = &server{name: "postgresql", matches: p.owns, lock: lock}
	if p.account, err = accountFor(dir); err != nil {
		return nil, err
	}
	if err := p.initialize(ctx); err != nil {
		return nil, err
	}
	if p.password, err = p.readPassword(); err != nil {
		return nil, err
	}
	adopted, err := p.adopt(ctx)
	if err != nil {
		return nil, err
	}
	if !adopted {
		if err := p.clear(ctx); err != nil {
			return nil, err
		}
		if err := attempts(func() (bool, error) { return p.start(ctx) }); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// DSN returns the connection string of a database, as superuser. It holds the password.
func (p *Postgres) DSN(database string) string {
	return (&url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword("postgres", p.password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}).String()
}

// CreateDatabase creates a database; it is no error when it exists.
func (p *Postgres) CreateDatabase(ctx context.Context, name string) error {
	conn, err := pgx.Connect(ctx, p.DSN("postgres"))
	if err != nil {
		return fmt.Errorf("create database %q: %w", name, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	_, err = conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
	// Of two that create it at the same time one may also learn of the other from the unique index.
	if code := sqlState(err); err != nil && code != "42P04" && code != "23505" {
		return fmt.Errorf("create database %q: %w", name, err)
	}
	return nil
}

// PID returns the process id of the postmaster.
func (p *Postgres) PID() int { return p.server.pid() }

// Stop ends all sessions, shuts the server down cleanly and waits for its end. When ctx ends first the server is killed,
// which costs the next start a recovery but no data, and the error says so. Stopping it again does nothing.
func (p *Postgres) Stop(ctx context.Context) error { return p.server.stop(ctx, syscall.SIGINT) }

// Kill ends the server as a crash would, with SIGKILL, and waits until none of its processes is left.
func (p *Postgres) Kill() error { return p.server.kill() }

// owns reports whether a command line is that of a process of this server: the postmaster's, which has the tag among its
// settings, or a title made by one of its children.
func (p *Postgres) owns(argv []string) bool {
	if strings.HasPrefix(strings.Join(argv, " "), "postgres: "+p.tag+":") {
		return true
	}
	return filepath.Base(argv[0]) == "postgres" && slices.Contains(argv, "cluster_name="+p.tag)
}

// adopt takes over a server that already runs on the directory, if it has the options asked for. One that has not, or
// that is shutting down, is gone when adopt returns.
func (p *Postgres) adopt(ctx context.Context) (bool, error) {
	pid, port := p.readPidFile()
	if !slices.Contains(running(p.owns), pid) {
		return false, nil
	}
	if err := p.server.adopt(pid); err != nil {
		return false, err
	}
	err := p.server.await(ctx, func(ctx context.Context) (bool, error) {
		// While it starts, the file does not name the port yet.
		_, port = p.readPidFile()
		p.port = port
		return p.answers(ctx)
	})
	switch {
	case errors.Is(err, errGone):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("take over postgresql, process %d: %w", pid, err)
	case p.sameOptions(port):
		return true, nil
	}
	return false, p.server.halt(ctx, syscall.SIGINT)
}

// sameOptions reports whether the running server was started as start would.
func (p *Postgres) sameOptions(port int) bool {
	if p.opts.Port != 0 && p.opts.Port != port {
		return false
	}
	have, err := os.ReadFile(filepath.Join(p.dir, "postmaster.opts"))
	if err != nil {
		return false
	}
	var want strings.Builder
	for _, arg := range p.settings(port) {
		want.WriteString(` "` + arg + `"`)
	}
	return strings.HasSuffix(strings.TrimSpace(string(have)), want.String())
}

// clear removes what a crash left in the way of a start: children that outlived their postmaster, and a lock file whose
// process id is now a zombie's or another program's, which PostgreSQL would take for a running server.
func (p *Postgres) clear(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := killAll(ctx, p.owns); err != nil {
		return fmt.Errorf("end what is left of the last postgresql: %w", err)
	}
	pid, _ := p.readPidFile()
	if pid == 0 || !isStale(pid, "postgres") {
		return nil
	}
	if err := os.Remove(filepath.Join(p.dir, "postmaster.pid")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a stale lock file: %w", err)
	}
	return nil
}

// start reports, along with an error, whether another port could help.
func (p *Postgres) start(ctx context.Context) (retry bool, err error) {
	if p.port, err = choosePort(p.dir+".port", p.opts.Port); err != nil {
		return false, err
	}
	cmd := exec.Command(filepath.Join(p.bin, "postgres"))
	file, err := p.show(cmd, p.dir)
	if err != nil {
		return false, err
	}
	defer file.close()
	cmd.Args = append(cmd.Args, "-D", file.path)
	cmd.Args = append(cmd.Args, p.settings(p.port)...)
	cmd.Env, cmd.Dir = environment(), "/"
	death := syscall.Signal(0)
	if p.opts.Fast {
		death = syscall.SIGQUIT // immediate shutdown
	}
	cmd.SysProcAttr = sysProcAttr(p.account, death)
	from, err := p.server.launch(cmd, p.opts.Log)
	if err != nil {
		return false, err
	}
	if err := p.server.await(ctx, p.answers); err != nil {
		taken := p.opts.Port == 0 && errors.Is(err, errGone) && portTaken(p.opts.Log, from)
		return taken, errors.Join(failure("postgresql", p.opts.Log, from, err), p.server.end())
	}
	return false, nil
}

// settings are the arguments of the server after its directory.
func (p *Postgres) settings(port int) []string {
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"max_connections":         "200",
		"unix_socket_directories": "",
	}
	if p.opts.Fast {
		settings["fsync"] = "off"
	}
	maps.Copy(settings, p.opts.Settings)
	settings["port"] = strconv.Itoa(port)
	settings["cluster_name"] = p.tag
	var args []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	return args
}

// answers reports whether the server accepts connections, with an error when it never will.
func (p *Postgres) answers(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.DSN("postgres"))
	if err == nil {
		return true, conn.Close(ctx)
	}
	switch sqlState(err) {
	case "28P01", "28000":
		return false, fmt.Errorf("it does not know the password in %s; restore that file, or start with an empty data directory", p.passwordFile())
	}
	return false, nil
}

// readPidFile returns 0 for what the postmaster has not written.
func (p *Postgres) readPidFile() (pid, port int) {
	text, err := os.ReadFile(filepath.Join(p.dir, "postmaster.pid"))
	if err != nil {
		return 0, 0
	}
	lines := strings.Split(string(text), "\n")
	number := func(i int) int {
		if i >= len(lines) {
			return 0
		}
		n, _ := strconv.Atoi(strings.TrimSpace(lines[i]))
		return n
	}
	return number(0), number(3)
}

func sqlState(err error) string {
	var failure *pgconn.PgError
	if errors.As(err, &failure) {
		return failure.Code
	}
	return ""
}
