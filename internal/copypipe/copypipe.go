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
	return Start(from).Into(to)
}

// Pipe is a COPY that writes and has begun.
type Pipe struct {
	r     *io.PipeReader
	wrote chan error
}

// Start begins to run from, which gets ahead of its reader by a piece only. Into or Stop
// must follow.
func Start(from func(io.Writer) error) *Pipe {
	r, w := io.Pipe()
	p := &Pipe{r: r, wrote: make(chan error, 1)}
	go func() {
		b := bufio.NewWriterSize(w, piece)
		err := from(b)
		if err == nil {
			err = b.Flush()
		}
		w.CloseWithError(err) // nil reads as the end
		p.wrote <- err
		close(p.wrote)
	}()
	return p
}

// Into is the other half of Run.
func (p *Pipe) Into(to func(io.Reader) error) error {
	err := to(p.r)
	p.r.CloseWithError(errReaderGone)
	if werr := <-p.wrote; werr != nil && !errors.Is(werr, errReaderGone) {
		return werr
	}
	return err
}

// Stop ends what was begun, unless it has ended, without reading it to its end.
func (p *Pipe) Stop() {
	p.r.CloseWithError(errReaderGone)
	<-p.wrote
}
