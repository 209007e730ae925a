package row_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"backfill/internal/row"
)

func layout() *row.Layout {
	return &row.Layout{Key: []string{"id"}, Columns: []row.Column{
		{Name: "id", Type: "bigint", Declared: "bigint", AlwaysIdentity: true},
		{Name: "state", Type: "public.mood", Declared: "public.mood", Labels: []string{"sad", "happy"}},
		{Name: "Odd name", Type: "character varying", Declared: "character varying(10)"},
	}}
}

func TestDifferenceSaysWhatHasChanged(t *testing.T) {
	require.Empty(t, layout().Difference(layout()))
	require.Equal(t, layout().Fingerprint(), layout().Fingerprint())
	for want, change := range map[string]func(*row.Layout){
		`column "state" is gone`:                                  func(l *row.Layout) { l.Columns = append(l.Columns[:1:1], l.Columns[2]) },
		`column "Odd name" was character varying(10) and is text`: func(l *row.Layout) { l.Columns[2].Type, l.Columns[2].Declared = "text", "text" },
		"the labels of public.mood have changed":                  func(l *row.Layout) { l.Columns[1].Labels = []string{"sad", "glad"} },
		`column "more" is new`:                                    func(l *row.Layout) { l.Columns = append(l.Columns, row.Column{Name: "more", Type: "int"}) },
		"the key was (id) and is (id, state)":                     func(l *row.Layout) { l.Key = []string{"id", "state"} },
		"the order or kind of columns has changed":                func(l *row.Layout) { l.Columns[0], l.Columns[1] = l.Columns[1], l.Columns[0] },
	} {
		now := layout()
		change(now)
		require.Equal(t, want, layout().Difference(now))
		require.NotEqual(t, layout().Fingerprint(), now.Fingerprint())
	}
}

func TestLiteralsAndIdentifiersCannotBeBrokenOutOf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.StringOf(rapid.SampledFrom([]rune(`'"\a; -ü`+"\n"))).Draw(t, "s")
		l := row.Literal(s)
		require.True(t, strings.HasPrefix(l, "'") && strings.HasSuffix(l, "'"))
		inner := l[1 : len(l)-1]
		require.NotContains(t, strings.ReplaceAll(inner, "''", ""), "'")
		require.Equal(t, s, strings.ReplaceAll(inner, "''", "'"))
		i := row.Ident(s)
		require.NotContains(t, strings.ReplaceAll(i[1:len(i)-1], `""`, ""), `"`)
	})
}

// A key's comparison is one range where one operator will do, and is spelled out
// where the columns' types have operators of their own.
func TestComparisonsUseTheTypesOwnOperators(t *testing.T) {
	l := &row.Layout{Key: []string{"a", "b"}, Columns: []row.Column{{Name: "a", Type: "integer"}, {Name: "b", Type: "text"}}}
	require.Equal(t, `ROW(t."a", t."b") OPERATOR(pg_catalog.>) ROW(CAST('1' AS integer), CAST('x''y' AS text))`, l.KeyAfter("t", []string{"1", "x'y"}))
	require.Equal(t, `ROW(t."a", t."b") OPERATOR(pg_catalog.<=) ROW(CAST('1' AS integer), CAST('x' AS text))`, l.KeyUpTo("t", []string{"1", "x"}))
	l.Columns[1].Type, l.Columns[1].Operators = "ext.citext", "ext"
	after := l.KeyAfter("t", []string{"1", "x"})
	require.Contains(t, after, `t."b" OPERATOR(ext.>) CAST('x' AS ext.citext)`)
	require.Contains(t, after, `t."a" OPERATOR(pg_catalog.>=) CAST('1' AS integer)`)
	require.Equal(t, `t."a" OPERATOR(pg_catalog.=) (k.key)[1]::integer AND t."b" OPERATOR(ext.=) (k.key)[2]::ext.citext`, l.KeyEquals("t", "k.key"))
}

func TestKeysOfTypesWithOneSpellingAreNotAskedForIt(t *testing.T) {
	key := func(columns ...row.Column) bool {
		l := row.Layout{}
		for i, c := range columns {
			c.Name = string(rune('a' + i))
			l.Columns, l.Key = append(l.Columns, c), append(l.Key, c.Name)
		}
		return l.Respells()
	}
	require.False(t, key(row.Column{Type: "bigint"}, row.Column{Type: "uuid"}, row.Column{Type: "text"}))
	require.True(t, key(row.Column{Type: "bigint"}, row.Column{Type: "numeric"}))
	require.True(t, key(row.Column{Type: "text", Collation: `"public"."without_case"`}))
	require.True(t, key(row.Column{Type: "public.citext"}))
}
