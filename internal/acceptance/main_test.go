//go:build linux

package acceptance

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"backfill/internal/local"
)

var (
	// raceEnabled says that this test runs under the race detector, and so does the program.
	raceEnabled bool
	// program is the executable under test.
	program string
	// cluster holds the databases of all sites of the tests.
	cluster *local.Postgres
)

// ordersRows is the number of orders on side a; two fifths of them are on b.
var ordersRows = 50_000

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if testing.Short() {
		fmt.Println("not with -short: these tests start servers")
		return 0
	}
	if raceEnabled {
		ordersRows = 30_000
	}
	// Some of these tests wait for leases to run out, and do nothing meanwhile.
	if err := flag.Set("test.parallel", strconv.Itoa(runtime.GOMAXPROCS(0)+1)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	err := prepare(func(dir string) error {
		if text := os.Getenv("BACKFILL_ACCEPTANCE_ROWS"); text != "" {
			n, err := strconv.Atoi(text)
			if err != nil || n < 10_000 {
				return fmt.Errorf("BACKFILL_ACCEPTANCE_ROWS=%s: give a number from 10000 on", text)
			}
			ordersRows = n
		}
		if program = os.Getenv("BACKFILL_BIN"); program == "" {
			program = filepath.Join(dir, "backfill")
			if err := build(program); err != nil {
				return err
			}
		}
		var err error
		cluster, err = local.StartPostgres(context.Background(), local.PostgresOptions{Dir: filepath.Join(dir, "postgres"), Fast: true,
			Settings: map[string]string{"shared_buffers": "256MB", "max_wal_size": "4GB"}})
		return err
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer cleanup()
	return m.Run()
}

// cleanup ends what prepare has begun.
var cleanup = func() {}

func prepare(steps func(dir string) error) error {
	dir, err := os.MkdirTemp("", "backfill-acceptance-")
	if err != nil {
		return err
	}
	cleanup = func() {
		if cluster != nil {
			_ = cluster.Kill()
		}
		_ = os.RemoveAll(dir)
	}
	if err := steps(dir); err != nil {
		cleanup()
		return err
	}
	return nil
}

func build(to string) error {
	// With the tag it can be made to kill itself, and is otherwise the program it is.
	args := []string{"build", "-tags", "faults", "-o", to}
	if raceEnabled {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, "backfill")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("go build backfill: %w\n%s", err, out)
	}
	return nil
}
