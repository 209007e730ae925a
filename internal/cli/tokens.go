package cli

import (
	"io"
	"text/tabwriter"

	"backfill/internal/control"
)

// PrintTokens lists tokens for people.
func PrintTokens(out io.Writer, tokens []control.Token) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	p := printer{w}
	p.printf("NAME\tROLE\tMADE\tLAST USED\tSTATE\n")
	for _, t := range tokens {
		used, state := "never", "valid"
		if t.UsedAt != nil {
			used = t.UsedAt.Format("2006-01-02 15:04")
		}
		if t.RevokedAt != nil {
			state = "revoked " + t.RevokedAt.Format("2006-01-02 15:04")
		}
		p.printf("%s\t%s\t%s\t%s\t%s\n", t.Name, t.Role, t.CreatedAt.Format("2006-01-02 15:04"), used, state)
	}
	return w.Flush()
}
