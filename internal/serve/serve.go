// Package serve puts the parts of each role together: API, control worker, agent.
// It reads no flags.
package serve

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"go.temporal.io/sdk/client"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"backfill/activities"
	"backfill/api"
	"backfill/internal/control"
	"backfill/internal/metrics"
	"backfill/internal/oidc"
	"backfill/internal/side"
	"backfill/ui"
	"backfill/worker"
)

// NewLog logs to standard error as JSON, from info on, or from debug on.
func NewLog(verbose bool) (*zap.Logger, error) {
	cfg := zap.NewProductionConfig()
	cfg.DisableStacktrace = true
	if verbose {
		cfg.Level.SetLevel(zap.DebugLevel)
	}
	return cfg.Build()
}

// HTTP is the API with the web pages. Its figures, and those of the installation, are
// added to a registry, which it shows at /metrics.
func HTTP(service *api.Service, trust api.Trust, provider *oidc.Provider, log *zap.Logger, registry *prometheus.Registry) *api.Server {
	registry.MustRegister(metrics.Installation{Store: service.Store, Temporal: service.Runs.Check}, metrics.Proof{Store: service.Store})
	auth, changes := api.NewAuthBehind(service.Store, trust), api.NewChanges(service.Store, log)
	return api.New(api.Config{Service: service, Auth: auth, Changes: changes, Log: log, Registry: registry,
		Extra: func(e *echo.Echo) { ui.Mount(e, service, ui.Options{Auth: auth, Changes: changes, Provider: provider}) }})
}

// API is the `backfill api` role.
type API struct {
	Control   string // connection string
	Temporal  Temporal
	Listen    string
	Console   string // base URL of Temporal's web console, may be empty
	PublicURL string // where people reach this process, may be empty
	Trust     api.Trust
	Provider  *oidc.Provider // signs people in who have no password here, may be nil
	Log       *zap.Logger
	Out       io.Writer // where a link to the first account is printed, which is not for logs
}

// Run serves until ctx ends.
func (a API) Run(ctx context.Context) error {
	store, err := control.Open(ctx, a.Control)
	if err != nil {
		return err
	}
	defer store.Disconnect()
	figures, registry := metrics.NewTemporal(), metrics.Registry()
	registry.MustRegister(figures, metrics.Pools{"control": store.Stat})
	c, namespace, err := a.Temporal.Dial(a.Log, figures)
	if err != nil {
		return err
	}
	defer c.Close()
	l, err := Listen(a.Listen)
	if err != nil {
		return err
	}
	a.Log.Info("api listens", zap.String("address", l.Addr().String()))
	link, err := store.FirstLink(ctx)
	if err != nil {
		return err
	}
	if link != "" {
		fmt.Fprintf(a.Out, "nobody can sign in yet; make the first account within an hour: %s/signin?link=%s\n", cmp.Or(a.PublicURL, "http://"+l.Addr().String()), link)
	}
	server := HTTP(&api.Service{Store: store, Runs: api.NewRuns(c), Log: a.Log, PublicURL: a.PublicURL, ConsoleURL: a.Console,
		Namespace: namespace}, a.Trust, a.Provider, a.Log, registry)
	return store.WhileKnown(ctx, func(ctx context.Context) error { return server.Serve(ctx, l) })
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
	Metrics   string // address to show the process's figures and health at; "" for nowhere
	Log       *zap.Logger
}

func (w Worker) open(ctx context.Context, registry *prometheus.Registry) (cfg worker.Config, done func(), err error) {
	store, err := control.Open(ctx, w.Control)
	if err != nil {
		return cfg, nil, err
	}
	figures := metrics.NewTemporal()
	registry.MustRegister(figures, metrics.Pools{"control": store.Stat})
	c, namespace, err := w.Temporal.Dial(w.Log, figures)
	if err != nil {
		store.Disconnect()
		return cfg, nil, err
	}
	return worker.Config{Temporal: c, Name: Name(), Namespace: namespace, Deployment: w.Temporal.Deployment, Build: w.Temporal.Build, Store: store, PublicURL: w.PublicURL, Log: w.Log},
		func() { c.Close(); store.Disconnect() }, nil
}

// RunControl serves workflows and control activities until ctx ends.
func (w Worker) RunControl(ctx context.Context, keep control.Keep) error {
	registry := metrics.Registry()
	cfg, done, err := w.open(ctx, registry)
	if err != nil {
		return err
	}
	defer done()
	cfg.Keep = keep
	return cfg.Store.WhileKnown(ctx, func(ctx context.Context) error {
		return w.beside(ctx, registry, needs(cfg), func(ctx context.Context) error {
			return Keep(ctx, w.Log, "control worker", func() error { return worker.Control(ctx, cfg) })
		})
	})
}

// RunAgent serves the activities beside one side's database until ctx ends.
func (w Worker) RunAgent(ctx context.Context, site, sideName, database string, s activities.Settings) error {
	registry := metrics.Registry()
	cfg, done, err := w.open(ctx, registry)
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
	if err := db.Apart(ctx); err != nil {
		return err
	}
	registry.MustRegister(AgentFigures(agent, db)...)
	parts := needs(cfg)
	parts["side"] = db.Ping
	return cfg.Store.WhileKnown(ctx, func(ctx context.Context) error {
		return w.beside(ctx, registry, parts, func(ctx context.Context) error {
			return Keep(ctx, w.Log, "agent", func() error { return worker.Agent(ctx, cfg, agent) })
		})
	})
}

// AgentFigures are what an agent's process tells beside its connections to the
// control database.
func AgentFigures(a *activities.Agent, db *side.DB) []prometheus.Collector {
	return []prometheus.Collector{
		metrics.Applied{Site: a.Out.Site, Side: a.Out.From, Rows: a.AppliedRows},
		metrics.Pools{"side " + a.Out.From: db.Stat},
	}
}

// beside runs a worker with its figures and its health shown beside it. Both end
// together.
func (w Worker) beside(ctx context.Context, registry *prometheus.Registry, parts parts, run func(context.Context) error) error {
	if w.Metrics == "" {
		return run(ctx)
	}
	l, err := net.Listen("tcp", w.Metrics)
	if err != nil {
		return fmt.Errorf("%w: free the port or choose another address with --metrics", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", metrics.Handler(registry))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"status":"ok"}`+"\n") })
	mux.Handle("/readyz", parts)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		defer server.Close()
		return run(ctx)
	})
	w.Log.Info("figures are shown", zap.String("address", "http://"+l.Addr().String()+"/metrics"))
	return g.Wait()
}

// parts are what a worker needs to work, by name.
type parts map[string]func(context.Context) error

func needs(cfg worker.Config) parts {
	return parts{"database": cfg.Store.Ping, "temporal": func(ctx context.Context) error {
		_, err := cfg.Temporal.CheckHealth(ctx, &client.CheckHealthRequest{})
		return err
	}}
}

// ServeHTTP answers /readyz: 503 while one of the parts is away, and says which. Why
// is in the process's log and on the site's page.
func (p parts) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), 3*time.Second)
	defer cancel()
	status, out := http.StatusOK, map[string]string{"status": "ready"}
	for name, answers := range p {
		out[name] = "ok"
		if answers(ctx) != nil {
			status, out["status"], out[name] = http.StatusServiceUnavailable, "not ready", "away"
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(out)
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
