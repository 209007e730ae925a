package row

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAnExpressionCannotEndTheStatementItIsPutInto(t *testing.T) {
	for _, good := range []string{
		"name", `"a;b"`, "split_part(name, ' ', 1)", "coalesce(a, b)[1]", "'it''s'", `E'it\'s; )'`, `name ~ '\d+)'`, "$$a ; ( b$$", "$x$ $$ ; $x$", "date'2020-01-01'", "(a).b", "'--'",
	} {
		require.NoError(t, CheckExpression(good), good)
	}
	for _, bad := range []string{
		"", " ", "a; DROP TABLE x", "a) STORED, ADD COLUMN b int DEFAULT (1", "(a", "a]", "(a]", "'a", `"a`, "a -- b", "a /* b */", `E'a\'`, "$$a", "$x$a$$", `1E'\'' ) '`, "E'a'\n'\\'' ) E'a'\n'\\''", "'a' 'b'", "1$$'$$ ) '", "a\x00",
	} {
		require.Error(t, CheckExpression(bad), bad)
	}
}

// Whatever is accepted stays within the brackets it is put into, as PostgreSQL reads it:
// a second reader, made the other way round, that drops what is quoted first.
func FuzzExpression(f *testing.F) {
	for _, s := range []string{"a", "(a)", "'a'')'", `E'\')'`, "$$)$$", `"a"")"`, "a;b", "--", "/*", "date'x'", `xe'\'`, "U&'\\0041)'", "a$$b", "$1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if CheckExpression(s) != nil {
			return
		}
		depth, quote := 0, ""
		for i := 0; i < len(s); {
			rest := s[i:]
			switch {
			case quote == "E'" && rest[0] == '\\' && len(rest) > 1:
				i += 2
			case (quote == "'" || quote == "E'") && strings.HasPrefix(rest, "''"), quote == `"` && strings.HasPrefix(rest, `""`):
				i += 2
			case quote == "'" && rest[0] == '\'', quote == "E'" && rest[0] == '\'', quote == `"` && rest[0] == '"':
				quote = ""
				i++
			case quote != "" && quote[0] == '$' && strings.HasPrefix(rest, quote):
				i += len(quote)
				quote = ""
			case quote != "":
				i++
			case rest[0] == '\'' && i > 0 && strings.ContainsRune("eE", rune(s[i-1])) && (i == 1 || !partOfName(s[i-2])):
				quote = "E'"
				i++
			case rest[0] == '\'' || rest[0] == '"':
				quote = rest[:1]
				i++
			case rest[0] == '$' && dollarTag(s, i) != "":
				quote = dollarTag(s, i)
				i += len(quote)
			default:
				require.NotEqual(t, byte(';'), rest[0], s)
				require.False(t, strings.HasPrefix(rest, "--") || strings.HasPrefix(rest, "/*"), s)
				switch rest[0] {
				case '(', '[':
					depth++
				case ')', ']':
					depth--
				}
				require.GreaterOrEqual(t, depth, 0, s)
				i++
			}
		}
		require.Zero(t, depth, s)
		require.Empty(t, quote, s)
	})
}
