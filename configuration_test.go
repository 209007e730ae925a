package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"backfill/internal/cli"
)

var update = flag.Bool("update", false, "write docs/configuration.md")

func settings(t *testing.T) []cli.Setting {
	t.Helper()
	k, err := kong.New(&grammar{}, options()...)
	require.NoError(t, err)
	return cli.Settings(k.Model)
}

const head = `# Configuration

<!-- Written by make docs, from the flags in the code. -->

A setting can be given as a flag, in the environment, or in a YAML file, by the same name: ` + "`--public-url`, `BACKFILL_PUBLIC_URL`" + `
and ` + "`public-url`" + `. The flag wins, then the environment, then the file. What a command runs (` + "`--control`, `--agent`" + `) is a flag only.

` + "```yaml" + `
# backfill --config settings.yaml api, or BACKFILL_CONFIG=settings.yaml,secrets.yaml
temporal: temporal.internal:7233
public-url: https://backfill.internal
trust-from: [10.0.0.0/8]
keep-history: 1440h
` + "```" + `

Several files are read in order, later ones win; so secrets can be in one of their own. One file may serve all processes: a
name that another command knows is left alone, one that none knows is an error with its line, and so is a value of the wrong kind.

    backfill config check --config settings.yaml worker --control   # says what is wrong, runs nothing; exit 0 or 2
    backfill config print --config settings.yaml api                # what it would run with and from where, without secrets
    backfill config names                                           # this list

Durations are written ` + "`90s`, `15m`, `720h`" + `; lists as in YAML, or with commas. Temporal's address, TLS and API key can also come
from Temporal's own variables and file: [temporal.md](temporal.md).

`

func reference(all []cli.Setting) string {
	var b strings.Builder
	b.WriteString(head)
	b.WriteString("| setting | environment | default | used by | what |\n|---|---|---|---|---|\n")
	for _, s := range all {
		name := "`" + s.Name + "`"
		if s.Flag != "--"+s.Name {
			name += " (flag `" + s.Flag + "`)"
		}
		def := "–"
		if s.Default != "" {
			def = "`" + s.Default + "`"
		}
		help := strings.ReplaceAll(s.Help, "|", `\|`)
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s | %s |\n", name, s.Env, def, cmp.Or(strings.Join(s.Commands, ", "), "all"), help)
	}
	return b.String()
}

func TestTheReferenceOfSettingsIsUpToDate(t *testing.T) {
	const path = "docs/configuration.md"
	// The state directory's default is this machine's.
	want := strings.ReplaceAll(reference(settings(t)), cli.DefaultState(), "a directory of the user's")
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, string(text), "run make docs")
}
