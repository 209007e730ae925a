package local

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// FindPostgres returns the directory of PostgreSQL's server programs: $BACKFILL_PG_BIN, else what pg_config says, else
// where PATH has them, else the newest version in one of the places where packages put it. An error says what to install.
func FindPostgres() (binDir string, err error) {
	if dir := os.Getenv("BACKFILL_PG_BIN"); dir != "" {
		if !hasPostgres(dir) {
			return "", fmt.Errorf("BACKFILL_PG_BIN=%s holds no initdb and postgres; name the directory that does", dir)
		}
		return dir, nil
	}
	var dirs []string
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin", // Debian, Ubuntu
		"/usr/lib/postgresql*/bin",  // SUSE, Alpine
		"/usr/pgsql-*/bin",          // Red Hat
		"/usr/local/pgsql/bin",
		"/opt/homebrew/opt/postgresql*/bin",
		"/usr/local/opt/postgresql*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin",
	} {
		found, _ := filepath.Glob(pattern)
		slices.SortFunc(found, func(a, b string) int { return cmp.Compare(version(b), version(a)) })
		dirs = append(dirs, found...)
	}
	for _, dir := range dirs {
		if hasPostgres(dir) {
			return dir, nil
		}
	}
	return "", errors.New("no PostgreSQL server on this machine; install one (Debian, Ubuntu: apt-get install postgresql; " +
		"Fedora: dnf install postgresql-server; macOS: brew install postgresql) or name its bin directory in BACKFILL_PG_BIN")
}

func hasPostgres(dir string) bool { return isProgram(dir, "initdb") && isProgram(dir, "postgres") }

var digits = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// version reads the last number of a path, 0 when it has none.
func version(path string) float64 {
	found := digits.FindAllString(path, -1)
	if len(found) == 0 {
		return 0
	}
	v, _ := strconv.ParseFloat(found[len(found)-1], 64)
	return v
}

// Command is a program that serves Temporal.
type Command struct {
	Path string
	// CLI tells Temporal's own command line, `temporal server start-dev`, from backfill-temporal.
	CLI bool
}

// FindTemporal returns $BACKFILL_TEMPORAL_BIN, else `temporal` from PATH, else backfill-temporal from beside this
// executable, or from bin/ of the checkout that the working directory is in. An error says what to do.
func FindTemporal() (Command, error) {
	if path := os.Getenv("BACKFILL_TEMPORAL_BIN"); path != "" {
		if !isProgram(filepath.Split(path)) {
			return Command{}, fmt.Errorf("BACKFILL_TEMPORAL_BIN=%s is not a program; name temporal or backfill-temporal", path)
		}
		return command(path), nil
	}
	if path, err := exec.LookPath("temporal"); err == nil {
		return command(path), nil
	}
	var dirs []string
	if self, err := os.Executable(); err == nil {
		dirs = append(dirs, filepath.Dir(self))
	}
	if root, ok := checkout(); ok {
		dirs = append(dirs, filepath.Join(root, "bin"))
	}
	for _, dir := range dirs {
		if isProgram(dir, ours) {
			return command(filepath.Join(dir, ours)), nil
		}
	}
	return Command{}, errors.New("no Temporal server; build it with `make build`, or install Temporal's command line as `temporal`, " +
		"or name either in BACKFILL_TEMPORAL_BIN")
}

const ours = "backfill-temporal"

func command(path string) Command {
	return Command{Path: path, CLI: strings.TrimSuffix(filepath.Base(path), ".exe") == "temporal"}
}

// checkout finds the directory above the working directory that holds this module's go.mod.
func checkout() (string, bool) {
	dir, err := os.Getwd()
	if err != nil {
		return "", false
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && slices.Contains(strings.Split(string(text), "\n"), "module backfill") {
			return dir, true
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", false
		}
		dir = parent
	}
}

func isProgram(dir, name string) bool {
	info, err := os.Stat(filepath.Join(dir, name))
	if err != nil && runtime.GOOS == "windows" {
		info, err = os.Stat(filepath.Join(dir, name+".exe"))
	}
	return err == nil && info.Mode().IsRegular() && (runtime.GOOS == "windows" || info.Mode()&0o111 != 0)
}
