// Command backfill-temporal is Temporal's server for one machine: all of its services, the namespace "default" kept in
// one SQLite file, and the web console, in one process. `backfill dev` and the tests start it; nothing keeps you from
// running it by hand. It has no authentication, so leave it on the loopback address.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	err := run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	case errors.As(err, new(usageError)):
		os.Exit(2) // the flag package has said why
	default:
		fmt.Fprintln(os.Stderr, "backfill-temporal:", err)
		os.Exit(1)
	}
}

// usageError is a command line that cannot be parsed.
type usageError struct{ error }

// run serves until SIGINT, SIGTERM or, when asked to, the end of stdin. A second signal ends it at once.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	var opts options
	flags := flag.NewFlagSet("backfill-temporal", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&opts.db, "db", "", "SQLite `file` that keeps everything; created when missing (required)")
	flags.StringVar(&opts.listen, "listen", "127.0.0.1:7233", "`host:port` of the gRPC frontend; port 0 takes a free one")
	flags.StringVar(&opts.ui, "ui", "127.0.0.1:8233", "`host:port` of the web console; empty for none, port 0 takes a free one")
	flags.StringVar(&opts.logLevel, "log-level", "warn", "lowest `level` logged to stderr: debug, info, warn or error")
	exitWithStdin := flags.Bool("exit-with-stdin", false, "stop when stdin ends, so that a parent that was killed leaves nothing behind")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return usageError{err}
	}
	if opts.db == "" {
		return errors.New("no database file; name one with --db FILE")
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; everything is a flag, see --help", flags.Arg(0))
	}

	ctx, release := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer release()
	context.AfterFunc(ctx, release)
	if *exitWithStdin {
		ctx = untilEOF(ctx, stdin)
	}

	srv, err := start(opts)
	if err != nil {
		return err
	}
	defer srv.stop(10 * time.Second)
	if err := registerSearchAttributes(ctx, srv.hostPort); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	fmt.Fprintln(stdout, srv)
	<-ctx.Done()
	return nil
}

// untilEOF returns a context that also ends when r does.
func untilEOF(ctx context.Context, r io.Reader) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, r)
	}()
	return ctx
}
