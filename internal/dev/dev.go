// Package dev is everything in one process: for trying the product out, for
// working on two databases of one's own, and for tests.
package dev

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.temporal.io/sdk/client"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/jackc/pgx/v5/pgconn"

	"backfill/activities"
	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/local"
	"backfill/internal/metrics"
	"backfill/internal/serve"
	"backfill/internal/side"
	"backfill/worker"
)

// Options say what is given; what is not is started.
type Options struct {
	State    string            // directory; everything is kept here and picked up again
	Listen   string            // host:port of API and web pages
	Token    string            // to sign in with; "" = the one kept in State, made at the first start
	Control  string            // connection string; "" = a database in a PostgreSQL of our own
	Temporal string            // host:port; "" = a development server of our own
	Site     string            // with Sides
	From     string            // the side whose changes are sent; "" = the first of SideOrder
	Sides    map[string]string // connection strings by name; none = the sides of the last start, else a demo
	// SideOrder are the names of Sides in the order they were given.
	SideOrder []string
	Tables    []string // schema.table
	Cycle     time.Duration
	Demo      bool
	InOne     bool // both sides are in one database
	Verbose   bool
}

// environment is what a run has put together, in the order it is taken apart.
type environment struct {
	Options
	log      *zap.Logger
	out      io.Writer
	postgres *local.Postgres
	temporal *local.Temporal
	console  string
	store    *control.Store
	client   client.Client
	figures  *metrics.Temporal
	agents   []*activities.Agent
	sides    []*side.DB
	order    map[string]int // of the tables, parents before children
	url      string
	demo     *demo
	again    bool // an earlier start has come to its end: the site is known, with its tables
}

// Run serves until ctx ends, then stops everything in order. It prints "ready:
// URL" and the token once all answers.
func Run(ctx context.Context, o Options, out io.Writer) (err error) {
	if err := os.MkdirAll(o.State, 0o700); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	e := &environment{Options: o, out: out, figures: metrics.NewTemporal()}
	if e.log, err = newLog(o.State, o.Verbose); err != nil {
		return err
	}
	// The port first: when it is taken nothing else need be started.
	listener, err := serve.Listen(o.Listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	e.url = "http://" + reachable(listener.Addr().String())
	defer func() { err = errors.Join(err, e.stop()) }()
	if err := e.start(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // asked to stop while starting
		}
		return err
	}
	return e.serve(ctx, listener)
}

func (e *environment) say(format string, args ...any) { fmt.Fprintf(e.out, format+"\n", args...) }

func (e *environment) start(ctx context.Context) error {
	if err := e.recall(); err != nil {
		return err
	}
	steps := []func(context.Context) error{e.startPostgres, e.startTemporal, e.openControl, e.makeDemo, e.configure}
	if !e.Demo {
		// The databases given come first: what is wrong with them is said before
		// anything is started.
		steps = append([]func(context.Context) error{e.openSides}, steps...)
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (e *environment) startPostgres(ctx context.Context) (err error) {
	if e.Control != "" && !e.Demo {
		return nil
	}
	e.say("starting PostgreSQL")
	e.postgres, err = local.StartPostgres(ctx, local.PostgresOptions{Dir: filepath.Join(e.State, "postgres")})
	if err != nil {
		return err
	}
	if e.Control != "" {
		// It may have been set for something else, and gets the demo's site.
		if c, err := pgconn.ParseConfig(e.Control); err == nil {
			e.say("the control database is %s on %s, as --control or BACKFILL_CONTROL says", c.Database, c.Host)
		}
		return nil
	}
	e.Control = e.postgres.DSN("control")
	return e.postgres.CreateDatabase(ctx, "control")
}

func (e *environment) startTemporal(ctx context.Context) (err error) {
	if e.Temporal == "" {
		e.say("starting Temporal")
		if e.temporal, err = local.StartTemporal(ctx, local.TemporalOptions{Dir: filepath.Join(e.State, "temporal")}); err != nil {
			return err
		}
		e.Temporal, e.console = e.temporal.HostPort, e.temporal.ConsoleURL
	}
	if e.client, _, err = (serve.Temporal{HostPort: e.Temporal, Environment: e.temporal == nil}).Dial(e.log, e.figures); err != nil || e.temporal != nil {
		return err
	}
	return e.awaitTemporal(ctx)
}

// temporalWithin is how long a Temporal that was given may take to answer.
const temporalWithin = 10 * time.Second

// awaitTemporal waits for the Temporal that was given, and says so.
func (e *environment) awaitTemporal(ctx context.Context) error {
	var err error
	for deadline, said := time.Now().Add(temporalWithin), false; ; {
		try, cancel := context.WithTimeout(ctx, 2*time.Second)
		_, err = e.client.CheckHealth(try, &client.CheckHealthRequest{})
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return fmt.Errorf("no Temporal answers at %s: check --temporal, and that its frontend listens there (%w)", e.Temporal, err)
		case !said:
			e.say("waiting for Temporal at %s", e.Temporal)
			said = true
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
}

func (e *environment) openControl(ctx context.Context) (err error) {
	if _, err := control.Migrate(ctx, e.Control); err != nil {
		return err
	}
	if e.store, err = control.Open(ctx, e.Control); err != nil {
		return err
	}
	if err := e.settleToken(); err != nil {
		return err
	}
	return e.store.PutToken(ctx, "dev", "dev", control.Admin, e.Token)
}

// settleToken takes the token given, else the one of the last start, else a new one.
func (e *environment) settleToken() error {
	path := filepath.Join(e.State, "token")
	if e.Token == "" {
		kept, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("token: %w", err)
		}
		e.Token = strings.TrimSpace(string(kept))
	}
	if e.Token == "" {
		e.Token = control.NewSecret()
	}
	return writeSecret(path, e.Token+"\n")
}

// makeDemo makes the databases of the demo site, if that is wanted, and opens them.
func (e *environment) makeDemo(ctx context.Context) error {
	if !e.Demo {
		return nil
	}
	e.demo = &demo{postgres: e.postgres, log: e.log}
	if err := e.demo.prepare(ctx, e.say); err != nil {
		return fmt.Errorf("demo site: %w", err)
	}
	e.Site, e.From, e.SideOrder, e.Tables = "maple", "school", []string{"school", "central"}, demoTables
	e.Sides = map[string]string{"school": e.demo.agentDSN("school"), "central": e.demo.agentDSN("central")}
	r, err := Recall(e.State)
	e.again = err == nil && r.Demo
	return e.openSides(ctx)
}

// openSides connects to both databases.
func (e *environment) openSides(ctx context.Context) error {
	if e.From == "" {
		e.From = e.SideOrder[0]
	}
	var first side.Place
	for i, name := range e.SideOrder {
		db, err := side.Open(ctx, e.Site, name, e.Sides[name])
		if err != nil {
			return fmt.Errorf("--side %s=DSN: %w", name, err)
		}
		e.sides = append(e.sides, db)
		place, err := db.Place(ctx)
		if err != nil {
			return fmt.Errorf("--side %s=DSN: %w", name, err)
		}
		if e.InOne {
			db.ShareDatabase()
		}
		if i > 0 && place != first && e.InOne {
			return backfill.Errorf(backfill.Refused, "--one-database: --side %s=DSN and --side %s=DSN lead to two databases", e.SideOrder[0], name)
		}
		if i > 0 && place == first && !e.InOne {
			return backfill.Errorf(backfill.Refused, "--side %s=DSN and --side %s=DSN lead to one database, %s: a site needs two", e.SideOrder[0], name, db.Where())
		}
		first = place
	}
	if e.again {
		return nil
	}
	return e.orderTables(ctx)
}

// orderTables finds the order of the tables given, which both sides have to have.
func (e *environment) orderTables(ctx context.Context) error {
	for i, db := range e.sides {
		order, err := db.ProposeOrder(ctx, e.Tables)
		if err != nil {
			return fmt.Errorf("side %s: %w", e.SideOrder[i], err)
		}
		if e.SideOrder[i] == e.From {
			e.order = order
		}
	}
	return nil
}

// configure makes the site and tables known, sets both sides up, and counts the
// tables once, so that the first page shows figures.
func (e *environment) configure(ctx context.Context) error {
	_, err := e.store.Site(ctx, e.Site)
	if backfill.CodeOf(err) == backfill.NotFound {
		if e.again { // by another control database
			e.again = false
			if err := e.orderTables(ctx); err != nil {
				return err
			}
		}
		create := e.store.CreateSite
		if e.InOne {
			create = e.store.CreateSiteInOne
		}
		err = create(ctx, "dev", e.Site, [2]string(e.SideOrder))
	}
	if err != nil {
		return err
	}
	if err := e.configureTables(ctx); err != nil {
		return err
	}
	tables, err := e.store.Tables(ctx, e.Site)
	if err != nil {
		return err
	}
	for _, db := range e.sides {
		steps, err := db.SetupSteps(ctx, tables, side.Roles{})
		switch {
		case e.again && backfill.CodeOf(err) == backfill.Refused:
			e.say("side %s stays as it was set up: %v", db.Side, err) // its agent says so too, and serves the other tables
		case err != nil:
			return err
		default:
			if err := db.Setup(ctx, steps); err != nil {
				return err
			}
		}
		agent, err := activities.NewAgent(ctx, e.store, db, serve.Name(), activities.Settings{Cycle: e.Cycle, CountEvery: 5 * time.Second})
		if err != nil {
			return err
		}
		if err := agent.CountNow(ctx); err != nil {
			return err
		}
		e.agents = append(e.agents, agent)
	}
	return e.remember()
}

// configureTables adds the tables that are not known yet; what an admin has
// changed since the first start stays.
// configureTables makes known what this start was given. What an earlier one was given is
// known, or was removed since.
func (e *environment) configureTables(ctx context.Context) error {
	if e.again {
		return nil
	}
	for _, name := range e.Tables {
		if _, err := e.store.Table(ctx, e.Site, name); err == nil {
			continue
		} else if backfill.CodeOf(err) != backfill.NotFound {
			return err
		}
		at := e.order[name]
		if _, err := e.store.PutTable(ctx, "dev", e.Site, name, control.TableChange{CapturedFrom: []string{e.From}, ApplyOrder: &at}); err != nil {
			return err
		}
	}
	return nil
}

func (e *environment) serve(ctx context.Context, l net.Listener) error {
	registry := metrics.Registry()
	registry.MustRegister(e.figures, metrics.Pools{"control": e.store.Stat})
	for i, a := range e.agents {
		registry.MustRegister(serve.AgentFigures(a, e.sides[i])...)
	}
	server := serve.HTTP(&api.Service{Store: e.store, Runs: api.NewRuns(e.client), Log: e.log.Named("api"), PublicURL: e.url, ConsoleURL: e.console}, api.Trust{}, nil, e.log.Named("api"), registry)
	cfg := worker.Config{Temporal: e.client, Name: serve.Name(), Keep: control.Keep{Requests: 90 * 24 * time.Hour, History: 30 * 24 * time.Hour}, Store: e.store, PublicURL: e.url, Log: e.log.Named("worker")}

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return server.Serve(ctx, l) })
	g.Go(func() error {
		return serve.Keep(ctx, e.log, "control worker", func() error { return worker.Control(ctx, cfg) })
	})
	for _, a := range e.agents {
		g.Go(func() error {
			return serve.Keep(ctx, e.log, "agent of "+a.Out.From, func() error { return worker.Agent(ctx, cfg, a) })
		})
	}
	if e.demo != nil {
		g.Go(func() error { return e.demo.write(ctx) })
	}
	g.Go(func() error {
		file, err := json.Marshal(map[string]string{"api": e.url, "token": e.Token})
		if err != nil {
			return err
		}
		if err := writeSecret(filepath.Join(e.State, "client.json"), string(file)+"\n"); err != nil {
			return err
		}
		e.say("ready: %s", e.url)
		e.say("token: %s", e.Token)
		e.say("sign in: %s/signin?token=%s", e.url, e.Token)
		if e.console != "" {
			e.say("console: %s", e.console)
		}
		e.say("temporal: %s", e.Temporal)
		return nil
	})
	return g.Wait()
}

// stop takes apart what start put together, in the opposite order.
func (e *environment) stop() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if e.client != nil {
		e.client.Close()
	}
	for _, db := range e.sides {
		db.Close()
	}
	if e.store != nil {
		e.store.Disconnect()
	}
	if e.temporal != nil {
		err = errors.Join(err, e.temporal.Stop(ctx))
	}
	if e.postgres != nil {
		err = errors.Join(err, e.postgres.Stop(ctx))
	}
	_ = e.log.Sync() // a console cannot be synced, which is no loss
	return err
}

// Remembered is what a state directory knows: what the next start without flags
// goes on with, and where the databases are for commands beside it.
type Remembered struct {
	Control    string
	Given      Given
	Site, From string
	Sides      map[string]string
	SideOrder  []string
	Tables     []string
	Demo       bool
	InOne      bool
}

// Given is what the last start was given rather than started itself.
type Given struct{ Control, Temporal string }

// Recall reads what the last start in a state directory has left.
func Recall(state string) (r Remembered, err error) {
	file, err := os.ReadFile(filepath.Join(state, "dev.json"))
	if err != nil {
		return r, fmt.Errorf("state directory: %w", err)
	}
	if err := json.Unmarshal(file, &r); err != nil {
		return r, fmt.Errorf("dev.json in the state directory is damaged: %w", err)
	}
	return r, nil
}

func (e *environment) recall() error {
	if len(e.Sides) > 0 {
		if e.Site == "" {
			e.Site = "site"
		}
		return nil
	}
	if e.Demo {
		return nil
	}
	r, err := Recall(e.State)
	if errors.Is(err, os.ErrNotExist) {
		e.Demo = true
		return nil
	}
	if err != nil {
		return err
	}
	if e.Control == "" {
		e.Control = r.Given.Control
	}
	if e.Temporal == "" {
		e.Temporal = r.Given.Temporal
	}
	e.Site, e.From, e.Sides, e.SideOrder, e.Tables, e.Demo, e.InOne = r.Site, r.From, r.Sides, r.SideOrder, r.Tables, r.Demo, r.InOne
	e.again = true
	return nil
}

func (e *environment) remember() error {
	var given Given
	if e.postgres == nil || e.Control != e.postgres.DSN("control") {
		given.Control = e.Control
	}
	if e.temporal == nil {
		given.Temporal = e.Temporal
	}
	r := Remembered{Control: e.Control, Given: given, Site: e.Site, From: e.From, Sides: e.Sides, SideOrder: e.SideOrder, Tables: e.Tables, Demo: e.Demo, InOne: e.InOne}
	file, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return writeSecret(filepath.Join(e.State, "dev.json"), string(file)+"\n")
}

// writeSecret replaces a file whole, readable by its owner only.
func writeSecret(path, content string) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(content), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// reachable is an address a browser on this machine can open.
func reachable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// newLog writes to a file in the state directory, and to standard error too when
// asked.
func newLog(state string, verbose bool) (*zap.Logger, error) {
	cfg := zap.NewProductionConfig()
	cfg.OutputPaths = []string{filepath.Join(state, "backfill.log")}
	cfg.ErrorOutputPaths = cfg.OutputPaths
	cfg.DisableStacktrace = true
	cfg.Level.SetLevel(zap.InfoLevel)
	if verbose {
		cfg.OutputPaths = append(cfg.OutputPaths, "stderr")
	}
	log, err := cfg.Build()
	if err != nil {
		return nil, fmt.Errorf("log file: %w", err)
	}
	return log, nil
}
