package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
)

// monStep is one check, as the monitor records it, and what is logged for it.
type monStep struct {
	name  string
	host  int
	saw   any // an observation, or an error
	kind  checkKind
	after time.Duration // before this step
	want  []string
}

// monSteps takes a monitor of hosts a, b, c… through steps.
func monSteps(t *testing.T, level slog.Level, c *config, steps []monStep) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		log := new(monLog)
		m := newMonitor(c, log.logger(level), make([]prober, len(c.hosts)))
		for _, s := range steps {
			time.Sleep(s.after)
			o, ok := s.saw.(observation)
			if ok {
				o.start, o.end, o.clock = time.Now(), time.Now(), time.Now()
				if age := o.lastReplay; o.standby && age.IsZero() {
					o.lastReplay = o.clock
				}
			}
			err, _ := s.saw.(error)
			m.watchers[s.host].record(o, err, s.kind)
			monWantLog(t, s.name, log.take(), s.want...)
		}
	})
}

// monBehind is monReplica n bytes of WAL behind monMaster, with its last commit that
// old.
func monBehind(n lsn, age time.Duration) observation {
	o := monReplica
	o.receive -= n
	o.replay -= n
	if age > 0 {
		// The clock of a bubble starts at this moment.
		o.lastReplay = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Add(-age)
	}
	return o
}

// monOther is o with something changed.
func monOther(o observation, edit func(*observation)) observation {
	edit(&o)
	return o
}

var (
	errMonRefused = &checkError{op: "connect", err: &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}}
	errMonTimeout = &checkError{op: "query", err: os.ErrDeadlineExceeded}
)

const (
	monLogRefused = "PostgreSQL operation failed operation=connect host=a error=dial tcp: connect: connection refused (errno=111)"
	monLogTimeout = "PostgreSQL poll timed out host=a timeout_ms=1000 operation=query"
)

func TestHostRecords(t *testing.T) {
	monSteps(t, slog.LevelInfo, monConfig(2), []monStep{
		{name: "first answer of a master", host: 0, saw: monMaster, want: []string{
			"INFO monitor: host state changed host=a state=alive role=master"}},
		{name: "first answer of a replica", host: 1, saw: monBehind(0, 0), want: []string{
			"INFO monitor: host state changed host=b state=alive role=replica",
			"INFO monitor: replica synchronization changed host=b dimension=time synchronous=true lag_ms=0 threshold_ms=1000",
			"INFO monitor: replica synchronization changed host=b dimension=bytes synchronous=true lag_bytes=0 threshold_bytes=1000000"}},
		{name: "the same again", host: 1, saw: monBehind(0, 0)},
		{name: "a replica that falls behind in bytes", host: 1, saw: monBehind(1_000_001, 0), want: []string{
			"INFO monitor: replica synchronization changed host=b dimension=bytes synchronous=false lag_bytes=1000001 threshold_bytes=1000000"}},
		{name: "at the threshold", host: 1, saw: monBehind(1_000_000, 0), want: []string{
			"INFO monitor: replica synchronization changed host=b dimension=bytes synchronous=true lag_bytes=1000000 threshold_bytes=1000000"}},
		{name: "and in time", host: 1, saw: monBehind(8, 1001*time.Millisecond), want: []string{
			"INFO monitor: replica synchronization changed host=b dimension=time synchronous=false lag_ms=1001 threshold_ms=1000"}},
		{name: "first failure", host: 0, saw: errMonRefused, want: []string{
			"ERROR monitor: " + monLogRefused,
			"WARNING monitor: host state changed host=a state=possible_dead"}},
		{name: "second failure", host: 0, saw: errMonRefused},
		{name: "third failure", host: 0, saw: errMonRefused, want: []string{
			"WARNING monitor: host state changed host=a state=dead"}},
		{name: "fourth failure", host: 0, saw: errMonRefused},
		{name: "recovery as a replica", host: 0, saw: monBehind(0, 0), want: []string{
			"INFO monitor: host state changed host=a state=alive role=replica",
			"INFO monitor: replica synchronization changed host=a dimension=time synchronous=true lag_ms=0 threshold_ms=1000",
			"INFO monitor: replica synchronization changed host=a dimension=bytes synchronous=true lag_bytes=0 threshold_bytes=1000000"}},
		{name: "a failure that passes", host: 1, saw: errMonTimeout, want: []string{
			"ERROR monitor: PostgreSQL poll timed out host=b timeout_ms=1000 operation=query",
			"WARNING monitor: host state changed host=b state=possible_dead"}},
		{name: "its end", host: 1, saw: monBehind(8, 1001*time.Millisecond), want: []string{
			"INFO monitor: host state changed host=b state=alive role=replica"}},
		{name: "promotion", host: 1, saw: monMaster, want: []string{
			"INFO monitor: host role changed host=b role=master"}},
	})
}

// A replica that comes back behind the thresholds is reported as that.
func TestLaggingHostRecords(t *testing.T) {
	behind := monBehind(2_000_000, time.Hour)
	back := []string{
		"INFO monitor: host state changed host=b state=alive role=replica",
		"INFO monitor: replica synchronization changed host=b dimension=time synchronous=false lag_ms=3600000 threshold_ms=1000",
		"INFO monitor: replica synchronization changed host=b dimension=bytes synchronous=false lag_bytes=2000000 threshold_bytes=1000000"}
	monSteps(t, slog.LevelInfo, monConfig(2, func(c *config) { c.maxFails = 1 }), []monStep{
		{name: "master", host: 0, saw: monMaster, want: []string{"INFO monitor: host state changed host=a state=alive role=master"}},
		{name: "first answer", host: 1, saw: behind, want: back},
		{name: "failure", host: 1, saw: errMonTimeout, want: []string{
			"ERROR monitor: PostgreSQL poll timed out host=b timeout_ms=1000 operation=query",
			"WARNING monitor: host state changed host=b state=dead"}},
		{name: "recovery", host: 1, saw: behind, want: back},
	})
}

func TestNeverAnsweringHost(t *testing.T) {
	steps := []monStep{
		{name: "first failure", saw: errMonRefused, want: []string{"ERROR monitor: " + monLogRefused}},
		{name: "second failure", saw: errMonRefused},
		{name: "third failure", saw: errMonRefused, want: []string{"WARNING monitor: host state changed host=a state=dead"}},
	}
	for range 10 {
		steps = append(steps, monStep{name: "later failure", saw: errMonRefused})
	}
	monSteps(t, slog.LevelInfo, monConfig(1), steps)
}

func TestOneFailureIsDeath(t *testing.T) {
	monSteps(t, slog.LevelInfo, monConfig(1, func(c *config) { c.maxFails = 1 }), []monStep{
		{name: "first answer", saw: monMaster, want: []string{"INFO monitor: host state changed host=a state=alive role=master"}},
		{name: "failure", saw: errMonTimeout, want: []string{
			"ERROR monitor: " + monLogTimeout,
			"WARNING monitor: host state changed host=a state=dead"}},
		{name: "answer", saw: monMaster, want: []string{"INFO monitor: host state changed host=a state=alive role=master"}},
	})
}

func TestHangUpRecords(t *testing.T) {
	monSteps(t, slog.LevelInfo, monConfig(1), []monStep{
		{name: "first answer", saw: monMaster, want: []string{"INFO monitor: host state changed host=a state=alive role=master"}},
		{name: "answer after a hang-up", saw: monMaster, kind: onHangUp},
		{name: "failure on demand", saw: errMonRefused, kind: onDemand},
		{name: "failure after a hang-up", saw: errMonRefused, kind: onHangUp, want: []string{
			"ERROR monitor: " + monLogRefused,
			"WARNING monitor: host state changed host=a state=possible_dead"}},
		{name: "first one that counts", saw: errMonRefused},
		{name: "second", saw: errMonRefused},
		{name: "third", saw: errMonRefused, want: []string{"WARNING monitor: host state changed host=a state=dead"}},
	})
}

// Failures are errors once an interval, whatever their reasons, and otherwise
// for debugging.
func TestPollErrorInterval(t *testing.T) {
	alive := "INFO monitor: host state changed host=a state=alive role=master"
	checked := "DEBUG monitor: checked host=a role=master lsn=0/3000060 timeline=1 duration_us=0"
	possiblyDead := "WARNING monitor: host state changed host=a state=possible_dead"
	many := func(c *config) { c.maxFails = 1000 }
	monSteps(t, slog.LevelDebug, monConfig(1, many), []monStep{
		{name: "answer", saw: monMaster, want: []string{checked, alive}},
		{name: "first failure", saw: errMonRefused, after: time.Second, want: []string{"ERROR monitor: " + monLogRefused, possiblyDead}},
		{name: "another reason", saw: errMonTimeout, after: time.Second, want: []string{"DEBUG monitor: " + monLogTimeout}},
		{name: "just before the interval is over", saw: errMonTimeout, after: 59*time.Second - 1, want: []string{"DEBUG monitor: " + monLogTimeout}},
		{name: "after the interval", saw: errMonTimeout, after: 1, want: []string{"ERROR monitor: " + monLogTimeout}},
		{name: "after that", saw: errMonRefused, after: time.Second, want: []string{"DEBUG monitor: " + monLogRefused}},
		{name: "failure on demand after the interval", saw: errMonRefused, kind: onDemand, after: time.Hour, want: []string{"DEBUG monitor: " + monLogRefused}},
		{name: "next on schedule", saw: errMonRefused, want: []string{"ERROR monitor: " + monLogRefused}},
		{name: "success", saw: monMaster, want: []string{checked, alive}},
		{name: "first failure again", saw: errMonTimeout, want: []string{"ERROR monitor: " + monLogTimeout, possiblyDead}},
	})
	// Interval 0: each one.
	monSteps(t, slog.LevelInfo, monConfig(1, many, func(c *config) { c.pollErrorLogInterval = 0 }), []monStep{
		{name: "first failure", saw: errMonRefused, want: []string{"ERROR monitor: " + monLogRefused}},
		{name: "second failure", saw: errMonRefused, want: []string{"ERROR monitor: " + monLogRefused}},
		{name: "third failure", saw: errMonTimeout, want: []string{"ERROR monitor: " + monLogTimeout}},
		{name: "failure on demand", saw: errMonTimeout, kind: onDemand},
	})
}

func TestRivalRecords(t *testing.T) {
	deposed := monOther(monMaster, func(o *observation) { o.postmasterStart = 3 })
	successor := monOther(monMaster, func(o *observation) { o.postmasterStart, o.timeline = 4, 2 })
	alive := func(h string) string {
		return "INFO monitor: host state changed host=" + h + " state=alive role=master"
	}
	steps := []monStep{
		{name: "a", host: 0, saw: monMaster, want: []string{alive("a")}},
		{name: "another name of the same server", host: 1, saw: monMaster, want: []string{alive("b")}},
		{name: "rival on another timeline", host: 2, saw: successor, want: []string{alive("c"),
			"ERROR monitor: several hosts are live masters hosts=a,b,c selected=a"}},
		{name: "still there", host: 2, saw: successor},
		{name: "rival on the same timeline", host: 2, saw: deposed, want: []string{
			"ERROR monitor: split brain: several live masters on one timeline; no replica meets min_lsn or timeline hosts=a,b,c timeline=1"}},
		{name: "still there", host: 2, saw: deposed},
		{name: "rival as a replica", host: 2, saw: monBehind(0, 0), want: []string{
			"INFO monitor: host role changed host=c role=replica",
			"ERROR monitor: no longer several live masters",
			"ERROR monitor: split brain has ended"}},
	}
	monSteps(t, slog.LevelInfo, monConfig(3), steps)
}

// A replica of another cluster is reported once, whichever of it and the master
// is seen first, and again when it has been back.
func TestForeignRecords(t *testing.T) {
	foreign := monOther(monBehind(0, 0), func(o *observation) { o.systemID = 9 })
	report := "ERROR monitor: host belongs to another cluster than the master and is not used as a replica host=b system_identifier=9 master_system_identifier=7"
	alive := "INFO monitor: host state changed host=b state=alive role=replica"
	inTime := "INFO monitor: replica synchronization changed host=b dimension=time synchronous=true lag_ms=0 threshold_ms=1000"
	inBytes := "INFO monitor: replica synchronization changed host=b dimension=bytes synchronous=true lag_bytes=0 threshold_bytes=1000000"
	unknown := "INFO monitor: replica synchronization changed host=b dimension=bytes synchronous=false lag_bytes=null threshold_bytes=1000000"
	a := monStep{name: "master", host: 0, saw: monMaster, want: []string{"INFO monitor: host state changed host=a state=alive role=master"}}
	monSteps(t, slog.LevelInfo, monConfig(2), []monStep{
		a,
		{name: "foreign host", host: 1, saw: foreign, want: []string{alive, report, inTime, unknown}},
		{name: "foreign host again", host: 1, saw: foreign},
		{name: "ours", host: 1, saw: monBehind(0, 0), want: []string{inBytes}},
		{name: "foreign host back", host: 1, saw: foreign, want: []string{report, unknown}},
	})
	a.want = append(a.want, report)
	monSteps(t, slog.LevelInfo, monConfig(2), []monStep{
		{name: "foreign host first", host: 1, saw: foreign, want: []string{alive, inTime, unknown}},
		a,
	})
}

func TestPlainError(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{
		{driver.ErrBadConn, "the server closed the connection unexpectedly"},
		{io.EOF, "the server closed the connection unexpectedly"},
		{io.ErrUnexpectedEOF, "the server closed the connection unexpectedly"},
		{&pq.Error{Message: "the database system is starting up", Code: "57P03"}, "the database system is starting up (57P03)"},
		{errors.New("pq: server error: Efork"), "server error: Efork"},
		{errors.New("invalid result: no row"), "invalid result: no row"},
	} {
		if got := (plainError{tt.err}).Error(); got != tt.want {
			t.Errorf("plainError{%v} = %q; want %q", tt.err, got, tt.want)
		}
	}
}

func TestStatus(t *testing.T) {
	m, _ := newMon(monConfig(3), nil, nil, nil)
	check := func(want string) {
		t.Helper()
		if got := m.status(m.table.view()); got != want {
			t.Errorf("status = %q; want %q", got, want)
		}
	}
	check("waiting for the first check of every host")
	m.table.observe(1, monMaster)
	m.table.observe(2, monReplica)
	check("waiting for the first check of every host")
	m.table.fail(0)
	check("master b; 2 of 3 hosts alive")
	m.table.fail(1) // possibly dead
	check("master b; 2 of 3 hosts alive")
	m.table.fail(1)
	m.table.fail(1)
	check("no master; 1 of 3 hosts alive")
}

func TestKeepInformed(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	want := func(want string) {
		t.Helper()
		b := make([]byte, 1024)
		conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := conn.Read(b); err != nil || string(b[:n]) != want {
			t.Fatalf("systemd got %q, %v; want %q", b[:n], err, want)
		}
	}
	m, _ := newMon(monConfig(2), nil, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		m.keepInformed(ctx, &notifier{socket: socket})
		close(done)
	}()
	want("STATUS=waiting for the first check of every host")
	m.table.observe(0, monMaster)
	m.table.observe(1, monReplica)
	want("STATUS=master a; 2 of 2 hosts alive")
	cancel()
	<-done
	m.keepInformed(t.Context(), nil) // without systemd it returns

	// While the monitor is stuck, systemd hears nothing.
	for _, w := range m.watchers {
		w.beat.set(time.Now().Add(-time.Hour))
	}
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	go m.keepInformed(ctx, &notifier{socket: socket, interval: time.Millisecond, last: "master a; 2 of 2 hosts alive"})
	conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("systemd hears of a stuck monitor")
	}
	m.watchers[0].beat.set(time.Now())
	want("WATCHDOG=1")
}

func TestProgresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newMonHost(t, monAnswers(0, monMaster))
		b := newMonHost(t, monAnswers(0, monReplica))
		m, _ := startMon(t, monConfig(2), a, b)
		monUntil(a, 1500*time.Millisecond)
		stuck := func(ctx context.Context, _ time.Duration) (observation, error) {
			<-ctx.Done() // in a resolver that does not return, say
			return observation{}, ctx.Err()
		}
		b.set(stuck)
		monUntil(a, 59500*time.Millisecond)
		if !m.progresses() {
			t.Error("one stuck host of two counts as no progress")
		}
		a.set(stuck)
		// Of its last round at 59 s: the longest back-off 8 s, a check 1 s, and 120 s.
		monUntil(a, 187900*time.Millisecond)
		if !m.progresses() {
			t.Error("no progress after less than 129 s")
		}
		monUntil(a, 188100*time.Millisecond)
		if m.progresses() {
			t.Error("progress after 129 s in which no host went round")
		}
	})
}
