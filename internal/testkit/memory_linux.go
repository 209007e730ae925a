package testkit

import "syscall"

// inMemory is a directory whose files are in memory, where there is one with room for a
// server's data, and "" elsewhere. Tests make and drop files all the time.
func inMemory() string {
	const dir, enough = "/dev/shm", 6 << 30
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil || fs.Bavail*uint64(fs.Bsize) < enough {
		return ""
	}
	return dir
}
