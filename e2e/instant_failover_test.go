package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// watchRecovery returns a channel that gets the time at which node i, a standby,
// leaves recovery: that of its last answer that it had not, so at most some
// milliseconds early, and never late. Start it before the promotion.
func (c *cluster) watchRecovery(i int) <-chan time.Time {
	c.t.Helper()
	conn, err := c.db(i).Conn(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	if got := c.query(i, "SELECT pg_is_in_recovery()"); got != "true" {
		c.t.Fatalf("node %d is no standby", i)
	}
	left := make(chan time.Time, 1)
	go func() {
		defer close(left)
		defer conn.Close()
		last := time.Now()
		for start := last; time.Since(start) < patience; time.Sleep(time.Millisecond) {
			var standby bool
			if err := conn.QueryRowContext(c.t.Context(), "SELECT pg_is_in_recovery()").Scan(&standby); err != nil {
				if c.t.Context().Err() == nil {
					c.t.Errorf("waiting for node %d to leave recovery: %v", i, err)
				}
				return
			}
			if !standby {
				left <- last
				return
			}
			last = time.Now()
		}
		c.t.Errorf("node %d did not leave recovery", i)
	}()
	return left
}

// watchMaster returns a channel that gets the time at which /master, asked every
// millisecond, first names host.
func (d *daemon) watchMaster(host string) <-chan time.Time {
	named := make(chan time.Time, 1)
	go func() {
		defer close(named)
		for start := time.Now(); time.Since(start) < patience; time.Sleep(time.Millisecond) {
			_, body, _, err := d.try("GET", "/master", "")
			if d.t.Context().Err() != nil {
				return
			}
			if err != nil {
				d.t.Errorf("/master: %v", err)
				return
			}
			if body == host {
				named <- time.Now()
				return
			}
		}
		d.t.Errorf("/master does not name %s", host)
	}()
	return named
}

// settled waits until pg-status sees primary as the only master and all other
// nodes as its replicas, all of them fine.
func (d *daemon) settled(c *cluster, primary int) {
	d.t.Helper()
	timeline := c.query(primary, "SELECT ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint")
	d.waitReady()
	until(d.t, func() error {
		for i, h := range d.hosts() {
			if !h.fine() || h.Master != (i == primary) || h.Timeline == nil || fmt.Sprint(*h.Timeline) != timeline {
				return fmt.Errorf("host %d is %v; want it fine on timeline %s, and %d the master", i, h, timeline, primary)
			}
		}
		return nil
	})
	d.eventually("/master", c.name(primary))
}

// rejoin is rewind of a node that may have crashed. pg_rewind then has it
// recover first, with the configuration inside the data directory, which must
// not turn off or remove what pg_rewind needs. And the other node goes on to write a
// little: pg_rewind has the node take no connections before it has replayed the
// insert position, which on a page boundary counts a header that does not come
// while the other one is idle.
func (c *cluster) rejoin(i, to int) {
	c.t.Helper()
	c.append(filepath.Join(c.nodes[i].data(), "postgresql.conf"), "wal_log_hints = on\nwal_keep_size = 1GB")
	ctx, cancel := context.WithCancel(c.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			c.db(to).ExecContext(ctx, "SELECT pg_logical_emit_message(true, 'e2e', 'x')")
			time.Sleep(200 * time.Millisecond)
		}
	})
	defer wg.Wait()
	defer cancel()
	c.rewind(i, to)
}

// delays collects how long pg-status took to name the new master.
type delays []time.Duration

// check reports on them. In long runs, which nothing else on the machine should
// disturb, they meet the number that the design promises.
func (ds delays) check(t *testing.T, what string, long bool) (median time.Duration) {
	t.Helper()
	slices.Sort(ds)
	median, worst := quantile(ds, 0.5), ds[len(ds)-1]
	t.Logf("%s, %d times: median %v, worst %v", what, len(ds), median, worst)
	most := time.Second
	if long {
		most = tooLate
	}
	if worst > most {
		t.Errorf("%s: worst %v; want at most %v", what, worst, most)
	}
	return median
}

const (
	longRun = 30 // the number of failovers from which the limits hold
	tooLate = 200 * time.Millisecond
)

// TestInstantFailover measures, at default settings, from the moment a promoted
// server leaves recovery to the first /master that names it. The old primary is
// stopped in each way in turn. FAILOVERS makes them more.
func TestInstantFailover(t *testing.T) {
	runs := fromEnv(t, "FAILOVERS", 3)
	c := newCluster(t, 1, withRewind())
	d := startDaemon(t, c.env("pg_status__log_level=debug")...)
	d.settled(c, 0)
	random := rand.New(rand.NewPCG(1, 2))
	var all delays
	by := map[string]delays{}
	for run := range runs {
		old, next := run%2, 1-run%2
		way := []string{"immediate", "fast", "kill -9"}[run%3]
		switch way {
		case "immediate":
			c.stop(old, immediate)
		case "fast":
			c.stop(old, fast)
		case "kill -9":
			c.kill9(old)
		}
		// So that promotions meet every phase of the schedule, and an old primary
		// that is possibly dead or, in long runs, dead.
		longest := time.Second
		if runs >= longRun {
			longest = 5 * time.Second
		}
		time.Sleep(time.Duration(random.Int64N(int64(longest))))
		left, named := c.watchRecovery(next), d.watchMaster(c.name(next))
		c.promote(next)
		delay := (<-named).Sub(<-left)
		t.Logf("run %d, %s: %v", run, way, delay)
		if delay > tooLate {
			t.Logf("the log until then:\n%s", tail(d.logs(), 20))
		}
		all = append(all, delay)
		by[way] = append(by[way], delay)
		c.rejoin(old, next)
		d.settled(c, next)
	}
	for way, ds := range by {
		slices.Sort(ds)
		t.Logf("%s: median %v, worst %v", way, quantile(ds, 0.5), ds[len(ds)-1])
	}
	if median := all.check(t, "from promotion to /master", runs >= longRun); runs >= longRun && median > 60*time.Millisecond {
		t.Errorf("from promotion to /master: median %v; want at most 60 ms", median)
	}
}

// TestFailoverFromFrozenMaster promotes a server while the old primary is frozen
// and, as far as anybody can tell, well: it is named as soon as the old one's
// check has failed.
func TestFailoverFromFrozenMaster(t *testing.T) {
	runs := (fromEnv(t, "FAILOVERS", 3) + 2) / 3 * 2
	long := runs*3/2 >= longRun
	c := newCluster(t, 1, withRewind())
	d := startDaemon(t, c.env()...)
	d.settled(c, 0)
	var early, late delays
	for run := range runs {
		// Each order of the list, and each before and after the failed check.
		old, next := run%2, 1-run%2
		checkFails := run/2%2 == 1
		if runs == 2 {
			checkFails = run == 1
		}
		logged := len(d.logs())
		failedCheck := func() time.Time {
			t.Helper()
			var at time.Time
			until(t, func() error {
				for record := range strings.Lines(d.logs()[logged:]) {
					if strings.Contains(record, "ERROR monitor: PostgreSQL poll timed out host="+c.name(old)) {
						at = recordTime(t, record)
						return nil
					}
				}
				return fmt.Errorf("no check of %s has timed out", c.name(old))
			})
			return at
		}
		c.freeze(old)
		if checkFails {
			failedCheck()
		}
		left, named := c.watchRecovery(next), d.watchMaster(c.name(next))
		c.promote(next)
		promoted := <-left
		since := latest(promoted, failedCheck())
		delay := (<-named).Sub(since)
		t.Logf("run %d: named %v after the promotion and the failed check, %v after the promotion", run, delay, since.Add(delay).Sub(promoted))
		if checkFails {
			late = append(late, delay)
		} else {
			early = append(early, delay)
		}
		c.kill9(old)
		c.rejoin(old, next)
		d.settled(c, next)
	}
	early.check(t, "promoted before the check failed: from then to /master", long)
	late.check(t, "promoted after the check failed: to /master", long)
}

// TestClosedIdleConnection has healthy servers close connections that pg-status
// keeps. Nobody may notice.
func TestClosedIdleConnection(t *testing.T) {
	c := newCluster(t, 1)
	d := startDaemon(t, c.env()...)
	d.settled(c, 0)
	before := len(d.logs())

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	samples := make(chan int)
	go func() {
		n := 0
		defer func() { samples <- n }()
		for ; ctx.Err() == nil; n++ {
			for _, path := range []string{"/hosts", "/master", "/replica"} {
				_, body, _, err := d.try("GET", path, "")
				fine := body == c.name(0)
				switch path {
				case "/hosts":
					fine = strings.Count(body, `"alive":true,"possible_dead":false`) == 2 && strings.Count(body, `"master":true`) == 1
				case "/replica":
					fine = body == c.name(1)
				}
				if err != nil || !fine {
					t.Errorf("%s = %q, %v; want nothing changed by a closed connection", path, body, err)
					return
				}
			}
			time.Sleep(time.Millisecond)
		}
	}()

	const pid = "SELECT pid FROM pg_stat_activity WHERE application_name = 'pg-status'"
	reconnected := func(i int, old string) {
		t.Helper()
		until(t, func() error {
			if now := c.query(i, pid); now == "" || now == old {
				return fmt.Errorf("the connection of node %d is %q and was %q; want a new one", i, now, old)
			}
			return nil
		})
	}
	for range 4 {
		for i := range c.nodes {
			old := c.query(i, pid)
			c.exec(i, strings.Replace(pid, "SELECT pid", "SELECT pg_terminate_backend(pid)", 1))
			reconnected(i, old)
		}
	}
	if postgres.version >= 14 {
		// A server that closes every connection between two checks.
		for i := range c.nodes {
			old := c.query(i, pid)
			c.conf(i, "idle_session_timeout = 300ms")
			reconnected(i, old)
		}
		time.Sleep(2 * time.Second) // 2 checks of each
	}
	cancel()
	n := <-samples
	t.Logf("%d samples", n)
	if n < 50 {
		t.Errorf("%d samples; want more", n)
	}
	for record := range strings.Lines(d.logs()[before:]) {
		if !strings.Contains(record, "DEBUG") && !strings.Contains(record, "replica synchronization changed") {
			t.Errorf("closed connections are logged as %q; want nothing", record)
		}
	}
}
