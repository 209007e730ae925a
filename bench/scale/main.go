// Command scale measures what many sites cost one control database, one Temporal and their agents while nothing is
// changed, and while every site changes something now and then. It starts servers of its own, and an agent for each side
// as `backfill worker` runs it, all of them in one process. `make scale` runs it; docs/scale.md has what was found.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"backfill/activities"
	"backfill/internal/control"
	"backfill/internal/local"
	"backfill/internal/serve"
	"backfill/internal/side"
)

type options struct {
	sites, tables int
	settle, last  time.Duration
	rate          float64 // changes a second and site, in the second part
	top           int
	// Of the process that runs the agents or the control worker.
	role, control, temporal, source, receiver string
}

func main() {
	var o options
	flag.IntVar(&o.sites, "sites", 50, "sites")
	flag.IntVar(&o.tables, "tables", 20, "tables of each")
	flag.DurationVar(&o.settle, "settle", 40*time.Second, "how long to wait before measuring")
	flag.DurationVar(&o.last, "last", time.Minute, "how long each part is measured")
	flag.Float64Var(&o.rate, "rate", 0.2, "changes a second and site, in the second part")
	flag.IntVar(&o.top, "top", 0, "print so many of the control database's most frequent statements")
	flag.StringVar(&o.role, "role", "", "for its own use, as are those below")
	flag.StringVar(&o.control, "control", "", "")
	flag.StringVar(&o.temporal, "temporal", "", "")
	flag.StringVar(&o.source, "source", "", "")
	flag.StringVar(&o.receiver, "receiver", "", "")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run := o.measure
	if o.role != "" {
		run = o.serve
	}
	if err := run(ctx); err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

// turn is how long an activity goes on until it returns to its workflow: a tenth of what agents have, so that turns end
// while something is measured.
const turn = 2 * time.Minute

var sides = [2]string{"school", "central"}

func siteName(i int) string { return fmt.Sprintf("s%05d", i) }

// serve is a process beside the measuring one: all agents, or the control worker.
func (o options) serve(ctx context.Context) error {
	w := serve.Worker{Control: o.control, Temporal: serve.Temporal{HostPort: o.temporal, Namespace: "default"}, Log: zap.NewNop()}
	if o.role == "control" {
		return w.RunControl(ctx, control.Keep{Requests: 24 * time.Hour, History: 24 * time.Hour})
	}
	var all errgroup.Group
	for i := range o.sites {
		for n, dsn := range []string{o.source, o.receiver} {
			all.Go(func() error { return w.RunAgent(ctx, siteName(i), sides[n], dsn, activities.Settings{Turn: turn}) })
		}
	}
	return all.Wait()
}

func (o options) measure(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "backfill-scale-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	settings := map[string]string{"max_connections": "6000", "shared_buffers": "256MB", "max_wal_size": "4GB", "max_locks_per_transaction": "256",
		"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.max": "5000", "autovacuum_naptime": "30s"}
	own, err := local.StartPostgres(ctx, local.PostgresOptions{Dir: filepath.Join(dir, "control"), Settings: settings, Fast: true})
	if err != nil {
		return err
	}
	defer own.Kill()
	theirs, err := local.StartPostgres(ctx, local.PostgresOptions{Dir: filepath.Join(dir, "sides"), Settings: settings, Fast: true})
	if err != nil {
		return err
	}
	defer theirs.Kill()
	temporal, err := local.StartTemporal(ctx, local.TemporalOptions{Dir: filepath.Join(dir, "temporal")})
	if err != nil {
		return err
	}
	defer temporal.Kill()
	for _, name := range sides {
		if err := theirs.CreateDatabase(ctx, name); err != nil {
			return err
		}
	}
	if err := own.CreateDatabase(ctx, "control"); err != nil {
		return err
	}
	o.control, o.temporal, o.source, o.receiver = own.DSN("control"), temporal.HostPort, theirs.DSN(sides[0]), theirs.DSN(sides[1])
	began := time.Now()
	if err := o.prepare(ctx); err != nil {
		return err
	}
	fmt.Printf("%d sites of %d tables each were configured and set up in %.0f s\n", o.sites, o.tables, time.Since(began).Seconds())
	worker, err := o.launch("control")
	if err != nil {
		return err
	}
	defer end(worker)
	agents, err := o.launch("agents")
	if err != nil {
		return err
	}
	defer end(agents)
	frontend, err := client.Dial(client.Options{HostPort: temporal.HostPort, Logger: quiet{}})
	if err != nil {
		return err
	}
	defer frontend.Close()
	m := &meter{options: o, frontend: frontend, processes: map[string]int{"control worker": worker.Process.Pid, "agents": agents.Process.Pid, "Temporal": temporal.PID(),
		"control database": own.PID(), "sides' databases": theirs.PID()}}
	if m.control, err = pgx.Connect(ctx, o.control); err != nil {
		return err
	}
	if m.source, err = pgx.Connect(ctx, o.source); err != nil {
		return err
	}
	began = time.Now()
	if err := m.counted(ctx); err != nil {
		return err
	}
	fmt.Printf("all tables were counted %.0f s after the agents were started\n", time.Since(began).Seconds())
	if err := wait(ctx, o.settle); err != nil {
		return err
	}
	if err := m.part(ctx, "idle", nil); err != nil {
		return err
	}
	return m.part(ctx, fmt.Sprintf("%g changes a second and site", o.rate), m.write)
}

// prepare makes the tables and configures and sets up all sites. All of them are in the same two databases, each
// with tables and schemas of its own.
func (o options) prepare(ctx context.Context) error {
	if _, err := control.Migrate(ctx, o.control); err != nil {
		return err
	}
	store, err := control.Open(ctx, o.control)
	if err != nil {
		return err
	}
	defer store.Disconnect()
	for _, dsn := range []string{o.source, o.receiver} {
		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			return err
		}
		for i := range o.sites {
			var sql strings.Builder
			fmt.Fprintf(&sql, `CREATE SCHEMA %s;`, siteName(i))
			for n := range o.tables {
				fmt.Fprintf(&sql, `CREATE TABLE %[1]s.t%[2]d (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v text); INSERT INTO %[1]s.t%[2]d (v) SELECT 'x' FROM generate_series(1, 100);`, siteName(i), n)
			}
			if _, err := conn.Exec(ctx, sql.String()); err != nil {
				return err
			}
		}
		_ = conn.Close(ctx)
	}
	var all errgroup.Group
	all.SetLimit(4)
	for i := range o.sites {
		all.Go(func() error { return o.prepareSite(ctx, store, siteName(i)) })
	}
	return all.Wait()
}

func (o options) prepareSite(ctx context.Context, store *control.Store, site string) error {
	if err := store.CreateSite(ctx, "scale", site, sides); err != nil {
		return err
	}
	for n := range o.tables {
		if _, err := store.PutTable(ctx, "scale", site, fmt.Sprintf("%s.t%d", site, n), control.TableChange{CapturedFrom: sides[:1]}); err != nil {
			return err
		}
	}
	tables, err := store.Tables(ctx, site)
	if err != nil {
		return err
	}
	for s, dsn := range []string{o.source, o.receiver} {
		db, err := side.Open(ctx, site, sides[s], dsn)
		if err != nil {
			return err
		}
		steps, err := db.SetupSteps(ctx, tables, side.Roles{})
		if err == nil {
			err = db.Setup(ctx, steps)
		}
		db.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (o options) launch(role string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "-role", role, "-sites", fmt.Sprint(o.sites), "-control", o.control, "-temporal", o.temporal, "-source", o.source, "-receiver", o.receiver)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, cmd.Start()
}

func end(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// meter reads what the processes use.
type meter struct {
	options
	frontend        client.Client
	control, source *pgx.Conn
	processes       map[string]int
}

// counted waits until both agents of every site have looked at their tables.
func (m *meter) counted(ctx context.Context) error {
	for {
		var left int
		if err := m.control.QueryRow(ctx, `SELECT $1 - count(*) FROM backfill_control.table_side WHERE counted_at IS NOT NULL`, 2*m.sites*m.tables).Scan(&left); err != nil {
			return err
		}
		if left == 0 {
			return nil
		}
		if err := wait(ctx, time.Second); err != nil {
			return err
		}
	}
}

// reading is what has been used up to a moment.
type reading struct {
	at                     time.Time
	cpu                    map[string]time.Duration
	calls, commits, wal    float64
	sideCalls              float64
	connections, sideConns int
	events                 int64
	memory                 map[string]int64
}

func (m *meter) read(ctx context.Context) (r reading, err error) {
	r = reading{at: time.Now(), cpu: map[string]time.Duration{}, memory: map[string]int64{}}
	for name, pid := range m.processes {
		cpu, memory, e := usage(pid)
		r.cpu[name], r.memory[name] = cpu, memory
		err = errors.Join(err, e)
	}
	err = errors.Join(err, m.control.QueryRow(ctx, `
		SELECT (SELECT sum(calls) FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = current_database() AND query NOT IN ('BEGIN', 'COMMIT', 'begin', 'commit')),
		       (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()), pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0'),
		       (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid())`).Scan(&r.calls, &r.commits, &r.wal, &r.connections),
		m.source.QueryRow(ctx, `SELECT sum(xact_commit), (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'backfill-agent') FROM pg_stat_database WHERE datname IN ('school', 'central')`).Scan(&r.sideCalls, &r.sideConns))
	var token []byte
	for {
		page, e := m.frontend.ListWorkflow(ctx, &workflowservice.ListWorkflowExecutionsRequest{NextPageToken: token})
		if e != nil {
			return r, errors.Join(err, e)
		}
		for _, w := range page.Executions {
			d, e := m.frontend.DescribeWorkflowExecution(ctx, w.Execution.WorkflowId, w.Execution.RunId)
			for tries := 1; e != nil && tries < 6 && ctx.Err() == nil; tries++ { // it may be slow, that is what is measured
				d, e = m.frontend.DescribeWorkflowExecution(ctx, w.Execution.WorkflowId, w.Execution.RunId)
			}
			if e != nil {
				return r, errors.Join(err, e)
			}
			r.events += d.WorkflowExecutionInfo.HistoryLength
		}
		if token = page.NextPageToken; len(token) == 0 {
			return r, err
		}
	}
}

// part measures for a time, while other is done beside it.
func (m *meter) part(ctx context.Context, name string, other func(context.Context) error) error {
	if _, err := m.control.Exec(ctx, `CREATE EXTENSION IF NOT EXISTS pg_stat_statements; SELECT pg_stat_statements_reset()`); err != nil {
		return err
	}
	beside, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() {
		if other == nil {
			done <- nil
			return
		}
		done <- other(beside)
	}()
	before, err := m.read(ctx)
	if err != nil {
		return err
	}
	if err := wait(ctx, m.last); err != nil {
		return err
	}
	after, err := m.read(ctx)
	if err != nil {
		return err
	}
	stop()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	took := after.at.Sub(before.at).Seconds()
	n := float64(m.sites)
	events := float64(after.events-before.events) / took * 3600 / float64(20*time.Minute/turn)
	fmt.Printf("\n%d sites of %d tables, %s, over %.0f s:\n", m.sites, m.tables, name, took)
	line := func(what, format string, values ...any) {
		fmt.Printf("  %-34s "+format+"\n", append([]any{what}, values...)...)
	}
	line("control database: statements/s", "%.1f, %.2f a site", (after.calls-before.calls)/took, (after.calls-before.calls)/took/n)
	line("control database: commits/s", "%.1f, %.2f a site", (after.commits-before.commits)/took, (after.commits-before.commits)/took/n)
	line("control database: WAL", "%.1f KiB/s, %.2f a site", (after.wal-before.wal)/took/1024, (after.wal-before.wal)/took/1024/n)
	line("control database: connections", "%d, %.2f a site", after.connections, float64(after.connections)/n)
	line("sides: commits/s", "%.1f, %.2f a site", (after.sideCalls-before.sideCalls)/took, (after.sideCalls-before.sideCalls)/took/n)
	line("sides: connections", "%d, %.2f a side", after.sideConns, float64(after.sideConns)/n/2)
	line("Temporal: events/h", "%.0f, %.0f a site", events, events/n)
	for _, p := range []string{"control database", "sides' databases", "Temporal", "control worker", "agents"} {
		used := (after.cpu[p] - before.cpu[p]).Seconds() / took
		line("CPU of "+p, "%.3f cores, %.2f ms/s a site", used, used*1000/n)
	}
	for _, p := range []string{"Temporal", "control worker", "agents"} {
		line("memory of "+p, "%d MiB", after.memory[p]>>20)
	}
	return m.frequent(ctx, took)
}

// frequent prints the statements that are made most often.
func (m *meter) frequent(ctx context.Context, took float64) error {
	rows, err := m.control.Query(ctx, `SELECT calls, total_exec_time, left(regexp_replace(query, '\s+', ' ', 'g'), 150) FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
		WHERE d.datname = current_database() ORDER BY calls DESC LIMIT $1`, m.top)
	if err != nil {
		return err
	}
	var calls int64
	var total float64
	var query string
	_, err = pgx.ForEachRow(rows, []any{&calls, &total, &query}, func() error {
		fmt.Printf("    %7.2f/s %7.3f ms  %s\n", float64(calls)/took, total/float64(calls), query)
		return nil
	})
	return err
}

// write changes a row of one site after the other.
func (m *meter) write(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, m.options.source)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	tick := time.NewTicker(time.Duration(float64(time.Second) / (m.rate * float64(m.sites))))
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if _, err := conn.Exec(ctx, fmt.Sprintf(`UPDATE %s.t%d SET v = $1 WHERE id = $2`, siteName(i%m.sites), i/m.sites%m.tables), fmt.Sprint(i), 1+i%100); err != nil {
			return err
		}
	}
}

// usage is the processor time and resident memory of a process and those it has started.
func usage(pid int) (cpu time.Duration, memory int64, err error) {
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, 0, err
	}
	for _, file := range all {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		// What stands before is a name, which may hold anything.
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		var id, parent, own, system, childOwn, childSystem, pages int64
		_, _ = fmt.Sscan(filepath.Base(filepath.Dir(file)), &id)
		for i, v := range map[int]*int64{1: &parent, 11: &own, 12: &system, 13: &childOwn, 14: &childSystem, 21: &pages} {
			if _, err := fmt.Sscan(fields[i], v); err != nil {
				return 0, 0, err
			}
		}
		if id != int64(pid) && parent != int64(pid) {
			continue
		}
		cpu += time.Duration(own+system+childOwn+childSystem) * (time.Second / 100)
		memory += pages * int64(os.Getpagesize())
	}
	return cpu, memory, nil
}

// quiet is a log that nobody reads.
type quiet struct{}

func (quiet) Debug(string, ...any) {}
func (quiet) Info(string, ...any)  {}
func (quiet) Warn(string, ...any)  {}
func (quiet) Error(string, ...any) {}
