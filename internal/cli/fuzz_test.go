package cli

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

// What is given as --key reaches the API as JSON, and values that are not JSON as
// the texts they are.
func FuzzKeyFlag(f *testing.F) {
	for _, v := range []string{"", "1", "-007", `a"b`, "{", `{"id":1}`, `["x"]`, "[1,2]", " [1] ", "null", "\xff", "1e400", `[9007199254740993]`, `[null]`, `[[1]]`, `[1] [2]`, "ü,表"} {
		f.Add(v, "", false)
		f.Add(v, "second", true)
	}
	f.Fuzz(func(t *testing.T, first, second string, two bool) {
		values := []string{first}
		if two {
			values = append(values, second)
		}
		raw, err := keyJSON(values)
		if err != nil {
			require.Equal(t, Misused, statusOf(err))
			return
		}
		require.True(t, json.Valid(raw), "%s", raw)
		texts, err := keyValues(values)
		if err != nil {
			require.Equal(t, Misused, statusOf(err))
			return
		}
		if trimmed := strings.TrimSpace(first); two || !strings.HasPrefix(trimmed, "[") && !strings.HasPrefix(trimmed, "{") {
			for i := range values {
				require.Equal(t, values[i], texts[i])
			}
		}
	})
}

// What is printed cannot move a terminal's cursor, and holds no secret.
func FuzzPrinted(f *testing.F) {
	for _, s := range []string{"plain", "\x1b[31m", "a\nb", "\xff", "\u202e", "postgres://u:secret@h/d", "password=secret", "bf_0123456789abcdefghijklmnop"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, r := range safe(redact(s)) {
			require.False(t, unprintable(r), "%q", r)
		}
		require.LessOrEqual(t, columns(clip(safe(s), 20)), 20)
		if !strings.ContainsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || r == '"' }) { // as a URL has it
			require.NotContains(t, redact("postgres://u:"+s+"secret@h/d"), "secret@")
		}
	})
}
