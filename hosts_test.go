package main

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// The builders of states and observations, which read as words:
// dead(replica(at("0/3000000"), on(2))). What is not said is as for a healthy host
// of cluster 7 that is at 0/3000000 on timeline 1, without lag, and was checked at
// second 0 by clocks that agree.

// trait changes a state that is being built.
type trait func(*hostState)

func master(traits ...trait) hostState {
	s := hostState{checked: true, alive: true, lagMS: lag{0, true}, lagBytes: lag{0, true}}
	s.systemID, s.timeline = 7, 1
	return s.with(append([]trait{seen(0), at("0/3000000")}, traits...))
}

func replica(traits ...trait) hostState {
	s := master()
	s.standby, s.receiving = true, true
	s.write, s.insert = 0, 0
	return s.with(append([]trait{at("0/3000000")}, traits...))
}

// possiblyDead and dead are a host after a failure, and after the last one.
func possiblyDead(s hostState) hostState { s.fails = 1; return s }
func dead(s hostState) hostState         { s.alive, s.fails = false, 3; return s }

func (s hostState) with(traits []trait) hostState {
	for _, t := range traits {
		t(&s)
	}
	return s
}

// testBase is moment 0 on our clock, testClock on the servers'.
var (
	testBase  = time.Now()
	testClock = time.Date(2026, 8, 21, 12, 0, 0, 0, time.UTC)
)

func millis(n int) time.Duration { return time.Duration(n) * time.Millisecond }

// seen is a check at a moment in milliseconds, took its duration. The server is
// asked, and its clock read, at the beginning.
func seen(ms int) trait {
	return func(s *hostState) {
		s.start = testBase.Add(millis(ms))
		s.end, s.clock = s.start, testClock.Add(millis(ms))
	}
}

func took(ms int) trait { return func(s *hostState) { s.end = s.start.Add(millis(ms)) } }

// off is a clock that is ahead by milliseconds. It comes after seen.
func off(ms int) trait { return func(s *hostState) { s.clock = s.clock.Add(millis(ms)) } }

// committed is the time of the last replayed transaction in milliseconds.
func committed(ms int) trait {
	return func(s *hostState) { s.lastReplay = testClock.Add(millis(ms)) }
}

// at is the position of a host, and all that it knows of: nothing is on its way.
func at(pos string) trait {
	return func(s *hostState) {
		if s.standby {
			s.replay, s.receive = mustLSN(pos), mustLSN(pos)
		} else {
			s.write, s.insert = mustLSN(pos), mustLSN(pos)
		}
	}
}

// inserted is how far a master has inserted WAL that it has not written yet.
func inserted(pos string) trait { return func(s *hostState) { s.insert = mustLSN(pos) } }

func on(t timeline) trait     { return func(s *hostState) { s.timeline = t } }
func process(n int64) trait   { return func(s *hostState) { s.postmasterStart = n } }
func cluster(id int64) trait  { return func(s *hostState) { s.systemID = id } }
func lagMS(n uint64) trait    { return func(s *hostState) { s.lagMS = lag{n, true} } }
func lagBytes(n uint64) trait { return func(s *hostState) { s.lagBytes = lag{n, true} } }
func unmeasured(s *hostState) { s.lagMS, s.lagBytes = lag{}, lag{} }
func diverged(s *hostState)   { s.diverged = true }
func suspected(s *hostState)  { s.suspect = true }
func idle(s *hostState)       { s.receiving = false } // no WAL receiver
func bare(s *hostState)       { s.systemID, s.timeline, s.receiving = 0, 0, false }

// show words a state for people: times since moment 0.
func show(s *hostState) string {
	o := &s.observation
	b := fmt.Sprintf("run %d timeline %d seen %v to %v, clock %v", o.postmasterStart, o.timeline,
		o.start.Sub(testBase), o.end.Sub(testBase), o.clock.Sub(testClock))
	if !o.standby {
		return b + fmt.Sprintf(", write %v insert %v", o.write, o.insert)
	}
	b += fmt.Sprintf(", replay %v receive %v", o.replay, o.receive)
	if !o.lastReplay.IsZero() {
		b += fmt.Sprintf(", last commit %v", o.lastReplay.Sub(testClock))
	}
	return b + fmt.Sprintf("; lag %v ms %v bytes, diverged %v", s.lagMS, s.lagBytes, s.diverged)
}

// number makes each host a server of its own unless a trait has said otherwise.
func number(i int, s hostState) hostState {
	if s.postmasterStart == 0 {
		s.postmasterStart = int64(i + 1)
	}
	return s
}

// viewWith returns the view of a table with these hosts, of which it selects the
// master but concludes nothing else.
func viewWith(c tableConfig, hosts ...hostState) *view {
	if c.hosts == nil {
		c.hosts = make([]hostConfig, len(hosts))
	}
	t := newTable(c)
	for i, s := range hosts {
		t.states[i] = number(i, s)
	}
	t.master = pickMaster(t.states, c.masterByTimeline, 0, t.ref)
	if t.master >= 0 {
		t.refHost, t.ref = t.master, t.states[t.master].observation
	}
	return t.newView()
}

func viewOf(hosts ...hostState) *view { return viewWith(tableConfig{}, hosts...) }

// step is something that happens to a table.
type step func(*table)

// sees is a successful check of host i, fails and hangsUp are others.
func sees(i int, s hostState) step {
	return func(t *table) { t.observe(i, number(i, s).observation) }
}
func fails(i int) step   { return func(t *table) { t.fail(i) } }
func hangsUp(i int) step { return func(t *table) { t.suspectHost(i) } }

// tableOf returns a table of hosts, which are dead after 3 failures, after steps.
func tableOf(hosts int, steps ...step) *table {
	return tableWith(tableConfig{hosts: make([]hostConfig, hosts), maxFails: 3}, steps...)
}

func tableWith(c tableConfig, steps ...step) *table {
	t := newTable(c)
	for _, s := range steps {
		s(t)
	}
	return t
}

func TestHostStates(t *testing.T) {
	for _, tt := range []struct {
		maxFails            int
		steps               string // A answered, F failed, H hung up and could not be reached
		alive, possiblyDead bool
	}{
		{3, "", false, true},
		{3, "F", false, true},
		{3, "FFFF", false, true},
		{3, "A", true, false},
		{3, "FFFFA", true, false},
		{3, "AF", true, true},
		{3, "AFF", true, true},
		{3, "AFFF", false, true},
		{3, "AFFFF", false, true},
		{3, "AFFFA", true, false},
		{3, "AFFA", true, false},
		{3, "AFFAFF", true, true},
		{3, "AFFAFFF", false, true},
		{1, "A", true, false},
		{1, "AF", false, true},
		{1, "AFA", true, false},
		{2, "AF", true, true},
		{2, "AFF", false, true},
		{3, "AH", true, true},
		{1, "AHHHH", true, true},
		{3, "AHA", true, false},
		{3, "AHFF", true, true},
		{3, "AHFFF", false, true},
		{3, "AFFH", true, true},
		{3, "FH", false, true},
	} {
		for _, host := range []hostState{master(), replica()} {
			tb := tableWith(tableConfig{hosts: make([]hostConfig, 1), maxFails: tt.maxFails})
			for _, c := range tt.steps {
				map[rune]step{'A': sees(0, host), 'F': fails(0), 'H': hangsUp(0)}[c](tb)
			}
			s := &tb.view().hosts[0]
			if s.alive != tt.alive || s.possiblyDead() != tt.possiblyDead || s.responsive() == tt.possiblyDead {
				t.Errorf("%s after %q, dead after %d: alive %v, possibly dead %v; want %v, %v",
					roleOf(host.standby), tt.steps, tt.maxFails, s.alive, s.possiblyDead(), tt.alive, tt.possiblyDead)
			}
			if got, want := s.liveMaster(), tt.alive && !host.standby; got != want {
				t.Errorf("%s after %q, dead after %d: live master %v; want %v", roleOf(host.standby), tt.steps, tt.maxFails, got, want)
			}
			if got, want := s.liveReplica(), tt.alive && host.standby; got != want {
				t.Errorf("%s after %q, dead after %d: live replica %v; want %v", roleOf(host.standby), tt.steps, tt.maxFails, got, want)
			}
			if got, want := s.checked, strings.ContainsAny(tt.steps, "AF"); got != want || tb.view().ready != want {
				t.Errorf("%s after %q: checked %v, ready %v; want %v", roleOf(host.standby), tt.steps, got, tb.view().ready, want)
			}
		}
	}
}

func TestReady(t *testing.T) {
	for _, tt := range []struct {
		steps []step
		want  bool
	}{
		{nil, false},
		{[]step{sees(0, master()), fails(1)}, false},
		{[]step{sees(0, master()), fails(1), sees(2, replica())}, true},
		{[]step{fails(0), fails(1), fails(2)}, true},
		{[]step{fails(0), fails(0), fails(0)}, false},
	} {
		if got := tableOf(3, tt.steps...).view().ready; got != tt.want {
			t.Errorf("ready after %d steps = %v; want %v", len(tt.steps), got, tt.want)
		}
	}
}

// A failed check leaves alone what the last successful one saw.
func TestFailureKeepsWhatWasSeen(t *testing.T) {
	tb := tableOf(2, sees(0, master(at("0/3000100"))), sees(1, replica(at("0/3000060"), seen(500), committed(200))))
	for range 4 {
		s := tb.view().hosts[1]
		if s.lagMS != (lag{300, true}) || s.lagBytes != (lag{0xA0, true}) || s.position() != mustLSN("0/3000060") || !s.standby {
			t.Errorf("after %d failures: lag_ms %v, lag_bytes %v, lsn %v, standby %v; want 300, 160, 0/3000060, true",
				s.fails, s.lagMS, s.lagBytes, s.position(), s.standby)
		}
		tb.fail(1)
	}
}

func TestPosition(t *testing.T) {
	m, r := master(at("0/3000060"), inserted("0/3000100")), replica(at("0/3000060"))
	r.receive = mustLSN("0/3000100")
	for _, s := range []hostState{m, r} {
		if got := s.position(); got != mustLSN("0/3000060") {
			t.Errorf("position of the %s = %v; want 0/3000060", roleOf(s.standby), got)
		}
	}
}

func TestRoleChange(t *testing.T) {
	tb := tableOf(2, sees(0, master()), sees(1, replica(at("0/2000000"), seen(500), committed(200))))
	want := func(what string, selected int, standby bool, ms, bytes lag) {
		t.Helper()
		v := tb.view()
		s := v.hosts[1]
		if v.master != selected || s.standby != standby || s.lagMS != ms || s.lagBytes != bytes {
			t.Errorf("%s: master %d, standby %v, lag_ms %v, lag_bytes %v; want %d, %v, %v, %v",
				what, v.master, s.standby, s.lagMS, s.lagBytes, selected, standby, ms, bytes)
		}
	}
	want("a replica", 0, true, lag{300, true}, lag{0x1000000, true})
	sees(0, replica(process(9)))(tb)
	want("its master has become a replica", -1, true, lag{300, true}, lag{0x1000000, true})
	sees(1, master(on(2), seen(600)))(tb)
	want("promoted", 1, false, lag{0, true}, lag{0, true})
	sees(1, replica(on(2), process(10), seen(700), idle))(tb)
	want("a replica again", -1, true, lag{}, lag{0, true})
}

// A timeline is remembered as long as the server runs, as it is hidden while the
// upstream is down.
func TestTimelineMemory(t *testing.T) {
	for _, tt := range []struct {
		name  string
		steps []step
		want  timeline
	}{
		{"hidden", []step{sees(0, replica(on(2))), sees(0, replica(on(0)))}, 2},
		{"only the control file's", []step{sees(0, replica(on(2))), sees(0, replica(on(1)))}, 2},
		{"the next one", []step{sees(0, replica(on(2))), sees(0, replica(on(3)))}, 3},
		{"seen late", []step{sees(0, replica(on(0))), sees(0, replica(on(1)))}, 1},
		{"hidden twice, with failures", []step{
			sees(0, replica(on(2))), fails(0), fails(0), fails(0), sees(0, replica(on(0))), sees(0, replica(on(0))),
		}, 2},
		{"never seen", []step{sees(0, replica(on(0)))}, 0},
		{"another run of the server", []step{sees(0, replica(on(2), process(1))), sees(0, replica(on(0), process(2)))}, 0},
		{"rewound", []step{sees(0, replica(on(2), process(1))), sees(0, replica(on(1), process(2)))}, 1},
		{"another cluster", []step{sees(0, replica(on(2))), sees(0, replica(on(0), cluster(8)))}, 0},
		{"the identifier is hidden too", []step{sees(0, replica(on(2))), sees(0, replica(on(0), cluster(0)))}, 2},
		{"a master tells its own", []step{sees(0, replica(on(2))), sees(0, master(on(3)))}, 3},
	} {
		if got := tableOf(1, tt.steps...).view().hosts[0].timeline; got != tt.want {
			t.Errorf("%s: timeline %d; want %d", tt.name, got, tt.want)
		}
	}
}

// How lag_ms of host 1 comes about. Commits long ago have an age that only the
// master's history can bound.
func TestLagMS(t *testing.T) {
	const longAgo = -3_600_000
	old := committed(longAgo)
	for _, tt := range []struct {
		name  string
		steps []step
		want  lag
	}{
		{"age of the last commit", []step{
			sees(0, master(at("0/3000100"))),
			sees(1, replica(seen(700), committed(250))),
		}, lag{450, true}},
		{"nothing was replayed since the start", []step{
			sees(0, master(at("0/3000100"))),
			sees(1, replica(seen(700))),
		}, lag{}},
		{"idle: since the master's check", []step{
			sees(0, master(seen(0), took(5))),
			sees(1, replica(seen(700), took(20), old)),
		}, lag{720, true}},
		{"the smaller one counts", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), committed(690))),
		}, lag{10, true}},
		{"nothing replayed, but nothing to replay", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700))),
		}, lag{700, true}},
		{"whole milliseconds, rounded down", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), func(s *hostState) { s.end = s.end.Add(999 * time.Microsecond) }, old)),
		}, lag{700, true}},
		{"idle for a while", []step{
			sees(0, master(seen(0))), sees(0, master(seen(1000))), sees(0, master(seen(2000))),
			sees(1, replica(seen(2400), old)),
		}, lag{400, true}},
		{"the first write after an idle hour", []step{
			sees(0, master(seen(0))), sees(0, master(seen(1000))), sees(0, master(seen(2000), at("0/3000100"))),
			sees(1, replica(seen(2100), old)),
		}, lag{1100, true}},
		{"between two positions", []step{
			sees(0, master(seen(0))), sees(0, master(seen(1000), at("0/3000100"))),
			sees(1, replica(seen(1400), at("0/3000080"), old)),
		}, lag{1400, true}},
		{"behind all positions", []step{
			sees(0, master(seen(0), at("0/3000100"))),
			sees(1, replica(seen(700), old)),
		}, lag{3_600_700, true}},
		{"beyond the newest position", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), at("0/3000100"), old)),
		}, lag{700, true}},
		{"beyond it, and the master is checked at once", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), at("0/3000100"), old)),
			sees(0, master(seen(702), at("0/3000100"))),
		}, lag{0, true}},
		{"at the next page's header", []step{
			sees(0, master(seen(0), at("0/5000000"), inserted("0/5000028"))),
			sees(1, replica(seen(700), at("0/5000000"), old)),
		}, lag{700, true}},
		{"WAL not written yet is not replayed", []step{
			sees(0, master(seen(0), inserted("0/3000100"))),
			sees(1, replica(seen(700), old)),
		}, lag{3_600_700, true}},
		{"a later check saw the same position", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), old)),
			sees(0, master(seen(400))), // it took longer
		}, lag{300, true}},
		{"a later check started after the replica's", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), took(20), old)),
			sees(0, master(seen(1000))),
		}, lag{0, true}},
		{"a later check saw more", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), old)),
			sees(0, master(seen(1000), at("0/3000100"))),
		}, lag{700, true}},
		{"the replica's own next check", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), old)),
			sees(0, master(seen(1000))),
			sees(1, replica(seen(1700), old)),
		}, lag{700, true}},
		{"the master's check failed", []step{
			sees(0, master(seen(0))), fails(0),
			sees(1, replica(seen(700), old)),
		}, lag{3_600_700, true}},
		{"the master hung up", []step{
			sees(0, master(seen(0))), hangsUp(0),
			sees(1, replica(seen(700), old)),
		}, lag{3_600_700, true}},
		{"the master answers again", []step{
			sees(0, master(seen(0))), fails(0),
			sees(1, replica(seen(700), old)),
			sees(0, master(seen(1000))),
		}, lag{0, true}},
		{"no master", []step{
			sees(0, master(seen(0))), fails(0), fails(0), fails(0),
			sees(1, replica(seen(700), committed(250))),
		}, lag{450, true}},
		{"never a master", []step{
			fails(0),
			sees(1, replica(seen(700), committed(250))),
		}, lag{450, true}},
		{"another timeline", []step{
			sees(0, master(seen(0), on(2))),
			sees(1, replica(seen(700), on(1), old)),
		}, lag{3_600_700, true}},
		{"an unknown timeline", []step{
			sees(0, master(seen(0), on(2))),
			sees(1, replica(seen(700), bare, old)),
		}, lag{700, true}},
		{"another cluster", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), cluster(8), old)),
			sees(0, master(seen(1000))),
		}, lag{3_600_700, true}},
		{"the master was restarted", []step{
			sees(0, master(seen(0), process(1))), sees(0, master(seen(1000), process(9), at("0/3000100"))),
			sees(1, replica(seen(1400), process(2), old)),
		}, lag{3_601_400, true}},
		{"another master", []step{
			sees(0, master(seen(0))), fails(0), fails(0), sees(2, master(seen(1000), on(2), at("0/3000100"))),
			sees(1, replica(seen(1400), on(2), old)),
		}, lag{3_601_400, true}},
		{"the same master on another timeline", []step{
			sees(0, master(seen(0))), sees(0, master(seen(1000), on(2), at("0/3000100"))),
			sees(1, replica(seen(1400), on(2), old)),
		}, lag{3_601_400, true}},
		{"the same master after a pause", []step{
			sees(0, master(seen(0))), fails(0), fails(0), fails(0), sees(0, master(seen(9000), at("0/3000100"))),
			sees(1, replica(seen(9400), old)),
		}, lag{9400, true}},
		{"the master's WAL went back", []step{
			sees(0, master(seen(0), at("0/3000100"))), sees(0, master(seen(1000))), sees(0, master(seen(2000), at("0/3000200"))),
			sees(1, replica(seen(2400), at("0/3000180"), old)),
		}, lag{1400, true}},
		{"proven to be on another history", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(500), at("0/3000100"))),
			sees(0, master(seen(1000))),
			sees(1, replica(seen(1400), at("0/3000100"), old)),
		}, lag{3_601_400, true}},

		// The replica's clock is behind the master's by 30 s: the age would be
		// negative. The round trip of both checks is what the correction may be off.
		{"a clock behind", []step{
			sees(0, master(seen(0), took(4), at("0/3000100"))),
			sees(1, replica(seen(700), took(6), off(-30_000), committed(250))),
		}, lag{456, true}},
		{"a clock ahead", []step{
			sees(0, master(seen(0), at("0/3000100"))),
			sees(1, replica(seen(700), off(30_000), committed(250))),
		}, lag{30_450, true}},
		{"the master's clock ahead", []step{
			sees(0, master(seen(0), off(30_000), at("0/3000100"))),
			sees(1, replica(seen(700), committed(30_250))),
		}, lag{450, true}},
		{"a clock behind, idle", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), took(6), off(-30_000), old)),
		}, lag{706, true}},
		{"a clock behind the one of a master that is gone", []step{
			sees(0, master(seen(0), at("0/3000100"))), fails(0), fails(0), fails(0),
			sees(1, replica(seen(700), off(-30_000), committed(250))),
		}, lag{450, true}},
		{"a clock behind, with another cluster's master", []step{
			sees(0, master(seen(0), at("0/3000100"))),
			sees(1, replica(seen(700), off(-30_000), cluster(8), committed(250))),
		}, lag{}}, // by no clock that counts
		{"a commit of the future, by a clock that was never seen", []step{
			sees(0, master(seen(0), at("0/3000100"))),
			sees(1, replica(seen(700), committed(600_000))),
		}, lag{}},
		{"a commit of the future, and no master", []step{
			sees(1, replica(seen(700), committed(600_000))),
		}, lag{}},
		{"a commit of the future, caught up", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(700), committed(600_000))),
		}, lag{700, true}},
	} {
		if got := tableOf(3, tt.steps...).view().hosts[1].lagMS; got != tt.want {
			t.Errorf("%s: lag_ms %v; want %v", tt.name, got, tt.want)
		}
	}
}

// What was measured with one master is measured anew with the next: what the one
// says is not true of the other, and its clock may be another.
func TestLagMSOfNewMaster(t *testing.T) {
	const longAgo = -3_600_000
	for _, tt := range []struct {
		name  string
		steps []step
		want  lag
	}{
		{"a clock behind the first master's", []step{
			sees(1, replica(seen(700), off(-30_000), committed(250))),
			sees(0, master(seen(800), at("0/3000100"))),
		}, lag{450, true}},
		{"a split: the old master is idle, the new one is not", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(100), bare, committed(longAgo))),
			sees(2, master(seen(200), on(2), at("0/3000100"))),
			fails(0), fails(0), fails(0),
		}, lag{3_600_100, true}},
		{"the last commit is of the old master, whose clock is ahead", []step{
			sees(0, master(seen(0), off(30_000))), fails(0),
			sees(2, master(seen(500), on(2), at("0/3000100"))),
			sees(1, replica(seen(700), on(2), committed(30_250))),
		}, lag{450, true}},
		{"and still may be", []step{
			sees(0, master(seen(0), off(30_000))), fails(0),
			sees(2, master(seen(500), on(2), at("0/3000100"))),
			sees(1, replica(seen(700), on(2), committed(30_250))),
			sees(1, replica(seen(1700), on(2), at("0/3000180"), committed(30_650))),
		}, lag{1050, true}},
		{"as it is the same one still", []step{
			sees(0, master(seen(0), off(30_000))), fails(0),
			sees(2, master(seen(500), on(2), at("0/3000100"))),
			sees(1, replica(seen(700), on(2), committed(30_250))),
			sees(1, replica(seen(1700), on(2), at("0/3000180"), committed(30_650))),
			sees(1, replica(seen(2700), on(2), at("0/3000200"), committed(30_650))),
		}, lag{2050, true}},
		{"it must be of the new master", []step{
			sees(0, master(seen(0), off(30_000))), fails(0),
			sees(2, master(seen(500), on(2), at("0/3000100"))),
			sees(1, replica(seen(700), on(2), committed(30_250))),
			sees(1, replica(seen(1700), on(2), at("0/3000180"), committed(30_650))),
			sees(1, replica(seen(2700), on(2), at("0/3000200"), committed(2650))),
		}, lag{50, true}},
	} {
		if got := tableOf(3, tt.steps...).view().hosts[1].lagMS; got != tt.want {
			t.Errorf("%s: lag_ms %v; want %v", tt.name, got, tt.want)
		}
	}
}

func TestLagBytes(t *testing.T) {
	for _, tt := range []struct {
		name  string
		steps []step
		want  lag
	}{
		{"behind", []step{
			sees(0, master(at("0/3000100"))), sees(1, replica()),
		}, lag{0x100, true}},
		{"the write position counts, not the insert position", []step{
			sees(0, master(at("0/3000100"), inserted("0/3000200"))), sees(1, replica()),
		}, lag{0x100, true}},
		{"as of the check", []step{
			sees(0, master()), sees(1, replica()), sees(0, master(seen(1000), at("0/3000100"))),
		}, lag{0, true}},
		{"ahead of the master's last check", []step{
			sees(0, master()), sees(1, replica(at("0/3000100"))),
		}, lag{0, true}},
		{"a master that is dead", []step{
			sees(0, master(at("0/3000100"))), fails(0), fails(0), fails(0), sees(1, replica()),
		}, lag{0x100, true}},
		{"the one selected last", []step{
			sees(0, master(at("0/3000100"))), sees(0, replica(process(9))), sees(1, replica(idle)),
		}, lag{0x100, true}},
		{"not the other master", []step{
			sees(0, master(at("0/3000100"))), sees(2, master(at("0/4000000"))), sees(1, replica()),
		}, lag{0x100, true}},
		{"never a master, receiving", []step{
			sees(1, replica(func(s *hostState) { s.receive = mustLSN("0/3000100") })),
		}, lag{0x100, true}},
		{"never a master, not receiving", []step{
			sees(1, replica(idle, func(s *hostState) { s.receive = mustLSN("0/3000100") })),
		}, lag{}},
		{"another cluster, not receiving", []step{
			sees(0, master(at("0/3000100"))), sees(1, replica(cluster(8), idle)),
		}, lag{}},
		{"another cluster, receiving", []step{
			sees(0, master(at("0/4000000"))),
			sees(1, replica(cluster(8), func(s *hostState) { s.receive = mustLSN("0/3000100") })),
		}, lag{0x100, true}},
	} {
		v := tableOf(3, tt.steps...).view()
		if got := v.byteLag(&v.hosts[1]); got != tt.want {
			t.Errorf("%s: lag_bytes %v; want %v", tt.name, got, tt.want)
		}
	}
}

// Host 1 is a replica at 0/3000100 which the master has not inserted a second
// later.
func TestDiverged(t *testing.T) {
	stranded := []step{
		sees(0, master(seen(0))),
		sees(1, replica(seen(500), at("0/3000100"), bare)),
		sees(0, master(seen(1000))),
	}
	for _, tt := range []struct {
		name  string
		steps []step
		want  bool
	}{
		{"the master does not have its WAL", stranded, true},
		{"the master's check is not later", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(500), took(600), at("0/3000100"))),
			sees(0, master(seen(1000))),
		}, false},
		{"the master was only checked before", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(500), at("0/3000100"))),
		}, false},
		{"the master has its WAL", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(500), at("0/3000100"))),
			sees(0, master(seen(1000), at("0/3000100"))),
		}, false},
		{"the master has not written its WAL, but inserted it", []step{
			sees(0, master(seen(0))),
			sees(1, replica(seen(500), at("0/3000100"))),
			sees(0, master(seen(1000), inserted("0/3000100"))),
		}, false},
		{"the master stands behind a page header", []step{
			sees(1, replica(seen(500), at("0/5000028"))),
			sees(0, master(seen(1000), at("0/5000000"))),
		}, false},
		{"when the master is first seen", []step{
			sees(1, replica(seen(500), at("0/3000100"))),
			sees(0, master(seen(1000))),
		}, true},
		{"the master has caught up", append(stranded[:3:3],
			sees(0, master(seen(2000), at("0/3000200"))),
			sees(1, replica(seen(2500), at("0/3000200"), bare))), true},
		{"the replica fails and answers", append(stranded[:3:3],
			fails(1), fails(1), fails(1), sees(1, replica(seen(2500), at("0/3000100"), bare))), true},
		{"the master fails and answers", append(stranded[:3:3],
			fails(0), fails(0), fails(0), sees(0, master(seen(2000), at("0/3000200")))), true},
		{"the replica was restarted", append(stranded[:3:3],
			sees(1, replica(seen(2500), process(9), bare))), false},
		{"the master was restarted", append(stranded[:3:3],
			sees(0, master(seen(2000), process(9), at("0/3000200")))), false},
		{"the master was restarted, and does not have its WAL", append(stranded[:3:3],
			sees(0, master(seen(2000), process(9)))), true},
		{"another master", append(stranded[:3:3],
			fails(0), sees(2, master(seen(2000), on(2), at("0/3000200")))), false},
		{"another timeline of the master", append(stranded[:3:3],
			sees(0, master(seen(2000), on(2), at("0/3000200")))), false},
		{"the replica was promoted", append(stranded[:3:3],
			sees(1, master(seen(2000), on(2)))), false},
		{"another cluster", []step{
			sees(1, replica(seen(500), at("0/3000100"), cluster(8))),
			sees(0, master(seen(1000))),
		}, false},
		{"another master does not have its WAL", []step{
			sees(0, master(seen(0), at("0/3000100"))),
			sees(1, replica(seen(500), at("0/3000100"))),
			sees(2, master(seen(1000))),
		}, false},
	} {
		if got := tableOf(3, tt.steps...).view().hosts[1].diverged; got != tt.want {
			t.Errorf("%s: diverged %v; want %v", tt.name, got, tt.want)
		}
	}
}

func TestSelectedMaster(t *testing.T) {
	for _, tt := range []struct {
		name       string
		byTimeline bool
		steps      []step
		master     int
		ref        string // write position of the selected master, or of the one selected last
	}{
		{"none yet", false, []step{sees(1, replica())}, -1, "0/0"},
		{"one", false, []step{sees(1, master())}, 1, "0/3000000"},
		{"its newest observation", false, []step{sees(1, master()), sees(1, master(at("0/3000100")))}, 1, "0/3000100"},
		{"possibly dead", false, []step{sees(0, master()), fails(0), fails(0)}, 0, "0/3000000"},
		{"dead", false, []step{sees(0, master()), fails(0), fails(0), fails(0)}, -1, "0/3000000"},
		{"demoted", false, []step{sees(0, master()), sees(0, replica(at("0/3000100"), process(9)))}, -1, "0/3000000"},
		{"hung up", false, []step{sees(0, master()), hangsUp(0)}, 0, "0/3000000"},
		{"a responsive one is preferred", false, []step{
			sees(0, master()), sees(2, master(at("0/3000100"))), fails(0),
		}, 2, "0/3000100"},
		{"of the first host again", false, []step{
			sees(0, master()), sees(2, master(at("0/3000100"))), fails(0), sees(0, master(at("0/3000080"))),
		}, 0, "0/3000080"},
		{"the last one selected, not the last one seen", false, []step{
			sees(0, master()), sees(2, master(at("0/3000100"))), fails(2), fails(2), fails(2), fails(0), fails(0), fails(0),
		}, -1, "0/3000000"},
		{"order: a deposed primary comes back", false, []step{
			sees(2, master(on(2), at("0/3000100"))), sees(0, master(on(1))),
		}, 0, "0/3000000"},
		{"timeline: a deposed primary comes back", true, []step{
			sees(2, master(on(2), at("0/3000100"))), sees(0, master(on(1))),
		}, 2, "0/3000100"},
		{"timeline: while the new one is possibly dead", true, []step{
			sees(2, master(on(2), at("0/3000100"))), sees(0, master(on(1))), fails(2),
		}, 2, "0/3000100"},
		{"timeline: while the new one is dead", true, []step{
			sees(2, master(on(2), at("0/3000100"))), fails(2), fails(2), fails(2), sees(0, master(on(1))),
		}, -1, "0/3000100"},
		{"timeline: a promotion after it", true, []step{
			sees(2, master(on(2), at("0/3000100"))), fails(2), fails(2), fails(2), sees(0, master(on(1))), sees(1, master(on(3), at("0/3000200"))),
		}, 1, "0/3000200"},
		{"timeline: another cluster counts its own", true, []step{
			sees(2, master(on(2), at("0/3000100"))), fails(2), fails(2), fails(2), sees(0, master(on(1), cluster(8))),
		}, 0, "0/3000000"},
		{"timeline: and is left behind in its own way", true, []step{
			sees(2, master(on(5), at("0/3000100"))), fails(2), fails(2), fails(2), sees(0, master(on(2), cluster(8))),
			sees(0, replica(process(9), cluster(8))), sees(1, master(on(1), cluster(8))),
		}, -1, "0/3000000"},
	} {
		c := tableConfig{hosts: make([]hostConfig, 3), maxFails: 3, masterByTimeline: tt.byTimeline}
		v := tableWith(c, tt.steps...).view()
		if v.master != tt.master || v.ref.write != mustLSN(tt.ref) {
			t.Errorf("%s: master %d at %v; want %d at %s", tt.name, v.master, v.ref.write, tt.master, tt.ref)
		}
		if got, want := v.hadMaster(), tt.ref != "0/0"; got != want {
			t.Errorf("%s: had a master %v; want %v", tt.name, got, want)
		}
	}
}

func TestRivals(t *testing.T) {
	for _, tt := range []struct {
		name          string
		steps         []step
		rivals, split bool
	}{
		{"one master", []step{sees(0, master()), sees(1, replica())}, false, false},
		{"promoted apart", []step{sees(0, master(on(2))), sees(1, master(on(2)))}, true, true},
		{"one of them is possibly dead", []step{sees(0, master(on(2))), sees(1, master(on(2))), fails(1)}, false, true},
		{"one of them is dead", []step{
			sees(0, master(on(2))), sees(1, master(on(2))), fails(1), fails(1), fails(1),
		}, false, false},
		{"one of them becomes a replica", []step{
			sees(0, master(on(2))), sees(1, master(on(2))), sees(1, replica(process(9))),
		}, false, false},
		{"the old master is on an older timeline", []step{sees(0, master(on(2))), sees(1, master(on(1)))}, true, false},
		{"the other master is on a later timeline", []step{sees(0, master(on(1))), sees(1, master(on(2)))}, true, false},
		{"three, two of them on one timeline", []step{
			sees(0, master(on(2))), sees(1, master(on(1))), sees(2, master(on(2))),
		}, true, true},
		{"two others on one timeline", []step{
			sees(0, master(on(3))), sees(1, master(on(2))), sees(2, master(on(2))),
		}, true, false},
		{"two names of one server", []step{sees(0, master(process(5))), sees(1, master(process(5)))}, false, false},
		{"two names, seen at different positions", []step{
			sees(0, master(process(5))), sees(1, master(process(5), at("0/3000100"))),
		}, false, false},
		{"another cluster's master", []step{sees(0, master()), sees(1, master(cluster(8)))}, false, false},
		{"a master whose identifier is hidden", []step{sees(0, master()), sees(1, master(cluster(0)))}, true, true},
		{"no master is left", []step{
			sees(0, master()), sees(1, master()), fails(0), fails(0), fails(0), fails(1), fails(1), fails(1),
		}, false, false},
	} {
		v := tableOf(3, tt.steps...).view()
		if v.rivals != tt.rivals || v.split != tt.split {
			t.Errorf("%s: rivals %v, split %v; want %v, %v", tt.name, v.rivals, v.split, tt.rivals, tt.split)
		}
	}
}

// Replica 1 is seen at 0/3000100, which the master 0 had not reached, and its last
// commit is older than the period of a second.
func TestAhead(t *testing.T) {
	m := sees(0, master(seen(0)))
	r := func(traits ...trait) step {
		return sees(1, replica(append([]trait{seen(500), at("0/3000100"), committed(-2000)}, traits...)...))
	}
	for _, tt := range []struct {
		name  string
		steps []step
		want  bool
	}{
		{"ahead", []step{m, r()}, true},
		{"nothing replayed since the start", []step{m, r(func(s *hostState) { s.lastReplay = time.Time{} })}, true},
		{"a commit within the period", []step{m, r(committed(-499))}, false},
		{"a commit a period ago", []step{m, r(committed(-500))}, false},
		{"a commit a period ago, by a clock that is behind", []step{m, r(off(-10_000), committed(-501))}, true},
		{"at the master's position", []step{m, r(at("0/3000000"))}, false},
		{"behind it", []step{m, r(at("0/2FFFFF8"))}, false},
		{"at the page that the master has begun", []step{
			sees(0, master(at("0/5000000"), inserted("0/5000028"))), r(at("0/5000000")),
		}, false},
		{"inserted but not written", []step{sees(0, master(inserted("0/3000100"))), r()}, false},
		{"the master was checked again", []step{m, r(), sees(0, master(seen(501), at("0/3000100")))}, false},
		{"no master", []step{m, fails(0), fails(0), fails(0), r()}, false},
		{"never a master", []step{r()}, false},
		{"the master does not answer", []step{m, fails(0), r()}, false},
		{"the master hung up", []step{m, hangsUp(0), r()}, false},
		{"another timeline", []step{m, r(on(2))}, false},
		{"an unknown timeline", []step{m, r(on(0))}, true},
		{"another cluster", []step{m, r(cluster(8))}, false},
		{"diverged", []step{m, r(), sees(0, master(seen(1000)))}, false},
		{"a possibly dead replica", []step{m, r(), fails(1)}, true},
		{"a dead replica", []step{m, r(), fails(1), fails(1), fails(1)}, false},
		{"promoted", []step{m, sees(1, master(at("0/3000100")))}, false},
	} {
		got, ok := tableOf(3, tt.steps...).ahead(1, time.Second)
		if got != 0 || ok != tt.want {
			t.Errorf("%s: ahead(1) = %d, %v; want 0, %v", tt.name, got, ok, tt.want)
		}
	}
	// Its index is that of the host.
	if got, ok := tableOf(3, sees(2, master(seen(0))), r()).ahead(1, time.Second); got != 2 || !ok {
		t.Errorf("ahead(1) = %d, %v; want 2, true", got, ok)
	}
}

func TestSameServer(t *testing.T) {
	for _, tt := range []struct {
		a, b          hostState
		same, foreign bool
	}{
		{master(process(1)), replica(process(1)), true, false},
		{master(process(1)), master(process(2)), false, false},
		{master(process(1)), master(process(1), cluster(8)), false, true},
		{master(process(1)), master(process(2), cluster(8)), false, true},
		{master(process(1)), master(process(1), cluster(0)), true, false},
		{master(process(1), cluster(0)), master(process(2)), false, false},
		{master(process(1), cluster(0)), master(process(1), cluster(0)), true, false},
		{master(process(1), cluster(-3)), master(process(1), cluster(3)), false, true}, // bigint shows the sign bit
	} {
		for range 2 {
			if same, foreign := tt.a.sameServer(tt.b.observation), tt.a.otherCluster(tt.b.observation); same != tt.same || foreign != tt.foreign {
				t.Errorf("run %d of cluster %d and run %d of cluster %d: same server %v, other cluster %v; want %v, %v",
					tt.a.postmasterStart, tt.a.systemID, tt.b.postmasterStart, tt.b.systemID, same, foreign, tt.same, tt.foreign)
			}
			tt.a, tt.b = tt.b, tt.a
		}
	}
}

// Every change publishes a view, tells those who wait with the one before, and
// leaves that one as it was.
func TestViewsAreReplaced(t *testing.T) {
	tb := tableOf(2)
	isClosed := func(v *view) bool {
		select {
		case <-v.changed:
			return true
		default:
			return false
		}
	}
	was := tb.view()
	text := fmt.Sprint(was.hosts, was.master, was.ready)
	for n, change := range []func() (old, next *view){
		func() (*view, *view) { return tb.observe(0, number(0, master()).observation) },
		func() (*view, *view) { return tb.observe(1, number(1, replica()).observation) },
		func() (*view, *view) { return tb.fail(0) },
		func() (*view, *view) { return tb.suspectHost(1) },
	} {
		old, next := change()
		if old != was || next != tb.view() || next == old {
			t.Errorf("change %d does not return the views before and after it", n)
		}
		if !isClosed(old) || isClosed(next) {
			t.Errorf("change %d: the old view is closed %v, the new one %v; want true, false", n, isClosed(old), isClosed(next))
		}
		if now := fmt.Sprint(old.hosts, old.master, old.ready); now != text {
			t.Errorf("change %d changed the view before it from %s to %s", n, text, now)
		}
		was, text = next, fmt.Sprint(next.hosts, next.master, next.ready)
	}
}
