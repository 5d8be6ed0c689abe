package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

var (
	seedFlag      = flag.Uint64("seed", 0, "the one schedule of TestLagProperty to run, and to print with -v")
	schedulesFlag = flag.Uint64("schedules", 3000, "how many schedules TestLagProperty runs")
)

// TestLagProperty drives a table with what checks would see of simulated servers
// and compares what it concludes with the truth, after every step. The rules
// are at judge.
func TestLagProperty(t *testing.T) {
	first, last := uint64(1), *schedulesFlag
	if *seedFlag != 0 {
		first, last = *seedFlag, *seedFlag
	}
	seen := make(map[string]int)
	for seed := first; seed <= last; seed++ {
		w := newWorld(seed, seen)
		if *seedFlag != 0 {
			w.trace = func(format string, args ...any) { t.Logf(format, args...) }
		}
		if wrong := w.run(); wrong != "" {
			t.Fatalf("%s\nrepeat it with: go test -run 'TestLagProperty$' -v -seed=%d .", wrong, seed)
		}
	}
	t.Log(seen)
	if *seedFlag != 0 {
		return
	}
	for _, what := range []string{
		"stale", "fresh", "idle", "idle at a page header", "bounded below the commit age", "lag unknown", "master asked at once",
		"missing more than a period", "unwritten WAL", "no master", "promotion", "split brain", "master crash", "WAL reset in the same run",
		"unaware", "stranded, known", "stranded, unknown", "diverged", "min_lsn met", "min_lsn not met", "min_lsn at a page header",
		"clocks of two masters", "alias",
	} {
		if seen[what] == 0 {
			t.Errorf("no schedule came to: %s", what)
		}
	}
}

// walBranch is a WAL history: that of its parent up to record fork, and then its
// own records. A promotion starts one, and so does a crash that loses WAL.
type walBranch struct {
	parent   *walBranch
	fork     int
	base     uint64 // position of record 0
	timeline timeline
	records  []*walRecord
}

// walRecord is one record. Its position counts no page headers, as XLogBytePos
// in PostgreSQL.
type walRecord struct {
	end      uint64
	xact     bool          // the end of a transaction, with a timestamp
	stamp    time.Time     // of the master's clock, before the record was inserted
	author   int           // the server that did
	visible  time.Duration // when readers of the master saw it; never if negative
	inserted time.Duration
}

func (b *walBranch) len() int { return b.fork + len(b.records) }

func (b *walBranch) record(i int) *walRecord {
	for i < b.fork {
		b = b.parent
	}
	return b.records[i-b.fork]
}

// end returns the position behind the first n records.
func (b *walBranch) end(n int) uint64 {
	if n == 0 {
		return b.base
	}
	return b.record(n - 1).end
}

// common returns how many records b and c share.
func (b *walBranch) common(c *walBranch) int {
	shared := b.len()
	for x := b; x != nil; x = x.parent {
		most := c.len()
		for y := c; y != nil; y = y.parent {
			if x == y {
				return min(shared, most)
			}
			most = min(most, y.fork)
		}
		shared = min(shared, x.fork)
	}
	return 0
}

// at returns the timeline of record n-1.
func (b *walBranch) at(n int) timeline {
	for b.parent != nil && n <= b.fork {
		b = b.parent
	}
	return b.timeline
}

const (
	testSegment   = 16 << 20
	usablePage    = walPageSize - 24
	usableSegment = testSegment/walPageSize*usablePage - 16
	firstPage     = walPageSize - 40 // usable bytes of a segment's first page
)

// recPtr is XLogBytePosToRecPtr of PostgreSQL: where the record at pos begins.
func recPtr(pos uint64) lsn {
	left := pos % usableSegment
	start := lsn(pos / usableSegment * testSegment)
	if left < firstPage {
		return start + lsn(left) + 40
	}
	left -= firstPage
	return start + lsn(walPageSize+left/usablePage*walPageSize+left%usablePage+24)
}

// endPtr is XLogBytePosToEndRecPtr: where a record that ends at pos ends.
func endPtr(pos uint64) lsn {
	left := pos % usableSegment
	switch {
	case left == 0:
		return recPtr(pos) - 40
	case left >= firstPage && (left-firstPage)%usablePage == 0:
		return recPtr(pos) - 24
	}
	return recPtr(pos)
}

// simServer is a PostgreSQL server.
type simServer struct {
	id       int
	offset   time.Duration // of its clock
	sees     string        // of its timeline: "all", "control", or "nothing"
	run      int64         // changes with each start of the server
	down     bool
	standby  bool
	branch   *walBranch
	flushed  int // records, on a master
	received int // records, on a standby
	replayed int

	upstream  *simServer // nil for none
	receiving bool
	control   timeline // of the control file
	paused    time.Duration
	stamp     time.Time // of the last transaction replayed by this run
	author    int
}

// sent returns how many records the server can send.
func (p *simServer) sent() int {
	if p.standby {
		return p.received
	}
	return p.flushed
}

// truth is what was the case when a check looked at a server.
type truth struct {
	at       time.Duration // of clock_timestamp
	server   *simServer
	branch   *walBranch
	timeline timeline // of the last record replayed
	replayed int      // records, when the position was read; on a master, inserted
	shown    int      // records, at the moment of the clock
	author   int      // who stamped the last transaction
}

// simWrite is a transaction whose client read the position that covers it.
type simWrite struct {
	branch   *walBranch
	record   int
	inserted int // records, when the position was read
	minLSN   lsn
	timeline timeline
}

// world is a set of servers, a table that watches them, and what is to happen.
type world struct {
	*rand.Rand
	seed    uint64
	now     time.Duration
	queue   []simEvent
	servers []*simServer
	lastRun int64
	writes  []simWrite
	twins   bool // two promotions reached one timeline

	period   time.Duration
	patience time.Duration // the longest time a check takes
	hosts    []*simServer  // of the table
	table    *table
	checks   []simCheck
	truths   []truth
	ref      *truth       // of the last observation of the selected master
	masters  map[int]bool // servers that were selected
	wrong    string
	seen     map[string]int
	trace    func(format string, args ...any)
}

type simEvent struct {
	at time.Duration
	do func()
}

// simCheck is the check of one host.
type simCheck struct {
	busy   bool
	wanted bool // once more, at once
	counts bool // it is the schedule's, or has taken the place of that
	late   bool // the last one that succeeded had taken the place
}

func (w *world) after(d time.Duration, do func()) {
	w.queue = append(w.queue, simEvent{w.now + d, do})
}

// upTo returns a random time below d, with small ones as likely as large ones.
func (w *world) upTo(d time.Duration) time.Duration {
	d = time.Duration(float64(d) * w.Float64())
	if w.IntN(2) == 0 {
		d = time.Duration(float64(d) * w.Float64() * w.Float64())
	}
	return d
}

func (w *world) oneIn(n int) bool { return w.IntN(n) == 0 }

func oneOf[T any](w *world, of ...T) T { return of[w.IntN(len(of))] }

func (w *world) logf(format string, args ...any) {
	if w.trace != nil {
		w.trace("%12v "+format, append([]any{w.now}, args...)...)
	}
}

// clock returns what the clock of p reads.
func (w *world) clock(p *simServer) time.Time {
	return testClock.Add(w.now + p.offset).Truncate(time.Microsecond)
}

func (w *world) newRun() int64 { w.lastRun++; return w.lastRun }

// newWorld returns a master with replicas, their writers and the checks of a
// table, all by chance.
func newWorld(seed uint64, seen map[string]int) *world {
	w := &world{Rand: rand.New(rand.NewPCG(seed, 1)), seed: seed, masters: make(map[int]bool), seen: seen}
	w.period = oneOf(w, 100*time.Millisecond, time.Second)
	w.patience = w.period * time.Duration(oneOf(w, 1, 10, 100)) / 100
	skew := oneOf(w, 0, 0, time.Millisecond, 30*time.Second)

	// Near the end of a page or of a segment there is more to get wrong.
	root := &walBranch{timeline: 1, base: oneOf[uint64](w, usableSegment, 2*usableSegment-4000, usableSegment+firstPage+3*usablePage-200)}
	for id := range 2 + w.IntN(3) {
		p := &simServer{id: id, run: w.newRun(), branch: root, standby: id > 0, control: 1, author: -1}
		if skew > 0 {
			p.offset = time.Duration(w.Int64N(int64(2*skew))) - skew
		}
		p.sees = oneOf(w, "all", "all", "control", "nothing")
		w.servers = append(w.servers, p)
	}
	for _, p := range w.servers[1:] {
		p.upstream = w.servers[0]
		if w.oneIn(6) {
			p.upstream = w.servers[w.IntN(p.id)] // cascading
		}
		w.stream(p)
	}
	w.startWriters(w.servers[0])
	w.startMisfortunes()

	w.hosts = append(w.hosts, w.servers...)
	if w.oneIn(8) {
		w.hosts = append(w.hosts, w.servers[0])
		w.seen["alias"]++
	}
	w.Shuffle(len(w.hosts), func(i, j int) { w.hosts[i], w.hosts[j] = w.hosts[j], w.hosts[i] })
	w.table = newTable(tableConfig{
		hosts: make([]hostConfig, len(w.hosts)), maxFails: 1 + w.IntN(3), masterByTimeline: w.oneIn(2), syncMS: 1000, syncBytes: 1000000,
	})
	w.truths = make([]truth, len(w.hosts))
	w.checks = make([]simCheck, len(w.hosts))
	for i := range w.hosts {
		w.after(w.upTo(w.period), func() { w.check(i, true) })
	}
	return w
}

// run lets a world go on for some periods, and returns what was wrong.
func (w *world) run() string {
	end := time.Duration(6+w.IntN(12)) * w.period
	for w.wrong == "" {
		next := 0
		for i := range w.queue {
			if w.queue[i].at < w.queue[next].at {
				next = i
			}
		}
		e := w.queue[next]
		if e.at > end {
			break
		}
		w.queue = append(w.queue[:next], w.queue[next+1:]...)
		w.now = e.at
		e.do()
	}
	return w.wrong
}

// startWriters makes master p write, while it is this run of it that is one.
func (w *world) startWriters(p *simServer) {
	run := p.run
	var every func(mean time.Duration, do func())
	every = func(mean time.Duration, do func()) {
		w.after(w.upTo(2*mean)+time.Microsecond, func() {
			if p.run == run && !p.down && !p.standby {
				do()
				every(mean, do)
			}
		})
	}
	// Busy and idle times alternate.
	busy, gap := w.oneIn(2), w.period/time.Duration(oneOf(w, 2, 20))
	every(3*w.period, func() { busy = !busy })
	every(gap, func() {
		if busy {
			w.commit(p)
		}
	})
	every(w.period*time.Duration(oneOf(w, 1, 4, 40)), func() { w.write(p) })
	every(6*w.period, func() { w.commit(p) })
}

// insert appends a record to the WAL of master p.
func (w *world) insert(p *simServer, r *walRecord) int {
	pos := p.branch.end(p.branch.len())
	size := 24 + 8*uint64(w.IntN(50))
	page := pos % usableSegment
	if page >= firstPage {
		page = (page - firstPage) % usablePage
		page += walPageSize - usablePage
	} else {
		page += 40
	}
	switch rest := walPageSize - page; {
	case rest >= 24 && w.oneIn(3): // up to the end of the page
		size = rest
	case rest >= 24 && w.oneIn(6): // over it, by as little as possible
		size = rest + 8*uint64(1+w.IntN(3))
	}
	r.end, r.inserted = pos+size, w.now
	p.branch.records = append(p.branch.records, r)
	return p.branch.len()
}

// flush makes the first n records of master p durable, which sends them.
func (w *world) flush(p *simServer, n int) { p.flushed = max(p.flushed, n) }

// write makes WAL without a transaction, which may stay unwritten for a while.
func (w *world) write(p *simServer) {
	n := 0
	for range 1 + w.IntN(3) {
		n = w.insert(p, &walRecord{visible: -1, author: p.id})
	}
	if w.oneIn(4) && p.branch.end(n)%usableSegment != 0 { // pg_switch_wal
		n = w.insert(p, &walRecord{visible: -1, author: p.id})
		r := p.branch.record(n - 1)
		r.end = (r.end + usableSegment - 1) / usableSegment * usableSegment
	}
	w.logf("server %d has written WAL up to record %d, %v", p.id, n, recPtr(p.branch.end(n)))
	w.flushLater(p, n, oneOf(w, 0, w.period/5, 3*w.period))
}

// flushLater flushes within d, unless the server has crashed by then.
func (w *world) flushLater(p *simServer, n int, d time.Duration) {
	b := p.branch
	w.after(w.upTo(d), func() {
		if p.branch == b && !p.down {
			w.flush(p, n)
		}
	})
}

// commit ends a transaction on master p: it is given its time, inserted, and then
// either flushed and made visible, or the other way round.
func (w *world) commit(p *simServer) {
	r := &walRecord{xact: true, stamp: w.clock(p), author: p.id, visible: -1}
	b, inaccuracy := p.branch, w.period/100
	alive := func() bool { return p.branch == b && !p.down }
	w.after(w.upTo(inaccuracy), func() {
		if !alive() {
			return
		}
		n := w.insert(p, r)
		w.logf("server %d has inserted commit %d, up to %v", p.id, n-1, recPtr(r.end))
		delay := w.upTo(inaccuracy)
		if w.oneIn(3) { // synchronous_commit = off
			w.flushLater(p, n, w.period/5)
		} else {
			w.after(delay/2, func() {
				if alive() {
					w.flush(p, n)
				}
			})
		}
		w.after(delay, func() {
			if !alive() {
				return
			}
			if r.visible < 0 {
				r.visible = w.now
			}
			if w.oneIn(3) {
				all := b.len()
				w.writes = append(w.writes, simWrite{b, n - 1, all, recPtr(b.end(all)), b.timeline})
			}
			if len(w.writes) > 6 {
				w.writes = w.writes[1:]
			}
		})
	})
}

// stream makes a standby receive and replay, in bursts, for ever.
func (w *world) stream(p *simServer) {
	w.after(w.upTo(w.period/2), func() {
		if !p.down && p.standby {
			w.receive(p)
			if w.now >= p.paused {
				w.replay(p, p.replayed+w.IntN(p.received-p.replayed+1)*oneOf(w, 0, 1, 1))
				if w.oneIn(2) {
					w.replay(p, p.received)
				}
			}
			if w.oneIn(40) {
				p.paused = w.now + w.upTo(6*w.period)
			}
		}
		w.stream(p)
	})
}

// receive has standby p receive from its upstream, and follow it to another
// history unless it has replayed past the point where that begins.
func (w *world) receive(p *simServer) {
	u := p.upstream
	p.receiving = false
	if u == nil || u.down || w.oneIn(20) {
		return
	}
	if u.branch != p.branch {
		shared := u.branch.common(p.branch)
		if shared < p.replayed {
			return
		}
		w.logf("server %d follows timeline %d of server %d", p.id, u.branch.timeline, u.id)
		p.branch, p.received = u.branch, min(p.received, shared)
	}
	p.receiving = true
	if n := u.sent(); n > p.received {
		p.received += 1 + w.IntN(n-p.received)
		if w.oneIn(2) {
			p.received = n
		}
	}
}

// replay has standby p replay its first n records.
func (w *world) replay(p *simServer, n int) {
	for ; p.replayed < n; p.replayed++ {
		if r := p.branch.record(p.replayed); r.xact {
			p.stamp, p.author = r.stamp, r.author
		}
	}
	if w.oneIn(30) { // a restartpoint
		p.control = max(p.control, p.branch.at(p.replayed))
	}
}

// startMisfortunes plans what happens to the servers.
func (w *world) startMisfortunes() {
	for range w.IntN(3) {
		do := oneOf(w, w.restartReplica, w.crashMaster, w.crashMaster, w.failOver, w.failOver, w.failOver, w.failOver)
		w.after(w.upTo(14*w.period), do)
	}
}

// someStandby returns a standby that is up, nil if there is none.
func (w *world) someStandby() *simServer {
	for _, i := range w.Perm(len(w.servers)) {
		if p := w.servers[i]; p.standby && !p.down {
			return p
		}
	}
	return nil
}

// lastMaster returns the master of the latest timeline, which may be down.
func (w *world) lastMaster() *simServer {
	var last *simServer
	for _, p := range w.servers {
		if !p.standby && (last == nil || p.branch.timeline >= last.branch.timeline) {
			last = p
		}
	}
	return last
}

func (w *world) restartReplica() {
	p := w.someStandby()
	if p == nil {
		return
	}
	w.logf("server %d restarts", p.id)
	p.down = true
	w.after(w.upTo(2*w.period), func() {
		if !p.standby {
			return
		}
		p.down, p.run, p.receiving = false, w.newRun(), false
		p.stamp, p.author = time.Time{}, -1
		if w.oneIn(2) { // it shows again what it had shown before
			p.replayed -= min(p.replayed-min(p.replayed, p.branch.fork), w.IntN(4))
			p.received = p.replayed
		}
		w.logf("server %d shows %d records", p.id, p.replayed)
	})
}

// crashMaster makes the master lose the WAL that it has not flushed. When only
// its processes crash, its postmaster stays.
func (w *world) crashMaster() {
	p := w.lastMaster()
	if p.down {
		return
	}
	w.logf("server %d crashes", p.id)
	w.seen["master crash"]++
	w.loseUnflushed(p)
	p.down = true
	same := w.oneIn(2)
	if same {
		w.seen["WAL reset in the same run"]++
	}
	w.after(w.upTo(3*w.period), func() {
		p.down = false
		if !same {
			p.run = w.newRun()
		}
		w.insert(p, &walRecord{visible: -1, author: p.id}) // a checkpoint
		w.flush(p, p.branch.len())
		w.startWriters(p)
	})
}

// loseUnflushed takes from master p what a crash does.
func (w *world) loseUnflushed(p *simServer) {
	old := p.branch
	p.branch = &walBranch{parent: old, fork: p.flushed, base: old.base, timeline: old.timeline}
	kept := w.writes[:0]
	for _, x := range w.writes {
		if x.branch != old || x.record < p.flushed {
			kept = append(kept, x)
		}
	}
	w.writes = kept
	w.setVisible(p)
}

// setVisible makes all that p has replayed or flushed visible, as it is when p is
// a master again.
func (w *world) setVisible(p *simServer) {
	for i := p.branch.len() - 1; i >= 0; i-- {
		if r := p.branch.record(i); r.xact && r.visible < 0 {
			r.visible = w.now
		}
	}
}

// failOver promotes a standby, when the master is down or while it still writes,
// and brings the other servers to it, some of them never.
func (w *world) failOver() {
	old := w.lastMaster()
	if dies := !w.oneIn(3); dies && !old.down {
		w.logf("server %d dies", old.id)
		w.loseUnflushed(old)
		old.down = true
	}
	w.after(w.upTo(2*w.period), func() {
		p := w.someStandby()
		if p == nil {
			return
		}
		w.promote(p, old)
	})
}

func (w *world) promote(p, old *simServer) {
	to := w.lastMaster().branch.timeline + 1
	if w.lastMaster() != old && w.oneIn(2) {
		to--
	}
	for _, q := range w.servers {
		w.twins = w.twins || q != p && q.branch.timeline == to
	}
	w.seen["promotion"]++
	p.branch = &walBranch{parent: p.branch, fork: p.replayed, base: p.branch.base, timeline: to}
	p.standby, p.receiving, p.received, p.upstream, p.control = false, false, p.replayed, nil, to
	w.setVisible(p)
	w.insert(p, &walRecord{visible: -1, author: p.id}) // the end of recovery
	p.flushed = p.branch.len()
	w.logf("server %d is promoted to timeline %d at %v", p.id, to, endPtr(p.branch.end(p.branch.fork)))
	w.startWriters(p)
	for _, q := range w.servers {
		if q != p && q.standby && !w.oneIn(3) {
			w.after(w.upTo(3*w.period), func() { q.upstream = p })
		}
	}
	switch w.IntN(3) {
	case 0: // the old master is rewound
		w.after(w.upTo(6*w.period), func() {
			if p.down || p.standby || old.standby || old == p {
				return
			}
			w.logf("server %d becomes a standby of server %d", old.id, p.id)
			old.down, old.standby, old.run, old.upstream = false, true, w.newRun(), p
			old.branch, old.received, old.replayed, old.control = p.branch, p.flushed, p.flushed, p.branch.timeline
			old.stamp, old.author, old.paused = time.Time{}, -1, 0
			w.stream(old)
		})
	case 1: // it comes back as it was
		w.after(w.upTo(6*w.period), func() {
			if old.down && !old.standby {
				w.logf("server %d is back", old.id)
				old.down, old.run = false, w.newRun()
				w.startWriters(old)
			}
		})
	}
}

// check checks host i, and plans the next check of its schedule. One that was
// asked for, and is still under way by then, takes the place of that.
func (w *world) check(i int, scheduled bool) {
	p, c, start := w.hosts[i], &w.checks[i], w.now
	if scheduled {
		w.after(w.period, func() { w.check(i, true) })
	}
	if c.busy {
		c.counts = c.counts || scheduled
		return
	}
	c.busy, c.wanted, c.counts = true, false, scheduled
	run, standby := p.run, p.standby
	o := observation{start: testBase.Add(start), postmasterStart: run, standby: standby}
	tr := truth{server: p, branch: p.branch, author: p.author}
	lost := p.down || w.oneIn(30)
	gone := func() bool {
		lost = lost || p.down || p.run != run || p.standby && !standby
		return lost
	}
	ended := func() {
		c.busy = false
		o.end = testBase.Add(w.now)
		switch {
		case !lost:
			w.truths[i] = tr
			c.late = c.counts && !scheduled
			w.table.observe(i, o)
			w.logf("host %d (server %d) is seen: %s", i, p.id, show(&w.table.view().hosts[i]))
			if m, ok := w.table.ahead(i, w.period); ok {
				w.seen["master asked at once"]++
				w.checks[m].wanted = true
				if !w.checks[m].busy {
					w.check(m, false)
				}
			}
		case c.counts && w.oneIn(4):
			w.logf("host %d is suspect", i)
			w.table.suspectHost(i)
		case c.counts:
			w.logf("host %d fails", i)
			w.table.fail(i)
		}
		w.judge()
		if c.wanted && w.table.view().hosts[i].responsive() {
			w.check(i, false)
		}
	}
	left := w.patience
	then := func(most time.Duration, do func()) {
		d := w.upTo(most)
		left -= d
		w.after(d, do)
	}
	moments := w.patience / 50
	then(w.patience/2, func() {
		if gone() {
			w.after(w.upTo(left), ended)
			return
		}
		w.readPosition(p, &o, &tr)
		then(moments, func() {
			if !gone() {
				w.readRest(p, &o, &tr)
			}
			then(moments, func() {
				if !gone() {
					o.clock, tr.at, tr.shown = w.clock(p), w.now, p.replayed
				}
				w.after(w.upTo(left), ended)
			})
		})
	})
}

// readPosition reads what is first in the row.
func (w *world) readPosition(p *simServer, o *observation, tr *truth) {
	if !o.standby {
		o.write = endPtr(p.branch.end(p.flushed))
		return
	}
	o.replay, tr.replayed = endPtr(p.branch.end(p.replayed)), p.replayed
	tr.branch, tr.timeline = p.branch, p.branch.at(p.replayed)
}

// readRest reads the rest of the row but the clock.
func (w *world) readRest(p *simServer, o *observation, tr *truth) {
	if p.sees != "nothing" {
		o.systemID = 7
	}
	if !o.standby {
		tr.branch, tr.replayed = p.branch, p.branch.len()
		o.insert, o.timeline = recPtr(p.branch.end(p.branch.len())), p.branch.timeline
		if o.insert.pageStart() > o.write {
			w.seen["unwritten WAL"]++
		}
		return
	}
	if p.sees != "nothing" {
		o.timeline = p.control
	}
	if p.sees == "all" && p.receiving {
		o.receiving = true
		o.timeline = max(o.timeline, p.branch.timeline)
	}
	o.receive = endPtr(p.branch.end(p.received))
	if p.standby {
		tr.branch = p.branch
	}
	o.lastReplay, tr.author = p.stamp, p.author
}

func (w *world) fail(format string, args ...any) {
	if w.wrong == "" {
		w.wrong = fmt.Sprintf("seed %d, %v after the start: ", w.seed, w.now) + fmt.Sprintf(format, args...)
	}
}

// judge compares the conclusions of the table with the truth:
//
//  1. A known lag_ms of a replica in the master's history is never smaller than
//     the age of what it showed when its server read the clock: 0 if it had
//     replayed every commit that was visible on the master by then, else the time
//     since the first missing one became visible.
//  2. Of a replica that had replayed all that the master's last check saw it is
//     not larger than the period and a check, or two where one that was asked for
//     took the place of the schedule's.
//  3. Only what is not in the master's history is held to have diverged, and
//     then, or when it is known to be on another timeline, its positions count for
//     nothing.
//  4. A replica that meets min_lsn, with the timeline, or of the master's history
//     without it, has replayed the write. One that has replayed all that was
//     inserted with the write, and is known to be on its timeline, meets it.
func (w *world) judge() {
	v := w.table.view()
	if v.master >= 0 {
		tr := w.truths[v.master]
		w.ref = &tr
		w.masters[tr.server.id] = true
	} else {
		w.seen["no master"]++
	}
	if v.split {
		w.seen["split brain"]++
	}
	if w.ref == nil {
		return
	}
	for i := range v.hosts {
		if s := &v.hosts[i]; s.liveReplica() {
			w.judgeLag(v, i, s, &w.truths[i])
			w.judgePosition(v, i, s, &w.truths[i])
		}
	}
}

// age returns how old the data was that a replica showed, and whether it is of
// the master's history at all.
func (w *world) age(tr *truth) (age time.Duration, ours bool) {
	if w.ref.branch.common(tr.branch) < tr.shown {
		return 0, false
	}
	first := tr.at
	for n := tr.shown; n < w.ref.branch.len(); n++ {
		r := w.ref.branch.record(n)
		if r.inserted > tr.at {
			break
		}
		if r.xact && r.visible >= 0 {
			first = min(first, r.visible)
		}
	}
	return tr.at - first, true
}

func (w *world) judgeLag(v *view, i int, s *hostState, tr *truth) {
	age, ours := w.age(tr)
	if !ours {
		return
	}
	switch {
	case age > w.period:
		w.seen["missing more than a period"]++
		fallthrough
	case age > 0:
		w.seen["stale"]++
	default:
		w.seen["fresh"]++
	}
	if !s.lagMS.known {
		w.seen["lag unknown"]++
	} else if !s.lastReplay.IsZero() {
		author := w.servers[tr.author]
		commitAge := s.clock.Sub(s.lastReplay) + author.offset - tr.server.offset
		if author != w.ref.server {
			w.seen["clocks of two masters"]++
		}
		if s.lagMS.n < uint64(commitAge.Milliseconds()) {
			w.seen["bounded below the commit age"]++
		}
		// Of a clock that was never seen nothing can be known.
		if !w.masters[author.id] && author.offset > w.ref.server.offset {
			return
		}
	}
	if s.lagMS.known && s.lagMS.n < uint64(age.Milliseconds()) {
		w.fail("lag_ms of host %d = %v; true age is %v (%s; master %s)", i, s.lagMS, age, show(s), show(&hostState{observation: v.ref}))
	}
	if v.masterResponsive() && !s.timeline.differs(v.ref.timeline) && tr.replayed == w.ref.replayed {
		w.seen["idle"]++
		if s.replay != v.ref.insert {
			w.seen["idle at a page header"]++
		}
		most := (w.period + w.patience).Milliseconds()
		if w.checks[v.master].late {
			most = (w.period + 2*w.patience).Milliseconds()
		}
		if !s.lagMS.known || s.lagMS.n > uint64(most) {
			w.fail("lag_ms of host %d, which has replayed everything, = %v; want at most %d (%s; master %s)", i, s.lagMS, most, show(s), show(&hostState{observation: v.ref}))
		}
	}
}

func (w *world) judgePosition(v *view, i int, s *hostState, tr *truth) {
	ours := w.ref.branch.common(tr.branch) >= tr.replayed
	if s.diverged {
		w.seen["diverged"]++
		if ours {
			w.fail("host %d is held to have diverged, %s; master %s", i, show(s), show(&hostState{observation: v.ref}))
		}
	}
	switch differs := s.timeline.differs(v.ref.timeline); {
	case ours && differs:
		w.seen["unaware"]++
	case differs:
		w.seen["stranded, known"]++
	case !ours:
		w.seen["stranded, unknown"]++
	}
	if s.diverged || s.timeline.differs(v.ref.timeline) {
		for _, f := range []filter{
			{hasMinLSN: true},
			{hasMinLSN: true, minLSN: s.replay},
			{hasMinLSN: true, timeline: v.ref.timeline},
			{lagBytes: limit{true, 1 << 62}},
		} {
			if v.mismatch(s, &f) == 0 {
				w.fail("host %d, on another history, meets %+v: %s; master %s", i, f, show(s), show(&hostState{observation: v.ref}))
			}
		}
	}
	for _, x := range w.writes {
		w.judgeWrite(v, i, s, tr, x)
	}
}

func (w *world) judgeWrite(v *view, i int, s *hostState, tr *truth, x simWrite) {
	alone := filter{hasMinLSN: true, minLSN: x.minLSN}
	with := filter{hasMinLSN: true, minLSN: x.minLSN, timeline: x.timeline}
	if v.split {
		if v.mismatch(s, &alone) == 0 || v.mismatch(s, &with) == 0 {
			w.fail("host %d meets %+v in a split brain", i, with)
		}
		return
	}
	shared := x.branch.common(tr.branch)
	has := min(shared, tr.replayed) > x.record
	hasAll := min(shared, tr.replayed) >= x.inserted
	// A number that stands for two histories is not an identity, and one that the
	// server did not tell yet is no knowledge.
	known := s.timeline >= tr.timeline && !w.twins
	switch {
	case v.mismatch(s, &with) != 0:
		w.seen["min_lsn not met"]++
	case known:
		w.seen["min_lsn met"]++
		if !has {
			w.fail("host %d meets %+v without the write: %s", i, with, show(s))
		}
		if s.replay < x.minLSN {
			w.seen["min_lsn at a page header"]++
		}
	}
	ours := w.ref.branch.common(tr.branch) >= tr.replayed
	inMaster := v.master >= 0 && w.ref.branch.common(x.branch) > x.record
	if (known || ours) && inMaster && v.mismatch(s, &alone) == 0 && !has {
		w.fail("host %d meets %+v without the write: %s", i, alone, show(s))
	}
	if known && hasAll && !s.suspect && v.master >= 0 && s.timeline == x.timeline && x.timeline == v.ref.timeline {
		if m := v.mismatch(s, &with); m != 0 {
			w.fail("host %d does not meet %+v, for its %s, with all of the WAL: %s", i, with, m.words(), show(s))
		}
	}
}
