//go:build !linux

package connect

import "time"

// setUserTimeout does nothing where there is no such thing; the system's own limits hold.
func setUserTimeout(uintptr, time.Duration) error { return nil }
