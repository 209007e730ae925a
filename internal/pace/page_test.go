package pace

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestPageSizeFindsTheTarget(t *testing.T) {
	p := PageSize{Target: 250 * time.Millisecond, Min: 1, Max: 100_000, MaxBytes: 1 << 30}
	for range 30 {
		rows := p.Rows()
		p.Took(rows, int64(rows)*100, time.Duration(rows)*10*time.Microsecond)
	}
	require.InDelta(t, 25_000, p.Rows(), 100)
}

func TestPageSizeGrowsSlowlyAndFallsFast(t *testing.T) {
	p := PageSize{Target: 250 * time.Millisecond, Min: 1, Max: 1_000_000, MaxBytes: 1 << 40}
	before := p.Rows()
	p.Took(before, 1, time.Millisecond)
	require.LessOrEqual(t, p.Rows(), before*3/2)
	before = p.Rows()
	p.Took(before, int64(before)<<20, 2*time.Second)
	require.LessOrEqual(t, p.Rows(), before/10)
}

// Rows of next to nothing are bounded by their number alone.
func TestPageSizeOfRowsWithoutBytes(t *testing.T) {
	for _, bytes := range []int64{0, 1} {
		p := PageSize{Target: 250 * time.Millisecond, Min: 1, Max: 10_000, MaxBytes: math.MaxInt64}
		p.Took(p.Rows(), bytes, 10*time.Millisecond)
		require.Equal(t, 1500, p.Rows())
	}
}

// When rows have been slow, pages must grow again from one row, though each page
// costs something however few rows it has.
func TestPageSizeComesBackFromOneRow(t *testing.T) {
	p := PageSize{Target: 250 * time.Millisecond, Min: 1, Max: 20_000, MaxBytes: 1 << 30}
	for range 5 {
		p.Took(p.Rows(), int64(p.Rows())<<20, time.Duration(p.Rows())*2*time.Second)
	}
	require.Equal(t, 1, p.Rows())
	for pages, spent := 1, time.Duration(0); p.Rows() < 10_000; pages++ {
		took := 20*time.Millisecond + time.Duration(p.Rows())*10*time.Microsecond
		spent += took
		p.Took(p.Rows(), 100, took)
		require.Less(t, spent, 10*time.Second, "%d pages later a page still has %d rows", pages, p.Rows())
	}
}

// Where a page takes too long however few rows it has, because a database is far
// away or the machine is busy, fewer rows make the walk slower and nothing better.
func TestPageSizeIsNotShrunkByWhatRowsDoNotCost(t *testing.T) {
	for _, fixed := range []time.Duration{300 * time.Millisecond, time.Second, 3 * time.Second} {
		p := PageSize{Target: 250 * time.Millisecond, Min: 1, Max: 1_000_000, MaxBytes: 1 << 40}
		noise := rand.New(rand.NewPCG(1, 2))
		for range 60 {
			p.Took(p.Rows(), 100, time.Duration(float64(fixed+time.Duration(p.Rows())*10*time.Microsecond)*(0.8+0.4*noise.Float64())))
		}
		require.Greater(t, time.Duration(p.Rows())*10*time.Microsecond, fixed/4, "%d rows a page where each page costs %s", p.Rows(), fixed)
		require.Less(t, time.Duration(p.Rows())*10*time.Microsecond, 4*fixed, "%d rows a page where each page costs %s", p.Rows(), fixed)
	}
}

// A machine that comes to be busy, so that pages take now one second and now ten, does
// not bring pages of small rows down to one row each. After gates have halved them again
// and again they come back.
func TestPageSizeOnABusyMachine(t *testing.T) {
	const target = 250 * time.Millisecond
	p := PageSize{Target: target, Min: 1, Max: 20_000, MaxBytes: 32 << 20}
	for range 20 {
		p.Took(p.Rows(), int64(p.Rows())*100, 10*time.Millisecond+time.Duration(p.Rows())*20*time.Microsecond)
	}
	noise := rand.New(rand.NewPCG(1, 2))
	busy := func() {
		p.Took(p.Rows(), int64(p.Rows())*100, time.Duration(float64(time.Second)*(0.3+2*noise.ExpFloat64()))+time.Duration(p.Rows())*100*time.Microsecond)
	}
	for page := range 200 {
		busy()
		require.GreaterOrEqual(t, p.Rows(), 250, "after %d pages", page)
	}
	for range 20 {
		p.Halve()
	}
	require.Equal(t, 1, p.Rows())
	for range 20 {
		busy()
	}
	require.GreaterOrEqual(t, p.Rows(), 250)
	// Large rows are what takes the time: few of them make a page.
	for range 20 {
		p.Took(p.Rows(), int64(p.Rows())<<20, time.Duration(p.Rows())*time.Second)
	}
	require.Less(t, p.Rows(), 10)
}

func TestPageSizeStaysInItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := PageSize{Target: 250 * time.Millisecond, Min: 1, Max: rapid.IntRange(1, 50_000).Draw(t, "max"), MaxBytes: 32 << 20}
		for range rapid.IntRange(1, 50).Draw(t, "pages") {
			rows := p.Rows()
			if rows < 1 || rows > p.Max {
				t.Fatalf("page of %d rows, allowed 1 to %d", rows, p.Max)
			}
			perRow := rapid.Int64Range(1, 50<<20).Draw(t, "bytes")
			p.Took(rows, perRow*int64(rows), time.Duration(rapid.Int64Range(0, int64(10*time.Second)).Draw(t, "took")))
			if next := p.Rows(); next > 1 && int64(next)*perRow > p.MaxBytes {
				t.Fatalf("next page of %d rows of %d bytes passes %d", next, perRow, p.MaxBytes)
			}
		}
	})
}
