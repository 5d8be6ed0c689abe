package e2e

import (
	"testing"
	"time"
)

// TestIdleFootprint looks at the process after some seconds of nothing but
// checks.
func TestIdleFootprint(t *testing.T) {
	c := newCluster(t, 2)
	d := startDaemon(t, c.env()...)
	d.waitReady()
	d.eventually("/master", c.name(0))
	d.client.CloseIdleConnections()
	fds := d.fds()
	// Idle time is what this is about.
	time.Sleep(5 * time.Second)
	rss, threads := d.kB("VmRSS"), d.threads()
	t.Logf("idle with 3 hosts: VmRSS %d kB, %d threads, %d file descriptors", rss, threads, d.fds())
	if rss >= 16<<10 {
		t.Errorf("VmRSS is %d kB; want less than 16 MiB", rss)
	}
	if now := d.fds(); now > fds {
		t.Errorf("%d file descriptors; there were %d some seconds ago", now, fds)
	}
	for i := range c.nodes {
		if got := c.query(i, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pg-status'"); got != "1" {
			t.Errorf("node %d has %s connections of pg-status; want 1", i, got)
		}
	}
}
