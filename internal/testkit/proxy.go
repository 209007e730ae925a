package testkit

import (
	"io"
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Proxy passes connections on to a server, and can do to them what a bad network
// or a stopped process does.
type Proxy struct {
	DSN string // leads through the proxy

	listener net.Listener
	mu       sync.Mutex
	target   string
	open     map[net.Conn]bool
	next     func()
	gate     *sync.RWMutex // held for writing while nothing passes
}

// NewProxy listens in front of the server of a connection string until the test ends.
func NewProxy(t testing.TB, dsn string) *Proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &Proxy{listener: l, target: u.Host, open: map[net.Conn]bool{}, gate: &sync.RWMutex{}}
	u.Host = l.Addr().String()
	p.DSN = u.String()
	go p.accept()
	t.Cleanup(func() {
		_ = l.Close()
		p.Cut()
	})
	return p
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		go p.serve(c)
	}
}

func (p *Proxy) serve(client net.Conn) {
	p.mu.Lock()
	target, next := p.target, p.next
	p.next = nil
	p.mu.Unlock()
	if next != nil {
		next()
	}
	server, err := net.Dial("tcp", target)
	if err != nil {
		_ = client.Close()
		return
	}
	p.mu.Lock()
	p.open[client], p.open[server] = true, true
	p.mu.Unlock()
	var ends sync.WaitGroup
	for from, to := range map[net.Conn]net.Conn{client: server, server: client} {
		ends.Go(func() {
			_, _ = io.Copy(gated{to, p.gate}, from)
			// Half a connection is of no use to either end.
			_, _ = client.Close(), server.Close()
		})
	}
	ends.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, client)
	delete(p.open, server)
}

// gated holds back what is written while the gate is closed.
type gated struct {
	io.Writer
	gate *sync.RWMutex
}

func (g gated) Write(b []byte) (int, error) {
	g.gate.RLock()
	defer g.gate.RUnlock()
	return g.Writer.Write(b)
}

// Cut breaks every connection there is. What the servers were sent, they may have done.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		_ = c.Close()
	}
}

// Lead makes new connections go to another server; those there are stay.
func (p *Proxy) Lead(t testing.TB, dsn string) {
	t.Helper()
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = u.Host
}

// Freeze lets nothing pass, as if the process behind the proxy had been stopped,
// until the returned function is called.
func (p *Proxy) Freeze() (thaw func()) {
	p.gate.Lock()
	return p.gate.Unlock
}

// Next calls fn before the next new connection reaches the server.
func (p *Proxy) Next(fn func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = fn
}
