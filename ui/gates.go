package ui

import (
	"net/url"

	"backfill/internal/control"
	"backfill/internal/pace"
)

// kindWords says what each kind of gate measures, and in what its limit counts.
var kindWords = []struct {
	Kind       pace.Kind
	Word, Unit string
}{
	{pace.ReplicaLag, "Replica lag", "seconds"},
	{pace.Sessions, "Running sessions", "sessions"},
	{pace.Archiver, "WAL waiting to be archived", "files"},
	{pace.SlotWAL, "WAL kept for replication slots", "bytes"},
	{pace.QueueDepth, "Changes sent and not yet applied", "changes"},
	{pace.SQL, "A number from SQL", ""},
	{pace.HTTP, "An address that says go or wait", ""},
	{pace.Prometheus, "A number from Prometheus", ""},
	{pace.RowsPerSecond, "Fixed limit of rows per second", "rows per second"},
}

// gatePart is a gate as a page shows it.
type gatePart struct {
	control.Gate
	Site  string
	Word  string // what is measured
	State statePart
	Why   string
}

var gateStates = map[control.GateState]statePart{
	control.GateOpen:   {"Open", "check", "good"},
	control.GateClosed: {"Closed", "pause", "warn"},
	control.GateIdle:   {"Idle", "clock", "quiet"},
	control.GateLimit:  {"Limit", "clock", "quiet"},
}

func gateParts(site string, all []control.Gate) []gatePart {
	out := make([]gatePart, len(all))
	for i, g := range all {
		state, v := g.State()
		out[i] = gatePart{Gate: g, Site: site, State: gateStates[state], Why: capitalise(v.Why)}
		if state == control.GateIdle {
			out[i].Why = "Nothing asks it now. When it was measured last: " + v.Why
		}
		for _, k := range kindWords {
			if k.Kind == g.Kind {
				out[i].Word = k.Word
			}
		}
	}
	return out
}

// Definition is what the form starts from when the gate is changed.
func (g *gatePart) Definition() pace.Gate { return g.Gate.Gate }

// Path is the gate's address in the API.
func (g *gatePart) Path() string {
	return "/api/v1/sites/" + g.Site + "/gates/" + url.PathEscape(g.Name)
}

// gatesOf are those that hold back backfills of a table.
func gatesOf(all []gatePart, table string) (out []gatePart) {
	for _, g := range all {
		if g.Table == "" || g.Table == table {
			out = append(out, g)
		}
	}
	return out
}
