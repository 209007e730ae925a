package activities

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/pace"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// Agents need no more rights than setup gives them, and those are few; and no
// setting of theirs or of their database makes a difference.
func TestGuarantee12_AgentsDoWithTheRightsThatSetupGives(t *testing.T) {
	w := newWorld(t, orders+`; `+measures+`; `+family+`; CREATE TABLE ids (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)`,
		append([]string{"public.orders", "public.measures", "public.ids"}, familyTables...)...)
	setup := func(dsn string, db *side.DB) {
		steps, err := db.SetupSteps(t.Context(), w.List(), side.Roles{Agent: roleAt(t, dsn)})
		require.NoError(t, err)
		require.NoError(t, db.Setup(t.Context(), steps))
	}
	agent := func(name, dsn string, db *side.DB) *Agent {
		conn, role := testkit.Session(t, dsn), roleAt(t, dsn)
		testkit.Exec(t, conn, `CREATE ROLE `+role+` LOGIN PASSWORD 'agent'`)
		t.Cleanup(func() { testkit.DropRole(t, dsn, role) })
		setup(dsn, db)
		// What the role's sessions bring along must not matter either.
		for _, set := range []string{`default_transaction_read_only = on`, `default_transaction_isolation = 'serializable'`, `statement_timeout = '1ms'`, `lock_timeout = '1ms'`,
			`idle_in_transaction_session_timeout = '1ms'`, `search_path = 'nowhere'`, `datestyle = 'German'`, `timezone = 'Asia/Kathmandu'`, `extra_float_digits = -15`,
			`intervalstyle = 'iso_8601'`, `bytea_output = 'escape'`, `synchronous_commit = off`, `standard_conforming_strings = off`, `row_security = on`} {
			testkit.Exec(t, conn, `ALTER ROLE `+role+` SET `+set)
		}
		return w.agentAt(name, w.ControlDSN, testkit.As(t, dsn, role, "agent"))
	}
	w.from, w.to = agent(testkit.Source, w.SourceDSN, w.From), agent(testkit.Receiver, w.ReceiverDSN, w.To)
	tables := append([]string{"orders", "measures", "ids"}, familyTables...)
	for _, sql := range []string{
		`INSERT INTO orders SELECT g FROM generate_series(1, 20) g; INSERT INTO measures SELECT r, g, g FROM generate_series(1, 4) r, generate_series(1, 5) g; INSERT INTO ids (v) VALUES ('a'), ('b')`,
		`INSERT INTO parents VALUES (1); INSERT INTO children VALUES (1, 1); INSERT INTO grandchildren VALUES (1, 1)`,
		`UPDATE orders SET id = id + 100; DELETE FROM measures WHERE id = 2; UPDATE measures SET region = 4, id = id + 10 WHERE region = 1; DELETE FROM parents`,
		`TRUNCATE measures; INSERT INTO measures VALUES (1, 1, 1)`,
	} {
		w.onSource(sql)
		w.drain()
		w.Equal(tables...)
		require.Empty(t, w.setAside())
	}
	w.onReceiver(`DELETE FROM orders WHERE id < 105; UPDATE orders SET note = 'x' WHERE id = 110`)
	id := w.Request("public.orders").ID
	w.walk(id)
	w.classify(id)
	require.Zero(t, w.Now(id).Effects[backfill.Unknown])
	w.ApproveDiffering(id)
	w.release(id, 100)
	w.drain()
	w.Equal(tables...)
	require.NoError(t, w.from.CountNow(t.Context()))
	require.NoError(t, w.to.CountNow(t.Context()))
	panels, err := w.Store.Panels(t.Context(), testkit.Site)
	require.NoError(t, err)
	for _, p := range panels {
		require.Empty(t, p.Source.Problem)
		require.Empty(t, p.Receiver.Problem)
		require.Equal(t, *p.Source.Rows, *p.Receiver.Rows)
	}
	require.Empty(t, w.from.problem(t.Context()))
	require.Empty(t, w.to.problem(t.Context()))

	// Proof, gates and the sequences that the cutover asks for.
	w.onReceiver(`UPDATE orders SET note = 'y' WHERE id = 110`)
	found := w.reconcile("public.orders")
	require.Equal(t, "DIFFERENT", found.Verdict)
	admin := [2]string{w.SourceDSN, w.ReceiverDSN}
	w.SourceDSN, w.ReceiverDSN = testkit.As(t, admin[0], roleAt(t, admin[0]), "agent"), testkit.As(t, admin[1], roleAt(t, admin[1]), "agent")
	stop := w.sync()
	require.Equal(t, "EQUAL", w.judge(w.newRun("public.orders", control.NewReconciliation{Mode: backfill.RunRepair, Parent: found.ID, Note: "as read"})).Verdict)
	stop()
	w.drain()
	w.Equal("orders")
	for _, a := range []*Agent{w.from, w.to} {
		all, err := a.db.Sequences(t.Context(), "public.ids")
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.NotNil(t, all[0].Highest, "of the source the column is enough")
		if a == w.to {
			require.Empty(t, all[0].Problem)
		}
	}
	w.onReceiver(`ALTER TABLE orders ADD COLUMN own serial`)
	w.onSource(`INSERT INTO orders VALUES (900)`)
	w.drain()
	require.Contains(t, w.setAside()[0], "permission denied for sequence orders_own_seq")
	setup(admin[1], w.To)
	w.retryAll()
	require.Empty(t, w.setAside())
	w.onReceiver(`ALTER TABLE orders DROP COLUMN own`)
	w.Equal("orders")
	w.gates(pace.Gate{Name: "sql", Side: testkit.Source, Kind: pace.SQL, Query: "SELECT 1", Limit: 10, MaxAge: 60}, pace.Gate{Name: "sessions", Side: testkit.Source, Kind: pace.Sessions, Limit: 100, MaxAge: 60})
	(&meter{Agent: w.from}).once(w)
	require.True(t, w.verdict("sql").Open)
	require.Contains(t, w.verdict("sessions").Why, "GRANT pg_monitor TO")
	testkit.Exec(t, w.S, `GRANT pg_monitor TO agent_`+w.S.Config().Database)
	(&meter{Agent: w.from}).once(w)
	require.True(t, w.verdict("sessions").Open, w.verdict("sessions").Why)

	// What setup does not give, they cannot do.
	// Its settings come with the connection: a SET could be cancelled by the role's own timeout.
	conn := testkit.Session(t, w.SourceDSN+"&statement_timeout=0&lock_timeout=0&default_transaction_read_only=off")
	for _, sql := range []string{`TRUNCATE orders`, `DROP TABLE orders`, `ALTER TABLE orders DISABLE TRIGGER ALL`, `CREATE TABLE backfill_maple_school.mine (id int)`, `INSERT INTO orders VALUES (1000)`, `DELETE FROM orders`,
		`SET ROLE backfill_maple_school`, `ALTER TABLE backfill_maple_school.outbox DISABLE TRIGGER ALL`, `CREATE SCHEMA mine`, `SET session_replication_role = replica`} {
		_, err := conn.Exec(t.Context(), sql)
		require.Contains(t, []string{"42501", "42P01"}, side.SQLState(err), sql)
	}
}

// A right that is missing is told in one line, with what gives it.
func TestGuarantee12_AMissingRightIsTold(t *testing.T) {
	w := newWorld(t, orders, "public.orders")
	for _, dsn := range []string{w.SourceDSN, w.ReceiverDSN} {
		testkit.Exec(t, testkit.Session(t, dsn), `CREATE ROLE `+roleAt(t, dsn)+` LOGIN PASSWORD 'agent'`)
		t.Cleanup(func() { testkit.DropRole(t, dsn, roleAt(t, dsn)) })
	}
	as := func(name, dsn string) *Agent {
		return w.agentAt(name, w.ControlDSN, testkit.As(t, dsn, roleAt(t, dsn), "agent"))
	}
	from, to := as(testkit.Source, w.SourceDSN), as(testkit.Receiver, w.ReceiverDSN)
	problem := func(a *Agent) string {
		require.NoError(t, a.CountNow(t.Context()))
		p := w.panel()
		if a == from {
			return p.Source.Problem
		}
		return p.Receiver.Problem
	}
	require.Contains(t, from.problem(t.Context()), "may not use what is set up for side school")
	require.Contains(t, from.problem(t.Context()), "run backfill setup --site maple --side school --role \""+roleAt(t, w.SourceDSN))
	require.Contains(t, problem(from), `GRANT SELECT ON "public"."orders" TO `+roleAt(t, w.SourceDSN))
	w.onReceiver(`GRANT SELECT ON orders TO ` + roleAt(t, w.ReceiverDSN))
	require.Contains(t, problem(to), `GRANT INSERT, UPDATE, DELETE ON "public"."orders" TO `+roleAt(t, w.ReceiverDSN))
	for _, says := range []string{from.problem(t.Context()), problem(from), problem(to)} {
		require.NotContains(t, says, "\n")
	}
	for db, dsn := range map[*side.DB]string{w.From: w.SourceDSN, w.To: w.ReceiverDSN} {
		steps, err := db.SetupSteps(t.Context(), w.List(), side.Roles{Agent: roleAt(t, dsn)})
		require.NoError(t, err)
		require.NoError(t, db.Setup(t.Context(), steps))
	}
	for _, a := range []*Agent{from, to} {
		require.Empty(t, a.problem(t.Context()))
		require.Empty(t, problem(a))
	}
	require.False(t, testkit.Value[bool](t, w.S, `SELECT has_table_privilege($1, 'orders', 'INSERT') OR has_table_privilege($1, 'orders', 'UPDATE') OR has_table_privilege($1, 'orders', 'DELETE')`, roleAt(t, w.SourceDSN)))
}

// roleAt is the name of an agent's role in a test's database.
func roleAt(t *testing.T, dsn string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	return "agent_" + strings.TrimPrefix(u.Path, "/")
}
