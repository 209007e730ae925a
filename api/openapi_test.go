package api

import (
	"fmt"
	"regexp"
	"slices"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
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

// Every operation shows what is sent and what comes back, and that fits its schema.
func TestOperationsHaveExamples(t *testing.T) {
	doc := loadDocument() // which holds every example to its schema
	shown := func(m openapi3.Content, where string) {
		media := m.Get("application/json")
		if media == nil {
			return
		}
		require.True(t, media.Example != nil || len(media.Examples) > 0, "%s has no example", where)
		for name, x := range media.Examples {
			require.NotNil(t, x.Value, "%s: %s", where, name)
			require.NoError(t, doc.ValidateSchemaJSON(media.Schema.Value, x.Value.Value), "%s: %s", where, name)
		}
		if media.Example != nil {
			require.NoError(t, doc.ValidateSchemaJSON(media.Schema.Value, media.Example), where)
		}
	}
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			where := method + " " + path
			if op.RequestBody != nil {
				shown(op.RequestBody.Value.Content, where+" request")
			}
			for status, r := range op.Responses.Map() {
				shown(r.Value.Content, where+" "+status)
			}
		}
	}
}

// Every kind of problem is explained under its status.
func TestProblemsAreExplained(t *testing.T) {
	text := *loadDocument().Components.Responses["Problem"].Value.Description
	for kind, k := range kinds {
		require.Regexp(t, fmt.Sprintf("(?m)^\\| `%s` \\| %d \\| \\w", kind, k.status), text)
	}
}
