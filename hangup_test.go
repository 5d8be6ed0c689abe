package main

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"
	"time"
)

// hangPair returns both ends of a TCP connection.
func hangPair(t *testing.T) (server, client *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client = httpDial(t, l.Addr().String()).(*net.TCPConn)
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn), client
}

// hangActs are what a peer may do.
var hangActs = map[string]func(*net.TCPConn){
	"sends":       func(c *net.TCPConn) { io.WriteString(c, "x") },
	"closes":      func(c *net.TCPConn) { c.Close() },
	"half-closes": func(c *net.TCPConn) { c.CloseWrite() },
	"resets": func(c *net.TCPConn) {
		c.SetLinger(0)
		c.Close()
	},
	"sends and closes": func(c *net.TCPConn) {
		io.WriteString(c, "x")
		c.Close()
	},
}

// TestWatchPeer: what the peer does is seen, whether it does it before we watch
// or meanwhile.
func TestWatchPeer(t *testing.T) {
	for _, tt := range []struct {
		event peerEvent
		act   string
		want  bool
	}{
		{readable, "sends", true},
		{readable, "closes", true},
		{readable, "half-closes", true},
		{readable, "resets", true},
		{readable, "sends and closes", true},
		{hungUp, "closes", true},
		{hungUp, "half-closes", true},
		{hungUp, "resets", true},
		// There is something to read before the end.
		{hungUp, "sends", false},
		{hungUp, "sends and closes", false},
	} {
		for _, before := range []bool{true, false} {
			server, client := hangPair(t)
			if before {
				hangActs[tt.act](client)
			}
			happened, stop := watchPeer(server, tt.event)
			if !before {
				hangActs[tt.act](client)
			}
			got := false
			if tt.want {
				select {
				case <-happened:
					got = true
				case <-time.After(5 * time.Second):
				}
				stop()
			} else {
				stop()
				got = hangClosed(happened)
			}
			if got != tt.want {
				t.Errorf("event %d, peer %s, before we watch %v: seen %v; want %v", tt.event, tt.act, before, got, tt.want)
			}
		}
	}
}

// hangClosed reports whether c is closed.
func hangClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestWatchPeerInVain: watching changes nothing but the read deadline, and leaves
// nothing behind.
func TestWatchPeerInVain(t *testing.T) {
	server, client := hangPair(t)
	server.SetReadDeadline(past) // which does not end it
	goroutines := runtime.NumGoroutine()
	for range 100 {
		for _, event := range []peerEvent{readable, hungUp} {
			happened, stop := watchPeer(server, event)
			stop()
			if hangClosed(happened) {
				t.Fatalf("event %d is seen on a quiet connection", event)
			}
		}
	}
	monEventually(t, func() bool { return runtime.NumGoroutine() <= goroutines },
		func() string { return fmt.Sprintf("%d goroutines; %d before", runtime.NumGoroutine(), goroutines) })
	io.WriteString(client, "xyz")
	happened, stop := watchPeer(server, readable)
	monEventually(t, func() bool { return hangClosed(happened) }, func() string { return "what is sent is not seen" })
	stop()
	if _, err := server.Read(make([]byte, 1)); !hangTimeout(err) {
		t.Errorf("reading after stop: %v; want that the deadline is over", err)
	}
	server.SetReadDeadline(time.Now().Add(5 * time.Second))
	b := make([]byte, 3)
	if _, err := io.ReadFull(server, b); string(b) != "xyz" {
		t.Errorf("then reads %q, %v; want xyz", b, err)
	}
}

// hangTimeout reports whether err is that of a deadline.
func hangTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

// TestWatchPeerClosed: an end of ours is no news.
func TestWatchPeerClosed(t *testing.T) {
	server, _ := hangPair(t)
	server.Close()
	happened, stop := watchPeer(server, hungUp)
	stop()
	if hangClosed(happened) {
		t.Error("a connection that we closed has hung up")
	}
	server, _ = hangPair(t)
	happened, stop = watchPeer(server, hungUp)
	server.Close()
	stop()
	if hangClosed(happened) {
		t.Error("a connection that we close meanwhile has hung up")
	}
	// There is no socket at all.
	happened, stop = watchPeer(new(net.TCPConn), readable)
	stop()
	if happened != nil {
		t.Error("something may happen on no connection")
	}
}
