// Package copypipe joins a COPY that writes with a COPY that reads, so that rows
// pass through without being decoded or held.
package copypipe

import (
	"errors"
	"io"
)

var errReaderGone = errors.New("the reading side has stopped")

// Run runs from and to against each other and returns when both have ended, with
// the error that made the other fail.
func Run(from func(io.Writer) error, to func(io.Reader) error) error {
	r, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		err := from(w)
		w.CloseWithError(err) // nil reads as the end
		wrote <- err
	}()
	err := to(r)
	r.CloseWithError(errReaderGone)
	if werr := <-wrote; werr != nil && !errors.Is(werr, errReaderGone) {
		return werr
	}
	return err
}
