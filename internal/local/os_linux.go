package local

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// running returns the processes whose command line matches. A zombie has none.
func running(matches func(argv []string) bool) []int {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	var pids []int
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || len(text) == 0 {
			continue
		}
		if matches(strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")) {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// isStale reports that a process id found in a lock file is that of a zombie, or has meanwhile gone to another program.
func isStale(pid int, program string) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	// pid (program) state …, where the program may contain anything.
	open, end := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 0 || end < open || end+2 >= len(text) {
		return false
	}
	return string(text[open+1:end]) != program || text[end+2] == 'Z'
}

// account is whom PostgreSQL runs as when this process is root, because it refuses to run as root itself. A nil account
// is the one of this process.
type account struct {
	name     string
	uid, gid int
}

// accountFor returns the owner of dir or, where there is none but root, "postgres" or "nobody".
func accountFor(dir string) (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	if info, err := os.Stat(dir); err == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 {
			return &account{name: "of user id " + strconv.FormatUint(uint64(st.Uid), 10), uid: int(st.Uid), gid: int(st.Gid)}, nil
		}
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if uidErr == nil && gidErr == nil {
			return &account{name: name, uid: uid, gid: gid}, nil
		}
	}
	return nil, errors.New("postgresql refuses to run as root and there is no account for it; create one: useradd postgres")
}

// give makes the account the owner of a file.
func (a *account) give(path string) error {
	if a == nil {
		return nil
	}
	return os.Chown(path, a.uid, a.gid)
}

// sysProcAttr starts a process as the account, in a session of its own. A death signal other than 0 is sent to it when
// the thread that started it ends; see onOwnThread.
func sysProcAttr(a *account, death syscall.Signal) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true, Pdeathsig: death}
	if a != nil {
		attr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	return attr
}

// canReach reports whether the account may walk to dir; an error means that it cannot even run the program.
func (a *account) canReach(dir, program string) (bool, error) {
	if a == nil {
		return true, nil
	}
	try := func(dir string) error {
		cmd := exec.Command(program, "--version")
		cmd.Dir = dir // entered as the account
		cmd.SysProcAttr = sysProcAttr(a, 0)
		return cmd.Run()
	}
	if err := try("/"); err != nil {
		return false, fmt.Errorf("run %s as account %s: %w", program, a.name, err)
	}
	err := try(dir)
	if errors.Is(err, fs.ErrPermission) {
		return false, nil
	}
	return err == nil, err
}

// handOver lets cmd open a file or directory that its account cannot walk to, and returns the path by which it and its
// children find it: opening an inherited descriptor through /proc asks for the rights to the file alone, not to what
// lies above it. So PostgreSQL works below a directory that only root may enter, without a right over other files.
func handOver(cmd *exec.Cmd, f *os.File) string {
	cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	return fmt.Sprintf("/proc/self/fd/%d", 2+len(cmd.ExtraFiles))
}
