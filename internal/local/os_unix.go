//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// dirLock says that this process serves a directory. The kernel drops it with the process, however that ends; children
// do not inherit it.
type dirLock struct{ fd int }

// lockTimeout covers a holder that is being killed: a child it was about to start shares its lock for a moment.
const lockTimeout = 2 * time.Second

// lockDir takes the lock kept in file, which names the process that holds it.
func lockDir(ctx context.Context, file string) (*dirLock, error) {
	fd, err := syscall.Open(file, syscall.O_RDWR|syscall.O_CREAT|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", file, err)
	}
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	err = poll(ctx, func() (bool, error) {
		err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB)
		if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
			return false, nil
		}
		return err == nil, err
	})
	if errors.Is(err, context.DeadlineExceeded) {
		holder, _ := os.ReadFile(file)
		err = fmt.Errorf("in use by process %s; stop it or choose another directory", strings.TrimSpace(string(holder)))
	}
	if err == nil {
		err = syscall.Ftruncate(fd, 0)
	}
	if err == nil {
		_, err = syscall.Pwrite(fd, []byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return nil, fmt.Errorf("lock %s: %w", file, err)
	}
	return &dirLock{fd: fd}, nil
}

func (l *dirLock) release() { _ = syscall.Close(l.fd) }
