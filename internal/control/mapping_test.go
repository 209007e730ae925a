package control_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/row"
	"backfill/internal/testkit"
)

// to is a change that maps a table from a side, as it was checked for a new one.
func to(from, source, target string) control.TableChange {
	m := backfill.Mapping{Source: source, Target: target}
	return control.TableChange{CapturedFrom: []string{from}, Mapping: &m, Checked: &control.Checked{Made: &row.Mapping{Key: []string{"id"}}, From: from}}
}

func both(winner string) control.TableChange {
	return control.TableChange{CapturedFrom: []string{"a", "b"}, Conflict: &winner}
}

func from(side string) control.TableChange { return control.TableChange{CapturedFrom: []string{side}} }

// What is applied to a table is not captured from it again: a table that would be, in
// whatever order it is configured, is refused, and nothing of it stays.
func TestATableIsNotCapturedFromWhereAnotherIsWritten(t *testing.T) {
	t.Parallel()
	type put struct {
		table string
		c     control.TableChange
	}
	for name, c := range map[string]struct {
		one  bool // both sides in one database
		puts [2]put
		says string
	}{
		"on both sides, beside a mapping of it": {puts: [2]put{{"public.t", both("a")}, {"public.v", to("a", "public.t", "public.v")}}, says: "lost"},
		"on both sides, beside one to it":       {puts: [2]put{{"public.v", both("a")}, {"public.t", to("a", "", "public.v")}}, says: "takes the rows of one"},
		"a chain back":                          {puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.v", from("b")}}, says: "lost"},
		"a chain by two mappings":               {puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.w", to("b", "public.v", "public.w")}}, says: "public.v"},
		"a circle":                              {puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.x", to("b", "public.v", "public.t")}}, says: "lost"},
		"one target":                            {puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.w", to("a", "", "public.v")}}, says: "takes the rows of one"},
		"one target without a mapping":          {puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.v", from("a")}}, says: "takes the rows of one"},
		"a chain in one database":               {one: true, puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.v", to("a", "", "public.w")}}, says: "lost"},
		"a circle in one database":              {one: true, puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.v", to("b", "", "public.t")}}, says: "lost"},
		"one target from both sides of one":     {one: true, puts: [2]put{{"public.t", to("a", "", "public.v")}, {"public.w", to("b", "", "public.v")}}, says: "takes the rows of one"},
	} {
		for order, puts := range map[string][2]put{"as written": c.puts, "the other first": {c.puts[1], c.puts[0]}} {
			t.Run(name+", "+order, func(t *testing.T) {
				t.Parallel()
				s := testkit.Control(t)
				create := s.CreateSite
				if c.one {
					create = s.CreateSiteInOne
				}
				require.NoError(t, create(t.Context(), "test", "elm", [2]string{"a", "b"}))
				_, err := s.PutTable(t.Context(), "test", "elm", puts[0].table, puts[0].c)
				require.NoError(t, err)
				_, err = s.PutTable(t.Context(), "test", "elm", puts[1].table, puts[1].c)
				require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
				require.ErrorContains(t, err, c.says)
				_, err = s.Table(t.Context(), "elm", puts[1].table)
				require.Equal(t, backfill.NotFound, backfill.CodeOf(err))
				// Other changes of a table go on.
				off := false
				_, err = s.PutTable(t.Context(), "test", "elm", puts[0].table, control.TableChange{Active: &off})
				require.NoError(t, err)
			})
		}
	}
}

// Tables that do not meet are configured beside each other, and a change that would make
// them meet is refused.
func TestTablesThatDoNotMeet(t *testing.T) {
	t.Parallel()
	s := testkit.Control(t)
	put := func(table string, c control.TableChange) error {
		_, err := s.PutTable(t.Context(), "test", "elm", table, c)
		return err
	}
	require.NoError(t, s.CreateSite(t.Context(), "test", "elm", [2]string{"a", "b"}))
	require.NoError(t, put("public.t", from("a")))
	require.NoError(t, put("public.v", to("a", "public.t", "public.v")), "two of one source")
	require.NoError(t, put("public.w", to("a", "public.t", "other.t")))
	require.NoError(t, put("public.x", to("b", "public.q", "public.v")), "of the same name on the other side")
	require.NoError(t, put("public.z", both("a")))
	require.Equal(t, backfill.Refused, backfill.CodeOf(put("public.t", both("a"))), "what is written to a would not come to public.v")
	again := to("a", "", "public.z")
	require.Equal(t, backfill.Refused, backfill.CodeOf(put("public.t", again)))
	require.NoError(t, put("public.w", control.TableChange{CapturedFrom: []string{"a", "b"}, Mapping: &backfill.Mapping{}, Conflict: &again.CapturedFrom[0]}), "without its mapping it may go both ways")
}

// The circle is one of tables, under whatever name a site has them, and over any number
// of sites.
func TestATableCannotGoRoundUnderOtherNames(t *testing.T) {
	t.Parallel()
	s := testkit.Control(t)
	site := func(name string, sides [2]string) {
		require.NoError(t, s.CreateSite(t.Context(), "test", name, sides))
		for _, side := range sides {
			require.NoError(t, s.Identify(t.Context(), name, side, "cluster", "1", map[string]uint32{"a": 1, "b": 2, "c": 3}[side]))
		}
	}
	put := func(site, table string, c control.TableChange) error {
		_, err := s.PutTable(t.Context(), "test", site, table, c)
		return err
	}
	site("elm", [2]string{"a", "b"})
	site("oak", [2]string{"a", "b"})
	site("ash", [2]string{"b", "c"})
	site("fir", [2]string{"a", "c"})
	require.NoError(t, put("elm", "public.t", to("a", "", "other.t")))
	require.NoError(t, put("oak", "public.t", from("b")), "of one name, and another table")
	_, err := s.RemoveTable(t.Context(), "test", "oak", "public.t")
	require.NoError(t, err)
	err = put("oak", "public.back", to("b", "other.t", "public.t"))
	require.Equal(t, backfill.Refused, backfill.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, "go round for ever")

	require.NoError(t, put("ash", "other.t", from("b")), "a hub")
	err = put("fir", "public.t", to("c", "other.t", "public.t"))
	require.ErrorContains(t, err, "in site fir and comes back to where it was in site ash")
	require.NoError(t, put("fir", "public.t", to("c", "other.t", "public.end")))
}

// A mapping is stored only for the configuration that it was checked for.
func TestAMappingThatWasCheckedForAnotherConfiguration(t *testing.T) {
	t.Parallel()
	s := testkit.Control(t)
	require.NoError(t, s.CreateSite(t.Context(), "test", "elm", [2]string{"a", "b"}))
	put := func(c control.TableChange) error {
		_, err := s.PutTable(t.Context(), "test", "elm", "public.t", c)
		return err
	}
	first := to("a", "", "public.v")
	require.NoError(t, put(from("b")))
	first.CapturedFrom = nil
	require.Equal(t, backfill.Conflict, backfill.CodeOf(put(first)), "it was checked for the other side")
	require.NoError(t, put(from("a")))
	require.NoError(t, put(first))

	late := to("a", "", "public.w")
	require.Equal(t, backfill.Conflict, backfill.CodeOf(put(late)), "another was set meanwhile")
	none := control.TableChange{Mapping: &backfill.Mapping{}, Checked: &control.Checked{}}
	require.Equal(t, backfill.Conflict, backfill.CodeOf(put(none)), "to leave nothing out is a mapping too")
	unchecked := to("a", "", "public.w")
	unchecked.Checked = nil
	require.Equal(t, backfill.Conflict, backfill.CodeOf(put(unchecked)))
	now, err := s.Table(t.Context(), "elm", "public.t")
	require.NoError(t, err)
	require.Equal(t, "public.v", now.Mapping.Target)
	late.Checked.Version = now.Version
	require.NoError(t, put(late))
}

// A table and what makes its rows are read at one moment.
func TestATableIsReadTogetherWithItsMapping(t *testing.T) {
	t.Parallel()
	dsn := testkit.ControlDSN(t)
	s, conn := testkit.Open(t, dsn), testkit.Connect(t, dsn)
	require.NoError(t, s.CreateSite(t.Context(), "test", "elm", [2]string{"a", "b"}))
	_, err := s.PutTable(t.Context(), "test", "elm", "public.t", to("a", "", "public.v0"))
	require.NoError(t, err)
	flipped := make(chan error)
	go func() {
		for n := range 200 {
			if _, err := conn.Exec(t.Context(), `UPDATE backfill_control.table_config SET mapping = jsonb_build_object('target', $1::text), made = jsonb_build_object('key', jsonb_build_array($1::text))`, fmt.Sprintf("public.v%d", n)); err != nil {
				flipped <- err
				return
			}
		}
		close(flipped)
	}()
	for {
		m, err := s.MappedTable(t.Context(), "elm", "public.t")
		require.NoError(t, err)
		if m.Made.Key[0] != "id" {
			require.Equal(t, m.Mapping.Target, m.Made.Key[0])
		}
		select {
		case err := <-flipped:
			require.NoError(t, err)
			return
		default:
		}
	}
}

// Rows of the source that were read for a trial go with it, also when nobody ends it.
func TestTrialsThatNobodyEnds(t *testing.T) {
	t.Parallel()
	dsn := testkit.ControlDSN(t)
	s, conn := testkit.Open(t, dsn), testkit.Connect(t, dsn)
	require.NoError(t, s.CreateSite(t.Context(), "test", "elm", [2]string{"a", "b"}))
	_, err := s.PutTable(t.Context(), "test", "elm", "public.t", to("a", "", "public.v"))
	require.NoError(t, err)
	left := func() []string {
		return testkit.Strings(t, conn, `SELECT target FROM backfill_control.mapping_trial ORDER BY id`)
	}
	for _, target := range []string{"public.v", "public.w", "public.x"} {
		_, err := s.StartTrial(t.Context(), "test", control.MappingTrial{Site: "elm", Source: "a", Receiver: "b", From: "public.t", To: target, Sample: 10})
		require.NoError(t, err)
	}
	_, err = s.RemoveTable(t.Context(), "test", "elm", "public.t")
	require.NoError(t, err)
	require.Equal(t, []string{"public.w", "public.x"}, left())
	testkit.Exec(t, conn, `UPDATE backfill_control.mapping_trial SET asked_at = $1 WHERE target = 'public.w'`, time.Now().Add(-3*time.Minute))
	require.NoError(t, s.EndOldTrials(t.Context()))
	require.Equal(t, []string{"public.x"}, left(), "somebody may wait for it")

	audit, err := s.Audit(t.Context(), control.AuditFilter{Site: "elm", Limit: 100})
	require.NoError(t, err)
	tries := 0
	for _, e := range audit {
		if e.Action == "mapping.try" {
			tries++
			require.Equal(t, "test", e.Account)
			require.EqualValues(t, 10, e.Detail["rows"])
		}
	}
	require.Equal(t, 3, tries)
}
