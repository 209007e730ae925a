package control_test

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
	"backfill/internal/testkit"
)

// Where the next batch ends is found as quickly when the statistics know nothing of what
// a release has just put beside the changes.
func TestTheNextBatchIsFoundWithoutStatistics(t *testing.T) {
	t.Parallel()
	dsn := testkit.ControlDSN(t)
	s, conn := testkit.Open(t, dsn), testkit.Connect(t, dsn)
	require.NoError(t, s.CreateSite(t.Context(), "test", "elm", [2]string{"a", "b"}))
	table, err := s.PutTable(t.Context(), "test", "elm", "public.t", from("a"))
	require.NoError(t, err)
	d, err := s.Direction(t.Context(), "elm", "a")
	require.NoError(t, err)
	testkit.Exec(t, conn, `ALTER TABLE backfill_control.entry SET (autovacuum_enabled = off)`)
	add := func(from, to int) {
		testkit.Exec(t, conn, `
			WITH r AS (INSERT INTO backfill_control.request (direction, table_id, mode, requested_by, state) VALUES ($1, $2, 'full', 'test', 'FINISHED') RETURNING id)
			INSERT INTO backfill_control.entry (direction, table_id, seq, snap, op, key, row, request_id) OVERRIDING SYSTEM VALUE
			SELECT $1, $2, n, '1:1:', 'c', ARRAY[n::text], ARRAY['a', 'b'], CASE WHEN n > 300 AND n % 10 > 0 THEN r.id END FROM generate_series($3::int, $4::int) n, r`, d.ID, table.ID, from, to)
	}
	add(1, 1)
	testkit.Exec(t, conn, `ANALYZE backfill_control.entry`)
	add(2, 20_000)
	testkit.Exec(t, conn, `INSERT INTO backfill_control.batch (direction, first_seq, last_seq, nonce) VALUES ($1, 1, 20000, 'n')`, d.ID)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	b, err := s.Next(ctx, d, control.Position{}, 20_000, 1<<20)
	require.NoError(t, err)
	require.EqualValues(t, 300, b.Rows, "up to the first row of the request")
	require.False(t, b.Released)
}

// A batch is read along the index, not gathered and sorted, whatever the statistics say.
func TestABatchIsNotSorted(t *testing.T) {
	t.Parallel()
	dsn := testkit.ControlDSN(t)
	conn := testkit.Session(t, dsn)
	const sessions = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'`
	const filesForSorting = `SELECT temp_files FROM pg_stat_database WHERE datname = current_database()`
	before, was := testkit.Value[int](t, conn, sessions), testkit.Value[int](t, conn, filesForSorting)
	s := testkit.Open(t, dsn)
	testkit.Exec(t, conn, `ALTER TABLE backfill_control.entry SET (autovacuum_enabled = off)`)
	testkit.Exec(t, conn, `
		INSERT INTO backfill_control.entry (direction, table_id, seq, snap, op, key, row) OVERRIDING SYSTEM VALUE
		SELECT 1, 1, n, '1:1:', 'c', ARRAY[n::text], ARRAY[n::text, repeat('x', 500)] FROM generate_series(1, 20000) n`)
	require.NoError(t, s.CopyValues(t.Context(), 1, control.Part{To: 18_000}, 2, io.Discard))
	require.NoError(t, s.CopyBatch(t.Context(), 1, control.Part{To: 18_000, Only: 1}, io.Discard))
	s.Disconnect() // a session tells what it has done at its end
	testkit.Eventually(t, "the sessions end", func() bool { return testkit.Value[int](t, conn, sessions) <= before })
	require.Equal(t, was, testkit.Value[int](t, conn, filesForSorting), "files for sorting")
}
