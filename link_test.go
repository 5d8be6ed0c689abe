package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

func TestConnectionIsKept(t *testing.T) {
	s := newMonServer(t, monHealthy)
	l, _ := monLink(t, s)
	for range 3 {
		o := monCheck(t, l)
		if o.standby || o.write != 0x3000060 || o.timeline != 1 || o.systemID != 7 {
			t.Errorf("check = %+v; want the master's row", o)
		}
		if o.start.After(o.end) || time.Since(o.start) > 10*time.Second {
			t.Errorf("check from %v to %v", o.start, o.end)
		}
	}
	s.expect(t, "1 startup", "1 query", "1 query", "1 query")
	l.close()
	s.expect(t, "1 terminate")
	s.wantAccepts(t, "three checks", 1)
}

// Whatever the stage at which a server stops answering, the check ends with its
// deadline, and has made one connection.
func TestFrozenAtEachStage(t *testing.T) {
	notice := monMessage('N', "SNOTICE\x00Mstill here\x00\x00")
	trickle := func(c *monConn) {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for c.send(notice) {
			<-tick.C
		}
	}
	query := func(c *monConn) bool {
		if !c.startup() || !c.accept() {
			return false
		}
		_, _, ok := c.message()
		return ok
	}
	for _, tt := range []struct {
		name  string
		mode  sslMode
		serve func(*monConn)
		op    string
	}{
		{"before TLS is agreed", sslPrefer, (*monConn).freeze, "tls"},
		{"in the TLS handshake", sslPrefer, func(c *monConn) { c.packet(); c.send([]byte("S")); c.freeze() }, "tls"},
		{"after the start-up packet", sslDisable, (*monConn).freeze, "authenticate"},
		{"notices before authentication", sslDisable, func(c *monConn) { c.startup(); trickle(c) }, "authenticate"},
		{"after the password", sslDisable, func(c *monConn) { c.startup(); c.password(); c.freeze() }, "authenticate"},
		{"before it is ready", sslDisable, func(c *monConn) { c.startup(); c.send(monAuth(0)); c.freeze() }, "authenticate"},
		{"after the query", sslDisable, func(c *monConn) { query(c); c.freeze() }, "query"},
		{"in the answer", sslDisable, func(c *monConn) { query(c); c.send(monMasterRow[:len(monMasterRow)-20]); c.freeze() }, "query"},
		{"before it is ready again", sslDisable, func(c *monConn) { query(c); c.send(monMasterRow[:len(monMasterRow)-6]); c.freeze() }, "query"},
		{"notices instead of an answer", sslDisable, func(c *monConn) { query(c); trickle(c) }, "query"},
		{"after an error", sslDisable, func(c *monConn) { query(c); c.send(monError("ERROR", "42501", "no")); c.freeze() }, "query"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newMonServer(t, tt.serve)
			l, _ := monLink(t, s, monTLS(t, tt.mode))
			const timeout = 300 * time.Millisecond
			start := time.Now()
			e := monCheckFails(t, l, timeout)
			got := time.Since(start)
			if e.op != tt.op || !e.timeout() {
				t.Errorf("check = %v, timeout=%v; want a time-out of %q", e, e.timeout(), tt.op)
			}
			if got < timeout || got > timeout+2*time.Second {
				t.Errorf("check ends after %v; want %v", got, timeout)
			}
			if l.kept != nil {
				t.Error("connection kept")
			}
			s.wantAccepts(t, "a check", 1)
		})
	}
}

// All stages share the deadline: each takes less than it, together they take more.
func TestOneDeadline(t *testing.T) {
	const timeout = 250 * time.Millisecond
	stage := func() { <-time.After(timeout * 3 / 5) }
	s := newMonServer(t, func(c *monConn) {
		if !c.startup() {
			return
		}
		stage()
		c.accept()
		c.queries(func(string) []byte { stage(); return monMasterRow })
	})
	l, _ := monLink(t, s)
	if e := monCheckFails(t, l, timeout); e.op != "query" || !e.timeout() {
		t.Errorf("check = %v; want a time-out of the query", e)
	}

	// The forms of the query share it too.
	s = newMonServer(t, func(c *monConn) {
		c.startup()
		c.accept()
		c.queries(func(string) []byte {
			stage()
			return slices.Concat(monError("ERROR", "42501", "permission denied"), monReady)
		})
	})
	l, _ = monLink(t, s)
	if e := monCheckFails(t, l, timeout); e.op != "query" || !e.timeout() {
		t.Errorf("check in three forms = %v; want a time-out", e)
	}
}

// A kept connection that turns out closed, in whatever way, is replaced within
// the same check.
func TestClosedConnectionIsReplaced(t *testing.T) {
	type ending struct {
		name string
		end  func(c *monConn)
		idle bool // while no query is under way
	}
	fatal := func(sqlstate, text string) func(*monConn) {
		return func(c *monConn) { c.send(monError("FATAL", sqlstate, text)) }
	}
	failed := func(sqlstate, text string) func(*monConn) {
		return func(c *monConn) { c.send(monError("ERROR", sqlstate, text), monReady); c.freeze() }
	}
	for _, tt := range []ending{
		{"closed", func(*monConn) {}, true},
		{"reset", (*monConn).reset, true},
		{"57P01, pg_terminate_backend", fatal("57P01", "terminating connection due to administrator command"), true},
		{"57P05, idle_session_timeout", fatal("57P05", "terminating connection due to idle-session timeout"), true},
		{"pooler: 08P01, idle", fatal("08P01", "client_idle_timeout"), true},
		{"closed", func(*monConn) {}, false},
		{"reset", (*monConn).reset, false},
		{"half an answer", func(c *monConn) { c.send(monMasterRow[:100]) }, false},
		{"57P01", fatal("57P01", "terminating connection due to administrator command"), false},
		{"57P02, crash of another backend", fatal("57P02", "terminating connection because of crash of another server process"), false},
		{"pooler: 08P01, server gone", fatal("08P01", "server conn crashed?"), false},
		{"pooler: 08006, goes on", failed("08006", "server closed the connection"), false},
		{"pooler: 57P01, goes on", failed("57P01", "the database is paused"), false},
	} {
		ended := make(chan struct{})
		s := newMonServer(t, func(c *monConn) {
			if c.n > 1 {
				monHealthy(c)
				return
			}
			c.startup()
			c.accept()
			n := 0
			c.queries(func(string) []byte {
				if n++; n == 1 {
					return monMasterRow
				}
				tt.end(c)
				return nil
			})
		})
		if tt.idle {
			s = newMonServer(t, func(c *monConn) {
				if c.n > 1 {
					monHealthy(c)
					return
				}
				c.startup()
				c.accept()
				c.message()
				c.send(monMasterRow)
				tt.end(c)
				c.Close()
				close(ended)
			})
		}
		l, _ := monLink(t, s)
		monCheck(t, l)
		if tt.idle {
			<-ended
		}
		if _, err := l.check(t.Context(), 10*time.Second); err != nil {
			t.Errorf("%s (idle=%v): check = %v; want success on a new connection", tt.name, tt.idle, err)
		}
		s.wantAccepts(t, tt.name+": two checks", 2)
	}
}

// A connection is replaced once: what happens to the second one is the outcome of
// the check.
func TestClosedConnectionIsReplacedOnce(t *testing.T) {
	for name, second := range map[string]func(*monConn){
		"closing at once": func(*monConn) {},
		"starting up": func(c *monConn) {
			c.startup()
			c.send(monError("FATAL", "57P03", "the database system is starting up"))
		},
		"closing in the query": func(c *monConn) {
			c.startup()
			c.accept()
			c.queries(func(string) []byte { return nil })
		},
		"57P01 in the query": func(c *monConn) {
			c.startup()
			c.accept()
			c.queries(func(string) []byte { c.send(monError("FATAL", "57P01", "terminating")); return nil })
		},
	} {
		s := newMonServer(t, func(c *monConn) {
			if c.n > 1 {
				second(c)
				return
			}
			c.startup()
			c.accept()
			n := 0
			c.queries(func(string) []byte {
				if n++; n > 1 {
					return nil
				}
				return monMasterRow
			})
		})
		l, _ := monLink(t, s)
		monCheck(t, l)
		monCheckFails(t, l, 10*time.Second)
		s.wantAccepts(t, "a check of a kept connection to a server that is "+name, 2)
	}
	// When nobody listens any more, that is the reason.
	s := newMonServer(t, monHealthy)
	l, _ := monLink(t, s)
	monCheck(t, l)
	l.host.port = 1
	l.kept.tcp.Close()
	if e := monCheckFails(t, l, 10*time.Second); e.op != "connect" || !errors.Is(e, syscall.ECONNREFUSED) {
		t.Errorf("check = %v; want connection refused", e)
	}
}

// Neither a time-out nor an answer of a server that is there is a reason for a
// second connection.
func TestNoReplacement(t *testing.T) {
	for name, answer := range map[string]func(*monConn) []byte{
		"a time-out": func(c *monConn) []byte { c.freeze(); return nil },
		"22012":      func(*monConn) []byte { return slices.Concat(monError("ERROR", "22012", "division by zero"), monReady) },
		"statement_timeout": func(*monConn) []byte {
			return slices.Concat(monError("ERROR", "57014", "canceling statement due to statement timeout"), monReady)
		},
		"recovery conflict": func(*monConn) []byte {
			return slices.Concat(monError("ERROR", "40001", "canceling statement due to conflict with recovery"), monReady)
		},
		"another result": func(*monConn) []byte { return monRow("f") },
		"garbage":        func(*monConn) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") },
	} {
		var broken atomic.Bool
		s := newMonServer(t, func(c *monConn) {
			c.startup()
			c.accept()
			c.queries(func(string) []byte {
				if broken.Load() {
					return answer(c)
				}
				return monMasterRow
			})
		})
		l, _ := monLink(t, s)
		monCheck(t, l)
		broken.Store(true)
		e := monCheckFails(t, l, 100*time.Millisecond)
		s.wantAccepts(t, fmt.Sprintf("%s (%v): a check that fails on a kept connection", name, e), 1)
		// The next check opens a new one: an answer may still be under way on this.
		broken.Store(false)
		monCheck(t, l)
		s.wantAccepts(t, name+": the check after that", 2)
	}
}

func TestClosedByServer(t *testing.T) {
	query := func(err error) error { return asCheckError("query", err) }
	state := func(sqlstate string) error { return query(&pq.Error{Code: pqerror.Code(sqlstate)}) }
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{query(driver.ErrBadConn), true},
		{query(io.EOF), true},
		{query(io.ErrUnexpectedEOF), true},
		{query(&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}), true},
		{query(&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}), true},
		{query(&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}), false},
		{query(errNotPostgreSQL), false},
		{state("57P01"), true},
		{state("57P03"), true},
		{state("57P05"), true},
		{state("08006"), true},
		{state("08P01"), true},
		{state("57014"), false},
		{state("42501"), false},
		{state("53300"), false},
		{errors.New("another"), false},
		{nil, false},
	} {
		if got := closedByServer(tt.err); got != tt.want {
			t.Errorf("closedByServer(%v) = %v; want %v", tt.err, got, tt.want)
		}
	}
}

func TestCheckErrorTimeout(t *testing.T) {
	expired := &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}
	for _, tt := range []struct {
		op   string
		err  error
		want bool
	}{
		{"connect", expired, true},
		{"query", fmt.Errorf("reading: %w", expired), true},
		{"connect", errors.Join(&net.OpError{Op: "dial", Err: syscall.ETIMEDOUT}, expired), true},
		{"query", io.EOF, false},
		{"connect", syscall.ECONNREFUSED, false},
		{"resolve", &net.DNSError{IsTimeout: true}, false},
	} {
		if got := (&checkError{op: tt.op, err: tt.err}).timeout(); got != tt.want {
			t.Errorf("timeout of %s: %v = %v; want %v", tt.op, tt.err, got, tt.want)
		}
	}
}

func monFDs(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// After a thousand checks of a bad host, no goroutine, no descriptor and no turn
// is missing or left over.
func TestNoLeaks(t *testing.T) {
	const checks = 1000
	login := func(c *monConn) bool { return c.startup() && c.accept() }
	type kind struct {
		name    string
		mode    sslMode
		timeout time.Duration
		serve   func(*monConn)
		most    int32 // connections
	}
	const short, long = 2 * time.Millisecond, 10 * time.Second
	kinds := []kind{
		{"frozen", sslDisable, short, (*monConn).freeze, checks},
		{"frozen before TLS", sslPrefer, short, (*monConn).freeze, checks},
		{"frozen in TLS", sslRequire, short, func(c *monConn) { c.packet(); c.send([]byte("S")); c.freeze() }, checks},
		{"frozen in the query", sslDisable, short, func(c *monConn) { login(c); c.freeze() }, checks},
		{"closing", sslDisable, long, func(c *monConn) {}, checks},
		{"resetting", sslDisable, long, (*monConn).reset, checks},
		{"resetting after the start-up packet", sslDisable, long, func(c *monConn) { c.startup(); c.reset() }, checks},
		{"half-open", sslDisable, short, func(c *monConn) {
			login(c)
			c.message()
			c.send(monMasterRow[:50])
			c.Conn.(*net.TCPConn).CloseWrite()
			c.freeze()
		}, checks},
		{"refusing", sslDisable, long, func(c *monConn) { c.startup(); c.send(monError("FATAL", "53300", "sorry, too many clients already")) }, checks},
		{"asking for a password", sslDisable, long, func(c *monConn) {
			c.startup()
			c.password()
			c.send(monError("FATAL", "28P01", "password authentication failed"))
		}, checks},
		{"hanging up on each kept connection", sslDisable, long, func(c *monConn) {
			if login(c) {
				c.message()
				c.send(monMasterRow)
			}
		}, checks},
		{"speaking HTTP", sslDisable, long, func(c *monConn) { c.startup(); c.send([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) }, checks},
		{"making lib/pq panic", sslDisable, long, monHostile()["short ready"], checks},
		{"making lib/pq panic in the query", sslDisable, long, monHostile()["query: short row"], checks},
	}
	for _, k := range kinds {
		s := newMonServer(t, k.serve)
		monCheckMany(t, k.name, checks, s.port, k.timeout, monTLS(t, k.mode))
		if n := s.accepts.Load(); n > k.most {
			t.Errorf("%s: %d checks make %d connections; want at most %d", k.name, checks, n, k.most)
		}
		for len(s.events) > 0 {
			if e := <-s.events; strings.Contains(e, "code") {
				t.Errorf("%s: the server saw %q", k.name, e)
			}
		}
	}
	monCheckMany(t, "black hole", checks, monBlackHole(t), short)
	monCheckMany(t, "refused", checks, 1, long)
}

// monCheckMany makes many checks of the server at port, each with turns of its
// own as otherwise it would rest between them.
func monCheckMany(t *testing.T, name string, checks int, port uint16, timeout time.Duration, edits ...func(*config)) {
	t.Helper()
	l, _ := monLink(t, &monServer{port: port}, edits...)
	goroutines, fds := runtime.NumGoroutine(), monFDs(t)
	for range checks {
		l.turns = newTurns(1, 1)
		l.check(context.Background(), timeout)
		_, stop := l.watch()
		stop()
		if n := l.turns.opening.Load(); n != 0 {
			t.Fatalf("%s: %d connections count as being opened", name, n)
		}
	}
	l.close()
	monEventually(t, func() bool { return runtime.NumGoroutine() <= goroutines && monFDs(t) <= fds }, func() string {
		return fmt.Sprintf("%s: %d goroutines and %d descriptors after %d checks; want %d and %d as before",
			name, runtime.NumGoroutine(), monFDs(t), checks, goroutines, fds)
	})
}

// monAwaitReplacement waits until the successor of an aged connection is open, or
// has failed.
func monAwaitReplacement(t *testing.T, l *link) {
	t.Helper()
	if l.replacement == nil {
		t.Fatal("no replacement of an aged connection is being opened")
	}
	select {
	case s := <-l.replacement:
		l.replacement <- s
	case <-time.After(5 * time.Second):
		t.Fatal("the replacement of an aged connection does not open")
	}
	monEventually(t, func() bool { return l.turns.opening.Load() == 0 },
		func() string { return "the replacement counts as being opened" })
}

func TestAging(t *testing.T) {
	var full atomic.Bool
	s := newMonServer(t, func(c *monConn) {
		if !c.startup() {
			return
		}
		if full.Load() {
			c.send(monError("FATAL", "53300", "sorry, too many clients already"))
			return
		}
		c.accept()
		c.queries(func(string) []byte { return monMasterRow })
	})
	l, log := monLink(t, s, func(c *config) { c.connMaxAge = time.Hour })
	monCheck(t, l)
	monCheck(t, l)
	s.expect(t, "1 startup", "1 query", "1 query")
	if l.replacement != nil {
		t.Error("a connection is replaced before its time")
	}

	// The check that finds it aged still uses it; the new one is open before the
	// old one ends.
	l.kept.opened = time.Now().Add(-time.Hour)
	monCheck(t, l)
	monAwaitReplacement(t, l)
	s.expect(t, "1 query", "2 startup")
	monCheck(t, l)
	s.expect(t, "1 terminate", "2 query")
	if l.replacement != nil {
		t.Error("the new connection is replaced too")
	}

	// A server that is full keeps being served by the old one.
	full.Store(true)
	l.kept.opened = time.Now().Add(-2 * time.Hour)
	log.take()
	for i := range 3 {
		monCheck(t, l)
		monAwaitReplacement(t, l)
		s.expect(t, "2 query", fmt.Sprintf("%d startup", 3+i))
	}
	for _, r := range log.take() {
		if want := "DEBUG monitor: aged connection not replaced host=pg-1 error=authenticate: pq: sorry, too many clients already (53300)"; r != want {
			t.Errorf("log = %q; want %q", r, want)
		}
	}
	full.Store(false)
	monCheck(t, l) // takes the failure of the last, and tries again
	monAwaitReplacement(t, l)
	monCheck(t, l)
	s.expect(t, "2 query", "2 terminate", "6 startup", "6 query")

	// Not while another connection is being opened or waits to be.
	l.kept.opened = time.Now().Add(-2 * time.Hour)
	l.turns.opening.Add(1)
	monCheck(t, l)
	if l.replacement != nil {
		t.Error("an aged connection is replaced while another host waits to connect")
	}
	l.turns.opening.Add(-1)
	monCheck(t, l)
	monAwaitReplacement(t, l)

	// One that nobody takes is ended with the link.
	l.close()
	s.expect(t, "6 query", "6 query", "6 terminate", "7 startup", "7 terminate")
}

// An aged connection that is closed meanwhile is replaced by its successor, if
// that is open, and otherwise as any other.
func TestAgedConnectionClosed(t *testing.T) {
	s := newMonServer(t, monHealthy)
	l, _ := monLink(t, s)
	monCheck(t, l)
	l.kept.opened = time.Now().Add(-time.Hour)
	monCheck(t, l)
	monAwaitReplacement(t, l)
	l.kept.tcp.Close()
	monCheck(t, l)
	s.wantAccepts(t, "a check with the successor at hand", 2)
}

const monDenied = "permission denied"

// monDegrading is a server that refuses the parts of the query named in denied,
// with a SQLSTATE.
func monDegrading(t *testing.T, denied func(sql string) (sqlstate string)) *monServer {
	return newMonServer(t, func(c *monConn) {
		if !c.startup() || !c.accept() {
			return
		}
		c.queries(func(sql string) []byte {
			form := slices.Index(queries[:], sql)
			c.note(fmt.Sprintf("form %d", form))
			if sqlstate := denied(sql); sqlstate != "" {
				return slices.Concat(monError("ERROR", sqlstate, monDenied), monReady)
			}
			return monMasterRow
		})
	})
}

func TestDegradation(t *testing.T) {
	const receiver, control = "pg_stat_wal_receiver", "pg_control_checkpoint"
	warning := func(reason, sqlstate, without string) string {
		return "WARNING monitor: PostgreSQL " + reason + " host=pg-1 sqlstate=" + sqlstate + "; retrying poll without WAL receiver statistics" + without
	}
	const noReceiver = "; the upstream's WAL end and the timeline being received are unknown"
	const noControl = " and control file functions; replica timelines and the system identifier are unknown"
	for _, tt := range []struct {
		name     string
		part     string
		sqlstate string
		forms    []string
		log      []string
	}{
		{"all allowed", "nothing", "", []string{"1 query", "1 form 0", "1 query", "1 form 0"}, nil},
		{"no receiver view", receiver, "42501",
			[]string{"1 query", "1 form 0", "1 query", "1 form 1", "1 query", "1 form 1"},
			[]string{warning("permission denied", "42501", noReceiver)}},
		{"no such function", control, "42883",
			[]string{"1 query", "1 form 0", "1 query", "1 form 1", "1 query", "1 form 2", "1 query", "1 form 2"},
			[]string{warning("function not available", "42883", noReceiver), warning("function not available", "42883", noControl)}},
		{"not supported", control, "0A000",
			[]string{"1 query", "1 form 0", "1 query", "1 form 1", "1 query", "1 form 2", "1 query", "1 form 2"},
			[]string{warning("function not available", "0A000", noReceiver), warning("function not available", "0A000", noControl)}},
	} {
		s := monDegrading(t, func(sql string) string {
			if strings.Contains(sql, tt.part) {
				return tt.sqlstate
			}
			return ""
		})
		l, log := monLink(t, s)
		monCheck(t, l)
		monCheck(t, l) // goes on with what worked
		s.expect(t, append([]string{"1 startup"}, tt.forms...)...)
		monWantLog(t, tt.name, log.take(), tt.log...)
		s.wantAccepts(t, tt.name, 1)
	}
}

// TestDegradationNamesPort: of hosts of one name the log tells which one it is.
func TestDegradationNamesPort(t *testing.T) {
	s := monDegrading(t, func(sql string) string {
		if strings.Contains(sql, "pg_stat_wal_receiver") {
			return "42501"
		}
		return ""
	})
	l, log := monLink(t, s, func(c *config) {
		c.hosts = append(c.hosts, hostConfig{name: "pg-1", addr: "127.0.0.1", port: 1})
	})
	monCheck(t, l)
	monWantLog(t, "one of two", log.take(), fmt.Sprintf("WARNING monitor: PostgreSQL permission denied host=127.0.0.1:%d sqlstate=42501; "+
		"retrying poll without WAL receiver statistics; the upstream's WAL end and the timeline being received are unknown", s.port))
}

// The last form is not given up on: its failure is the check's.
func TestDegradationEnds(t *testing.T) {
	s := monDegrading(t, func(string) string { return "42501" })
	l, log := monLink(t, s)
	if e := monCheckFails(t, l, 10*time.Second); e.op != "query" || e.sqlstate != "42501" {
		t.Errorf("check = %v; want 42501", e)
	}
	s.expect(t, "1 startup", "1 query", "1 form 0", "1 query", "1 form 1", "1 query", "1 form 2", "1 terminate")
	if got := len(log.take()); got != 2 {
		t.Errorf("%d warnings; want one a step, 2", got)
	}
	// And when that is all that can be said, it is not said again.
	monCheckFails(t, l, 10*time.Second)
	monWantLog(t, "the next check", log.take())
}

func TestFullQueryAgain(t *testing.T) {
	var granted atomic.Bool
	s := monDegrading(t, func(sql string) string {
		if strings.Contains(sql, "pg_stat_wal_receiver") && !granted.Load() {
			return "42501"
		}
		return ""
	})
	l, log := monLink(t, s)
	monCheck(t, l)
	s.expect(t, "1 startup", "1 query", "1 form 0", "1 query", "1 form 1")
	if got := len(log.take()); got != 1 {
		t.Errorf("%d warnings; want 1", got)
	}
	left := time.Until(l.fullAt)
	if left < fullQueryAgain-time.Minute || left > fullQueryAgain {
		t.Errorf("the full query is tried again in %v; want in 5 minutes", left)
	}

	// After 5 minutes, in vain: no second warning, and 5 minutes again.
	l.fullAt = time.Now().Add(-1)
	monCheck(t, l)
	monCheck(t, l)
	s.expect(t, "1 query", "1 form 0", "1 query", "1 form 1", "1 query", "1 form 1")
	monWantLog(t, "the same refusal", log.take())

	// On a new connection.
	l.drop()
	monCheck(t, l)
	s.expect(t, "1 terminate", "2 startup", "2 query", "2 form 0", "2 query", "2 form 1")
	monWantLog(t, "the same refusal on a new connection", log.take())

	// Granted, and revoked: the warning is due again.
	granted.Store(true)
	l.fullAt = time.Now().Add(-1)
	monCheck(t, l)
	granted.Store(false)
	monCheck(t, l)
	s.expect(t, "2 query", "2 form 0", "2 query", "2 form 0", "2 query", "2 form 1")
	if got := len(log.take()); got != 1 {
		t.Errorf("%d warnings after it had been granted; want 1", got)
	}
}

// A check ends soon after we are told to stop, wherever it is, and does not start
// anything new.
func TestCheckDuringShutdown(t *testing.T) {
	silent := newMonServer(t, func(c *monConn) { c.startup(); c.note("here"); c.freeze() })
	asked := newMonServer(t, func(c *monConn) {
		c.startup()
		c.accept()
		c.message()
		c.note("here")
		c.freeze()
	})
	hole := monBlackHole(t)
	for _, tt := range []struct {
		name    string
		server  *monServer
		prepare func(*link) (reached func())
	}{
		{"authenticating", silent, nil},
		{"in the query", asked, nil},
		{"connecting", &monServer{port: hole}, func(*link) func() { return func() {} }},
		{"waiting for its turn", silent, func(l *link) func() {
			<-l.turns.turn
			return func() {}
		}},
		{"waiting for its start", silent, func(l *link) func() {
			l.turns.start = time.Now().Add(time.Hour)
			return func() {}
		}},
		{"resolving", silent, func(l *link) func() {
			reached := make(chan struct{})
			l.host.addr = "db.example"
			l.lookup = func(ctx context.Context, _, _ string) ([]netip.Addr, error) {
				close(reached)
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return func() { <-reached }
		}},
	} {
		l, _ := monLink(t, tt.server)
		reached := func() {
			for !strings.HasSuffix(<-tt.server.events, " here") {
			}
		}
		if tt.prepare != nil {
			reached = tt.prepare(l)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := l.check(ctx, time.Hour)
			done <- err
		}()
		reached()
		before := tt.server.accepts.Load()
		start := time.Now()
		cancel()
		select {
		case err := <-done:
			if err == nil {
				t.Errorf("%s: check succeeds", tt.name)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: check goes on for 5s after the end", tt.name)
		}
		if got := time.Since(start); got > grace+time.Second {
			t.Errorf("%s: check goes on for %v; want at most %v", tt.name, got, grace)
		}
		if got := tt.server.accepts.Load(); got > before+1 || tt.prepare == nil && got != before {
			t.Errorf("%s: %d connections after the end", tt.name, got-before)
		}
	}
}

// An answer that comes while we stop is still taken, and the session ended as the
// protocol wants.
func TestAnswerDuringShutdown(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	s := newMonServer(t, func(c *monConn) {
		c.startup()
		c.accept()
		c.queries(func(string) []byte {
			close(asked)
			<-answer
			return monMasterRow
		})
	})
	l, _ := monLink(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := l.check(ctx, 10*time.Second)
		done <- err
	}()
	<-asked
	cancel()
	close(answer)
	if err := <-done; err != nil {
		t.Errorf("check = %v; want the answer", err)
	}
	l.close()
	s.expect(t, "1 startup", "1 query", "1 terminate")
}

func TestWatch(t *testing.T) {
	hangUp := make(chan func(*monConn))
	s := newMonServer(t, func(c *monConn) {
		if !c.startup() || !c.accept() {
			return
		}
		for {
			if _, _, ok := c.message(); !ok || !c.send(monMasterRow) {
				return
			}
			if f := <-hangUp; f != nil {
				f(c)
				return
			}
		}
	})
	l, _ := monLink(t, s)
	if c, stop := l.watch(); c != nil {
		t.Error("watch before the first check has something to watch")
		stop()
	}
	for name, f := range map[string]func(*monConn){
		"close": func(*monConn) {},
		"reset": (*monConn).reset,
		"57P01": func(c *monConn) { c.send(monError("FATAL", "57P01", "terminating")) },
	} {
		monCheck(t, l)
		// Nothing happens, and the connection remains good.
		for range 3 {
			c, stop := l.watch()
			stop()
			if monReadable(c) {
				t.Errorf("%s: a healthy connection counts as hung up", name)
			}
			hangUp <- nil
			monCheck(t, l)
		}
		before := s.accepts.Load()
		c, stop := l.watch()
		hangUp <- f
		select {
		case <-c:
		case <-time.After(5 * time.Second):
			t.Errorf("%s: not noticed on an idle connection", name)
		}
		stop()
		monCheck(t, l)
		s.wantAccepts(t, name+": the check after it", before+1)
		hangUp <- nil
	}
}

func monReadable(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Four servers that accept and say nothing, with real connections: each attempt
// keeps the turn for the whole time-out, 100 ms here instead of 1 s, and a host
// dies within ten of them, as in the README.
func TestFourSilentSockets(t *testing.T) {
	const unit = 100 * time.Millisecond
	var frozen atomic.Bool
	c := monConfig(4, func(c *config) { c.sleep, c.queryTimeout, c.failoverCheck = unit, unit, 0 })
	turns := newTurns(c.sleep, len(c.hosts))
	var probers []prober
	for i := range c.hosts {
		s := newMonServer(t, func(c *monConn) {
			if frozen.Load() {
				c.freeze()
				return
			}
			c.startup()
			c.accept()
			c.queries(func(string) []byte {
				if frozen.Load() {
					c.freeze()
				}
				return monMasterRow
			})
		})
		c.hosts[i].addr, c.hosts[i].port = "127.0.0.1", s.port
		probers = append(probers, newLink(c.hosts[i], c.hosts[i].name, c, turns, new(monLog).logger(12)))
	}
	m := newMonitor(c, new(monLog).logger(12), probers)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.run(ctx); close(done) }()
	defer func() { cancel(); <-done }()

	dead := func(want bool) time.Duration {
		t.Helper()
		start := time.Now()
		for v := m.table.view(); slices.ContainsFunc(v.hosts, func(s hostState) bool { return s.alive == want }); v = m.table.view() {
			select {
			case <-v.changed:
			case <-time.After(10 * time.Second):
				t.Fatalf("hosts do not become alive=%v", !want)
			}
		}
		return time.Since(start)
	}
	dead(false)
	frozen.Store(true)
	if got := dead(true); got < 8*unit || got > 30*unit {
		t.Errorf("all dead after %v; want about %v", got, 9*unit)
	}
	frozen.Store(false)
	dead(false)
}
