package main

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// listenNotify plays systemd on a socket of the given name. The function that it
// returns gives the next message, or "" when there is none.
func listenNotify(t *testing.T, name string) (next func() string) {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return func() string {
		// A message is there as soon as it has been sent.
		conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		b := make([]byte, 4096)
		n, err := conn.Read(b)
		if err != nil {
			return ""
		}
		return string(b[:n])
	}
}

// lookup returns a getenv that knows only the given names.
func lookup(env map[string]string) func(string) string {
	return func(name string) string { return env[name] }
}

func TestNotify(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	next := listenNotify(t, socket)
	n := newNotifier(lookup(map[string]string{"NOTIFY_SOCKET": socket}))

	for _, tt := range []struct {
		name string
		call func()
		want string
	}{
		{"ready", n.ready, "READY=1"},
		{"status", func() { n.status("master pg-1, 3 of 3 hosts alive") }, "STATUS=master pg-1, 3 of 3 hosts alive"},
		{"same status", func() { n.status("master pg-1, 3 of 3 hosts alive") }, ""},
		{"other status", func() { n.status("no master, 2 of 3 hosts alive") }, "STATUS=no master, 2 of 3 hosts alive"},
		{"status of two lines", func() { n.status("a\nMAINPID=1") }, "STATUS=a MAINPID=1"},
		{"watchdog", n.watchdog, "WATCHDOG=1"},
		{"stopping", n.stopping, "STOPPING=1"},
	} {
		tt.call()
		if got := next(); got != tt.want {
			t.Errorf("%s: systemd got %q; want %q", tt.name, got, tt.want)
		}
	}
}

func TestNotifyAbstractSocket(t *testing.T) {
	socket := "@pg-status-test-" + strconv.Itoa(os.Getpid())
	next := listenNotify(t, socket)
	newNotifier(lookup(map[string]string{"NOTIFY_SOCKET": socket})).ready()
	if got, want := next(), "READY=1"; got != want {
		t.Errorf("systemd got %q; want %q", got, want)
	}
}

// A status that was lost is sent again, and a systemd that has gone or does not
// read holds nobody up.
func TestNotifyLost(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	n := newNotifier(lookup(map[string]string{"NOTIFY_SOCKET": socket}))
	n.ready()
	n.status("lost")

	next := listenNotify(t, socket)
	n.status("lost")
	if got, want := next(), "STATUS=lost"; got != want {
		t.Errorf("systemd got %q; want %q", got, want)
	}

	start := time.Now()
	for i := 0; n.send("WATCHDOG=1"); i++ { // until the queue is full
		if i == 100_000 {
			t.Fatal("the queue of the socket has no end")
		}
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("filling the queue took %v", d)
	}
}

func TestNotifyNobody(t *testing.T) {
	for _, socket := range []string{"", "vsock:2:1234", "relative"} {
		n := newNotifier(lookup(map[string]string{"NOTIFY_SOCKET": socket, "WATCHDOG_USEC": "1000000"}))
		if n != nil {
			t.Errorf("newNotifier with NOTIFY_SOCKET=%q = %v; want nil", socket, n)
		}
		n.ready()
		n.status("x")
		n.watchdog()
		n.stopping()
		if got := n.watchdogInterval(); got != 0 {
			t.Errorf("watchdogInterval with NOTIFY_SOCKET=%q = %v; want 0", socket, got)
		}
	}
}

func TestWatchdogInterval(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	for _, tt := range []struct {
		usec, pid string
		want      time.Duration
	}{
		{"30000000", "", 15 * time.Second},
		{"30000000", self, 15 * time.Second},
		{"30000000", "1" + self, 0}, // meant for another process
		{"1", "", 500 * time.Nanosecond},
		{"4503599627370495", "", 2251799813685247500 * time.Nanosecond}, // 2^52-1
		{"4503599627370496", "", 0},
		{"0", "", 0},
		{"", "", 0},
		{"-1", "", 0},
		{"30s", "", 0},
	} {
		n := newNotifier(lookup(map[string]string{
			"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": tt.usec, "WATCHDOG_PID": tt.pid,
		}))
		if got := n.watchdogInterval(); got != tt.want {
			t.Errorf("watchdogInterval with WATCHDOG_USEC=%q WATCHDOG_PID=%q = %v; want %v", tt.usec, tt.pid, got, tt.want)
		}
	}
}
