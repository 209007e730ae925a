// Package local runs the servers Backfill needs on this machine, PostgreSQL and Temporal, for `backfill dev` and for
// tests. Each keeps its state in a directory of the caller's. Whatever was killed before, the next start in the same
// directory works: a PostgreSQL that still runs is taken over, a Temporal that still runs is replaced. A directory is
// served by one process at a time.
package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// startTimeout bounds a start, crash recovery included.
	startTimeout = time.Minute
	// killTimeout bounds the time from SIGKILL to the end of the last process.
	killTimeout = 10 * time.Second
	// startAttempts is how often a port found free may be taken by someone else before the server listens on it.
	startAttempts = 3
)

// server is the main process of a server, started here or found running. Everything that belongs to the server is known
// by its command line, which unlike other facts about a process anyone may read.
type server struct {
	name    string
	matches func(argv []string) bool
	lock    *dirLock

	mu     sync.Mutex
	proc   *os.Process
	exited chan struct{} // closed when our child has been reaped; nil for a process found running
}

// launch starts cmd as a session of its own, so that a ^C meant for this process does not reach it, with its output
// appended to the file log. It returns the size the log had before.
func (s *server) launch(cmd *exec.Cmd, log string) (int64, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, fmt.Errorf("open the log of %s: %w", s.name, err)
	}
	defer func() { _ = out.Close() }()
	info, err := out.Stat()
	if err != nil {
		return 0, fmt.Errorf("read the log of %s: %w", s.name, err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	started, exited := make(chan error), make(chan struct{})
	go onOwnThread(func() {
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(exited)
		}
	})
	if err := <-started; err != nil {
		return 0, fmt.Errorf("start %s: %w", s.name, err)
	}
	s.proc, s.exited = cmd.Process, exited
	return info.Size(), nil
}

// onOwnThread calls f on a thread that nothing else uses. Linux sends a child the signal for its parent's death when the
// thread that started it ends, so f has to start the child and to wait for it.
func onOwnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and end with the thread
		f()
	}()
	<-done
}

// adopt takes over a process found running.
func (s *server) adopt(pid int) error {
	proc, err := os.FindProcess(pid)
	if err != nil {
		return fmt.Errorf("take over %s, process %d: %w", s.name, pid, err)
	}
	s.proc, s.exited = proc, nil
	return nil
}

func (s *server) gone() bool {
	if s.exited == nil {
		return !slices.Contains(running(s.matches), s.proc.Pid)
	}
	select {
	case <-s.exited:
		return true
	default:
		return false
	}
}

// await polls ready until it reports true or an error, the process ends, or ctx does.
func (s *server) await(ctx context.Context, ready func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("no answer within %s", startTimeout))
	defer cancel()
	return poll(ctx, func() (bool, error) {
		if s.gone() {
			return false, errGone
		}
		return ready(ctx)
	})
}

// errGone is the end of a process that was expected to serve.
var errGone = errors.New("it has ended")

func (s *server) pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return 0
	}
	return s.proc.Pid
}

// stop sends sig, waits for the end and lets go of the directory. When ctx ends first, the server is killed and the error
// says so.
func (s *server) stop(ctx context.Context, sig os.Signal) error {
	return s.leave(func() error { return s.halt(ctx, sig) })
}

// kill ends the server with SIGKILL, waits until nothing of it is left and lets go of the directory.
func (s *server) kill() error { return s.leave(s.end) }

// leave ends the server by end. It does nothing the second time.
func (s *server) leave(end func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return nil
	}
	err := end()
	if s.gone() {
		s.proc = nil
		s.lock.release()
	}
	return err
}

func (s *server) halt(ctx context.Context, sig os.Signal) error {
	if err := s.proc.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s, process %d: %w", s.name, s.proc.Pid, err)
	}
	err := poll(ctx, func() (bool, error) { return s.gone(), nil })
	if err != nil {
		err = fmt.Errorf("stop %s: killed it instead: %w", s.name, err)
	}
	return errors.Join(err, s.end())
}

// end kills what is left of the server.
func (s *server) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	_ = s.proc.Kill()
	err := poll(ctx, func() (bool, error) { return s.gone(), nil })
	if err == nil {
		err = killAll(ctx, s.matches)
	}
	if err != nil {
		return fmt.Errorf("kill %s, process %d: %w", s.name, s.proc.Pid, err)
	}
	return nil
}

// killAll kills every process that matches, again until none is left.
func killAll(ctx context.Context, matches func(argv []string) bool) error {
	return poll(ctx, func() (bool, error) {
		pids := running(matches)
		for _, pid := range pids {
			if proc, err := os.FindProcess(pid); err == nil {
				_ = proc.Kill()
			}
		}
		return len(pids) == 0, nil
	})
}

// poll calls done every few milliseconds until it returns true or an error, or ctx ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}

// attempts calls start until it succeeds, or does not ask for another try.
func attempts(start func() (retry bool, err error)) error {
	for i := 1; ; i++ {
		if retry, err := start(); err == nil || !retry || i == startAttempts {
			return err
		}
	}
}

// failure says why a server did not start: err, and the end of what it logged after from.
func failure(name, log string, from int64, err error) error {
	return fmt.Errorf("start %s: %w; %s", name, err, tail(log, from))
}

// tail returns the last lines of a log from an offset on, as one line.
func tail(log string, from int64) string {
	text, err := os.ReadFile(log)
	if err != nil || int64(len(text)) <= from {
		return "its log " + log + " says nothing"
	}
	lines := strings.Split(strings.TrimSpace(string(text[from:])), "\n")
	lines = lines[max(0, len(lines)-5):]
	return "its log " + log + " ends: " + strings.Join(lines, " | ")
}

// portTaken reports whether a server ended because another process listens on its port.
func portTaken(log string, from int64) bool {
	text, err := os.ReadFile(log)
	return err == nil && int64(len(text)) > from && bytes.Contains(bytes.ToLower(text[from:]), []byte("address already in use"))
}

// choosePort returns the asked port or, when that is 0, the one kept in file if it is free, or else a free one; the
// choice is kept in file.
func choosePort(file string, asked int) (int, error) {
	kept, err := readPort(file)
	if err != nil {
		return 0, err
	}
	port := asked
	if port == 0 {
		if port, err = freePort(kept); err != nil {
			return 0, err
		}
	}
	if port != kept {
		if err := os.WriteFile(file, []byte(strconv.Itoa(port)+"\n"), 0o600); err != nil {
			return 0, fmt.Errorf("keep the port: %w", err)
		}
	}
	return port, nil
}

// readPort returns 0 when nothing usable was kept.
func readPort(file string) (int, error) {
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("read the port kept: %w", err)
	}
	port, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 16)
	if err != nil {
		return 0, nil
	}
	return int(port), nil
}

// freePort returns the preferred port if nothing listens on it on the loopback address, else another.
func freePort(preferred int) (int, error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(preferred)))
	if err != nil {
		l, err = net.Listen("tcp", "127.0.0.1:0")
	}
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}
