package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

// manyAddrs returns n addresses, all different, that are in turn those of the
// ports.
func manyAddrs(n int, ports ...int) []string {
	var addrs []string
	for i := range n {
		addrs = append(addrs, fmt.Sprintf("127.3.0.%d:%d", i+1, ports[i%len(ports)]))
	}
	return addrs
}

// queriesBySession returns how often each session of pg-status has asked node i,
// whose server logs statements.
func (c *cluster) queriesBySession(i int) map[string]int {
	c.t.Helper()
	counts := map[string]int{}
	for _, m := range statementOf.FindAllStringSubmatch(c.log(i), -1) {
		counts[m[1]]++
	}
	return counts
}

var statementOf = regexp.MustCompile(`\[(\d+)\] pg-status LOG:  statement: SELECT`)

// TestManyHosts has 64 entries for three servers, each but the last an address
// that no other entry has.
func TestManyHosts(t *testing.T) {
	const entries = 64
	c := newCluster(t, 2, withConf("listen_addresses = '*'", "log_statement = all"))
	addrs := manyAddrs(entries, c.port(0), c.port(1), c.port(2))
	addrs[63] = addrs[0]
	d := startDaemon(t, append(envFor(addrs...), "pg_status__log_level=debug")...)
	d.waitLogged("WARNING config: pg_status__hosts: entry 64 ", "is the same as entry 1")
	begin := recordTime(t, d.waitLogged("INFO monitor: started hosts=64"))
	d.waitReady()
	// 63 times a rest of 100 ms after a password, and the set-ups themselves.
	took := time.Since(begin)
	if took < 6300*time.Millisecond || took > 15*time.Second {
		t.Errorf("ready after %v; want 6.3 s and a little", took)
	}
	for i, h := range d.hosts() {
		if !h.fine() || h.Master != (i%3 == 0) {
			t.Errorf("entry %d is %v", i, h)
		}
	}
	stop := d.watchFine()
	d.client.CloseIdleConnections()
	var before [3]map[string]int
	for i := range c.nodes {
		before[i] = c.queriesBySession(i)
	}
	start := time.Now()
	time.Sleep(6 * time.Second) // six periods
	var after [3]map[string]int
	for i := range c.nodes {
		after[i] = c.queriesBySession(i)
	}
	periods := int(time.Since(start).Round(time.Second) / time.Second)
	stop()
	rss := d.kB("VmRSS")
	t.Logf("ready after %v; VmRSS %d kB", took, rss)
	if rss >= 16<<10 {
		t.Errorf("VmRSS is %d kB; want less than 16 MiB", rss)
	}
	sessions := 0
	for i := range c.nodes {
		sessions += len(after[i])
		for pid, n := range after[i] {
			if made := n - before[i][pid]; made < periods-1 || made > periods+1 {
				t.Errorf("a session has asked node %d %d times in %d periods", i, made, periods)
			}
		}
	}
	if sessions != entries {
		t.Errorf("there were %d sessions for %d entries; want one each", sessions, entries)
	}
	for i := range c.nodes {
		if gap := d.longestGap(fmt.Sprintf("127.3.0.%d", i+2)); gap > 1500*time.Millisecond {
			t.Errorf("entry %d was not checked for %v; want every second", i+1, gap)
		}
	}
	if record, ok := d.logged("ERROR"); ok {
		t.Errorf("the log has %s", record)
	}
}

// TestManyRefusing has most of 64 entries refuse. They take turns with those that
// do not, and none of them starves.
func TestManyRefusing(t *testing.T) {
	c := newCluster(t, 2, withConf("listen_addresses = '*'"))
	refusing := newBadHost(t)
	refusing.name = "0.0.0.0"
	refusing.bind(t)
	addrs := append(manyAddrs(61, refusing.port), c.addr(0), c.addr(1), c.addr(2))
	d := startDaemon(t, append(envFor(addrs...), "pg_status__sleep_ms=500", "pg_status__log_level=debug", "pg_status__poll_error_log_interval_ms=0")...)
	begin := recordTime(t, d.waitLogged("INFO monitor: started hosts=64"))
	d.waitReady()
	// Starts are 500 ms / 64 apart, and three of them ask for a password.
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("ready after %v; want about 0.8 s", took)
	}
	d.eventually("/master", c.name(0))
	start := time.Now()
	failed := func() map[string]int {
		counts := map[string]int{}
		for _, m := range refusedBy.FindAllStringSubmatch(d.logs(), -1) {
			counts[m[1]]++
		}
		return counts
	}
	before := failed()
	time.Sleep(4 * time.Second) // eight periods
	after := failed()
	due := int(time.Since(start) / (500 * time.Millisecond))
	for i := range 61 {
		host := fmt.Sprintf("127.3.0.%d", i+1)
		if made := after[host] - before[host]; made < due-2 || made > due+1 {
			t.Errorf("%s, which refuses, was tried %d times; want %d", host, made, due)
		}
	}
	for i := range c.nodes {
		if gap := d.longestGap(c.name(i)); gap > time.Second {
			t.Errorf("node %d was not checked for %v; want every 500 ms", i, gap)
		}
	}
	if rss := d.kB("VmRSS"); rss >= 16<<10 {
		t.Errorf("VmRSS is %d kB; want less than 16 MiB", rss)
	}
	if n := strings.Count(d.logs(), "state=dead"); n != 61 {
		t.Errorf("%d hosts were declared dead; want 61", n)
	}
}

var refusedBy = regexp.MustCompile(`ERROR monitor: PostgreSQL operation failed operation=connect host=(\S+) .*connection refused`)
