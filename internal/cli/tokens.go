package cli

import (
	"io"
	"text/tabwriter"
	"time"

	"backfill/internal/control"
)

// PrintTokens lists tokens for people.
func PrintTokens(out io.Writer, tokens []control.Token) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	p := printer{w}
	p.printf("NAME\tROLE\tMADE\tLAST USED\tSTATE\n")
	for _, t := range tokens {
		state := "valid"
		switch {
		case t.RevokedAt != nil:
			state = "revoked " + minute(t.RevokedAt, "")
		case t.ExpiresAt != nil && t.ExpiresAt.Before(time.Now()):
			state = "expired " + minute(t.ExpiresAt, "")
		case t.ExpiresAt != nil:
			state = "valid until " + minute(t.ExpiresAt, "")
		}
		p.printf("%s\t%s\t%s\t%s\t%s\n", t.Name, t.Rights, minute(&t.CreatedAt, ""), minute(t.UsedAt, "never"), state)
	}
	return w.Flush()
}

func minute(t *time.Time, none string) string {
	if t == nil {
		return none
	}
	return t.Format("2006-01-02 15:04")
}
