package serve

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	sdk "go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	"backfill/internal/local"
	"backfill/internal/metrics"
	"backfill/internal/testkit"
	"backfill/worker"
	"backfill/workflows"
)

func startTemporal(t *testing.T) *local.Temporal {
	t.Helper()
	server, err := local.StartTemporal(t.Context(), local.TemporalOptions{Dir: filepath.Join(t.TempDir(), "temporal")})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Kill() })
	return server
}

// authority signs certificates.
type authority struct {
	*testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	a := &authority{T: t, key: key, cert: &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}}
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, key.Public(), key)
	require.NoError(t, err)
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

// issue writes a certificate and its key into two files.
func (a *authority) issue(cert, key string) {
	a.Helper()
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"temporal.test"}},
		a.cert, own.Public(), a.key)
	require.NoError(a, err)
	secret, err := x509.MarshalPKCS8PrivateKey(own)
	require.NoError(a, err)
	require.NoError(a, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	require.NoError(a, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
}

// server is how a server of the name temporal.test is to be reached that lets in those
// whose certificates the authority has signed.
func (a *authority) server() *tls.Config {
	a.Helper()
	dir := a.TempDir()
	a.issue(filepath.Join(dir, "cert"), filepath.Join(dir, "key"))
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "cert"), filepath.Join(dir, "key"))
	require.NoError(a, err)
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(a.pem)
	return &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: []string{"h2"}}
}

// inFront listens with TLS in front of a server without.
func inFront(t *testing.T, target string, cfg *tls.Config) (hostPort string) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer from.Close()
				to, err := net.Dial("tcp", target)
				if err != nil {
					return
				}
				defer to.Close()
				go func() { _, _ = io.Copy(to, from); _ = to.Close() }()
				_, _ = io.Copy(from, to)
			}()
		}
	}()
	return l.Addr().String()
}

func dial(t *testing.T, at Temporal) client.Client {
	t.Helper()
	c, _, err := at.Dial(zap.NewNop(), metrics.NewTemporal())
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func healthy(ctx context.Context, c client.Client) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err := c.CheckHealth(ctx, &client.CheckHealthRequest{})
	return err
}

func TestTemporalBehindMutualTLS(t *testing.T) {
	good, bad, dir := newAuthority(t), newAuthority(t), t.TempDir()
	cert, key, ca := filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "ca")
	require.NoError(t, os.WriteFile(ca, good.pem, 0o600))
	bad.issue(cert, key)
	t.Setenv("TEMPORAL_ADDRESS", inFront(t, startTemporal(t).HostPort, good.server()))
	t.Setenv("TEMPORAL_TLS", "true")
	t.Setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", ca)
	t.Setenv("TEMPORAL_TLS_SERVER_NAME", "temporal.test")
	require.Error(t, healthy(t.Context(), dial(t, Temporal{Environment: true})), "without a certificate")

	t.Setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", cert)
	t.Setenv("TEMPORAL_TLS_CLIENT_KEY_PATH", key)
	c := dial(t, Temporal{Environment: true})
	require.Error(t, healthy(t.Context(), c), "a certificate of somebody else")
	// It is renewed while the process runs.
	good.issue(cert, key)
	testkit.Eventually(t, "the new certificate is used", func() bool { return healthy(t.Context(), c) == nil })
	_, err := c.CountWorkflow(t.Context(), &workflowservice.CountWorkflowExecutionsRequest{Namespace: "default"})
	require.NoError(t, err)

	t.Setenv("TEMPORAL_TLS_SERVER_NAME", "another.test")
	require.Error(t, healthy(t.Context(), dial(t, Temporal{Environment: true})), "a server of another name")
	require.NoError(t, os.WriteFile(ca, bad.pem, 0o600))
	t.Setenv("TEMPORAL_TLS_SERVER_NAME", "temporal.test")
	require.Error(t, healthy(t.Context(), dial(t, Temporal{Environment: true})), "a server of another authority")
}

// system answers what a client asks of a server first.
type system struct {
	workflowservice.UnimplementedWorkflowServiceServer
}

func (system) GetSystemInfo(context.Context, *workflowservice.GetSystemInfoRequest) (*workflowservice.GetSystemInfoResponse, error) {
	return &workflowservice.GetSystemInfoResponse{}, nil
}

func TestTheAPIKeyIsSentWithEveryCall(t *testing.T) {
	a := newAuthority(t)
	cfg := a.server()
	cfg.ClientAuth = tls.NoClientCert
	got := make(chan metadata.MD, 10)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(cfg)), grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		got <- md
		return handler(ctx, req)
	}))
	checks := health.NewServer()
	checks.SetServingStatus("temporal.api.workflowservice.v1.WorkflowService", healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(server, checks)
	workflowservice.RegisterWorkflowServiceServer(server, system{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)

	// From a file, as the address and the namespace; a flag wins.
	ca, file := filepath.Join(t.TempDir(), "ca"), filepath.Join(t.TempDir(), "temporal.toml")
	require.NoError(t, os.WriteFile(ca, a.pem, 0o600))
	require.NoError(t, os.WriteFile(file, []byte("[profile.cloud]\naddress = \"127.0.0.1:1\"\nnamespace = \"shop\"\napi_key = \"key-of-shop\"\n"+
		"[profile.cloud.tls]\nserver_ca_cert_path = \""+ca+"\"\nserver_name = \"temporal.test\"\n"), 0o600))
	t.Setenv("TEMPORAL_CONFIG_FILE", file)
	t.Setenv("TEMPORAL_PROFILE", "cloud")
	c, namespace, err := Temporal{HostPort: l.Addr().String(), Environment: true}.Dial(zap.NewNop(), metrics.NewTemporal())
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, "shop", namespace)
	require.NoError(t, healthy(t.Context(), c))
	require.Equal(t, []string{"Bearer key-of-shop"}, (<-got).Get("authorization"))

	// What an installation of its own says of itself leads nobody elsewhere.
	_, namespace, err = Temporal{HostPort: "127.0.0.1:1"}.Dial(zap.NewNop(), metrics.NewTemporal())
	require.NoError(t, err)
	require.Equal(t, "default", namespace)
}

func TestSettingsOfTemporalThatAreRefused(t *testing.T) {
	_, _, err := Temporal{Environment: true}.Dial(zap.NewNop(), metrics.NewTemporal())
	require.ErrorContains(t, err, "--temporal HOST:PORT, or TEMPORAL_ADDRESS")
	t.Setenv("TEMPORAL_CONFIG_FILE", filepath.Join(t.TempDir(), "none.toml"))
	_, _, err = Temporal{HostPort: "h:1", Environment: true}.Dial(zap.NewNop(), metrics.NewTemporal())
	require.ErrorContains(t, err, "none.toml: no such file")
	file := filepath.Join(t.TempDir(), "temporal.toml")
	require.NoError(t, os.WriteFile(file, []byte("[profile.default]\nadress = \"h:1\"\n"), 0o600))
	t.Setenv("TEMPORAL_CONFIG_FILE", file)
	_, _, err = Temporal{HostPort: "h:1", Environment: true}.Dial(zap.NewNop(), metrics.NewTemporal())
	require.ErrorContains(t, err, "adress")
}

// Echo is a workflow that takes and gives a payload, and fails when told so.
func Echo(ctx workflow.Context, text string) (string, error) {
	return "heard: " + text, workflow.Sleep(ctx, time.Millisecond)
}

func TestTemporalSeesNoPayloadThatIsEncrypted(t *testing.T) {
	at := Temporal{HostPort: startTemporal(t).HostPort, Keys: keyFile(t, keyLine("one", 1))}
	c := dial(t, at)
	w := sdk.New(c, "echo", sdk.Options{})
	w.RegisterWorkflow(Echo)
	require.NoError(t, w.Start())
	defer w.Stop()
	run, err := c.ExecuteWorkflow(t.Context(), client.StartWorkflowOptions{ID: "echo", TaskQueue: "echo", StaticSummary: "about 4711"}, Echo, "row 4711")
	require.NoError(t, err)
	var answer string
	require.NoError(t, run.Get(t.Context(), &answer))
	require.Equal(t, "heard: row 4711", answer)

	at.Keys = ""
	events := dial(t, at).GetWorkflowHistory(t.Context(), "echo", "", false, enumspb.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
	sealed := 0
	for events.HasNext() {
		event, err := events.Next()
		require.NoError(t, err)
		text := protojson.Format(event)
		require.NotContains(t, text, "4711")
		// Of what is base64 there.
		require.NotContains(t, text, "NDcxM")
		for _, p := range append(event.GetWorkflowExecutionStartedEventAttributes().GetInput().GetPayloads(), event.GetWorkflowExecutionCompletedEventAttributes().GetResult().GetPayloads()...) {
			require.Equal(t, encrypted, string(p.Metadata[encodingName]))
			sealed++
		}
	}
	require.Equal(t, 2, sealed)
}

// A control worker in a namespace that knows nothing of us adds the search attributes,
// and as a version of a deployment runs what is given to that version.
func TestAControlWorkerPreparesItsNamespaceAndIsAVersion(t *testing.T) {
	server := startTemporal(t)
	at := Temporal{HostPort: server.HostPort, Namespace: "shop"}
	c := dial(t, at)
	_, err := c.WorkflowService().RegisterNamespace(t.Context(), &workflowservice.RegisterNamespaceRequest{Namespace: "shop", WorkflowExecutionRetentionPeriod: durationpb.New(24 * time.Hour)})
	require.NoError(t, err)
	testkit.Eventually(t, "the namespace is known", func() bool {
		_, err := c.CountWorkflow(t.Context(), &workflowservice.CountWorkflowExecutionsRequest{Namespace: "shop"})
		return err == nil
	})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- worker.Control(ctx, worker.Config{Temporal: c, Namespace: "shop", Name: "test", Deployment: "backfill", Build: "2", Store: testkit.Open(t, testkit.ControlDSN(t)), Log: zap.NewNop()})
	}()
	defer func() { stop(); require.NoError(t, <-done) }()
	testkit.Eventually(t, "the search attributes are there", func() bool {
		known, err := c.OperatorService().ListSearchAttributes(t.Context(), &operatorservice.ListSearchAttributesRequest{Namespace: "shop"})
		for _, a := range workflows.SearchAttributes {
			if err != nil || known.CustomAttributes[a.GetName()] != a.GetValueType() {
				return false
			}
		}
		return true
	})
	testkit.Eventually(t, "the version is the current one", func() bool {
		_, err := c.WorkerDeploymentClient().GetHandle("backfill").SetCurrentVersion(t.Context(), client.WorkerDeploymentSetCurrentVersionOptions{BuildID: "2"})
		return err == nil
	})
	testkit.Eventually(t, "the sweep runs on it", func() bool {
		about, err := c.DescribeWorkflowExecution(t.Context(), workflows.SweepID, "")
		v := about.GetWorkflowExecutionInfo().GetVersioningInfo()
		return err == nil && v.GetBehavior() == enumspb.VERSIONING_BEHAVIOR_AUTO_UPGRADE && v.GetDeploymentVersion().GetBuildId() == "2"
	})
}
