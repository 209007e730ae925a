package containers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"
	tcnetwork "github.com/testcontainers/testcontainers-go/network"
	"github.com/testcontainers/testcontainers-go/wait"
	"golang.org/x/sync/errgroup"
)

// image is the name of an image, which the environment may replace.
func image(variable, name string) string {
	if v := os.Getenv(variable); v != "" {
		return v
	}
	return name
}

var (
	backfillImage = image("BACKFILL_IMAGE", "backfill")
	postgresImage = image("BACKFILL_POSTGRES_IMAGE", "backfill-postgres")
	temporalImage = image("BACKFILL_TEMPORAL_IMAGE", "backfill-temporal")
)

// The networks. Everything but agents and databases is on data and engine; each side
// has one of its own, which its agent and its database share. The tests, and through
// them the application, come in by app.
const (
	data   = "data"   // leads to the control database
	engine = "engine" // leads to Temporal
	sideA  = "side-a"
	sideB  = "side-b"
	app    = "app"
)

// stack is a whole installation.
type stack struct {
	*testing.T // of the test that runs now
	docker     *testcontainers.DockerClient
	networks   map[string]*testcontainers.DockerNetwork
	mu         sync.Mutex // of hosts
	hosts      map[string]*host
	token      string

	a, b, control *pgxpool.Pool
}

// host is a container, as a machine of its own.
type host struct {
	*testcontainers.DockerContainer
	on   []string // networks
	lost bool
}

const password = "secret"

func dsn(host, database string) string {
	return fmt.Sprintf("postgres://postgres:%s@%s:5432/%s?sslmode=disable&connect_timeout=3", password, host, database)
}

// newStack starts everything, with the agents of the sides a and b of the site s. It
// ends with the test.
func newStack(t *testing.T) *stack {
	t.Helper()
	if os.Getenv("BACKFILL_CONTAINERS") == "" {
		t.Skip("runs in containers: make test-containers")
	}
	// The reaper is an image of its own, from a registry; each test removes what it made.
	t.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
	s := &stack{T: t, networks: map[string]*testcontainers.DockerNetwork{}, hosts: map[string]*host{}}
	var err error
	s.docker, err = testcontainers.NewDockerClientWithOpts(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.docker.Close() })
	for _, name := range []string{data, engine, sideA, sideB, app} {
		n, err := tcnetwork.New(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = n.Remove(context.Background()) })
		s.networks[name] = n
	}
	t.Cleanup(func() { s.T = t; s.end(t.Failed()) })
	require.NoError(t, s.start("temporal", temporalImage, []string{engine}, confined, testcontainers.WithWaitStrategyAndDeadline(time.Minute, wait.ForLog("ready: "))))
	var all errgroup.Group
	for name, own := range map[string]string{"db-control": data, "db-a": sideA, "db-b": sideB} {
		all.Go(func() error { return s.postgres(name, own, app) })
	}
	require.NoError(t, all.Wait())
	s.control, s.a, s.b = s.pool("db-control"), s.pool("db-a"), s.pool("db-b")

	s.command("migrate")
	s.token = strings.TrimSpace(s.command("token", "create", "tests", "--role", "admin"))
	s.api("api-1")
	s.api("api-2")
	s.controlWorker("control-1")
	s.controlWorker("control-2")
	s.must(http.StatusCreated, http.MethodPost, "/sites", map[string]any{"name": "s", "sides": []string{"a", "b"}}, nil)
	for i := range tables {
		s.table(i)
	}
	s.setup()
	return s
}

func (s *stack) postgres(name string, networks ...string) error {
	return s.start(name, postgresImage, networks, testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": password}),
		testcontainers.WithCmd("postgres", "-c", "fsync=off"),
		testcontainers.WithWaitStrategyAndDeadline(time.Minute, wait.ForLog("database system is ready to accept connections").WithOccurrence(2)))
}

// settings lead every program of ours to what all share.
var settings = map[string]string{"BACKFILL_CONTROL": dsn("db-control", "postgres"), "BACKFILL_TEMPORAL": "temporal:7233"}

// program starts a program as it is deployed: without rights, on a root file system
// that cannot be written to.
func (s *stack) program(name, image string, networks []string, ready wait.Strategy, args ...string) {
	s.Helper()
	require.NoError(s, s.start(name, image, networks, confined, testcontainers.WithEnv(settings), testcontainers.WithCmd(args...),
		testcontainers.WithWaitStrategyAndDeadline(time.Minute, ready)))
}

var confined = testcontainers.WithHostConfigModifier(func(c *container.HostConfig) {
	c.ReadonlyRootfs, c.CapDrop, c.SecurityOpt = true, []string{"ALL"}, []string{"no-new-privileges"}
})

func (s *stack) api(name string) {
	s.Helper()
	s.program(name, backfillImage, []string{data, engine, app}, wait.ForLog("api listens"), "api", "--listen", "0.0.0.0:8080")
}

func (s *stack) controlWorker(name string) {
	s.Helper()
	s.program(name, backfillImage, []string{data, engine}, wait.ForLog("Started Worker"), "worker", "--control", "--metrics", "0.0.0.0:9090")
}

// agent starts an agent of a side.
func (s *stack) agent(name, side string) {
	s.Helper()
	s.program(name, backfillImage, []string{data, engine, "side-" + side}, wait.ForLog("Started Worker"),
		"worker", "--agent", "s/"+side, "--database", dsn("db-"+side, "postgres"), "--metrics", "0.0.0.0:9090", "--cycle", "200ms")
}

// setup sets both sides up, or repairs them.
func (s *stack) setup() {
	s.Helper()
	for _, side := range []string{"a", "b"} {
		s.command("setup", "--site", "s", "--side", side, "--database", dsn("db-"+side, "postgres"))
	}
}

// command runs a command to its end and returns what it printed.
func (s *stack) command(args ...string) string {
	s.Helper()
	c, err := testcontainers.Run(s.Context(), backfillImage, quiet, confined, testcontainers.WithEnv(settings), testcontainers.WithCmd(args...),
		s.attach("", data, sideA, sideB), testcontainers.WithWaitStrategyAndDeadline(time.Minute, wait.ForExit()))
	if c != nil {
		defer func() { _ = c.Terminate(context.Background()) }()
	}
	require.NoError(s, err)
	state, err := c.State(s.Context())
	require.NoError(s, err)
	said := logs(c)
	require.Zero(s, state.ExitCode, "backfill %s: %s", strings.Join(args, " "), said)
	return said
}

// attach connects a container that is to be to networks, where name leads to it.
func (s *stack) attach(name string, to ...string) testcontainers.CustomizeRequestOption {
	return func(r *testcontainers.GenericContainerRequest) error {
		for _, n := range to {
			if err := tcnetwork.WithNetwork(aliases(name), s.networks[n])(r); err != nil {
				return err
			}
		}
		return nil
	}
}

func aliases(name string) []string {
	if name == "" {
		return nil
	}
	return []string{name}
}

func (s *stack) start(name, image string, on []string, options ...testcontainers.ContainerCustomizer) error {
	options = append(options, quiet, s.attach(name, on...), testcontainers.WithConfigModifier(func(c *container.Config) { c.Hostname = name }))
	c, err := testcontainers.Run(s.Context(), image, options...)
	if c != nil {
		s.mu.Lock()
		s.hosts[name] = &host{DockerContainer: c, on: on}
		s.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// quiet keeps testcontainers from telling each of its steps.
var quiet = testcontainers.WithLogger(log.New(io.Discard, "", 0))

// end removes what was started, and shows what it said when the test has failed.
func (s *stack) end(failed bool) {
	for name, h := range s.hosts {
		said := logs(h.DockerContainer)
		if failed {
			lines := strings.Split(strings.TrimSpace(said), "\n")
			lines = slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, `"msg":"http"`) })
			s.Logf("%s ends:\n%s", name, strings.Join(lines[max(0, len(lines)-30):], "\n"))
		}
		for _, bad := range []string{"panic:", "fatal error:", "DATA RACE"} {
			require.NotContains(s, said, bad, name)
		}
		_ = h.Terminate(context.Background(), testcontainers.StopTimeout(0))
	}
}

func logs(c *testcontainers.DockerContainer) string {
	r, err := c.Logs(context.Background())
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	text, _ := io.ReadAll(r)
	return string(text)
}

// address is where the tests reach a host.
func (s *stack) address(name string) string {
	s.Helper()
	about, err := s.docker.ContainerInspect(s.Context(), s.hosts[name].GetContainerID(), client.ContainerInspectOptions{})
	require.NoError(s, err)
	for _, n := range []string{app, engine} { // the engine's is never cut
		if at, ok := about.Container.NetworkSettings.Networks[s.networks[n].Name]; ok {
			return at.IPAddress.String()
		}
	}
	require.Fail(s, "no way leads to "+name)
	return ""
}

func (s *stack) pool(name string) *pgxpool.Pool {
	s.Helper()
	p, err := pgxpool.New(context.Background(), dsn(s.address(name), "postgres"))
	require.NoError(s, err)
	s.Cleanup(p.Close)
	return p
}

// What can happen to hosts.

// cut takes a host off a network: nothing that is sent arrives, and nobody is told.
func (s *stack) cut(name, network string) {
	s.Helper()
	_, err := s.docker.NetworkDisconnect(s.Context(), s.networks[network].ID, client.NetworkDisconnectOptions{Container: s.hosts[name].GetContainerID(), Force: true})
	require.NoError(s, err)
}

// mend connects it again, under the name it had, perhaps at another address.
func (s *stack) mend(name, net string) {
	s.Helper()
	_, err := s.docker.NetworkConnect(s.Context(), s.networks[net].ID, client.NetworkConnectOptions{
		Container: s.hosts[name].GetContainerID(), EndpointConfig: &network.EndpointSettings{Aliases: []string{name}}})
	require.NoError(s, err)
}

// blink cuts a host off a network for long enough that everybody notices.
// The process that then misses a part is one that says so.
func (s *stack) blink(name, net, process, part string) {
	s.Helper()
	s.cut(name, net)
	until := time.Now().Add(12 * time.Second) // longer than a heartbeat may stay away
	s.well(process, "9090", part)
	time.Sleep(time.Until(until))
	s.mend(name, net)
	s.well(process, "9090", "")
}

// lose takes a host away as a power failure does: its peers hear nothing.
func (s *stack) lose(name string) {
	s.Helper()
	for _, n := range s.hosts[name].on {
		s.cut(name, n)
	}
	s.hosts[name].lost = true
	_, err := s.docker.ContainerKill(s.Context(), s.hosts[name].GetContainerID(), client.ContainerKillOptions{Signal: "KILL"})
	require.NoError(s, err)
}

// restart stops a host as a deployment does, and starts it again.
func (s *stack) restart(name string) {
	s.Helper()
	h, limit := s.hosts[name], 30*time.Second
	began := time.Now()
	require.NoError(s, h.Stop(s.Context(), &limit))
	state, err := h.State(s.Context())
	require.NoError(s, err)
	require.Zero(s, state.ExitCode, "%s was asked to stop, and ended after %s with %d", name, time.Since(began).Round(time.Millisecond), state.ExitCode)
	s.Logf("%s ended %s after it was asked to", name, time.Since(began).Round(100*time.Millisecond))
	require.NoError(s, h.DockerContainer.Start(s.Context()))
}

// well waits until a process says of itself that it can work, or cannot for want of one
// of its parts.
func (s *stack) well(name, port, away string) {
	s.Helper()
	s.await(name+" to know how it is", patience, func() (bool, string) {
		r, err := caller.Get("http://" + s.address(name) + ":" + port + "/healthz")
		if err != nil {
			return false, err.Error()
		}
		_ = r.Body.Close()
		require.Equal(s, http.StatusOK, r.StatusCode, "%s lives", name)
		if r, err = caller.Get("http://" + s.address(name) + ":" + port + "/readyz"); err != nil {
			return false, err.Error()
		}
		defer r.Body.Close()
		var parts map[string]string
		require.NoError(s, json.NewDecoder(r.Body).Decode(&parts))
		if away == "" {
			return r.StatusCode == http.StatusOK && parts["status"] == "ready", fmt.Sprint(r.StatusCode, parts)
		}
		return r.StatusCode == http.StatusServiceUnavailable && parts[away] == "away", fmt.Sprint(r.StatusCode, parts)
	})
}

// The API.

var caller = &http.Client{Timeout: 15 * time.Second}

// call asks the first API process that answers.
func (s *stack) call(method, path string, body, into any) (status int, err error) {
	for _, name := range []string{"api-1", "api-2"} {
		if s.hosts[name].lost {
			continue
		}
		if status, err = ask(s, "http://"+s.address(name)+":8080", s.token, method, path, body, into); status != 0 {
			return status, err
		}
	}
	return status, err
}

// ask calls an API; the status is 0 when it does not answer.
func ask(t require.TestingT, url, token, method, path string, body, into any) (status int, err error) {
	text, err := json.Marshal(body)
	require.NoError(t, err)
	r, err := http.NewRequest(method, url+"/api/v1"+path, bytes.NewReader(text))
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := caller.Do(r)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	if text, err = io.ReadAll(answer.Body); err != nil {
		return 0, err
	}
	switch {
	case answer.StatusCode >= 300:
		return answer.StatusCode, fmt.Errorf("%s %s: %d %s", method, path, answer.StatusCode, text)
	case into == nil:
		return answer.StatusCode, nil
	}
	return answer.StatusCode, json.Unmarshal(text, into)
}

func (s *stack) must(status int, method, path string, body, into any) {
	s.Helper()
	got, err := s.call(method, path, body, into)
	require.Equal(s, status, got, "%v", err)
}

func (s *stack) await(what string, within time.Duration, done func() (bool, string)) {
	s.Helper()
	await(s, what, within, done)
}

// await polls until done reports true, and shows the state it describes when that does
// not happen in time.
func await(t require.TestingT, what string, within time.Duration, done func() (bool, string)) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(within); ; <-tick.C {
		ok, state := done()
		if ok {
			return
		}
		require.True(t, time.Now().Before(deadline), "waited %s for %s; now: %s", within, what, state)
	}
}

func (s *stack) exec(p *pgxpool.Pool, sql string) {
	s.Helper()
	_, err := p.Exec(s.Context(), sql)
	require.NoError(s, err, sql)
}

func (s *stack) number(p *pgxpool.Pool, sql string, args ...any) (n int64) {
	s.Helper()
	require.NoError(s, p.QueryRow(s.Context(), sql, args...).Scan(&n), sql)
	return n
}
