package containers

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestComposeBringsUpAnInstallation follows docs/deploying.md with the compose file as
// it is, but for the images of others, which it takes from this machine. Prometheus,
// Grafana and the console stay out of it.
func TestComposeBringsUpAnInstallation(t *testing.T) {
	if os.Getenv("BACKFILL_CONTAINERS") == "" {
		t.Skip("runs in containers: make test-containers")
	}
	program := []string{"docker", "compose"}
	if exec.Command("docker", "compose", "version").Run() != nil {
		if _, err := exec.LookPath("docker-compose"); err != nil {
			t.Skip("there is neither docker compose nor docker-compose here")
		}
		program = []string{"docker-compose"}
	}
	project := "backfill-" + strings.ToLower(rand.Text()[:8])
	compose := func(args ...string) (string, error) {
		all := append(program[1:], "-p", project, "-f", "../../deploy/compose.yaml", "--env-file", "../../deploy/compose/example.env", "--profile", "demo")
		cmd := exec.Command(program[0], append(all, args...)...)
		cmd.Env = append(os.Environ(), "COMPOSE_PROJECT_NAME="+project, "BACKFILL_IMAGE="+backfillImage, "POSTGRES_IMAGE="+postgresImage, "TEMPORAL_IMAGE="+temporalImage, "LISTEN=127.0.0.1:0")
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("compose %s: %w: %s", strings.Join(args, " "), err, errs.String())
		}
		return strings.TrimSpace(string(out)), nil
	}
	run := func(args ...string) string {
		t.Helper()
		out, err := compose(args...)
		require.NoError(t, err)
		return out
	}
	t.Cleanup(func() {
		if t.Failed() {
			said, _ := compose("logs", "--tail", "20")
			t.Log(said)
		}
		_, err := compose("down", "-v", "-t", "0")
		require.NoError(t, err)
	})
	run("up", "-d", "api", "control", "demo-a", "demo-b")
	url := "http://" + run("port", "api", "8080")
	await(t, "the API to be ready", patience, func() (bool, string) {
		r, err := caller.Get(url + "/readyz")
		if err != nil {
			return false, err.Error()
		}
		_ = r.Body.Close()
		return r.StatusCode == http.StatusOK, r.Status
	})
	token := run("exec", "-T", "api", "/backfill", "token", "create", "tests", "--role", "admin")
	call := func(status int, method, path string, body, into any) {
		t.Helper()
		got, err := ask(t, url, token, method, path, body, into)
		require.Equal(t, status, got, "%v", err)
	}
	call(http.StatusCreated, http.MethodPost, "/sites", map[string]any{"name": "demo", "sides": []string{"a", "b"}}, nil)
	call(http.StatusOK, http.MethodPut, "/sites/demo/tables/public.orders", map[string]any{"captured_from": []string{"a"}}, nil)
	for _, side := range []string{"a", "b"} {
		await(t, "the database of side "+side+" to be there", patience, func() (bool, string) {
			_, err := compose("run", "--rm", "-T", "agent-"+side, "setup", "--site", "demo", "--side", side)
			return err == nil, fmt.Sprint(err)
		})
	}
	run("up", "-d", "agent-a", "agent-b")

	var r request
	await(t, "the backfill to be allowed", patience, func() (bool, string) {
		status, err := ask(t, url, token, http.MethodPost, "/sites/demo/backfills", map[string]any{"table": "public.orders", "from": "a"}, &r)
		return status == http.StatusCreated, fmt.Sprint(err)
	})
	at := fmt.Sprintf("/backfills/%d", r.ID)
	until := func(state string) {
		t.Helper()
		await(t, state, patience, func() (bool, string) {
			_, err := ask(t, url, token, http.MethodGet, at, nil, &r)
			return err == nil && r.State == state && r.Effects["unknown"] == 0, fmt.Sprintf("%+v, %v", r, err)
		})
	}
	until("AWAITING_REVIEW")
	call(http.StatusOK, http.MethodPost, at+"/approve", map[string]any{"revision": r.Revision}, nil)
	until("FINISHED")
	await(t, "the rows to arrive", patience, func() (bool, string) {
		n := run("exec", "-T", "demo-b", "psql", "-U", "postgres", "-At", "-c", "SELECT count(*), sum(total) FROM orders")
		return cmp.Or(n, "none") == run("exec", "-T", "demo-a", "psql", "-U", "postgres", "-At", "-c", "SELECT count(*), sum(total) FROM orders"), n
	})
}
