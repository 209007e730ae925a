package local

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// unfinished is appended to the name of a data directory that is being made.
const unfinished = ".initdb-unfinished"

// initialize makes a new data directory, under another name until it is complete: what was interrupted is begun anew.
func (p *Postgres) initialize(ctx context.Context) error {
	entries, err := os.ReadDir(p.dir)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read data directory: %w", err)
	case len(entries) > 0:
		if _, err := os.Stat(filepath.Join(p.dir, "PG_VERSION")); err != nil {
			return fmt.Errorf("data directory %s is neither empty nor PostgreSQL's; choose another", p.dir)
		}
		return p.checkReach(p.dir)
	}

	dir := p.dir + unfinished
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove an unfinished data directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	if err := p.account.give(dir); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	if err := p.makePassword(); err != nil {
		return err
	}
	if err := p.checkReach(dir); err != nil {
		return err
	}
	// Text is ordered by bytes, and where the machine has the locale, known as Unicode.
	out, err := p.initdb(ctx, dir, "C.UTF-8")
	if err != nil && strings.Contains(out, "invalid locale") {
		out, err = p.initdb(ctx, dir, "C")
	}
	if err != nil {
		return fmt.Errorf("initdb %s: %w; it printed: %s", p.dir, err, strings.ReplaceAll(strings.TrimSpace(out), "\n", " | "))
	}
	if err := os.Remove(p.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace the empty data directory: %w", err)
	}
	if err := os.Rename(dir, p.dir); err != nil {
		return fmt.Errorf("name the new data directory: %w", err)
	}
	return nil
}

func (p *Postgres) initdb(ctx context.Context, dir, locale string) (output string, err error) {
	auth := "scram-sha-256"
	if p.opts.Fast {
		auth = "md5" // makes a connection in a third of the time
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "initdb"), "--username=postgres", "--auth="+auth,
		"--encoding=UTF8", "--locale="+locale, "--lc-messages=C")
	if p.opts.Fast {
		cmd.Args = append(cmd.Args, "--no-sync")
	}
	for flag, path := range map[string]string{"--pgdata=": dir, "--pwfile=": p.passwordFile()} {
		file, err := p.show(cmd, path)
		if err != nil {
			return "", err
		}
		defer file.close()
		cmd.Args = append(cmd.Args, flag+file.path)
	}
	cmd.Env, cmd.Dir = environment(), "/"
	cmd.SysProcAttr = sysProcAttr(p.account, syscall.SIGKILL)
	var text []byte
	onOwnThread(func() { text, err = cmd.CombinedOutput() })
	return string(text), err
}

func (p *Postgres) passwordFile() string { return p.dir + ".password" }

// makePassword keeps a password that is there: a data directory that is missing for now may come back.
func (p *Postgres) makePassword() error {
	if kept, err := p.readPassword(); err == nil && kept != "" {
		return p.account.give(p.passwordFile())
	}
	err := os.WriteFile(p.passwordFile(), []byte(rand.Text()+"\n"), 0o600)
	if err == nil {
		err = p.account.give(p.passwordFile())
	}
	if err != nil {
		return fmt.Errorf("keep the password: %w", err)
	}
	return nil
}

func (p *Postgres) readPassword() (string, error) {
	text, err := os.ReadFile(p.passwordFile())
	if err != nil {
		return "", fmt.Errorf("read the password of %s: %w; restore it, or start with an empty data directory", p.dir, err)
	}
	return strings.TrimSpace(string(text)), nil
}

func (p *Postgres) checkReach(dir string) error {
	reach, err := p.account.canReach(dir, filepath.Join(p.bin, "postgres"))
	p.hidden = !reach
	return err
}

// shown is a file or directory under a path by which a server's account finds it.
type shown struct {
	path string
	file *os.File // nil where the path is the usual one
}

func (s shown) close() {
	if s.file != nil {
		_ = s.file.Close()
	}
}

func (p *Postgres) show(cmd *exec.Cmd, path string) (shown, error) {
	if !p.hidden {
		return shown{path: path}, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return shown{}, fmt.Errorf("open for postgresql: %w", err)
	}
	return shown{path: handOver(cmd, f), file: f}, nil
}

// environment is what PostgreSQL's programs may know of ours: no PG* variable that leads them elsewhere, no secret.
func environment() []string {
	var env []string
	for _, name := range []string{"PATH", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SystemRoot"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// resolve makes the directories above dir and returns its one true path.
func resolve(dir string) (string, error) {
	if dir == "" {
		return "", errors.New("no directory given")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	parent, name := filepath.Split(dir)
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		return real, nil
	}
	if parent, err = filepath.EvalSymlinks(parent); err != nil {
		return "", err
	}
	return filepath.Join(parent, name), nil
}
