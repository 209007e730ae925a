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
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	err := run(os.Args[1:], os.Stdin, os.Stdout)
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "backfill-temporal:", err)
	if errors.As(err, new(usageError)) {
		os.Exit(2)
	}
	os.Exit(1)
}

// usageError is a command line that makes no sense.
type usageError struct{ error }

// run serves until SIGINT, SIGTERM or, when asked to, the end of stdin. A second signal ends it at once.
func run(args []string, stdin io.Reader, stdout io.Writer) error {
	var opts options
	flags := flag.NewFlagSet("backfill-temporal", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&opts.db, "db", "", "SQLite `file` that keeps everything; created when missing (required)")
	flags.StringVar(&opts.listen, "listen", "127.0.0.1:7233", "`host:port` of the gRPC frontend; port 0 takes a free one")
	flags.StringVar(&opts.ui, "ui", "127.0.0.1:8233", "`host:port` of the web console; empty for none, port 0 takes a free one")
	flags.StringVar(&opts.logLevel, "log-level", "warn", "lowest `level` logged to stderr: debug, info, warn or error")
	exitWithStdin := flags.Bool("exit-with-stdin", false, "stop when stdin ends, so that a parent that was killed leaves nothing behind")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintln(stdout, "usage: backfill-temporal --db FILE [flags]")
		flags.SetOutput(stdout)
		flags.PrintDefaults()
		return nil
	case err != nil:
		return usageError{fmt.Errorf("%w; see --help", err)}
	case flags.NArg() > 0:
		return usageError{fmt.Errorf("unexpected argument %q; everything is a flag, see --help", flags.Arg(0))}
	case opts.db == "":
		return usageError{errors.New("no database file; name one with --db FILE")}
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
	err = registerSearchAttributes(ctx, srv.hostPort)
	if err == nil && srv.console != "" {
		err = retry(ctx, func() error { return connect(ctx, srv.console) })
	}
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
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

// connect reports whether something listens.
func connect(ctx context.Context, hostPort string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", hostPort)
	if err != nil {
		return err
	}
	return conn.Close()
}
