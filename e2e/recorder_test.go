package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// A sample is an answer of /hosts, and then how far node 0 has inserted WAL.
type sample struct {
	sent, received time.Time // the request, the answer
	hosts          []hostStatus
	asked          time.Time // not before
	insert         uint64    // without a page header that nothing follows yet
}

// A recorder takes samples without rest.
type recorder struct {
	stopping chan struct{}
	done     chan struct{}

	samples []sample // to be read once done is closed
	err     error    // why there are no more
}

// record starts to take samples of a daemon that is ready and watches c, every
// 5 ms.
func (d *daemon) record(c *cluster) *recorder {
	d.t.Helper()
	d.waitReady()
	r := &recorder{stopping: make(chan struct{}), done: make(chan struct{})}
	d.t.Cleanup(r.end)
	go func() {
		defer close(r.done)
		for {
			var s sample
			if s, r.err = d.sample(c); r.err != nil {
				return
			}
			r.samples = append(r.samples, s)
			select {
			case <-r.stopping:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	return r
}

func (d *daemon) sample(c *cluster) (s sample, err error) {
	s.sent = time.Now()
	_, body, _, err := d.try("GET", "/hosts", "")
	if err != nil {
		return s, err
	}
	s.received = time.Now()
	if err := json.Unmarshal([]byte(body), &s.hosts); err != nil {
		return s, err
	}
	s.asked = time.Now()
	s.insert, err = c.inserted()
	if s.insert%8192 == 24 {
		s.insert -= 24
	} else if s.insert%(16<<20) == 40 {
		s.insert -= 40
	}
	return s, err
}

func (r *recorder) end() {
	select {
	case <-r.stopping:
	default:
		close(r.stopping)
	}
	<-r.done
}

// stop ends the sampling and returns the samples.
func (r *recorder) stop(t *testing.T) []sample {
	t.Helper()
	r.end()
	if r.err != nil {
		t.Fatal(r.err)
	}
	return r.samples
}

// inserted returns how far node 0 has inserted WAL.
func (c *cluster) inserted() (lsn uint64, err error) {
	var text string
	if err = c.db(0).QueryRow("SELECT pg_current_wal_insert_lsn() - '0/0'").Scan(&text); err != nil {
		return 0, err
	}
	return strconv.ParseUint(text, 10, 64)
}

// position is an LSN as a number.
func position(t *testing.T, lsn string) uint64 {
	t.Helper()
	var hi, lo uint64
	if n, err := fmt.Sscanf(lsn, "%X/%X", &hi, &lo); n != 2 || err != nil {
		t.Fatalf("%q is not an LSN", lsn)
	}
	return hi<<32 | lo
}

// A commit is a transaction of node 0 that was done by a moment, and that only a
// replica which has replayed WAL up to end shows.
type commit struct {
	done time.Time
	end  uint64
}

// commit runs statements on node 0, as one transaction, and returns it. Nobody
// else may write there.
func (c *cluster) commit(statements string) commit {
	c.t.Helper()
	m, err := c.tryCommit(statements)
	if err != nil {
		c.t.Fatalf("%s: %v", statements, err)
	}
	return m
}

// tryCommit is commit for other goroutines than the test's.
func (c *cluster) tryCommit(statements string) (m commit, err error) {
	if _, err := c.db(0).Exec(statements); err != nil {
		return m, err
	}
	m.done = time.Now()
	m.end, err = c.inserted()
	return m, err
}

// write makes node 0 commit a row into t every 20 ms, until stop is called,
// which returns the commits.
func (c *cluster) write() (stop func() []commit) {
	stopping := make(chan struct{})
	var commits []commit
	var group sync.WaitGroup
	group.Go(func() {
		for {
			m, err := c.tryCommit("INSERT INTO t VALUES ('x')")
			if err != nil {
				c.t.Errorf("writing to node 0: %v", err)
				return
			}
			commits = append(commits, m)
			select {
			case <-stopping:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	end := sync.OnceFunc(func() {
		close(stopping)
		group.Wait()
	})
	c.t.Cleanup(end)
	return func() []commit {
		end()
		return commits
	}
}

// unseen is how long, on a busy machine, the end of a check may be away from the
// first answer or record that shows it.
const unseen = 100 * time.Millisecond

// checksOf returns when the checks of a host began and were over, by a log for
// debugging.
func checksOf(t *testing.T, logs, host string) (begun, over []time.Time) {
	t.Helper()
	for line := range strings.Lines(logs) {
		if !strings.Contains(line, " DEBUG monitor: checked host="+host+" ") {
			continue
		}
		_, text, _ := strings.Cut(strings.TrimSpace(line), "duration_us=")
		us, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		at := recordTime(t, line)
		begun = append(begun, at.Add(-time.Duration(us)*time.Microsecond))
		over = append(over, at.Add(time.Millisecond)) // the record's time is cut
	}
	return begun, over
}

// provable checks all that a daemon, which logs for debugging, has said of the
// lags of replica i, as sampled, against what node 0 has committed. Each change
// of the replica's values shows that it was checked after the sample before was
// asked for.
//
// A replica that does not show a commit is at least as old as the time since
// that was done, and lag_ms must not be less. Nor may it be more than the time
// since a check of the master was begun of which the replica shows all that had
// been inserted by its end. So one that shows everything is no older than a
// period and a check.
//
// lag_bytes must not be less than what lies between the replica and the master
// as the sample before shows it.
func (d *daemon) provable(name string, samples []sample, i int, commits []commit) (checks int, mostMS, mostBytes int64) {
	t := d.t
	t.Helper()
	failures := 0
	complain := func(format string, args ...any) {
		t.Helper()
		if failures++; failures <= 3 {
			t.Errorf(name+": "+format, args...)
		}
	}
	begun, over := checksOf(t, d.logs(), samples[0].hosts[0].Host)
	inserted := make([]uint64, len(over)) // by the end of each check, at most; 0 unknown
	for k := range over {
		n, _ := slices.BinarySearchFunc(samples, over[k], func(s sample, at time.Time) int { return s.asked.Compare(at) })
		if n < len(samples) {
			inserted[k] = samples[n].insert
		}
	}
	var checked time.Time // not before; zero while unknown
	for n := 1; n < len(samples); n++ {
		before, s := samples[n-1], samples[n]
		was, h := before.hosts[i], s.hosts[i]
		if h.String() == was.String() {
			continue
		}
		if !h.fine() || h.LagMS == nil || h.LagBytes == nil || h.LSN == nil {
			complain("host %d is %v; want it fine, with known lags", i, h)
			continue
		}
		if was.LSN == nil || was.LagMS == nil || *h.LSN != *was.LSN || *h.LagMS >= *was.LagMS {
			// Else it may be the last check that is known to be fresher now.
			checked = before.sent
		}
		checks++
		mostMS, mostBytes = max(mostMS, *h.LagMS), max(mostBytes, *h.LagBytes)

		at, lag := position(t, *h.LSN), time.Duration(*h.LagMS)*time.Millisecond
		if k := slices.IndexFunc(commits, func(m commit) bool { return m.end > at }); k >= 0 && !checked.IsZero() {
			if least := checked.Sub(commits[k].done).Truncate(time.Millisecond) - unseen; lag < least {
				complain("host %d is %v; want lag_ms of at least %v, as it does not show a commit up to %X", i, h, least, commits[k].end)
			}
		}
		k, _ := slices.BinarySearchFunc(over, checked, time.Time.Compare)
		for k--; k >= 0 && (inserted[k] == 0 || inserted[k] > at); k-- {
		}
		if k >= 0 {
			if most := s.received.Sub(begun[k]) + unseen; lag > most {
				complain("host %d is %v; want lag_ms of at most %v, as it shows all up to %X, inserted %v earlier", i, h, most, inserted[k], most-unseen)
			}
		}
		if master := before.hosts[0].LSN; master != nil && position(t, *master) > at+uint64(*h.LagBytes) {
			complain("host %d is %v; want at least %d bytes, to %s", i, h, position(t, *master)-at, *master)
		}
	}
	if failures > 3 {
		t.Errorf("%s: %d more of that", name, failures-3)
	}
	t.Logf("%s: %d checks, %d commits, at most %d ms and %d bytes of lag", name, checks, len(commits), mostMS, mostBytes)
	return checks, mostMS, mostBytes
}
