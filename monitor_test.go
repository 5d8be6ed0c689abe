package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// Time in these tests is that of a synctest bubble, so moments are exact. A test
// acts between the moments at which the monitor does, never at one of them.

// monAnswer is what a fake host does with a check.
type monAnswer func(ctx context.Context, timeout time.Duration) (observation, error)

// monHost is a prober whose answers the test chooses.
type monHost struct {
	t      *testing.T
	began  time.Time
	answer atomic.Pointer[monAnswer]
	busy   atomic.Int32 // checks under way
	closed atomic.Int32

	mu       sync.Mutex // guards the following
	starts   []time.Duration
	timeouts []time.Duration
	line     chan struct{} // the idle connection, closed by hangUp; nil when there is none
}

func newMonHost(t *testing.T, a monAnswer) *monHost {
	h := &monHost{t: t, began: time.Now()}
	h.set(a)
	return h
}

// set makes a what the host does from the next check on.
func (h *monHost) set(a monAnswer) { h.answer.Store(&a) }

func (h *monHost) check(ctx context.Context, timeout time.Duration) (observation, error) {
	if h.busy.Add(1) > 1 {
		h.t.Error("two checks of a host overlap")
	}
	defer h.busy.Add(-1)
	h.mu.Lock()
	h.starts = append(h.starts, time.Since(h.began))
	h.timeouts = append(h.timeouts, timeout)
	h.mu.Unlock()

	o, err := (*h.answer.Load())(ctx, timeout)

	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err != nil:
		h.line = nil
	case h.line == nil || monIsClosed(h.line):
		h.line = make(chan struct{})
	}
	return o, err
}

func (h *monHost) watch() (<-chan struct{}, func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.line, func() {}
}

func (h *monHost) close() { h.closed.Add(1) }

// hangUp ends the idle connection from the server's side.
func (h *monHost) hangUp() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.line != nil && !monIsClosed(h.line) {
		close(h.line)
	}
}

func monIsClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// since returns when checks started, from the given moment on, and forgets them.
func (h *monHost) since(from time.Duration) []time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.starts, func(d time.Duration) bool { return d >= from })
	if i < 0 {
		i = len(h.starts)
	}
	got := slices.Clone(h.starts[i:])
	h.starts, h.timeouts = nil, nil
	return got
}

func (h *monHost) lastTimeout() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.timeouts[len(h.timeouts)-1]
}

// monAnswers is a host that answers after d, with what it saw.
func monAnswers(d time.Duration, saw observation) monAnswer {
	return func(ctx context.Context, timeout time.Duration) (observation, error) {
		o := saw
		o.start = time.Now()
		if err := sleep(ctx, min(d, timeout)); err != nil {
			return observation{}, err
		}
		if d > timeout {
			return observation{}, monTimedOut()
		}
		o.end, o.clock = time.Now(), time.Now()
		if o.standby && o.lastReplay.IsZero() {
			o.lastReplay = o.clock // of a busy cluster
		}
		return o, nil
	}
}

// monFrozen is a host that never answers.
func monFrozen() monAnswer { return monAnswers(1<<62, observation{}) }

// monFails is a host that fails at once with err.
func monFails(err error) monAnswer {
	return func(context.Context, time.Duration) (observation, error) { return observation{}, err }
}

func monTimedOut() error { return &checkError{op: "query", err: os.ErrDeadlineExceeded} }

// monRefused and monCostly are failures before and after a set-up that costs.
func monRefused() monAnswer {
	return monFails(&checkError{op: "connect", err: os.NewSyscallError("connect", syscall.ECONNREFUSED)})
}

func monCostly() monAnswer {
	return monFails(&checkError{op: "authenticate", err: errors.New("the database system is starting up"), costly: true})
}

// Two servers of one cluster. They are told apart by when they started.
var (
	monMaster  = observation{systemID: 7, postmasterStart: 1, timeline: 1, write: 0x3000060, insert: 0x3000060}
	monReplica = observation{systemID: 7, postmasterStart: 2, timeline: 1, standby: true, replay: 0x3000060, receive: 0x3000060}
)

// monConfig is the default configuration of hosts called a, b, c…
func monConfig(hosts int, edits ...func(*config)) *config {
	c := &config{
		user: "user", password: "secret", database: "base",
		maxFails: 3, sleep: time.Second, queryTimeout: time.Second, connMaxAge: time.Hour,
		pollErrorLogInterval: time.Minute, syncMaxLagMS: 1000, syncMaxLagBytes: 1_000_000,
		waitCheck: 10 * time.Millisecond, failoverCheck: 100 * time.Millisecond,
		tls: &tlsSettings{mode: sslDisable},
	}
	for i := range hosts {
		name := string(rune('a' + i))
		c.hosts = append(c.hosts, hostConfig{name: name, addr: name, port: 5432})
	}
	for _, edit := range edits {
		edit(c)
	}
	return c
}

// monLog collects records, without their time.
type monLog struct {
	mu  sync.Mutex // guards the following
	buf bytes.Buffer
}

func (l *monLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, rest, _ := bytes.Cut(p, []byte(" "))
	return l.buf.Write(rest)
}

// take returns the records so far and forgets them.
func (l *monLog) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.buf.Reset()
	s := strings.TrimSuffix(l.buf.String(), "\n")
	if s == "" {
		return nil
	}
	return strings.Split(s, "\n")
}

// logger returns a logger to l of the monitor's component.
func (l *monLog) logger(level slog.Level) *slog.Logger {
	return component(newLogger(l, level, false), "monitor")
}

// newMon returns a monitor of fake hosts, which is not running, and its log.
func newMon(c *config, hosts ...*monHost) (*monitor, *monLog) {
	probers := make([]prober, len(hosts))
	for i, h := range hosts {
		probers[i] = h
	}
	log := new(monLog)
	return newMonitor(c, log.logger(slog.LevelInfo), probers), log
}

// startMon runs a monitor of fake hosts until the test ends.
func startMon(t *testing.T, c *config, hosts ...*monHost) (*monitor, *monLog) {
	m, log := newMon(c, hosts...)
	go m.run(t.Context())
	return m, log
}

// monUntil advances the time to that moment after the start.
func monUntil(h *monHost, at time.Duration) {
	time.Sleep(at - time.Since(h.began))
	synctest.Wait()
}

// monMS returns moments or spans from milliseconds.
func monMS(ms ...int) []time.Duration {
	var ds []time.Duration
	for _, n := range ms {
		ds = append(ds, time.Duration(n)*time.Millisecond)
	}
	return ds
}

// monEvery returns the moments from, from+every, … before to, in milliseconds.
func monEvery(every, from, to int) []time.Duration {
	var ds []time.Duration
	for ; from < to; from += every {
		ds = append(ds, time.Duration(from)*time.Millisecond)
	}
	return ds
}

// monWantStarts checks when a host was checked, from a moment on.
func monWantStarts(t *testing.T, name string, h *monHost, from time.Duration, want ...[]time.Duration) {
	t.Helper()
	if got, want := h.since(from), slices.Concat(want...); !slices.Equal(got, want) {
		t.Errorf("%s checked at %v; want %v", name, got, want)
	}
}

func monWantLog(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s logs\n\t%s\nwant\n\t%s", what, strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func TestScheduleIsStartToStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(200*time.Millisecond, monMaster))
		startMon(t, monConfig(1), a)
		monUntil(a, 3500*time.Millisecond)
		monWantStarts(t, "a", a, 0, monMS(0, 1000, 2000, 3000))
	})
}

func TestScheduleOverrun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// Checks take so long; after one that overruns, the next starts at once, and
		// only one does.
		takes := monMS(200, 1500, 3700, 100, 100, 100)
		a := newMonHost(t, nil)
		a.set(func(ctx context.Context, timeout time.Duration) (observation, error) {
			d := takes[0]
			takes = takes[1:]
			return monAnswers(d, monMaster)(ctx, timeout)
		})
		startMon(t, monConfig(1, func(c *config) { c.queryTimeout = 10 * time.Second }), a)
		monUntil(a, 8500*time.Millisecond)
		monWantStarts(t, "a", a, 0, monMS(0, 1000, 2500, 6200, 7200, 8200))
	})
}

// A replica is checked just after the master, as its time lag depends on both,
// but waits for no more than the master's usual answer. Its schedule joins the
// master's again when an overrun has moved it.
func TestReplicaFollowsMaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(5*time.Millisecond, monMaster))
		b := newMonHost(t, monAnswers(0, monReplica))
		startMon(t, monConfig(2), a, b)
		monUntil(a, 2500*time.Millisecond)
		monWantStarts(t, "a", a, 0, monMS(0, 1000, 2000))
		monWantStarts(t, "b", b, 0, monMS(0, 1005, 2005)) // at 0 there is no master yet
		b.set(monAnswers(900*time.Millisecond, monReplica))
		monUntil(a, 3500*time.Millisecond)
		b.set(monAnswers(0, monReplica))
		monUntil(a, 5500*time.Millisecond)
		monWantStarts(t, "b after a long check", b, 0, monMS(3005, 4005, 5005))
	})
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(0, monMaster))
		b := newMonHost(t, monAnswers(0, monReplica))
		startMon(t, monConfig(2, func(c *config) { c.queryTimeout = 5 * time.Second }), a, b)
		monUntil(a, 500*time.Millisecond)
		b.set(monAnswers(1400*time.Millisecond, monReplica))
		monUntil(a, 1500*time.Millisecond)
		b.set(monAnswers(0, monReplica))
		monUntil(a, 4500*time.Millisecond)
		monWantStarts(t, "b, which overran,", b, 0, monMS(0, 1000, 2400, 3000, 4000))
		monWantStarts(t, "a", a, 0, monMS(0, 1000, 2000, 3000, 4000))
	})
}

// A frozen host is given the full query timeout, even beyond the period.
func TestScheduleTimeoutBeyondPeriod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monFrozen())
		startMon(t, monConfig(1, func(c *config) { c.queryTimeout = 2500 * time.Millisecond }), a)
		monUntil(a, 8*time.Second)
		monWantStarts(t, "a", a, 0, monMS(0, 2500, 5000, 7500))
	})
}

func TestReadyAfterEachFirstCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(0, monMaster))
		b := newMonHost(t, monFrozen())
		c := newMonHost(t, monRefused())
		m, _ := startMon(t, monConfig(3, func(c *config) { c.queryTimeout = 5 * time.Second }), a, b, c)
		monUntil(a, 4999*time.Millisecond)
		if m.table.view().ready {
			t.Error("ready before b's first check is over")
		}
		// A slow host delays no other, and the master is known long before.
		monWantStarts(t, "a", a, 0, monMS(0, 1000, 2000, 3000, 4000))
		monWantStarts(t, "c", c, 0, monMS(0, 1000, 2000, 3000, 4000))
		if got := m.table.view().master; got != 0 {
			t.Errorf("master = %d while b is slow; want 0", got)
		}
		monUntil(a, 5001*time.Millisecond)
		if !m.table.view().ready {
			t.Error("not ready after every host's first check")
		}
	})
}

func TestMonitorStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(0, monMaster))
		b := newMonHost(t, monAnswers(0, monReplica))
		m, log := newMon(monConfig(2), a, b)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { m.run(ctx); close(done) }()
		monUntil(a, 1500*time.Millisecond)
		b.set(monFrozen())
		monUntil(a, 2500*time.Millisecond) // in the middle of b's check
		log.take()
		before := m.table.view()
		cancel()
		<-done
		if got := time.Since(a.began); got != 2500*time.Millisecond {
			t.Errorf("run ends %v after the start; want 2.5s, at once", got)
		}
		if a.closed.Load() != 1 || b.closed.Load() != 1 {
			t.Errorf("connections closed %d and %d times; want once each", a.closed.Load(), b.closed.Load())
		}
		// A check that ends because we stop says nothing about its host.
		if m.table.view() != before {
			t.Error("stopping changed what we believe")
		}
		monWantLog(t, "stopping", log.take(), "INFO monitor: stopped")
	})
}

// monDetection is the README's bound on the time to find an outage.
func monDetection(c *config) time.Duration {
	return c.sleep + c.queryTimeout + time.Duration(c.maxFails-1)*max(c.sleep, c.queryTimeout)
}

func TestDetectionTime(t *testing.T) {
	for _, tt := range []struct {
		sleep, timeout, maxFails int
		want                     time.Duration
	}{
		{1000, 1000, 3, 4 * time.Second},
		{1000, 1000, 1, 2 * time.Second},
		{500, 2000, 3, 6500 * time.Millisecond},
		{2000, 500, 3, 6500 * time.Millisecond},
		{1000, 250, 2, 2250 * time.Millisecond},
	} {
		cfg := func(hosts int) *config {
			return monConfig(hosts, func(c *config) {
				c.sleep, c.queryTimeout = time.Duration(tt.sleep)*time.Millisecond, time.Duration(tt.timeout)*time.Millisecond
				c.maxFails = tt.maxFails
			})
		}
		if got := monDetection(cfg(1)); got != tt.want {
			t.Fatalf("bound for %+v = %v; want %v", tt, got, tt.want)
		}
		// The outage begins that long after the start of a check.
		for _, phase := range []time.Duration{1, 100 * time.Millisecond, 333 * time.Millisecond, time.Duration(tt.sleep)*time.Millisecond - 1} {
			for _, extra := range []string{"", "waiting", "failover", "both frozen"} {
				synctest.Test(t, func(t *testing.T) {
					a := newMonHost(t, monAnswers(0, monMaster))
					b := newMonHost(t, monAnswers(0, monReplica))
					m, log := startMon(t, cfg(2), a, b)
					monUntil(a, 7*time.Duration(tt.sleep)*time.Millisecond+time.Millisecond/2)
					if extra == "waiting" {
						defer m.demand(true, true)()
					}
					if extra == "failover" {
						a.set(monRefused())
					}
					monUntil(a, 10*time.Duration(tt.sleep)*time.Millisecond+phase)
					log.take()
					outage, bound := time.Now(), tt.want
					b.set(monFrozen())
					if extra == "both frozen" {
						a.set(monFrozen())
						bound += m.patience(m.table.view()) // for the master
					}
					for v := m.table.view(); v.hosts[1].alive; v = m.table.view() {
						if time.Since(outage) > bound {
							t.Errorf("%+v, outage at +%v, extra checks %q: alive after %v; want dead",
								tt, phase, extra, time.Since(outage))
							return
						}
						<-v.changed
					}
					// Not sooner than the schedule's max_fails either.
					least := time.Duration(tt.timeout)*time.Millisecond + time.Duration(tt.maxFails-1)*max(cfg(1).sleep, cfg(1).queryTimeout)
					if got := time.Since(outage); got < least {
						t.Errorf("%+v, outage at +%v, extra checks %q: dead after %v; want at least %v", tt, phase, extra, got, least)
					}
				})
			}
		}
	}
}

// A refused connection is seen at the next check of the schedule.
func TestDetectionOfRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(0, monMaster))
		m, log := startMon(t, monConfig(1), a)
		monUntil(a, 1500*time.Millisecond)
		log.take()
		a.set(monRefused())
		for _, step := range []struct {
			at                  time.Duration
			alive, possiblyDead bool
			master              int
		}{
			{1999 * time.Millisecond, true, false, 0},
			{2500 * time.Millisecond, true, true, 0},
			{3500 * time.Millisecond, true, true, 0},
			{4001 * time.Millisecond, false, true, -1},
		} {
			monUntil(a, step.at)
			v := m.table.view()
			if s := &v.hosts[0]; s.alive != step.alive || s.possiblyDead() != step.possiblyDead || v.master != step.master {
				t.Errorf("at %v alive=%v possiblyDead=%v master=%d; want %+v", step.at, s.alive, s.possiblyDead(), v.master, step)
			}
		}
		a.set(monAnswers(0, monMaster))
		monUntil(a, 5500*time.Millisecond)
		if v := m.table.view(); !v.hosts[0].responsive() || v.master != 0 || v.hosts[0].fails != 0 {
			t.Error("not responsive after the check at 5s")
		}
		monWantLog(t, "an outage", log.take(),
			"ERROR monitor: PostgreSQL operation failed operation=connect host=a error=connect: connection refused (errno=111)",
			"WARNING monitor: host state changed host=a state=possible_dead",
			"WARNING monitor: host state changed host=a state=dead",
			"INFO monitor: host state changed host=a state=alive role=master")
	})
}

func TestBackOff(t *testing.T) {
	t.Run("host that was alive", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			startMon(t, monConfig(2), a, b)
			monUntil(a, 500*time.Millisecond)
			b.set(monCostly())
			monUntil(a, 40500*time.Millisecond)
			// Dead at 3 s, then 2, 4, 8 and always 8 s.
			monWantStarts(t, "b", b, 0, monMS(0, 1000, 2000, 3000, 5000, 9000, 17000, 25000, 33000))
			monWantStarts(t, "a", a, 0, monEvery(1000, 0, 40500))
			b.set(monAnswers(0, monReplica))
			monUntil(a, 43500*time.Millisecond)
			monWantStarts(t, "recovered b", b, 0, monMS(41000, 42000, 43000))
		})
	})
	t.Run("host that never answered", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monCostly())
			startMon(t, monConfig(2), a, b)
			monUntil(a, 23500*time.Millisecond)
			monWantStarts(t, "b", b, 0, monMS(0, 2000, 6000, 14000, 22000))
		})
	})
	t.Run("period above 8 s", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monCostly())
			startMon(t, monConfig(2, func(c *config) { c.sleep = 10 * time.Second }), a, b)
			monUntil(a, 35*time.Second)
			monWantStarts(t, "b", b, 0, monMS(0, 10000, 20000, 30000))
		})
	})
	t.Run("failures that cost little", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monCostly())
			c := newMonHost(t, monRefused())
			startMon(t, monConfig(3), a, b, c)
			monUntil(a, 6500*time.Millisecond)
			monWantStarts(t, "b", b, 0, monMS(0, 2000, 6000))
			monWantStarts(t, "c", c, 0, monEvery(1000, 0, 6500))
			b.set(monRefused())
			monUntil(a, 17500*time.Millisecond)
			monWantStarts(t, "b", b, 0, monMS(14000, 15000, 16000, 17000))
		})
	})
	t.Run("no master", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monCostly())
			startMon(t, monConfig(2), a, b)
			monUntil(a, 14500*time.Millisecond)
			monWantStarts(t, "b", b, 0, monMS(0, 2000, 6000, 14000))
			a.set(monRefused())
			// a is dead with its check at 17 s: b is looked at then, not at 22 s.
			monUntil(a, 19500*time.Millisecond)
			monWantStarts(t, "b without a master", b, 0, monMS(17000, 18000, 19000))
			a.set(monAnswers(0, monMaster))
			monUntil(a, 34500*time.Millisecond)
			// Whether b or a is first at 20 s is open.
			got := b.since(20001 * time.Millisecond)
			if len(got) != 1 || got[0] != 27*time.Second && got[0] != 28*time.Second {
				t.Errorf("b checked at %v once there is a master again; want once, 8s after 19s or 20s", got)
			}
		})
	})
}

func TestFailoverChecks(t *testing.T) {
	const second, patience = 1000, 50 // in milliseconds
	t.Run("master fails", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			c := newMonHost(t, monRefused())
			m, log := startMon(t, monConfig(3), a, b, c)
			monUntil(a, 1500*time.Millisecond)
			log.take()
			a.set(monRefused())
			monUntil(a, 7250*time.Millisecond)
			// From a's failure at 2 s on, while it is dead too; b's own checks stay
			// at full seconds, and c, which does not answer, is left to them.
			monWantStarts(t, "b", b, 0, monMS(0, 1000), monEvery(100, 2000, 7250))
			monWantStarts(t, "a", a, 0, monEvery(second, 0, 7250))
			monWantStarts(t, "c", c, 0, monEvery(second, 0, 7250))
			if v := m.table.view(); v.hosts[1].fails != 0 {
				t.Errorf("b has %d failures", v.hosts[1].fails)
			}
			a.set(monAnswers(0, monMaster))
			monUntil(a, 10500*time.Millisecond)
			monWantStarts(t, "b after a is back", b, 8001*time.Millisecond, monMS(9000, 10000))
		})
	})
	t.Run("promotion", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			m, log := startMon(t, monConfig(2), a, b)
			monUntil(a, 1500*time.Millisecond)
			a.set(monRefused())
			monUntil(a, 2340*time.Millisecond)
			log.take()
			promoted := monMaster
			promoted.postmasterStart, promoted.timeline = monReplica.postmasterStart, 2
			b.set(monAnswers(0, promoted))
			monUntil(a, 2399*time.Millisecond)
			if got := m.table.view().master; got != 0 {
				t.Errorf("master = %d before b is seen; want 0, possibly dead", got)
			}
			monUntil(a, 2401*time.Millisecond)
			if got := m.table.view().master; got != 1 {
				t.Errorf("master = %d at 2.4 s; want 1", got)
			}
			monWantLog(t, "a promotion", log.take(),
				"INFO monitor: host role changed host=b role=master")
		})
	})
	t.Run("master check unanswered", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			m, _ := startMon(t, monConfig(2), a, b)
			monUntil(a, 1500*time.Millisecond)
			a.set(monFrozen())
			monUntil(a, 2740*time.Millisecond)
			if v := m.table.view(); !v.hosts[0].responsive() {
				t.Error("a is not responsive before its check has failed")
			}
			// b waits for a for a little while, and then every 100 ms for a new master.
			monWantStarts(t, "b", b, 0, monMS(0, 1000), monEvery(100, 2000+patience, 2740))
		})
	})
	t.Run("slow master", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(99*time.Millisecond, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			startMon(t, monConfig(2), a, b)
			monUntil(a, 2500*time.Millisecond)
			monWantStarts(t, "b beside a master that takes 99 ms", b, 0, monMS(0, 1099, 2099))
			a.set(monAnswers(240*time.Millisecond, monMaster))
			monUntil(a, 4500*time.Millisecond)
			monWantStarts(t, "b beside a master that takes 240 ms", b, 0,
				monMS(3100, 3200, 4100, 4200))
		})
	})
	t.Run("off", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			startMon(t, monConfig(2, func(c *config) { c.failoverCheck, c.queryTimeout = 0, 900*time.Millisecond }), a, b)
			monUntil(a, 1500*time.Millisecond)
			a.set(monFrozen())
			monUntil(a, 3500*time.Millisecond)
			a.set(monRefused())
			monUntil(a, 7500*time.Millisecond)
			monWantStarts(t, "b", b, 0, monMS(0, 1000, 2000+patience), monEvery(second, 3000, 7500))
		})
	})
	t.Run("never a master", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monReplica))
			b := newMonHost(t, monRefused())
			startMon(t, monConfig(2), a, b)
			monUntil(a, 4500*time.Millisecond)
			monWantStarts(t, "a", a, 0, monEvery(second, 0, 4500))
			monWantStarts(t, "b", b, 0, monEvery(second, 0, 4500))
		})
	})
}

// What fails outside the schedule changes nothing, whatever asked for the check.
func TestFailuresOutsideTheSchedule(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer monAnswer
	}{
		{"refused", monRefused()},
		{"costly", monCostly()},
		{"slow failure", func(ctx context.Context, _ time.Duration) (observation, error) {
			sleep(ctx, 90*time.Millisecond)
			return observation{}, monTimedOut()
		}},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			m, log := startMon(t, monConfig(2, func(c *config) { c.maxFails = 1 }), a, b)
			monUntil(a, 1500*time.Millisecond)
			log.take()
			release := m.demand(true, false)
			for at := 1500 * time.Millisecond; at < 6*time.Second; at += time.Second {
				monUntil(a, at)
				b.set(tt.answer)
				monUntil(a, at+400*time.Millisecond) // well before the schedule's next
				b.set(monAnswers(0, monReplica))
				if s := m.table.view().hosts[1]; s.fails != 0 || !s.responsive() {
					t.Errorf("%s: b has %d failures, responsive=%v; want 0, true", tt.name, s.fails, s.responsive())
				}
			}
			release()
			monWantLog(t, tt.name, log.take())
			b.since(0)
			monUntil(a, 8500*time.Millisecond)
			monWantStarts(t, "b", b, 6500*time.Millisecond, monMS(7000, 8000))
		})
	}
}

// An extra check that is under way when the schedule's is due takes its place:
// it has that one's deadline, and its failure counts.
func TestExtraCheckTakesTheSchedulesPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(0, monMaster))
		b := newMonHost(t, monAnswers(3*time.Millisecond, monReplica))
		m, _ := startMon(t, monConfig(2), a, b)
		monUntil(a, 1995*time.Millisecond)
		b.set(monFrozen())
		release := m.demand(true, false) // at 1.995 s
		synctest.Wait()
		release()
		if got, want := b.lastTimeout(), 1005*time.Millisecond; got != want {
			t.Errorf("timeout of the extra check = %v; want %v, that of the check due at 2 s", got, want)
		}
		monUntil(a, 2999*time.Millisecond)
		if got := m.table.view().hosts[1].fails; got != 0 {
			t.Errorf("b has %d failures before the deadline; want 0", got)
		}
		monUntil(a, 3001*time.Millisecond)
		if got := m.table.view().hosts[1].fails; got != 1 {
			t.Errorf("b has %d failures; want 1", got)
		}
		// The schedule goes on as if it had been its own.
		monWantStarts(t, "b", b, 1900*time.Millisecond, monMS(1995, 3000))
	})
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(0, monMaster))
		b := newMonHost(t, monAnswers(0, monReplica))
		m, _ := startMon(t, monConfig(2), a, b)
		monUntil(a, 1995*time.Millisecond)
		b.set(monAnswers(20*time.Millisecond, monReplica))
		release := m.demand(true, false)
		synctest.Wait()
		release()
		monUntil(a, 4500*time.Millisecond)
		monWantStarts(t, "b, which answered that check", b, 1900*time.Millisecond, monMS(1995, 3000, 4000))
	})
}

func TestDemand(t *testing.T) {
	t.Run("replica", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(3*time.Millisecond, monReplica))
			c := newMonHost(t, monRefused())
			m, _ := startMon(t, monConfig(3), a, b, c)
			monUntil(a, 1500*time.Millisecond)
			release := m.demand(true, false)
			monUntil(a, 2495*time.Millisecond)
			release()
			monUntil(a, 4500*time.Millisecond)
			monWantStarts(t, "b", b, 0, monMS(0, 1000), monEvery(10, 1500, 2495), monMS(3000, 4000))
			monWantStarts(t, "a, which is checked less often,", a, 0, monMS(0, 1000), monEvery(100, 1500, 2495), monMS(3000, 4000))
			monWantStarts(t, "c, which does not answer,", c, 0, monEvery(1000, 0, 4500))
		})
	})
	t.Run("master", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			m, _ := startMon(t, monConfig(2, func(c *config) { c.waitCheck = 25 * time.Millisecond }), a, b)
			monUntil(a, 1500*time.Millisecond)
			release := m.demand(false, true)
			monUntil(a, 1590*time.Millisecond)
			release()
			monUntil(a, 2500*time.Millisecond)
			monWantStarts(t, "a", a, 0, monMS(0, 1000, 1500, 1525, 1550, 1575, 2000))
			monWantStarts(t, "b", b, 0, monMS(0, 1000, 2000))
		})
	})
	t.Run("a thousand waiters", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(3*time.Millisecond, monReplica))
			m, _ := startMon(t, monConfig(2), a, b)
			monUntil(a, 1500*time.Millisecond)
			var wg sync.WaitGroup
			for i := range 1000 {
				wg.Go(func() {
					time.Sleep(time.Duration(i%50) * 100 * time.Microsecond)
					release := m.demand(true, true)
					time.Sleep(20 * time.Millisecond)
					release()
				})
			}
			wg.Wait()
			monUntil(a, 2500*time.Millisecond)
			// They come from 1.5 to 1.505 s and the last one leaves before 1.525 s.
			monWantStarts(t, "b", b, 0, monMS(0, 1000, 1500, 1510, 1520, 2000))
			monWantStarts(t, "a", a, 0, monMS(0, 1000, 1500, 1510, 1520, 2000))
		})
	})
	t.Run("check slower than the period", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(15*time.Millisecond, monReplica))
			m, _ := startMon(t, monConfig(2), a, b)
			monUntil(a, 1500*time.Millisecond)
			release := m.demand(true, false)
			monUntil(a, 1550*time.Millisecond)
			release()
			monUntil(a, 1999*time.Millisecond)
			monWantStarts(t, "b", b, 1500*time.Millisecond, monMS(1500, 1515, 1530, 1545))
		})
	})
	t.Run("joins failover checks", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			m, _ := startMon(t, monConfig(2, func(c *config) { c.waitCheck = 300 * time.Millisecond }), a, b)
			monUntil(a, 1500*time.Millisecond)
			a.set(monRefused())
			monUntil(a, 2050*time.Millisecond)
			release := m.demand(true, true)
			monUntil(a, 2450*time.Millisecond)
			release()
			// The shorter of the two periods; a, not being well, is left alone.
			monWantStarts(t, "b", b, 1500*time.Millisecond, monMS(2000, 2100, 2200, 2300, 2400))
			monWantStarts(t, "a", a, 1500*time.Millisecond, monMS(2000))
		})
	})
}

// A waiting request with a limit on lag_ms has the master checked before the
// replicas, so that they are measured by its latest position.
func TestDemandMasterFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(4*time.Millisecond, monMaster))
		b := newMonHost(t, monAnswers(time.Millisecond, monReplica))
		c := newMonHost(t, monAnswers(2*time.Millisecond, monReplica))
		m, _ := startMon(t, monConfig(3), a, b, c)
		monUntil(a, 1500*time.Millisecond)
		release := m.demand(true, true)
		monUntil(a, 1508*time.Millisecond)
		monWantStarts(t, "a", a, 1500*time.Millisecond, monMS(1500))
		monWantStarts(t, "b", b, 1500*time.Millisecond, monMS(1504))
		monWantStarts(t, "c", c, 1500*time.Millisecond, monMS(1504))
		monUntil(a, 1700*time.Millisecond)
		// Afterwards each at its pace.
		for name, h := range map[string]*monHost{"a": a, "b": b, "c": c} {
			if n := len(h.since(1508 * time.Millisecond)); n < 15 || n > 20 {
				t.Errorf("%s checked %d times in 192 ms; want every 10 ms", name, n)
			}
		}
		// A master that does not answer hardly holds the replicas up.
		a.set(monFrozen())
		monUntil(a, 1995*time.Millisecond)
		for name, h := range map[string]*monHost{"b": b, "c": c} {
			if n := len(h.since(1730 * time.Millisecond)); n < 4 {
				t.Errorf("%s checked %d times in 265 ms beside a frozen master; want every 60 ms", name, n)
			}
		}
		release()
	})
}

func TestHangUp(t *testing.T) {
	t.Run("healthy server", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			m, log := startMon(t, monConfig(2), a, b)
			monUntil(a, 1300*time.Millisecond)
			log.take()
			a.hangUp()
			monUntil(a, 3500*time.Millisecond)
			monWantStarts(t, "a", a, 0, monMS(0, 1000, 1300, 2000, 3000))
			monWantStarts(t, "b", b, 0, monMS(0, 1000, 2000, 3000))
			monWantLog(t, "a closed idle connection", log.take())
			if !m.table.view().hosts[0].responsive() {
				t.Error("a is not responsive")
			}
		})
	})
	t.Run("server gone", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			b := newMonHost(t, monAnswers(0, monReplica))
			m, log := startMon(t, monConfig(2), a, b)
			monUntil(a, 1300*time.Millisecond)
			log.take()
			a.set(monRefused())
			a.hangUp()
			monUntil(a, 1301*time.Millisecond)
			v := m.table.view()
			if s := &v.hosts[0]; s.responsive() || !s.alive || s.fails != 0 || v.master != 0 {
				t.Errorf("at 1.3 s responsive=%v alive=%v fails=%d master=%d; want false, true, 0, 0", s.responsive(), s.alive, s.fails, v.master)
			}
			monWantLog(t, "a server that is gone", log.take(),
				"ERROR monitor: PostgreSQL operation failed operation=connect host=a error=connect: connection refused (errno=111)",
				"WARNING monitor: host state changed host=a state=possible_dead")
			monUntil(a, 4500*time.Millisecond)
			// The schedule decides alone when it is dead: with the checks at 2, 3 and 4 s.
			monWantStarts(t, "a", a, 1001*time.Millisecond, monMS(1300, 2000, 3000, 4000))
			monWantStarts(t, "b", b, 1001*time.Millisecond, monEvery(100, 1300, 4501))
			monWantLog(t, "its death", log.take(), "WARNING monitor: host state changed host=a state=dead")
			if got := m.table.view().hosts[0].fails; got != 3 {
				t.Errorf("a has %d failures; want 3", got)
			}
		})
	})
	t.Run("back before the schedule", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			m, log := startMon(t, monConfig(1), a)
			monUntil(a, 1300*time.Millisecond)
			a.set(monRefused())
			a.hangUp()
			monUntil(a, 1400*time.Millisecond)
			log.take()
			a.set(monAnswers(0, monMaster))
			monUntil(a, 2001*time.Millisecond)
			if !m.table.view().hosts[0].responsive() {
				t.Error("a is not responsive after it answered")
			}
			monWantLog(t, "the check at 2 s", log.take(), "INFO monitor: host state changed host=a state=alive role=master")
		})
	})
	t.Run("rest", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			startMon(t, monConfig(1), a)
			// A server that closes every idle connection at once is looked at no
			// more often than every 200 ms.
			monUntil(a, 1100*time.Millisecond)
			for range 10 {
				a.hangUp()
				time.Sleep(50 * time.Millisecond)
			}
			monUntil(a, 1999*time.Millisecond)
			got := a.since(1001 * time.Millisecond)
			if len(got) == 0 || got[0] != 1100*time.Millisecond {
				t.Fatalf("checked at %v; want first at 1.1s", got)
			}
			for i := 1; i < len(got); i++ {
				if got[i]-got[i-1] < 200*time.Millisecond {
					t.Errorf("checked at %v; want 200 ms between two", got)
				}
			}
			monUntil(a, 2300*time.Millisecond)
			a.hangUp()
			monUntil(a, 2600*time.Millisecond)
			a.hangUp()
			monUntil(a, 3500*time.Millisecond)
			monWantStarts(t, "a", a, 0, monMS(2000, 2300, 2600, 3000))
		})
	})
	t.Run("frozen and due", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			m, _ := startMon(t, monConfig(1), a)
			monUntil(a, 1300*time.Millisecond)
			a.set(monFrozen())
			a.hangUp()
			synctest.Wait()
			// It takes the place of the check due at 2 s.
			if got, want := a.lastTimeout(), 1700*time.Millisecond; got != want {
				t.Errorf("timeout = %v; want %v", got, want)
			}
			monUntil(a, 3001*time.Millisecond)
			if got := m.table.view().hosts[0].fails; got != 1 {
				t.Errorf("a has %d failures; want 1", got)
			}
		})
	})
}

// A replica beyond the master's last known position has the master checked once
// for all replicas, and its own check is not held up by that.
func TestReplicaAheadOfMaster(t *testing.T) {
	for _, tt := range []struct {
		name      string
		commitAge time.Duration
		want      []time.Duration // the master's checks
	}{
		{"idle cluster", time.Hour, monMS(0, 1000, 1700, 2000, 3000)},
		{"busy cluster", 20 * time.Millisecond, monMS(0, 1000, 2000, 3000)},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := newMonHost(t, monAnswers(0, monMaster))
			ahead := func(ctx context.Context, timeout time.Duration) (observation, error) {
				o := monReplica
				o.replay += 0x1000
				o.lastReplay = time.Now().Add(-tt.commitAge)
				return monAnswers(0, o)(ctx, timeout)
			}
			b := newMonHost(t, monAnswers(0, monReplica))
			c := newMonHost(t, monAnswers(0, monReplica))
			m, _ := startMon(t, monConfig(3), a, b, c)
			monUntil(a, 1500*time.Millisecond)
			moved := monMaster
			moved.insert += 0x1000
			a.set(monAnswers(5*time.Millisecond, moved))
			b.set(ahead)
			c.set(ahead)
			monUntil(a, 1700*time.Millisecond)
			for _, w := range m.watchers[1:] {
				w.wanted.Store(true)
				w.wakeUp()
			}
			monUntil(a, 1704*time.Millisecond)
			if v := m.table.view(); v.hosts[1].replay != 0x3001060 || v.hosts[2].replay != 0x3001060 {
				t.Errorf("%s: the replicas' checks wait for the master's", tt.name)
			}
			monUntil(a, 1800*time.Millisecond)
			v := m.table.view()
			for i := 1; i <= 2; i++ {
				if got := v.hosts[i].lagMS; !got.within(20) {
					t.Errorf("%s: lag_ms of host %d = %v; want at most 20", tt.name, i, got)
				}
			}
			monUntil(a, 3500*time.Millisecond)
			monWantStarts(t, tt.name+": a", a, 0, tt.want)
		})
	}
}

func TestLogNames(t *testing.T) {
	host := func(name, addr string, port uint16) hostConfig {
		return hostConfig{name: name, addr: addr, port: port}
	}
	for _, tt := range []struct {
		hosts []hostConfig
		want  []string
	}{
		{[]hostConfig{host("a", "a", 5432), host("b", "b", 5432)}, []string{"a", "b"}},
		{[]hostConfig{host("a", "a", 5432), host("b", "b", 1), host("a", "a", 5433)}, []string{"a:5432", "b", "a:5433"}},
		{[]hostConfig{host("[::1]", "::1", 1), host("[::1]", "::1", 2)}, []string{"[::1]:1", "[::1]:2"}},
	} {
		if got := logNames(tt.hosts); !slices.Equal(got, tt.want) {
			t.Errorf("logNames(%+v) = %q; want %q", tt.hosts, got, tt.want)
		}
	}
}
