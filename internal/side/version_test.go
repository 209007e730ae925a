package side

import "testing"

// RaiseOldest makes the program need a server newer than any there is, until the test
// ends. Tests that call it are not parallel.
func RaiseOldest(t *testing.T) {
	t.Helper()
	before := oldest
	oldest = 990000
	t.Cleanup(func() { oldest = before })
}

// EarlierBodies are the capture functions of a table as earlier versions made them.
func (db *DB) EarlierBodies(t *Table, role string) []string { return db.earlierBodies(t, role) }
