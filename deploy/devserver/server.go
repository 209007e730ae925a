package main

import (
	"fmt"
	"net"
	"strconv"
	"time"

	uiserver "github.com/temporalio/ui-server/v2/server"
	uiconfig "github.com/temporalio/ui-server/v2/server/config"
	uioptions "github.com/temporalio/ui-server/v2/server/server_options"
	"go.temporal.io/server/common/authorization"
	"go.temporal.io/server/common/cluster"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/dynamicconfig"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/membership/static"
	"go.temporal.io/server/common/primitives"
	"go.temporal.io/server/temporal"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	namespace   = "default"
	clusterName = "active"
	storeName   = "sqlite"
)

// options are the flags of the command.
type options struct {
	db       string
	listen   string
	ui       string
	logLevel string
}

type server struct {
	hostPort string // where clients reach the frontend
	console  string // where browsers reach the console; empty without one
	temporal temporal.Server
	ui       *uiserver.Server
	log      quietLevel
}

// String is the line that tells a parent process that the server is ready.
func (s *server) String() string {
	line := "ready: " + s.hostPort
	if s.console != "" {
		line += " ui: http://" + s.console
	}
	return line
}

// start brings up the services and the console; the frontend accepts connections when it returns.
func start(opts options) (*server, error) {
	logger, level, err := newLogger(opts.logLevel)
	if err != nil {
		return nil, err
	}
	frontend, err := listenAddr(opts.listen, "--listen")
	if err != nil {
		return nil, err
	}
	store, err := openStore(opts.db)
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	internal := func(port int) *net.TCPAddr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port} }
	addrs := map[primitives.ServiceName]*net.TCPAddr{
		primitives.FrontendService: frontend,
		primitives.HistoryService:  internal(ports[0]),
		primitives.MatchingService: internal(ports[1]),
		primitives.WorkerService:   internal(ports[2]),
	}

	// The console would end the process if it could not listen, so its address is tried before anything starts.
	var console *net.TCPAddr
	if opts.ui != "" {
		if console, err = listenAddr(opts.ui, "--ui"); err != nil {
			return nil, err
		}
	}

	s := &server{hostPort: dialable(frontend), log: level}

	hosts := make(map[primitives.ServiceName]static.Hosts, len(addrs))
	for name, addr := range addrs {
		hosts[name] = static.SingleLocalHost(dialable(addr))
	}
	s.temporal, err = temporal.NewServer(
		temporal.WithConfig(serverConfig(store, addrs)),
		temporal.ForServices(temporal.DefaultServices),
		temporal.WithStaticHosts(hosts),
		temporal.WithLogger(logger),
		temporal.WithAuthorizer(authorization.NewNoopAuthorizer()),
		temporal.WithClaimMapper(func(*config.Config) authorization.ClaimMapper { return authorization.NewNoopClaimMapper() }),
		temporal.WithDynamicConfigClient(dynamicConfig()),
	)
	if err != nil {
		return nil, fmt.Errorf("configure temporal: %w", err)
	}
	if err := s.temporal.Start(); err != nil {
		return nil, fmt.Errorf("start temporal on %s: %w", opts.db, err)
	}
	s.log.quiet(false)
	if console != nil {
		// It connects when it is made, hence not before the frontend is there.
		s.ui = newConsole(console, s.hostPort)
		s.console = dialable(console)
		go func() { _ = s.ui.Start() }()
	}
	return s, nil
}

// stop ends the console and the services, and gives up on those that take longer than the timeout: every step of a
// workflow is a SQLite transaction, so leaving in the middle of one loses nothing.
func (s *server) stop(timeout time.Duration) {
	s.log.quiet(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if s.ui != nil {
			s.ui.Stop()
		}
		_ = s.temporal.Stop()
	}()
	select {
	case <-done:
	case <-time.After(timeout):
	}
}

func serverConfig(store *config.SQL, addrs map[primitives.ServiceName]*net.TCPAddr) *config.Config {
	frontend := dialable(addrs[primitives.FrontendService])
	services := make(map[string]config.Service, len(addrs))
	for name, addr := range addrs {
		services[string(name)] = config.Service{RPC: config.RPC{GRPCPort: addr.Port, BindOnIP: addr.IP.String()}}
	}
	conf := &config.Config{
		Persistence: config.Persistence{
			DefaultStore:     storeName,
			VisibilityStore:  storeName,
			NumHistoryShards: 1, // fixed for the life of the file
			DataStores:       map[string]config.DataStore{storeName: {SQL: store}},
		},
		ClusterMetadata: &cluster.Config{
			FailoverVersionIncrement: 10,
			MasterClusterName:        clusterName,
			CurrentClusterName:       clusterName,
			ClusterInformation: map[string]cluster.ClusterInformation{
				clusterName: {Enabled: true, InitialFailoverVersion: 1, RPCAddress: frontend},
			},
		},
		DCRedirectionPolicy: config.DCRedirectionPolicy{Policy: "noop"},
		Services:            services,
		PublicClient:        config.PublicClient{HostPort: frontend},
	}
	conf.Archival.History.State = "disabled"
	conf.Archival.Visibility.State = "disabled"
	conf.NamespaceDefaults.Archival.History.State = "disabled"
	conf.NamespaceDefaults.Archival.Visibility.State = "disabled"
	return conf
}

// dynamicConfig departs from the server's defaults only where they are meant for a cluster with tenants.
func dynamicConfig() dynamicconfig.Client {
	return dynamicconfig.StaticClient{
		// A console and tests list far more often than the 10 times a second granted by default.
		dynamicconfig.FrontendMaxNamespaceVisibilityRPSPerInstance.Key(): 1000,
		// Search attributes are looked up afresh, so that one just registered can be used at once.
		dynamicconfig.ForceSearchAttributesCacheRefreshOnRead.Key(): true,
		dynamicconfig.NamespaceCacheRefreshInterval.Key():           500 * time.Millisecond,
		// One partition: a task always meets the poller that waits for it.
		dynamicconfig.MatchingNumTaskqueueReadPartitions.Key():  1,
		dynamicconfig.MatchingNumTaskqueueWritePartitions.Key(): 1,
	}
}

func newConsole(addr *net.TCPAddr, frontend string) *uiserver.Server {
	host := addr.IP.String()
	if addr.IP.To4() == nil {
		host = "[" + host + "]" // it is pasted before ":port"
	}
	return uiserver.NewServer(uioptions.WithConfigProvider(&uiconfig.Config{
		Host:                host,
		Port:                addr.Port,
		TemporalGRPCAddress: frontend,
		DefaultNamespace:    namespace,
		EnableUI:            true,
		DisableNewsFetch:    true, // works without the internet
		HideLogs:            true,
		CORS:                uiconfig.CORS{CookieInsecure: true}, // plain HTTP
	}))
}

// quietLevel is the level of the log. While services start and stop they warn of each other's absence, which tells
// nobody anything: a log at level warn holds errors only during that time.
type quietLevel struct {
	zap.AtomicLevel
	asked zapcore.Level
}

func (l quietLevel) quiet(on bool) {
	if on && l.asked == zapcore.WarnLevel {
		l.SetLevel(zapcore.ErrorLevel)
	} else {
		l.SetLevel(l.asked)
	}
}

// newLogger returns a log to stderr that is quiet at first.
func newLogger(name string) (log.Logger, quietLevel, error) {
	asked, err := zapcore.ParseLevel(name)
	if err != nil {
		return nil, quietLevel{}, usageError{fmt.Errorf("unknown log level %q; use debug, info, warn or error", name)}
	}
	level := quietLevel{AtomicLevel: zap.NewAtomicLevel(), asked: asked}
	level.quiet(true)
	conf := zap.NewProductionConfig()
	conf.Level = level.AtomicLevel
	conf.Encoding = "console"
	conf.EncoderConfig.EncodeTime = zapcore.ISO8601TimeEncoder
	conf.DisableCaller = true // temporal adds its own
	conf.DisableStacktrace = asked > zapcore.DebugLevel
	conf.Sampling = nil
	zl, err := conf.Build()
	if err != nil {
		return nil, quietLevel{}, fmt.Errorf("open the log: %w", err)
	}
	return log.NewZapLogger(zl), level, nil
}

// listenAddr resolves a host:port to listen on, replaces port 0 by a free one, and fails when it is taken.
func listenAddr(hostPort, flag string) (*net.TCPAddr, error) {
	l, err := net.Listen("tcp", hostPort)
	if err != nil {
		return nil, fmt.Errorf("%w; choose another address with %s", err, flag)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr), nil
}

// dialable is where a client on this machine finds a listener. One on every address, also one on 0.0.0.0, is told as [::]
// and answers on both loopbacks, of which a container may lack the second.
func dialable(addr *net.TCPAddr) string {
	ip := addr.IP
	if ip.IsUnspecified() {
		ip = net.IPv4(127, 0, 0, 1)
	}
	return net.JoinHostPort(ip.String(), strconv.Itoa(addr.Port))
}

// freePorts finds n loopback ports for services that only talk to each other. A connection that was closed from the
// listener's side keeps a port out of the kernel's hands for a minute, so that servers starting at the same time do not
// pick the same ones; listening on it by number still works.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		client, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			_ = l.Close()
			return nil, fmt.Errorf("try a free port: %w", err)
		}
		conn, err := l.Accept()
		if err == nil {
			_ = conn.Close()
		}
		_, _ = client.Read(make([]byte, 1)) // until the listener's side has closed first
		_ = client.Close()
		_ = l.Close()
		if err != nil {
			return nil, fmt.Errorf("try a free port: %w", err)
		}
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}
