package e2e

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
)

// A soak is a cluster of four to which one fault after the other happens, while
// clients write to the host that /master names and read, where /replica sends
// them, what they have written.
//
// Timelines are numbered without gaps, as only a server that follows the newest
// primary is ever promoted.
type soak struct {
	*testing.T
	c       *cluster
	d       *daemon
	paths   []*proxy  // from the daemon to each node
	pools   []*sql.DB // of the clients, one for each node
	primary int       // the node that was promoted last
	follows []int     // of each node, the newest timeline that it has followed

	failovers int
	switched  int           // how many of them a new WAL segment has followed
	slowest   time.Duration // from a promotion to the first /master that names the new master

	writes, reads, fromReplica, unserved, failed atomic.Int64
	master                                       atomic.Value // the host that /master named last

	mu    sync.Mutex     // guards the following
	term  []int          // of each node, the timeline that it was promoted to last
	floor int            // the highest term that /master has named
	ends  map[int]uint64 // of each timeline that was left, its last position
	acked []write
	lacks []lack
}

// A write is a row whose transaction has been acknowledged.
type write struct {
	id       string
	lsn      uint64 // the position that the client read afterwards
	timeline int
}

// A lack is a host that a client was sent to, and that has no row of a write.
type lack struct {
	write
	path, host, state string
	at                time.Time
}

// TestSoak runs for SOAK_TIME, by default for a minute, its beginning and end
// included, or what the last fault takes longer. SOAK_SEED repeats the
// schedule of faults of an earlier run.
func TestSoak(t *testing.T) {
	long, err := time.ParseDuration(cmpOr(os.Getenv("SOAK_TIME"), "50s"))
	if err != nil {
		t.Fatal(err)
	}
	seed, err := strconv.ParseUint(cmpOr(os.Getenv("SOAK_SEED"), strconv.Itoa(rand.IntN(1e6))), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("SOAK_TIME=%v SOAK_SEED=%d", long, seed)

	s := newSoak(t)
	idle := s.idleFDs()
	clients := s.startClients(seed)
	random := rand.New(rand.NewPCG(seed, 0))
	var deck []fault
	start := time.Now()
	early, latest := 0, 0 // kB
	for n := 1; time.Since(start) < long; n++ {
		if len(deck) == 0 {
			deck = slices.Clone(faults)
			random.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		f := deck[0]
		deck = deck[1:]
		dice := newDice(random)
		t.Logf("%6.1fs fault %d: %s, %v", time.Since(start).Seconds(), n, f.name, dice)
		f.happen(s, dice)
		s.heal()
		if latest = s.d.kB("VmRSS"); early == 0 && time.Since(start) > long/4 {
			early = latest
		}
	}
	clients.stop()
	s.judge()

	t.Logf("%d writes; %d reads, %.1f%% of them from a replica; %d had no host, %d found theirs down; %d failovers, the slowest seen after %v",
		s.writes.Load(), s.reads.Load(), percent(s.fromReplica.Load(), s.reads.Load()), s.unserved.Load(), s.failed.Load(), s.failovers, s.slowest)
	if seconds := int64(long / time.Second); s.reads.Load() < 10*seconds || s.fromReplica.Load() < seconds {
		t.Errorf("%d reads, %d of them from a replica; want more in %v", s.reads.Load(), s.fromReplica.Load(), long)
	}
	t.Logf("VmRSS %d kB early on, %d kB at the end", early, latest)
	if latest > early+8<<10 {
		t.Errorf("VmRSS has grown from %d to %d kB", early, latest)
	}
	until(t, func() error {
		if now := s.idleFDs(); now > idle {
			return fmt.Errorf("%d file descriptors are open; there were %d before", now, idle)
		}
		return nil
	})
	fresh := startDaemon(t, s.d.env...)
	fresh.settled(s.c, s.primary)
	// A host has one more or less while it is being checked.
	if old, young := s.d.goroutines(), fresh.goroutines(); old > young+2*len(s.c.nodes) {
		t.Errorf("%d goroutines run; a new process has %d", old, young)
	} else {
		t.Logf("%d goroutines, and %d in a new process", old, young)
	}
}

func cmpOr(value, otherwise string) string {
	if value == "" {
		return otherwise
	}
	return value
}

func newSoak(t *testing.T) *soak {
	t.Helper()
	c := newCluster(t, 3, withRewind(), withConf("wal_keep_size = 128MB"))
	c.exec(0, "CREATE TABLE t (id text PRIMARY KEY)")
	s := &soak{T: t, c: c, follows: []int{1, 1, 1, 1}, term: []int{1, 0, 0, 0}, floor: 1, ends: map[int]uint64{}}
	var addrs []string
	for i, n := range c.nodes {
		p := c.proxy(i)
		s.paths, addrs = append(s.paths, p), append(addrs, p.addr())
		connector, err := pq.NewConnector(n.conninfo("client") + " sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		connector.Dialer(impatient{})
		pool := sql.OpenDB(connector)
		pool.SetMaxIdleConns(8)
		t.Cleanup(func() { pool.Close() })
		s.pools = append(s.pools, pool)
	}
	s.d = startDaemon(t, append(envFor(addrs...), "pg_status__master_selection=timeline",
		"pg_status__sleep_ms=200", "pg_status__query_timeout_ms=300")...)
	s.master.Store("")
	s.settled()
	return s
}

// settled waits until the daemon sees all nodes in their places.
func (s *soak) settled() {
	s.Helper()
	s.d.settled(s.c, s.primary)
}

func (s *soak) idleFDs() int {
	s.d.client.CloseIdleConnections()
	return s.d.fds()
}

// goroutines ends the process by SIGQUIT, for which Go shows all goroutines, and
// returns how many they are.
func (d *daemon) goroutines() int {
	d.t.Helper()
	d.client.CloseIdleConnections()
	d.signal(syscall.SIGQUIT)
	d.exitCode()
	d.cmd.ProcessState = nil // as if killed, for cleanUp
	_, trace, ok := strings.Cut(d.stderr.finish(), "SIGQUIT: quit")
	if !ok {
		d.t.Error("no goroutines are shown at SIGQUIT")
	}
	return len(regexp.MustCompile(`(?m)^goroutine \d+ `).FindAllString(trace, -1))
}

// impatient dials connections on which nothing takes longer than a second: the
// peer may be frozen.
type impatient struct{}

type impatientConn struct{ net.Conn }

func (impatient) Dial(network, address string) (net.Conn, error) {
	return impatient{}.DialTimeout(network, address, time.Second)
}

func (impatient) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, min(timeout, time.Second))
	return impatientConn{conn}, err
}

func (c impatientConn) Read(p []byte) (int, error) {
	c.SetReadDeadline(time.Now().Add(time.Second))
	return c.Conn.Read(p)
}

func (c impatientConn) Write(p []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(time.Second))
	return c.Conn.Write(p)
}

// background is goroutines that stop ends.
type background struct {
	sync.WaitGroup
	cancel context.CancelFunc
}

func (b *background) stop() {
	b.cancel()
	b.Wait()
}

const (
	soakClients  = 4
	soakReads    = 3 // of each client, after each write
	soakMemory   = 64
	soakInterval = 20 * time.Millisecond
)

// startClients starts them, and one that looks at /master all the time.
func (s *soak) startClients(seed uint64) *background {
	ctx, cancel := context.WithCancel(context.Background())
	b := &background{cancel: cancel}
	s.Cleanup(b.stop)
	b.Go(func() {
		for ctx.Err() == nil {
			s.askMaster("/master")
			time.Sleep(2 * time.Millisecond)
		}
	})
	for name := range soakClients {
		b.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(name)+1))
			var recent []write
			for n := 0; ctx.Err() == nil; n++ {
				if w, ok := s.write(ctx, fmt.Sprintf("%d-%d", name, n)); ok {
					recent = append(recent, w)
				}
				recent = recent[max(0, len(recent)-soakMemory):]
				for i := range min(soakReads, len(recent)) {
					at := len(recent) - 1 // the newest first, then any
					if i > 0 {
						at = random.IntN(len(recent))
					}
					s.read(ctx, recent[at], random.IntN(100))
				}
				time.Sleep(soakInterval)
			}
		})
	}
	return b
}

// node returns the node whose name is host.
func (s *soak) node(host string) int {
	return slices.IndexFunc(s.c.nodes, func(n *node) bool { return n.ip == host })
}

// askMaster returns the node that /master names, -1 if none. It must not have
// been deposed by one that was named before.
func (s *soak) askMaster(path string) int {
	s.mu.Lock()
	floor := s.floor
	s.mu.Unlock()
	status, host, _, err := s.d.try("GET", path, "")
	if err != nil {
		s.Errorf("%s: %v", path, err)
		time.Sleep(soakInterval)
		return -1
	}
	s.master.Store(host)
	i := s.node(host)
	if i < 0 {
		if status != 404 || host != "" {
			s.Errorf("%s = %d %q; want a host or 404", path, status, host)
		}
		return -1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term[i] < floor {
		s.Errorf("%s = %s, which was promoted to timeline %d, when the master of timeline %d had been named already", path, host, s.term[i], floor)
	}
	s.floor = max(s.floor, s.term[i])
	return i
}

// write inserts a row at the master and reads the position to ask for.
func (s *soak) write(ctx context.Context, id string) (w write, ok bool) {
	i := s.askMaster("/master?wait_ms=1000")
	if i < 0 {
		return w, false
	}
	conn, err := s.pools[i].Conn(ctx)
	if err != nil {
		return w, false
	}
	defer conn.Close()
	// Of one session, so of one server that has not been replaced between.
	if _, err := conn.ExecContext(context.Background(), "INSERT INTO t VALUES ($1)", id); err != nil {
		return w, false
	}
	var lsn string
	if err := conn.QueryRowContext(context.Background(), writePosition).Scan(&lsn, &w.timeline); err != nil {
		return w, false
	}
	w.id, w.lsn = id, parsePosition(lsn)
	s.writes.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acked = append(s.acked, w)
	return w, true
}

// parsePosition returns an LSN as a number.
func parsePosition(lsn string) uint64 {
	var hi, lo uint64
	if _, err := fmt.Sscanf(lsn, "%X/%X", &hi, &lo); err != nil {
		panic(err)
	}
	return hi<<32 | lo
}

// read asks where to read w, in one of several ways, and looks for its row.
func (s *soak) read(ctx context.Context, w write, way int) {
	path := "/replica"
	switch {
	case way < 10:
		path = "/most_sync_by_bytes"
	case way < 20:
		path = "/sync_by_time_or_bytes"
	}
	path += fmt.Sprintf("?min_lsn=%X/%X&timeline=%d", w.lsn>>32, uint32(w.lsn), w.timeline)
	if way%3 > 0 {
		path += "&wait_ms=50"
	}
	status, host, _, err := s.d.try("GET", path, "")
	i := s.node(host)
	switch {
	case ctx.Err() != nil:
		return
	case err == nil && status == 404:
		s.unserved.Add(1)
		return
	case err != nil || status != 200 || i < 0:
		s.Errorf("%s = %d %q, %v; want a host or 404", path, status, host, err)
		return
	}
	var found bool
	var state string
	err = s.pools[i].QueryRowContext(ctx, `SELECT EXISTS (SELECT FROM t WHERE id = $1),
		concat_ws(' ', CASE WHEN pg_is_in_recovery() THEN 'standby at ' || pg_last_wal_replay_lsn() ELSE 'primary at ' || pg_current_wal_lsn() END,
			'up since', pg_postmaster_start_time())`, w.id).Scan(&found, &state)
	if err != nil {
		s.failed.Add(1)
		return
	}
	s.reads.Add(1)
	if host != s.master.Load() {
		s.fromReplica.Add(1)
	}
	if !found {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.lacks = append(s.lacks, lack{w, path, host, state, time.Now()})
	}
}

// lost reports whether w was lost by a failover: on a timeline that was left
// before its position. The caller holds mu.
func (s *soak) lost(w write) bool {
	end, ended := s.ends[w.timeline]
	return ended && pageStart(w.lsn) > end
}

// pageStart moves a position behind a page's header to the page's start, which
// is where a timeline ends that ends there.
func pageStart(lsn uint64) uint64 {
	switch {
	case lsn%8192 == 24:
		return lsn - 24
	case lsn%(16<<20) == 40:
		return lsn - 40
	}
	return lsn
}

// judge tells the rows that hosts lacked and should have had from those that
// failovers have lost, and checks that by what is left at the end.
func (s *soak) judge() {
	s.mu.Lock()
	defer s.mu.Unlock()
	stale, lostReads := 0, 0
	for _, l := range s.lacks {
		if s.lost(l.write) {
			lostReads++
			continue
		}
		stale++
		s.Errorf("STALE: %s = %s at %s, a %s, which has no row %s", l.path, l.host, l.at.UTC().Format("15:04:05.000"), l.state, l.id)
	}
	left := map[string]bool{}
	for id := range strings.Lines(s.c.query(s.primary, "SELECT id FROM t")) {
		left[strings.TrimSpace(id)] = true
	}
	lost, gone := 0, 0
	for _, w := range s.acked {
		switch {
		case s.lost(w) && !left[w.id]:
			gone++
			lost++
		case s.lost(w):
			lost++
		case !left[w.id]:
			s.Errorf("row %s of timeline %d at %X is gone; timelines ended at %X", w.id, w.timeline, w.lsn, s.ends)
		}
	}
	s.Logf("%d stale reads; %d of rows that a failover had lost; %d acknowledged writes ended beyond their timeline, %d of them are gone",
		stale, lostReads, lost, gone)
}

// dice are what chance decides about a fault: always as many numbers, so that
// the schedule depends on the seed alone.
type dice struct {
	victim, next int // which replica; reduced to how many there are
	way          int
	coin         bool
	short, long  time.Duration // some 100 ms, some 1000 ms
}

func newDice(random *rand.Rand) dice {
	return dice{
		victim: random.IntN(6),
		next:   random.IntN(6),
		way:    random.IntN(3),
		coin:   random.IntN(2) == 0,
		short:  time.Duration(20+random.IntN(400)) * time.Millisecond,
		long:   time.Duration(100+random.IntN(1400)) * time.Millisecond,
	}
}

func (d dice) String() string {
	return fmt.Sprintf("victim %d, next %d, way %d, coin %t, %v, %v", d.victim, d.next, d.way, d.coin, d.short, d.long)
}

// A fault is something that happens to the cluster. heal undoes what is left.
type fault struct {
	name   string
	happen func(*soak, dice)
}

var faults = []fault{
	{"a replica goes down", func(s *soak, d dice) {
		i := s.replica(d.victim)
		s.down(i, d.way)
		time.Sleep(d.long)
		s.c.start(i)
	}},
	{"a replica freezes", func(s *soak, d dice) {
		i := s.replica(d.victim)
		s.c.freeze(i)
		time.Sleep(d.long)
		s.c.thaw(i)
	}},
	{"a replica stops to replay", func(s *soak, d dice) {
		i := s.replica(d.victim)
		s.c.pauseReplay(i)
		time.Sleep(d.long)
		s.c.resumeReplay(i)
	}},
	{"a replica loses its upstream", func(s *soak, d dice) {
		i := s.replica(d.victim)
		s.c.repointNowhere(i)
		time.Sleep(d.long)
	}},
	{"a path is disturbed", func(s *soak, d dice) {
		p := s.paths[d.victim%len(s.paths)]
		switch d.way {
		case 0:
			p.cut()
		case 1:
			p.stall()
		case 2:
			p.delay(d.short / 4)
		}
		time.Sleep(d.long)
		p.resume()
	}},
	{"all paths are cut", func(s *soak, d dice) {
		for _, p := range s.paths {
			p.cut()
		}
		time.Sleep(d.long)
		for _, p := range s.paths {
			p.resume()
		}
	}},
	{"the primary restarts", func(s *soak, d dice) {
		s.down(s.primary, d.way)
		time.Sleep(d.short)
		s.c.start(s.primary)
	}},
	{"the primary goes down, and a replica takes over", func(s *soak, d dice) {
		s.down(s.primary, d.way)
		time.Sleep(d.long)
		s.promote(s.replica(d.next))
	}},
	{"the primary crashes, and a replica takes over that is behind", func(s *soak, d dice) {
		next := s.replica(d.next)
		s.c.repointNowhere(next)
		time.Sleep(d.short)
		s.getAhead(s.primary)
		s.down(s.primary, 2)
		s.promote(next)
		time.Sleep(d.short)
	}},
	{"the primary freezes, a replica takes over, and the primary goes on", func(s *soak, d dice) {
		old := s.primary
		s.c.freeze(old)
		time.Sleep(d.long)
		s.promote(s.replica(d.next))
		time.Sleep(d.short)
		s.c.thaw(old)
		time.Sleep(d.long)
	}},
	{"a replica takes over while the primary is well but cannot be reached", func(s *soak, d dice) {
		path := s.paths[s.primary]
		if d.coin {
			path.cut()
		} else {
			path.stall()
		}
		time.Sleep(d.long)
		old := s.primary
		s.promote(s.replica(d.next))
		s.getAhead(old)
		time.Sleep(d.short)
		path.resume()
		time.Sleep(d.long)
	}},
	{"a deposed primary comes back", func(s *soak, d dice) {
		s.deposedReturns(d)
	}},
	{"a deposed primary comes back, and its successor goes down", func(s *soak, d dice) {
		old := s.deposedReturns(d)
		s.follow(old)
		s.down(s.primary, 2)
		time.Sleep(d.long) // only the deposed one is a live master
		s.promote(s.replica(d.victim, old))
		time.Sleep(d.short)
	}},
}

// deposedReturns has the primary go down, a replica take over, and the primary
// come back as it was.
func (s *soak) deposedReturns(d dice) (old int) {
	s.Helper()
	old = s.primary
	s.down(old, d.way)
	time.Sleep(d.short)
	s.promote(s.replica(d.next))
	s.c.start(old)
	time.Sleep(d.long)
	return old
}

// getAhead has the primary i write, and all that follow it replay, more than
// another one writes in some seconds: positions of theirs are then beyond those
// of writes that they do not have.
func (s *soak) getAhead(i int) {
	s.Helper()
	s.c.exec(i, "SELECT pg_logical_emit_message(true, 'e2e', repeat('x', 1000000))")
	for j, n := range s.c.nodes {
		if n.source == i {
			s.c.waitReplayed(j)
		}
	}
}

// replica returns one of the nodes that follow the primary, which are all but
// that and those that are left out.
func (s *soak) replica(n int, without ...int) int {
	var nodes []int
	for i := range s.c.nodes {
		if i != s.primary && !slices.Contains(without, i) {
			nodes = append(nodes, i)
		}
	}
	return nodes[n%len(nodes)]
}

// down stops node i in one of three ways.
func (s *soak) down(i, way int) {
	s.Helper()
	switch way {
	case 0:
		s.c.stop(i, fast)
	case 1:
		s.c.stop(i, immediate)
	default:
		s.c.kill9(i)
	}
}

// promote makes next the primary, which /master must then name, and learns where
// the timeline before has ended.
func (s *soak) promote(next int) {
	s.Helper()
	s.mu.Lock()
	timeline := slices.Max(s.term) + 1
	s.term[next] = timeline
	s.mu.Unlock()
	left, named := s.c.watchRecovery(next), s.d.watchMaster(s.c.name(next))
	s.c.promote(next)
	s.primary, s.follows[next] = next, timeline

	history := s.c.query(next, fmt.Sprintf("SELECT pg_read_file('pg_wal/%08X.history')", timeline))
	fields := strings.Fields(history[strings.LastIndex(strings.TrimSpace(history), "\n")+1:])
	if len(fields) < 2 || fields[0] != strconv.Itoa(timeline-1) {
		s.Fatalf("the history of timeline %d is %q; want timeline %d last", timeline, history, timeline-1)
	}
	s.mu.Lock()
	s.ends[timeline-1] = parsePosition(fields[1])
	s.mu.Unlock()

	delay := (<-named).Sub(<-left)
	s.failovers++
	s.slowest = max(s.slowest, delay)
	s.Logf("        node %d is the primary of timeline %d, from %s, seen after %v", next, timeline, fields[1], delay)
}

// heal makes every node well, and a replica of the primary, and waits until the
// daemon says so.
func (s *soak) heal() {
	s.Helper()
	s.follow()
	if s.switched < s.failovers {
		// So that servers need not keep one segment once for every timeline.
		s.c.exec(s.primary, "SELECT pg_switch_wal()")
		s.switched = s.failovers
	}
	s.settled()
}

// follow has all nodes follow the primary, but those that are left out. A node
// that has WAL which is not in the primary's history is rewound.
func (s *soak) follow(without ...int) {
	s.Helper()
	s.mu.Lock()
	timeline := s.term[s.primary]
	s.mu.Unlock()
	for i := range s.c.nodes {
		if i == s.primary || slices.Contains(without, i) {
			continue
		}
		if s.streams(i, timeline) == nil {
			continue
		}
		if s.diverged(i, timeline) {
			s.Logf("        node %d is rewound", i)
			if s.c.nodes[i].running() {
				s.c.stop(i, fast)
			}
			s.c.rejoin(i, s.primary)
		} else {
			s.c.repoint(i, s.primary)
		}
		until(s.T, func() error { return s.streams(i, timeline) })
		s.follows[i] = timeline
	}
}

// streams returns nil if node i streams from the primary and has replayed some of
// its timeline. One that has only begun to stream, from the start of a segment,
// must not be promoted: PostgreSQL may then find its own WAL to be all zeros.
func (s *soak) streams(i, timeline int) error {
	if !s.c.nodes[i].running() {
		return fmt.Errorf("node %d is down", i)
	}
	if s.c.nodes[i].source != s.primary {
		return fmt.Errorf("node %d follows node %d; want %d", i, s.c.nodes[i].source, s.primary)
	}
	s.mu.Lock()
	begin := s.ends[timeline-1]
	s.mu.Unlock()
	got, err := queryText(context.Background(), s.c.db(i), fmt.Sprintf(
		"SELECT pg_is_in_recovery(), received_tli, status, pg_last_wal_replay_lsn() > '%X/%X' FROM pg_stat_wal_receiver", begin>>32, uint32(begin)))
	if want := fmt.Sprintf("true|%d|streaming|true", timeline); err != nil || got != want {
		return errors.Join(err, fmt.Errorf("node %d is %q; want it %s", i, got, want))
	}
	return nil
}

// diverged reports whether node i has WAL that is not in the primary's history,
// or never was a standby of it.
func (s *soak) diverged(i, timeline int) bool {
	s.Helper()
	if !s.c.nodes[i].running() {
		return true
	}
	standby, at, _ := strings.Cut(s.c.query(i, `SELECT pg_is_in_recovery(), CASE WHEN pg_is_in_recovery()
		THEN greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) END`), "|")
	if standby == "false" || s.follows[i] == timeline {
		return standby == "false"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return parsePosition(at) > s.ends[s.follows[i]]
}
