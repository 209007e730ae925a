package activities

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// Everything that an agent tells of its tables goes on beside pushes, and beside itself:
// after a restart the one before may still be at it. None of it ends in a deadlock.
func TestReportsAndPushesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	const tables = 12
	schema, names := "", []string{}
	for n := range tables {
		schema += fmt.Sprintf("CREATE TABLE t%d (id int PRIMARY KEY, note text);", n)
		names = append(names, fmt.Sprintf("public.t%d", n))
	}
	w := worldOf(testkit.NewPair(t, schema, names...), Settings{})
	end := time.Now().Add(4 * time.Second)
	var all sync.WaitGroup
	for n := range 2 {
		a := w.agent(testkit.Source)
		loop := func(step func(round int) error) {
			all.Go(func() {
				for round := 0; time.Now().Before(end); round++ {
					if err := step(round); err != nil {
						t.Errorf("process %d, round %d: %v", n, round, err)
						return
					}
				}
			})
		}
		loop(func(round int) error { return a.CountNow(t.Context()) })
		loop(func(round int) error {
			var waiting []control.Backlog
			for i, name := range names {
				waiting = append(waiting, control.Backlog{Table: name, Rows: int64(round + i), First: int64(round)})
			}
			return w.Store.ReportOutbox(t.Context(), testkit.Site, testkit.Source, waiting)
		})
		loop(func(round int) error {
			seen := map[int32][]backfill.Sequence{}
			for _, table := range w.Tables {
				seen[table.ID] = []backfill.Sequence{{Column: "id", Next: int64(round)}}
			}
			return w.Store.ReportSequences(t.Context(), testkit.Source, seen)
		})
	}
	writer := testkit.Session(t, w.SourceDSN)
	pusher := w.agent(testkit.Source)
	all.Go(func() {
		for round := 0; time.Now().Before(end); round++ {
			for i := range names {
				testkit.Exec(t, writer, fmt.Sprintf(`INSERT INTO %s VALUES ($1, 'x')`, names[(i*5+round)%tables]), round)
			}
			if _, err := pusher.push(t.Context()); err != nil {
				t.Errorf("push, round %d: %v", round, err)
				return
			}
		}
	})
	all.Wait()
	require.Zero(t, testkit.Value[int64](t, w.C, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`))
}
