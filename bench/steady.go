package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"backfill/internal/local"
)

// The steady load: updates of random rows of the very table that is walked.
const (
	steadyRate    = 300 // transactions a second
	gatedSessions = 1   // of others that may run a statement on the source
	gatedRows     = 20_000
)

// steady measures the latency of an application's transactions on the source while twice as many rows as orders has are
// walked: without a backfill, beside one at full speed, and beside one behind gates.
func (b *bench) steady(ctx context.Context) error {
	w := orders
	w.name = "busy"
	rows := 2 * b.rows
	if err := errors.Join(b.source.exec(ctx, w.create(), w.fill(rows), "VACUUM ANALYZE busy"), b.receiver.exec(ctx, w.create()), b.product.capture(ctx, w.name)); err != nil {
		return err
	}
	section := fmt.Sprintf("%d transactions a second on the source while %d rows are walked", steadyRate, rows)
	began := time.Now()
	alone, err := b.pgbench(ctx, w, rows, func() (bool, error) { return time.Since(began).Seconds() > float64(b.duration), nil })
	if err != nil {
		return err
	}
	b.report.figure(section, "no backfill", spread(alone))
	walk := func(name string) error {
		if err := b.ready(ctx, w, empty); err != nil {
			return err
		}
		r, err := b.product.request(ctx, w.name, "full")
		if err != nil {
			return err
		}
		took, err := b.pgbench(ctx, w, rows, func() (bool, error) {
			err := b.product.call(ctx, http.MethodGet, fmt.Sprintf("/backfills/%d", r.ID), nil, &r)
			return r.WalkedAt != nil, errors.Join(err, b.product.alive())
		})
		if err != nil {
			return err
		}
		if r, err = b.product.reviewable(ctx, r.ID); err != nil {
			return err
		}
		p99, before := quantile(took, 0.99), quantile(alone, 0.99)
		b.report.figure(section, name, fmt.Sprintf("%s; p99 ×%.2f; walked in %.0f s", spread(took), p99.Seconds()/before.Seconds(), r.WalkedAt.Sub(*r.StartedAt).Seconds()))
		return b.product.reject(ctx, r)
	}
	if err := walk("beside a backfill at full speed"); err != nil {
		return err
	}
	gates := "/sites/" + site + "/gates"
	if err := b.product.call(ctx, http.MethodPut, gates, map[string]any{"gates": []map[string]any{
		{"name": "load", "side": source, "kind": "sessions", "limit": gatedSessions},
		{"name": "rows", "side": source, "kind": "rows_per_second", "limit": gatedRows},
	}}, nil); err != nil {
		return err
	}
	err = walk(fmt.Sprintf("beside a backfill behind gates: at most %d running session, %d rows a second", gatedSessions, gatedRows))
	return errors.Join(err, b.product.call(ctx, http.MethodPut, gates, map[string]any{"gates": []any{}}, nil), b.product.clear(ctx))
}

// pgbench keeps the steady load up until done, and returns how long each transaction took from when it was due: what comes
// after done is left out.
func (b *bench) pgbench(ctx context.Context, w workload, rows int64, done func() (bool, error)) (took []time.Duration, err error) {
	bin, err := local.FindPostgres()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(b.dir, "pgbench-")
	if err != nil {
		return nil, err
	}
	script := filepath.Join(dir, "script")
	if err := os.WriteFile(script, fmt.Appendf(nil, "\\set id random(1, %d)\nUPDATE %s SET paid = NOT paid WHERE id = :id;\n", rows, w.name), 0o600); err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	began := time.Now()
	// pgbench writes the end of its log when it ends: so the load comes in short turns, none of which is cut off.
	ended := make(chan error, 1)
	go func() {
		for turn := 0; running.Err() == nil; turn++ {
			if err := command(ctx, filepath.Join(bin, "pgbench"), "-n", "-R", fmt.Sprint(steadyRate), "-c", "8", "-j", "2", "-T", "5", "-M", "prepared",
				"-l", "--log-prefix", filepath.Join(dir, fmt.Sprintf("turn%d", turn)), "-f", script, b.source.dsn); err != nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	err = await(ctx, "the measurement under load", func() (bool, error) {
		select {
		case err := <-ended:
			ended <- nil
			return true, err
		default:
			return done()
		}
	})
	until := time.Now()
	stop()
	if err := errors.Join(err, <-ended); err != nil {
		return nil, err
	}
	logs, err := filepath.Glob(filepath.Join(dir, "turn*"))
	if err != nil {
		return nil, err
	}
	for _, log := range logs {
		if took, err = latenciesOf(log, began, until, took); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// latenciesOf adds what pgbench has logged of the transactions that ended within a time.
func latenciesOf(path string, from, until time.Time, took []time.Duration) ([]time.Duration, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var client, number, latency, script, seconds, micros int64
		if _, err := fmt.Sscan(lines.Text(), &client, &number, &latency, &script, &seconds, &micros); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", strings.TrimPrefix(filepath.Ext(path), "."), lines.Text(), err)
		}
		if at := time.UnixMicro(seconds*1e6 + micros); at.After(from) && at.Before(until) {
			took = append(took, time.Duration(latency)*time.Microsecond)
		}
	}
	return took, lines.Err()
}
