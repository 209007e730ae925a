// Command bench measures Backfill beside other ways of copying a table from one PostgreSQL to another. It starts servers of
// its own, with default durability, runs every contender on the same rows in turn, round after round, and writes medians
// and their ratios to the floor to a file. `make bench` runs it; -only runs parts of it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
)

type options struct {
	rows     int64  // of the workload orders; the others follow
	rounds   int    // of which medians are taken
	only     string // names of parts, separated by commas; "" for all
	program  string // the backfill under test
	out      string // the file results are written to
	quick    bool   // without Bucardo
	explain  bool   // print where the servers' time went after each backfill
	dir      string // for the servers' data; "" for a temporary one
	duration int    // seconds of what is measured for a time
}

func main() {
	var o options
	flag.Int64Var(&o.rows, "rows", 1_000_000, "rows of the workload orders; the others follow")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds, of which medians are taken")
	flag.StringVar(&o.only, "only", "", "parts to run, separated by commas: "+strings.Join(names(), ", ")+"; default: all")
	flag.StringVar(&o.program, "program", "bin/backfill", "the backfill under test")
	flag.StringVar(&o.out, "out", "bench/results.md", "file the results are written to")
	flag.StringVar(&o.dir, "dir", "", "directory for the servers' data; default: a temporary one, removed at the end")
	flag.IntVar(&o.duration, "duration", 30, "seconds of each part that is measured for a time")
	flag.BoolVar(&o.quick, "quick", false, "leave out Bucardo, which takes minutes")
	flag.BoolVar(&o.explain, "explain", false, "print where the servers' time went after each backfill, and log the plans of slow statements: DIR/control.log and the others")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// part is something that can be run by itself.
type part struct {
	name string
	run  func(*bench, context.Context) error
}

// parts in the order they are run.
func parts() (all []part) {
	for _, w := range workloads {
		all = append(all, part{w.name, func(b *bench, ctx context.Context) error { return b.contest(ctx, w) }})
	}
	return append(all,
		part{"live", (*bench).live}, part{"changes", (*bench).changes}, part{"trigger", (*bench).trigger}, part{"proof", (*bench).proof},
		part{"review", (*bench).review}, part{"idle", (*bench).idle}, part{"steady", (*bench).steady}, part{"alternatives", (*bench).alternatives})
}

func names() (all []string) {
	for _, p := range parts() {
		all = append(all, p.name)
	}
	return all
}

func run(ctx context.Context, o options) (err error) {
	wanted := names()
	if o.only != "" {
		wanted = strings.Split(o.only, ",")
	}
	for _, name := range wanted {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("no part is called %q: use %s", name, strings.Join(names(), ", "))
		}
	}
	b, err := start(ctx, o)
	defer func() { err = errors.Join(err, b.stop()) }()
	if err != nil {
		return err
	}
	for _, p := range parts() {
		if !slices.Contains(wanted, p.name) || ctx.Err() != nil {
			continue
		}
		b.say("%s", p.name)
		if e := p.run(b, ctx); e != nil {
			e = fmt.Errorf("%s: %w", p.name, e)
			b.say("%v", e)
			err = errors.Join(err, e)
		}
		// What was measured stays, whatever happens to the parts that follow.
		err = errors.Join(err, b.report.write(o.out))
	}
	return errors.Join(err, context.Cause(ctx))
}
