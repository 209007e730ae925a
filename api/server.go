package api

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"net/http"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
)

// Config is what a Server needs.
type Config struct {
	Service *Service
	// Auth tells accounts. Default: by the service's store. Pages mounted by Extra
	// share it, so that they agree about who is signed in.
	Auth *Auth
	// Changes tells streams and pages what has changed; the server has it listen.
	// Default: one over the service's store.
	Changes *Changes
	Log     *zap.Logger
	// Registry is what /metrics shows. Default: a new one, with this server's figures only.
	Registry *prometheus.Registry
	// Extra mounts more routes, such as the web pages. Default: none.
	Extra func(*echo.Echo)
}

// Server answers HTTP.
type Server struct {
	service  *Service
	auth     *Auth
	log      *zap.Logger
	echo     *echo.Echo
	document *openapi3.T
	changes  *Changes
	took     *prometheus.HistogramVec
	streams  prometheus.Gauge
	timing   timing

	closing chan struct{} // closed when streams must end
}

const (
	maxBody      = 1 << 20
	maxHeader    = 16 << 10
	handleWithin = 30 * time.Second
	writeTimeout = 60 * time.Second // streams set their own
	idleTimeout  = 2 * time.Minute
	drainWithin  = 15 * time.Second
)

// prefix is where the API begins; everything under it needs a token.
const prefix = "/api/v1"

// New makes a server. It panics when its routes and its document differ, which a
// test keeps from happening.
func New(cfg Config) *Server {
	s := &Server{
		service: cfg.Service, auth: cfg.Auth, log: cfg.Log,
		echo: echo.New(), document: loadDocument(), changes: cfg.Changes, timing: defaultTiming,
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "backfill_http_request_duration_seconds", Help: "Time to answer a request, streams left out.",
			Buckets: []float64{.005, .02, .1, .5, 2, 10, 30},
		}, []string{"method", "route", "status"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{Name: "backfill_http_event_streams", Help: "Open event streams."}),
		closing: make(chan struct{}),
	}
	if s.auth == nil {
		s.auth = NewAuth(cfg.Service.Store)
	}
	if s.changes == nil {
		s.changes = NewChanges(cfg.Service.Store, cfg.Log)
	}
	registry := cfg.Registry
	if registry == nil {
		registry = prometheus.NewRegistry()
	}
	registry.MustRegister(s.took, s.streams)
	s.echo.HTTPErrorHandler = s.fail
	s.echo.Use(s.observe, s.guard)
	s.mount(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	if cfg.Extra != nil {
		cfg.Extra(s.echo)
	}
	return s
}

// route is a method, a path as the document spells it, and what answers there.
type route struct {
	method, path string
	handle       echo.HandlerFunc
}

// routes are those that need a token, under prefix.
func (s *Server) routes() []route {
	return []route{
		{http.MethodGet, "/sites", s.listSites},
		{http.MethodPost, "/sites", s.createSite},
		{http.MethodGet, "/sites/{site}", s.getSite},
		{http.MethodPatch, "/sites/{site}", s.changeSite},
		{http.MethodPost, "/sites/{site}/epoch", s.newEpoch},
		{http.MethodGet, "/sites/{site}/events", s.siteEvents},
		{http.MethodGet, "/sites/{site}/gates", s.listGates},
		{http.MethodPut, "/sites/{site}/gates", s.replaceGates},
		{http.MethodPut, "/sites/{site}/gates/{gate}", s.putGate},
		{http.MethodDelete, "/sites/{site}/gates/{gate}", s.deleteGate},
		{http.MethodGet, "/sites/{site}/tables", s.listTables},
		{http.MethodPut, "/sites/{site}/tables/{table}", s.putTable},
		{http.MethodDelete, "/sites/{site}/tables/{table}", s.deleteTable},
		{http.MethodPost, "/sites/{site}/backfills", s.requestBackfill},
		{http.MethodGet, "/backfills", s.listBackfills},
		{http.MethodGet, "/backfills/{id}", s.getBackfill},
		{http.MethodGet, "/backfills/{id}/progress", s.getProgress},
		{http.MethodGet, "/backfills/{id}/rows", s.listRows},
		{http.MethodGet, "/backfills/{id}/events", s.backfillEvents},
		{http.MethodPost, "/backfills/{id}/approve", s.decide(s.service.Approve)},
		{http.MethodPost, "/backfills/{id}/reject", s.decide(s.service.Reject)},
		{http.MethodPost, "/backfills/{id}/judge", s.judge},
		{http.MethodPost, "/backfills/{id}/pause", s.hold(s.service.Pause)},
		{http.MethodPost, "/backfills/{id}/resume", s.hold(s.service.Resume)},
		{http.MethodPost, "/backfills/{id}/cancel", s.hold(s.service.Cancel)},
		{http.MethodGet, "/sites/{site}/queue", s.listQueue},
		{http.MethodPost, "/sites/{site}/queue/{seq}/retry", wish("retry", s.service.Retry)},
		{http.MethodPost, "/sites/{site}/queue/{seq}/skip", wish("skip", s.service.Skip)},
		{http.MethodGet, "/sites/{site}/history", s.listHistory},
		{http.MethodPost, "/sites/{site}/tables/{table}/mapping/try", s.tryMapping},
		{http.MethodGet, "/sites/{site}/tables/{table}/life", s.rowLife},
		{http.MethodGet, "/sites/{site}/tables/{table}/schedule", s.getSchedule},
		{http.MethodPut, "/sites/{site}/tables/{table}/schedule", s.putSchedule},
		{http.MethodGet, "/sites/{site}/tables/{table}/shadow", s.getShadow},
		{http.MethodGet, "/sites/{site}/tables/{table}/cutover", s.getCutover},
		{http.MethodPut, "/sites/{site}/tables/{table}/cutover", s.putPolicy},
		{http.MethodPost, "/shadow-reads", s.reportReads},
		{http.MethodPost, "/sites/{site}/reconciliations", s.requestReconciliation},
		{http.MethodGet, "/reconciliations", s.listReconciliations},
		{http.MethodGet, "/reconciliations/{id}", s.ofRun(s.getReconciliation)},
		{http.MethodGet, "/reconciliations/{id}/leaves", s.ofRun(s.listLeaves)},
		{http.MethodGet, "/reconciliations/{id}/keys", s.ofRun(s.listDifferences)},
		{http.MethodPost, "/reconciliations/{id}/repair", s.settleKeys(http.StatusCreated, s.service.Repair)},
		{http.MethodPost, "/reconciliations/{id}/waive", s.settleKeys(http.StatusOK, s.service.Waive)},
		{http.MethodPost, "/reconciliations/{id}/cancel", s.ofRun(s.endReconciliation)},
		{http.MethodGet, "/reconciliations/{id}/certificate", s.ofRun(s.certificate)},
		{http.MethodGet, "/certificate-key", s.certificateKey},
		{http.MethodGet, "/users", s.listUsers},
		{http.MethodPost, "/users", s.createUser},
		{http.MethodPatch, "/users/{name}", s.changeUser},
		{http.MethodDelete, "/users/{name}", s.deleteUser},
		{http.MethodGet, "/audit", s.listAudit},
		{http.MethodGet, "/events", s.events},
	}
}

func (s *Server) mount(metrics http.Handler) {
	for _, r := range s.routes() {
		chain := []echo.MiddlewareFunc{s.authenticate, s.validate(r.method, prefix+r.path), s.place}
		if r.method == http.MethodPost && r.path != "/users" { // a body with a password leaves no hash behind
			chain = append(chain, s.once)
		}
		s.echo.Add(r.method, prefix+echoPath(r.path), r.handle, chain...)
	}
	s.echo.GET("/healthz", s.healthz)
	s.echo.GET("/readyz", s.readyz)
	s.echo.GET("/metrics", echo.WrapHandler(metrics))
	s.echo.GET("/openapi.yaml", s.openapi)
}

var pathParameter = regexp.MustCompile(`\{(\w+)\}`)

func echoPath(path string) string { return pathParameter.ReplaceAllString(path, ":$1") }

// Handler answers the requests; without Serve, streams see changes by polling only.
func (s *Server) Handler() http.Handler { return s.echo }

// Serve answers on a listener until ctx ends, then ends streams, lets running
// requests finish, and returns nil. It is called once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	log, err := zap.NewStdLogAt(s.log, zap.DebugLevel)
	if err != nil {
		return err
	}
	base := context.WithoutCancel(ctx)
	server := &http.Server{
		Handler: s.echo, ErrorLog: log, MaxHeaderBytes: maxHeader,
		ReadHeaderTimeout: s.timing.header, ReadTimeout: s.timing.read, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		// Requests that run when ctx ends are finished, not cut off.
		BaseContext: func(net.Listener) context.Context { return base },
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		s.changes.Listen(ctx)
		return nil
	})
	g.Go(func() error {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		close(s.closing)
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainWithin)
		defer cancel()
		if server.Shutdown(limit) != nil {
			server.Close()
		}
		return nil
	})
	return g.Wait()
}

// observe gives a request its id, logs and measures it, and turns a panic into an
// internal error.
func (s *Server) observe(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) (err error) {
		start := time.Now()
		r, h := c.Request(), c.Response().Header()
		ctx, span := otel.Tracer("backfill/api").Start(otel.GetTextMapPropagator().Extract(r.Context(), propagation.HeaderCarrier(r.Header)),
			methodLabel(r.Method)+" "+c.Path(), trace.WithSpanKind(trace.SpanKindServer))
		defer span.End()
		r = r.WithContext(ctx)
		c.SetRequest(r)
		h.Set(echo.HeaderXRequestID, requestID(r))
		defer func() {
			if p := recover(); p != nil {
				if p == http.ErrAbortHandler {
					panic(p)
				}
				s.log.Error("panic", zap.Any("panic", p), zap.ByteString("stack", debug.Stack()))
				err = errors.New("panic")
			}
			if err != nil {
				c.Error(err)
				err = nil
			}
			took, status := time.Since(start), c.Response().Status
			span.SetAttributes(attribute.Int("http.response.status_code", status), attribute.String("http.route", c.Path()))
			if status >= http.StatusInternalServerError {
				span.SetStatus(codes.Error, http.StatusText(status))
			}
			if c.Response().Header().Get(echo.HeaderContentType) != eventStream {
				s.took.WithLabelValues(methodLabel(r.Method), c.Path(), strconv.Itoa(status)).Observe(took.Seconds())
			}
			// Neither query nor headers: both may hold what is not the log's business.
			s.log.Info("http", zap.String("method", r.Method), zap.String("path", r.URL.Path), zap.Int("status", status),
				zap.Int64("bytes", c.Response().Size), zap.Duration("took", took), zap.String("account", accountOf(c).Name),
				zap.String("remote", r.RemoteAddr), zap.String("request_id", h.Get(echo.HeaderXRequestID)))
		}()
		return next(c)
	}
}

// methodLabel keeps clients from making up labels. The route's label is safe: it
// is the pattern, not the path.
func methodLabel(method string) string {
	switch method {
	case http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodHead, http.MethodOptions, http.MethodPatch:
		return method
	}
	return "other"
}

var goodID = regexp.MustCompile(`^[A-Za-z0-9_-]{8,64}$`)

func requestID(r *http.Request) string {
	if id := r.Header.Get(echo.HeaderXRequestID); goodID.MatchString(id) {
		return id
	}
	return rand.Text()
}

// guard bounds what a request may cost and tells browsers to be strict. Pages set
// their own content policy over this one.
func (s *Server) guard(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		h := c.Response().Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
		h.Set("Cache-Control", "no-store")
		r := c.Request()
		r.Body = http.MaxBytesReader(c.Response(), r.Body, maxBody)
		if strings.HasSuffix(c.Path(), "/events") {
			return next(c)
		}
		ctx, cancel := context.WithTimeout(r.Context(), handleWithin)
		defer cancel()
		c.SetRequest(r.WithContext(ctx))
		return next(c)
	}
}
