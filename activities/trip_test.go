package activities

import (
	"testing"

	"backfill/internal/testkit"
)

// newWorldOf makes a world whose sides may differ, with settings of its agents.
func newWorldOf(t *testing.T, s Settings, source, receiver string, tables ...string) *world {
	t.Helper()
	t.Parallel()
	return worldOf(testkit.NewPairOf(t, source, receiver, tables...), s)
}
