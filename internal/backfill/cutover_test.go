package backfill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ready is a table whose reads may move.
func ready() *Cutover {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) *time.Time { t := now.Add(-d); return &t }
	seen := SideSeen{SeenAt: ago(time.Second), OutboxAt: ago(time.Second), Shape: "s", SequencesAt: ago(time.Second)}
	highest := int64(100)
	c := &Cutover{
		Panel: Panel{
			Table:     Table{Name: "public.orders", Active: true, Create: true, Update: true, Delete: true, CapturedFrom: []string{"a"}},
			Direction: Direction{Site: "s", From: "a", To: "b"},
			Source:    TableSide{LayoutID: 1, CaptureOK: true, CaptureSince: ago(48 * time.Hour)}, Receiver: TableSide{LayoutID: 2},
		},
		Policy:   CutoverPolicy{Objective: 1e-4, Soak: 24 * time.Hour, ProofAge: 24 * time.Hour, MaxLag: 30 * time.Second},
		Now:      now,
		Backfill: &Request{ID: 3, State: Finished, RequestedAt: now.Add(-40 * time.Hour), ClosedAt: ago(39 * time.Hour)},
		Proof: &Reconciliation{ID: 7, Mode: RunFull, State: RunFinished, Verdict: "EQUAL", StartedAt: ago(30 * time.Hour), ClosedAt: ago(time.Hour), LayoutID: 1, Shape: "s",
			ReceiverLayoutID: 2, ReceiverShape: "s", LeafCount: 44, Counts: RunCounts{Equal: 44}},
		Repaired: ago(39 * time.Hour),
		Soak:     Soak{ShadowCounts: ShadowCounts{Match: 40_000, Stale: 100}, Began: ago(25 * time.Hour), Since: now.Add(-24 * time.Hour), Bound: 0.000075, Silence: time.Minute},
		Source:   seen, Receiver: seen,
	}
	c.Source.Name, c.Receiver.Name = "a", "b"
	c.Receiver.Sequences = []Sequence{{Column: "id", Name: "public.orders_id_seq", Next: 101, Highest: &highest, Step: 1}}
	return c
}

// Each clause by itself turns yes into no, and names what to do.
func TestEveryClauseOfACutover(t *testing.T) {
	require.True(t, ready().ReadNew(), "%v", Unmet(ready().Clauses()))
	ago := func(d time.Duration) *time.Time { t := ready().Now.Add(-d); return &t }
	for _, c := range []struct {
		clause, says string
		spoil        func(*Cutover)
	}{
		{"backfill", "backfill 4 is AWAITING_REVIEW", func(c *Cutover) { c.Panel.Open = &Request{ID: 4, State: AwaitingReview} }},
		{"backfill", "backfill 3 is REJECTED", func(c *Cutover) { c.Backfill.State, c.Backfill.RequestedAt = Rejected, c.Now.Add(-2*time.Hour) }},
		{"backfill", "left 5 rows", func(c *Cutover) {
			c.Backfill.SupersededUndelivered, c.Backfill.RequestedAt = 5, c.Now.Add(-31*time.Hour).Add(2*time.Hour)
		}},
		{"capture", "run backfill setup", func(c *Cutover) { c.Panel.Source.CaptureOK = false }},
		{"capture", "not captured from a", func(c *Cutover) { c.Panel.Table.CapturedFrom = []string{"b"} }},
		{"capture", "not active", func(c *Cutover) { c.Panel.Table.Active = false }},
		{"capture", "not every operation", func(c *Cutover) { c.Panel.Table.Delete = false }},
		{"capture", "not known since when", func(c *Cutover) { c.Panel.Source.CaptureSince = nil }},
		{"capture", "unbroken only since", func(c *Cutover) { c.Panel.Source.CaptureSince = ago(20 * time.Hour) }},
		{"capture", "a truncate", func(c *Cutover) { c.Panel.Source.Gap, c.GapLast = "a truncate", ago(time.Hour) }},
		{"capture", "were dropped", func(c *Cutover) { c.Dropped = true }},
		{"proof", "never compared", func(c *Cutover) { c.Proof, c.Backfill = nil, nil }},
		{"proof", "sent again", func(c *Cutover) { c.Repairing = true }},
		{"proof", "1 of 44 leaves different, 3 keys are open: backfill reconcile keys 7, repair", func(c *Cutover) {
			c.Proof.Verdict, c.Proof.Counts = "DIFFERENT", RunCounts{Equal: 43, Different: 1, Open: 3}
		}},
		{"proof", "came to DIFFERENT", func(c *Cutover) { c.Proof.Verdict, c.Proof.Counts = "DIFFERENT", RunCounts{Different: 1, Repaired: 3} }},
		{"proof", "came to UNKNOWN", func(c *Cutover) { c.Proof.Verdict = "UNKNOWN" }},
		{"proof", "after the last reconciliation began", func(c *Cutover) { c.Repaired = ago(29 * time.Hour) }},
		{"proof", "older than 24h", func(c *Cutover) { c.Proof.ClosedAt = ago(25 * time.Hour) }},
		{"proof", "on a was altered", func(c *Cutover) { c.Panel.Source.LayoutID = 9 }},
		{"proof", "on a was altered", func(c *Cutover) { c.Source.Shape = "t" }},
		{"proof", "on b was altered", func(c *Cutover) { c.Panel.Receiver.LayoutID = 9 }},
		{"proof", "on b was altered", func(c *Cutover) { c.Receiver.Shape = "t" }},
		{"quarantine", "2 differing keys", func(c *Cutover) { c.Open = 2 }},
		{"quarantine", "refused 2 changes", func(c *Cutover) { c.Panel.Quarantined = 2 }},
		{"quarantine", "2 changes wait", func(c *Cutover) { c.Panel.Held = 2 }},
		{"quarantine", "were skipped", func(c *Cutover) { c.Skipped = 2 }},
		{"shadow", "no shadow read", func(c *Cutover) { c.Soak = Soak{} }},
		{"shadow", "0.4 % of the shadow reads mismatch, the objective is 0.01 %", func(c *Cutover) { c.Soak.Match, c.Soak.Mismatch, c.Soak.Bound = 9960, 40, 0.0052 }},
		{"shadow", "1 mismatches and 0 unknown", func(c *Cutover) { c.Soak.Mismatch, c.Soak.Bound = 1, 0.00012 }},
		{"shadow", "0 mismatches and 5 unknown", func(c *Cutover) { c.Soak.Unknown, c.Soak.Bound = 5, 0.00026 }},
		{"shadow", "about 30,000 are needed", func(c *Cutover) { c.Soak.Match, c.Soak.Bound = 20_000, 0.00015 }},
		{"shadow", "goes on until 2026-03-01 13:00:00 UTC", func(c *Cutover) { c.Soak.Began = ago(23 * time.Hour) }},
		{"shadow", "for 3h0m0s", func(c *Cutover) { c.Soak.Silence = 3 * time.Hour }},
		{"shadow", "wait to be judged", func(c *Cutover) { c.Soak.Oldest = ago(11 * time.Minute) }},
		{"lag", "agent of a was never seen", func(c *Cutover) { c.Source.SeenAt = nil }},
		{"lag", "agent of b was last seen", func(c *Cutover) { c.Receiver.SeenAt = ago(time.Minute) }},
		{"lag", "cannot work: full disk", func(c *Cutover) { c.Receiver.Problem = "full disk" }},
		{"lag", "outbox", func(c *Cutover) { c.Source.OutboxAt = ago(time.Minute) }},
		{"lag", "not applied", func(c *Cutover) { c.Panel.Stopped, c.Panel.StoppedSince = "refused", ago(time.Minute) }},
		{"lag", "5 changes wait", func(c *Cutover) { c.Panel.Waiting, c.Panel.Oldest = 5, ago(31*time.Second) }},
		{"lag", "5 changes wait since the beginning", func(c *Cutover) { c.Panel.Waiting = 5 }},
		{"sequences", "agent of a has not looked", func(c *Cutover) { c.Source.SequencesAt = nil }},
		{"sequences", "agent of b has not looked", func(c *Cutover) { c.Receiver.SequencesAt = ago(time.Hour) }},
		{"sequences", "SELECT setval('public.orders_id_seq', 10100)", func(c *Cutover) { c.Receiver.Sequences[0].Next = 100 }},
		{"sequences", "column id holds 150", func(c *Cutover) {
			n := int64(150)
			c.Source.Sequences = []Sequence{{Column: "id", Highest: &n, Step: 1}}
		}},
		{"sequences", "GRANT SELECT", func(c *Cutover) { c.Receiver.Sequences[0].Problem = "GRANT SELECT" }},
		{"sequences", "holds 100", func(c *Cutover) { c.Receiver.Sequences[0].Next, c.Receiver.Sequences[0].Step = 100, -1 }},
	} {
		r := ready()
		c.spoil(r)
		no := Unmet(r.Clauses())
		require.False(t, r.ReadNew(), c.says)
		require.Len(t, no, 1, "%s: %v", c.says, no)
		require.Equal(t, c.clause, no[0].Name)
		require.Contains(t, no[0].Message, c.says)
	}
}

func TestWhatDoesNotStandAgainstACutover(t *testing.T) {
	for name, change := range map[string]func(*Cutover){
		"a table that never needed a backfill":        func(c *Cutover) { c.Backfill, c.Repaired = nil, nil },
		"a backfill that was cancelled, then a proof": func(c *Cutover) { c.Backfill.State = Cancelled },
		"a gap before the proof":                      func(c *Cutover) { t := c.Now.Add(-31 * time.Hour); c.Panel.Source.Gap, c.GapLast = "g", &t },
		"changes that wait a little":                  func(c *Cutover) { t := c.Now.Add(-time.Second); c.Panel.Waiting, c.Panel.Oldest = 9, &t },
		"differences that were waived": func(c *Cutover) {
			c.Proof.Verdict, c.Proof.Counts, c.Waived = "DIFFERENT", RunCounts{Equal: 43, Different: 1, Waived: 2}, []Waived{{By: "ann", Note: "known", Keys: 2}}
		},
		"a sequence of the source that its agent may not read": func(c *Cutover) {
			n := int64(1)
			c.Source.Sequences = []Sequence{{Column: "id", Highest: &n, Step: 1, Problem: "GRANT SELECT"}}
		},
		"no sequence":               func(c *Cutover) { c.Receiver.Sequences = nil },
		"an empty column":           func(c *Cutover) { c.Receiver.Sequences[0].Highest = nil },
		"a sequence that runs down": func(c *Cutover) { c.Receiver.Sequences[0].Next, c.Receiver.Sequences[0].Step = 99, -1 },
	} {
		c := ready()
		change(c)
		require.Empty(t, Unmet(c.Clauses()), name)
	}
}
