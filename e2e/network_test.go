package e2e

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

// TestNetworkFaults disturbs the path to one replica, while its server is well.
func TestNetworkFaults(t *testing.T) {
	c := newCluster(t, 1)
	p := c.proxy(1)
	d := startDaemon(t, append(envFor(c.addr(0), p.addr()), "pg_status__sleep_ms=50", "pg_status__query_timeout_ms=500")...)
	d.waitReady()
	fine := func() { t.Helper(); d.eventuallyHost(1, "fine", hostStatus.fine) }
	fine()

	for _, tt := range []struct {
		name    string
		fault   func()
		wantLog []string
	}{
		{"cut", p.cut, []string{"ERROR monitor: PostgreSQL operation failed", "host=" + c.name(1)}},
		{"stall", p.stall, []string{"ERROR monitor: PostgreSQL poll timed out", "host=" + c.name(1), "timeout_ms=500"}},
	} {
		tt.fault()
		d.eventuallyHost(1, "dead after "+tt.name, hostStatus.dead)
		d.waitLogged(tt.wantLog...)
		d.eventually("/replica", c.name(0))
		if h := d.hosts()[0]; !h.fine() || !h.Master {
			t.Errorf("after %s of another host's path, the master is %v", tt.name, h)
		}
		p.resume()
		fine()
		d.eventually("/replica", c.name(1))
	}

	// A slow path is none that fails, and a kept connection stays.
	before := p.connections()
	p.delay(100 * time.Millisecond)
	c.exec(0, "CREATE TABLE t (i int)")
	d.eventuallyHost(1, "at "+c.lsn(0), func(h hostStatus) bool {
		if !h.fine() {
			t.Fatalf("on a slow path, the replica is %v", h)
		}
		return *h.LSN == c.lsn(0)
	})
	if n := p.connections() - before; n != 0 {
		t.Errorf("on a slow path, %d new connections were made; want none", n)
	}
}

// TestCrash kills servers that all listen on one port, which is thus given once.
func TestCrash(t *testing.T) {
	c := newCluster(t, 2, withOnePort())
	d := startDaemon(t, c.env(fmt.Sprintf("pg_status__pg_port=%d", c.port(0)), "pg_status__sleep_ms=100")...)
	for _, i := range []int{0, 2} {
		d.eventuallyHost(i, "fine", hostStatus.fine)
		c.kill9(i)
		d.eventuallyHost(i, "dead", hostStatus.dead)
		c.start(i)
		h := d.eventuallyHost(i, "fine", hostStatus.fine)
		if h.Master != (i == 0) {
			t.Errorf("after its crash, host %d is %v", i, h)
		}
	}
}

// TestReceiverDown has a replica that cannot reach its upstream, while the
// primary writes.
func TestReceiverDown(t *testing.T) {
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (b text)")
	c.waitReplayed(1)
	d := startDaemon(t, c.env("pg_status__sleep_ms=50")...)
	d.waitReady()
	c.repointNowhere(1)
	for range 3 {
		c.exec(0, "INSERT INTO t VALUES (repeat('x', 1000))")
		until(t, func() error {
			master, replica := c.lsn(0), c.lsn(1)
			want := c.bytesBetween(0, master, replica)
			if h := d.hosts()[1]; h.LagBytes == nil || *h.LagBytes != want || want == 0 {
				return fmt.Errorf("host 1 is %v; want %d bytes of lag", h, want)
			}
			return nil
		})
	}
	c.repoint(1, 0)
	d.eventuallyHost(1, "without lag", func(h hostStatus) bool { return *h.LagBytes == 0 })
}

// TestOtherCluster has a replica of another cluster in the list.
func TestOtherCluster(t *testing.T) {
	c, other := newCluster(t, 1), newCluster(t, 1, withOwnHistory())
	d := startDaemon(t, append(envFor(c.addr(0), other.addr(1), c.addr(1)), "pg_status__sleep_ms=100")...)
	d.waitReady()
	d.eventually("/replica", c.name(1))
	for range 4 {
		if _, body, _ := d.get("/replica"); body != c.name(1) {
			t.Errorf("/replica = %q; want our own, %s", body, c.name(1))
		}
	}
	d.waitLogged("ERROR monitor", "host="+other.name(1))
}

// TestFixture checks what other tests take for granted.
func TestFixture(t *testing.T) {
	c := newCluster(t, 0, withClock(0, -time.Hour))
	const layout = "2006-01-02 15:04:05"
	if got := c.query(0, "SELECT round(extract(epoch FROM clock_timestamp() - '"+time.Now().UTC().Format(layout)+"Z'::timestamptz) / 60)"); got != "-60" {
		t.Errorf("the server's clock is off by %s minutes; want -60", got)
	}
	path := c.file(0, "secret", "xyz")
	if got := c.query(0, "SELECT pg_read_file('"+path+"')"); got != "xyz" {
		t.Errorf("%s holds %q", path, got)
	}
	c.setHBA(0, "host all all 127.0.0.0/8 reject")
	c.nodes[0].disconnect()
	if err := c.db(0).Ping(); err == nil || !strings.Contains(err.Error(), "pg_hba.conf rejects connection") {
		t.Errorf("connecting where pg_hba.conf rejects: %v", err)
	}

	for _, tt := range []struct {
		name string
		host *badHost
		want string // an error of a client that sends a line and reads
	}{
		{"silent", silentHost(t), "i/o timeout"},
		{"resetting", resettingHost(t), "connection reset by peer"},
		{"babbling", babblingHost(t), ""},
		{"refusing", refusingHost(t), "connection refused"},
		{"black hole", blackHole(t), "i/o timeout"},
	} {
		conn, err := net.DialTimeout("tcp", tt.host.addr(), 200*time.Millisecond)
		if connected := tt.name != "refusing" && tt.name != "black hole"; connected != (err == nil) {
			t.Errorf("connecting to the %s host: %v", tt.name, err)
		}
		if err == nil {
			conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
			fmt.Fprintln(conn, "hello")
			_, err = conn.Read(make([]byte, 10))
			conn.Close()
			if n := tt.host.connections(); n != 1 {
				t.Errorf("the %s host has seen %d connections; want 1", tt.name, n)
			}
		}
		if got := fmt.Sprint(err); !strings.Contains(got, tt.want) || tt.want == "" && err != nil {
			t.Errorf("a client of the %s host gets %v; want %q", tt.name, err, tt.want)
		}
	}
}
