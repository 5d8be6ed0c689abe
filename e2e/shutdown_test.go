package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
)

// TestGracefulStop ends pg-status by a signal in the middle of a request.
func TestGracefulStop(t *testing.T) {
	// A server says at debug1 that an idle session has ended without a message.
	c := newCluster(t, 1, withConf("log_disconnections = on", "log_min_messages = debug1"))
	for stops, tt := range []struct {
		signal syscall.Signal
		name   string
	}{
		{syscall.SIGTERM, "SIGTERM"},
		{syscall.SIGINT, "SIGINT"},
	} {
		d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
		d.waitReady()
		d.eventually("/master", c.name(0))
		d.get("/live") // leaves a kept connection behind

		// Nobody can have that, so the answer is held until the end of wait_ms.
		conn := d.dial()
		defer conn.Close()
		fmt.Fprintf(conn, "GET /replica?min_lsn=FFFFFFFF/0&wait_ms=60000 HTTP/1.1\r\nHost: x\r\n\r\n")
		awaitRead(t, conn)
		d.get("/live") // by when the request has got to its handler
		d.signal(tt.signal)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("the request in flight at %s: %v", tt.name, err)
		}
		body, err := io.ReadAll(resp.Body)
		if resp.StatusCode != 200 || string(body) != c.name(0) || err != nil {
			t.Errorf("the request in flight at %s = %d %q, %v; want 200 %s", tt.name, resp.StatusCode, body, err, c.name(0))
		}
		if code := d.exitCode(); code != 0 {
			t.Errorf("after %s, exit status %d; want 0", tt.name, code)
		}
		if late, err := net.Dial("tcp", d.addr); err == nil {
			late.Close()
			t.Error("new connections are still taken")
		}
		d.waitLogged("INFO main: received signal=" + tt.name)
		d.waitLogged("INFO http: server stopped")
		d.waitLogged("INFO monitor: stopped")

		for i := range c.nodes {
			until(t, func() error {
				log := c.log(i)
				if got := strings.Count(log, "] pg-status LOG:  disconnection:"); got != stops+1 {
					return fmt.Errorf("node %d has logged %d disconnections of pg-status; want %d", i, got, stops+1)
				}
				return nil
			})
			for line := range strings.Lines(c.log(i)) {
				if strings.Contains(line, "unexpected EOF") || strings.Contains(line, "could not receive data from client") {
					t.Errorf("node %d has logged %q", i, line)
				}
			}
		}
	}
}

// TestStopWhileHostsHang stops it in the middle of checks that get no answer.
func TestStopWhileHostsHang(t *testing.T) {
	d := startDaemon(t, append(envFor(silentHost(t).addr(), blackHole(t).addr()), "pg_status__query_timeout_ms=60000")...)
	d.get("/live")
	d.signal(syscall.SIGTERM)
	if code := d.exitCode(); code != 0 {
		t.Errorf("exit status %d; want 0", code)
	}
	if record, ok := d.logged("ERROR"); ok {
		t.Errorf("the log has %q of a check that we ended ourselves", record)
	}
}

// awaitRead waits for the other end of conn, on this machine, to have read what
// was sent.
func awaitRead(t *testing.T, conn net.Conn) {
	t.Helper()
	hexPort := func(a net.Addr) string { return fmt.Sprintf(":%04X", a.(*net.TCPAddr).Port) }
	until(t, func() error {
		table, err := os.ReadFile("/proc/net/tcp")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(table)) {
			// sl local_address rem_address st tx_queue:rx_queue …
			f := strings.Fields(line)
			if strings.HasSuffix(f[1], hexPort(conn.RemoteAddr())) && strings.HasSuffix(f[2], hexPort(conn.LocalAddr())) {
				if strings.HasSuffix(f[4], ":00000000") {
					return nil
				}
				return fmt.Errorf("the queues are %s", f[4])
			}
		}
		return errors.New("the connection is not in /proc/net/tcp")
	})
}
