// Package serve puts the parts of each role together: API, control worker, agent.
// It reads no flags.
package serve

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/labstack/echo/v4"
	"go.temporal.io/sdk/client"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"backfill/activities"
	"backfill/api"
	"backfill/internal/control"
	"backfill/internal/side"
	"backfill/ui"
	"backfill/worker"
)

// Temporal says where the workflow engine is.
type Temporal struct{ HostPort, Namespace string }

// reconnectWithin is how long after its return Temporal may still count as away: a
// person whose approval was refused tries again at once.
const reconnectWithin = time.Second

// Dial makes a client that connects when it is first needed, so that a Temporal
// that is away now is waited for by what needs it.
func (t Temporal) Dial(log *zap.Logger) (client.Client, error) {
	reconnect := grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: 5 * time.Second}
	reconnect.Backoff.MaxDelay = reconnectWithin
	return client.NewLazyClient(client.Options{HostPort: t.HostPort, Namespace: t.Namespace, Logger: worker.Logger(log.Named("temporal")),
		ConnectionOptions: client.ConnectionOptions{DialOptions: []grpc.DialOption{grpc.WithConnectParams(reconnect)}}})
}

// NewLog logs to standard error as JSON, from info on, or from debug on.
func NewLog(verbose bool) (*zap.Logger, error) {
	cfg := zap.NewProductionConfig()
	cfg.DisableStacktrace = true
	if verbose {
		cfg.Level.SetLevel(zap.DebugLevel)
	}
	return cfg.Build()
}

// HTTP is the API with the web pages.
func HTTP(service *api.Service, log *zap.Logger) *api.Server {
	auth := api.NewAuth(service.Store.Account)
	return api.New(api.Config{Service: service, Auth: auth, Log: log,
		Extra: func(e *echo.Echo) { ui.Mount(e, service, ui.Options{Auth: auth}) }})
}

// API is the `backfill api` role.
type API struct {
	Control   string // connection string
	Temporal  Temporal
	Listen    string
	Console   string // base URL of Temporal's web console, may be empty
	PublicURL string // where people reach this process, may be empty
	Log       *zap.Logger
}

// Run serves until ctx ends.
func (a API) Run(ctx context.Context) error {
	store, err := control.Open(ctx, a.Control)
	if err != nil {
		return err
	}
	defer store.Disconnect()
	c, err := a.Temporal.Dial(a.Log)
	if err != nil {
		return err
	}
	defer c.Close()
	l, err := Listen(a.Listen)
	if err != nil {
		return err
	}
	a.Log.Info("api listens", zap.String("address", l.Addr().String()))
	return HTTP(&api.Service{Store: store, Runs: api.NewRuns(c), Log: a.Log, PublicURL: a.PublicURL, ConsoleURL: a.Console,
		Namespace: a.Temporal.Namespace}, a.Log).Serve(ctx, l)
}

// Listen opens a TCP port, or says which one and what to do.
func Listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%w: free the port or choose another address with --listen", err)
	}
	return l, nil
}

// Worker is the `backfill worker` role.
type Worker struct {
	Control   string // connection string of the control database
	Temporal  Temporal
	PublicURL string // of the web pages, for links in Temporal's console; may be empty
	Log       *zap.Logger
}

func (w Worker) open(ctx context.Context) (cfg worker.Config, done func(), err error) {
	store, err := control.Open(ctx, w.Control)
	if err != nil {
		return cfg, nil, err
	}
	c, err := w.Temporal.Dial(w.Log)
	if err != nil {
		store.Disconnect()
		return cfg, nil, err
	}
	return worker.Config{Temporal: c, Namespace: w.Temporal.Namespace, Store: store, PublicURL: w.PublicURL, Log: w.Log},
		func() { c.Close(); store.Disconnect() }, nil
}

// RunControl serves workflows and control activities until ctx ends.
func (w Worker) RunControl(ctx context.Context) error {
	cfg, done, err := w.open(ctx)
	if err != nil {
		return err
	}
	defer done()
	return Keep(ctx, w.Log, "control worker", func() error { return worker.Control(ctx, cfg) })
}

// RunAgent serves the activities beside one side's database until ctx ends.
func (w Worker) RunAgent(ctx context.Context, site, sideName, database string, s activities.Settings) error {
	cfg, done, err := w.open(ctx)
	if err != nil {
		return err
	}
	defer done()
	db, err := side.Open(ctx, site, sideName, database)
	if err != nil {
		return err
	}
	defer db.Close()
	agent, err := activities.NewAgent(ctx, cfg.Store, db, Name(), s)
	if err != nil {
		return err
	}
	return Keep(ctx, w.Log, "agent", func() error { return worker.Agent(ctx, cfg, agent) })
}

// Name tells one process from another in leases and on pages.
func Name() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

// Keep runs a worker, again and again while Temporal is away, until ctx ends.
func Keep(ctx context.Context, log *zap.Logger, what string, run func() error) error {
	for {
		err := run()
		if err == nil || ctx.Err() != nil {
			return nil
		}
		log.Warn("Temporal is away, trying again", zap.String("for", what), zap.Error(err))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}
