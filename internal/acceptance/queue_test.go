//go:build linux

package acceptance

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// A receiver that refuses rows: they are set aside with its message, everything
// else goes on, and a person can mend it.
func TestRefusedRowsAreSetAside(t *testing.T) {
	t.Parallel()
	const table = "public.accounts"
	s := newSite(t, setup{
		tables: []string{table},
		a: accounts("accounts", 2000) + `UPDATE accounts SET balance = -1 WHERE id IN (700, 1400);
			CREATE TABLE untouched (id int)`,
		b: accounts("accounts", 500) + `ALTER TABLE accounts ADD CONSTRAINT never_in_debt CHECK (balance >= 0)`,
	})
	s.run(s.a, `UPDATE accounts SET balance = -2 WHERE id = 3; UPDATE accounts SET balance = 2 WHERE id = 4`)
	s.drain()
	require.EqualValues(t, 1, s.number(s.b, `SELECT count(*) FROM accounts WHERE id = 4 AND balance = 2`), "the good change of a transaction is applied")
	s.requireQuarantined(table, "3")

	r := s.backfill(table)
	require.EqualValues(t, 2000, r.Released)
	s.drain()
	require.EqualValues(t, 1998, s.number(s.b, `SELECT count(*) FROM accounts`), "all but those refused, and the old row 3")
	refused := s.requireQuarantined(table, "3", "700", "1400")

	// A later change of the key takes the place of the one set aside.
	s.run(s.a, `UPDATE accounts SET balance = 3 WHERE id = 3`)
	s.drain()
	s.requireQuarantined(table, "700", "1400")
	require.EqualValues(t, 1, s.number(s.b, `SELECT count(*) FROM accounts WHERE id = 3 AND balance = 3`))

	s.post(http.StatusAccepted, wishPath(refused["1400"], "skip"), nil)
	s.awaitQueue(table, "skipped", "1400")
	s.run(s.b, `ALTER TABLE accounts DROP CONSTRAINT never_in_debt`)
	s.post(http.StatusAccepted, wishPath(refused["700"], "retry"), nil)
	s.awaitQueue(table, "quarantined")
	require.EqualValues(t, 1, s.number(s.b, `SELECT count(*) FROM accounts WHERE id = 700 AND balance = -1`))
	require.Zero(t, s.number(s.b, `SELECT count(*) FROM accounts WHERE id = 1400`), "a change skipped is not applied")
	a := s.post(http.StatusConflict, wishPath(refused["700"], "retry"), nil)
	require.Equal(t, "urn:backfill:problem:conflict", a.Problem.Type)
	s.post(http.StatusNotFound, wishPath(1<<40, "retry"), nil)

	// What was skipped comes with a backfill of its row.
	one := decode[*request](s, s.post(http.StatusCreated, "/sites/s/backfills", wish{Table: table, From: "a", Key: []string{"1400"}}))
	one = s.awaitReview(one.ID)
	require.EqualValues(t, 1, one.Staged)
	require.EqualValues(t, 1, one.Effects["insert"])
	s.approve(one)
	s.awaitFinished(one.ID)
	s.drain()
	s.requireEqual(table)
}

func wishPath(seq int64, wish string) string { return fmt.Sprintf("/sites/s/queue/%d/%s", seq, wish) }

// awaitQueue waits until just these keys are in a state, and returns them with
// their seqs.
func (s *site) awaitQueue(table, state string, keys ...string) map[string]int64 {
	s.Helper()
	found := map[string]int64{}
	s.await(fmt.Sprintf("%v to be %s", keys, state), func() (bool, string) {
		var have []string
		for _, c := range s.queue(table, state) {
			require.Equal(s, state, c.State)
			found[c.Key[0]] = c.Seq
			have = append(have, c.Key[0])
		}
		slices.Sort(have)
		slices.Sort(keys)
		return slices.Equal(have, keys), fmt.Sprint(have)
	})
	return found
}

func (s *site) requireQuarantined(table string, keys ...string) map[string]int64 {
	s.Helper()
	found := s.awaitQueue(table, "quarantined", keys...)
	for _, c := range s.queue(table, "quarantined") {
		require.Contains(s, c.Reason, `new row for relation "accounts" violates check constraint "never_in_debt"`)
	}
	return found
}

// Children that come before their parents wait for them, and are applied by
// themselves.
func TestChildrenWaitForTheirParents(t *testing.T) {
	t.Parallel()
	const parents, children = "public.customers", "public.invoices"
	const tables = `
		CREATE TABLE customers (id integer PRIMARY KEY, name text NOT NULL);
		CREATE TABLE invoices (id integer PRIMARY KEY, customer integer NOT NULL, total numeric NOT NULL);`
	s := newSite(t, setup{
		tables: []string{children, parents},
		a: tables + `INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 1000) n;
			INSERT INTO invoices SELECT n, 1 + n % 1000, n / 7.0 FROM generate_series(1, 5000) n`,
		b: tables + `INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 10) n;
			ALTER TABLE invoices ADD FOREIGN KEY (customer) REFERENCES customers`,
	})
	r := s.backfill(children)
	require.EqualValues(t, 5000, r.Released)
	s.drain()
	require.EqualValues(t, 50, s.number(s.b, `SELECT count(*) FROM invoices`), "those whose customer is there")
	held := s.queue(children, "held")
	require.Len(t, held, 4950)
	require.Contains(t, held[0].Reason, "customers")
	// Changes of children that wait take their place.
	s.run(s.a, `UPDATE invoices SET total = 1 WHERE id = 2500; DELETE FROM invoices WHERE id = 2501`)
	s.drain()
	s.await("the deleted child to wait no longer", func() (bool, string) {
		n := len(s.queue(children, "held"))
		return n == 4949, fmt.Sprint(n)
	})

	s.backfill(parents)
	s.drain()
	s.await("nothing to be held", func() (bool, string) {
		n := len(s.queue(children, "held"))
		return n == 0, fmt.Sprintf("%d held", n)
	})
	s.requireEqual(parents, children)
	s.awaitCount(children, 4999, 4999)
	s.awaitCount(parents, 1000, 1000)
	require.Empty(t, s.queue(children, ""))
}
