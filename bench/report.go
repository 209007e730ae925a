package main

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
)

// report collects what was measured and writes it as Markdown.
type report struct {
	options
	began    time.Time
	load     string // of the machine before anything was started
	postgres string
	groups   []*group
	sections []*section
}

// group is a table of contenders on the same rows.
type group struct {
	name  string
	lines []*line
}

type line struct {
	name  string
	took  []time.Duration
	wrong string // why there is no figure
}

// section is a table of figures that stand for themselves.
type section struct {
	name    string
	heads   []string // of the columns; nil for a name and a figure
	figures [][2]string
}

func newReport(o options) *report { return &report{options: o, began: time.Now(), load: loadAverage()} }

func (r *report) line(in, name string) *line {
	i := slices.IndexFunc(r.groups, func(g *group) bool { return g.name == in })
	if i < 0 {
		i, r.groups = len(r.groups), append(r.groups, &group{name: in})
	}
	g := r.groups[i]
	if i = slices.IndexFunc(g.lines, func(l *line) bool { return l.name == name }); i < 0 {
		i, g.lines = len(g.lines), append(g.lines, &line{name: name})
	}
	return g.lines[i]
}

func (r *report) took(group, name string, d time.Duration) {
	l := r.line(group, name)
	l.took = append(l.took, d)
}

func (r *report) absent(group, name, why string) { r.line(group, name).wrong = why }

func (r *report) section(name string) *section {
	i := slices.IndexFunc(r.sections, func(s *section) bool { return s.name == name })
	if i < 0 {
		i, r.sections = len(r.sections), append(r.sections, &section{name: name})
	}
	return r.sections[i]
}

// heads names the columns of a section; the figures of one line are then separated by bars.
func (r *report) heads(in string, names ...string) { r.section(in).heads = names }

// figure notes a figure; the same one again replaces it.
func (r *report) figure(in, name, value string) {
	s := r.section(in)
	if i := slices.IndexFunc(s.figures, func(f [2]string) bool { return f[0] == name }); i >= 0 {
		s.figures[i][1] = value
		return
	}
	s.figures = append(s.figures, [2]string{name, value})
}

// targets are ratios to the floor that Backfill is to keep to, for orders and an empty receiver.
var targets = map[string]float64{walkName: 1.1, releaseName: 0.4, applyName: 1.3, wholeName: 2.5}

// floor is the median of the floor of a workload, 0 when that was not measured.
func (r *report) floor(workload string) time.Duration {
	for _, g := range r.groups {
		for _, l := range g.lines {
			if g.name == fmt.Sprintf("%s, receiver %s", workload, empty) && l.name == floorName {
				return median(l.took)
			}
		}
	}
	return 0
}

func (r *report) write(path string) error {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	say("# Measured\n")
	say("Made by `make bench`, which says how. Times are medians of %d rounds; ratios are to the floor on the same rows, in the same run.\n", r.rounds)
	say("- %s, %d processors, %s of memory, %s", processorName(), runtime.NumCPU(), memoryOfMachine(), kernel())
	say("- PostgreSQL %s, three servers with default durability, `shared_buffers` of 512 MB, checkpoints between measurements; %s", r.postgres, runtime.Version())
	say("- Backfill %s, all of its processes and Temporal beside the servers", revision())
	say("- `orders` has %d rows; %s; load average when it began %s, at its end %s\n", r.rows, r.began.UTC().Format("2006-01-02 15:04 MST"), r.load, loadAverage())
	if busy(r.load) {
		say("%s\n", wasBusy)
	}
	for _, g := range r.groups {
		workload, _, _ := strings.Cut(g.name, ",")
		floor := r.floor(workload)
		aimed := g.name == fmt.Sprintf("%s, receiver %s", workloads[0].name, empty)
		say("## %s\n", g.name)
		say("| | median | fastest–slowest | ratio to the floor |%s\n|---|---:|---:|---:|%s", pick(aimed, " target |"), pick(aimed, "---:|"))
		for _, l := range g.lines {
			if len(l.took) == 0 {
				say("| %s | %s | | |%s", l.name, cmp.Or(l.wrong, "not measured"), pick(aimed, " |"))
				continue
			}
			target := ""
			if t, ok := targets[l.name]; ok && aimed {
				target = fmt.Sprintf("%.1f", t)
			}
			say("| %s | %.2f s | %.2f–%.2f s | %s |%s", l.name, median(l.took).Seconds(), slices.Min(l.took).Seconds(), slices.Max(l.took).Seconds(),
				ratio(median(l.took), floor), pick(aimed, " "+target+" |"))
		}
		say("")
	}
	for _, s := range r.sections {
		heads := s.heads
		if heads == nil {
			heads = []string{"", ""}
		}
		say("## %s\n\n| %s |\n|---%s|", s.name, strings.Join(heads, " | "), strings.Repeat("|---:", len(heads)-1))
		for _, f := range s.figures {
			say("| %s | %s |", f[0], f[1])
		}
		say("")
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

func pick(yes bool, text string) string {
	if yes {
		return text
	}
	return ""
}

func ratio(d, floor time.Duration) string {
	if floor == 0 {
		return "—"
	}
	return fmt.Sprintf("%.2f", d.Seconds()/floor.Seconds())
}

// median is the middle of values, 0 of none.
func median(values []time.Duration) time.Duration { return quantile(values, 0.5) }

// quantile is the value that a part of all values do not pass, the nearest rank; 0 of none.
func quantile(values []time.Duration, part float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(part * float64(len(sorted)))
	return sorted[min(rank, len(sorted)-1)]
}

func readField(path, name string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(text)) {
		if field, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(field) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func processorName() string { return readField("/proc/cpuinfo", "model name") }

func memoryOfMachine() string { return readField("/proc/meminfo", "MemTotal") }

func kernel() string {
	text, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return runtime.GOOS
	}
	return "Linux " + strings.TrimSpace(string(text))
}

func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

const wasBusy = "**The machine did other work meanwhile: no time here, and no ratio, can be relied on.**"

// busy reports whether a load average says that a machine does something.
func busy(load string) bool {
	var last float64
	_, err := fmt.Sscan(load, &last)
	return err == nil && last > float64(runtime.NumCPU())/2
}

// revision is the source's, as git tells it.
func revision() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "of an unknown revision"
	}
	return strings.TrimSpace(string(out))
}
