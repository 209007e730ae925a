// Package cli is the `backfill` command as people and scripts meet it: the commands
// that talk to the HTTP API, and the way every command ends. main.go adds the
// commands that run a part of the system.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/alecthomas/kong"
	"golang.org/x/term"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// Exit statuses, the same for every command.
const (
	OK      = 0
	Failed  = 1 // it was tried and did not work
	Misused = 2 // the command line, or what it asks for, makes no sense
	Refused = 3 // a condition does not hold, or the account may not
)

// Streams are where a command writes.
type Streams struct {
	Out, Err io.Writer
	terminal *os.File // Out when that is a terminal
}

// width is the terminal's now, 0 when there is none. Asked each time, because
// people resize their windows.
func (s *Streams) width() int {
	if s.terminal == nil {
		return 0
	}
	w, _, err := term.GetSize(int(s.terminal.Fd()))
	if err != nil || w <= 0 {
		return 80
	}
	return w
}

// Run parses args by a grammar, a pointer to a struct of kong commands, runs the
// command that was chosen and returns the exit status. A Run method may take a
// context.Context, an io.Writer (standard output) and a *Streams.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer, grammar any, options ...kong.Option) (status int) {
	out := &output{w: stdout}
	streams := &Streams{Out: out, Err: stderr}
	if f, ok := stdout.(*os.File); ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb" {
		streams.terminal = f
	}
	if len(args) == 0 {
		// Whoever asks for nothing gets the help, but did not get anything done.
		args, out.w = []string{"--help"}, stderr
		defer func() { status = Misused }()
	}
	// kong prints its help and exits from inside of Parse.
	type exit int
	defer func() {
		switch r := recover().(type) {
		case nil:
		case exit:
			status = int(r)
		default:
			panic(r)
		}
	}()
	for i, arg := range args {
		if !utf8.ValidString(arg) {
			report(stderr, fmt.Errorf("argument %d is not UTF-8: no text of the API or of PostgreSQL holds it", i+1))
			return Misused
		}
	}
	parser, err := kong.New(grammar, append([]kong.Option{
		kong.Name("backfill"),
		kong.Writers(out, stderr),
		kong.Exit(func(code int) { panic(exit(code)) }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.BindTo(out, (*io.Writer)(nil)),
		kong.Bind(streams),
	}, options...)...)
	if err != nil {
		panic(err) // the grammar itself is wrong
	}
	k, err := parser.Parse(args)
	if err == nil {
		err = k.Run()
	}
	if err == nil {
		err = out.err
	}
	if err == nil {
		return OK
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = errors.New("interrupted")
	}
	report(stderr, err)
	return statusOf(err)
}

// output remembers that writing failed: what a full disk cut short is no success.
type output struct {
	w   io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	if err != nil && o.err == nil {
		o.err = fmt.Errorf("write the output: %w", err)
	}
	return n, err
}

// usageError is a wish that cannot be meant.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

func statusOf(err error) int {
	var usage *usageError
	var parse *kong.ParseError
	var p *client.Problem
	var d *backfill.Error
	switch {
	case err == nil:
		return OK
	case errors.As(err, &usage), errors.As(err, &parse):
		return Misused
	case errors.As(err, &p):
		switch {
		case p.Status == http.StatusBadRequest, p.Type == client.ProblemTypeInvalid:
			return Misused
		case p.Status == http.StatusConflict, p.Status == http.StatusUnprocessableEntity, p.Status == http.StatusForbidden:
			return Refused
		}
	case errors.As(err, &d):
		switch d.Code {
		case backfill.Invalid:
			return Misused
		case backfill.Refused, backfill.Conflict, backfill.Forbidden:
			return Refused
		}
	}
	return Failed
}

// report prints what went wrong on one line, and under it the parts that failed.
func report(w io.Writer, err error) {
	message := err.Error()
	var lost *client.Unreachable
	if errors.As(err, &lost) {
		message += ": is it running there? backfill dev or backfill api starts it, --api gives another address"
	}
	line := func(format, s string) {
		s = strings.ReplaceAll(strings.TrimSpace(s), "\n", "; ")
		fmt.Fprintf(w, format+"\n", safe(redact(s)))
	}
	line("backfill: %s", message)
	var p *client.Problem
	var d *backfill.Error
	var fields []backfill.FieldError
	switch {
	case errors.As(err, &p):
		for _, f := range p.Errors {
			fields = append(fields, backfill.FieldError{Field: plain(f.Field), Message: f.Message})
		}
	case errors.As(err, &d):
		fields = d.Fields
	}
	for _, f := range fields {
		text := f.Message
		if f.Field != "" {
			text = f.Field + ": " + f.Message
		}
		// The first is in the message, as a rule.
		if !strings.Contains(message, f.Message) {
			line("  %s", text)
		}
	}
	var parse *kong.ParseError
	switch {
	case errors.As(err, &parse):
		line("  see %s --help", command(parse))
	case p != nil && p.Request != nil:
		line("  see backfill show %s", strconv.FormatInt(*p.Request, 10))
	case p != nil && p.Status == http.StatusUnauthorized:
		line("  %s", "give a valid token with --token or BACKFILL_TOKEN: backfill token create makes one")
	}
}

// command is as much of the command as was understood.
func command(parse *kong.ParseError) string {
	if parse.Context == nil {
		return "backfill"
	}
	words := []string{}
	for n := parse.Context.Selected(); n != nil; n = n.Parent {
		words = append(words, n.Name)
	}
	if len(words) == 0 {
		return "backfill"
	}
	slices.Reverse(words)
	return strings.Join(words, " ")
}

// secrets are what must not be repeated from a command line that went wrong: the
// passwords of connection strings, and tokens.
var secrets = regexp.MustCompile(`(?i)(://[^\s:@/"]*:)[^\s"]*(@)|(password\s*=\s*)('[^']*'|[^\s&"']+)|\bbf_[\w-]{20,}`)

func redact(s string) string { return secrets.ReplaceAllString(s, "$1$3…$2") }
