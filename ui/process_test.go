package ui_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// process is `backfill` with some arguments, running until the test ends.
type process struct {
	t      *testing.T
	pid    int
	output string // the file
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "backfill")
	said, err := exec.Command("go", "build", "-o", program, "backfill").CombinedOutput()
	require.NoError(t, err, string(said))
	p := &process{t: t, output: filepath.Join(dir, "output")}
	out, err := os.Create(p.output)
	require.NoError(t, err)
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	p.pid = cmd.Process.Pid
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		out.Close()
	})
	return p
}

// printed waits for a line that begins so and returns its rest.
func (p *process) printed(prefix string) (rest string) {
	p.t.Helper()
	line := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(prefix) + `\s*(.+)$`)
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		said, err := os.ReadFile(p.output)
		require.NoError(p.t, err)
		if m := line.FindSubmatch(said); m != nil {
			return string(m[1])
		}
	}
	said, _ := os.ReadFile(p.output)
	require.FailNow(p.t, "waiting for "+prefix, "it printed:\n%s", said)
	return ""
}
