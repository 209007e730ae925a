package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

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

// PrintUsers lists people for people.
func PrintUsers(out io.Writer, users []control.User) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	p := printer{w}
	p.printf("NAME\tROLE\tMADE\tLAST SIGNED IN\n")
	for _, u := range users {
		p.printf("%s\t%s\t%s\t%s\n", u.Name, u.Rights, minute(&u.CreatedAt, ""), minute(u.SignedInAt, "never"))
	}
	return w.Flush()
}

// ReadPassword asks for a password twice on a terminal without showing it, or else
// reads one line. A flag or the environment would show it to others.
func ReadPassword(in *os.File, prompt io.Writer, name string) (string, error) {
	fd := int(in.Fd())
	if !term.IsTerminal(fd) {
		line, err := bufio.NewReader(io.LimitReader(in, 4096)).ReadString('\n')
		if err != nil && (err != io.EOF || line == "") {
			return "", usagef("no password on standard input: give it as one line")
		}
		if line = strings.TrimRight(line, "\r\n"); line == "" {
			return "", usagef("the password is empty")
		}
		return line, nil
	}
	var given [2]string
	for i, ask := range []string{"Password of " + name + ": ", "The same again: "} {
		if _, err := fmt.Fprint(prompt, ask); err != nil {
			return "", err
		}
		b, err := term.ReadPassword(fd)
		fmt.Fprintln(prompt)
		if err != nil {
			return "", fmt.Errorf("read the password: %w", err)
		}
		given[i] = string(b)
	}
	if given[0] != given[1] {
		return "", errors.New("the two passwords differ: nothing was changed")
	}
	if given[0] == "" {
		return "", usagef("the password is empty")
	}
	return given[0], nil
}
