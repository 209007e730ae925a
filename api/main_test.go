package api

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/jackc/pgx/v5"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// dsnOf returns the connection string of a database of the tests' own server.
var dsnOf func(database string) string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		return m.Run() // fuzz tests need no database, and each of their workers would start one
	}
	ctx := context.Background()
	stop, err := startPostgres(ctx)
	if err == nil {
		defer stop()
		err = makeTemplate(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// makeTemplate migrates one database, of which each test gets a copy.
func makeTemplate(ctx context.Context) error {
	if err := execute(ctx, dsnOf("postgres"), `DROP DATABASE IF EXISTS api_template WITH (FORCE)`); err != nil {
		return err
	}
	if err := execute(ctx, dsnOf("postgres"), `CREATE DATABASE api_template`); err != nil {
		return err
	}
	_, err := control.Migrate(ctx, dsnOf("api_template"))
	return err
}

func execute(ctx context.Context, dsn, sql string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

var databases atomic.Int64

// world is one API on a database of its own, with a site maple of the sides
// school and central, and a table public.orders that is behind on central.
type world struct {
	*testing.T
	database string
	store    *control.Store
	service  *Service
	server   *Server
	runs     *fakeRuns
	url      string
	stop     context.CancelFunc // ends the server
	stopped  <-chan error
}

type option func(*Config)

func newWorld(t *testing.T, options ...option) *world {
	t.Helper()
	t.Parallel()
	ctx := t.Context()
	w := &world{T: t, database: fmt.Sprintf("api_%d", databases.Add(1))}
	require.NoError(t, execute(ctx, dsnOf("postgres"), `DROP DATABASE IF EXISTS `+w.database+` WITH (FORCE)`))
	require.NoError(t, execute(ctx, dsnOf("postgres"), `CREATE DATABASE `+w.database+` TEMPLATE api_template`))
	store, err := control.Open(ctx, dsnOf(w.database))
	require.NoError(t, err)
	t.Cleanup(store.Disconnect)
	w.store, w.runs = store, &fakeRuns{store: store}
	for _, role := range []control.Role{control.Viewer, control.Requester, control.Reviewer, control.Admin} {
		require.NoError(t, store.PutToken(ctx, "test", string(role), role, secret(role)))
	}
	require.NoError(t, store.CreateSite(ctx, "test", "maple", [2]string{"school", "central"}))
	w.table("public.orders", []string{"id"}, []string{"bigint"})

	log := zaptest.NewLogger(t, zaptest.Level(zap.WarnLevel))
	w.service = &Service{Store: store, Runs: w.runs, Log: log, PublicURL: "https://backfill.test", ConsoleURL: "https://temporal.test"}
	cfg := Config{Service: w.service, Auth: NewAuth(store), Log: log}
	for _, o := range options {
		o(&cfg)
	}
	w.server = New(cfg)
	w.server.timing.poll, w.server.timing.gap = 50*time.Millisecond, 20*time.Millisecond
	w.serve()
	return w
}

func (w *world) serve() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w, err)
	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() {
		stopped <- w.server.Serve(ctx, l)
		close(stopped)
	}()
	w.url, w.stop, w.stopped = "http://"+l.Addr().String(), stop, stopped
	w.Cleanup(func() {
		stop()
		select {
		case err := <-stopped:
			require.NoError(w, err)
		case <-time.After(drainWithin):
			w.Error("the server does not stop")
		}
	})
}

// table configures a table captured from school, which has a row more than central.
func (w *world) table(name string, key, types []string) {
	w.Helper()
	_, err := w.store.PutTable(w.Context(), "test", "maple", name, control.TableChange{CapturedFrom: []string{"school"}})
	require.NoError(w, err)
	w.exec(`INSERT INTO backfill_control.layout (fingerprint, definition) VALUES ('f', '{"columns":[
		{"name":"id","type":"bigint"},{"name":"zeta","type":"text"},{"name":"alpha","type":"text"}],"key":["id"]}') ON CONFLICT DO NOTHING`)
	w.exec(`UPDATE backfill_control.table_side SET key = $2, key_types = $3, layout_id = (SELECT id FROM backfill_control.layout),
		capture_ok = true, row_count = CASE side WHEN 'school' THEN 10 ELSE 9 END, counted_at = now()
		WHERE table_id = (SELECT id FROM backfill_control.table_config WHERE name = $1)`, name, key, types)
}

func (w *world) exec(sql string, args ...any) {
	w.Helper()
	conn, err := pgx.Connect(w.Context(), dsnOf(w.database))
	require.NoError(w, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(w.Context(), sql, args...)
	require.NoError(w, err)
}

func secret(role control.Role) string { return "secret-of-the-" + string(role) }

// answer is what came back, checked against the document.
type answer struct {
	status int
	header http.Header
	raw    []byte
	json   map[string]any
}

func (a answer) kind() string {
	t, _ := a.json["type"].(string)
	return strings.TrimPrefix(t, "urn:backfill:problem:")
}

// fields are the fields a problem names.
func (a answer) fields() []string {
	var out []string
	list, _ := a.json["errors"].([]any)
	for _, e := range list {
		field, _ := e.(map[string]any)["field"].(string)
		out = append(out, field)
	}
	return out
}

func (a answer) data() []map[string]any {
	var out []map[string]any
	list, _ := a.json["data"].([]any)
	for _, x := range list {
		out = append(out, x.(map[string]any))
	}
	return out
}

type header [2]string

// call sends a request as a role ("" for nobody) and reads the answer.
func (w *world) call(role control.Role, method, path, body string, headers ...header) answer {
	w.Helper()
	r, err := http.NewRequestWithContext(w.Context(), method, w.url+path, strings.NewReader(body))
	require.NoError(w, err)
	if body == "" {
		r.Body = http.NoBody
	} else {
		r.Header.Set("Content-Type", "application/json")
	}
	if role != "" {
		r.Header.Set("Authorization", "Bearer "+secret(role))
	}
	for _, h := range headers {
		r.Header.Set(h[0], h[1])
	}
	resp, err := http.DefaultClient.Do(r)
	require.NoError(w, err)
	defer resp.Body.Close()
	a := answer{status: resp.StatusCode, header: resp.Header}
	a.raw, err = io.ReadAll(resp.Body)
	require.NoError(w, err)
	if strings.HasSuffix(resp.Header.Get("Content-Type"), "json") {
		dec := json.NewDecoder(bytes.NewReader(a.raw))
		dec.UseNumber()
		require.NoError(w, dec.Decode(&a.json))
	}
	w.conforms(r, a)
	return a
}

func (w *world) get(role control.Role, path string) answer {
	w.Helper()
	return w.call(role, "GET", path, "")
}

func (w *world) post(role control.Role, path, body string, headers ...header) answer {
	w.Helper()
	return w.call(role, "POST", path, body, headers...)
}

// conforms holds an answer to the document.
func (w *world) conforms(r *http.Request, a answer) {
	w.Helper()
	for path, item := range w.server.document.Paths.Map() {
		shape := "^" + regexp.MustCompile(`\\\{\w+\\\}`).ReplaceAllString(regexp.QuoteMeta(path), "[^/]+") + "$"
		op := item.GetOperation(r.Method)
		if op == nil || !regexp.MustCompile(shape).MatchString(r.URL.EscapedPath()) {
			continue
		}
		in := &openapi3filter.ResponseValidationInput{
			RequestValidationInput: &openapi3filter.RequestValidationInput{Request: r,
				Route: &routers.Route{Spec: w.server.document, Path: path, PathItem: item, Method: r.Method, Operation: op}},
			Status: a.status, Header: a.header, Options: &openapi3filter.Options{IncludeResponseStatus: true, MultiError: true},
		}
		in.SetBodyBytes(a.raw)
		require.NoError(w, openapi3filter.ValidateResponse(context.Background(), in), "%s %s: %s", r.Method, r.URL, a.raw)
	}
}

const ordersBackfill = `{"table":"public.orders","from":"school"}`

// backfill asks for a backfill of public.orders and returns its id.
func (w *world) backfill() int64 {
	w.Helper()
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", ordersBackfill)
	require.Equal(w, 201, a.status, "%s", a.raw)
	id, err := a.json["id"].(json.Number).Int64()
	require.NoError(w, err)
	return id
}

// staged makes a request with n staged rows that waits for review at revision 7.
func (w *world) staged(n int) int64 {
	w.Helper()
	id := w.backfill()
	w.exec(`INSERT INTO backfill_control.staged (request_id, n, snap, key, row)
		SELECT $1, n, '1:1:', ARRAY[n::text], ARRAY[n::text, 'z' || n, NULL] FROM generate_series(1, $2::int) n`, id, n)
	w.exec(`UPDATE backfill_control.request SET state = 'AWAITING_REVIEW', revision = 7, staged = $2, layout_id = (SELECT id FROM backfill_control.layout) WHERE id = $1`, id, n)
	return id
}

func path(format string, args ...any) string {
	for i, a := range args {
		if s, ok := a.(string); ok {
			args[i] = url.PathEscape(s)
		}
	}
	return prefix + fmt.Sprintf(format, args...)
}

// fakeRuns decides as the workflow would, by the store; or is away.
type fakeRuns struct {
	store *control.Store
	mu    sync.Mutex
	err   error // of everything, when set
	enter func()

	started []int64
}

func (f *fakeRuns) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *fakeRuns) Check(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *fakeRuns) Start(ctx context.Context, r *backfill.Request, _ string) error {
	f.mu.Lock()
	enter := f.enter
	f.started = append(f.started, r.ID)
	f.mu.Unlock()
	if enter != nil {
		enter()
	}
	return f.Check(ctx)
}

func (f *fakeRuns) Reconcile(ctx context.Context, _ *backfill.Reconciliation) error {
	return f.Check(ctx)
}

func (f *fakeRuns) do(ctx context.Context, fn func() (*backfill.Request, error)) error {
	if err := f.Check(ctx); err != nil {
		return err
	}
	_, err := fn()
	return err
}

func (f *fakeRuns) Approve(ctx context.Context, r *backfill.Request, by string, d Decision) error {
	return f.do(ctx, func() (*backfill.Request, error) {
		return f.store.Approve(ctx, r.ID, control.Decision{By: by, Revision: d.Revision, Note: d.Note, SkipIdentical: d.SkipIdentical})
	})
}

func (f *fakeRuns) Reject(ctx context.Context, r *backfill.Request, by string, d Decision) error {
	return f.do(ctx, func() (*backfill.Request, error) {
		return f.store.Reject(ctx, r.ID, control.Decision{By: by, Revision: d.Revision, Note: d.Note})
	})
}

func (f *fakeRuns) Pause(ctx context.Context, r *backfill.Request, by, note string) error {
	return f.do(ctx, func() (*backfill.Request, error) { return f.store.Pause(ctx, r.ID, by, note, true) })
}

func (f *fakeRuns) Resume(ctx context.Context, r *backfill.Request, by, note string) error {
	return f.do(ctx, func() (*backfill.Request, error) { return f.store.Pause(ctx, r.ID, by, note, false) })
}

func (f *fakeRuns) Polled(context.Context) (time.Time, error) { return time.Now(), nil }

func (f *fakeRuns) Judge(ctx context.Context, r *backfill.Request, by string) error {
	return f.do(ctx, func() (*backfill.Request, error) { return f.store.Rejudge(ctx, r.ID, by) })
}

func (f *fakeRuns) Cancel(ctx context.Context, r *backfill.Request, by, note string) error {
	return f.do(ctx, func() (*backfill.Request, error) {
		return f.store.Close(ctx, r.ID, by, backfill.Cancelled, note)
	})
}

// extra mounts routes that fail in ways no real one should.
func extra(c *Config) {
	c.Extra = func(e *echo.Echo) {
		e.GET("/fail", func(echo.Context) error { return fmt.Errorf("secret cause") })
		e.GET("/panic", func(echo.Context) error { panic("secret cause") })
	}
}
