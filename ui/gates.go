package ui

import (
	"net/url"
	"slices"
	"time"

	"backfill/internal/backfill"
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

// idleReading is how old a reading may be while no backfill asks: agents then
// measure twice a minute, for people to see.
const idleReading = 45 * time.Second

func gateParts(site string, all []control.Gate, panels []backfill.Panel) []gatePart {
	out, idle := make([]gatePart, len(all)), !slices.ContainsFunc(panels, underWay)
	for i, g := range all {
		if r := g.Reading; r != nil && idle && r.Age < idleReading {
			g.Reading = &pace.Reading{Value: r.Value, Problem: r.Problem}
		}
		v := g.Judge()
		out[i] = gatePart{Gate: g, Site: site, State: statePart{"Open", "check", "good"}, Why: capitalise(v.Why)}
		switch {
		case !g.Measured():
			out[i].State = statePart{"Limit", "clock", "quiet"}
		case !v.Open:
			out[i].State = statePart{"Closed", "pause", "warn"}
		}
		for _, k := range kindWords {
			if k.Kind == g.Kind {
				out[i].Word = k.Word
			}
		}
	}
	return out
}

// underWay reports whether a backfill of a table asks gates.
func underWay(x backfill.Panel) bool {
	return slices.ContainsFunc(append(slices.Clip(x.OpenRows), x.Open), func(r *backfill.Request) bool {
		return r != nil && !r.Paused && r.State != backfill.AwaitingReview
	})
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
