package backfill

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseTableName(t *testing.T) {
	for given, want := range map[string]TableName{
		"public.orders":              {"public", "orders"},
		`"Order Items"."select"`:     {"Order Items", "select"},
		"Order Items.select":         {"Order Items", "select"},
		`public."a.b"`:               {"public", "a.b"},
		`"say ""hi"""."x"`:           {`say "hi"`, "x"},
		"public.Orders":              {"public", "Orders"}, // nothing is folded
		"schéma.tàble":               {"schéma", "tàble"},
		`public."'; drop table x--"`: {"public", "'; drop table x--"},
	} {
		got, err := ParseTableName(given)
		require.NoError(t, err, given)
		require.Equal(t, want, got, given)
		again, err := ParseTableName(got.String())
		require.NoError(t, err, got.String())
		require.Equal(t, got, again)
	}
	for _, bad := range []string{"", ".", "orders", "a.b.c", `"a.b`, `"a"b.c`, "a.", ".b", `""."b"`, `"a"."b".c`, "a.\x00b"} {
		_, err := ParseTableName(bad)
		require.Equal(t, Invalid, CodeOf(err), "%q", bad)
	}
}

func TestNamesAreQuotedWhereSQLNeedsIt(t *testing.T) {
	require.Equal(t, `public.orders`, TableName{"public", "orders"}.String())
	require.Equal(t, `"Order Items"."select"`, TableName{"Order Items", "select"}.String())
	require.Equal(t, `"user"."order"`, TableName{"user", "order"}.String())
}

func FuzzParseTableName(f *testing.F) {
	for _, s := range []string{"public.orders", `"a""b"."c"`, `"x`, "a.b.c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := ParseTableName(s)
		if err != nil {
			return
		}
		again, err := ParseTableName(name.String())
		if err != nil || again != name {
			t.Fatalf("%q reads as %+v, shown as %s, which reads as %+v (%v)", s, name, name, again, err)
		}
	})
}

func TestEveryStateIsReachableAndEnds(t *testing.T) {
	require.Equal(t, []string{"PENDING", "IN_PROGRESS", "AWAITING_REVIEW", "RELEASING"}, OpenStates())
	for _, s := range States() {
		require.True(t, s.Valid())
		if s != Pending {
			require.NotEmpty(t, Before(s), "nothing leads to %s", s)
		}
		if s.Open() {
			require.True(t, s.CanBecome(Cancelled), "%s cannot be cancelled", s)
			require.True(t, s.CanBecome(Failed), "%s cannot fail", s)
		}
	}
	require.False(t, Rejected.CanBecome(Releasing))
	require.False(t, InProgress.CanBecome(Releasing), "released before it was approved")
	require.Equal(t, []string{"AWAITING_REVIEW"}, Before(Releasing))
}

func TestConditions(t *testing.T) {
	many, few := int64(10), int64(4)
	ok := func() *Panel {
		return &Panel{Table: Table{Active: true, Create: true, Update: true, CapturedFrom: []string{"a"}},
			Direction: Direction{Site: "s", From: "a", To: "b"},
			Source:    TableSide{LayoutID: 1, CaptureOK: true, Rows: &many}, Receiver: TableSide{Rows: &few}}
	}
	require.True(t, ok().CanRequest())
	for name, c := range map[string]struct {
		spoil func(*Panel)
		row   bool // a row backfill minds too
	}{
		"active":     {func(p *Panel) { p.Table.Active = false }, true},
		"operations": {func(p *Panel) { p.Table.Update = false }, true},
		"capture":    {func(p *Panel) { p.Source.CaptureOK = false }, true},
		"behind":     {func(p *Panel) { p.Receiver.Rows = &many }, false},
	} {
		p := ok()
		c.spoil(p)
		unmet := Unmet(p.Conditions(false))
		require.Len(t, unmet, 1, name)
		require.Equal(t, name, unmet[0].Name)
		require.False(t, p.CanRequest())
		require.Equal(t, c.row, len(Unmet(p.Conditions(true))) == 1, name)
	}
	p := ok()
	p.Open = &Request{State: AwaitingReview}
	require.False(t, p.CanRequest(), "a second open request")
}
