package side_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/proof"
	"backfill/internal/row"
	"backfill/internal/side"
	"backfill/internal/testkit"
)

// compared is a table of both sides as a reconciliation sees it.
func compared(t *testing.T, p *testkit.Pair, name string) (source, receiver side.Compared) {
	t.Helper()
	a, err := p.From.Describe(t.Context(), name)
	require.NoError(t, err)
	b, err := p.To.Describe(t.Context(), name)
	require.NoError(t, err)
	e, err := row.NewEncoding(a.Layout, b.Layout, nil)
	require.NoError(t, err)
	id := p.Tables[name].ID
	return side.Compared{Relation: side.Relation{Name: name}, TableID: id, Layout: a.Layout, Shape: a.Shape, Rows: e.Source("t"), Bytes: e.SourceBytes("t")},
		side.Compared{Relation: side.Relation{Name: name}, TableID: id, Layout: b.Layout, Shape: b.Shape, Rows: e.Receiver("t"), Bytes: e.ReceiverBytes("t")}
}

func hash(t *testing.T, db *side.DB, c side.Compared, leaf proof.Leaf) proof.Leaf {
	t.Helper()
	out, _, err := db.HashLeaves(t.Context(), c, []proof.Leaf{leaf}, func(proof.Leaf) bool { return true })
	require.NoError(t, err)
	return out[0]
}

// Whatever is done to a table, its digest changes if its rows have, and only then: values
// that change places between rows or columns, keys that move, NULL for the empty text. Of
// columns whose types differ the values count. The same goes for buckets.
func TestGuarantee10_ADigestChangesWithTheRows(t *testing.T) {
	t.Parallel()
	const schema = `CREATE TABLE t (id %s PRIMARY KEY, a text, b text, n %s, d numeric, f boolean, j jsonb, c char(4), long text)`
	p := testkit.NewPairOf(t, fmt.Sprintf(schema, "int", "smallint"), fmt.Sprintf(schema, "bigint", "int"), "public.t")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	fill := fmt.Sprintf(`SELECT setseed(%f); INSERT INTO t SELECT g, (ARRAY['', NULL, 'x', 'y', 'x,"y'])[1 + floor(random() * 5)], (ARRAY['', NULL, 'x', 'y', 'x,"y'])[1 + floor(random() * 5)],
		(random() * 3)::int, (ARRAY[1.0, 1.00, 0, NULL])[1 + floor(random() * 4)], random() < 0.5, '{"a": 1}', 'ab', CASE WHEN g %% 3 = 0 THEN repeat(g::text, 2000) END FROM generate_series(2, 400, 2) g`, random.Float64())
	testkit.Exec(t, p.S, fill)
	testkit.Exec(t, p.R, fill)
	source, receiver := compared(t, p, "public.t")
	rows := func() string {
		return strings.Join(testkit.Strings(t, p.R, `SELECT t::text FROM t ORDER BY id`), "\n")
	}
	was := rows()
	for _, leaf := range []proof.Leaf{{}, {Bucket: 0, Buckets: 1}} {
		there := hash(t, p.From, source, leaf)
		require.EqualValues(t, 200, there.Count)
		require.True(t, there.Same(hash(t, p.To, receiver, leaf)))
	}
	column := func() string { return []string{"a", "b", "n", "d", "f", "j", "c", "long"}[random.IntN(8)] }
	found := 0
	for range 30 {
		x, y, c := 2+2*random.IntN(200), 2+2*random.IntN(200), column()
		change := []string{
			fmt.Sprintf(`UPDATE t SET %s = o.%[1]s FROM t o WHERE t.id IN (%d, %d) AND o.id = %[2]d + %[3]d - t.id`, c, x, y),
			fmt.Sprintf(`UPDATE t SET a = b, b = a WHERE id IN (%d, %d)`, x, y),
			fmt.Sprintf(`UPDATE t SET id = id + 1 WHERE id = %d`, x),
			fmt.Sprintf(`UPDATE t SET id = CASE id WHEN 2 THEN -2 ELSE 2 - id END WHERE id IN (2, %d)`, x),
			fmt.Sprintf(`UPDATE t SET a = CASE WHEN a IS NULL THEN '' WHEN a = '' THEN NULL ELSE a END WHERE id = %d`, x),
			fmt.Sprintf(`UPDATE t SET n = n + 1 WHERE id = %d; UPDATE t SET n = n - 1 WHERE id = %d`, x, y),
			fmt.Sprintf(`UPDATE t SET d = d + 0.000 WHERE id = %d`, x),
			fmt.Sprintf(`UPDATE t SET long = overlay(long PLACING '.' FROM length(long)) WHERE id = %d`, x),
		}[random.IntN(8)]
		testkit.Exec(t, p.R, "BEGIN")
		testkit.Exec(t, p.R, change)
		now := rows()
		testkit.Exec(t, p.R, "COMMIT")
		for _, leaf := range []proof.Leaf{{}, {Bucket: 0, Buckets: 1}} {
			require.Equal(t, now == was, hash(t, p.From, source, leaf).Same(hash(t, p.To, receiver, leaf)), "%v after %s", leaf, change)
		}
		if now != was {
			found++
			testkit.Exec(t, p.R, "TRUNCATE t")
			testkit.Exec(t, p.R, fill)
		}
	}
	require.Greater(t, found, 10)
}

// A leaf is read once, in the order of its key's index, by one process.
func TestALeafIsReadOnceInOrder(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (a int, b text COLLATE "C", v text, PRIMARY KEY (a, b))`, "public.t")
	testkit.Exec(t, p.S, `INSERT INTO t SELECT g / 2000, g, repeat('x', 100) FROM generate_series(1, 20000) g ORDER BY g / 2000, g::text COLLATE "C"`)
	testkit.Exec(t, p.S, `ANALYZE t`)
	testkit.Exec(t, p.S, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET parallel_setup_cost = 0', current_database());
		EXECUTE format('ALTER DATABASE %I SET parallel_tuple_cost = 0', current_database()); EXECUTE format('ALTER DATABASE %I SET min_parallel_index_scan_size = 0', current_database());
		EXECUTE format('ALTER DATABASE %I SET min_parallel_table_scan_size = 0', current_database()); END $$`)
	db, err := side.Open(t.Context(), p.From.Site, p.From.Side, p.SourceDSN)
	require.NoError(t, err)
	defer db.Close()
	source, _ := compared(t, p, "public.t")
	for name, leaf := range map[string]proof.Leaf{
		"the whole table": {},
		"a range":         {Lower: backfill.Key{"2", "2"}, Upper: backfill.Key{"5", "5"}},
	} {
		plan, err := db.LeafPlan(t.Context(), source, leaf)
		require.NoError(t, err)
		text := strings.Join(plan, "\n")
		require.NotContains(t, text, "Sort", name)
		require.NotContains(t, text, "Gather", name)
		require.Equal(t, 1, strings.Count(text, " on t"), "%s: %s", name, text)
		require.Contains(t, text, "Index Scan using t_pkey on t", name)
	}
}

// However large the rows of a leaf are, what is put together for its digest stays far below the largest value there can be.
func TestALeafOfLargeRows(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY, v text)`, "public.t")
	testkit.Exec(t, p.S, `INSERT INTO t SELECT g, repeat('x', g * g) FROM generate_series(1, 300) g`)
	source, _ := compared(t, p, "public.t")
	size, err := p.From.LeafSize(t.Context(), source, proof.Leaf{})
	require.NoError(t, err)
	require.Less(t, size, int64(300*1024))
}

// Leaves have the rows asked for, the last one has the rest and what comes after it.
func TestLeavesAreCut(t *testing.T) {
	t.Parallel()
	p := testkit.NewPair(t, `CREATE TABLE t (id int PRIMARY KEY)`, "public.t")
	source, _ := compared(t, p, "public.t")
	for rows, want := range map[int][]int64{0: {0}, 1: {1}, 9: {9}, 10: {10}, 11: {10, 1}, 30: {10, 10, 10}, 45: {10, 10, 10, 10, 5}} {
		testkit.Exec(t, p.S, `TRUNCATE t`)
		testkit.Exec(t, p.S, fmt.Sprintf(`INSERT INTO t SELECT generate_series(1, %d)`, rows))
		var counts []int64
		var after backfill.Key
		for end := false; !end; {
			var leaves []proof.Leaf
			var err error
			leaves, _, end, err = p.From.CutLeaves(t.Context(), source, after, int64(len(counts))+1, 10, 3, true)
			require.NoError(t, err)
			for i, l := range leaves {
				counts = append(counts, l.Count)
				require.EqualValues(t, len(counts), l.N)
				require.EqualValues(t, after, l.Lower)
				after = l.Upper
				require.Equal(t, end && i == len(leaves)-1, l.Upper == nil)
				require.True(t, l.Same(hash(t, p.From, source, l)))
			}
		}
		require.Equal(t, want, counts, "%d rows", rows)
	}
}

// A run that begins while a backfill's rows are on their way looks at each of them again:
// thousands of keys of one leaf, of which each is read as fast as of a few.
func TestManyKeysOfALeafAreListedAtOnce(t *testing.T) {
	t.Parallel()
	const rows = 30_000
	p := testkit.NewPair(t, fmt.Sprintf(`CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t SELECT n, 'x' FROM generate_series(1, %d) n`, rows), "public.t")
	c, _ := compared(t, p, "public.t")
	var keys []backfill.Key
	for n := range rows {
		keys = append(keys, backfill.Key{strconv.Itoa(n + 1)})
	}
	var listed bytes.Buffer
	began := time.Now()
	_, err := p.From.CopyLeafRows(t.Context(), c, 1, nil, []side.Keys{{Leaf: 1, Keys: keys}}, &listed)
	require.NoError(t, err)
	require.Less(t, time.Since(began), 10*time.Second)
	require.Greater(t, listed.Len(), rows*20)
}
