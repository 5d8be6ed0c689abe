package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestPickMaster(t *testing.T) {
	for _, tt := range []struct {
		name            string
		hosts           []hostState
		order, timeline int // the master by order, and by timeline
	}{
		{"no hosts", nil, -1, -1},
		{"no master", []hostState{replica(), replica()}, -1, -1},
		{"never answered", []hostState{{}, {}}, -1, -1},
		{"one", []hostState{replica(), master(), replica()}, 1, 1},
		{"dead", []hostState{dead(master()), replica()}, -1, -1},
		{"possibly dead", []hostState{replica(), possiblyDead(master())}, 1, 1},
		{"suspect", []hostState{master(suspected), replica()}, 0, 0},
		{"two", []hostState{replica(), master(), master()}, 1, 1},
		{"the first does not respond", []hostState{possiblyDead(master()), replica(), master()}, 2, 2},
		{"the first has hung up", []hostState{master(suspected), master()}, 1, 1},
		{"neither responds", []hostState{possiblyDead(master()), master(suspected)}, 0, 0},
		{"the first is dead", []hostState{dead(master()), possiblyDead(master())}, 1, 1},
		{"a later timeline", []hostState{master(on(1)), master(on(2))}, 0, 1},
		{"the latest timeline", []hostState{master(on(1)), master(on(3)), master(on(2)), master(on(3))}, 0, 1},
		{"an earlier timeline", []hostState{master(on(2)), master(on(1))}, 0, 0},
		{"health comes first", []hostState{master(on(1)), possiblyDead(master(on(2)))}, 0, 0},
		{"the latest of those that do not respond", []hostState{
			possiblyDead(master(on(1))), possiblyDead(master(on(2))), dead(master(on(3))),
		}, 0, 1},
		{"the latest of those that respond", []hostState{
			possiblyDead(master(on(5))), master(on(1)), master(on(2)),
		}, 1, 2},
		{"replicas have timelines too", []hostState{master(on(1)), replica(on(2))}, 0, 0},
		{"the largest timeline", []hostState{master(on(2147483647)), master(on(4294967295))}, 0, 1},
	} {
		if got := pickMaster(tt.hosts, false, 0, observation{}); got != tt.order {
			t.Errorf("%s: pickMaster by order = %d; want %d", tt.name, got, tt.order)
		}
		if got := pickMaster(tt.hosts, true, 0, observation{}); got != tt.timeline {
			t.Errorf("%s: pickMaster by timeline = %d; want %d", tt.name, got, tt.timeline)
		}
	}
}

// A timeline that was left behind does not come back, in one cluster.
func TestPickMasterFloor(t *testing.T) {
	for _, tt := range []struct {
		name  string
		hosts []hostState
		floor timeline
		want  int // by timeline
	}{
		{"below", []hostState{master(on(1))}, 2, -1},
		{"at", []hostState{master(on(2))}, 2, 0},
		{"above", []hostState{master(on(3))}, 2, 0},
		{"below, though only it responds", []hostState{possiblyDead(master(on(2))), master(on(1))}, 2, 0},
		{"another cluster", []hostState{master(on(1), cluster(8))}, 2, 0},
		{"perhaps another cluster", []hostState{master(on(1), cluster(0))}, 2, -1},
	} {
		if got := pickMaster(tt.hosts, true, tt.floor, master().observation); got != tt.want {
			t.Errorf("%s: pickMaster by timeline = %d; want %d", tt.name, got, tt.want)
		}
		if got := pickMaster(tt.hosts, false, tt.floor, master().observation); got < 0 {
			t.Errorf("%s: pickMaster by order = %d; want a master, whatever the timeline", tt.name, got)
		}
	}
}

func atMost(n uint64) limit { return limit{true, n} }

// replayedTo is the filter of min_lsn, and of timeline unless that is 0.
func replayedTo(pos string, tl timeline) filter {
	return filter{hasMinLSN: true, minLSN: mustLSN(pos), timeline: tl}
}

// What a replica does not meet. The master is at 0/3000100 on timeline 2.
func TestMismatch(t *testing.T) {
	m := master(at("0/3000100"), on(2))
	up := func(traits ...trait) hostState {
		return replica(append([]trait{at("0/3000100"), on(2), lagMS(5), lagBytes(50)}, traits...)...)
	}
	byMS, byBytes := func(n uint64) filter { return filter{lagMS: atMost(n)} }, func(n uint64) filter { return filter{lagBytes: atMost(n)} }
	both := filter{lagMS: atMost(5), lagBytes: atMost(50)}
	either := filter{lagMS: atMost(5), lagBytes: atMost(50), either: true}
	onTL := func(tl timeline) filter { return filter{timeline: tl} }
	for _, tt := range []struct {
		s    hostState
		f    filter
		want string // the conditions that are not met
	}{
		// Role and life come before all else.
		{up(), filter{}, ""},
		{possiblyDead(up()), filter{}, ""},
		{up(suspected), filter{}, ""},
		{dead(up()), filter{}, "dead"},
		{hostState{}, filter{}, "dead"},
		{dead(m), filter{}, "dead"},
		{m, filter{}, "role"},
		{m, byMS(0), "role"},
		{up(cluster(8)), filter{}, "cluster"},
		{up(cluster(8), lagMS(9)), both, "cluster"},
		{up(cluster(0)), filter{}, ""},
		{up(diverged), filter{}, ""},
		{up(on(1)), filter{}, ""},

		// lag_ms
		{up(), byMS(5), ""},
		{up(), byMS(4), "lag_ms"},
		{up(), byMS(0), "lag_ms"},
		{up(lagMS(0)), byMS(0), ""},
		{up(unmeasured), byMS(0), "lag_ms"},
		{up(unmeasured), byMS(1 << 63), "lag_ms"},
		{up(unmeasured), filter{}, ""},
		{possiblyDead(up()), byMS(5), ""},
		{up(on(1)), byMS(5), "lag_ms"}, // young, and without what the master has since
		{up(on(0)), byMS(5), ""},
		{up(diverged), byMS(5), "lag_ms"},

		// lag_bytes, which is unknown across timelines and histories
		{up(), byBytes(50), ""},
		{up(), byBytes(49), "lag_bytes"},
		{up(lagBytes(0)), byBytes(0), ""},
		{up(unmeasured), byBytes(1 << 63), "lag_bytes"},
		{up(on(1), lagBytes(0)), byBytes(1 << 63), "lag_bytes"},
		{up(on(3), lagBytes(0)), byBytes(1 << 63), "lag_bytes"},
		{up(on(0)), byBytes(50), ""},
		{up(diverged, lagBytes(0)), byBytes(1 << 63), "lag_bytes"},

		// both, or either
		{up(), both, ""},
		{up(lagMS(6)), both, "lag_ms"},
		{up(lagBytes(51)), both, "lag_bytes"},
		{up(lagMS(6), lagBytes(51)), both, "lag_ms lag_bytes"},
		{up(unmeasured), both, "lag_ms lag_bytes"},
		{up(), either, ""},
		{up(lagMS(6)), either, ""},
		{up(lagBytes(51)), either, ""},
		{up(lagMS(6), lagBytes(51)), either, "lag_ms lag_bytes"},
		{up(unmeasured), either, "lag_ms lag_bytes"},
		{up(unmeasured, lagMS(5)), either, ""},
		{up(unmeasured, lagMS(6)), either, "lag_ms lag_bytes"},
		{up(unmeasured, lagBytes(50)), either, ""},
		{up(unmeasured, lagBytes(51)), either, "lag_ms lag_bytes"},
		{up(on(1), lagMS(6), lagBytes(0)), either, "lag_ms lag_bytes"},
		{up(on(1), lagMS(5), lagBytes(0)), either, "lag_ms lag_bytes"},

		// min_lsn
		{up(), replayedTo("0/3000100", 0), ""},
		{up(), replayedTo("0/30000F8", 0), ""},
		{up(), replayedTo("0/3000101", 0), "min_lsn"},
		{up(), replayedTo("1/0", 0), "min_lsn"},
		{up(), replayedTo("0/0", 0), ""},
		{possiblyDead(up()), replayedTo("0/3000100", 0), ""},
		{up(suspected), replayedTo("0/3000100", 0), "min_lsn"}, // it may have restarted with less
		{up(suspected), replayedTo("0/3000100", 2), "min_lsn"},
		{up(suspected), filter{timeline: 2, lagMS: atMost(5)}, ""},
		{up(on(0)), replayedTo("0/3000100", 0), ""},
		{up(on(1)), replayedTo("0/3000100", 0), "min_lsn"},
		{up(on(1)), replayedTo("0/0", 0), "min_lsn"},
		{up(on(3)), replayedTo("0/3000100", 0), "min_lsn"},
		{up(diverged), replayedTo("0/3000100", 0), "min_lsn"},
		{up(diverged, on(0)), replayedTo("0/0", 0), "min_lsn"},
		{up(at("0/5000000")), replayedTo("0/5000028", 0), ""}, // the header of a segment
		{up(at("0/5000000")), replayedTo("0/5000030", 0), "min_lsn"},
		{up(at("0/5002000")), replayedTo("0/5002018", 0), ""}, // of a page
		{up(at("0/5001FF8")), replayedTo("0/5002018", 0), "min_lsn"},
		{up(at("0/5002018")), replayedTo("0/5002000", 0), ""},

		// timeline
		{up(), onTL(2), ""},
		{up(), onTL(1), "timeline"},
		{up(), onTL(3), "timeline"},
		{up(on(0)), onTL(2), "timeline"},
		{up(on(1)), onTL(2), "timeline"},
		{up(on(1)), onTL(1), "timeline"}, // the master has left it behind
		{up(on(3)), onTL(3), ""},         // and will see the next one
		{up(on(3)), onTL(2), "timeline"},
		{up(diverged), onTL(2), "timeline"},
		{possiblyDead(up()), onTL(2), ""},

		// min_lsn with timeline
		{up(), replayedTo("0/3000100", 2), ""},
		{up(), replayedTo("0/3000101", 2), "min_lsn"},
		{up(), replayedTo("0/3000100", 1), "timeline"},
		{up(on(0)), replayedTo("0/3000100", 2), "timeline"},
		{up(on(1)), replayedTo("0/3000100", 1), "min_lsn timeline"},
		{up(on(1)), replayedTo("0/3000100", 2), "min_lsn timeline"},
		{up(on(3)), replayedTo("0/3000100", 3), "min_lsn"},
		{up(diverged), replayedTo("0/3000100", 2), "min_lsn timeline"},

		// All of them.
		{up(on(1), lagMS(6)), filter{
			lagMS: atMost(5), lagBytes: atMost(50), hasMinLSN: true, minLSN: mustLSN("0/3000100"), timeline: 2,
		}, "lag_ms lag_bytes min_lsn timeline"},
		{up(), filter{
			lagMS: atMost(5), lagBytes: atMost(50), hasMinLSN: true, minLSN: mustLSN("0/3000100"), timeline: 2,
		}, ""},
	} {
		v := viewOf(m, tt.s)
		if tt.s.liveMaster() {
			v = viewOf(m)
		}
		got := v.mismatch(&v.hosts[len(v.hosts)-1], &tt.f).words()
		if got != tt.want {
			t.Errorf("mismatch(%s, %+v) = %q; want %q", show(&tt.s), tt.f, got, tt.want)
		}
		// Who matches is picked.
		if i := v.pickReplica(&tt.f, 0); (i == 1) != (tt.want == "") {
			t.Errorf("pickReplica(%+v) of %s = %d with mismatch %q", tt.f, show(&tt.s), i, tt.want)
		}
		if i := v.pickMostSync(&tt.f); (i == 1) != (tt.want == "") {
			t.Errorf("pickMostSync(%+v) of %s = %d with mismatch %q", tt.f, show(&tt.s), i, tt.want)
		}
	}
}

// While no master is selected, the one selected last stands for it, and the
// timeline of the write is as good.
func TestMismatchWithoutMaster(t *testing.T) {
	gone := dead(master(at("0/3000100"), on(2)))
	up := func(traits ...trait) hostState {
		return replica(append([]trait{at("0/3000100"), on(2)}, traits...)...)
	}
	for _, tt := range []struct {
		s    hostState
		f    filter
		want string
	}{
		{up(), filter{}, ""},
		{up(), replayedTo("0/3000100", 0), ""},
		{up(), replayedTo("0/3000101", 0), "min_lsn"},
		{up(), replayedTo("0/3000100", 2), ""},
		{up(), replayedTo("0/3000100", 1), "timeline"},
		{up(), filter{lagBytes: atMost(0)}, ""},
		{up(on(1)), replayedTo("0/3000100", 0), "min_lsn"},
		{up(on(1)), replayedTo("0/3000100", 1), ""},
		{up(on(1)), filter{timeline: 1}, ""},
		{up(on(1)), filter{lagBytes: atMost(0)}, "lag_bytes"},
		{up(on(3)), replayedTo("0/3000100", 3), ""}, // a promotion that we did not see yet
		{up(on(3)), replayedTo("0/3000101", 3), "min_lsn"},
		{up(on(3)), replayedTo("0/3000100", 0), "min_lsn"},
		{up(on(0)), replayedTo("0/3000100", 0), ""},
		{up(on(0)), replayedTo("0/3000100", 2), "timeline"},
		{up(diverged), replayedTo("0/3000100", 2), "min_lsn timeline"},
		{up(diverged), replayedTo("0/3000100", 0), "min_lsn"},
		{up(cluster(8)), filter{}, "cluster"},
	} {
		v := viewOf(gone, tt.s)
		v.ref, v.timeline = gone.observation, gone.timeline
		if got := v.mismatch(&v.hosts[1], &tt.f).words(); got != tt.want {
			t.Errorf("mismatch(%s, %+v) after the master's death = %q; want %q", show(&tt.s), tt.f, got, tt.want)
		}
	}
	// Where there never was a master, the replicas that have come furthest count.
	if v := viewOf(hostState{}, up(on(1)), up(on(2)), up(on(0))); true {
		f := replayedTo("0/3000100", 0)
		for i, want := range []string{"dead", "min_lsn", "", ""} {
			if got := v.mismatch(&v.hosts[i], &f).words(); got != want {
				t.Errorf("mismatch of host %d among timelines 1, 2 and unknown, before any master = %q; want %q", i, got, want)
			}
		}
	}
	for _, tt := range []struct {
		s    hostState
		f    filter
		want string
	}{
		{up(on(1)), filter{}, ""},
		{up(on(1)), replayedTo("0/3000100", 0), ""},
		{up(on(1)), replayedTo("0/3000100", 1), ""},
		{up(on(1)), replayedTo("0/3000100", 2), "timeline"},
		{up(on(1)), filter{lagBytes: atMost(0)}, ""},
		{up(cluster(8)), filter{}, ""},
	} {
		v := viewOf(hostState{}, tt.s)
		if got := v.mismatch(&v.hosts[1], &tt.f).words(); got != tt.want {
			t.Errorf("mismatch(%s, %+v) before any master = %q; want %q", show(&tt.s), tt.f, got, tt.want)
		}
	}
}

// While two servers are live masters of one timeline, no position and no timeline
// says whose WAL a replica follows.
func TestMismatchInSplitBrain(t *testing.T) {
	r := replica(lagMS(0), lagBytes(0))
	byLSN, byTimeline := replayedTo("0/0", 0), filter{timeline: 1}
	for _, tt := range []struct {
		name  string
		other hostState
		split bool
	}{
		{"none", replica(), false},
		{"another server on the timeline", master(), true},
		{"possibly dead", possiblyDead(master()), true},
		{"dead", dead(master()), false},
		{"on a later timeline", master(on(2)), false},
		{"another name of the server", master(process(1)), false},
		{"another cluster's", master(cluster(8)), false},
	} {
		v := viewOf(master(), tt.other, r)
		byLSNWant, byTimelineWant := "", ""
		if tt.split {
			byLSNWant, byTimelineWant = "min_lsn", "timeline"
		}
		s := &v.hosts[2]
		if got := v.mismatch(s, &byLSN).words(); got != byLSNWant {
			t.Errorf("%s: mismatch(min_lsn) = %q; want %q", tt.name, got, byLSNWant)
		}
		if got := v.mismatch(s, &byTimeline).words(); got != byTimelineWant {
			t.Errorf("%s: mismatch(timeline) = %q; want %q", tt.name, got, byTimelineWant)
		}
		if got := v.mismatch(s, &filter{lagMS: atMost(0), lagBytes: atMost(0)}); got != 0 {
			t.Errorf("%s: mismatch(lags) = %q; want none", tt.name, got.words())
		}
	}
}

func TestMismatchWords(t *testing.T) {
	if got, want := (notAlive | wrongRole | notOurs | tooOld | tooFarBehind | notReplayed | notOnTimeline).words(),
		"dead role cluster lag_ms lag_bytes min_lsn timeline"; got != want {
		t.Errorf("words = %q; want %q", got, want)
	}
}

func TestMasterMismatch(t *testing.T) {
	v := viewOf(replica(), master(), master(on(2)), dead(master()), hostState{}, possiblyDead(master()))
	for i, want := range []string{"role", "", "role", "dead", "dead", "role"} {
		if got := v.masterMismatch(i).words(); got != want {
			t.Errorf("masterMismatch(%d) = %q; want %q", i, got, want)
		}
	}
	v = viewOf(possiblyDead(master()))
	if got := v.masterMismatch(0); got != 0 {
		t.Errorf("masterMismatch of a possibly dead master = %q; want none", got.words())
	}
}

func TestMasterResponsive(t *testing.T) {
	for _, tt := range []struct {
		m    hostState
		want bool
	}{
		{master(), true}, {possiblyDead(master()), false}, {master(suspected), false}, {dead(master()), false}, {replica(), false},
	} {
		if got := viewOf(tt.m).masterResponsive(); got != tt.want {
			t.Errorf("masterResponsive with %s = %v; want %v", show(&tt.m), got, tt.want)
		}
	}
}

func TestSynchronous(t *testing.T) {
	for _, tt := range []struct {
		s               hostState
		byTime, byBytes bool
	}{
		{replica(lagMS(1000), lagBytes(500)), true, true},
		{replica(lagMS(1001), lagBytes(501)), false, false},
		{replica(lagMS(0), lagBytes(0)), true, true},
		{replica(unmeasured), false, false},
		{possiblyDead(replica()), true, true},
		{dead(replica()), false, false},
		{replica(on(2)), false, false},
		{replica(diverged), false, false},
		{master(process(1)), true, true},
		{dead(master()), false, false},
		{hostState{}, false, false},
	} {
		v := viewWith(tableConfig{syncMS: 1000, syncBytes: 500}, master(), tt.s)
		s := &v.hosts[1]
		if byTime, byBytes := v.syncByTime(s), v.syncByBytes(s); byTime != tt.byTime || byBytes != tt.byBytes {
			t.Errorf("%s is synchronous by time %v, by bytes %v; want %v, %v", show(s), byTime, byBytes, tt.byTime, tt.byBytes)
		}
	}
	// A threshold of 0 is met by a lag of 0.
	v := viewWith(tableConfig{}, master(), replica(lagMS(0), lagBytes(0)))
	if !v.syncByTime(&v.hosts[1]) || !v.syncByBytes(&v.hosts[1]) {
		t.Error("a replica without lag is not synchronous by a threshold of 0")
	}
}

// turnsOf returns the hosts that pickReplica returns one after the other, each
// behind the one before, from behind the first entry.
func turnsOf(v *view, f *filter, n int) string {
	var turns []string
	last := 0
	for range n {
		i := v.pickReplica(f, last)
		turns = append(turns, fmt.Sprint(i))
		if i >= 0 {
			last = i
		}
	}
	return strings.Join(turns, " ")
}

func TestPickReplica(t *testing.T) {
	// The hosts' places are of a reader in dc fra, geo eu.
	places := func(names string) tableConfig {
		c := tableConfig{currentDC: "fra", currentGeo: "eu"}
		for _, name := range strings.Fields(names) {
			dc, geo, _ := strings.Cut(name, "/")
			c.hosts = append(c.hosts, hostConfig{dc: dc, geo: geo})
		}
		return c
	}
	noDC := func(c tableConfig) tableConfig { c.currentDC = ""; return c }
	noGeo := func(c tableConfig) tableConfig { c.currentGeo = ""; return c }
	r, m := replica(), master()
	late := replica(lagMS(2000), lagBytes(2000))
	for _, tt := range []struct {
		name  string
		c     tableConfig
		hosts []hostState
		f     filter
		want  string
	}{
		{"in turn", tableConfig{}, []hostState{m, r, r, r}, filter{}, "1 2 3 1 2 3"},
		{"behind the first entry", tableConfig{}, []hostState{r, r, m}, filter{}, "1 0 1 0 1 0"},
		{"only one", tableConfig{}, []hostState{m, r}, filter{}, "1 1 1 1 1 1"},
		{"only the first", tableConfig{}, []hostState{r, m}, filter{}, "0 0 0 0 0 0"},
		{"none", tableConfig{}, []hostState{m, m}, filter{}, "-1 -1 -1 -1 -1 -1"},
		{"no hosts", tableConfig{}, nil, filter{}, "-1 -1 -1 -1 -1 -1"},
		{"dead ones are left out", tableConfig{}, []hostState{m, dead(r), r, {}, r}, filter{}, "2 4 2 4 2 4"},
		{"those that do not match are left out", tableConfig{}, []hostState{m, r, late, r}, filter{lagMS: atMost(1000)}, "1 3 1 3 1 3"},
		{"none matches", tableConfig{}, []hostState{m, late, late}, filter{lagMS: atMost(1000)}, "-1 -1 -1 -1 -1 -1"},
		{"without a master", tableConfig{}, []hostState{dead(m), r, r}, filter{}, "1 2 1 2 1 2"},
		{"possibly dead ones wait", tableConfig{}, []hostState{m, possiblyDead(r), r, possiblyDead(r), r}, filter{}, "2 4 2 4 2 4"},
		{"and suspects", tableConfig{}, []hostState{m, replica(suspected), r}, filter{}, "2 2 2 2 2 2"},
		{"until no other matches", tableConfig{}, []hostState{m, possiblyDead(r), late, possiblyDead(r)}, filter{lagMS: atMost(1000)}, "1 3 1 3 1 3"},
		{"the stranded is passed over", tableConfig{}, []hostState{master(on(2)), replica(on(1)), replica(on(2))},
			replayedTo("0/3000000", 0), "2 2 2 2 2 2"},

		{"dc first", places("fra/eu ams/eu fra/eu fra/eu nyc/us"), []hostState{m, r, r, r, r}, filter{}, "2 3 2 3 2 3"},
		{"then geo", places("fra/eu ams/eu nyc/us par/eu nyc/us"), []hostState{m, r, r, r, r}, filter{}, "1 3 1 3 1 3"},
		{"then the rest", places("fra/eu nyc/us sfo/us"), []hostState{m, r, r}, filter{}, "1 2 1 2 1 2"},
		{"a dc in another geo", places("ams/eu fra/us ams/eu"), []hostState{m, r, r}, filter{}, "1 1 1 1 1 1"},
		{"no dc in use", noDC(places("fra/eu fra/eu ams/eu nyc/us")), []hostState{m, r, r, r}, filter{}, "1 2 1 2 1 2"},
		{"no geo in use", noGeo(places("fra/eu ams/eu nyc/us")), []hostState{m, r, r}, filter{}, "1 2 1 2 1 2"},
		{"no place in use", noDC(noGeo(places("fra/eu fra/eu nyc/us"))), []hostState{m, r, r}, filter{}, "1 2 1 2 1 2"},
		{"a host without a place", noDC(noGeo(places("fra/eu / nyc/us"))), []hostState{m, r, r}, filter{}, "1 2 1 2 1 2"},
		{"no match near", places("fra/eu fra/eu ams/eu nyc/us"), []hostState{m, late, late, r}, filter{lagMS: atMost(1000)}, "3 3 3 3 3 3"},
		{"no match in the dc", places("fra/eu fra/eu ams/eu nyc/us"), []hostState{m, late, r, r}, filter{lagMS: atMost(1000)}, "2 2 2 2 2 2"},
		{"a healthy one far away, not a possibly dead one here", places("fra/eu fra/eu nyc/us"), []hostState{m, possiblyDead(r), r}, filter{}, "2 2 2 2 2 2"},
		{"of the possibly dead the nearest", places("nyc/us nyc/us ams/eu fra/eu fra/eu"),
			[]hostState{m, possiblyDead(r), possiblyDead(r), possiblyDead(r), possiblyDead(r)}, filter{}, "3 4 3 4 3 4"},
		{"of the possibly dead the geo", places("nyc/us nyc/us ams/eu"), []hostState{m, possiblyDead(r), possiblyDead(r)}, filter{}, "2 2 2 2 2 2"},
		{"a dead one here", places("fra/eu fra/eu nyc/us"), []hostState{m, dead(r), r}, filter{}, "2 2 2 2 2 2"},
		{"the master here", places("fra/eu nyc/us"), []hostState{m, r}, filter{}, "1 1 1 1 1 1"},
		{"first of the dc is first in the list", places("fra/eu ams/eu fra/eu"), []hostState{r, m, r}, filter{}, "2 0 2 0 2 0"},
	} {
		if got := turnsOf(viewWith(tt.c, tt.hosts...), &tt.f, 6); got != tt.want {
			t.Errorf("%s: pickReplica = %s; want %s", tt.name, got, tt.want)
		}
	}
}

// The cursor is where it is, whichever host stands there.
func TestPickReplicaCursor(t *testing.T) {
	v := viewOf(replica(), master(), replica(), dead(replica()), replica())
	for last, want := range []int{2, 2, 4, 4, 0} {
		if got := v.pickReplica(&filter{}, last); got != want {
			t.Errorf("pickReplica behind %d = %d; want %d", last, got, want)
		}
	}
}

func TestPickMostSync(t *testing.T) {
	behind := func(n uint64) hostState { return replica(lagBytes(n)) }
	far := tableConfig{currentDC: "fra", hosts: []hostConfig{{dc: "fra"}, {dc: "fra"}, {dc: "nyc"}}}
	for _, tt := range []struct {
		name  string
		c     tableConfig
		hosts []hostState
		f     filter
		want  int
	}{
		{"the least", tableConfig{}, []hostState{master(), behind(30), behind(10), behind(20)}, filter{}, 2},
		{"none", tableConfig{}, []hostState{master(), dead(replica())}, filter{}, -1},
		{"no hosts", tableConfig{}, nil, filter{}, -1},
		{"ties go to the first", tableConfig{}, []hostState{master(), behind(30), behind(10), behind(10)}, filter{}, 2},
		{"ties of 0", tableConfig{}, []hostState{behind(0), behind(0), master()}, filter{}, 0},
		{"known before unknown", tableConfig{}, []hostState{master(), replica(unmeasured), behind(1 << 40)}, filter{}, 2},
		{"known before unknown, the other way round", tableConfig{}, []hostState{master(), behind(1 << 40), replica(unmeasured)}, filter{}, 1},
		{"all unknown", tableConfig{}, []hostState{master(), replica(unmeasured), replica(unmeasured)}, filter{}, 1},
		{"across timelines is unknown", tableConfig{}, []hostState{master(on(2)), replica(on(1), lagBytes(0)), replica(on(2), lagBytes(9))}, filter{}, 2},
		{"unknown meets no limit", tableConfig{}, []hostState{master(), replica(unmeasured)}, filter{lagBytes: atMost(1 << 62)}, -1},
		{"within the limit", tableConfig{}, []hostState{master(), behind(30), behind(31)}, filter{lagBytes: atMost(30)}, 1},
		{"beyond the limit", tableConfig{}, []hostState{master(), behind(31)}, filter{lagBytes: atMost(30)}, -1},
		{"with min_lsn", tableConfig{}, []hostState{
			master(), replica(lagBytes(1), at("0/3000000")), replica(lagBytes(5), at("0/3000100")),
		}, replayedTo("0/3000100", 0), 2},
		{"with timeline", tableConfig{}, []hostState{
			master(), replica(lagBytes(1), on(0)), replica(lagBytes(5), on(1)),
		}, filter{timeline: 1}, 2},
		{"health comes first", tableConfig{}, []hostState{master(), possiblyDead(behind(1)), behind(1000)}, filter{}, 2},
		{"the least of the possibly dead", tableConfig{}, []hostState{
			master(), possiblyDead(behind(9)), possiblyDead(behind(3)), dead(behind(1)),
		}, filter{}, 2},
		{"a possibly dead one, if no other matches", tableConfig{}, []hostState{
			master(), possiblyDead(behind(1)), behind(1000),
		}, filter{lagBytes: atMost(10)}, 1},
		{"wherever it is", far, []hostState{master(), behind(9), behind(3)}, filter{}, 2},
		{"not of another cluster", tableConfig{}, []hostState{master(), behind(30), replica(lagBytes(0), cluster(8))}, filter{}, 1},
		{"without a master", tableConfig{}, []hostState{dead(master()), behind(30), behind(10)}, filter{}, 2},
	} {
		if got := viewWith(tt.c, tt.hosts...).pickMostSync(&tt.f); got != tt.want {
			t.Errorf("%s: pickMostSync = %d; want %d", tt.name, got, tt.want)
		}
	}
}

// A replica is never returned that does not match, and one is whenever one does:
// all combinations of four kinds of hosts.
func TestPickReplicaOfAll(t *testing.T) {
	kinds := []hostState{
		replica(), possiblyDead(replica()), dead(replica()), master(), replica(lagMS(2000)), replica(cluster(8)),
	}
	f := filter{lagMS: atMost(1000)}
	var (
		hosts [4]hostState
		kind  [4]int
	)
	for n := range len(kinds) * len(kinds) * len(kinds) * len(kinds) {
		for i, rest := 0, n; i < len(hosts); i, rest = i+1, rest/len(kinds) {
			kind[i] = rest % len(kinds)
			hosts[i] = kinds[kind[i]]
		}
		v := viewOf(hosts[:]...)
		var healthy, others []int
		for i := range v.hosts {
			switch s := &v.hosts[i]; {
			case !s.alive || !s.standby || s.lagMS.n > 1000 || v.master >= 0 && s.systemID != 7:
			case s.fails == 0:
				healthy = append(healthy, i)
			default:
				others = append(others, i)
			}
		}
		want := healthy
		if len(want) == 0 {
			want = others
		}
		var got []int
		for last := range v.hosts {
			if i := v.pickReplica(&f, last); i >= 0 {
				got = append(got, i)
			}
		}
		slices.Sort(got)
		if got = slices.Compact(got); !slices.Equal(got, want) {
			t.Fatalf("pickReplica over hosts of kinds %v returns %v; want %v", kind, got, want)
		}
	}
}

// viewToRead is a view of n hosts, half of which are in another place.
func viewToRead(n int) (*view, filter) {
	c := tableConfig{currentDC: "fra", currentGeo: "eu"}
	hosts := []hostState{master()}
	for i := range n {
		c.hosts = append(c.hosts, hostConfig{dc: []string{"fra", "nyc"}[i%2], geo: []string{"eu", "us"}[i%2]})
		if i > 0 {
			hosts = append(hosts, replica(at("0/3000100"), lagMS(5), lagBytes(50)))
		}
	}
	return viewWith(c, hosts...), filter{
		lagMS: atMost(1000), lagBytes: atMost(1_000_000), hasMinLSN: true, minLSN: mustLSN("0/3000100"), timeline: 1,
	}
}

func BenchmarkPickReplica(b *testing.B) {
	for _, n := range []int{3, 16, 64} {
		b.Run(fmt.Sprintf("hosts=%d", n), func(b *testing.B) {
			v, f := viewToRead(n)
			last := 0
			b.ReportAllocs()
			for b.Loop() {
				if last = v.pickReplica(&f, last); last < 0 {
					b.Fatal("no replica")
				}
			}
		})
	}
}

func TestSelectionAllocations(t *testing.T) {
	for _, n := range []int{3, 16, 64} {
		v, f := viewToRead(n)
		last := 0
		if got := testing.AllocsPerRun(100, func() { last = v.pickReplica(&f, last) }); got != 0 {
			t.Errorf("pickReplica over %d hosts allocates %v times; want 0", n, got)
		}
		if got := testing.AllocsPerRun(100, func() { v.pickMostSync(&f) }); got != 0 {
			t.Errorf("pickMostSync over %d hosts allocates %v times; want 0", n, got)
		}
	}
}
