//go:build linux

package acceptance

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

// Two agents beside one side. The one that walks is stopped in the middle of a page
// for longer than its lease lasts; the other takes over and goes on after the last
// committed key; the first wakes up while that goes on, and writes nothing.
func TestAnAgentThatWasStoppedBeyondItsLeaseWritesNothing(t *testing.T) {
	t.Parallel()
	const rows = 20_000
	server := startTemporal(t, filepath.Join(t.TempDir(), "temporal"))
	s := prepareSite(t, setup{a: accounts("accounts", rows), b: accounts("accounts", 10)})
	dsn := s.controlDatabase()
	s.backfillCommand("migrate", "--control", dsn)
	store, err := control.Open(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(store.Disconnect)
	require.NoError(t, store.CreateSite(t.Context(), "test", "s", [2]string{"a", "b"}))
	_, err = store.PutTable(t.Context(), "test", "s", "public.accounts", control.TableChange{CapturedFrom: []string{"a"}})
	require.NoError(t, err)
	for side, database := range s.dsn {
		s.backfillCommand("setup", "--site", "s", "--side", side, "--control", dsn, "--database", database)
	}

	c, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	sql := func(sql string, args ...any) {
		t.Helper()
		_, err := c.Exec(t.Context(), sql, args...)
		require.NoError(t, err, sql)
	}
	holds := func(sql string, args ...any) (v bool) {
		t.Helper()
		require.NoError(t, c.QueryRow(t.Context(), sql, args...).Scan(&v), sql)
		return v
	}
	// Each agent has a role of its own on the control database, and every write of a
	// walk is noted with it. Pages take long enough to be stopped in.
	sql(`
		CREATE TABLE public.slow (s float8); INSERT INTO public.slow VALUES (0.15);
		CREATE TABLE public.written (n bigint GENERATED ALWAYS AS IDENTITY, who text, tx xid8 DEFAULT pg_current_xact_id(), what text, epoch bigint, staged bigint);
		CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF tg_table_name = 'staged' THEN
				INSERT INTO public.written (who, what) VALUES (session_user, 'staged'); PERFORM pg_sleep(s) FROM public.slow; RETURN NULL;
			ELSIF tg_table_name = 'side' THEN
				INSERT INTO public.written (who, what) VALUES (session_user, 'seen');
			ELSIF (old.staged, old.resume_key) IS DISTINCT FROM (new.staged, new.resume_key) THEN
				INSERT INTO public.written (who, what, epoch, staged) VALUES (session_user, 'page', new.epoch, new.staged);
			END IF;
			RETURN NULL; END $$;
		CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON backfill_control.staged FOR EACH STATEMENT EXECUTE FUNCTION public.note();
		CREATE TRIGGER note AFTER UPDATE ON backfill_control.request FOR EACH ROW EXECUTE FUNCTION public.note();
		CREATE TRIGGER note AFTER UPDATE ON backfill_control.side FOR EACH ROW EXECUTE FUNCTION public.note()`)
	role := func(name string) (dsn string) {
		name = fmt.Sprintf("%s_%d", name, sites.Load())
		sql(`CREATE ROLE ` + name + ` SUPERUSER LOGIN PASSWORD 'secret'`)
		u, err := url.Parse(cluster.DSN(c.Config().Database))
		require.NoError(t, err)
		u.User = url.UserPassword(name, "secret")
		return u.String()
	}
	run := func(name string, args ...string) *process {
		t.Helper()
		p, err := launch(filepath.Join(t.TempDir(), name+".log"), append([]string{"worker", "--temporal", server.HostPort, "--cycle", "200ms"}, args...)...)
		require.NoError(t, err)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("%s printed:\n%s", name, tail(p.output, 40))
			}
			p.kill()
		})
		return p
	}
	run("control", "--control", "--control-database", dsn)
	run("receiver", "--agent", "s/b", "--database", s.dsn["b"], "--control-database", dsn)
	first := run("first", "--agent", "s/a", "--database", s.dsn["a"], "--control-database", role("first"))

	// The sweep finds the request.
	var id int64
	require.NoError(t, c.QueryRow(t.Context(), `
		INSERT INTO backfill_control.request (direction, table_id, mode, requested_by)
		SELECT d.id, t.id, 'full', 'test' FROM backfill_control.direction d, backfill_control.table_config t WHERE d.from_side = 'a' RETURNING id`).Scan(&id))
	shown := func() string {
		var text string
		require.NoError(t, c.QueryRow(t.Context(), `SELECT r::text || (SELECT coalesce(string_agg(w::text, ' ' ORDER BY n), '') FROM public.written w WHERE what <> 'seen') FROM backfill_control.request r WHERE id = $1`, id).Scan(&text))
		return text
	}
	const itsPage = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE 'backfill walk %' AND usename LIKE 'first%' AND datname = current_database() AND state <> 'idle')`
	s.await("the first agent to be stopped in the middle of a page", func() (bool, string) {
		require.False(t, first.gone(), first.said())
		if !holds(`SELECT count(*) > 1 FROM public.written WHERE what = 'page'`) || !holds(itsPage) {
			return false, shown()
		}
		require.NoError(t, first.cmd.Process.Signal(syscall.SIGSTOP))
		if holds(itsPage) {
			return true, ""
		}
		require.NoError(t, first.cmd.Process.Signal(syscall.SIGCONT))
		return false, shown()
	})
	require.True(t, holds(`SELECT state = 'IN_PROGRESS' FROM backfill_control.request WHERE id = $1`, id))
	run("second", "--agent", "s/a", "--database", s.dsn["a"], "--control-database", role("second"))
	s.await("the second agent to have taken over", func() (bool, string) {
		return holds(`SELECT EXISTS (SELECT FROM public.written WHERE what = 'page' AND who LIKE 'second%')`), shown()
	})
	require.False(t, holds(itsPage), "the session of the first is ended")
	require.True(t, holds(`SELECT state = 'IN_PROGRESS' FROM backfill_control.request WHERE id = $1`, id), "it wakes up too late to show anything")
	var woken int64
	require.NoError(t, c.QueryRow(t.Context(), `SELECT max(n) FROM public.written`).Scan(&woken))
	require.NoError(t, first.cmd.Process.Signal(syscall.SIGCONT))
	s.await("the first agent to be awake", func() (bool, string) {
		return holds(`SELECT EXISTS (SELECT FROM public.written WHERE n > $1 AND what = 'seen' AND who LIKE 'first%')`, woken), first.said()
	})
	sql(`DELETE FROM public.slow`)
	s.await("the walk to be over", func() (bool, string) {
		return holds(`SELECT state = 'AWAITING_REVIEW' FROM backfill_control.request WHERE id = $1`, id), shown()
	})

	// Each epoch has one writer, the later the second; each page goes on from the one before.
	require.True(t, holds(`SELECT bool_and(who LIKE CASE WHEN epoch = low THEN 'first%' ELSE 'second%' END)
		FROM (SELECT who, epoch, min(epoch) OVER () AS low FROM public.written WHERE what = 'page') w`), shown())
	require.True(t, holds(`SELECT bool_and(epoch >= coalesce(before, epoch) AND staged > coalesce(was, 0))
		FROM (SELECT epoch, staged, lag(epoch) OVER o AS before, lag(staged) OVER o AS was FROM public.written WHERE what = 'page' WINDOW o AS (ORDER BY n)) w`), shown())
	require.True(t, holds(`SELECT r.staged = $2 AND count(*) = $2 AND count(DISTINCT s.key) = $2 AND min(n) = 1 AND max(n) = $2
		FROM backfill_control.request r JOIN backfill_control.staged s ON s.request_id = r.id WHERE r.id = $1 GROUP BY r.staged`, id, rows), shown())
}

// backfillCommand runs a command of the program that must succeed.
func (s *site) backfillCommand(args ...string) {
	s.Helper()
	out, errs, status := s.command(args...)
	require.Zero(s, status, "%v: %s%s", args, out, errs)
}
