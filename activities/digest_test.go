package activities

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/row"
	"backfill/internal/testkit"
)

// The bytes by which rows are hashed are the same just where their texts are, for values of every type.
func TestGuarantee10_RowsOfTheSameBytesHaveTheSameText(t *testing.T) {
	t.Parallel()
	w := worldOf(testkit.NewPair(t, `CREATE TABLE orders (id int PRIMARY KEY)`, "public.orders"), Settings{})
	shared, spared := "", 0
	for i, s := range builtin {
		if strings.HasPrefix(s.typ, "reg") || s.typ == "aclitem" {
			continue
		}
		table := fmt.Sprintf("v%d", i)
		sql := fmt.Sprintf("CREATE TABLE %s (id int PRIMARY KEY, v %s); INSERT INTO %[1]s VALUES (0, NULL)", table, s.typ)
		for n := range s.values {
			sql += fmt.Sprintf("; INSERT INTO %s VALUES (%d, %s), (%d, %[3]s)", table, 2*n+1, s.literal(n), 2*n+2)
		}
		w.onSource(sql)
		d, err := w.from.db.Describe(t.Context(), "public."+table)
		require.NoError(t, err)
		e, err := row.NewEncoding(d.Layout, d.Layout, []string{"id"})
		require.NoError(t, err)
		if !strings.Contains(e.SourceBytes("t"), "text") && !strings.Contains(e.SourceBytes("t"), "concat") {
			spared++
		}
		require.Equal(t, e.SourceBytes("t"), e.ReceiverBytes("t"))
		shared = testkit.Value[string](t, w.S, fmt.Sprintf(`SELECT coalesce(string_agg(format('%%s and %%s', a.id, b.id), '; '), '')
			FROM (SELECT id, (%[1]s)::text AS text, %[2]s AS bytes FROM %[3]s t) a JOIN (SELECT id, (%[1]s)::text AS text, %[2]s AS bytes FROM %[3]s t) b ON a.id < b.id
			WHERE (a.text = b.text) <> (a.bytes = b.bytes)`, e.Source("t"), e.SourceBytes("t"), table))
		require.Empty(t, shared, "rows of type %s", s.typ)
	}
	require.GreaterOrEqual(t, spared, 14, "types that are not printed")
}
