package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// What pg-status logs, once each, when it goes on without part of its query.
const (
	withoutView      = "without WAL receiver statistics; the upstream's WAL end and the timeline being received are unknown"
	withoutFunctions = "without WAL receiver statistics and control file functions; replica timelines and the system identifier are unknown"
)

// reconnect ends the sessions of pg-status on all nodes, and waits until there
// are as many others.
func (c *cluster) reconnect() {
	c.t.Helper()
	const sessions = "FROM pg_stat_activity WHERE application_name = 'pg-status'"
	for i := range c.nodes {
		before, pids, _ := strings.Cut(c.query(i, "SELECT count(*), string_agg(pid::text, ',') "+sessions), "|")
		c.query(i, "SELECT pg_terminate_backend(pid) "+sessions)
		until(c.t, func() error {
			now := c.query(i, "SELECT count(*) "+sessions+" AND state = 'idle' AND pid NOT IN ("+pids+")")
			if now != before {
				return fmt.Errorf("node %d has %s new sessions of pg-status; want %s", i, now, before)
			}
			return nil
		})
	}
}

// TestPrivileges takes away, step by step, what the query of a check needs, and
// gives it back.
func TestPrivileges(t *testing.T) {
	const period = 100 * time.Millisecond
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (b text)")
	c.exec(0, fmt.Sprintf("CREATE ROLE bare LOGIN PASSWORD '%s'", password))
	c.waitReplayed(1)
	user := []string{"pg_status__pg_user=bare", "pg_status__sleep_ms=100"}
	d := startDaemon(t, c.env(user...)...)
	// Without a master to compare with, the view tells whether lag_bytes is known.
	alone := startDaemon(t, append(envFor(c.addr(1)), user...)...)
	daemons := []*daemon{d, alone}
	// warned waits until each daemon has logged each step so many times for each of
	// its hosts, and checks that it has not done so more often in all.
	warned := func(view, functions int) {
		t.Helper()
		for _, d := range daemons {
			hosts := d.hosts()
			for _, step := range []struct {
				without string
				want    int
			}{{withoutView, view}, {withoutFunctions, functions}} {
				for _, h := range hosts {
					record := fmt.Sprintf(" WARNING monitor: PostgreSQL permission denied host=%s sqlstate=42501; retrying poll %s\n", h.Host, step.without)
					until(t, func() error {
						if n := strings.Count(d.logs(), record); n != step.want {
							return fmt.Errorf("the log has %d times %q; want %d", n, record, step.want)
						}
						return nil
					})
				}
				if n := strings.Count(d.logs(), "retrying poll "+step.without); n != step.want*len(hosts) {
					t.Errorf("the log has %d times %q; want %d", n, step.without, step.want*len(hosts))
				}
			}
		}
	}
	// answers checks what the replica is not returned for, and waits until it is
	// for what it is.
	answers := func(d *daemon, rows map[string]int) {
		t.Helper()
		for path, i := range rows {
			if i == 1 {
				d.eventually(path, c.name(1))
			} else if _, body, _ := d.get(path); body != c.name(0) {
				t.Errorf("%s = %q; want the master, %s", path, body, c.name(0))
			}
		}
	}
	// timeline waits until the replica's is want, 0 for unknown, and its lags are
	// known as far as they can be.
	timeline := func(d *daemon, want int64) {
		t.Helper()
		d.eventuallyHost(1, fmt.Sprintf("on timeline %d, without lag", want), func(h hostStatus) bool {
			return h.fine() && (h.Timeline == nil && want == 0 || h.Timeline != nil && *h.Timeline == want) &&
				h.LagBytes != nil && *h.LagBytes == 0 && h.LagMS != nil
		})
		if h := d.hosts()[0]; !h.fine() || !h.Master || *h.Timeline != 1 {
			t.Errorf("the master is %v; want it fine, on timeline 1", h)
		}
	}
	timeline(d, 1)
	alone.eventuallyHost(0, "without lag", func(h hostStatus) bool { return h.LagBytes != nil && *h.LagBytes == 0 })
	warned(0, 0)

	c.exec(0, "REVOKE SELECT ON pg_stat_wal_receiver FROM PUBLIC")
	warned(1, 0)
	h := alone.eventuallyHost(0, "of unknown lag in bytes", func(h hostStatus) bool { return h.LagBytes == nil })
	if !h.fine() || h.Timeline == nil || *h.Timeline != 1 || h.LagMS == nil {
		t.Errorf("without the view, host 0 is %v; want it on timeline 1, with known lag_ms", h)
	}
	c.exec(0, "INSERT INTO t VALUES ('x')") // writes WAL of those who read the changed catalog
	d.caughtUp(c, period)
	answers(d, map[string]int{"/replica?timeline=1&min_lsn=" + c.lsn(0): 1})

	// This is missed by the shorter query, too. What was known stays known, as the
	// timeline of a server that runs only grows; who comes late knows nothing.
	c.exec(0, "REVOKE EXECUTE ON FUNCTION pg_control_checkpoint() FROM PUBLIC")
	warned(1, 1)
	late := startDaemon(t, c.env(user...)...)
	late.waitReady()
	daemons = append(daemons, late)
	blind := func() {
		t.Helper()
		warned(1, 1)
		timeline(d, 1)
		timeline(late, 0)
		c.exec(0, "INSERT INTO t VALUES ('x')")
		d.caughtUp(c, period)
		late.caughtUp(c, period)
		answers(d, map[string]int{"/replica?timeline=1&min_lsn=" + c.lsn(0): 1})
		answers(late, map[string]int{
			"/replica?min_lsn=" + c.lsn(0):                       1, // an unknown timeline is not another one
			"/replica?timeline=1":                                0, // nor the same one
			"/replica?timeline=1&min_lsn=" + c.lsn(0):            0,
			"/sync_by_time_and_bytes?lag_ms=400":                 1,
			"/most_sync_by_bytes?lag_bytes=0":                    1,
			"/sync_by_time_or_bytes?timeline=1&lag_bytes=1000":   0,
			"/replica?timeline=1&fallback=any&lag_bytes=1000000": 0,
		})
		if h := alone.hosts()[0]; !h.fine() || h.LagBytes != nil || h.LagMS == nil {
			t.Errorf("alone, the replica is %v; want lag_bytes unknown", h)
		}
	}
	blind()
	c.reconnect() // tries the full query again, to no avail, and says nothing
	blind()
	time.Sleep(5 * period)
	warned(1, 1)

	// What is given back is used from the next connection on, or in 5 minutes.
	c.exec(0, "GRANT SELECT ON pg_stat_wal_receiver TO PUBLIC; GRANT EXECUTE ON FUNCTION pg_control_checkpoint() TO PUBLIC")
	c.waitReplayed(1)
	time.Sleep(5 * period)
	timeline(late, 0)
	c.reconnect()
	for i, sessions := range []string{"2", "3"} {
		until(t, func() error {
			got := c.query(i, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pg-status' AND state = 'idle' AND query LIKE '%pg_catalog.pg_stat_wal_receiver%'")
			if got != sessions {
				return fmt.Errorf("%s sessions of node %d have made the full query; want %s", got, i, sessions)
			}
			return nil
		})
	}
	timeline(late, 1)
	answers(late, map[string]int{"/replica?timeline=1&min_lsn=" + c.lsn(0): 1})
	alone.eventuallyHost(0, "without lag", func(h hostStatus) bool { return h.LagBytes != nil && *h.LagBytes == 0 })
	warned(1, 1)

	// And what is taken away again is said again.
	c.exec(0, "REVOKE EXECUTE ON FUNCTION pg_control_recovery() FROM PUBLIC")
	warned(2, 2)
}

// TestMissingFunctions has servers that lack a function, or refuse it as some
// managed ones do, to everybody.
func TestMissingFunctions(t *testing.T) {
	const period = 100 * time.Millisecond
	c := newCluster(t, 1)
	c.exec(0, "CREATE TABLE t (b text)")
	for _, tt := range []struct {
		sqlstate   string
		take, give string
		want       string // of calling the function
	}{
		{
			"42883",
			"ALTER FUNCTION pg_control_checkpoint() RENAME TO pg_control_checkpoint_of_old",
			"ALTER FUNCTION pg_control_checkpoint_of_old() RENAME TO pg_control_checkpoint",
			"function pg_control_checkpoint() does not exist",
		},
		{
			"0A000",
			`ALTER FUNCTION pg_control_checkpoint() RENAME TO pg_control_checkpoint_of_old;
			CREATE FUNCTION pg_catalog.pg_control_checkpoint(OUT timeline_id integer, OUT redo_lsn pg_lsn) LANGUAGE plpgsql AS
				$$ BEGIN RAISE feature_not_supported USING MESSAGE = 'not on this service'; END $$`,
			`DROP FUNCTION pg_catalog.pg_control_checkpoint();
			ALTER FUNCTION pg_control_checkpoint_of_old() RENAME TO pg_control_checkpoint`,
			"not on this service",
		},
	} {
		c.exec(0, tt.take)
		c.waitReplayed(1)
		for i := range c.nodes {
			if _, err := c.db(i).Exec("SELECT pg_control_checkpoint()"); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("pg_control_checkpoint() on node %d: %v; want %s", i, err, tt.want)
			}
		}
		d := startDaemon(t, c.env("pg_status__sleep_ms=100")...)
		d.waitReady()
		d.eventuallyHost(1, "of unknown timeline", func(h hostStatus) bool { return h.fine() && h.Timeline == nil })
		c.exec(0, "INSERT INTO t VALUES ('x')") // writes WAL of those who read the changed catalog
		d.caughtUp(c, period)
		time.Sleep(3 * period)
		for i := range c.nodes {
			for _, without := range []string{withoutView, withoutFunctions} {
				record := fmt.Sprintf(" WARNING monitor: PostgreSQL function not available host=%s sqlstate=%s; retrying poll %s\n", c.name(i), tt.sqlstate, without)
				if n := strings.Count(d.logs(), record); n != 1 {
					t.Errorf("the log has %d times %q; want it once", n, record)
				}
			}
		}
		if n := strings.Count(d.logs(), "ERROR"); n != 0 {
			t.Errorf("the log has %d errors; want none", n)
		}
		if _, body, _ := d.get("/replica?timeline=1"); body != c.name(0) {
			t.Errorf("/replica?timeline=1 = %q; want the master, as no timeline is known", body)
		}
		c.exec(0, tt.give)
		c.waitReplayed(1)
		c.reconnect()
		d.eventually("/replica?fallback=none&timeline=1&min_lsn="+c.lsn(0), c.name(1))
		d.stop()
	}
}
