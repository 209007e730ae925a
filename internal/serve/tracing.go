package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.37.0"
	"go.temporal.io/sdk/contrib/opentelemetry"
	"go.temporal.io/sdk/interceptor"
	"go.uber.org/zap"
)

// tracing reports whether OpenTelemetry's settings name a place for traces.
func tracing() bool {
	return (os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "") &&
		!strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") && os.Getenv("OTEL_TRACES_EXPORTER") != "none"
}

// Trace has requests, workflows and activities of this process traced, by OTLP over HTTP to
// where OTEL_EXPORTER_OTLP_ENDPOINT says, and as OpenTelemetry's other settings say. Without
// that setting nothing is traced. stop sends what is left; a place that is away costs spans,
// never work.
func Trace(ctx context.Context, role string, log *zap.Logger) (stop func(), err error) {
	if !tracing() {
		return func() {}, nil
	}
	if p := os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"); p != "" && p != "http/protobuf" {
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%s: traces go by http/protobuf only; set that, and the collector's port for it (4318)", p)
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	// What the environment says of the process wins over what is said here.
	about, err := resource.New(ctx, resource.WithAttributes(semconv.ServiceName("backfill-"+role)), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("traces: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(about))
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are not sent", zap.Error(err)) }))
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		_ = provider.Shutdown(ctx) // what could not be sent was logged
	}, nil
}

// traced are the interceptors that carry a trace from the API through workflows to
// activities.
func traced() ([]interceptor.ClientInterceptor, error) {
	if !tracing() {
		return nil, nil
	}
	i, err := opentelemetry.NewTracingInterceptor(opentelemetry.TracerOptions{
		TextMapPropagator: otel.GetTextMapPropagator(), AllowInvalidParentSpans: true})
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	return []interceptor.ClientInterceptor{i}, nil
}
