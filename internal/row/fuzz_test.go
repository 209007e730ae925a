package row

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// Two layouts that differ never have the same fingerprint: rows of one would be
// read as rows of the other.
func FuzzFingerprint(f *testing.F) {
	add := func(a, b Layout) {
		x, err := json.Marshal(a)
		require.NoError(f, err)
		y, err := json.Marshal(b)
		require.NoError(f, err)
		f.Add(string(x), string(y))
	}
	one := Layout{Columns: []Column{{Name: "id", Type: "bigint", Declared: "bigint"}, {Name: "v", Type: "text", Declared: "text"}}, Key: []string{"id"}}
	other := one
	other.Key = []string{"v"}
	add(one, other)
	add(Layout{Columns: []Column{{Name: "a,b"}}}, Layout{Columns: []Column{{Name: "a"}, {Name: "b"}}})
	add(Layout{Columns: []Column{{Name: "e", Labels: []string{"x", "y"}}}}, Layout{Columns: []Column{{Name: "e", Labels: []string{"x\",\"y"}}}})
	add(Layout{Columns: []Column{{Name: "\u2028<"}}}, Layout{Columns: []Column{{Name: `\u2028<`}}})
	add(Layout{Key: []string{"a", ""}}, Layout{Key: []string{"a"}})
	add(Layout{Columns: []Column{{Name: "f", Function: true}}}, Layout{Columns: []Column{{Name: "f", AlwaysIdentity: true}}})
	f.Fuzz(func(t *testing.T, x, y string) {
		var a, b Layout
		if json.Unmarshal([]byte(x), &a) != nil || json.Unmarshal([]byte(y), &b) != nil {
			t.Skip()
		}
		normalise(&a)
		normalise(&b)
		require.Equal(t, reflect.DeepEqual(a, b), a.Fingerprint() == b.Fingerprint(), "%+v and %+v", a, b)
		// It is that of what was recorded, too.
		raw, err := json.Marshal(a)
		require.NoError(t, err)
		var again Layout
		require.NoError(t, json.Unmarshal(raw, &again))
		require.Equal(t, a.Fingerprint(), again.Fingerprint())
		names := map[string]bool{}
		for _, c := range a.Columns {
			names[c.Name] = true
		}
		if len(names) == len(a.Columns) { // as in every table
			require.Empty(t, a.Difference(&again))
		}
	})
}

// normalise makes one of what a layout does not tell apart: no list and an empty one.
func normalise(l *Layout) {
	for i := range l.Columns {
		c := &l.Columns[i]
		if len(c.Labels) == 0 {
			c.Labels = nil
		}
		if len(c.Comparisons) == 0 {
			c.Comparisons = nil
		}
	}
	if len(l.Columns) == 0 {
		l.Columns = nil
	}
	if len(l.Key) == 0 {
		l.Key = nil
	}
}

// A quoted text reads back as what it was, and nothing of it ends up outside.
func FuzzQuoting(f *testing.F) {
	for _, s := range []string{"", "plain", "'", "''", `\'`, `"`, `""`, "a\nb", `'; DROP TABLE x; --`, "é表🙂"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
			t.Skip() // no text of PostgreSQL's
		}
		require.Equal(t, s, unquote(t, Literal(s), '\''))
		require.Equal(t, s, unquote(t, Ident(s), '"'))
	})
}

// unquote reads SQL's quoting by its rule.
func unquote(t *testing.T, sql string, quote byte) string {
	t.Helper()
	require.True(t, len(sql) >= 2 && sql[0] == quote && sql[len(sql)-1] == quote, sql)
	var b strings.Builder
	for i := 1; i < len(sql)-1; i++ {
		if sql[i] == quote {
			i++
			require.True(t, i < len(sql)-1 && sql[i] == quote, "a quote that ends it: %s", sql)
		}
		b.WriteByte(sql[i])
	}
	return b.String()
}
