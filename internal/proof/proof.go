// Package proof is what a reconciliation reasons with: leaves and the tree above
// them, verdicts with their coverage, what a sample could have missed, and the
// certificate of a run. It is pure: no database, no clock, no network.
package proof

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"math"
)

// Verdict is what a run, or a leaf, comes to.
type Verdict string

// The verdicts. A run that could not look at something is never EQUAL.
const (
	Equal     Verdict = "EQUAL"     // every row covered was equal on both sides at a moment
	Different Verdict = "DIFFERENT" // at least one row is missing, surplus or has other values
	Unknown   Verdict = "UNKNOWN"   // nothing was found to differ, and not everything could be judged
)

// Leaf is a part of a table whose rows are counted and hashed together: either the
// keys in (Lower, Upper], where nil is open to that end, and two equal ends are that
// key alone, or one of Buckets buckets
// of a hash of the key, where the two sides do not agree about the order of keys.
type Leaf struct {
	N       int64    `json:"n"` // its place, from 1
	Lower   []string `json:"lower"`
	Upper   []string `json:"upper"`
	Bucket  int32    `json:"bucket,omitempty"`
	Buckets int32    `json:"buckets,omitempty"`

	Count int64 `json:"count"`
	// Digest is the SHA-256 of the rows' encodings in the order of their keys, in a bucket
	// of the rows' own SHA-256 in their order, in hexadecimal; "" when the rows were only counted.
	Digest string `json:"digest"`
}

// Hash is a leaf's node in the tree: over its range, its count and its digest.
func (l Leaf) Hash() [sha256.Size]byte {
	h := newHasher("leaf")
	h.key(l.Lower)
	h.key(l.Upper)
	h.number(int64(l.Bucket))
	h.number(int64(l.Buckets))
	h.number(l.Count)
	h.text(l.Digest)
	return h.sum()
}

// Same reports whether the rows of the leaf are the same on both sides, as far as
// was looked.
func (l Leaf) Same(other Leaf) bool { return l.Count == other.Count && l.Digest == other.Digest }

// hasher writes values so that no two sequences of them look the same.
type hasher struct{ hash.Hash }

func newHasher(kind string) hasher {
	h := hasher{sha256.New()}
	h.text(kind)
	return h
}

func (h hasher) number(n int64) {
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(n)))
}

func (h hasher) text(s string) {
	h.number(int64(len(s)))
	h.Write([]byte(s))
}

func (h hasher) key(k []string) {
	if k == nil {
		h.number(-1)
		return
	}
	h.number(int64(len(k)))
	for _, part := range k {
		h.text(part)
	}
}

func (h hasher) sum() (out [sha256.Size]byte) {
	copy(out[:], h.Sum(nil))
	return out
}

// fanOut is how many children a parent has.
const fanOut = 16

// node is a finished part of the tree.
type node struct {
	lower, upper []string
	count        int64
	hash         [sha256.Size]byte
}

// Tree hashes leaves, added in their order, into one root. Parents hash their
// range, their count and their children; it holds no more than fanOut nodes a level.
type Tree struct {
	levels [][]node
	leaves int64
	rows   int64
}

// Add takes the next leaf.
func (t *Tree) Add(l Leaf) {
	t.leaves++
	t.rows += l.Count
	t.add(0, node{l.Lower, l.Upper, l.Count, l.Hash()})
}

func (t *Tree) add(level int, n node) {
	if level == len(t.levels) {
		t.levels = append(t.levels, nil)
	}
	t.levels[level] = append(t.levels[level], n)
	if len(t.levels[level]) == fanOut {
		p := parent(t.levels[level])
		t.levels[level] = nil
		t.add(level+1, p)
	}
}

func parent(children []node) node {
	p := node{lower: children[0].lower, upper: children[len(children)-1].upper}
	for _, c := range children {
		p.count += c.count
	}
	h := newHasher("parent")
	h.key(p.lower)
	h.key(p.upper)
	h.number(p.count)
	h.number(int64(len(children)))
	for _, c := range children {
		h.Write(c.hash[:])
	}
	p.hash = h.sum()
	return p
}

// Root is the tree's root in hexadecimal, "" when there is no leaf. It depends on
// every leaf and on their order.
func (t *Tree) Root() string {
	if t.leaves == 0 {
		return ""
	}
	var up []node
	for i, level := range t.levels {
		up = append(append([]node{}, level...), up...)
		if len(up) > 0 && (i < len(t.levels)-1 || len(up) > 1) {
			up = []node{parent(up)}
		}
	}
	h := newHasher("root")
	h.number(t.leaves)
	h.number(t.rows)
	h.Write(up[0].hash[:])
	sum := h.sum()
	return hex.EncodeToString(sum[:])
}

// Tally is how a run's leaves stand.
type Tally struct {
	Equal     int64 `json:"equal"`
	Different int64 `json:"different"`
	Unknown   int64 `json:"unknown"`
	Counted   int64 `json:"counted"` // outside the sample, and of equal count
	Pending   int64 `json:"pending"` // not judged yet
	Rows      int64 `json:"rows"`    // of all leaves, on the source
	Covered   int64 `json:"covered"` // of the leaves judged equal or different
}

// Leaves is how many there are.
func (t Tally) Leaves() int64 { return t.Equal + t.Different + t.Unknown + t.Counted + t.Pending }

// Coverage is the share of the rows that was judged, 0 to 1.
func (t Tally) Coverage() float64 {
	switch {
	case t.Rows > 0:
		return float64(t.Covered) / float64(t.Rows)
	case t.Leaves() > 0 && t.Pending == 0 && t.Unknown == 0:
		return 1 // an empty table, looked at
	}
	return 0
}

// Judge is the verdict of a run whose leaves stand like this. complete says that
// the leaves cover what was asked for and that nothing has failed.
func (t Tally) Judge(complete bool) Verdict {
	switch {
	case t.Different > 0:
		return Different
	case !complete, t.Pending > 0, t.Unknown > 0, t.Equal == 0:
		return Unknown
	}
	return Equal
}

// Bound is the highest rate of faults, 0 to 1, that a sample of n with bad faults
// in it leaves possible at 95 % confidence: the exact binomial bound of Clopper and
// Pearson, which for no fault is a little under 3/n.
func Bound(bad, n int64) float64 {
	if n <= 0 || bad >= n {
		return 1
	}
	low, high := float64(bad)/float64(n), 1.0
	for range 100 {
		if mid := (low + high) / 2; atMost(bad, n, mid) > 0.05 {
			low = mid
		} else {
			high = mid
		}
	}
	return high
}

// atMost is the probability of at most k faults among n at a rate p. Terms are
// added from the largest down, in logarithms, until they no longer count.
func atMost(k, n int64, p float64) float64 {
	lg := func(x int64) float64 { v, _ := math.Lgamma(float64(x) + 1); return v }
	term := math.Exp(lg(n) - lg(k) - lg(n-k) + float64(k)*math.Log(p) + float64(n-k)*math.Log1p(-p))
	sum := 0.0
	for i := k; i >= 0 && term > sum*1e-15; i-- {
		sum += term
		term *= float64(i) / float64(n-i+1) * (1 - p) / p
	}
	return sum
}

// Missed is the highest share of leaves that may differ though none of n leaves
// drawn at random from all did, at 95 % confidence.
func Missed(n, all int64) float64 {
	if n >= all {
		return 0
	}
	return Bound(0, n)
}
