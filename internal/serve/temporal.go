package serve

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/contrib/envconfig"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"backfill/internal/metrics"
	"backfill/worker"
)

// Temporal says where the workflow engine is, and how to get in.
type Temporal struct {
	// HostPort and Namespace win over what Environment gives. The namespace is
	// "default" when neither names one.
	HostPort, Namespace string
	// Environment takes address, namespace, TLS, API key and headers from where
	// Temporal's own programs take them: TEMPORAL_… and the file TEMPORAL_CONFIG_FILE.
	Environment bool
	// Keys is a file of keys that payloads are encrypted with; see readKeys.
	Keys string
	// Deployment and Build make a control worker one version of a worker deployment.
	Deployment, Build string
}

// reconnectWithin is how long after its return Temporal may still count as away: a
// person whose approval was refused tries again at once.
const reconnectWithin = time.Second

// Dial makes a client that connects when it is first needed, so that a Temporal
// that is away now is waited for by what needs it. It also returns the namespace.
// What the client and its workers report goes to figures.
func (t Temporal) Dial(log *zap.Logger, figures *metrics.Temporal) (client.Client, string, error) {
	o, err := t.options()
	if err != nil {
		return nil, "", err
	}
	reconnect := grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: 5 * time.Second}
	reconnect.Backoff.MaxDelay = reconnectWithin
	o.ConnectionOptions.DialOptions = []grpc.DialOption{grpc.WithConnectParams(reconnect)}
	o.Logger, o.MetricsHandler = worker.Logger(log.Named("temporal")), figures.Handler()
	if o.Interceptors, err = traced(); err != nil {
		return nil, "", err
	}
	c, err := client.NewLazyClient(o)
	return c, o.Namespace, err
}

func (t Temporal) options() (o client.Options, err error) {
	if t.Environment {
		if o, err = environment(); err != nil {
			return o, fmt.Errorf("settings of Temporal: %w", err)
		}
	}
	o.HostPort, o.Namespace = cmp.Or(t.HostPort, o.HostPort), cmp.Or(t.Namespace, o.Namespace, "default")
	if o.HostPort == "" {
		return o, errors.New("where is Temporal? Give --temporal HOST:PORT, or TEMPORAL_ADDRESS")
	}
	if t.Keys != "" {
		keys, err := readKeys(t.Keys)
		if err != nil {
			return o, err
		}
		o.DataConverter = converter.NewCodecDataConverter(converter.GetDefaultDataConverter(), keys)
		// Messages of errors may quote keys, too.
		o.FailureConverter = temporal.NewDefaultFailureConverter(temporal.DefaultFailureConverterOptions{DataConverter: o.DataConverter, EncodeCommonAttributes: true})
	}
	return o, nil
}

// environment is what Temporal's own programs would take from the environment.
func environment() (o client.Options, err error) {
	// A file that was named and is not there would count as an empty one.
	if path := os.Getenv("TEMPORAL_CONFIG_FILE"); path != "" {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return o, fmt.Errorf("TEMPORAL_CONFIG_FILE: %w", err)
		}
	}
	profile, err := envconfig.LoadClientConfigProfile(envconfig.LoadClientConfigProfileOptions{ConfigFileStrict: true})
	if err != nil {
		return o, err
	}
	if o, err = profile.ToClientOptions(envconfig.ToClientOptionsRequest{}); err != nil {
		return o, err
	}
	if p := profile.TLS; p != nil && p.ClientCertPath != "" && o.ConnectionOptions.TLS != nil {
		// Read for each connection, so that a certificate may be renewed under way.
		o.ConnectionOptions.TLS.Certificates = nil
		o.ConnectionOptions.TLS.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(p.ClientCertPath, p.ClientKeyPath)
			return &pair, err
		}
	}
	return o, nil
}
