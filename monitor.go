package main

import (
	"context"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// A prober checks one host and keeps what it needs for the next check. Only one
// goroutine uses it.
type prober interface {
	// check asks the server for an observation. Time spent on DNS or waiting for
	// a turn to connect does not count towards timeout.
	check(ctx context.Context, timeout time.Duration) (observation, error)
	// watch returns a channel that is closed when the server hangs up on the idle
	// connection, nil if there is none, until stop is called.
	watch() (hungUp <-chan struct{}, stop func())
	// close ends the connection properly.
	close()
}

// monitor checks every host on its schedule, and more often where someone waits
// for the answer or the master is in doubt, and records what it sees in its
// table.
type monitor struct {
	cfg      *config
	table    *table
	log      *slog.Logger
	names    []string // of the hosts in the log
	watchers []*watcher

	// How many requests wait for a replica, and for a new check of the master, and
	// since when the latter do.
	wantReplica, wantMaster atomic.Int32
	wantMasterSince         moment
}

// moment is a time that goroutines share.
type moment struct{ atomic.Int64 }

// epoch makes a monotonic time a number.
var epoch = time.Now()

func (m *moment) set(t time.Time) { m.Store(int64(t.Sub(epoch))) }
func (m *moment) time() time.Time { return epoch.Add(time.Duration(m.Load())) }

// newMonitor returns a monitor of the hosts of c, which asks probers, one a host.
func newMonitor(c *config, log *slog.Logger, probers []prober) *monitor {
	m := &monitor{cfg: c, log: log, table: newTable(tableConfig{
		hosts:            c.hosts,
		currentDC:        c.currentDC,
		currentGeo:       c.currentGeo,
		maxFails:         max(1, c.maxFails),
		masterByTimeline: c.masterByTimeline,
		syncMS:           c.syncMaxLagMS,
		syncBytes:        c.syncMaxLagBytes,
	})}
	m.names = logNames(c.hosts)
	for i, p := range probers {
		m.watchers = append(m.watchers, &watcher{m: m, i: i, prober: p, wake: make(chan struct{}, 1)})
	}
	return m
}

// logNames returns how the log names each host: by its port too where several
// hosts share a name.
func logNames(hosts []hostConfig) []string {
	count := make(map[string]int)
	for _, h := range hosts {
		count[h.name]++
	}
	names := make([]string, len(hosts))
	for i, h := range hosts {
		names[i] = h.name
		if count[h.name] > 1 {
			names[i] = net.JoinHostPort(h.addr, strconv.Itoa(int(h.port)))
		}
	}
	return names
}

// run checks the hosts until ctx ends, and then ends the connections. Each host
// has a goroutine of its own, so that a slow one delays no other.
func (m *monitor) run(ctx context.Context) {
	m.log.Info("started", "hosts", len(m.watchers))
	var wg sync.WaitGroup
	for _, w := range m.watchers {
		w.slot.set(time.Now().Add(-m.cfg.sleep)) // due now
		wg.Go(func() { w.run(ctx) })
	}
	wg.Wait()
	m.log.Info("stopped")
}

// wakeAll makes every host look again when its next check is due.
func (m *monitor) wakeAll() {
	for _, w := range m.watchers {
		w.wakeUp()
	}
}

// masterInDoubt reports whether the selected master does not answer, or has kept
// a check waiting for failover_check_ms: then a replica may be promoted at any
// moment. Where there never was a master, none is expected to appear.
func (m *monitor) masterInDoubt(v *view) bool {
	if !v.hadMaster() {
		return false
	}
	return v.master < 0 || !v.hosts[v.master].responsive() || m.watchers[v.master].pending(m.cfg.failoverCheck)
}

// demand asks for checks on behalf of a request that waits for a replica, or for
// a new position of the master, until release is called.
func (m *monitor) demand(replica, master bool) (release func()) {
	var wanted []*atomic.Int32
	if master {
		wanted = append(wanted, &m.wantMaster)
		if m.wantMaster.Load() == 0 {
			m.wantMasterSince.set(time.Now())
		}
	}
	if replica {
		wanted = append(wanted, &m.wantReplica)
	}
	first := false
	for _, n := range wanted {
		first = n.Add(1) == 1 || first
	}
	if first {
		m.wakeAll()
	}
	return func() {
		for _, n := range wanted {
			n.Add(-1)
		}
	}
}

// watcher checks one host. Fields below the gap belong to its goroutine.
type watcher struct {
	m       *monitor
	i       int
	prober  prober
	wake    chan struct{} // holds a value when the next check may be due earlier
	wanted  atomic.Bool   // one check is wanted at once
	busy    atomic.Bool   // a check is under way
	started moment        // start of the last check of any kind
	done    moment        // start of the last check of any kind that is over
	took    atomic.Int64  // its duration, in nanoseconds
	slot    moment        // of the schedule that was used last
	beat    moment        // when the goroutine last went round

	hungUp      time.Time // when a hang-up was last looked into
	costlyFails int       // consecutive costly failures since the host is dead
	report      reporter
}

// checkKind is why a check is made.
type checkKind uint8

const (
	onSchedule checkKind = iota
	onDemand
	onHangUp
)

func (w *watcher) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// pending reports whether a check has been under way for at least d.
func (w *watcher) pending(d time.Duration) bool {
	return w.busy.Load() && time.Since(w.started.time()) >= d
}

func (w *watcher) run(ctx context.Context) {
	defer w.prober.close()
	for {
		w.beat.set(time.Now())
		kind, ok := w.await(ctx)
		if !ok {
			return
		}
		w.check(ctx, kind)
	}
}

// hangUpRest is the least time between two looks at a host that hangs up, so
// that a server which closes every idle connection is not kept busy with that.
const hangUpRest = 200 * time.Millisecond

// await waits until a check is due and returns its kind, false when ctx ends.
func (w *watcher) await(ctx context.Context) (checkKind, bool) {
	var hungUp <-chan struct{}
	var timer *time.Timer
	for {
		if ctx.Err() != nil {
			return 0, false
		}
		now := time.Now()
		at, kind := w.next(now)
		if !at.After(now) {
			return kind, true
		}
		if timer == nil {
			var stop func()
			hungUp, stop = w.prober.watch()
			defer stop()
			timer = time.NewTimer(at.Sub(now))
			defer timer.Stop()
		} else {
			timer.Reset(at.Sub(now))
		}
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-w.wake:
		case <-hungUp:
			hungUp = nil
			if now := time.Now(); now.Sub(w.hungUp) >= hangUpRest {
				w.hungUp = now
				return onHangUp, true
			}
		}
	}
}

// next returns when the next check is due, and its kind. Checks of the schedule
// start a period after the previous one of them started; if a check overran, the
// next one starts at once, and missed periods do not accumulate.
func (w *watcher) next(now time.Time) (time.Time, checkKind) {
	v := w.m.table.view()
	if w.wanted.Load() && v.hosts[w.i].responsive() {
		return now, onDemand
	}
	due := w.due(v)
	at, kind := due, onSchedule
	if every := w.extraPeriod(v); every > 0 {
		if extra := w.started.time().Add(every); extra.Before(due) {
			at, kind = extra, onDemand
		}
	}
	return w.afterMaster(v, at, kind), kind
}

// due returns when the next check of the schedule is.
func (w *watcher) due(v *view) time.Time { return w.slot.time().Add(w.period(v)) }

// patience returns how long a replica's check may be put off for the master's: for
// longer than that took last, if it is far away.
func (m *monitor) patience(v *view) time.Duration {
	p := min(m.cfg.sleep/8, 50*time.Millisecond)
	if v.master >= 0 {
		p = max(p, 2*time.Duration(m.watchers[v.master].took.Load()))
	}
	return min(p, m.cfg.sleep/2)
}

// afterMaster returns when to start a check that is due at the given time. That
// of a replica comes after the master's, if the schedule has both at about the
// same time, or someone waits for a replica with a limit on lag_ms: its time lag
// depends on both, and is then hardly more than the time between them. It waits
// for little more than a check that answers takes.
func (w *watcher) afterMaster(v *view, at time.Time, kind checkKind) time.Time {
	if !v.masterResponsive() || w.i == v.master || !v.hosts[w.i].liveReplica() || !v.hosts[w.i].responsive() {
		return at
	}
	master, patience := w.m.watchers[v.master], w.m.patience(v)
	if kind == onSchedule {
		due := master.slot.time().Add(w.m.cfg.sleep)
		if master.done.time().Before(at.Add(-patience)) && !due.After(at.Add(patience)) {
			return at.Add(patience)
		}
	} else if w.m.wantMaster.Load() > 0 {
		since := later(w.m.wantMasterSince.time(), w.started.time())
		if master.done.time().Before(since) {
			return later(at, since).Add(patience)
		}
	}
	return at
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// maxBackOff bounds the period of dead hosts whose failures are costly.
const (
	maxBackOff      = 8 * time.Second
	enoughDoublings = 13 // of 1 ms, the shortest period
)

// period returns the schedule's period, which doubles with each costly failure of
// a dead host while a master is selected. Without one, any host may bring it back.
func (w *watcher) period(v *view) time.Duration {
	period := w.m.cfg.sleep
	if w.costlyFails == 0 || v.master < 0 {
		return period
	}
	longest := max(maxBackOff, period)
	for range w.costlyFails {
		period = min(2*period, longest)
	}
	return period
}

// extraPeriod returns how often the host is checked beyond its schedule, 0 if it
// is not. Only hosts without failures are, so that a host which is not well is
// left to the schedule.
func (w *watcher) extraPeriod(v *view) time.Duration {
	s := &v.hosts[w.i]
	if !s.responsive() {
		return 0
	}
	var period time.Duration
	if s.standby {
		if w.m.cfg.failoverCheck > 0 && w.m.masterInDoubt(v) {
			period = w.m.cfg.failoverCheck
		}
		if w.m.wantReplica.Load() > 0 && (period == 0 || w.m.cfg.waitCheck < period) {
			period = w.m.cfg.waitCheck
		}
	} else if w.i == v.master {
		switch {
		case w.m.wantMaster.Load() > 0:
			period = w.m.cfg.waitCheck
		case w.m.wantReplica.Load() > 0:
			period = max(w.m.cfg.waitCheck, waitMasterCheck)
		}
	}
	return period
}

// waitMasterCheck is how often the master is checked while someone waits for a
// replica but not for its time lag: often enough that this lag, which grows with
// the time between the checks of both, does not suffer for all others.
const waitMasterCheck = 100 * time.Millisecond

// check makes one check and records its outcome. One outside the schedule that
// is still under way when the schedule's next is due takes that one's place:
// then it has until that one's deadline, and counts.
func (w *watcher) check(ctx context.Context, kind checkKind) {
	m, v := w.m, w.m.table.view()
	start := time.Now()
	timeout := m.cfg.queryTimeout
	due := w.due(v)
	if kind != onSchedule && due.Before(start.Add(timeout)) {
		timeout += due.Sub(start)
	}
	w.wanted.Store(false)
	w.started.set(start)
	w.busy.Store(true)
	if w.i == v.master && m.cfg.failoverCheck > 0 {
		// Once the check has been unanswered that long, the replicas are looked at.
		doubt := time.AfterFunc(m.cfg.failoverCheck, m.wakeAll)
		defer doubt.Stop()
	}
	o, err := w.prober.check(ctx, timeout)
	w.busy.Store(false)
	w.took.Store(int64(time.Since(start)))
	w.done.set(start)
	if ctx.Err() != nil {
		return // we are stopping; a failure now is ours, not the host's
	}
	switch {
	case kind == onSchedule && start.Sub(due) > 2*m.patience(v):
		w.slot.set(start) // the one before overran
	case kind == onSchedule || !due.After(time.Now()):
		w.slot.set(due)
		kind = onSchedule
	}
	w.record(o, err, kind)
}

// record puts the outcome of a check into the table and the log.
func (w *watcher) record(o observation, err error, kind checkKind) {
	m := w.m
	var old, next *view
	switch {
	case err == nil:
		old, next = m.table.observe(w.i, o)
	case kind == onSchedule:
		old, next = m.table.fail(w.i)
		if mayHaveRestarted(err) {
			_, next = m.table.suspectHost(w.i)
		}
	case kind == onHangUp:
		old, next = m.table.suspectHost(w.i)
	default:
		old = m.table.view()
		next = old
	}
	w.noteCost(&next.hosts[w.i], err, kind)
	w.report.outcome(m, w.i, o, err, kind)
	m.logChanges(old, next)
	if i, ok := m.table.ahead(w.i, m.cfg.sleep); ok {
		// Replicas share a check that has begun since they were seen.
		if master := m.watchers[i]; !master.busy.Load() || master.started.time().Before(o.end) {
			master.wanted.Store(true)
			master.wakeUp()
		}
	}
	if w.i == next.master || old.masterResponsive() != next.masterResponsive() || old.master != next.master {
		m.wakeAll()
	}
	w.align(next, kind)
}

// align moves the schedule of a replica to that of the master, by making one
// period shorter, when they have come apart: see afterMaster.
func (w *watcher) align(v *view, kind checkKind) {
	if kind != onSchedule || !v.masterResponsive() || w.i == v.master || !v.hosts[w.i].responsive() {
		return
	}
	apart := w.slot.time().Sub(w.m.watchers[v.master].slot.time()) % w.m.cfg.sleep
	if apart < 0 {
		apart += w.m.cfg.sleep
	}
	if p := w.m.patience(v); apart > p && apart < w.m.cfg.sleep-p {
		w.slot.set(w.slot.time().Add(-apart))
	}
}

// noteCost counts the costly failures of a dead host.
func (w *watcher) noteCost(s *hostState, err error, kind checkKind) {
	if kind != onSchedule && err != nil {
		return
	}
	if e, ok := err.(*checkError); ok && e.costly && !s.alive {
		w.costlyFails = min(w.costlyFails+1, enoughDoublings)
	} else {
		w.costlyFails = 0
	}
}
