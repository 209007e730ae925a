//go:build linux

package acceptance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is the program under test, running.
type process struct {
	cmd    *exec.Cmd
	output string        // the file its output goes to
	from   int64         // where the output of this run begins
	exited chan struct{} // closed when it has ended
}

// launch starts the program with its output appended to a file. It gets a SIGTERM
// when this process ends, however that ends.
func launch(output string, args ...string) (*process, error) { return launchWith(nil, output, args...) }

// launchWith adds to the program's environment.
func launchWith(env []string, output string, args ...string) (*process, error) {
	out, err := os.OpenFile(output, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	info, err := out.Stat()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(program, args...), output: output, from: info.Size(), exited: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Env = append(environment(), env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	started := make(chan error)
	go func() {
		// The signal comes when the thread that started the process ends.
		runtime.LockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait()
			close(p.exited)
		}
	}()
	return p, <-started
}

// environment is this process's own without settings that would lead the program
// elsewhere.
func environment() []string {
	var env []string
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		switch name {
		case "BACKFILL_BIN", "BACKFILL_PG_BIN", "BACKFILL_TEMPORAL_BIN":
		default:
			if strings.HasPrefix(name, "BACKFILL_") || strings.HasPrefix(name, "PG") {
				continue
			}
		}
		env = append(env, v)
	}
	return env
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) gone() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// exit waits for the end and returns the exit status, -1 when it does not come in
// time or came by a signal.
func (p *process) exit(within time.Duration) int {
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		return -1
	}
}

// said is what this run has printed.
func (p *process) said() string {
	text, err := os.ReadFile(p.output)
	if err != nil || int64(len(text)) < p.from {
		return ""
	}
	return string(text[p.from:])
}

// printed finds the rest of a line that begins so.
func (p *process) printed(prefix string) (string, bool) {
	for line := range strings.Lines(p.said()) {
		if rest, ok := strings.CutPrefix(line, prefix); ok && strings.HasSuffix(line, "\n") {
			return strings.TrimSpace(rest), true
		}
	}
	return "", false
}

// kill ends the process as kill -9 does, and leaves its children.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// descendants are the processes that a process has started, directly or not.
func descendants(pid int) []int {
	children := map[int][]int{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		// pid (program) state parent …, where the program may contain anything.
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		child, err1 := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		parent, err2 := strconv.Atoi(fields[1])
		if err1 == nil && err2 == nil && fields[0] != "Z" {
			children[parent] = append(children[parent], child)
		}
	}
	var all []int
	for next := children[pid]; len(next) > 0; {
		all = append(all, next...)
		var below []int
		for _, child := range next {
			below = append(below, children[child]...)
		}
		next = below
	}
	return all
}

// running says whether a process is there and not a zombie.
func running(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && len(text) > 0
}

// peakMemory is the most memory the process ever had resident, in MiB.
func (p *process) peakMemory() (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB"))
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status does not tell VmHWM", p.pid())
}
