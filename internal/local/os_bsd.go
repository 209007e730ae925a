//go:build darwin || freebsd || netbsd || openbsd || dragonfly

package local

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// running returns the processes whose command line matches. Words with spaces in them arrive in pieces.
func running(matches func(argv []string) bool) []int {
	out, err := exec.Command("ps", "-axo", "pid=,command=").Output()
	if err != nil {
		return nil
	}
	var pids []int
	for line := range strings.Lines(string(out)) {
		words := strings.Fields(line)
		if len(words) < 2 || !matches(words[1:]) {
			continue
		}
		if pid, err := strconv.Atoi(words[0]); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// isStale leaves the question to the server.
func isStale(int, string) bool { return false }

// account is whom PostgreSQL runs as: here always the account of this process.
type account struct{}

func accountFor(string) (*account, error) {
	if os.Geteuid() == 0 {
		return nil, errors.New("postgresql refuses to run as root; run this as another account")
	}
	return nil, nil
}

func (*account) give(string) error { return nil }

func (*account) canReach(string, string) (bool, error) { return true, nil }

func sysProcAttr(*account, syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true}
}

func handOver(_ *exec.Cmd, f *os.File) string { return f.Name() }
