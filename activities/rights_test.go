package activities

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// Agents need no more rights than setup gives them, and those are few; and no
// setting of theirs or of their database makes a difference.
func TestGuarantee12_AgentsDoWithTheRightsThatSetupGives(t *testing.T) {
	w := newWorld(t, orders+`; `+measures+`; `+family+`; CREATE TABLE ids (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)`,
		append([]string{"public.orders", "public.measures", "public.ids"}, familyTables...)...)
	agent := func(name, dsn string, db *side.DB) *Agent {
		conn := testkit.Session(t, dsn)
		role := "agent_" + conn.Config().Database
		testkit.Exec(t, conn, `CREATE ROLE `+role+` LOGIN PASSWORD 'agent'`)
		t.Cleanup(func() { testkit.DropRole(t, dsn, role) })
		steps, err := db.SetupSteps(t.Context(), w.List(), role)
		require.NoError(t, err)
		require.NoError(t, db.Setup(t.Context(), steps))
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

	// What setup does not give, they cannot do.
	conn := testkit.Session(t, testkit.As(t, w.SourceDSN, "agent_"+w.S.Config().Database, "agent"))
	testkit.Exec(t, conn, `SET statement_timeout = 0; SET lock_timeout = 0; SET default_transaction_read_only = off`)
	for _, sql := range []string{`TRUNCATE orders`, `DROP TABLE orders`, `ALTER TABLE orders DISABLE TRIGGER ALL`, `CREATE TABLE backfill_maple_school.mine (id int)`, `SET session_replication_role = replica`} {
		_, err := conn.Exec(t.Context(), sql)
		require.Contains(t, []string{"42501", "42P01"}, side.SQLState(err), sql)
	}
}
