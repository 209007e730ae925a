package connect

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestExplain(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, and says nothing
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	talker, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = talker.Close() })
	go func() {
		for {
			c, err := talker.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("HTTP/1.0 400 Bad Request\r\n\r\n"))
			_ = c.Close()
		}
	}()
	for dsn, want := range map[string]string{
		"postgres://ann:secret@127.0.0.1:1/shop":                                        "cannot connect to the database of s/a at 127.0.0.1:1/shop as ann: connection refused: check host and port, and that the server runs and listens there",
		"postgres://ann:secret@no-such-host.invalid/shop":                               "cannot connect to the database of s/a at no-such-host.invalid:5432/shop as ann: no host no-such-host.invalid: check the host's name",
		"postgres://ann:secret@127.0.0.1:1,127.0.0.2:2/shop?sslmode=disable":            "127.0.0.1:1,127.0.0.2:2/shop",
		"host=/nowhere user=ann password=secret dbname=shop":                            "at /nowhere:5432/shop as ann: no such socket",
		"postgres://ann:secret@" + silent.Addr().String() + "/shop?sslmode=disable":     "no answer in time: check host and port, and what firewalls let through",
		"postgres://ann:secret@" + talker.Addr().String() + "/shop?sslmode=verify-full": "check sslmode",
		"postgres://ann:secret@127.0.0.1:port/shop":                                     "the database of s/a: the connection string cannot be understood",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		_, err := pgx.Connect(ctx, dsn)
		cancel()
		require.Error(t, err)
		explained := Explain("the database of s/a", err)
		require.ErrorContains(t, explained, want)
		require.NotContains(t, explained.Error(), "secret")
		require.NotContains(t, explained.Error(), "\n")
		require.Equal(t, explained, Explain("something else", explained))
	}
	other := errors.New("another")
	require.Equal(t, other, Explain("x", other))
}
