package control_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

// A program works with a schema that is further than it knows as long as that says so,
// and with none that is behind.
func TestASchemaOfAnotherVersion(t *testing.T) {
	t.Parallel()
	dsn := testkit.DatabaseWith(t, "")
	done, err := control.Migrate(t.Context(), dsn)
	require.NoError(t, err)
	newest := done[len(done)-1]
	c := testkit.Session(t, dsn)
	open := func() error {
		s, err := control.Open(t.Context(), dsn)
		if err == nil {
			s.Disconnect()
		}
		return err
	}
	require.NoError(t, open())

	// One migration further, with which this program can live, as it says nothing else.
	testkit.Exec(t, c, fmt.Sprintf(`INSERT INTO backfill_control.schema_version (version_id, is_applied) VALUES (%d, true)`, newest+1))
	require.NoError(t, open())
	_, err = control.Migrate(t.Context(), dsn)
	require.NoError(t, err)

	// And one with which it cannot.
	testkit.Exec(t, c, fmt.Sprintf(`INSERT INTO backfill_control.schema_version (version_id, is_applied) VALUES (%d, true); UPDATE backfill_control.compatible SET oldest = %[1]d`, newest+2))
	says := fmt.Sprintf("the control database's schema has version %d, this program knows %d and at least %[1]d is needed: use a newer program", newest+2, newest)
	require.EqualError(t, open(), says)
	_, err = control.Migrate(t.Context(), dsn)
	require.EqualError(t, err, says)

	testkit.Exec(t, c, fmt.Sprintf(`DELETE FROM backfill_control.schema_version WHERE version_id >= %d`, newest))
	require.EqualError(t, open(), "the control database's schema is not up to date: run backfill migrate of this version")
}

// A process that runs when its schema is taken away from under it ends, and says why.
func TestAProcessEndsWhenItsSchemaIsOutgrown(t *testing.T) {
	control.LookAtSchemaEvery(20 * time.Millisecond)
	t.Cleanup(func() { control.LookAtSchemaEvery(10 * time.Second) })
	dsn := testkit.DatabaseWith(t, "")
	_, err := control.Migrate(t.Context(), dsn)
	require.NoError(t, err)
	s, c := testkit.Open(t, dsn), testkit.Session(t, dsn)
	run := func(ctx context.Context) error { <-ctx.Done(); return nil }
	ended := make(chan error, 1)
	go func() { ended <- s.WhileKnown(t.Context(), run) }()
	testkit.Exec(t, c, `INSERT INTO backfill_control.schema_version (version_id, is_applied) VALUES (9000, true)`)
	select {
	case err := <-ended:
		t.Fatal("it has ended though it can go on:", err)
	case <-time.After(200 * time.Millisecond):
	}
	testkit.Exec(t, c, `UPDATE backfill_control.compatible SET oldest = 9000`)
	err = <-ended
	require.Equal(t, backfill.Unavailable, backfill.CodeOf(err))
	require.ErrorContains(t, err, "use a newer program")

	failed := errors.New("its own")
	require.Equal(t, failed, s.WhileKnown(t.Context(), func(context.Context) error { return failed }))
}

// A migration waits for whoever holds a table a short while at a time, so that the
// processes that work meanwhile do not queue behind it.
func TestMigrationsGoBesideWorkingProcesses(t *testing.T) {
	t.Parallel()
	dsn := testkit.DatabaseWith(t, "")
	_, err := control.Migrate(t.Context(), dsn)
	require.NoError(t, err)
	busy, c := testkit.Session(t, dsn), testkit.Session(t, dsn)
	// As before a migration that alters the table.
	testkit.Exec(t, c, `DELETE FROM backfill_control.schema_version WHERE version_id = 21; ALTER TABLE backfill_control.judged DROP COLUMN uniform`)
	testkit.Exec(t, busy, `BEGIN; LOCK TABLE backfill_control.judged IN ROW EXCLUSIVE MODE`)
	done := make(chan error, 1)
	go func() { _, err := control.Migrate(t.Context(), dsn); done <- err }()
	testkit.Eventually(t, "the migration waits", func() bool { return testkit.LockWaiters(t, c) == 1 })
	began := time.Now()
	testkit.Exec(t, c, `BEGIN; LOCK TABLE backfill_control.judged IN ROW EXCLUSIVE MODE; COMMIT`)
	require.Less(t, time.Since(began), 10*time.Second)
	testkit.Exec(t, busy, `COMMIT`)
	require.NoError(t, <-done)
}

// What earlier programs may rely on is not taken away without telling them.
func TestMigrationsSayWhatEarlierProgramsCannotLiveWith(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("migrations/*.sql")
	require.NoError(t, err)
	breaks := regexp.MustCompile(`(?i)\b(DROP\s+(TABLE|COLUMN|FUNCTION)|RENAME|SET\s+NOT\s+NULL|ALTER\s+(COLUMN\s+)?\w+\s+TYPE)\b`)
	for _, f := range files {
		n, err := strconv.Atoi(filepath.Base(f)[:5])
		require.NoError(t, err)
		sql, err := os.ReadFile(f)
		require.NoError(t, err)
		up, _, _ := strings.Cut(string(sql), "-- +goose Down")
		if n > 50 && breaks.MatchString(up) {
			require.Contains(t, up, fmt.Sprintf("UPDATE backfill_control.compatible SET oldest = %d;", n), f)
		}
	}
}
