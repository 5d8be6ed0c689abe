package e2e

import (
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestBlackHoledHost has a host that does not even refuse: it delays readiness
// by its own deadline, and nothing else.
func TestBlackHoledHost(t *testing.T) {
	const timeout = 2 * time.Second
	c := newCluster(t, 1)
	hole := blackHole(t)
	d := startDaemon(t, append(envFor(hole.addr(), c.addr(0), c.addr(1)),
		fmt.Sprintf("pg_status__query_timeout_ms=%d", timeout.Milliseconds()))...)
	start := time.Now()
	if status, _, _ := d.get("/ready"); status != 503 {
		t.Errorf("/ready = %d at the start; want 503", status)
	}
	d.waitReady()
	if took := time.Since(start); took < timeout-500*time.Millisecond || took > timeout+time.Second {
		t.Errorf("ready after %v; want about %v", took, timeout)
	}

	begun := recordTime(t, d.waitLogged("INFO http: server started"))
	for i, role := range []string{"master", "replica"} {
		record := d.waitLogged("INFO monitor: host state changed", "host="+c.name(i), "state=alive", "role="+role)
		if took := recordTime(t, record).Sub(begun); took > timeout*3/4 {
			t.Errorf("the first answer of node %d took %v, as if it waited for the host that is away", i, took)
		}
	}
	d.waitLogged("ERROR monitor: PostgreSQL poll timed out", "host="+hole.name, "timeout_ms=2000")
	if _, body, _ := d.get("/master"); body != c.name(0) {
		t.Errorf("/master = %q; want %s", body, c.name(0))
	}
	if h := d.hosts()[0]; !h.dead() || !h.PossibleDead {
		t.Errorf("the host that never answered is %v; want it dead and possibly dead", h)
	}
}

func TestConfigErrors(t *testing.T) {
	host := silentHost(t) // sees whether anybody connects
	for _, tt := range []struct {
		name string
		env  []string
		want []string // each in a FATAL record of its own
	}{
		{"no hosts", nil, []string{"pg_status__hosts"}},
		{"empty hosts", []string{"pg_status__hosts="}, []string{"pg_status__hosts"}},
		{"everything wrong", []string{
			"pg_status__hosts=" + host.name + ",,x",
			"pg_status__pg_port=70000",
			"pg_status__hosts_dc=a",
			"pg_status__current_geo_env=no-name",
			"pg_status__max_fails=-1",
			"pg_status__sleep_ms=0",
			"pg_status__query_timeout_ms=1s",
			"pg_status__conn_max_age_ms=x",
			"pg_status__poll_error_log_interval_ms=x",
			"pg_status__sync_max_lag_ms=x",
			"pg_status__sync_max_lag_bytes=x",
			"pg_status__http_listen_address=localhost",
			"pg_status__http_port=65536",
			"pg_status__log_level=loud",
			"pg_status__log_format=xml",
		}, []string{
			"pg_status__hosts:",
			"pg_status__pg_port",
			"pg_status__hosts_dc",
			"pg_status__current_geo_env",
			"pg_status__max_fails",
			"pg_status__sleep_ms",
			"pg_status__query_timeout_ms",
			"pg_status__conn_max_age_ms",
			"pg_status__poll_error_log_interval_ms",
			"pg_status__sync_max_lag_ms",
			"pg_status__sync_max_lag_bytes",
			"pg_status__http_listen_address",
			"pg_status__http_port",
			"pg_status__log_level",
			"pg_status__log_format",
		}},
		{"at level fatal", append(envFor(host.addr()), "pg_status__sleep_ms=0", "pg_status__log_level=fatal"), []string{"pg_status__sleep_ms"}},
		{"two ports for one host", append(envFor(host.addr()), "pg_status__pg_port=1,2"), []string{"pg_status__pg_port"}},
	} {
		logs := startDaemonExpectingFailure(t, tt.env...)
		for _, want := range tt.want {
			found := false
			for line := range strings.Lines(logs) {
				found = found || strings.Contains(line, " FATAL config: ") && strings.Contains(line, want)
			}
			if !found {
				t.Errorf("%s: no FATAL record about %s in\n%s", tt.name, want, logs)
			}
		}
		if n := strings.Count(logs, " FATAL "); n < len(tt.want) {
			t.Errorf("%s: %d FATAL records; want one for each of %q:\n%s", tt.name, n, tt.want, logs)
		}
		if strings.Contains(logs, "started") {
			t.Errorf("%s: something has started:\n%s", tt.name, logs)
		}
	}

	// Readers of JSON know no FATAL.
	logs := startDaemonExpectingFailure(t, append(envFor(host.addr()), "pg_status__sleep_ms=0", "pg_status__log_format=json")...)
	if !strings.Contains(logs, `"levelStr":"ERROR","component":"config","message":"`) || !strings.Contains(logs, "pg_status__sleep_ms") {
		t.Errorf("in JSON, the log is\n%s", logs)
	}
	if n := host.connections(); n != 0 {
		t.Errorf("%d connections were made; want none", n)
	}
}

func TestUnusableAddress(t *testing.T) {
	host := silentHost(t)
	taken, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	for _, tt := range []struct {
		address, port string
		want          []string
	}{
		{"0.0.0.0", port, []string{"address already in use", fmt.Sprintf("(errno=%d)", syscall.EADDRINUSE), port}},
		{"127.0.0.1", port, []string{"address already in use", port}},
		{"*", port, []string{"address already in use", port}},
		// Of TEST-NET-1, so nobody's.
		{"192.0.2.1", "0", []string{"cannot assign requested address", fmt.Sprintf("(errno=%d)", syscall.EADDRNOTAVAIL), "192.0.2.1"}},
	} {
		logs := startDaemonExpectingFailure(t, append(envFor(host.addr()),
			"pg_status__http_listen_address="+tt.address, "pg_status__http_port="+tt.port)...)
		for _, want := range append(tt.want, " FATAL ") {
			if !strings.Contains(logs, want) {
				t.Errorf("with %s port %s, the log lacks %q:\n%s", tt.address, tt.port, want, logs)
			}
		}
	}
	if n := host.connections(); n != 0 {
		t.Errorf("%d connections were made; want none", n)
	}
}
