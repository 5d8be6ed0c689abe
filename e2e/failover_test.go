package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestPromotion(t *testing.T) {
	c := newCluster(t, 2, withRewind())
	c.exec(0, "CREATE TABLE t (i int)")
	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	d.eventually("/master", c.name(0))

	c.stop(0, fast)
	d.eventually("/master", "")
	if status, body, _ := d.get("/master", acceptJSON); status != 404 || body != noSelection {
		t.Errorf("without a master, /master = %d %s; want 404 %s", status, body, noSelection)
	}
	for range 4 {
		if _, body, _ := d.get("/replica"); body != c.name(1) && body != c.name(2) {
			t.Errorf("without a master, /replica = %q; want a replica", body)
		}
	}
	d.waitLogged("WARNING monitor: host state changed", "host="+c.name(0), "state=possible_dead")
	d.waitLogged("WARNING monitor: host state changed", "host="+c.name(0), "state=dead")

	c.promote(1)
	d.eventually("/master", c.name(1))
	d.waitLogged("INFO monitor: host role changed", "host="+c.name(1), "role=master")
	c.repoint(2, 1)
	c.exec(1, "INSERT INTO t VALUES (1)")
	c.waitReplayed(2)
	lsn, timeline, _ := strings.Cut(c.query(1, writePosition), "|")
	if timeline != "2" {
		t.Errorf("the timeline is %s; want 2", timeline)
	}
	d.eventually("/replica?min_lsn="+lsn+"&timeline=2", c.name(2))
	for _, path := range []string{"/replica?timeline=1", "/replica?timeline=1&min_lsn=0/1"} {
		if _, body, _ := d.get(path); body != c.name(1) {
			t.Errorf("%s = %q; want the master, %s", path, body, c.name(1))
		}
	}
	d.eventuallyHost(2, "on timeline 2 without lag", func(h hostStatus) bool { return *h.Timeline == 2 && h.LagBytes != nil && *h.LagBytes == 0 })

	c.rewind(0, 1)
	c.waitReplayed(0)
	d.eventuallyHost(0, "a replica on timeline 2", func(h hostStatus) bool {
		return h.fine() && !h.Master && *h.Timeline == 2 && h.LagBytes != nil && *h.LagBytes == 0
	})
	d.waitLogged("INFO monitor: host state changed", "host="+c.name(0), "state=alive", "role=replica")
	if _, body, _ := d.get("/master"); body != c.name(1) {
		t.Errorf("/master = %q; want %s", body, c.name(1))
	}
}

// TestFrozenHost stops a host's processes, so that connections to it stay open
// and nothing comes back, and compares with the README's formula when it becomes
// possibly dead, and dead.
func TestFrozenHost(t *testing.T) {
	const (
		period   = 200 * time.Millisecond
		timeout  = 400 * time.Millisecond
		maxFails = 3
		slack    = 700 * time.Millisecond // for a busy machine
	)
	c := newCluster(t, 2)
	d := startDaemon(t, c.env(
		fmt.Sprintf("pg_status__sleep_ms=%d", period.Milliseconds()),
		fmt.Sprintf("pg_status__query_timeout_ms=%d", timeout.Milliseconds()),
		fmt.Sprintf("pg_status__max_fails=%d", maxFails))...)
	d.waitReady()
	d.eventuallyHost(0, "fine", hostStatus.fine)
	d.eventuallyHost(1, "fine", hostStatus.fine)

	for _, i := range []int{1, 0} {
		c.freeze(i)
		frozen := time.Now()
		h := d.eventuallyHost(i, "possibly dead", hostStatus.possiblyDead)
		suspected := time.Since(frozen)
		if h.LSN == nil || h.LagBytes == nil || h.LagMS == nil {
			t.Errorf("host %d is %v; want its last values kept", i, h)
		}
		for range 4 {
			if i == 1 {
				if _, body, _ := d.get("/replica"); body != c.name(2) {
					t.Errorf("with a possibly dead replica, /replica = %q; want the other one, %s", body, c.name(2))
				}
			} else if _, body, _ := d.get("/master"); body != c.name(0) {
				t.Errorf("with a possibly dead master, /master = %q; want %s", body, c.name(0))
			}
		}
		h = d.eventuallyHost(i, "dead", hostStatus.dead)
		died := time.Since(frozen)
		if h.Master || !h.PossibleDead || h.LSN != nil || h.LagBytes != nil || h.LagMS != nil || h.SyncByBytes || h.SyncByTime {
			t.Errorf("host %d is %v; want no values", i, h)
		}
		t.Logf("host %d: possibly dead after %v, dead after %v", i, suspected, died)

		// The freeze falls between the start of a check and that of the next.
		if most := period + timeout; suspected < timeout-period || suspected > most+slack {
			t.Errorf("host %d was possibly dead after %v; want within %v", i, suspected, most)
		}
		rest := (maxFails - 1) * max(period, timeout)
		if least, most := timeout-period+rest, period+timeout+rest; died < least || died > most+slack {
			t.Errorf("host %d was dead after %v; want %v to %v", i, died, least, most)
		}
		d.waitLogged("ERROR monitor: PostgreSQL poll timed out", "host="+c.name(i), "timeout_ms=400")
		d.waitLogged("WARNING monitor: host state changed", "host="+c.name(i), "state=possible_dead")
		d.waitLogged("WARNING monitor: host state changed", "host="+c.name(i), "state=dead")
		if i == 0 {
			d.eventually("/master", "")
		}

		c.thaw(i)
		d.eventuallyHost(i, "fine", hostStatus.fine)
	}
	d.eventually("/master", c.name(0))
	d.eventually("/replica", c.name(1))
	d.eventually("/replica", c.name(2))
}

func TestAllHostsDown(t *testing.T) {
	c := newCluster(t, 2)
	d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	d.eventually("/master", c.name(0))
	for i := range c.nodes {
		c.stop(i, immediate)
	}

	var elements []string
	for i := range c.nodes {
		elements = append(elements, fmt.Sprintf(`{"host":"%s","dc":null,"geo":null,"master":false,"alive":false,"possible_dead":true,`+
			`"lag_ms":null,"sync_by_time":false,"lag_bytes":null,"sync_by_bytes":false,"lsn":null,"port":%d,"timeline":null}`, c.name(i), c.port(i)))
	}
	dead := "[" + strings.Join(elements, ",") + "]"
	nothing := func(d *daemon) {
		t.Helper()
		d.waitReady()
		d.eventually("/hosts", dead)
		for _, path := range append([]string{"/master", "/replica?min_lsn=0/1&timeline=1"}, replicaPaths...) {
			status, body, header := d.get(path)
			if _, typed := header["Content-Type"]; status != 404 || body != "" || typed {
				t.Errorf("with all hosts down, %s = %d %q %v; want 404 and nothing", path, status, body, header)
			}
			status, body, header = d.get(path, acceptJSON)
			if status != 404 || body != noSelection || header.Get("Content-Type") != "application/json" {
				t.Errorf("with all hosts down, %s = %d %q %v; want 404 %s", path, status, body, header, noSelection)
			}
		}
		if status, body, _ := d.get("/status?host=" + c.name(1)); status != 200 || !strings.Contains(body, `"alive":false,"possible_dead":true`) {
			t.Errorf("/status = %d %s; want 200 and a dead host", status, body)
		}
	}
	nothing(d)
	// One that has never seen them.
	late := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
	nothing(late)
	late.waitLogged("WARNING monitor: host state changed", "host="+c.name(1), "state=dead")
	if record, ok := late.logged("state=possible_dead"); ok {
		t.Errorf("of hosts that have never answered, the log says %q; want only state=dead", record)
	}
	late.waitLogged("ERROR monitor: PostgreSQL operation failed", "operation=connect", "host="+c.name(1),
		"connection refused", fmt.Sprintf("(errno=%d)", syscall.ECONNREFUSED))

	for i := range c.nodes {
		c.start(i)
	}
	for _, d := range []*daemon{d, late} {
		d.eventually("/master", c.name(0))
		d.eventually("/replica", c.name(1))
		d.eventually("/replica", c.name(2))
	}
	d.waitLogged("INFO monitor: host state changed", "host="+c.name(0), "state=alive", "role=master")
}

func TestReplicasOnly(t *testing.T) {
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (i int)")
	d := startDaemon(t, append(envFor(c.addr(1), c.addr(2)), "pg_status__sleep_ms=100")...)
	d.waitReady()
	c.exec(0, "INSERT INTO t VALUES (1)")
	c.waitReplayed(1)
	c.waitReplayed(2)
	until(t, func() error {
		for _, h := range d.hosts() {
			if !h.fine() || *h.LSN != c.lsn(0) || h.LagMS == nil || h.LagBytes == nil || *h.LagBytes != 0 {
				return fmt.Errorf("%v; want it fine, at %s, with known lags", h, c.lsn(0))
			}
		}
		return nil
	})

	if status, body, _ := d.get("/master", acceptJSON); status != 404 || body != noSelection {
		t.Errorf("/master = %d %q; want 404 %s", status, body, noSelection)
	}
	for _, path := range []string{"/replica", "/replica?lag_ms=60000&lag_bytes=0", "/sync_by_bytes", "/sync_by_time?lag_ms=60000", "/replica?timeline=1&min_lsn=" + c.lsn(0)} {
		got := map[string]int{}
		for range 4 {
			_, body, _ := d.get(path)
			got[body]++
		}
		if got[c.name(1)] != 2 || got[c.name(2)] != 2 {
			t.Errorf("4 x %s = %v; want each replica twice", path, got)
		}
	}
	if _, body, _ := d.get("/most_sync_by_bytes"); body != c.name(1) {
		t.Errorf("/most_sync_by_bytes = %q; want the first replica, %s", body, c.name(1))
	}
	if status, body, _ := d.get("/replica?min_lsn=FFFFFFFF/0"); status != 404 || body != "" {
		t.Errorf("with no match and no master, /replica = %d %q; want 404", status, body)
	}
}
