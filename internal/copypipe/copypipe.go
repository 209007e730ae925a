// Package copypipe joins a COPY that writes with a COPY that reads, so that rows
// pass through without being decoded or held.
package copypipe

import (
	"bufio"
	"errors"
	"io"
)

var errReaderGone = errors.New("the reading side has stopped")

// piece is how many bytes pass at once. COPY hands out a row at a time: each by itself
// would be a switch between the two and a packet to the server that reads.
const piece = 32 << 10

// Run runs from and to against each other and returns when both have ended, with
// the error that made the other fail.
func Run(from func(io.Writer) error, to func(io.Reader) error) error {
	r, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		b := bufio.NewWriterSize(w, piece)
		err := from(b)
		if err == nil {
			err = b.Flush()
		}
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
