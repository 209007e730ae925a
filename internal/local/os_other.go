//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package local

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// dirLock is never given here, so no server is started and the rest of this file only lets the package build.
type dirLock struct{}

func lockDir(context.Context, string) (*dirLock, error) {
	return nil, fmt.Errorf("servers cannot be started on %s; name running ones instead", runtime.GOOS)
}

func (*dirLock) release() {}

func running(func(argv []string) bool) []int { return nil }

func isStale(int, string) bool { return false }

type account struct{}

func accountFor(string) (*account, error) { return nil, nil }

func (*account) give(string) error { return nil }

func (*account) canReach(string, string) (bool, error) { return true, nil }

func sysProcAttr(*account, syscall.Signal) *syscall.SysProcAttr { return nil }

func handOver(_ *exec.Cmd, f *os.File) string { return f.Name() }
