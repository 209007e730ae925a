package api

import (
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

// The routes and the document name the same methods and paths.
func TestRoutesAreTheDocument(t *testing.T) {
	w := newWorld(t)
	var routes, documented []string
	for _, r := range w.server.echo.Routes() {
		routes = append(routes, r.Method+" "+regexp.MustCompile(`:(\w+)`).ReplaceAllString(r.Path, "{$1}"))
	}
	for path, item := range w.server.document.Paths.Map() {
		for method, op := range item.Operations() {
			documented = append(documented, method+" "+path)
			require.NotEmpty(t, op.Summary, "%s %s", method, path)
			require.NotEmpty(t, op.OperationID, "%s %s", method, path)
		}
	}
	slices.Sort(routes)
	slices.Sort(documented)
	require.Equal(t, documented, routes)

	a := w.get("", "/openapi.yaml")
	require.Equal(t, "application/yaml", a.header.Get("Content-Type"))
	require.Equal(t, documentYAML, a.raw)
}

// Every kind of problem has its place in the document.
func TestProblemsAreInTheDocument(t *testing.T) {
	doc := loadDocument()
	var listed, known []string
	for _, v := range doc.Components.Schemas["Problem"].Value.Properties["type"].Value.Enum {
		listed = append(listed, v.(string))
	}
	for kind := range kinds {
		known = append(known, "urn:backfill:problem:"+kind)
	}
	require.ElementsMatch(t, listed, known)
}

func TestMetrics(t *testing.T) {
	w := newWorld(t)
	w.get(control.Viewer, "/api/v1/backfills/1")
	w.get(control.Viewer, "/api/v1/no/such/address")
	w.call(control.Viewer, "BREW", "/api/v1/sites", "")
	text := string(w.get("", "/metrics").raw)
	require.Contains(t, text, `backfill_http_request_duration_seconds_count{method="GET",route="/api/v1/backfills/:id",status="404"} 1`)
	require.Contains(t, text, `backfill_http_event_streams 0`)
	for _, theirs := range []string{"BREW", "no/such", "backfills/1"} {
		require.NotContains(t, text, theirs, "a client must not make up labels")
	}
}
