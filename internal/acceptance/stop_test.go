//go:build linux

package acceptance

import (
	"cmp"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

// SIGTERM and SIGINT end everything in order, and the next start goes on.
func TestStopsInOrderAndGoesOn(t *testing.T) {
	t.Parallel()
	s := newSite(t, setup{
		tables: []string{"public.accounts"},
		a:      accounts("accounts", 30_000),
		b:      accounts("accounts", 100),
	})
	// The first time in the middle of a walk.
	id := s.request("public.accounts").ID
	s.await("the walk to begin", func() (bool, string) {
		r := s.show(id)
		return r.Staged > 0, r.String()
	})
	s.requireStops(syscall.SIGTERM)
	s.start()
	r := s.awaitReview(id)
	require.EqualValues(t, 30_000, r.Staged)
	s.requireStagedOnce(r)

	// The second time with a stream open and in the middle of a release. What is
	// not said is remembered: the databases and tables of the last start.
	stream := s.listen(path(id) + "/events")
	s.approve(r)
	s.requireStops(syscall.SIGINT)
	require.Contains(t, <-stream, `"state":"AWAITING_REVIEW"`)
	s.args = []string{"dev", "--state", s.state, "--listen", strings.TrimPrefix(s.url, "http://")}
	s.start()
	r = s.awaitFinished(id)
	s.drain()
	s.requireReleasedOnce(r)
	s.requireEqual("public.accounts")
}

// A table that was taken out stays out over a restart, and one that is gone from a database
// keeps the others from nothing.
func TestARestartBringsNothingBack(t *testing.T) {
	t.Parallel()
	both := accounts("accounts", 10) + accounts("rooms", 10) + accounts("halls", 10)
	s := newSite(t, setup{tables: []string{"public.accounts", "public.rooms", "public.halls"}, a: both, b: both})
	a, err := s.call(http.MethodDelete, "/sites/s/tables/public.rooms", nil)
	require.NoError(t, err)
	require.Less(t, a.Status, 300, "%s", a.Body)
	s.run(s.a, `DROP TABLE rooms`)
	s.run(s.b, `DROP TABLE rooms, halls`)
	s.requireStops(syscall.SIGTERM)
	s.args = []string{"dev", "--state", s.state, "--listen", strings.TrimPrefix(s.url, "http://")}
	s.start()
	a, err = s.call(http.MethodGet, "/sites/s/tables", nil)
	require.NoError(t, err)
	require.Contains(t, string(a.Body), "public.halls")
	require.NotContains(t, string(a.Body), "public.rooms")
	s.run(s.a, `UPDATE accounts SET balance = 7`)
	s.drain()
	s.requireEqual("public.accounts")
}

// listen opens a stream of events, and sends all of it once it has ended.
func (s *site) listen(path string) <-chan string {
	s.Helper()
	r, err := http.NewRequestWithContext(s.Context(), http.MethodGet, s.url+"/api/v1"+path, nil)
	require.NoError(s, err)
	r.Header.Set("Authorization", "Bearer "+s.token)
	res, err := http.DefaultClient.Do(r)
	require.NoError(s, err)
	require.Equal(s, "text/event-stream", res.Header.Get("Content-Type"))
	all := make(chan string, 1)
	go func() {
		defer res.Body.Close()
		text, _ := io.ReadAll(res.Body)
		all <- string(text)
	}()
	return all
}

// requireStops sends a signal and requires that everything ends soon.
func (s *site) requireStops(signal syscall.Signal) {
	s.Helper()
	children := s.children()
	require.GreaterOrEqual(s, len(children), 2, "PostgreSQL and Temporal")
	began := time.Now()
	require.NoError(s, s.dev.cmd.Process.Signal(signal))
	status := s.dev.exit(30 * time.Second)
	took := time.Since(began)
	require.Zero(s, status, "%s; it printed:\n%s", s.dev.cmd.ProcessState, s.dev.said())
	s.Logf("%s: it ended within %s", signal, took.Round(time.Millisecond))
	require.Less(s, took, 15*time.Second)
	for _, pid := range children {
		require.False(s, running(pid), "process %d is still there", pid)
	}
}

// Each mistake is one line that says what is wrong and what to do.
func TestMistakesAreOneLine(t *testing.T) {
	t.Parallel()
	s := prepareSite(t, setup{
		a: accounts("accounts", 10) + `CREATE TABLE keyless (id integer, name text); CREATE VIEW seen AS SELECT * FROM accounts`,
		b: accounts("accounts", 5) + `CREATE TABLE keyless (id integer, name text); CREATE VIEW seen AS SELECT * FROM accounts`,
	})
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	change := func(dsn string, edit func(*url.URL)) string {
		u, err := url.Parse(dsn)
		require.NoError(t, err)
		edit(u)
		return u.String()
	}
	secret := "not-the-password"
	// A control database that knows the site, and one that is not migrated: side a's.
	require.NoError(t, cluster.CreateDatabase(t.Context(), "mistakes"))
	known := cluster.DSN("mistakes")
	_, err = control.Migrate(t.Context(), known)
	require.NoError(t, err)
	store, err := control.Open(t.Context(), known)
	require.NoError(t, err)
	defer store.Disconnect()
	require.NoError(t, store.CreateSite(t.Context(), "test", "s", [2]string{"a", "b"}))
	s.run(s.a, `CREATE ROLE mistaken LOGIN PASSWORD 'mistaken'`)
	t.Cleanup(func() {
		_, err := s.a.Exec(context.Background(), `DROP ROLE mistaken`)
		require.NoError(t, err)
	})
	few := change(s.dsn["a"], func(u *url.URL) { u.User = url.UserPassword("mistaken", "mistaken") })
	nobody := "postgres://postgres:" + secret + "@127.0.0.1:1/x"
	localhost := change(s.dsn["a"], func(u *url.URL) { u.Host = strings.Replace(u.Host, "127.0.0.1", "localhost", 1) })
	const nowhere = "--temporal=127.0.0.1:1"
	password, _ := must(t, s.dsn["a"]).User.Password()
	for name, c := range map[string]struct {
		args                     []string // default: dev on both sides
		side, dsn, table, listen string
		status                   int // default: 1
		says                     []string
	}{
		"migrate, no server":      {args: []string{"migrate", "--control", nobody}, says: []string{"cannot connect to the control database at 127.0.0.1:1/x as postgres: connection refused"}},
		"migrate, few rights":     {args: []string{"migrate", "--control", few}, says: []string{"permission denied", "have CREATE on the database"}},
		"api, port in use":        {args: []string{"api", "--control", known, nowhere, "--listen", taken.Addr().String()}, says: []string{"address already in use", "--listen"}},
		"api, not migrated":       {args: []string{"api", "--control", s.dsn["a"], nowhere}, says: []string{"run backfill migrate"}},
		"worker, no server":       {args: []string{"worker", "--control", "--control-database", nobody, nowhere}, says: []string{"the control database", "connection refused"}},
		"agent, wrong password":   {args: []string{"worker", "--agent=s/a", "--database", change(s.dsn["a"], func(u *url.URL) { u.User = url.UserPassword("postgres", secret) }), "--control-database", known, nowhere}, says: []string{"the database of s/a", "check user and password"}},
		"agent, unknown side":     {args: []string{"worker", "--agent=s/c", "--database", s.dsn["a"], "--control-database", known, nowhere}, says: []string{`no side "c" of a site "s"`}},
		"setup, unknown side":     {args: []string{"setup", "--site=s", "--side=c", "--control", known, "--database", s.dsn["a"]}, says: []string{`no side "c" of a site "s"`}},
		"setup, few rights":       {args: []string{"setup", "--site=s", "--side=a", "--control", known, "--database", few}, says: []string{"permission denied", "run it as a role that"}},
		"setup-sql, no server":    {args: []string{"setup-sql", "--site=s", "--side=a", "--control", known, "--database", nobody}, says: []string{"the database of s/a", "connection refused"}},
		"token, nothing to go by": {args: []string{"token", "list", "--state-dir", t.TempDir()}, says: []string{"give --control", "--state-dir"}},
		"site, no API":            {args: []string{"site", "list", "--api", "http://127.0.0.1:1", "--token", "x"}, says: []string{"cannot reach the API at http://127.0.0.1:1", "connection refused"}},
		"one database twice":      {side: "b", dsn: localhost, status: 3, says: []string{"lead to one database", "a site needs two"}},
		"no Temporal":             {args: []string{"dev", "--state-dir", filepath.Join(t.TempDir(), "state"), "--listen", freeAddress(t), nowhere, "--control", known, "--site=s", "--side=a=" + s.dsn["a"], "--side=b=" + s.dsn["b"], "--table=public.accounts"}, says: []string{"no Temporal answers at 127.0.0.1:1", "check --temporal"}},
		"port in use":             {listen: taken.Addr().String(), says: []string{taken.Addr().String(), "address already in use", "--listen"}},
		"wrong password":          {side: "b", dsn: change(s.dsn["b"], func(u *url.URL) { u.User = url.UserPassword("postgres", secret) }), says: []string{"cannot connect to the database of s/b", "password authentication failed", "check user and password"}},
		"wrong port":              {side: "b", dsn: change(s.dsn["b"], func(u *url.URL) { u.Host = freeAddress(t) }), says: []string{"--side b=DSN", "cannot connect to the database of s/b at 127.0.0.1:", "as postgres: connection refused: check host and port"}},
		"wrong database":          {side: "a", dsn: change(s.dsn["a"], func(u *url.URL) { u.Path = "/nowhere" }), says: []string{"s/a", `"nowhere" does not exist`, "check the database's name"}},
		"no DSN":                  {side: "a", dsn: "postgres://postgres:" + secret + "@127.0.0.1:port/x", says: []string{"s/a", "cannot be understood"}},
		"no such table":           {table: "public.nowhere", says: []string{"side a", "no table public.nowhere"}},
		"no usable key":           {table: "public.keyless", says: []string{"side a", "public.keyless has no usable key", "primary key"}},
		"a view":                  {table: "public.seen", says: []string{"side a", "public.seen", "table behind it"}},
	} {
		t.Run(name, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "state")
			dsn := map[string]string{"a": s.dsn["a"], "b": s.dsn["b"]}
			if c.side != "" {
				dsn[c.side] = c.dsn
			}
			if c.table == "" {
				c.table = "public.accounts"
			}
			if c.listen == "" {
				c.listen = freeAddress(t)
			}
			if c.args == nil {
				c.args = []string{"dev", "--state", state, "--listen", c.listen, "--site", "s", "--side", "a=" + dsn["a"], "--side", "b=" + dsn["b"], "--table", c.table}
			}
			p, err := launch(filepath.Join(t.TempDir(), "printed"), c.args...)
			require.NoError(t, err)
			t.Cleanup(p.kill)
			require.Equal(t, cmp.Or(c.status, 1), p.exit(time.Minute), p.said())
			var errs []string
			for line := range strings.Lines(p.said()) {
				if !strings.HasPrefix(line, "starting ") && !strings.HasPrefix(line, "waiting ") && !strings.HasPrefix(line, "{") {
					errs = append(errs, line)
				}
			}
			require.Len(t, errs, 1, p.said())
			require.True(t, strings.HasPrefix(errs[0], "backfill: "), errs[0])
			for _, text := range c.says {
				require.Contains(t, errs[0], text)
			}
			for _, hidden := range []string{secret, password} {
				require.NotContains(t, p.said(), hidden)
			}
			require.Empty(t, descendants(p.pid()))
			t.Log(strings.TrimSpace(errs[0]))
		})
	}
}

func must(t *testing.T, dsn string) *url.URL {
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	return u
}
