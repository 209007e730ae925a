package pace

import (
	"slices"
	"time"
)

// Sample is where a walk or release stood at a time.
type Sample struct {
	At        time.Time
	Rows      int64
	Throttled time.Duration // so far, by gates
}

// Forecast says how fast a walk or release goes and how long it will still take.
type Forecast struct {
	Rate     float64 // rows per second while no gate holds it back; 0 when unknown
	Duty     float64 // the part of the time, 0 to 1, in which no gate holds it back
	P50, P90 time.Duration
}

const (
	recent = 300              // samples that a forecast looks at
	pause  = 45 * time.Second // samples farther apart have a pause or another agent's absence between them
)

// Predict tells how long left rows will still take: left / (rate while not throttled
// × duty cycle). P50 takes the median of the recent speeds, P90 the speed and the duty
// cycle that nine tenths of the recent past kept up. Rate is 0 when there is nothing
// to go by.
func Predict(samples []Sample, left int64) Forecast {
	samples = samples[max(0, len(samples)-recent):]
	type stretch struct{ speed, active float64 }
	var stretches []stretch
	var duties []float64
	var active, all float64
	for i := 1; i < len(samples); i++ {
		a, b := samples[i-1], samples[i]
		took := b.At.Sub(a.At)
		if took <= 0 || took > pause || b.Rows < a.Rows {
			continue
		}
		free := max((took - (b.Throttled - a.Throttled)).Seconds(), 0)
		all += took.Seconds()
		active += free
		duties = append(duties, min(free/took.Seconds(), 1))
		if free > 0.05 && b.Rows > a.Rows {
			stretches = append(stretches, stretch{float64(b.Rows-a.Rows) / free, free})
		}
	}
	if len(stretches) == 0 || active == 0 {
		return Forecast{}
	}
	slices.SortFunc(stretches, func(x, y stretch) int {
		switch {
		case x.speed < y.speed:
			return -1
		case x.speed > y.speed:
			return 1
		}
		return 0
	})
	// speed is the one that this part of the active time was slower than.
	speed := func(part float64) float64 {
		sum, want := 0.0, 0.0
		for _, s := range stretches {
			want += s.active * part
		}
		for _, s := range stretches {
			if sum += s.active; sum >= want {
				return s.speed
			}
		}
		return stretches[len(stretches)-1].speed
	}
	f := Forecast{Rate: speed(0.5), Duty: min(active/all, 1)}
	f.P50 = seconds(float64(left) / (f.Rate * f.Duty))
	slow := min(speed(0.1), f.Rate) * poorDuty(duties, f.Duty)
	f.P90 = max(seconds(float64(left)/slow), f.P50)
	return f
}

// poorDuty is the duty cycle that nine tenths of the recent past kept up, over
// stretches long enough to hold both open and closed times.
func poorDuty(duties []float64, mean float64) float64 {
	const long = 12
	if len(duties) < 2*long {
		return mean
	}
	var means []float64
	sum := 0.0
	for i, d := range duties {
		sum += d
		if i >= long {
			sum -= duties[i-long]
		}
		if i >= long-1 {
			means = append(means, sum/long)
		}
	}
	slices.Sort(means)
	return min(max(means[len(means)/10], mean/10), mean)
}

func seconds(s float64) time.Duration {
	const most = 10 * 365 * 24 * time.Hour
	if !(s < most.Seconds()) {
		return most
	}
	return time.Duration(s * float64(time.Second))
}
