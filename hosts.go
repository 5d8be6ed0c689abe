package main

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// observation is what one successful check saw of a server. Times of ours carry
// the monotonic clock; positions that the server did not tell are 0.
type observation struct {
	start, end      time.Time // of the query, on our clock
	clock           time.Time // the server's, within start and end
	postmasterStart int64     // microseconds since 1970; with it a server process is recognised
	systemID        int64     // of the cluster; 0 unknown
	standby         bool      // in recovery
	timeline        timeline  // of the WAL being written or replayed; 0 unknown

	// On a master.
	write, insert lsn // pg_current_wal_lsn, pg_current_wal_insert_lsn

	// On a replica.
	replay, receive lsn       // pg_last_wal_replay_lsn, pg_last_wal_receive_lsn
	receiving       bool      // a WAL receiver runs
	latestEnd       lsn       // the upstream's WAL end, as last reported to the receiver
	lastReplay      time.Time // end of the last replayed transaction, by the master's clock; zero if none
}

// position returns the WAL position that answers show for the host.
func (o observation) position() lsn {
	if o.standby {
		return o.replay
	}
	return o.write
}

// sameServer reports whether o and p are of one run of one server.
func (o observation) sameServer(p observation) bool {
	return o.postmasterStart == p.postmasterStart && !o.otherCluster(p)
}

// otherCluster reports whether o and p are known to be of different clusters.
func (o observation) otherCluster(p observation) bool {
	return o.systemID != 0 && p.systemID != 0 && o.systemID != p.systemID
}

// hostState is what we believe about one host.
type hostState struct {
	observation      // of the last successful check; kept while the host is dead
	checked     bool // the first check is over
	alive       bool
	fails       int  // consecutive failed checks of the schedule
	suspect     bool // it hung up or takes no connection, so that it may have restarted
	lagMS       lag  // 0 on a master
	lagBytes    lag  // 0 on a master
	diverged    bool // proven to be on another WAL history than the master
	ownCommit   bool // lastReplay is proven to be by the master's clock, not an earlier master's
}

// possiblyDead reports whether the host failed to answer since it last did.
func (s *hostState) possiblyDead() bool { return !s.alive || s.fails > 0 || s.suspect }

// responsive reports whether the host is alive and answered its last check.
func (s *hostState) responsive() bool { return !s.possiblyDead() }

func (s *hostState) liveMaster() bool  { return s.alive && !s.standby }
func (s *hostState) liveReplica() bool { return s.alive && s.standby }

// failed returns the state after a failed check of the schedule.
func (s hostState) failed(maxFails int) hostState {
	s.checked = true
	s.fails++
	s.alive = s.alive && s.fails < maxFails
	return s
}

// answered returns the state after a check that saw o.
func (s hostState) answered(o observation) hostState {
	next := hostState{observation: o, checked: true, alive: true}
	if s.sameServer(o) {
		// A replica's timeline only grows while its server runs, and is hidden
		// while the upstream is down: pg_stat_wal_receiver has no row then.
		if o.standby {
			next.timeline = max(o.timeline, s.timeline)
		}
		next.diverged = s.diverged && o.standby
	}
	return next
}

// tableConfig is what the conclusions of a table depend on besides observations.
type tableConfig struct {
	hosts             []hostConfig
	currentDC         string // "" when DC is not used
	currentGeo        string // "" when geo is not used
	maxFails          int
	masterByTimeline  bool
	syncMS, syncBytes uint64
}

// table holds the state of every host and publishes it as a view. Each host has
// one goroutine that writes its state; readers take the view.
type table struct {
	tableConfig
	current atomic.Pointer[view]
	waiters waiters

	mu      sync.Mutex // guards the following
	states  []hostState
	master  int           // index of the selected master, -1 while there is none
	ref     observation   // last one of the selected master, or of the one selected last
	refHost int           // its index, -1 if there never was a master
	history masterHistory // of ref's server and timeline
	since   lsn           // how far ref's server had inserted when it was selected
	earlier observation   // of the masters before it, the one whose clock is furthest ahead; start is zero if none
	floor   timeline      // in timeline mode: the highest timeline selected so far
}

func newTable(c tableConfig) *table {
	t := &table{tableConfig: c, states: make([]hostState, len(c.hosts)), master: -1, refHost: -1}
	t.current.Store(t.newView())
	return t
}

// view returns the latest published view, which never changes.
func (t *table) view() *view { return t.current.Load() }

// observe records a successful check of host i and returns the views before and
// after it.
func (t *table) observe(i int, o observation) (old, next *view) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := &t.states[i]
	is := was.answered(o)
	is.ownCommit = t.ownCommit(was, &o)
	t.states[i] = is
	t.reselect()
	if i == t.master {
		t.masterSeen()
	}
	t.measure(&t.states[i])
	return t.publish()
}

// fail records a failed check of the schedule of host i, suspectFailed one made
// because the host had hung up.
func (t *table) fail(i int) (old, next *view) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.states[i] = t.states[i].failed(t.maxFails)
	t.reselect()
	return t.publish()
}

// suspectHost records that host i hung up and could not be reached at once, or
// takes no connection. It does not count towards maxFails: only the schedule
// declares a host dead.
func (t *table) suspectHost(i int) (old, next *view) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.states[i].suspect = true
	t.reselect()
	return t.publish()
}

// reselect chooses the master anew. The caller holds mu.
func (t *table) reselect() {
	t.master = pickMaster(t.states, t.masterByTimeline, t.floor, t.ref)
	if t.master < 0 {
		return
	}
	m := &t.states[t.master]
	t.floor = m.timeline // which pickMaster lets only rise, within a cluster
	if t.master != t.refHost || !t.ref.sameServer(m.observation) || t.ref.timeline != m.timeline {
		// Positions of another server or timeline say nothing about this one, but
		// replicas may still show the last transaction of an earlier master.
		switch {
		case t.refHost < 0:
		case t.ref.otherCluster(m.observation):
			t.earlier = observation{}
		case t.earlier.start.IsZero() || t.ref.clock.Sub(t.earlier.clock) > t.ref.start.Sub(t.earlier.start):
			t.earlier = t.ref
		}
		t.history.reset()
		for j := range t.states {
			t.states[j].diverged, t.states[j].ownCommit = false, false
		}
		t.refHost, t.ref, t.since = t.master, m.observation, m.insert.pageStart()
		t.masterSeen()
		for j := range t.states {
			t.measure(&t.states[j])
		}
	}
}

// masterSeen draws the conclusions from a new observation of the selected
// master. The caller holds mu.
func (t *table) masterSeen() {
	m := t.states[t.master].observation
	t.ref = m
	t.history.add(m.insert, m.start)
	for j := range t.states {
		s := &t.states[j]
		if !s.standby || s.otherCluster(m) {
			continue
		}
		if m.start.After(s.end) && s.replay.pageStart() > m.insert.pageStart() {
			// It had replayed WAL that the master had not inserted later still.
			s.diverged = true
		}
		if at, ok := t.replayedBy(s); ok {
			s.lagMS = least(s.lagMS, lagOf(s.end.Sub(at)))
		}
	}
}

// replayedBy returns the latest moment of which replica s shows everything that
// was committed by then, false if the master's history cannot tell. The caller
// holds mu.
func (t *table) replayedBy(s *hostState) (time.Time, bool) {
	if t.master < 0 || !t.states[t.master].responsive() ||
		s.diverged || s.otherCluster(t.ref) || s.timeline.differs(t.ref.timeline) {
		return time.Time{}, false
	}
	return t.history.replayed(s.replay)
}

// measure computes the lags of s as of its check. The caller holds mu.
func (t *table) measure(s *hostState) {
	if !s.standby {
		s.lagMS, s.lagBytes = lag{0, true}, lag{0, true}
		return
	}
	s.lagMS = lag{}
	write := t.ref.write
	if s.otherCluster(t.ref) {
		write = 0
	}
	if age, ok := t.commitAge(s); ok {
		s.lagMS = lagOf(age)
	}
	if at, ok := t.replayedBy(s); ok {
		s.lagMS = least(s.lagMS, lagOf(s.end.Sub(at)))
	}
	s.lagBytes = byteLag(s.observation, write)
}

// ownCommit reports whether the last transaction of a replica seen as o is proven
// to be one of ref's server: when the replica was seen as was, it had replayed WAL
// of that server, and has replayed a transaction since. The caller holds mu.
func (t *table) ownCommit(was *hostState, o *observation) bool {
	if !o.standby || !was.standby || !was.sameServer(*o) {
		return false
	}
	return was.ownCommit ||
		t.refHost >= 0 && was.replay.pageStart() >= t.since && !o.lastReplay.Equal(was.lastReplay)
}

// commitAge returns the age of the last transaction that replica s has replayed.
// Unless it is known to be of ref's server, it may be of a master before it, whose
// clock told another time. It is not known if the transaction would be yet to come
// by every clock that we know. The caller holds mu.
func (t *table) commitAge(s *hostState) (age time.Duration, known bool) {
	if t.refHost < 0 || s.otherCluster(t.ref) {
		age, known = commitAge(s.observation, nil)
	} else {
		age, known = commitAge(s.observation, &t.ref)
		if known && !s.ownCommit && !t.earlier.start.IsZero() {
			other, _ := commitAge(s.observation, &t.earlier)
			age = max(age, other)
		}
	}
	return age, known && age >= 0
}

// ahead reports whether replica i has replayed WAL beyond the newest known
// position of the selected master, and its commit age exceeds period, so that
// only a new check of that master, whose index is returned, tells how fresh it
// is. A checkpoint on an idle master does this.
func (t *table) ahead(i int, period time.Duration) (master int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &t.states[i]
	if t.master < 0 || !t.states[t.master].responsive() || !s.liveReplica() || s.diverged ||
		s.otherCluster(t.ref) || s.timeline.differs(t.ref.timeline) ||
		s.replay.pageStart() <= t.ref.insert.pageStart() {
		return 0, false
	}
	age, known := t.commitAge(s)
	return t.master, !known || age > period
}

// publish makes the states visible to readers and waiters. The caller holds mu.
func (t *table) publish() (old, next *view) {
	old, next = t.current.Load(), t.newView()
	t.current.Store(next)
	t.waiters.show(next)
	close(old.changed)
	return old, next
}

// newView concludes a view from the states. The caller holds mu, or is the only
// one to know t.
func (t *table) newView() *view {
	v := &view{
		tableConfig: &t.tableConfig,
		hosts:       slices.Clone(t.states),
		master:      t.master,
		ref:         t.ref,
		timeline:    t.ref.timeline,
		ready:       true,
		changed:     make(chan struct{}),
	}
	for j := range v.hosts {
		s := &v.hosts[j]
		v.ready = v.ready && s.checked
		if t.master >= 0 && s.liveMaster() && !s.sameServer(t.ref) && !s.otherCluster(t.ref) {
			v.rivals = v.rivals || s.responsive()
			v.split = v.split || s.timeline == t.ref.timeline
		}
		if t.refHost < 0 && s.liveReplica() {
			v.timeline = max(v.timeline, s.timeline)
		}
	}
	return v
}
