package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/log"
)

// searchAttributes are those that StartTemporal waits for; backfill-temporal registers the same.
var searchAttributes = map[string]string{
	"BackfillSite":  "Keyword",
	"BackfillTable": "Keyword",
	"BackfillFrom":  "Keyword",
	"BackfillState": "Keyword",
	"BackfillRows":  "Int",
}

// namespace is the one both programs make.
const namespace = "default"

// TemporalOptions says where and how a Temporal runs.
type TemporalOptions struct {
	// Dir keeps the SQLite file temporal.db and, beside it, the ports, the log and the lock. It is created when missing.
	Dir string
	// Port of the frontend and ConsolePort of the web console, both on 127.0.0.1. 0 takes the one used before in this Dir
	// when it is free, else a free one.
	Port, ConsolePort int
	// Log is the file Temporal's log is appended to; default temporal.log in Dir.
	Log string
	// LogLevel is debug, info, warn or error; default warn.
	LogLevel string
}

// Temporal is a Temporal server of this machine with namespace "default", Backfill's search attributes and a web console.
// It ends with this process, however that ends; elsewhere than on Linux, Temporal's own command line may outlive it until
// the next start.
type Temporal struct {
	HostPort   string // of the frontend
	ConsoleURL string

	server  *server
	command Command
	opts    TemporalOptions
	db      string
	stdin   io.Closer // its end is the server's
}

// StartTemporal starts Temporal on opts.Dir and returns when the frontend answers and workflows can be found by
// Backfill's search attributes. A server that still runs there was left behind, and is killed first: Temporal keeps
// everything in SQLite transactions. Starting takes at most a minute.
//
// An error says which step failed, with the last lines of the server's log; nothing that was started is left running.
func StartTemporal(ctx context.Context, opts TemporalOptions) (_ *Temporal, err error) {
	command, err := FindTemporal()
	if err != nil {
		return nil, err
	}
	db, err := resolve(filepath.Join(opts.Dir, "temporal.db"))
	if err != nil {
		return nil, fmt.Errorf("temporal's directory %s: %w", opts.Dir, err)
	}
	if opts.Log == "" {
		opts.Log = filepath.Join(filepath.Dir(db), "temporal.log")
	}
	if opts.LogLevel == "" {
		opts.LogLevel = "warn"
	}
	lock, err := lockDir(ctx, filepath.Join(filepath.Dir(db), "temporal.lock"))
	if err != nil {
		return nil, fmt.Errorf("start temporal: %w", err)
	}
	defer func() {
		if err != nil {
			lock.release()
		}
	}()

	t := &Temporal{command: command, opts: opts, db: db}
	t.server = &server{name: "temporal", matches: t.owns, lock: lock}
	left, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := killAll(left, t.owns); err != nil {
		return nil, fmt.Errorf("end the temporal left behind: %w", err)
	}
	if err := attempts(func() (bool, error) { return t.start(ctx) }); err != nil {
		return nil, err
	}
	return t, nil
}

// PID returns the process id of the server.
func (t *Temporal) PID() int { return t.server.pid() }

// Stop stops the server and waits for its end. When ctx ends first the server is killed, which loses nothing, and the
// error says so. Stopping it again does nothing.
func (t *Temporal) Stop(ctx context.Context) error {
	defer func() { _ = t.stdin.Close() }()
	return t.server.stop(ctx, syscall.SIGTERM)
}

// Kill ends the server as a crash would, with SIGKILL, and waits until it is gone.
func (t *Temporal) Kill() error {
	defer func() { _ = t.stdin.Close() }()
	return t.server.kill()
}

// owns reports whether a command line is that of a server on this database.
func (t *Temporal) owns(argv []string) bool {
	programs := []string{filepath.Base(t.command.Path), "temporal", ours}
	return slices.Contains(programs, filepath.Base(argv[0])) && slices.Contains(argv, t.db)
}

// start reports, along with an error, whether other ports could help.
func (t *Temporal) start(ctx context.Context) (retry bool, err error) {
	port, err := choosePort(filepath.Join(filepath.Dir(t.db), "temporal.port"), t.opts.Port)
	if err != nil {
		return false, err
	}
	console, err := choosePort(filepath.Join(filepath.Dir(t.db), "temporal.console.port"), t.opts.ConsolePort)
	if err != nil {
		return false, err
	}
	t.HostPort = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	t.ConsoleURL = "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(console))

	cmd := exec.Command(t.command.Path, t.command.args(t.db, port, console, t.opts.LogLevel)...)
	cmd.Dir = filepath.Dir(t.db)
	death := syscall.Signal(0)
	if t.command.CLI {
		death = syscall.SIGKILL
	}
	cmd.SysProcAttr = sysProcAttr(nil, death)
	if t.stdin, err = cmd.StdinPipe(); err != nil {
		return false, fmt.Errorf("start temporal: %w", err)
	}
	from, err := t.server.launch(cmd, t.opts.Log)
	if err != nil {
		return false, err
	}
	if err := t.ready(ctx); err != nil {
		retry = t.opts.Port == 0 && t.opts.ConsolePort == 0 && portTaken(t.opts.Log, from)
		err = failure("temporal", t.opts.Log, from, err)
		return retry, errors.Join(err, t.server.end())
	}
	return false, nil
}

// args are the arguments of a server with its frontend and console on ports of 127.0.0.1.
func (c Command) args(db string, port, console int, logLevel string) []string {
	if !c.CLI {
		return []string{
			"--db", db, "--listen", fmt.Sprintf("127.0.0.1:%d", port), "--ui", fmt.Sprintf("127.0.0.1:%d", console),
			"--log-level", logLevel, "--exit-with-stdin",
		}
	}
	args := []string{
		"server", "start-dev", "--db-filename", db, "--ip", "127.0.0.1", "--port", strconv.Itoa(port),
		"--ui-port", strconv.Itoa(console), "--log-level", logLevel,
	}
	for _, name := range slices.Sorted(maps.Keys(searchAttributes)) {
		args = append(args, "--search-attribute", name+"="+searchAttributes[name])
	}
	return args
}

// ready returns when the console listens and the frontend answers queries by every search attribute.
func (t *Temporal) ready(ctx context.Context) error {
	// A connection refused makes gRPC wait for a second, so it is not tried before something listens.
	for _, addr := range []string{t.HostPort, strings.TrimPrefix(t.ConsoleURL, "http://")} {
		err := t.server.await(ctx, func(ctx context.Context) (bool, error) {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
			if err != nil {
				return false, nil
			}
			return true, conn.Close()
		})
		if err != nil {
			return err
		}
	}
	frontend, err := client.NewLazyClient(client.Options{
		HostPort: t.HostPort, Namespace: namespace, Logger: quiet(),
	})
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	defer frontend.Close()
	var last error
	err = t.server.await(ctx, func(ctx context.Context) (bool, error) {
		last = answers(ctx, frontend)
		return last == nil, nil
	})
	if err != nil && last != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	return err
}

func answers(ctx context.Context, frontend client.Client) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := frontend.CheckHealth(ctx, &client.CheckHealthRequest{}); err != nil {
		return err
	}
	for name, kind := range searchAttributes {
		query := name + " = 'none'"
		if kind == "Int" {
			query = name + " = 0"
		}
		if _, err := countWorkflows(ctx, frontend, query); err != nil {
			return err
		}
	}
	return nil
}

func countWorkflows(ctx context.Context, frontend client.Client, query string) (int64, error) {
	found, err := frontend.CountWorkflow(ctx, &workflowservice.CountWorkflowExecutionsRequest{Namespace: namespace, Query: query})
	return found.GetCount(), err
}

// quiet keeps the client from logging: what does not answer is reported by its error.
func quiet() log.Logger { return log.NewStructuredLogger(slog.New(slog.DiscardHandler)) }
