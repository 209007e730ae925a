package activities

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/local"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// backup takes a physical backup: a copy of the data directory.
func (c *crashing) backup() {
	c.t.Helper()
	require.NoError(c.t, c.pg.Stop(context.Background()))
	c.copy(c.opt.Dir, c.opt.Dir+".backup")
	c.start()
}

// restore puts the backup in the place of the data directory.
func (c *crashing) restore() {
	c.t.Helper()
	require.NoError(c.t, c.pg.Kill())
	c.copy(c.opt.Dir+".backup", c.opt.Dir)
	c.start()
}

func (c *crashing) copy(from, to string) {
	c.t.Helper()
	require.NoError(c.t, os.RemoveAll(to))
	out, err := exec.Command("cp", "-a", from, to).CombinedOutput()
	require.NoError(c.t, err, "%s", out)
}

// standby starts a streaming replica, made from a copy of the data directory.
func (c *crashing) standby() *crashing {
	c.t.Helper()
	dir, err := os.MkdirTemp("", "backfill-standby-")
	require.NoError(c.t, err)
	s := &crashing{t: c.t, opt: c.opt}
	s.opt.Dir = filepath.Join(dir, "pg")
	c.t.Cleanup(func() {
		if s.pg != nil {
			_ = s.pg.Kill()
		}
		_ = os.RemoveAll(dir)
	})
	require.NoError(c.t, c.pg.Stop(context.Background()))
	c.copy(c.opt.Dir, s.opt.Dir)
	c.copy(c.opt.Dir+".password", s.opt.Dir+".password")
	// Copied from a file of the server's, so that it is its owner's.
	c.copy(filepath.Join(s.opt.Dir, "PG_VERSION"), filepath.Join(s.opt.Dir, "standby.signal"))
	c.start()
	u, err := url.Parse(c.pg.DSN("postgres"))
	require.NoError(c.t, err)
	password, _ := u.User.Password()
	s.opt.Settings = map[string]string{"primary_conninfo": fmt.Sprintf("host=127.0.0.1 port=%s user=postgres password=%s", u.Port(), password)}
	for name, value := range c.opt.Settings {
		if name != "primary_conninfo" {
			s.opt.Settings[name] = value
		}
	}
	s.start()
	return s
}

// caughtUp waits until a standby has replayed what the primary has written.
func (c *crashing) caughtUp(s *crashing) {
	c.t.Helper()
	primary, standby := testkit.Connect(c.t, c.pg.DSN("postgres")), testkit.Connect(c.t, s.pg.DSN("postgres"))
	defer func() { _, _ = primary.Close(context.Background()), standby.Close(context.Background()) }()
	at := testkit.Value[string](c.t, primary, `SELECT pg_current_wal_lsn()::text`)
	testkit.Eventually(c.t, "the standby catches up", func() bool {
		return testkit.Value[bool](c.t, standby, `SELECT coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)`, at)
	})
}

func (c *crashing) promote() {
	c.t.Helper()
	conn := testkit.Connect(c.t, c.pg.DSN("postgres"))
	defer func() { _ = conn.Close(context.Background()) }()
	require.True(c.t, testkit.Value[bool](c.t, conn, `SELECT pg_promote()`))
}

// again connects everything anew, as processes do that were started again.
func (w *world) again() {
	w.Helper()
	w.Store = testkit.Open(w, w.ControlDSN)
	w.C, w.S, w.R = testkit.Session(w, w.ControlDSN), testkit.Session(w, w.SourceDSN), testkit.Session(w, w.ReceiverDSN)
	w.From, w.To = testkit.OpenSide(w, testkit.Source, w.SourceDSN), testkit.OpenSide(w, testkit.Receiver, w.ReceiverDSN)
	w.from, w.to = w.agent(testkit.Source), w.agent(testkit.Receiver)
}

// stands requires that nothing of the source is pushed, released, or applied, and
// that it is said why and what to do.
func (w *world) stands(because string) {
	w.Helper()
	before := testkit.Value[int64](w, w.C, `SELECT coalesce(max(seq), 0) FROM backfill_control.entry`)
	rows := testkit.Rows(w, w.R, "orders")
	for range 2 {
		_, err := w.from.push(w.Context())
		require.Equal(w, backfill.Refused, backfill.CodeOf(err), "%v", err)
		require.ErrorContains(w, err, because)
		require.ErrorContains(w, err, "backfill site new-epoch maple --note WHY")
		_, err = (&applier{Agent: w.to}).apply(w.Context())
		require.Equal(w, backfill.Refused, backfill.CodeOf(err), "%v", err)
		for _, r := range w.open() {
			if r.State == backfill.AwaitingReview {
				w.Approve(r.ID)
			}
			_, _, err := w.Store.ReleaseBatch(w.Context(), r.ID, 10)
			require.Error(w, err)
		}
	}
	require.Contains(w, w.from.problem(w.Context()), because, "the site's page shows it")
	require.Equal(w, before, testkit.Value[int64](w, w.C, `SELECT coalesce(max(seq), 0) FROM backfill_control.entry`), "nothing was pushed or released")
	require.Equal(w, rows, testkit.Rows(w, w.R, "orders"), "nothing was applied")
}

func (w *world) open() []*backfill.Request {
	w.Helper()
	all, err := w.Store.Requests(w.Context(), control.RequestFilter{States: backfill.OpenStates(), Limit: 100})
	require.NoError(w, err)
	return all
}

// wayOut opens a new epoch, and requires that all goes on from there: open requests
// have failed, changes arrive, and after a backfill both sides are equal.
func (w *world) wayOut() {
	w.Helper()
	open := w.open()
	require.NoError(w, w.Store.NewEpoch(w.Context(), "admin", testkit.Site, "it was restored"))
	for _, r := range open {
		now := w.Now(r.ID)
		require.Equal(w, backfill.Failed, now.State)
		require.Contains(w, now.Reason, "new epoch")
	}
	w.onSource(`INSERT INTO orders SELECT max(id) + 1, 'in the new epoch' FROM orders`)
	w.drain()
	require.Empty(w, w.from.problem(w.Context()))
	require.Empty(w, w.to.problem(w.Context()))
	for _, a := range []*Agent{w.from, w.to} {
		require.NoError(w, a.CountNow(w.Context()))
	}
	demanded := func() string {
		p, err := w.Store.Panel(w.Context(), testkit.Site, "public.orders", testkit.Source)
		require.NoError(w, err)
		if p.Source.Gap != "" {
			require.True(w, p.CanRequest(), "%v", p.Conditions(false))
		}
		return p.Source.Gap
	}
	require.NotEmpty(w, demanded(), "whatever the counts say")
	id := w.Request("public.orders").ID
	w.walk(id)
	w.classify(id)
	w.Approve(id)
	w.release(id, 100)
	w.drain()
	w.Equal("orders")
	require.Empty(w, demanded())
}

// fill gives the source its first rows and a request that awaits review.
func (w *world) fill() *backfill.Request {
	w.Helper()
	w.onSource(`INSERT INTO orders SELECT g, 'old' FROM generate_series(1, 20) g`)
	w.drain()
	return w.walk(w.Request("public.orders").ID)
}

// A source that was restored from a physical backup is noticed however little it has
// lost: one push, many, or only what a walk has read.
func TestIdentity_TheSourceIsRestored(t *testing.T) {
	t.Parallel()
	c := startCrashing(t)
	w := worldOf(testkit.NewPairAt(t, c.pg.DSN("postgres"), orders, orders, "public.orders"), Settings{})
	w.fill()
	for name, lost := range map[string]func(){
		"one push": func() {
			w.onSource(`UPDATE orders SET note = 'lost' WHERE id < 5; DELETE FROM orders WHERE id = 9`)
			w.push()
		},
		"many pushes": func() {
			for i := range 4 {
				w.onSource(fmt.Sprintf(`UPDATE orders SET note = 'lost %d' WHERE id = %[1]d`, i+1))
				w.push()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.backup()
			w.again()
			lost()
			c.restore()
			w.again()
			w.onSource(`INSERT INTO orders SELECT max(id) + 1, 'after the restore' FROM orders`)
			w.stands("restored from a backup")
			w.wayOut()
		})
	}
	t.Run("what a walk has read", func(t *testing.T) {
		c.backup()
		w.again()
		k := w.claim(w.from, w.Request("public.orders").ID)
		require.NoError(t, k.ready(t.Context()))
		require.NoError(t, k.freeze(t.Context()))
		w.onSource(`UPDATE orders SET note = 'lost' WHERE id = 3`)
		_, err := k.page(t.Context())
		require.NoError(t, err)
		c.restore()
		// The agent lives on; its connections are made anew.
		testkit.Eventually(t, "the agent has connections again", func() bool {
			_, err = w.from.db.Pending(t.Context(), 1, nil)
			return err == nil
		})
		err = k.settle(t.Context())
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
		require.Equal(t, backfill.InProgress, w.Now(k.req.ID).State)
		w.again()
		w.onSource(`INSERT INTO orders SELECT max(id) + 1, 'after the restore' FROM orders`)
		w.stands("restored from a backup")
		w.wayOut()
	})
	t.Run("into another cluster", func(t *testing.T) {
		dsn := testkit.Database(t)
		dump(t, w.SourceDSN, dsn)
		w.SourceDSN = dsn
		w.again()
		w.onSource(`INSERT INTO orders SELECT max(id) + 1, 'after the move' FROM orders`)
		w.stands("another cluster")
		w.wayOut()
	})
}

// After a failover to a replica everything stops, whether the replica had all or had
// lost what was committed last.
func TestIdentity_TheSourceFailsOver(t *testing.T) {
	t.Parallel()
	c := startCrashing(t)
	w := worldOf(testkit.NewPairAt(t, c.pg.DSN("postgres"), orders, orders, "public.orders"), Settings{})
	w.fill()
	for _, behind := range []bool{false, true} {
		t.Run(fmt.Sprintf("behind=%t", behind), func(t *testing.T) {
			s := c.standby()
			w.again()
			_, err := side.Open(t.Context(), testkit.Site, testkit.Source, s.pg.DSN("postgres"))
			require.ErrorContains(t, err, "standby")
			c.caughtUp(s)
			// Nor does an agent go on whose connections come to lead to it.
			proxy := testkit.NewProxy(t, w.SourceDSN)
			db := testkit.OpenSide(t, testkit.Source, proxy.DSN)
			proxy.Lead(t, s.pg.DSN("postgres"))
			proxy.Cut()
			testkit.Eventually(t, "the standby answers", func() bool {
				_, err = db.Standing(t.Context())
				return err == nil || backfill.CodeOf(err) != ""
			})
			require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
			require.ErrorContains(t, err, "is a standby now")
			if behind {
				require.NoError(t, s.pg.Stop(t.Context()))
			}
			w.onSource(`UPDATE orders SET note = 'sent before the failover' WHERE id < 5; DELETE FROM orders WHERE id = 9`)
			w.drain()
			if !behind {
				c.caughtUp(s)
			}
			require.NoError(t, c.pg.Kill())
			if behind {
				s.start()
			}
			s.promote()
			w.SourceDSN = s.pg.DSN("postgres")
			w.again()
			w.onSource(`INSERT INTO orders SELECT max(id) + 1, 'after the failover' FROM orders`)
			w.stands("failed over")
			w.wayOut()
			c = s
		})
	}
	// The old primary lives on: what is read there does not count as safe because the
	// new one, which new connections lead to, has written something.
	t.Run("between a read and the write that makes it safe", func(t *testing.T) {
		s := c.standby()
		w.again()
		proxy := testkit.NewProxy(t, w.SourceDSN)
		db := testkit.OpenSide(t, testkit.Source, proxy.DSN)
		now, err := db.Standing(t.Context())
		require.NoError(t, err)
		db.Meet(now.Identity, now.Reads)
		c.caughtUp(s)
		s.promote()
		w.onSource(`UPDATE orders SET note = 'on the old primary' WHERE id = 3`)
		proxy.Lead(t, s.pg.DSN("postgres"))
		read := false
		_, err = db.ReadOutbox(t.Context(), []string{"public.orders"}, 10, func(*side.Outbox) error { read = true; return nil })
		require.True(t, read)
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
	})
}

// A receiver that was restored has lost changes that it had acknowledged. Where
// history has them they come again, by themselves; else it stops.
func TestIdentity_TheReceiverIsRestored(t *testing.T) {
	t.Parallel()
	c := startCrashing(t)
	w := worldOf(testkit.NewPairIn(t, testkit.Places{Receiver: c.pg.DSN("postgres")}, orders, orders, "public.orders"), Settings{})
	w.onReceiver(`INSERT INTO orders VALUES (100, 'of the receiver')`)
	request := w.fill()
	w.classify(request.ID)
	require.Equal(t, int64(20), w.Now(request.ID).Effects[backfill.Identical])
	c.backup()
	w.again()
	w.onSource(`UPDATE orders SET note = 'applied, then lost' WHERE id < 5; DELETE FROM orders WHERE id = 9`)
	w.drain()
	w.onSource(`UPDATE orders SET note = 'once more' WHERE id = 3`)
	w.drain()
	c.restore()
	w.again()
	w.onReceiver(`DELETE FROM orders WHERE id = 100`)
	w.apply()
	require.Equal(t, int64(20), w.Now(request.ID).Effects[backfill.Unknown], "what it held is judged anew")
	w.drain()
	w.Equal("orders")
	log, err := w.Store.Audit(t.Context(), control.AuditFilter{Site: testkit.Site, Limit: 1})
	require.NoError(t, err)
	require.Equal(t, "receiver.restored", log[0].Action)
	require.Empty(t, w.to.problem(t.Context()))

	// Retention has removed what it would need.
	c.restore()
	w.again()
	testkit.Exec(t, w.C, `DELETE FROM backfill_control.batch WHERE last_seq < (SELECT max(last_seq) FROM backfill_control.batch)`)
	_, err = (&applier{Agent: w.to}).apply(t.Context())
	require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, "new-epoch maple")
	w.onReceiver(`DELETE FROM orders WHERE id IN (9, 100)`) // a backfill removes nothing
	w.wayOut()

	// Moved into another cluster it knows its position as well.
	dsn := testkit.Database(t)
	dump(t, w.ReceiverDSN, dsn)
	w.onSource(`UPDATE orders SET note = 'after the move' WHERE id = 3`)
	w.ReceiverDSN = dsn
	w.again()
	w.drain()
	w.Equal("orders")

}

// dump copies a database into an empty one of another cluster.
func dump(t *testing.T, from, to string) {
	t.Helper()
	bin, err := local.FindPostgres()
	require.NoError(t, err)
	sql, err := exec.Command(filepath.Join(bin, "pg_dump"), "--no-owner", "--dbname="+from).Output()
	require.NoError(t, err)
	psql := exec.Command(filepath.Join(bin, "psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname="+to)
	psql.Stdin = strings.NewReader(strings.Replace(string(sql), "CREATE SCHEMA public;", "", 1))
	out, err := psql.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// A control database that was restored knows less than the sides.
func TestIdentity_TheControlDatabaseIsRestored(t *testing.T) {
	t.Parallel()
	c := startCrashing(t)
	require.NoError(t, c.pg.CreateDatabase(t.Context(), "control"))
	_, err := control.Migrate(t.Context(), c.pg.DSN("control"))
	require.NoError(t, err)
	w := worldOf(testkit.NewPairIn(t, testkit.Places{Control: c.pg.DSN("control")}, orders, orders, "public.orders"), Settings{})
	w.fill()
	for name, lost := range map[string]func(){
		"one push": func() {
			w.onSource(`UPDATE orders SET note = 'pushed' WHERE id < 5`)
			w.push()
		},
		"what was applied": func() {
			w.onSource(`UPDATE orders SET note = 'applied' WHERE id < 5; DELETE FROM orders WHERE id = 9`)
			w.drain()
		},
		"an epoch": func() {
			require.NoError(t, w.Store.NewEpoch(t.Context(), "admin", testkit.Site, "why not"))
			w.drain()
			w.onSource(`UPDATE orders SET note = 'in an epoch that is forgotten' WHERE id < 5`)
			w.drain()
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.backup()
			w.again()
			lost()
			c.restore()
			w.again()
			w.onSource(`INSERT INTO orders SELECT max(id) + 1, 'after the restore' FROM orders`)
			w.stands("the control database was restored")
			w.wayOut()
		})
	}
	t.Run("a release", func(t *testing.T) {
		id := w.Request("public.orders").ID
		w.walk(id)
		c.backup()
		w.again()
		w.Approve(id)
		w.release(id, 100)
		w.applyAll()
		c.restore()
		w.again()
		// The source knows of nothing; the receiver has applied what nobody sent.
		_, err := (&applier{Agent: w.to}).apply(t.Context())
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "did not give out")
		w.wayOut()
	})
}

// An agent that is led to another database than its side's says so.
func TestIdentity_TheWrongDatabase(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	w.onSource(`INSERT INTO orders VALUES (1)`)
	w.drain()

	// The other side's, by whatever name of its host.
	elsewhere, err := url.Parse(w.ReceiverDSN)
	require.NoError(t, err)
	elsewhere.Host = strings.Replace(elsewhere.Host, "127.0.0.1", "localhost", 1)
	for _, dsn := range []string{w.ReceiverDSN, elsewhere.String()} {
		wrong := testkit.OpenSide(t, testkit.Source, dsn)
		_, err = wrong.Standing(t.Context())
		require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "holds what was set up for side central of the same site")
		_, err = wrong.SetupSteps(t.Context(), w.List(), side.Roles{})
		require.ErrorContains(t, err, "a site needs two databases")
	}
	a := w.agentAt(testkit.Source, w.ControlDSN, w.ReceiverDSN)
	require.Equal(t, backfill.Refused, backfill.CodeOf(a.ready(t.Context())))
	_, err = (&applier{Agent: w.to}).apply(t.Context())
	require.ErrorContains(t, err, "changes of school are not applied")
	require.Empty(t, w.from.problem(t.Context()), "the right agent is back")
	w.drain()

	// Another site's.
	other := testkit.NewPair(t, orders, "public.orders")
	db, err := side.Open(t.Context(), "oak", "school", other.SourceDSN)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	_, err = db.Standing(t.Context())
	require.ErrorContains(t, err, "side school of site oak is not set up")
	require.ErrorContains(t, err, "set up there is: site maple, side school")
}
