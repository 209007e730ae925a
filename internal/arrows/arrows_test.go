// Package arrows holds the map of the house: who may import whom. It has tests only.
package arrows

import (
	"encoding/json"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// may lists, for each package of this module that has a rule, the only packages
// of this module and the only foreign modules of weight it may import.
var may = map[string][]string{
	"internal/backfill": {},
	"internal/row":      {"github.com/jackc/pgx/v5"},
	"internal/pace":     {},
	"internal/copypipe": {},
	"internal/proof":    {},
	"shadow":            {}, // applications import it
	"api/client":        {}, // scripts in Go import it
	"internal/connect":  {"github.com/jackc/pgx/v5", "golang.org/x/sys"},
	"internal/control":  {"internal/backfill", "internal/connect", "internal/row", "internal/pace", "internal/proof", "github.com/jackc/pgx/v5", "github.com/pressly/goose/v3", "golang.org/x/crypto"},
	"internal/side":     {"internal/backfill", "internal/connect", "internal/row", "internal/copypipe", "internal/proof", "github.com/jackc/pgx/v5"},
	"internal/metrics":  {"internal/control", "internal/pace", "github.com/prometheus/client_golang", "github.com/jackc/pgx/v5", "go.temporal.io/sdk"},
	"activities": {"internal/backfill", "internal/control", "internal/side", "internal/row", "internal/pace", "internal/copypipe", "internal/proof",
		"go.temporal.io/sdk", "go.uber.org/zap"},
	"workflows": {"activities", "internal/backfill", "internal/control", "go.temporal.io/sdk", "go.temporal.io/api"},
	"worker":    {"activities", "workflows", "internal/backfill", "internal/control", "go.temporal.io/sdk", "go.temporal.io/api", "go.uber.org/zap"},
	"api": {"workflows", "internal/backfill", "internal/control", "internal/row", "internal/pace", "internal/proof", "github.com/labstack/echo/v4", "github.com/getkin/kin-openapi",
		"github.com/prometheus/client_golang", "github.com/jackc/pgx/v5", "go.temporal.io/sdk", "go.temporal.io/api", "go.uber.org/zap", "github.com/santhosh-tekuri/jsonschema/v6", "golang.org/x/text", "golang.org/x/sync", "go.opentelemetry.io/otel"},
	"ui":             {"api", "internal/oidc", "internal/backfill", "internal/control", "internal/row", "internal/pace", "github.com/labstack/echo/v4", "go.uber.org/zap"},
	"internal/oidc":  {"internal/backfill", "internal/control", "github.com/coreos/go-oidc/v3", "golang.org/x/oauth2"},
	"internal/cli":   {"api/client", "internal/backfill", "internal/control", "internal/pace", "internal/proof", "go.yaml.in/yaml/v3", "github.com/alecthomas/kong", "golang.org/x/term"},
	"internal/local": {"github.com/jackc/pgx/v5", "go.temporal.io/sdk", "go.temporal.io/api", "golang.org/x/sys"},
}

// only says who may import a module at all.
var only = map[string][]string{
	"github.com/labstack/echo/v4":         {"api", "ui", "internal/dev", "internal/serve"},
	"github.com/jackc/pgx/v5":             {"internal/control", "internal/side", "internal/row", "internal/connect", "internal/local", "internal/dev", "internal/testkit", "internal/metrics", "api", "docs/guides"},
	"github.com/pressly/goose/v3":         {"internal/control"},
	"golang.org/x/crypto":                 {"internal/control", ""},
	"github.com/getkin/kin-openapi":       {"api"},
	"github.com/prometheus/client_golang": {"api", "internal/metrics", "internal/serve", "internal/dev"},
	"github.com/alecthomas/kong":          {"internal/cli", ""},
	"github.com/coreos/go-oidc/v3":        {"internal/oidc"},
	"golang.org/x/oauth2":                 {"internal/oidc"},
}

type pkg struct {
	ImportPath string
	Imports    []string
	Module     *struct{ Path string }
}

func packages(t *testing.T) []pkg {
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports,Module", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	require.NoError(t, err)
	var all []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			return all
		} else {
			require.NoError(t, err)
		}
		all = append(all, p)
	}
}

func within(path string, allowed []string) bool {
	for _, a := range allowed {
		if path == a || a != "" && strings.HasPrefix(path, a+"/") {
			return true
		}
	}
	return false
}

func TestImportsFollowTheMap(t *testing.T) {
	all := packages(t)
	require.NotEmpty(t, all)
	for _, p := range all {
		name := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, "backfill"), "/")
		allowed, ruled := may[name]
		for _, imported := range p.Imports {
			own := strings.HasPrefix(imported, "backfill/")
			path := strings.TrimPrefix(imported, "backfill/")
			if !own && !strings.Contains(strings.Split(imported, "/")[0], ".") {
				continue // standard library
			}
			if ruled && !within(path, allowed) {
				t.Errorf("%s must not import %s", name, imported)
			}
			for module, users := range only {
				if within(imported, []string{module}) && !within(name, users) && !strings.HasPrefix(name, "bench") {
					t.Errorf("%s must not import %s: only %v may", name, imported, users)
				}
			}
		}
	}
	for name := range may {
		found := false
		for _, p := range all {
			found = found || p.ImportPath == "backfill/"+name
		}
		require.True(t, found, "the map names %s, which does not exist", name)
	}
}
