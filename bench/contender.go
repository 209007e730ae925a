package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// contender is a way of bringing a workload's rows to the receiver, whose table is there with its primary key.
type contender struct {
	name      string
	onlyEmpty bool // it fails where the receiver holds rows
	copy      func(context.Context, *bench, workload) error
}

// missing says that a contender cannot run on this machine, and why.
type missing string

func (m missing) Error() string { return string(m) }

const floorName = "COPY to COPY (the floor)"

var contenders = []contender{
	{floorName, true, func(ctx context.Context, b *bench, w workload) error {
		return b.pipe(ctx, fmt.Sprintf("SELECT * FROM %s ORDER BY %s", w.name, w.keys()), w.name)
	}},
	{"COPY and upsert", false, upsert},
	{"logical replication, initial sync", true, subscribe},
	{"pgcopydb", true, pgcopydb},
}

// contest runs every contender on a workload in turn, round after round, for every holding of the receiver.
func (b *bench) contest(ctx context.Context, w workload) error {
	if err := b.table(ctx, w); err != nil {
		return err
	}
	out := map[string]bool{}
	for round := range b.rounds {
		for _, h := range []holding{empty, half, full} {
			group := fmt.Sprintf("%s, receiver %s", w.name, h)
			for _, c := range contenders {
				if out[c.name] || c.onlyEmpty && h != empty {
					continue
				}
				took, err := b.timed(ctx, w, h, c)
				if err != nil && (c.name == floorName || ctx.Err() != nil) {
					return fmt.Errorf("%s, %s: %w", group, c.name, err)
				}
				if err != nil {
					out[c.name] = true
					b.fails(group, c.name, err)
					continue
				}
				b.report.took(group, c.name, took)
				b.say("round %d, %s, %s: %.2f s", round+1, group, c.name, took.Seconds())
			}
			// It takes minutes to set up and to run: of one workload only.
			if h == empty && w.name == orders.name && !b.quick && !out[bucardoCopy] {
				if err := b.bucardo(ctx, w, group); err != nil {
					out[bucardoCopy] = true
					b.fails(group, bucardoCopy, err)
				}
			}
			if err := b.ours(ctx, w, h, group); err != nil {
				return fmt.Errorf("%s, Backfill: %w", group, err)
			}
		}
	}
	return nil
}

// fails notes that a contender cannot be measured here: others still can.
func (b *bench) fails(group, name string, err error) {
	b.say("%s, %s: %v", group, name, err)
	var why missing
	if !errors.As(err, &why) {
		why = "it failed, as the output says"
	}
	b.report.absent(group, name, string(why))
}

// timed runs one contender and checks that the rows have arrived.
func (b *bench) timed(ctx context.Context, w workload, h holding, c contender) (time.Duration, error) {
	if err := errors.Join(b.hold(ctx, w, h), b.settle(ctx)); err != nil {
		return 0, err
	}
	began := time.Now()
	if err := c.copy(ctx, b, w); err != nil {
		return 0, err
	}
	took := time.Since(began)
	return took, b.arrived(ctx, w)
}

// arrived checks that the receiver holds every row, with no old value left.
func (b *bench) arrived(ctx context.Context, w workload) error {
	var rows, old int64
	if err := b.receiver.QueryRow(ctx, fmt.Sprintf(`SELECT count(*), count(*) FILTER (WHERE %s = %s) FROM %s`, w.stale, w.old, w.name)).Scan(&rows, &old); err != nil {
		return err
	}
	if want := b.rows / w.part; rows != want || old > 0 {
		return fmt.Errorf("the receiver holds %d rows of %d, %d of them old", rows, want, old)
	}
	return nil
}

// upsert copies into a temporary table and from there, in one statement.
func upsert(ctx context.Context, b *bench, w workload) error {
	columns, err := b.columns(ctx, w)
	if err != nil {
		return err
	}
	var set []string
	for _, c := range columns {
		if !slices.Contains(w.key, c) {
			set = append(set, c+" = excluded."+c)
		}
	}
	conn, err := b.receiver.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, "CREATE TEMP TABLE incoming (LIKE "+w.name+") ON COMMIT DROP"); err != nil {
		return err
	}
	if err := b.pipeInto(ctx, fmt.Sprintf("SELECT * FROM %s ORDER BY %s", w.name, w.keys()), conn.Conn(), "pg_temp.incoming"); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, fmt.Sprintf("INSERT INTO %s SELECT * FROM pg_temp.incoming ON CONFLICT (%s) DO UPDATE SET %s", w.name, w.keys(), strings.Join(set, ", "))); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// subscribe waits for the initial sync of a subscription of its own.
func subscribe(ctx context.Context, b *bench, w workload) (err error) {
	if err := b.source.exec(ctx, "CREATE PUBLICATION bench FOR TABLE "+w.name); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.source.exec(context.WithoutCancel(ctx), "DROP PUBLICATION bench")) }()
	if err := b.receiver.exec(ctx, fmt.Sprintf("CREATE SUBSCRIPTION bench CONNECTION '%s' PUBLICATION bench", b.source.dsn)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.receiver.exec(context.WithoutCancel(ctx), "DROP SUBSCRIPTION bench")) }()
	return await(ctx, "the subscription's initial sync", func() (synced bool, err error) {
		err = b.receiver.QueryRow(ctx, `SELECT count(*) > 0 AND bool_and(srsubstate IN ('r', 's')) FROM pg_subscription_rel`).Scan(&synced)
		return synced, err
	})
}

// pgcopydb copies the rows of the one table; the table itself is there.
func pgcopydb(ctx context.Context, b *bench, w workload) error {
	program, err := exec.LookPath("pgcopydb")
	if err != nil {
		return missing("not installed (Debian: apt-get install pgcopydb)")
	}
	dir := filepath.Join(b.dir, "pgcopydb")
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return err
	}
	filter := filepath.Join(dir, "filter.ini")
	if err := os.WriteFile(filter, []byte("[include-only-table]\npublic."+w.name+"\n"), 0o600); err != nil {
		return err
	}
	return command(ctx, program, "copy", "table-data", "--source", b.source.dsn, "--target", b.receiver.dsn, "--dir", filepath.Join(dir, "work"), "--filters", filter)
}

func command(ctx context.Context, program string, args ...string) error {
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %.2000s", filepath.Base(program), err, out)
	}
	return nil
}
