package acceptance

import (
	"context"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The guide's example goes from expand to contract by itself, with a writer and a
// reader: what it says is true.
func TestTheExampleOfExpandAndContract(t *testing.T) {
	if testing.Short() {
		t.Skip("it lets reads soak for a minute")
	}
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "run", "./docs/guides/expand-contract", "-backfill", program, "-listen", "127.0.0.1:0")
	cmd.Dir = "../.."
	cmd.WaitDelay = time.Minute
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "the end of what it said: %s", out[max(0, len(out)-4000):])
	for _, said := range []string{
		"CAST((split_part(name, ' ', -1)) AS text)", // the one statement
		"the verdict is DIFFERENT", "last_name: Nr5 → Mary Nr5", "FINISHED  EQUAL", "may reads move from old to new? yes", "removed table public.users", "— Done.",
	} {
		require.Contains(t, string(out), said)
	}
}
