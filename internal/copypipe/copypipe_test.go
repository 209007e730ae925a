package copypipe_test

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/copypipe"
)

func TestRun(t *testing.T) {
	broken := errors.New("broken")
	var got bytes.Buffer
	all := func(r io.Reader) error { _, err := got.ReadFrom(r); return err }
	write := func(w io.Writer) error { _, err := w.Write(make([]byte, 100_000)); return err }

	require.NoError(t, copypipe.Run(write, all))
	require.Equal(t, 100_000, got.Len())

	require.ErrorIs(t, copypipe.Run(func(io.Writer) error { return broken }, all), broken)
	require.ErrorIs(t, copypipe.Run(write, func(io.Reader) error { return broken }), broken)
	// A reader that stops early without error has all it wants.
	require.NoError(t, copypipe.Run(write, func(r io.Reader) error { _, err := r.Read(make([]byte, 1)); return err }))
	// The error that made the other fail is the one to tell.
	require.ErrorIs(t, copypipe.Run(func(w io.Writer) error { _ = write(w); return broken }, func(r io.Reader) error { _, err := io.ReadAll(r); return err }), broken)
}
