package main

import (
	"bufio"
	"context"
	"io"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/api/workflowservice/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// serve runs the command until the test calls stop, and returns where its frontend is.
func serve(t *testing.T, db string) (hostPort string, stop func()) {
	t.Helper()
	stdin, parent := io.Pipe()
	out, stdout := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := run([]string{"--db", db, "--listen", "127.0.0.1:0", "--ui", "127.0.0.1:0", "--exit-with-stdin"}, stdin, stdout)
		_ = stdout.CloseWithError(err)
		ended <- err
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	words := strings.Fields(line)
	require.Len(t, words, 4, line)
	require.Equal(t, "ready:", words[0])
	require.Equal(t, "ui:", words[2])
	require.Regexp(t, `^http://127\.0\.0\.1:\d+$`, words[3])
	return words[1], func() {
		require.NoError(t, parent.Close())
		require.NoError(t, <-ended)
	}
}

func TestAnOlderFileGetsTheSearchAttributesItLacks(t *testing.T) {
	db := filepath.Join(t.TempDir(), "with ? and %41 in its name.db")
	all := maps.Clone(searchAttributes)
	delete(searchAttributes, "BackfillRows")
	t.Cleanup(func() { searchAttributes = all })
	_, stop := serve(t, db)
	stop()

	searchAttributes = all
	hostPort, stop := serve(t, db)
	defer stop()
	conn, err := grpc.NewClient(hostPort, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	known, err := operatorservice.NewOperatorServiceClient(conn).ListSearchAttributes(context.Background(),
		&operatorservice.ListSearchAttributesRequest{Namespace: namespace})
	require.NoError(t, err)
	require.Equal(t, all, known.GetCustomAttributes())
	found, err := workflowservice.NewWorkflowServiceClient(conn).CountWorkflowExecutions(context.Background(),
		&workflowservice.CountWorkflowExecutionsRequest{
			Namespace: namespace,
			Query:     "BackfillSite = 'north' AND BackfillState IN ('PENDING', 'RELEASING') AND BackfillRows > 10",
		})
	require.NoError(t, err)
	require.Zero(t, found.GetCount())
}

func TestWrongUse(t *testing.T) {
	for name, args := range map[string][]string{
		"no file":       {},
		"unknown flag":  {"--db", "x.db", "--colour"},
		"argument":      {"--db", "x.db", "serve"},
		"unknown level": {"--db", "x.db", "--log-level", "loud"},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorAs(t, run(args, strings.NewReader(""), io.Discard), new(usageError))
		})
	}
	require.NoError(t, run([]string{"--help"}, strings.NewReader(""), io.Discard))
}
