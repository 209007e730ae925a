package cli

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
)

// server is a command with settings of several kinds; it tells what it was given.
type server struct {
	Control string         `required:"" env:"BACKFILL_CONTROL" help:"x"`
	Listen  string         `default:"127.0.0.1:1" help:"x"`
	Keep    time.Duration  `name:"keep-audit" help:"x"`
	From    []netip.Prefix `name:"trust-from" help:"x"`
	Walks   int            `default:"2" help:"x"`
	Key     string         `secret:"" help:"x"`
	Grant   []string       `sep:"none" help:"x"`
	Role    string         `env:"-" help:"x"`
	Loud    bool           `help:"x"`
}

var ran *server

func (s *server) Run() error { ran = s; return nil }

type configGrammar struct {
	Server server `cmd:""`
	// The same setting by another flag.
	Other struct {
		DSN string `name:"control-database" env:"BACKFILL_CONTROL" help:"x"`
	} `cmd:""`
	Config ConfigCmd   `cmd:""`
	Files  ConfigFiles `name:"config" env:"BACKFILL_CONFIG" help:"x"`
}

func runConfig(t *testing.T, args ...string) (status int, out, errs string) {
	t.Helper()
	ran = nil
	var stdout, stderr bytes.Buffer
	status = Run(t.Context(), args, &stdout, &stderr, &configGrammar{}, EveryFlagIsASetting("server"),
		kong.ExplicitGroups([]kong.Group{{Key: "commands"}, {Key: "api"}}))
	return status, stdout.String(), stderr.String()
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestTheCommandLineWinsThenTheEnvironmentThenTheLastFile(t *testing.T) {
	first := write(t, "control: first\nlisten: first\nkeep-audit: 1h\ntrust-from: [10.0.0.0/8, 192.168.0.0/16]\nwalks: 3\nloud: true\ngrant: [\"a,b\", c]\n")
	second := write(t, "# only this\nlisten: second\nkeep-audit: 2h\n")
	t.Setenv("BACKFILL_KEEP_AUDIT", "3h")
	t.Setenv("BACKFILL_WALKS", "4")
	status, _, errs := runConfig(t, "server", "--config", first, "--config", second, "--walks", "5")
	require.Zero(t, status, errs)
	require.Equal(t, &server{Control: "first", Listen: "second", Keep: 3 * time.Hour, Walks: 5, Loud: true, Grant: []string{"a,b", "c"},
		From: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.168.0.0/16")}}, ran)

	t.Setenv("BACKFILL_CONFIG", second+","+first)
	status, _, errs = runConfig(t, "server")
	require.Zero(t, status, errs)
	require.Equal(t, "first", ran.Listen)
	require.Equal(t, 4, ran.Walks)
}

func TestWhatAFileMayNotSay(t *testing.T) {
	for name, c := range map[string]struct{ text, says string }{
		"unknown":             {"control: x\nlisen: y\n", `:2: no setting is called "lisen"`},
		"another spelling":    {"keep_audit: 1h", "write keep-audit"},
		"a flag that is none": {"role: x", `no setting is called "role"`},
		"the files":           {"config: x", `no setting is called "config"`},
		"a wrong value":       {"control: x\n\nkeep-audit: long", `:3: --keep-audit: expected duration but got "long"`},
		"a wrong number":      {"walks: many", ":1: --walks: "},
		"twice":               {"walks: 1\nlisten: x\nwalks: 2", ":3: walks is there twice"},
		"no value":            {"walks:", "give a value"},
		"no names":            {"- walks", "NAME: VALUE"},
		"a list":              {"listen: [a, b]", "--listen: it takes one value"},
		"a list of lists":     {"trust-from: [[a]]", "plain values"},
		"deep":                {"walks: {a: 1}", "give a value"},
		"no YAML":             {"walks: [", "line 1"},
	} {
		t.Run(name, func(t *testing.T) {
			status, out, errs := runConfig(t, "config", "check", "--config", write(t, c.text))
			require.Equal(t, Misused, status, out)
			require.Contains(t, errs, c.says)
		})
	}
	status, _, errs := runConfig(t, "server", "--config", filepath.Join(t.TempDir(), "none.yaml"))
	require.Equal(t, Misused, status)
	require.Contains(t, errs, "none.yaml: no such file")
}

func TestACheckRunsNothing(t *testing.T) {
	path := write(t, "listen: x\nkey: hidden\n")
	status, _, errs := runConfig(t, "config", "check", "--config", path, "server")
	require.Equal(t, Misused, status)
	require.Contains(t, errs, "missing flags: --control")
	status, out, errs := runConfig(t, "config", "check", "--config", path, "server", "--control=x")
	require.Zero(t, status, errs)
	require.Equal(t, "server: no mistake found\n", out)
	require.Nil(t, ran)
	t.Setenv("BACKFILL_WALKS", "many")
	status, _, errs = runConfig(t, "config", "check")
	require.Equal(t, Misused, status)
	require.Contains(t, errs, "BACKFILL_WALKS")
}

func TestSettingsArePrintedWithoutSecrets(t *testing.T) {
	path := write(t, "control: postgres://u:hidden@h/d\nkey: hidden\ntrust-from: 10.0.0.0/8\n")
	t.Setenv("BACKFILL_LISTEN", "here:1")
	status, out, errs := runConfig(t, "--config", path, "config", "print", "server", "--walks=7")
	require.Zero(t, status, errs)
	require.NotContains(t, out, "hidden")
	require.Equal(t, "control: postgres://u:…@h/d # "+path+":1\nlisten: here:1 # BACKFILL_LISTEN\n# keep-audit: not set\n"+
		"trust-from: [\"10.0.0.0/8\"] # "+path+":3\nwalks: 7 # command line\nkey: \"…\" # "+path+":2\n# grant: not set\n# loud: not set\n", out)
	// What is printed is a file that says the same.
	_, again, _ := runConfig(t, "config", "print", "--config", write(t, out), "server")
	require.Contains(t, again, "walks: 7 #")
	require.Nil(t, ran)
}
