package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"
)

// reporter logs the outcome of the checks of one host: the first failure after a
// success as an error, those that follow as errors no more often than
// poll_error_log_interval_ms, and all else for debugging.
type reporter struct {
	failing bool
	logged  time.Time // when a failure was last logged as an error
}

// outcome logs one check. A failure outside the schedule is only for debugging,
// as it changes nothing, except after a hang-up.
func (r *reporter) outcome(m *monitor, i int, o observation, err error, kind checkKind) {
	if err == nil {
		r.failing = false
		m.log.Debug("checked", "host", m.names[i], "role", roleOf(o.standby), "lsn", o.position(),
			"timeline", o.timeline, "duration_us", o.end.Sub(o.start).Microseconds())
		return
	}
	level := slog.LevelDebug
	if now := time.Now(); kind != onDemand && (!r.failing || now.Sub(r.logged) >= m.cfg.pollErrorLogInterval) {
		level = slog.LevelError
		r.failing, r.logged = true, now
	}
	if !m.log.Enabled(context.Background(), level) {
		return
	}
	op := "query"
	if e := new(checkError); errors.As(err, &e) {
		op, err = e.op, e.err
		if e.timeout() {
			m.log.Log(context.Background(), level, "PostgreSQL poll timed out", "host", m.names[i],
				"timeout_ms", m.cfg.queryTimeout.Milliseconds(), "operation", op)
			return
		}
	}
	m.log.Log(context.Background(), level, "PostgreSQL operation failed", "operation", op, "host", m.names[i], errAttr(plainError{err}))
}

// plainError words an error of lib/pq for people who do not know it.
type plainError struct{ error }

func (e plainError) Unwrap() error { return e.error }

func (e plainError) Error() string {
	if e.error == driver.ErrBadConn || e.error == io.EOF || e.error == io.ErrUnexpectedEOF {
		return "the server closed the connection unexpectedly"
	}
	return strings.TrimPrefix(e.error.Error(), "pq: ")
}

func roleOf(standby bool) string {
	if standby {
		return "replica"
	}
	return "master"
}

// logChanges logs what differs between two successive views.
func (m *monitor) logChanges(old, next *view) {
	if old == next {
		return
	}
	for i := range next.hosts {
		m.logHost(i, old, next)
	}
	if old.rivals != next.rivals {
		if next.rivals {
			m.log.Error("several hosts are live masters", "hosts", m.liveMasters(next), "selected", m.names[next.master])
		} else {
			m.log.Error("no longer several live masters")
		}
	}
	if old.split != next.split {
		if next.split {
			m.log.Error("split brain: several live masters on one timeline; no replica meets min_lsn or timeline",
				"hosts", m.liveMasters(next), "timeline", next.ref.timeline)
		} else {
			m.log.Error("split brain has ended")
		}
	}
}

func (m *monitor) liveMasters(v *view) string {
	var names []string
	for i := range v.hosts {
		if v.hosts[i].liveMaster() {
			names = append(names, m.names[i])
		}
	}
	return strings.Join(names, ",")
}

// logHost logs what changed about host i.
func (m *monitor) logHost(i int, old, next *view) {
	a, b := &old.hosts[i], &next.hosts[i]
	name, role := m.names[i], roleOf(b.standby)
	recovered := !a.alive && b.alive
	switch {
	case b.responsive() && !a.responsive():
		m.log.Info("host state changed", "host", name, "state", "alive", "role", role)
	case !b.alive && a.fails < m.table.maxFails && b.fails >= m.table.maxFails:
		m.log.Warn("host state changed", "host", name, "state", "dead")
	case b.alive && a.responsive() && !b.responsive():
		m.log.Warn("host state changed", "host", name, "state", "possible_dead")
	}
	if a.alive && b.alive && a.standby != b.standby {
		m.log.Info("host role changed", "host", name, "role", role)
	}
	if foreign := next.foreign(b); foreign && !old.foreign(a) {
		m.log.Error("host belongs to another cluster than the master and is not used as a replica",
			"host", name, "system_identifier", b.systemID, "master_system_identifier", next.ref.systemID)
	}
	if !b.liveReplica() {
		return
	}
	if was, is := old.syncByTime(a), next.syncByTime(b); was != is || recovered {
		m.log.Info("replica synchronization changed", "host", name, "dimension", "time", "synchronous", is,
			"lag_ms", next.timeLag(b), "threshold_ms", next.syncMS)
	}
	if was, is := old.syncByBytes(a), next.syncByBytes(b); was != is || recovered {
		m.log.Info("replica synchronization changed", "host", name, "dimension", "bytes", "synchronous", is,
			"lag_bytes", next.byteLag(b), "threshold_bytes", next.syncBytes)
	}
}

// keepInformed tells systemd who the master is and how many hosts are alive, and
// that the monitor is making progress, until ctx ends.
func (m *monitor) keepInformed(ctx context.Context, n *notifier) {
	if n == nil {
		return
	}
	var tick <-chan time.Time
	if d := n.watchdogInterval(); d > 0 {
		ticker := time.NewTicker(d)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		v := m.table.view()
		n.status(m.status(v))
		select {
		case <-ctx.Done():
			return
		case <-v.changed:
		case <-tick:
			if m.progresses() {
				n.watchdog()
			}
		}
	}
}

// status is one line about v for people.
func (m *monitor) status(v *view) string {
	if !v.ready {
		return "waiting for the first check of every host"
	}
	master, alive := "no master", 0
	if v.master >= 0 {
		master = "master " + m.names[v.master]
	}
	for i := range v.hosts {
		if v.hosts[i].alive {
			alive++
		}
	}
	return fmt.Sprintf("%s; %d of %d hosts alive", master, alive, len(v.hosts))
}

// stuckAfter is how long, beyond the longest wait of a healthy monitor, none of
// its goroutines may go round before it counts as stuck. It leaves time for a
// resolver that tries every server and search domain in vain.
const stuckAfter = 2 * time.Minute

func (m *monitor) progresses() bool {
	longest := max(maxBackOff, m.cfg.sleep) + m.cfg.queryTimeout + stuckAfter
	for _, w := range m.watchers {
		if time.Since(w.beat.time()) < longest {
			return true
		}
	}
	return false
}
