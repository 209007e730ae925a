package proof

import (
	"crypto/ed25519"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func leaves(t *rapid.T) []Leaf {
	keys := rapid.SliceOfNDistinct(rapid.IntRange(0, 1_000_000), 0, 300, rapid.ID).Draw(t, "upper keys")
	slices.Sort(keys)
	word := rapid.StringMatching(`[0-9a-f]{64}`)
	var out []Leaf
	var lower []string
	for i := 0; i <= len(keys); i++ {
		l := Leaf{N: int64(i + 1), Lower: lower, Count: rapid.Int64Range(0, 10_000).Draw(t, "count"), Digest: word.Draw(t, "digest")}
		if i < len(keys) {
			l.Upper = []string{strings.Repeat("k", keys[i]%5), string(rune('a' + keys[i]%26))}
		}
		lower = l.Upper
		out = append(out, l)
	}
	return out
}

func root(all []Leaf) string {
	var t Tree
	for _, l := range all {
		t.Add(l)
	}
	return t.Root()
}

func TestTheRootDependsOnEveryLeaf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := leaves(t)
		before := root(all)
		if before != root(slices.Clone(all)) {
			t.Fatal("the same leaves have two roots")
		}
		i := rapid.IntRange(0, len(all)-1).Draw(t, "changed leaf")
		l := all[i]
		switch rapid.IntRange(0, 6).Draw(t, "what") {
		case 0:
			l.Count++
		case 1:
			l.Digest += "1"
		case 2:
			l.Count, l.Digest = l.Count*10+1, l.Digest[1:]
		case 3:
			l.Lower = append(slices.Clone(l.Lower), "")
		case 4:
			l.Upper = append(slices.Clone(l.Upper), "")
		case 5:
			l.Bucket++
		case 6:
			if i == 0 || all[i-1].Hash() == l.Hash() {
				return
			}
			other := slices.Clone(all)
			other[i-1], other[i] = other[i], other[i-1]
			if root(other) == before {
				t.Fatal("the order of leaves does not count")
			}
			if root(all[:i]) == before {
				t.Fatal("the leaves at the end do not count")
			}
			return
		}
		other := slices.Clone(all)
		other[i] = l
		if root(other) == before {
			t.Fatalf("leaf %d does not count: %+v and %+v", i, all[i], l)
		}
	})
}

func TestNoLeafNoRoot(t *testing.T) { require.Empty(t, root(nil)) }

func TestKeysAreSelfDelimiting(t *testing.T) {
	a := Leaf{Lower: []string{"a|", "b"}}
	for _, b := range []Leaf{{Lower: []string{"a", "|b"}}, {Lower: []string{"a|b"}}, {Upper: []string{"a|", "b"}}, {}} {
		require.NotEqual(t, a.Hash(), b.Hash())
	}
	require.NotEqual(t, Leaf{Lower: []string{""}}.Hash(), Leaf{}.Hash(), "the empty text is not the open end")
}

func TestGuarantee10_OnlyWhatWasWhollySeenIsEqual(t *testing.T) {
	for _, c := range []struct {
		name     string
		tally    Tally
		complete bool
		want     Verdict
		coverage float64
	}{
		{"all equal", Tally{Equal: 3, Rows: 30, Covered: 30}, true, Equal, 1},
		{"an empty table", Tally{Equal: 1}, true, Equal, 1},
		{"nothing was read", Tally{}, true, Unknown, 0},
		{"the run failed", Tally{Equal: 3, Rows: 30, Covered: 30}, false, Unknown, 1},
		{"a leaf is not judged yet", Tally{Equal: 2, Pending: 1, Rows: 30, Covered: 20}, true, Unknown, 2. / 3},
		{"a leaf never rests", Tally{Equal: 2, Unknown: 1, Rows: 30, Covered: 20}, true, Unknown, 2. / 3},
		{"one differs", Tally{Equal: 2, Different: 1, Rows: 30, Covered: 30}, true, Different, 1},
		{"one differs in a run that failed", Tally{Different: 1, Pending: 4, Rows: 30, Covered: 10}, false, Different, 1. / 3},
		{"a sample", Tally{Equal: 1, Counted: 9, Rows: 100, Covered: 10}, true, Equal, .1},
		{"only counts", Tally{Counted: 9, Rows: 100}, true, Unknown, 0},
	} {
		require.Equal(t, c.want, c.tally.Judge(c.complete), c.name)
		require.InDelta(t, c.coverage, c.tally.Coverage(), 1e-9, c.name)
	}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(0, 3)
		tally := Tally{Equal: n.Draw(t, "equal"), Different: n.Draw(t, "different"), Unknown: n.Draw(t, "unknown"),
			Counted: n.Draw(t, "counted"), Pending: n.Draw(t, "pending")}
		complete := rapid.Bool().Draw(t, "complete")
		if tally.Judge(complete) == Equal && (!complete || tally.Equal == 0 || tally.Different+tally.Unknown+tally.Pending > 0) {
			t.Fatalf("%+v counts as equal", tally)
		}
	})
}

func TestBoundsOfRates(t *testing.T) {
	require.Equal(t, 1., Bound(0, 0))
	require.Equal(t, 1., Bound(5, 5))
	require.InDelta(t, 1-math.Pow(.05, 1./30_000), Bound(0, 30_000), 1e-9)
	require.Less(t, Bound(0, 30_000), 1e-4)
	require.Greater(t, Bound(0, 29_000), 1e-4)
	require.InDelta(t, 0.0466, Bound(4, 194), 0.001)
	require.Zero(t, Missed(7, 7))
	require.InDelta(t, .03, Missed(100, 1000), .0005)
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, 1_000_000).Draw(t, "n")
		bad := rapid.Int64Range(0, min(n, 5000)).Draw(t, "bad")
		b := Bound(bad, n)
		if b <= float64(bad)/float64(n) && b < 1 || b > 1 {
			t.Fatalf("%d of %d bound by %g", bad, n, b)
		}
		if Bound(bad, n+1000) > b+1e-12 {
			t.Fatal("a larger sample leaves more open")
		}
		if bad == 0 && b > 3/float64(n) {
			t.Fatalf("no fault in %d is bound by %g", n, b)
		}
	})
}

func TestACertificateHoldsForItsVeryStatement(t *testing.T) {
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	public := PublicKey(key.Public().(ed25519.PublicKey))
	s, err := Sign(key, map[string]any{"verdict": Equal, "rows": 18_402_991, "table": `public."<a&b>"`, "nested": map[string]any{"b": 1, "a": []string{"x"}}})
	require.NoError(t, err)
	require.Equal(t, `{"nested":{"a":["x"],"b":1},"rows":18402991,"table":"public.\"<a&b>\"","verdict":"EQUAL"}`, string(s.Statement))
	text, err := json.MarshalIndent(s, "", "   ")
	require.NoError(t, err)
	got, err := Verify(text, public)
	require.NoError(t, err, "white space does not count")
	require.Equal(t, string(s.Statement), string(got.Statement))

	other := ed25519.NewKeyFromSeed([]byte(strings.Repeat("x", ed25519.SeedSize)))
	_, err = Verify(text, PublicKey(other.Public().(ed25519.PublicKey)))
	require.ErrorContains(t, err, "not with")
	_, err = Verify([]byte(strings.Replace(string(text), "18402991", "18402992", 1)), public)
	require.ErrorContains(t, err, "was changed")
	_, err = Verify([]byte(strings.Replace(string(text), "EQUAL", "EQUAL ", 1)), public)
	require.ErrorContains(t, err, "was changed")
	_, err = Verify([]byte("no"), public)
	require.ErrorContains(t, err, "no certificate")
	forged, err := Sign(other, map[string]any{"verdict": Equal})
	require.NoError(t, err)
	forged.Key = public
	text, err = json.Marshal(forged)
	require.NoError(t, err)
	_, err = Verify(text, public)
	require.ErrorContains(t, err, "was changed")
}
