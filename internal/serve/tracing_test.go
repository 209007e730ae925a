package serve

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace/noop"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"go.temporal.io/sdk/client"
	sdk "go.temporal.io/sdk/worker"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"backfill/api"
	"backfill/internal/testkit"
)

// collect is a place for traces: it notes the trace of each span, by the span's name.
func collect(t *testing.T) (url string, spans func() map[string]string) {
	t.Helper()
	var mu sync.Mutex
	all := map[string]string{}
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil && r.Header.Get("Content-Encoding") == "gzip" {
			var z *gzip.Reader
			if z, err = gzip.NewReader(bytes.NewReader(body)); err == nil {
				body, err = io.ReadAll(z)
			}
		}
		var sent collector.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(body, &sent)
		}
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		for _, r := range sent.ResourceSpans {
			for _, scope := range r.ScopeSpans {
				for _, span := range scope.Spans {
					all[span.Name] = hex.EncodeToString(span.TraceId)
				}
			}
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, func() map[string]string { mu.Lock(); defer mu.Unlock(); return all }
}

// A trace that a client began goes on in the API, and one begun there or elsewhere goes on
// in workflows; without a place for them nothing is traced.
func TestTracesGoFromTheClientToTheWorkflow(t *testing.T) {
	url, spans := collect(t)
	server := startTemporal(t)
	store := testkit.Open(t, testkit.ControlDSN(t))
	once := func(traced bool) {
		stop, err := Trace(t.Context(), "api", zap.NewNop())
		require.NoError(t, err)
		defer otel.SetTracerProvider(noop.NewTracerProvider())
		c := dial(t, Temporal{HostPort: server.HostPort})
		w := sdk.New(c, "echo", sdk.Options{})
		w.RegisterWorkflow(Echo)
		require.NoError(t, w.Start())
		ctx, span := otel.Tracer("test").Start(t.Context(), "outside")
		run, err := c.ExecuteWorkflow(ctx, client.StartWorkflowOptions{TaskQueue: "echo"}, Echo, "hello")
		require.NoError(t, err)
		require.NoError(t, run.Get(ctx, nil))
		span.End()
		w.Stop()

		web := HTTP(&api.Service{Store: store, Runs: api.NewRuns(c), Log: zap.NewNop()}, api.Trust{}, nil, zap.NewNop(), prometheus.NewRegistry())
		l, err := Listen("127.0.0.1:0")
		require.NoError(t, err)
		serving, end := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- web.Serve(serving, l) }()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.Addr().String()+"/healthz", nil)
		require.NoError(t, err)
		r.Header.Set("traceparent", "00-"+strings.Repeat("ab", 16)+"-"+strings.Repeat("cd", 8)+"-01")
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		end()
		require.NoError(t, <-served)
		stop()
		if !traced {
			require.Empty(t, spans())
			return
		}
		got := spans()
		require.Equal(t, strings.Repeat("ab", 16), got["GET /healthz"], got)
		require.NotEmpty(t, got["outside"])
		require.Equal(t, got["outside"], got["StartWorkflow:Echo"], got)
		require.Equal(t, got["outside"], got["RunWorkflow:Echo"], got)
	}
	once(false)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
	once(true)

	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	_, err := Trace(t.Context(), "api", zap.NewNop())
	require.ErrorContains(t, err, "http/protobuf")
}
