package main

import "strings"

// view is the host table at one moment, and answers every question about it. It
// never changes, so all that one response says is from one moment.
type view struct {
	*tableConfig
	hosts    []hostState
	master   int           // index of the selected master, -1 while there is none
	ref      observation   // last one of the selected master, or of the one selected last
	timeline timeline      // ref's, or while there never was a master the highest of a replica
	rivals   bool          // another server of its cluster is a responsive master too
	split    bool          // another one is a live master on its timeline
	ready    bool          // every host's first check is over
	changed  chan struct{} // closed when a newer view is published

	rendered
}

// pickMaster returns the index of the master to write to, -1 if there is none:
// of the fully responsive masters, or else of the possibly dead ones, the first
// one, or with byTimeline the first one of the highest timeline. In that mode a
// master of ref's cluster on a timeline below floor has been superseded and is
// never picked.
func pickMaster(hosts []hostState, byTimeline bool, floor timeline, ref observation) int {
	best := -1
	for i := range hosts {
		s := &hosts[i]
		if !s.liveMaster() || byTimeline && s.timeline < floor && !s.otherCluster(ref) {
			continue
		}
		switch {
		case best < 0,
			s.responsive() && !hosts[best].responsive(),
			byTimeline && s.responsive() == hosts[best].responsive() && s.timeline > hosts[best].timeline:
			best = i
		}
	}
	return best
}

// limit is a threshold, or none.
type limit struct {
	set bool
	max uint64
}

func (l limit) allows(x lag) bool { return !l.set || x.within(l.max) }

// filter is what a request wants of a replica. The zero value wants nothing.
type filter struct {
	lagMS, lagBytes limit
	either          bool // one of the two lags within its limit is enough
	minLSN          lsn  // 0 is no constraint: every replica has replayed it
	hasMinLSN       bool
	timeline        timeline // 0 is no constraint
}

// mismatch is the set of conditions that a host does not meet.
type mismatch uint8

const (
	notAlive mismatch = 1 << iota
	wrongRole
	notOurs       // of another cluster
	tooOld        // lag_ms
	tooFarBehind  // lag_bytes
	notReplayed   // min_lsn
	notOnTimeline // timeline
)

// words names the conditions in m, one word each, for people.
func (m mismatch) words() string {
	var words []string
	for i, w := range []string{"dead", "role", "cluster", "lag_ms", "lag_bytes", "min_lsn", "timeline"} {
		if m&(1<<i) != 0 {
			words = append(words, w)
		}
	}
	return strings.Join(words, " ")
}

// hadMaster reports whether a master was ever selected.
func (v *view) hadMaster() bool { return !v.ref.start.IsZero() }

// masterResponsive reports whether a fully responsive master is selected.
func (v *view) masterResponsive() bool { return v.master >= 0 && v.hosts[v.master].responsive() }

// foreign reports whether s is known to belong to another cluster than the
// master: reading from it would return someone else's data.
func (v *view) foreign(s *hostState) bool { return s.otherCluster(v.ref) }

// syncByTime and syncByBytes report whether s is live and within the global
// threshold.
func (v *view) syncByTime(s *hostState) bool  { return s.alive && v.timeLag(s).within(v.syncMS) }
func (v *view) syncByBytes(s *hostState) bool { return s.alive && v.byteLag(s).within(v.syncBytes) }

// comparable reports whether positions of replica s can be compared with the
// master's: they are, as far as we know, of one WAL history. While no master is
// selected, the one selected last stands for it, and while there never was one,
// the replicas that have come furthest.
func (v *view) comparable(s *hostState) bool {
	return !s.diverged && !s.timeline.differs(v.timeline)
}

// timeLag returns the time lag of s. On another WAL history than the selected
// master's a replica misses what was committed there since, however young its
// last transaction is, so that its lag is unknown.
func (v *view) timeLag(s *hostState) lag {
	if s.standby && v.master >= 0 && !v.comparable(s) {
		return lag{}
	}
	return s.lagMS
}

// byteLag returns the byte lag of host i, which is unknown across timelines.
func (v *view) byteLag(s *hostState) lag {
	if s.standby && !v.comparable(s) {
		return lag{}
	}
	return s.lagBytes
}

// masterMismatch returns what keeps host i from being the selected master.
func (v *view) masterMismatch(i int) mismatch {
	switch {
	case !v.hosts[i].alive:
		return notAlive
	case i != v.master:
		return wrongRole
	}
	return 0
}

// mismatch returns what keeps s from being a replica that f wants.
func (v *view) mismatch(s *hostState, f *filter) mismatch {
	var m mismatch
	switch {
	case !s.alive:
		return notAlive
	case !s.standby:
		return wrongRole
	case v.foreign(s):
		return notOurs
	}
	byMS, byBytes := f.lagMS.allows(v.timeLag(s)), f.lagBytes.allows(v.byteLag(s))
	if f.either && (byMS || byBytes) {
		byMS, byBytes = true, true
	}
	if !byMS {
		m |= tooOld
	}
	if !byBytes {
		m |= tooFarBehind
	}
	if f.hasMinLSN && !v.replayed(s, f) {
		m |= notReplayed
	}
	if f.timeline != 0 && !v.onTimeline(s, f.timeline) {
		m |= notOnTimeline
	}
	return m
}

// replayed reports whether s has replayed the write at f.minLSN. A position in
// another WAL history than the write's says nothing, so a split brain, where we
// cannot tell whose WAL s follows, and a timeline known to differ from the
// master's rule it out. While no master is selected, f.timeline, which names the
// history of the write, is enough to compare by.
//
// What has been replayed stays replayed while the server runs. One that crashes
// takes queries again at its minimum recovery ending location, which may be
// behind what it had replayed, so a suspect one meets no position.
func (v *view) replayed(s *hostState, f *filter) bool {
	sameHistory := v.comparable(s) || v.master < 0 && f.timeline != 0 && s.timeline == f.timeline && !s.diverged
	return !v.split && !s.suspect && sameHistory && s.replay.pageStart() >= f.minLSN.pageStart()
}

// onTimeline reports whether s is known to follow timeline want, and want is not
// one that the selected master has left behind.
func (v *view) onTimeline(s *hostState, want timeline) bool {
	superseded := v.master >= 0 && v.ref.timeline > want
	return !v.split && !superseded && !s.diverged && s.timeline == want
}

// Replicas are preferred by health, then by locality: lower ranks first.
const (
	rankDC = iota
	rankGeo
	rankRemote
	rankPossiblyDead // added to the above
)

// rank returns the preference of host i among replicas that match.
func (v *view) rank(i int) int {
	r := rankRemote
	switch h := &v.tableConfig.hosts[i]; {
	case v.currentDC != "" && h.dc == v.currentDC:
		r = rankDC
	case v.currentGeo != "" && h.geo == v.currentGeo:
		r = rankGeo
	}
	if !v.hosts[i].responsive() {
		r += rankPossiblyDead
	}
	return r
}

// pickReplica returns the index of the replica to read from, -1 if none matches
// f: of the best health and locality group, the next one behind index last in
// the list, which is seen as a circle.
func (v *view) pickReplica(f *filter, last int) int {
	best, bestRank := -1, rankRemote+rankPossiblyDead+1
	for n := range v.hosts {
		i := (last + 1 + n) % len(v.hosts)
		if v.mismatch(&v.hosts[i], f) != 0 {
			continue
		}
		if r := v.rank(i); r < bestRank {
			best, bestRank = i, r
		}
	}
	return best
}

// pickMostSync returns the index of the replica with the smallest byte lag of
// those that match f, the first such one of the best health group, or -1.
func (v *view) pickMostSync(f *filter) int {
	best := -1
	for i := range v.hosts {
		if v.mismatch(&v.hosts[i], f) == 0 && (best < 0 || v.fresher(i, best)) {
			best = i
		}
	}
	return best
}

// fresher reports whether host i is to be preferred to host j by health, then by
// byte lag.
func (v *view) fresher(i, j int) bool {
	a, b := &v.hosts[i], &v.hosts[j]
	if a.responsive() != b.responsive() {
		return a.responsive()
	}
	if x, y := v.byteLag(a), v.byteLag(b); x != y {
		return least(x, y) == x
	}
	return false
}
