package activities

// Points are the places between two transactions, or between two steps of one that
// spans databases, at which an activity may die. Each is named in the code by at.
var Points = []string{
	"identity: read", "identity: known", "halt: found", "halt: recorded", "epoch: noted", "epoch: met", "epoch: begun", "epoch: seen",
	"push: locked", "push: forgotten", "push: snapshot", "push: layout recorded", "push: read", "push: caught up", "push: durable", "push: committed", "push: deleted",
	"apply: skips shown", "apply: skips dropped", "apply: retries asked for", "apply: wishes done", "apply: pulled", "apply: committed", "apply: mirrored", "apply: acknowledged",
	"walk: claimed", "walk: bounds read", "walk: frozen", "walk: pushed", "page: read", "page: committed", "walk: at its end", "walk: reviewable", "walk: ended", "walk: handed back",
	"classify: read", "classify: rows read", "classify: stored",
	"count: counted", "count: reported",
	"gates: measured", "gates: stored", "gate: held", "gate: slowed", "gate: opened",
	"decide: recorded", "pause: recorded", "close: recorded", "judge: recorded",
	"release: batch committed", "release: finished",
	"sweep: sync started", "sweep: backfill started", "sweep: refreshed",
	"retain: removed", "retain: recorded",
}

// RunPoints are those of a reconciliation, whose two parts run side by side.
var RunPoints = []string{
	"run: introduced", "run: begun", "repair: touched", "repair: noted",
	"leaf: read", "leaf: cut", "leaf: hashed", "leaf: unsent", "leaf: sent", "leaf: compared", "leaf: answered",
	"leaf: listed", "leaf: rows stored", "leaf: rows compared", "leaf: judged", "run: concluded", "run: ended",
}

// TwoWayPoints are passed only where a table is captured on both sides.
var TwoWayPoints = []string{"apply: lost recorded"}

// faults lets a test step in at a point: to look, to let something else happen
// first, or to fail as a crash would. Otherwise it is nil.
type faults func(point string) error

func (f faults) at(point string) error {
	if f == nil {
		f = everywhere
	}
	if f == nil {
		return nil
	}
	return f(point)
}

// everywhere is set in programs built for tests only (faults_kill.go).
var everywhere faults
