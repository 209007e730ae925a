package metrics

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.temporal.io/sdk/client"
)

// Temporal is the workflow engine's client and workers as a source of figures: it is
// their metrics handler, and collects what they report. Its labels are the SDK's:
// names of task queues, workflows, activities and operations, not of executions.
type Temporal struct {
	mu     sync.Mutex
	series map[string]*series
}

type series struct {
	desc    *prometheus.Desc
	kind    prometheus.ValueType // of counters and gauges
	labels  []string             // values
	value   float64
	timer   bool
	count   uint64
	buckets map[float64]uint64
}

// Upper bounds of timers, in seconds.
var bounds = []float64{.005, .02, .1, .5, 2, 10, 60, 600}

// NewTemporal makes one.
func NewTemporal() *Temporal { return &Temporal{series: map[string]*series{}} }

// Describe sends nothing, see Installation.
func (*Temporal) Describe(chan<- *prometheus.Desc) {}

// Collect tells what was reported so far.
func (t *Temporal) Collect(out chan<- prometheus.Metric) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.series {
		if s.timer {
			out <- prometheus.MustNewConstHistogram(s.desc, s.count, s.value, maps.Clone(s.buckets), s.labels...)
		} else {
			out <- prometheus.MustNewConstMetric(s.desc, s.kind, s.value, s.labels...)
		}
	}
}

// Handler is what the SDK reports to.
func (t *Temporal) Handler() client.MetricsHandler { return handler{t, nil} }

type handler struct {
	all  *Temporal
	tags map[string]string
}

func (h handler) WithTags(more map[string]string) client.MetricsHandler {
	tags := maps.Clone(h.tags)
	if tags == nil {
		tags = map[string]string{}
	}
	maps.Copy(tags, more)
	return handler{h.all, tags}
}

func (h handler) get(name, suffix string, kind prometheus.ValueType, timer bool) *series {
	if !strings.HasSuffix(name, suffix) {
		name += suffix
	}
	names := slices.Sorted(maps.Keys(h.tags))
	key := name
	var values []string
	for _, n := range names {
		values = append(values, h.tags[n])
		key += "\x00" + n + "\x00" + h.tags[n]
	}
	h.all.mu.Lock()
	defer h.all.mu.Unlock()
	s := h.all.series[key]
	if s == nil {
		s = &series{desc: desc(name, "See Temporal's reference of SDK metrics.", names...), kind: kind, labels: values, timer: timer}
		if timer {
			s.buckets = map[float64]uint64{}
			for _, b := range bounds {
				s.buckets[b] = 0
			}
		}
		h.all.series[key] = s
	}
	return s
}

func (h handler) Counter(name string) client.MetricsCounter {
	return counter{h.all, h.get(name, "_total", prometheus.CounterValue, false)}
}

func (h handler) Gauge(name string) client.MetricsGauge {
	return gauge{h.all, h.get(name, "", prometheus.GaugeValue, false)}
}

func (h handler) Timer(name string) client.MetricsTimer {
	return timer{h.all, h.get(name, "_seconds", 0, true)}
}

type (
	counter struct {
		all *Temporal
		s   *series
	}
	gauge counter
	timer counter
)

func (c counter) Inc(n int64) {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	c.s.value += float64(n)
}

func (g gauge) Update(v float64) {
	g.all.mu.Lock()
	defer g.all.mu.Unlock()
	g.s.value = v
}

func (t timer) Record(d time.Duration) {
	t.all.mu.Lock()
	defer t.all.mu.Unlock()
	t.s.count++
	t.s.value += d.Seconds()
	for _, b := range bounds {
		if d.Seconds() <= b {
			t.s.buckets[b]++
		}
	}
}
