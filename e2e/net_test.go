package e2e

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A badHost is a host that pg-status can be given and that serves no
// PostgreSQL. Each has an address, and so a name, of its own.
type badHost struct {
	name string
	port int
	seen atomic.Int64
}

// addr is host:port, for envFor.
func (b *badHost) addr() string { return net.JoinHostPort(b.name, strconv.Itoa(b.port)) }

// connections returns how many have been made to the host so far.
func (b *badHost) connections() int { return int(b.seen.Load()) }

// badHosts counts them, to give each an address.
var badHosts atomic.Int64

func newBadHost(t *testing.T) *badHost {
	t.Helper()
	n := badHosts.Add(1)
	b := &badHost{name: fmt.Sprintf("127.1.%d.%d", n/250, n%250+1)}
	b.port = freePort(t, b.name)
	return b
}

// serve has the host accept connections, each of which serve then has.
func (b *badHost) serve(t *testing.T, serve func(net.Conn)) {
	t.Helper()
	l, err := net.Listen("tcp", b.addr())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var conns connSet
	t.Cleanup(func() {
		close(done)
		l.Close()
		conns.closeAll()
	})
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			b.seen.Add(1)
			conns.add(conn)
			go func() {
				serve(conn)
				conns.close(conn)
			}()
		}
	}()
}

// silentHost accepts connections and says nothing.
func silentHost(t *testing.T) *badHost {
	t.Helper()
	b := newBadHost(t)
	b.serve(t, func(conn net.Conn) {
		for buf := make([]byte, 1024); ; {
			if _, err := conn.Read(buf); err != nil {
				return
			}
		}
	})
	return b
}

// resettingHost accepts connections and resets them once they have sent
// something.
func resettingHost(t *testing.T) *badHost {
	t.Helper()
	b := newBadHost(t)
	b.serve(t, func(conn net.Conn) {
		conn.Read(make([]byte, 1024))
		conn.(*net.TCPConn).SetLinger(0)
	})
	return b
}

// babblingHost accepts connections and answers with what is not PostgreSQL's
// protocol, for as long as anyone reads it.
func babblingHost(t *testing.T) *badHost {
	t.Helper()
	b := newBadHost(t)
	b.serve(t, func(conn net.Conn) {
		for {
			if _, err := conn.Write([]byte("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")); err != nil {
				return
			}
		}
	})
	return b
}

// refusingHost refuses connections. Its port is held, so that nobody else comes
// to listen on it.
func refusingHost(t *testing.T) *badHost {
	t.Helper()
	b := newBadHost(t)
	b.bind(t)
	return b
}

// bind takes the host's port without listening, and returns the socket.
func (b *badHost) bind(t *testing.T) (fd int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.CloseOnExec(fd)
	t.Cleanup(func() { unix.Close(fd) })
	sa := &unix.SockaddrInet4{Port: b.port}
	copy(sa.Addr[:], net.ParseIP(b.name).To4())
	if err := unix.Bind(fd, sa); err != nil {
		t.Fatal(err)
	}
	return fd
}

// blackHole answers nothing, not even a connection attempt, like a host that is
// switched off: the backlog of its socket is full, so that the kernel drops what
// arrives.
func blackHole(t *testing.T) *badHost {
	t.Helper()
	b := newBadHost(t)
	fd := b.bind(t)
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	for range 16 {
		conn, err := net.DialTimeout("tcp", b.addr(), 300*time.Millisecond)
		if err != nil {
			return b
		}
		t.Cleanup(func() { conn.Close() })
	}
	t.Fatal("the backlog does not fill")
	return nil
}

// A proxy is a path to a node, which can be cut while other paths work. It has
// the node's host name, and a port of its own.
type proxy struct {
	t      *testing.T
	listen string
	target string
	conns  connSet
	seen   atomic.Int64

	mu       sync.Mutex // guards the following
	listener net.Listener
	gate     chan struct{} // closed while bytes may pass
	wait     time.Duration // for every piece of data, each way
}

// proxy returns a path to node i that works.
func (c *cluster) proxy(i int) *proxy {
	c.t.Helper()
	p := &proxy{
		t:      c.t,
		listen: net.JoinHostPort(c.name(i), strconv.Itoa(freePort(c.t, c.name(i)))),
		target: c.addr(i),
		gate:   make(chan struct{}),
	}
	close(p.gate)
	p.open()
	c.t.Cleanup(func() {
		p.cut()
		p.resume() // lets the goroutines end
		p.cut()
	})
	return p
}

// addr is host:port, for envFor.
func (p *proxy) addr() string { return p.listen }

// connections returns how many have been made through the proxy so far.
func (p *proxy) connections() int { return int(p.seen.Load()) }

// cut resets the connections and refuses new ones, like a host whose server has
// crashed.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		p.listener.Close()
		p.listener = nil
	}
	p.conns.closeAll()
}

// stall lets nothing pass, either way, like a network that drops everything. New
// connections are still accepted, by the kernel, and get no answer.
func (p *proxy) stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.gate:
		p.gate = make(chan struct{})
	default:
	}
}

// delay has every piece of data, in either direction, take d longer.
func (p *proxy) delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wait = d
}

// resume undoes cut, stall and delay. What a stall held back arrives now.
func (p *proxy) resume() {
	p.t.Helper()
	p.mu.Lock()
	p.wait = 0
	select {
	case <-p.gate:
	default:
		close(p.gate)
	}
	closed := p.listener == nil
	p.mu.Unlock()
	if closed {
		p.open()
	}
}

func (p *proxy) open() {
	p.t.Helper()
	l, err := net.Listen("tcp", p.listen)
	if err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	p.listener = l
	p.mu.Unlock()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.seen.Add(1)
			p.conns.add(conn)
			go p.pass(conn)
		}
	}()
}

// pass serves one connection.
func (p *proxy) pass(client net.Conn) {
	defer p.conns.close(client)
	p.hold()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		client.(*net.TCPConn).SetLinger(0)
		return
	}
	p.conns.add(server)
	defer p.conns.close(server)
	done := make(chan struct{}, 2)
	relay := func(to, from net.Conn) {
		defer func() { done <- struct{}{} }()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			p.hold()
			if n > 0 {
				if _, err := to.Write(buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
	go relay(server, client)
	go relay(client, server)
	<-done // either end has closed, or the path was cut
}

// hold returns when bytes may pass.
func (p *proxy) hold() {
	p.mu.Lock()
	gate, wait := p.gate, p.wait
	p.mu.Unlock()
	<-gate
	time.Sleep(wait)
}

// A connSet is the connections that are open.
type connSet struct {
	mu    sync.Mutex // guards the following
	conns map[net.Conn]bool
}

func (s *connSet) add(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		s.conns = map[net.Conn]bool{}
	}
	s.conns[conn] = true
}

func (s *connSet) close(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
	conn.Close()
}

// closeAll resets all connections.
func (s *connSet) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.conns {
		conn.(*net.TCPConn).SetLinger(0)
		conn.Close()
	}
	clear(s.conns)
}
