package ui

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
)

func TestNumbers(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 7: "7", 999: "999", 1000: "1,000", -12345: "−12,345", 1234567: "1,234,567"} {
		require.Equal(t, want, num(n))
	}
	require.Equal(t, "1 row", plural(1, "row"))
	require.Equal(t, "2,000 rows", plural(2000, "row"))
}

func TestTimes(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for d, want := range map[time.Duration]string{
		0: "just now", -42 * time.Second: "42 s ago", -time.Minute: "1 minute ago", -3 * time.Hour: "3 hours ago", -50 * time.Hour: "2 days ago", 90 * time.Second: "in 1 minute",
	} {
		require.Equal(t, want, relative(now.Add(d), now))
	}
}

func TestRowsOpenAndCloseByTheAddress(t *testing.T) {
	require.Equal(t, []string{"b"}, opened([]string{"a", "b", "a"}))
}

func TestTypedKey(t *testing.T) {
	one, two := []string{"id"}, []string{"student_id", "day"}
	for _, c := range []struct {
		typed   string
		columns []string
		want    backfill.Key
	}{
		{"", two, nil}, {"42", one, backfill.Key{"42"}}, {"a, b", one, backfill.Key{"a, b"}}, {"1, 2026-01-02", two, backfill.Key{"1", "2026-01-02"}},
		{`["a,b","c"]`, two, backfill.Key{"a,b", "c"}}, {"42", nil, backfill.Key{"42"}}, {"[x", one, backfill.Key{"[x"}},
	} {
		key, problem := typedKey(c.typed, c.columns)
		require.Empty(t, problem)
		require.Equal(t, c.want, key, c.typed)
	}
	_, problem := typedKey("1", two)
	require.Contains(t, problem, "student_id, day")
}

func TestBarShowsWhateverIsNotZero(t *testing.T) {
	require.Empty(t, bar([]figure{{Kind: "a"}}))
	s := bar([]figure{{Kind: "a", Value: 1_000_000}, {Kind: "b"}, {Kind: "c", Value: 1}})
	require.Len(t, s, 2)
	require.Equal(t, segment{"a", "0.000%", "99.404%"}, s[0])
	require.Equal(t, "0.596%", s[1].Width)
}

func TestStepsEndWhereTheRequestEnded(t *testing.T) {
	at := time.Now()
	names := func(r backfill.Request) (out []string) {
		for _, s := range steps(&r) {
			out = append(out, s.Name+":"+s.Class)
		}
		return out
	}
	require.Equal(t, []string{"Requested:done", "Walk:now", "Review:", "Release:", "Finished:"}, names(backfill.Request{State: backfill.Pending}))
	require.Equal(t, []string{"Requested:done", "Walk:done", "Review:now", "Release:", "Finished:"}, names(backfill.Request{State: backfill.AwaitingReview, StartedAt: &at, WalkedAt: &at}))
	require.Equal(t, []string{"Requested:done", "Walk:done", "Review:done", "Release:now", "Finished:"}, names(backfill.Request{State: backfill.Releasing, StartedAt: &at, WalkedAt: &at, ReviewedAt: &at}))
	require.Equal(t, []string{"Requested:done", "Walk:done", "Review:done", "Release:done", "Finished:done"}, names(backfill.Request{State: backfill.Finished, StartedAt: &at, WalkedAt: &at, ReviewedAt: &at}))
	require.Equal(t, []string{"Requested:done", "Walk:done", "Rejected:stop"}, names(backfill.Request{State: backfill.Rejected, StartedAt: &at, WalkedAt: &at, ReviewedAt: &at}))
	require.Equal(t, []string{"Requested:done", "Cancelled:stop"}, names(backfill.Request{State: backfill.Cancelled}))
	require.Equal(t, []string{"Requested:done", "Walk:stop", "Failed:failed"}, names(backfill.Request{State: backfill.Failed, StartedAt: &at}))
	require.Equal(t, []string{"Requested:done", "Walk:done", "Cancelled:stop"}, names(backfill.Request{State: backfill.Cancelled, StartedAt: &at, WalkedAt: &at}))
	require.Equal(t, []string{"Requested:done", "Walk:done", "Review:done", "Release:stop", "Cancelled:stop"}, names(backfill.Request{State: backfill.Cancelled, StartedAt: &at, WalkedAt: &at, ReviewedAt: &at}))
}

func TestEveryStateHasALook(t *testing.T) {
	seen := map[look]backfill.State{}
	for _, s := range backfill.States() {
		l, ok := looks[s]
		require.True(t, ok, s)
		l.Tone = "" // colour alone must not tell them apart
		require.Empty(t, seen[l], "%s looks like %s", s, seen[l])
		seen[l] = s
		icon(l.Icon)
	}
}

func TestChartTellsWhatWasHeldBack(t *testing.T) {
	begin := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(s int) time.Time { return begin.Add(time.Duration(s) * time.Second) }
	require.Nil(t, drawChart("walk", "Walk", nil))
	require.Nil(t, drawChart("walk", "Walk", []point{{at(0), 10, 0}}))
	require.Nil(t, drawChart("walk", "Walk", []point{{at(0), 0, 0}, {at(9), 0, 0}}), "nothing was staged")
	c := drawChart("walk", "Walk", []point{{at(0), 0, 0}, {at(10), 5000, 0}, {at(30), 5000, 10}, {at(40), 10000, 10}})
	require.Equal(t, "M0.0 110.0L150.0 55.0L450.0 55.0L600.0 0.0", c.Line)
	require.Equal(t, []band{{"300.0", "150.0"}}, c.Bands, "ten of the twenty seconds")
	require.Equal(t, "10,000 rows in 40 s, of which gates held it back for 10 s", c.Summary)
	require.Len(t, c.Lines, 4)
	require.Equal(t, "500/s", c.Lines[1].Rate)
	require.Equal(t, "10 s", c.Lines[2].Throttled)
	many := make([]point, 300)
	for i := range many {
		many[i] = point{at(i), int64(i * 100), 0}
	}
	require.LessOrEqual(t, len(drawChart("walk", "Walk", many).Lines), chartLines+1)
}

func TestCountsFromBeforeABackfillFinishedAreOutdated(t *testing.T) {
	counted := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	panel := func(at *time.Time) *backfill.Panel {
		return &backfill.Panel{Table: backfill.Table{Name: "public.a"}, Direction: backfill.Direction{From: "school"}, Receiver: backfill.TableSide{CountedAt: at}}
	}
	finished := func(table, from string, after time.Duration) *backfill.Request {
		closed := counted.Add(after)
		return &backfill.Request{Table: table, Direction: backfill.Direction{From: from}, ClosedAt: &closed}
	}
	require.True(t, outdates(finished("public.a", "school", time.Second), panel(&counted)))
	require.False(t, outdates(finished("public.a", "school", -time.Second), panel(&counted)))
	require.False(t, outdates(finished("public.b", "school", time.Second), panel(&counted)))
	require.False(t, outdates(finished("public.a", "central", time.Second), panel(&counted)))
	require.False(t, outdates(finished("public.a", "school", time.Second), panel(nil)))
}
