package control

import (
	"testing"
	"time"
)

// RaiseOldest makes the program need a server newer than any there is, until the test
// ends. Tests that call it are not parallel.
func RaiseOldest(t *testing.T) {
	t.Helper()
	before := oldest
	oldest = 990000
	t.Cleanup(func() { oldest = before })
}

// LookAtSchemaEvery makes processes look more often whether they still know the schema.
func LookAtSchemaEvery(d time.Duration) { lookAtSchema = d }

// Pin sets what the store relies on in a session.
var Pin = pin
