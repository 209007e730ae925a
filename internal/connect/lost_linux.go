package connect

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// setUserTimeout bounds how long what was sent may go unanswered, which keepalives do
// not: they ask only where nothing else is on its way.
func setUserTimeout(fd uintptr, d time.Duration) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds())))
}
