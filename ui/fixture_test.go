package ui_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/local"
	"backfill/internal/pace"
	"backfill/internal/row"
	"backfill/ui"
)

// databases is one PostgreSQL for all tests of the package. Each test gets a copy
// of a database that was filled once.
type databases struct {
	dsn  func(database string) string
	stop func()
	err  error
	next int
	mu   sync.Mutex
}

var shared = sync.OnceValue(startDatabases)

func startDatabases() *databases {
	d := &databases{stop: func() {}}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "backfill-ui")
	if err != nil {
		d.err = err
		return d
	}
	pg, err := local.StartPostgres(ctx, local.PostgresOptions{Dir: filepath.Join(dir, "pg"), Fast: true})
	if err != nil {
		d.err = err
		os.RemoveAll(dir)
		return d
	}
	d.dsn = pg.DSN
	d.stop = func() {
		_ = pg.Stop(context.Background())
		os.RemoveAll(dir)
	}
	if d.err = pg.CreateDatabase(ctx, "filled"); d.err != nil {
		return d
	}
	if _, d.err = control.Migrate(ctx, d.dsn("filled")); d.err == nil {
		d.err = fill(ctx, d.dsn("filled"))
	}
	return d
}

func TestMain(m *testing.M) {
	code := m.Run()
	closeBrowser()
	if started.Load() {
		shared().stop()
	}
	os.Exit(code)
}

var started atomic.Bool

// world is a server with the pages over a database of its own.
type world struct {
	options []func(*world, *ui.Options)
	t       *testing.T
	url     string
	db      *pgx.Conn // for changing things behind the pages' back
	store   *control.Store
	stop    func() // ends the server, as a crash would

	sessions sync.Map // by token
}

const (
	adminToken  = "admin-token-0123456789"
	viewerToken = "viewer-token-012345678"
)

func newWorld(t *testing.T, options ...func(*world, *ui.Options)) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("starts servers")
	}
	if _, err := local.FindPostgres(); err != nil {
		t.Skipf("the pages are not tested: %v", err)
	}
	t.Parallel()
	started.Store(true)
	d := shared()
	require.NoError(t, d.err)
	ctx := t.Context()
	d.mu.Lock()
	d.next++
	name := fmt.Sprintf("test_%d", d.next)
	admin, err := pgx.Connect(ctx, d.dsn("postgres"))
	require.NoError(t, err)
	_, err = admin.Exec(ctx, `CREATE DATABASE `+name+` TEMPLATE filled`)
	require.NoError(t, err)
	require.NoError(t, admin.Close(ctx))
	d.mu.Unlock()

	w := &world{t: t, options: options}
	w.db, err = pgx.Connect(ctx, d.dsn(name))
	require.NoError(t, err)
	w.store, err = control.Open(ctx, d.dsn(name))
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w.url = "http://" + listener.Addr().String()
	w.serve(listener)
	t.Cleanup(func() {
		w.stop()
		w.store.Disconnect()
		w.db.Close(context.Background())
	})
	return w
}

func (w *world) serve(listener net.Listener) {
	service := &api.Service{Store: w.store, Runs: noEngine{w.store}, Log: zap.NewNop(), ConsoleURL: "http://127.0.0.1:8233"}
	auth := api.NewAuth(w.store)
	changes := api.NewChanges(w.store, zap.NewNop())
	server := api.New(api.Config{Service: service, Auth: auth, Changes: changes, Log: zap.NewNop(), Extra: func(e *echo.Echo) {
		o := ui.Options{Auth: auth, Changes: changes, AgentAway: time.Hour}
		for _, option := range w.options {
			option(w, &o)
		}
		ui.Mount(e, service, o)
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, listener) }()
	var once sync.Once
	w.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Errorf("serve: %v", err)
			}
		})
	}
}

// exec changes something and tells of it as the product's own transactions do.
func (w *world) exec(event, sql string, args ...any) {
	w.t.Helper()
	_, err := w.db.Exec(w.t.Context(), sql, args...)
	require.NoError(w.t, err)
	_, err = w.db.Exec(w.t.Context(), `SELECT pg_notify('backfill_control', $1)`, event)
	require.NoError(w.t, err)
}

// request returns the id of a table's newest request in a state.
func (w *world) request(table string, state backfill.State) int64 {
	w.t.Helper()
	var id int64
	require.NoError(w.t, w.db.QueryRow(w.t.Context(), `
		SELECT r.id FROM backfill_control.request r JOIN backfill_control.table_config t ON t.id = r.table_id
		 WHERE t.name = $1 AND r.state = $2 ORDER BY r.id DESC LIMIT 1`, table, state).Scan(&id))
	return id
}

// noEngine decides as the workflows do, without a workflow engine.
type noEngine struct{ store *control.Store }

func (e noEngine) Start(context.Context, *backfill.Request, string) error    { return nil }
func (e noEngine) Reconcile(context.Context, *backfill.Reconciliation) error { return nil }
func (e noEngine) Check(context.Context) error                               { return nil }

func (e noEngine) Approve(ctx context.Context, r *backfill.Request, by string, d api.Decision) error {
	_, err := e.store.Approve(ctx, r.ID, control.Decision{By: by, Revision: d.Revision, Note: d.Note, SkipIdentical: d.SkipIdentical})
	return err
}

func (e noEngine) Reject(ctx context.Context, r *backfill.Request, by string, d api.Decision) error {
	_, err := e.store.Reject(ctx, r.ID, control.Decision{By: by, Revision: d.Revision, Note: d.Note})
	return err
}

func (e noEngine) Pause(ctx context.Context, r *backfill.Request, by, note string) error {
	_, err := e.store.Pause(ctx, r.ID, by, note, true)
	return err
}

func (e noEngine) Resume(ctx context.Context, r *backfill.Request, by, note string) error {
	_, err := e.store.Pause(ctx, r.ID, by, note, false)
	return err
}

func (e noEngine) Polled(context.Context) (time.Time, error) { return time.Now(), nil }

func (e noEngine) Judge(ctx context.Context, r *backfill.Request, by string) error {
	_, err := e.store.Rejudge(ctx, r.ID, by)
	return err
}

func (e noEngine) Cancel(ctx context.Context, r *backfill.Request, by, note string) error {
	_, err := e.store.Close(ctx, r.ID, by, backfill.Cancelled, "cancelled by "+by+": "+note)
	return err
}

// studentsLayout has columns enough for the panel to be worth it.
var studentsLayout = &row.Layout{
	Columns: []row.Column{
		{Name: "id", Type: "int8", Declared: "bigint"}, {Name: "name", Type: "text", Declared: "text"},
		{Name: "class", Type: "text", Declared: "character varying(8)"}, {Name: "born", Type: "date", Declared: "date"},
		{Name: "email", Type: "text", Declared: "text"}, {Name: "enrolled_at", Type: "timestamptz", Declared: "timestamp with time zone"},
		{Name: "balance", Type: "numeric", Declared: "numeric(10,2)"}, {Name: "notes", Type: "text", Declared: "text"},
		{Name: "active", Type: "bool", Declared: "boolean"},
	},
	Key: []string{"id"},
}

var attendanceLayout = &row.Layout{
	Columns: []row.Column{
		{Name: "student_id", Type: "int8", Declared: "bigint"}, {Name: "day", Type: "date", Declared: "date"},
		{Name: "present", Type: "bool", Declared: "boolean"}, {Name: "minutes_late", Type: "int4", Declared: "integer"},
	},
	Key: []string{"student_id", "day"},
}

// hostile is what somebody may have stored to see what the pages make of it.
const hostile = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`

// fill makes sites with tables in every state a page can show, and requests with
// no, one and 100,000 staged rows.
func fill(ctx context.Context, dsn string) error {
	store, err := control.Open(ctx, dsn)
	if err != nil {
		return err
	}
	defer store.Disconnect()
	for _, site := range []string{"maple", "birch", "oak"} {
		if err := store.CreateSite(ctx, "ada", site, [2]string{"school", "central"}); err != nil {
			return err
		}
	}
	for name, token := range map[string]struct {
		role   control.Role
		secret string
	}{"ada": {control.Admin, adminToken}, "vic": {control.Viewer, viewerToken}} {
		if err := store.PutToken(ctx, "ada", name, token.role, token.secret); err != nil {
			return err
		}
	}
	students, err := store.PutLayout(ctx, studentsLayout)
	if err != nil {
		return err
	}
	attendance, err := store.PutLayout(ctx, attendanceLayout)
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, statement := range fillSQL {
		if _, err := conn.Exec(ctx, statement, pgx.NamedArgs{"students": students, "attendance": attendance, "hostile": hostile}); err != nil {
			return fmt.Errorf("%w in %.200s", err, statement)
		}
	}
	gates := []pace.Gate{
		{Name: "lag", Side: "central", Kind: pace.ReplicaLag, Limit: 10, MaxAge: 3600},
		{Name: "load", Side: "school", Kind: pace.Sessions, Limit: 20, MaxAge: 3600},
		{Name: "slow", Side: "school", Table: "public.attendance", Kind: pace.RowsPerSecond, Limit: 2000},
	}
	if err := store.PutGates(ctx, "ada", "maple", gates, true); err != nil {
		return err
	}
	if err := store.Measured(ctx, "maple", []control.Measurement{{Gate: gates[0], Value: 4.2}, {Gate: gates[1], Value: 31}}); err != nil {
		return err
	}
	return store.Wish(ctx, "maple", 373, "retry", "grace")
}

var fillSQL = []string{`
	INSERT INTO backfill_control.attendance (name, seen_at) VALUES ('control-1', now() + interval '1 day')`, `
	UPDATE backfill_control.side SET agent = 'agent-' || name || '-1', agent_seen_at = clock_timestamp() - interval '2 seconds',
	       database = CASE name WHEN 'school' THEN 'school.db.internal:5432/records' ELSE 'central.db.internal:5432/records' END`, `
	UPDATE backfill_control.side SET agent_seen_at = clock_timestamp() - interval '3 days 4 hours' WHERE site = 'oak' AND name = 'central'`, `
	INSERT INTO backfill_control.table_config (site, name, active, op_create, op_update, op_delete, captured_from, apply_order) VALUES
	  ('maple', 'public.students',    true, true, true, true,  '{school}', 1),
	  ('maple', 'public.guardians',   true, true, true, true,  '{school}', 2),
	  ('maple', 'public.enrollments', true, true, true, true,  '{school}', 3),
	  ('maple', 'public.attendance',  true, true, true, false, '{school}', 4),
	  ('maple', 'public.teachers',    true, true, true, true,  '{central}', 5),
	  ('maple', 'public.rooms',       true, true, true, true,  '{central}', 6),
	  ('maple', 'public.grades',     false, true, false, true, '{school}', 7),
	  ('maple', '"Order Items"."select"', true, true, true, true, '{school}', 8),
	  ('maple', 'public.messages',    true, true, true, true,  '{school}', 9),
	  ('birch', 'public.books',       true, true, true, true,  '{school}', 1),
	  ('birch', 'public.loans',       true, true, true, true,  '{school}', 2),
	  ('oak',   'public.parcels',     true, true, true, true,  '{school}', 1)`, `
	INSERT INTO backfill_control.table_side (table_id, side, key, key_types, layout_id, row_count, counted_at, capture_ok, capture_since)
	SELECT t.id, s.name, '{id}', '{bigint}', @students, CASE WHEN s.name = ANY (t.captured_from) THEN 48210 ELSE 48210 END,
	       clock_timestamp() - interval '48 seconds', true, clock_timestamp() - interval '19 days'
	  FROM backfill_control.table_config t JOIN backfill_control.side s ON s.site = t.site`, `
	UPDATE backfill_control.table_side x SET row_count = v.n, estimated = v.estimated
	  FROM (VALUES ('public.students', 'school', 164230, false), ('public.students', 'central', 64230, false),
	               ('public.enrollments', 'school', 1204331, true), ('public.enrollments', 'central', 981004, true),
	               ('public.attendance', 'school', 8412900, true), ('public.attendance', 'central', 1204002, true),
	               ('public.teachers', 'central', 1840, false), ('public.teachers', 'school', 912, false),
	               ('public.rooms', 'central', 322, false), ('public.rooms', 'school', 12, false),
	               ('"Order Items"."select"', 'school', 5120, false), ('"Order Items"."select"', 'central', 5240, false))
	       AS v (name, side, n, estimated) JOIN backfill_control.table_config t ON t.name = v.name
	 WHERE x.table_id = t.id AND x.side = v.side`, `
	UPDATE backfill_control.table_side SET key = '{student_id,day}', key_types = '{bigint,date}', layout_id = @attendance
	 WHERE table_id = (SELECT id FROM backfill_control.table_config WHERE name = 'public.attendance')`, `
	UPDATE backfill_control.table_side SET capture_ok = false, capture_since = NULL
	 WHERE table_id = (SELECT id FROM backfill_control.table_config WHERE name = '"Order Items"."select"')`, `
	UPDATE backfill_control.table_side SET row_count = NULL, counted_at = NULL, layout_id = NULL, capture_ok = false, capture_since = NULL, key = NULL
	 WHERE table_id = (SELECT id FROM backfill_control.table_config WHERE name = 'public.messages')`,

	// Requests: each table's, by name.
	`
	INSERT INTO backfill_control.request (direction, table_id, mode, key, state, requested_by, requested_at, note, started_at, walked_at, reviewed_by, reviewed_at,
	       review_note, closed_at, reason, waiting, paused, revision, expected, staged, resume_key, upper_key, layout_id, holder, lease_until,
	       n_insert, n_overwrite, n_identical, skip_identical, released_up_to, released, skipped, superseded, superseded_undelivered)
	SELECT d.id, t.id, v.mode, v.key, v.state, v.by, now() - v.age, v.note, now() - v.age + v.start, now() - v.age + v.walked, v.reviewer, now() - v.age + v.reviewed,
	       v.review_note, now() - v.age + v.closed, v.reason, v.waiting, v.paused, v.revision, v.expected, v.staged, v.resume_key, v.upper_key, v.layout_id, v.holder, now() + interval '30 seconds',
	       v.i, v.o, v.s, v.skip, v.upto, v.released, v.skipped, v.superseded, v.undelivered
	  FROM (VALUES
	    ('public.enrollments', 'full', NULL::text[], 'FINISHED', 'grace', interval '12 days', 'first configuration', interval '2 seconds', interval '4 minutes', 'ada', interval '9 minutes',
	       'read the first thousand', interval '14 minutes', '', '', false, 1::bigint, 801200::bigint, 801200::bigint, '{801200}'::text[], '{801200}'::text[], @students::bigint, '',
	       790000::bigint, 1200::bigint, 10000::bigint, true, 801200::bigint, 790311::bigint, 10000::bigint, 889::bigint, 12::bigint),
	    ('public.enrollments', 'full', NULL, 'FAILED', 'grace', interval '5 days', '', interval '2 seconds', NULL, NULL, NULL,
	       '', interval '3 minutes', 'walk of public.enrollments after "40211": column "term" was text and is integer (SQLSTATE 42804)', '', false, 1, 903000, 40200, '{40211}', '{903000}', @students, '',
	       0, 0, 0, false, 0, 0, 0, 0, 0),
	    ('public.enrollments', 'full', NULL, 'REJECTED', 'grace', interval '2 days', @hostile, interval '2 seconds', interval '4 minutes', 'ada', interval '40 minutes',
	       'These are last year''s rows. ' || @hostile, interval '40 minutes', '', '', false, 1, 3, 3, '{3}', '{3}', @students, '', 1, 1, 1, false, 0, 0, 0, 0, 0),
	    ('public.guardians', 'full', NULL, 'CANCELLED', 'ada', interval '3 hours', '', interval '2 seconds', NULL, NULL, NULL,
	       '', interval '7 minutes', 'cancelled by ada: wrong table', '', false, 1, 48210, 9000, '{9000}', '{48210}', @students, '', 0, 0, 0, false, 0, 0, 0, 0, 0),
	    ('public.guardians', 'row', '{48211}', 'AWAITING_REVIEW', 'grace', interval '11 minutes', 'skipped in the queue this morning', interval '2 seconds', interval '3 seconds', NULL, NULL,
	       '', NULL, '', '', false, 1, 1, 1, '{48211}', '{48211}', @students, '', 0, 1, 0, false, 0, 0, 0, 0, 0),
	    ('public.students', 'full', NULL, 'AWAITING_REVIEW', 'grace', interval '38 minutes', 'central lacks everything before the triggers of March', interval '2 seconds', interval '6 minutes', NULL, NULL,
	       '', NULL, '', '', false, 3, 100000, 100000, '{100000}', '{100000}', @students, '', 91000, 6000, 2000, false, 0, 0, 0, 0, 0),
	    ('public.attendance', 'full', NULL, 'IN_PROGRESS', 'ada', interval '21 minutes', '', interval '2 seconds', NULL, NULL, NULL,
	       '', NULL, '', 'replica central-2 is 14 s behind, limit 10 s', false, 1, 8412900, 3617547, '{91822,2025-11-03}', '{204411,2026-06-30}', @attendance, 'agent-school-1', 0, 0, 0, false, 0, 0, 0, 0, 0),
	    ('public.teachers', 'full', NULL, 'RELEASING', 'ada', interval '9 minutes', '', interval '2 seconds', interval '10 seconds', 'grace', interval '8 minutes 20 seconds',
	       '', NULL, '', '', false, 1, 1840, 1840, '{1840}', '{1840}', @students, '', 900, 500, 440, true, 1180, 760, 412, 8, 0),
	    ('public.rooms', 'full', NULL, 'PENDING', 'ada', interval '14 seconds', '', NULL, NULL, NULL, NULL,
	       '', NULL, '', '', false, 0, 0, 0, NULL, NULL, NULL, '', 0, 0, 0, false, 0, 0, 0, 0, 0),
	    ('public.loans', 'full', NULL, 'FINISHED', 'ada', interval '9 days', '', interval '2 seconds', interval '2 minutes', 'grace', interval '9 minutes',
	       '', interval '12 minutes', '', '', false, 1, 48210, 48210, '{48210}', '{48210}', @students, '', 48210, 0, 0, false, 48210, 48210, 0, 0, 0)
	  ) AS v (name, mode, key, state, by, age, note, start, walked, reviewer, reviewed, review_note, closed, reason, waiting, paused, revision, expected, staged,
	          resume_key, upper_key, layout_id, holder, i, o, s, skip, upto, released, skipped, superseded, undelivered)
	  JOIN backfill_control.table_config t ON t.name = v.name
	  JOIN backfill_control.direction d ON d.site = t.site AND d.from_side = t.captured_from[1]`,

	// Staged rows of the students, of the one guardian, and of the rejected three.
	`
	INSERT INTO backfill_control.staged (request_id, n, snap, key, row, superseded_by)
	SELECT r.id, n, '10:10:', ARRAY[k::text], ARRAY[k::text,
	       CASE WHEN n = 3 THEN @hostile WHEN n = 4 THEN '' ELSE (ARRAY['Ada','Grace','Edsger','Barbara','Donald','Radia','Ken','Frances'])[1 + n % 8] || ' ' ||
	         (ARRAY['Okafor','Lindqvist','Moreau','Tanaka','Haddad','Kowalska','Nguyen','Oliveira','Schmidt'])[1 + n % 9] END,
	       (7 + n % 6)::text || chr(65 + (n % 4)::int), (date '2008-01-01' + (n % 2400)::int)::text,
	       CASE WHEN n % 7 = 0 THEN NULL ELSE 's' || k || '@maple.example' END, (timestamptz '2024-08-20 08:00:00+00' + n * interval '37 seconds')::text,
	       (n % 1000 / 7.0)::numeric(10,2)::text, CASE WHEN n = 2 THEN repeat('A long note about the bus. ', 400) WHEN n % 11 = 0 THEN 'leaves early on Fridays' END,
	       CASE WHEN n % 13 = 0 THEN 'f' ELSE 't' END], CASE WHEN n % 230 = 5 AND t.name = 'public.teachers' THEN 1 END
	  FROM backfill_control.request r JOIN backfill_control.table_config t ON t.id = r.table_id,
	       LATERAL (SELECT n, CASE r.mode WHEN 'row' THEN 48211 ELSE n + 64230 END AS k FROM generate_series(1, r.staged) n) g
	 WHERE t.name IN ('public.students', 'public.teachers') OR r.mode = 'row' OR r.state = 'REJECTED'`, `
	INSERT INTO backfill_control.staged (request_id, n, snap, key, row)
	SELECT r.id, n, '10:10:', ARRAY[k.student, k.day], ARRAY[k.student, k.day, CASE WHEN n % 9 = 0 THEN 'f' ELSE 't' END, CASE WHEN n % 5 = 0 THEN (n % 40)::text END]
	  FROM backfill_control.request r JOIN backfill_control.table_config t ON t.id = r.table_id, generate_series(1, 1000) n,
	       LATERAL (SELECT (1 + n / 180)::text AS student, (date '2025-09-01' + (n % 180)::int)::text AS day) k
	 WHERE t.name = 'public.attendance'`, `
	INSERT INTO backfill_control.effect (request_id, n, effect, receiver)
	SELECT request_id, n, CASE WHEN n % 100 < 91 THEN 'i' WHEN n % 100 < 97 THEN 'o' WHEN n % 100 < 99 THEN '=' ELSE '?' END::"char",
	       CASE WHEN n % 100 BETWEEN 91 AND 96 THEN row[1:2] || '6A'::text || row[4:4] || ARRAY['old' || n || '@maple.example'] || row[6:] END
	  FROM backfill_control.staged JOIN backfill_control.request r ON r.id = request_id WHERE r.staged > 3 AND r.walked_at IS NOT NULL`, `
	INSERT INTO backfill_control.effect (request_id, n, effect, receiver)
	SELECT request_id, n, (ARRAY['o', 'i', '='])[n]::"char", CASE WHEN n = 1 THEN row[1:2] || '6A'::text || row[4:6] || '0.00'::text || row[8:] END
	  FROM backfill_control.staged JOIN backfill_control.request r ON r.id = request_id WHERE r.staged <= 3`,

	`
	INSERT INTO backfill_control.judged (request_id, upto, n_insert, n_overwrite, n_identical)
	SELECT request_id, max(n), count(*) FILTER (WHERE effect = 'i'), count(*) FILTER (WHERE effect = 'o'), count(*) FILTER (WHERE effect = '=')
	  FROM backfill_control.effect GROUP BY request_id, (n - 1) / 10000`, `
	UPDATE backfill_control.request r SET classified = j.upto FROM (SELECT request_id, max(upto) AS upto FROM backfill_control.judged GROUP BY 1) j WHERE j.request_id = r.id`,

	// How the walk of the attendance went, and what held it back.
	`
	INSERT INTO backfill_control.progress (request_id, at, releasing, rows, throttled)
	SELECT r.id, r.started_at + n * interval '25 seconds', false, r.staged / 48 * least(n, 18 + greatest(n - 26, 0) * 30 / 24), 25 * least(greatest(n - 18, 0), 8)
	  FROM backfill_control.request r, generate_series(0, 48) n WHERE r.state = 'IN_PROGRESS'`, `
	INSERT INTO backfill_control.throttled SELECT id, 'replica', 'replica_lag', 200 FROM backfill_control.request WHERE state = 'IN_PROGRESS'`,

	// What was decided.
	`
	INSERT INTO backfill_control.audit (at, account, action, site, subject, detail)
	SELECT coalesce(r.reviewed_at, r.requested_at), coalesce(r.reviewed_by, r.requested_by), 'backfill.' || CASE WHEN r.reviewed_by IS NULL THEN 'request' WHEN r.state = 'REJECTED' THEN 'reject' ELSE 'approve' END,
	       d.site, 'request ' || r.id || ' of ' || t.name || ' from ' || d.from_side, jsonb_build_object('note', coalesce(nullif(r.review_note, ''), r.note), 'revision', r.revision)
	  FROM backfill_control.request r JOIN backfill_control.direction d ON d.id = r.direction JOIN backfill_control.table_config t ON t.id = r.table_id ORDER BY 1`,

	// Queue and history of maple.
	`
	INSERT INTO backfill_control.entry (direction, table_id, layout_id, request_id, created_at, snap, op, key, row)
	SELECT d.id, t.id, @students, CASE WHEN n % 3 = 0 THEN (SELECT min(id) FROM backfill_control.request) END, now() - (400 - n) * interval '70 seconds', '10:10:',
	       (CASE WHEN n % 17 = 0 THEN 'd' WHEN n % 2 = 0 THEN 'u' ELSE 'c' END)::"char", ARRAY[(n * 31)::text],
	       CASE WHEN n % 17 <> 0 THEN ARRAY[(n * 31)::text, CASE WHEN n = 395 THEN @hostile ELSE 'Ada Okafor' END, '8B', '2009-04-11', NULL, '2024-08-20 08:00:00+00', '12.50', '', 't'] END
	  FROM generate_series(1, 400) n, backfill_control.table_config t JOIN backfill_control.direction d ON d.site = t.site AND d.from_side = 'school'
	 WHERE t.site = 'maple' AND t.name IN ('public.students')`, `
	INSERT INTO backfill_control.entry (direction, table_id, snap, op, key, created_at)
	SELECT d.id, t.id, '20:20:', 'u', ARRAY['5'], now() - interval '5 minutes'
	  FROM backfill_control.table_config t JOIN backfill_control.direction d ON d.site = t.site AND d.from_side = 'central' WHERE t.name = 'public.teachers'`, `
	UPDATE backfill_control.staged SET superseded_by = (SELECT max(e.seq) FROM backfill_control.entry e JOIN backfill_control.table_config t ON t.id = e.table_id WHERE t.name = 'public.teachers')
	 WHERE superseded_by IS NOT NULL`, `
	UPDATE backfill_control.direction d SET applied_at = clock_timestamp() - interval '3 seconds', applied_seq = CASE WHEN d.site = 'maple' AND d.from_side = 'school' THEN
	       (SELECT max(seq) - 12 FROM backfill_control.entry e WHERE e.direction = d.id) ELSE 0 END`, `
	INSERT INTO backfill_control.ack (direction, seq, at)
	SELECT e.direction, e.seq, e.created_at + interval '2 seconds' FROM backfill_control.entry e WHERE e.seq % 5 = 0`, `
	INSERT INTO backfill_control.quarantine (direction, seq, table_id, key, state, reason, since)
	SELECT e.direction, e.seq, e.table_id, e.key, (ARRAY['held', 'quarantined', 'skipped', 'quarantined'])[1 + e.seq % 4],
	       (ARRAY['waits for its parent in public.classes (class)=(8B)', 'null value in column "email" of relation "students" violates not-null constraint (SQLSTATE 23502)',
	              'value too long for type character varying(8) (SQLSTATE 22001)', 'null value in column "email" of relation "students" violates not-null constraint (SQLSTATE 23502) ' || @hostile])[1 + e.seq % 4], e.created_at
	  FROM backfill_control.entry e JOIN backfill_control.direction d ON d.id = e.direction WHERE e.seq BETWEEN 370 AND 377`,
}

// decision is one that came as a signal.
func decision(by string, revision int64) control.Decision {
	return control.Decision{By: by, Revision: revision, Note: "no", Via: backfill.ViaTemporal}
}
