package pace

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func series(n int, step func(i int) (rows int64, throttled time.Duration)) []Sample {
	at := time.Unix(1000, 0)
	out := []Sample{{At: at}}
	for i := range n {
		last := out[len(out)-1]
		rows, throttled := step(i)
		out = append(out, Sample{At: last.At.Add(5 * time.Second), Rows: last.Rows + rows, Throttled: last.Throttled + throttled})
	}
	return out
}

func TestForecastOfASteadyWalk(t *testing.T) {
	f := Predict(series(20, func(int) (int64, time.Duration) { return 5000, 0 }), 60_000)
	require.InDelta(t, 1000, f.Rate, 1)
	require.Equal(t, 1.0, f.Duty)
	require.InDelta(t, 60, f.P50.Seconds(), 1)
	require.InDelta(t, 60, f.P90.Seconds(), 1)
}

// Throttled time is no slowness of the walk: it counts in the duty cycle.
func TestForecastTakesThrottledTimeApart(t *testing.T) {
	f := Predict(series(60, func(i int) (int64, time.Duration) {
		if i%2 == 0 {
			return 0, 5 * time.Second
		}
		return 5000, 0
	}), 60_000)
	require.InDelta(t, 1000, f.Rate, 1)
	require.InDelta(t, 0.5, f.Duty, 0.02)
	require.InDelta(t, 120, f.P50.Seconds(), 5)
}

func TestForecastP90IsWhatNineTenthsKeptUp(t *testing.T) {
	f := Predict(series(100, func(i int) (int64, time.Duration) {
		if i%5 == 0 {
			return 500, 0 // a fifth of the time ten times slower
		}
		return 5000, 0
	}), 60_000)
	require.InDelta(t, 60, f.P50.Seconds(), 5)
	require.InDelta(t, 600, f.P90.Seconds(), 50)
}

func TestForecastNeedsSomethingToGoBy(t *testing.T) {
	require.Zero(t, Predict(nil, 10))
	require.Zero(t, Predict(series(0, nil), 10))
	require.Zero(t, Predict(series(5, func(int) (int64, time.Duration) { return 0, 5 * time.Second }), 10))
	gap := series(1, func(int) (int64, time.Duration) { return 100, 0 })
	gap[1].At = gap[0].At.Add(time.Hour)
	require.Zero(t, Predict(gap, 10), "an hour's pause is no speed")
}
