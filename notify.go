package main

import (
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// notifyPatience bounds how long one notification may wait for room in
// systemd's receive queue. Better to lose one than to stall.
const notifyPatience = 20 * time.Millisecond

// A notifier tells systemd how the service is doing, by the protocol of
// sd_notify(3): one datagram of NAME=value lines. The methods of a nil notifier
// do nothing, so that a process started by hand needs no special case.
type notifier struct {
	socket   string        // a path, or "@" and an abstract name
	interval time.Duration // between keep-alives; 0 for none

	mu   sync.Mutex // guards the following
	last string     // the status that systemd has
}

// newNotifier returns a notifier for the socket named in the environment, or nil
// without one.
func newNotifier(getenv func(string) string) *notifier {
	socket := getenv("NOTIFY_SOCKET")
	if !strings.HasPrefix(socket, "/") && !strings.HasPrefix(socket, "@") {
		return nil // none, or of a family that containers and services do not use
	}
	return &notifier{socket: socket, interval: keepAlive(getenv)}
}

// keepAlive returns how often systemd is to hear from us: twice in each
// WATCHDOG_USEC, as sd_watchdog_enabled(3) recommends. It returns 0 when systemd
// does not watch this process.
func keepAlive(getenv func(string) string) time.Duration {
	if pid := getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0
	}
	// 52 bits of microseconds, 142 years, still fit a Duration.
	usec, err := strconv.ParseUint(getenv("WATCHDOG_USEC"), 10, 52)
	if err != nil {
		return 0
	}
	return time.Duration(usec) * time.Microsecond / 2
}

// ready reports that the service answers requests.
func (n *notifier) ready() { n.send("READY=1") }

// stopping reports that the service has begun to shut down.
func (n *notifier) stopping() { n.send("STOPPING=1") }

// watchdog reports that the service is making progress. It is to be called every
// watchdogInterval, and not while the service is stuck.
func (n *notifier) watchdog() { n.send("WATCHDOG=1") }

// watchdogInterval returns the time between calls of watchdog, 0 for no calls.
func (n *notifier) watchdogInterval() time.Duration {
	if n == nil {
		return 0
	}
	return n.interval
}

// status sets the line that systemctl status shows. It sends nothing while the
// line stays the same.
func (n *notifier) status(line string) {
	if n == nil {
		return
	}
	// A second line would be another assignment.
	line = strings.ReplaceAll(line, "\n", " ")
	n.mu.Lock()
	defer n.mu.Unlock()
	if line != n.last && n.send("STATUS="+line) {
		n.last = line
	}
}

// send sends one message and reports whether it went out. A socket for each
// message survives whatever systemd does with its own.
func (n *notifier) send(message string) bool {
	if n == nil {
		return false
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.socket, Net: "unixgram"})
	if err != nil {
		return false
	}
	defer conn.Close()
	conn.SetWriteDeadline(time.Now().Add(notifyPatience))
	_, err = conn.Write([]byte(message))
	return err == nil
}
