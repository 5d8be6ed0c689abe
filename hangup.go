package main

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// peerEvent is what watchPeer waits for.
type peerEvent uint8

const (
	readable peerEvent = iota // there is something to read, or the end
	hungUp                    // there is nothing to read but the end
)

// watchPeer returns a channel that is closed when the event happens on c, on
// which nobody may read meanwhile, until stop is called. It leaves the read
// deadline in the past: the caller sets another.
func watchPeer(c *net.TCPConn, event peerEvent) (happened <-chan struct{}, stop func()) {
	c.SetReadDeadline(time.Time{})
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, func() {}
	}
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		var b [1]byte
		var n int
		err := raw.Read(func(fd uintptr) bool {
			var err error
			n, _, err = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
			return err != unix.EAGAIN && err != unix.EINTR
		})
		if err == nil && (event == readable || n <= 0) {
			close(done)
		}
	}()
	return done, func() {
		c.SetReadDeadline(past)
		<-stopped
	}
}
