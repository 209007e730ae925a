package control_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// retained makes five batches of changes of two keys each, acknowledged long ago but
// for the last, and a closed request of long ago.
func retained(t *testing.T) (*testkit.Pair, control.Keep) {
	p := testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders")
	table := p.Tables["public.orders"].ID
	for b := range 5 {
		testkit.Exec(t, p.C, `INSERT INTO backfill_control.entry (direction, table_id, snap, op, key) SELECT $1, $2, '9:9:', 'd', ARRAY[n::text] FROM generate_series(1, 2) n`, p.Out.ID, table)
		testkit.Exec(t, p.C, `INSERT INTO backfill_control.batch (direction, first_seq, last_seq, nonce) VALUES ($1, $2, $3, $4)`, p.Out.ID, b*2+1, b*2+2, string(rune('a'+b)))
	}
	testkit.Exec(t, p.C, `UPDATE backfill_control.direction SET applied_seq = 10 WHERE id = $1`, p.Out.ID)
	// Acknowledged in other portions than pushed: up to the middle of the fourth batch long ago.
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.ack (direction, seq, at) VALUES ($1, 3, now() - interval '50 h'), ($1, 7, now() - interval '40 h'), ($1, 10, now())`, p.Out.ID)
	return p, control.Keep{Requests: 24 * time.Hour, History: 24 * time.Hour}
}

func retain(t *testing.T, p *testkit.Pair, k control.Keep) control.Removed {
	t.Helper()
	all := control.Removed{}
	for range 1000 {
		removed, more, err := p.Store.Retain(t.Context(), k, 3, nil)
		require.NoError(t, err)
		for kind, n := range removed {
			all[kind] += n
		}
		if !more {
			return all
		}
	}
	t.Fatal("retention does not end")
	return nil
}

func seqs(t *testing.T, p *testkit.Pair, table, column string) []string {
	t.Helper()
	return testkit.Strings(t, p.C, `SELECT t.`+column+`::text FROM backfill_control.`+table+` t WHERE direction = $1 ORDER BY t.`+column, p.Out.ID)
}

// Old history goes, whole batches only, so that a receiver restored to a position
// within what is gone is told so instead of going on with a gap.
func TestRetentionRemovesOldHistoryByBatches(t *testing.T) {
	t.Parallel()
	p, keep := retained(t)
	require.Equal(t, control.Removed{"changes": 6}, retain(t, p, keep))
	require.Equal(t, []string{"7", "8", "9", "10"}, seqs(t, p, "entry", "seq"))
	require.Equal(t, []string{"8", "10"}, seqs(t, p, "batch", "last_seq"))
	at := func(seq int64, nonce string) error {
		_, err := p.Store.Next(t.Context(), p.Out, control.Position{Seq: seq, Nonce: nonce}, 10, 1<<20)
		return err
	}
	require.NoError(t, at(10, "e"), "the receiver goes on where it is")
	require.NoError(t, at(7, "d"))
	for seq, nonce := range map[int64]string{6: "c", 5: "c", 2: "a"} {
		require.Equal(t, backfill.Refused, backfill.CodeOf(at(seq, nonce)), "position %d", seq)
	}
	// Asking took the receiver for one that went back.
	testkit.Exec(t, p.C, `UPDATE backfill_control.direction SET applied_seq = 10 WHERE id = $1`, p.Out.ID)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.stopped (direction, table_id, seq, reason, since) VALUES ($1, $2, 7, 'x', now())`, p.Out.ID, p.Tables["public.orders"].ID)
	testkit.Exec(t, p.C, `UPDATE backfill_control.ack SET at = now() - interval '30 h'`)
	require.Empty(t, retain(t, p, keep), "what waits for a stopped table stays")
	testkit.Exec(t, p.C, `DELETE FROM backfill_control.stopped`)
	require.Equal(t, control.Removed{"changes": 2}, retain(t, p, keep))
	require.NoError(t, at(10, "e"), "an idle receiver's position stays known, however old")
}

// What an open request may need for its superseded check stays, and so does what
// the receiver has set aside.
func TestRetentionKeepsWhatOpenRequestsNeed(t *testing.T) {
	t.Parallel()
	p, keep := retained(t)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.quarantine (direction, seq, table_id, state, reason, since) VALUES ($1, 1, $2, 'quarantined', 'x', now()), ($1, 2, $2, 'skipped', 'x', now())`,
		p.Out.ID, p.Tables["public.orders"].ID)
	r := p.Request("public.orders")
	testkit.Exec(t, p.C, `UPDATE backfill_control.request SET started_at = now() - interval '45 h', start_seq = 4 WHERE id = $1`, r.ID)
	require.Equal(t, control.Removed{"changes": 1}, retain(t, p, keep))
	require.Equal(t, []string{"1", "3", "4", "5", "6", "7", "8", "9", "10"}, seqs(t, p, "entry", "seq"), "what was acknowledged since the request began, in whole batches")
	_, err := p.Store.Close(t.Context(), r.ID, "ann", backfill.Cancelled, "x")
	require.NoError(t, err)
	require.Equal(t, control.Removed{"changes": 4}, retain(t, p, keep))
	require.Equal(t, []string{"1", "7", "8", "9", "10"}, seqs(t, p, "entry", "seq"))
}

// Closed requests go with their rows, open ones never; totals stay, and what went
// is on record.
func TestRetentionRemovesClosedRequests(t *testing.T) {
	t.Parallel()
	p, keep := retained(t)
	old, open := p.Request("public.orders"), p.Request("public.orders", "5")
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.staged (request_id, n, snap, key, row) SELECT r, n, '1:1:', ARRAY[n::text], ARRAY[n::text] FROM generate_series(1, 20) n, unnest($1::bigint[]) r`, []int64{old.ID, open.ID})
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.effect (request_id, n, effect) SELECT $1, n, 'i' FROM generate_series(1, 20) n`, old.ID)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.progress (request_id, releasing, rows, throttled) VALUES ($1, false, 1, 1)`, old.ID)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.throttled VALUES ($1, 'lag', 'replica_lag', 7)`, old.ID)
	testkit.Exec(t, p.C, `UPDATE backfill_control.request SET requested_at = now() - interval '90 h', started_at = now() - interval '90 h', staged = 20`)
	testkit.Exec(t, p.C, `UPDATE backfill_control.request SET state = 'REJECTED', closed_at = now() - interval '23 h' WHERE id = $1`, old.ID)
	require.Empty(t, retain(t, p, keep)["requests"], "within its window")
	before, err := p.Store.Figures(t.Context())
	require.NoError(t, err)
	testkit.Exec(t, p.C, `UPDATE backfill_control.request SET closed_at = now() - interval '25 h' WHERE id = $1`, old.ID)
	removed := retain(t, p, keep)
	require.Equal(t, int64(1), removed["requests"])
	require.Equal(t, int64(20), removed["staged rows"])
	for _, table := range []string{"staged", "effect", "progress", "throttled"} {
		require.Zero(t, testkit.Value[int](t, p.C, `SELECT count(*) FROM backfill_control.`+table+` WHERE request_id = $1`, old.ID), table)
	}
	require.Equal(t, 20, testkit.Value[int](t, p.C, `SELECT count(*) FROM backfill_control.staged WHERE request_id = $1`, open.ID))
	require.Equal(t, backfill.Pending, p.Now(open.ID).State)
	after, err := p.Store.Figures(t.Context())
	require.NoError(t, err)
	require.ElementsMatch(t, before.Totals, after.Totals, "totals never fall")
	require.NoError(t, p.Store.Retained(t.Context(), removed))
	audit, err := p.Store.Audit(t.Context(), control.AuditFilter{Limit: 1})
	require.NoError(t, err)
	require.Equal(t, "retention.removed", audit[0].Action)
}

// Old reconciliations go with their leaves and keys, but for the last of a table: it
// says what is proven.
func TestRetentionRemovesOldReconciliations(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders")
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.reconciliation (direction, table_id, mode, state, verdict, requested_by, closed_at)
		SELECT $1, $2, 'full', 'FINISHED', 'EQUAL', 'test', now() - age FROM (VALUES (interval '50 h'), (interval '40 h'), (interval '30 h')) x (age) ORDER BY age DESC`, p.Out.ID, p.Tables["public.orders"].ID)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.reconciliation (direction, table_id, mode, parent, state, verdict, requested_by, closed_at)
		SELECT direction, table_id, 'repair', 2, 'FINISHED', 'EQUAL', 'test', now() FROM backfill_control.reconciliation WHERE id = 2`)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.run_leaf (run_id, n, state) SELECT r, n, 'equal' FROM generate_series(1, 3) r, generate_series(1, 7) n`)
	testkit.Exec(t, p.C, `INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key) SELECT r, 1, 'missing', true, ARRAY[n::text] FROM generate_series(1, 3) r, generate_series(1, 5) n`)
	require.Equal(t, control.Removed{"reconciliations": 1}, retain(t, p, control.Keep{Requests: 24 * time.Hour}))
	require.Equal(t, []string{"2", "3", "4"}, testkit.Strings(t, p.C, `SELECT id::text FROM backfill_control.reconciliation ORDER BY id`), "one with a repair of late, and the last")
	require.Zero(t, testkit.Value[int](t, p.C, `SELECT count(*) FROM backfill_control.run_leaf WHERE run_id = 1`)+testkit.Value[int](t, p.C, `SELECT count(*) FROM backfill_control.difference WHERE run_id = 1`))
}
