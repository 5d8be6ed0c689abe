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

// A sample is an answer of /hosts.
type sample struct {
	sent, received time.Time // the request, the answer
	hosts          []hostStatus
}

// A recorder samples /hosts without rest.
type recorder struct {
	stopping chan struct{}
	done     chan struct{}

	samples []sample // to be read once done is closed
	err     error    // why there are no more
}

// record starts to sample /hosts of a daemon that is ready, every 5 ms.
func (d *daemon) record() *recorder {
	d.t.Helper()
	d.waitReady()
	r := &recorder{stopping: make(chan struct{}), done: make(chan struct{})}
	d.t.Cleanup(r.end)
	go func() {
		defer close(r.done)
		for {
			var s sample
			var body string
			s.sent = time.Now()
			if _, body, _, r.err = d.try("GET", "/hosts", ""); r.err == nil {
				r.err = json.Unmarshal([]byte(body), &s.hosts)
			}
			if r.err != nil {
				return
			}
			s.received = time.Now()
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

// position is an LSN as a number.
func position(t *testing.T, lsn string) uint64 {
	t.Helper()
	var hi, lo uint64
	if n, err := fmt.Sscanf(lsn, "%X/%X", &hi, &lo); n != 2 || err != nil {
		t.Fatalf("%q is not an LSN", lsn)
	}
	return hi<<32 | lo
}

// A commit is a transaction that only a replica beyond end shows. It was made
// between begun and done, on our clock.
type commit struct {
	begun, done time.Time
	end         uint64
}

// commit runs statements on node 0, as one transaction, and returns it. Nobody
// else may write there.
func (c *cluster) commit(statements string) commit {
	c.t.Helper()
	begun := time.Now()
	c.exec(0, statements)
	done := time.Now()
	return commit{begun, done, position(c.t, c.query(0, "SELECT pg_current_wal_insert_lsn()"))}
}

// write makes node 0 commit a row into t every 20 ms, until stop is called,
// which returns the commits.
func (c *cluster) write() (stop func() []commit) {
	stopping := make(chan struct{})
	var commits []commit
	var group sync.WaitGroup
	group.Go(func() {
		for {
			m, err := c.tryCommit()
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

func (c *cluster) tryCommit() (m commit, err error) {
	m.begun = time.Now()
	if _, err = c.db(0).Exec("INSERT INTO t VALUES ('x')"); err != nil {
		return m, err
	}
	m.done = time.Now()
	var lsn string
	if err = c.db(0).QueryRow("SELECT pg_current_wal_insert_lsn() - '0/0'").Scan(&lsn); err != nil {
		return m, err
	}
	m.end, err = strconv.ParseUint(lsn, 10, 64)
	return m, err
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
// since the last check of the master before that was begun, as the replica shows
// all that was inserted then. So one that shows everything is no older than a
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
		missing := commit{begun: s.received, done: s.received}
		if k := slices.IndexFunc(commits, func(m commit) bool { return m.end > at }); k >= 0 {
			missing = commits[k]
		}
		least := checked.Sub(missing.done).Truncate(time.Millisecond) - unseen
		if lag < least && !checked.IsZero() {
			complain("host %d is %v; want lag_ms of at least %v, as it does not show a commit up to %X", i, h, least, missing.end)
		}
		known := checked
		if missing.begun.Before(known) {
			known = missing.begun
		}
		if k, _ := slices.BinarySearchFunc(over, known, time.Time.Compare); k > 0 {
			if most := s.received.Sub(begun[k-1]) + unseen; lag > most {
				complain("host %d is %v; want lag_ms of at most %v, as it shows all that the master had inserted %v earlier", i, h, most, most-unseen)
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
