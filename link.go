package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// link checks one host over a connection that it keeps. Only one goroutine uses
// a link.
type link struct {
	host   hostConfig
	name   string // in the log
	cfg    *config
	turns  *turns
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
	log    *slog.Logger

	kept        *session
	replacement chan *session // of an aged connection, while one is being opened; nil is sent if that fails
	worked      encryption    // of the last connection that could be opened
	warnedPlain bool

	form   int       // of the query, see queries
	fullAt time.Time // when the full form is tried again
	warned int       // the form down to which a warning was logged
}

// newLink returns a link to h, which the log calls name.
func newLink(h hostConfig, name string, c *config, t *turns, log *slog.Logger) *link {
	return &link{host: h, name: name, cfg: c, turns: t, lookup: net.DefaultResolver.LookupNetIP, log: log}
}

// fullQueryAgain is how long a shorter form of the query is used before the full
// one is tried again.
const fullQueryAgain = 5 * time.Minute

// check asks the server for an observation, within timeout. It opens a
// connection if there is none, and replaces a kept one that turns out closed
// once. After a failure no connection is kept.
func (l *link) check(ctx context.Context, timeout time.Duration) (o observation, err error) {
	b := &budget{left: timeout}
	l.takeReplacement()
	if l.kept != nil {
		o, err = l.query(ctx, b)
		if err == nil {
			l.replaceAged(ctx)
			return o, nil
		}
		if !closedByServer(err) || b.left <= 0 || ctx.Err() != nil {
			return observation{}, err
		}
	}
	l.turns.opening.Add(1)
	s, err := l.open(ctx, b)
	l.turns.opening.Add(-1)
	if err != nil {
		return observation{}, err
	}
	l.keep(s)
	o, err = l.query(ctx, b)
	if e := new(checkError); errors.As(err, &e) {
		e.costly = s.costly // a pooler lets us in while its server is down
	}
	return o, err
}

// keep makes s the connection that checks use.
func (l *link) keep(s *session) {
	l.drop()
	l.kept = s
	l.form = 0
}

// drop ends the kept connection, if there is one.
func (l *link) drop() {
	if l.kept != nil {
		l.kept.close()
		l.kept = nil
	}
}

// watch returns a channel that is closed when something comes on the kept
// connection, which is idle: the server hangs up, or is about to and says why.
func (l *link) watch() (hungUp <-chan struct{}, stop func()) {
	if l.kept == nil {
		return nil, func() {}
	}
	return watchPeer(l.kept.tcp, readable)
}

// close ends all connections properly.
func (l *link) close() {
	if l.replacement != nil {
		if s := <-l.replacement; s != nil {
			s.close()
		}
		l.replacement = nil
	}
	l.drop()
}

// replaceAged starts to open a successor of a connection that is older than
// conn_max_age_ms, unless another connection is waiting to open. The old one
// serves checks until then, and on if that fails: a server that is merely full
// must not look dead.
func (l *link) replaceAged(ctx context.Context) {
	if l.replacement != nil || time.Since(l.kept.opened) < l.cfg.connMaxAge || !l.turns.opening.CompareAndSwap(0, 1) {
		return
	}
	done := make(chan *session, 1)
	l.replacement = done
	opener := *l // its own copy of what open changes
	go func() {
		defer opener.turns.opening.Add(-1)
		s, err := opener.open(ctx, &budget{left: l.cfg.queryTimeout})
		if err != nil {
			l.log.Debug("aged connection not replaced", "host", l.name, errAttr(err))
			s = nil
		}
		done <- s
	}()
}

// takeReplacement uses the successor of an aged connection once it is open.
func (l *link) takeReplacement() {
	select {
	case s := <-l.replacement:
		l.replacement = nil
		if s != nil {
			l.keep(s)
		}
	default:
	}
}

// query runs the query on the kept connection, in shorter forms where the server
// refuses the full one. A connection on which it fails is dropped.
func (l *link) query(ctx context.Context, b *budget) (o observation, err error) {
	if l.form > 0 && time.Now().After(l.fullAt) {
		l.form = 0
	}
	err = b.spend(func(deadline time.Time) error {
		stop := l.kept.limit(ctx, deadline)
		defer stop()
		for {
			err = contained(func() (err error) {
				o, err = l.kept.query(queries[l.form])
				return err
			})
			sqlstate, refused := degrades(err)
			if !refused || l.form == len(queries)-1 {
				return err
			}
			l.form++
			l.fullAt = time.Now().Add(fullQueryAgain)
			l.warnDegraded(sqlstate)
		}
	})
	if err != nil {
		l.drop()
		return observation{}, asCheckError("query", err)
	}
	if l.form == 0 {
		l.warned = 0
	}
	return o, nil
}

// warnDegraded logs once that a shorter form of the query is used from now on.
func (l *link) warnDegraded(sqlstate string) {
	if l.form <= l.warned {
		return
	}
	l.warned = l.form
	reason := "PostgreSQL permission denied"
	if pqerror.Code(sqlstate) != pqerror.InsufficientPrivilege {
		reason = "PostgreSQL function not available"
	}
	l.log.Warn(fmt.Sprintf("%s host=%s sqlstate=%s; retrying poll without %s", reason, l.name, sqlstate, withoutForm[l.form]))
}

// asCheckError wraps err as the failure of op.
func asCheckError(op string, err error) *checkError {
	e := &checkError{op: op, err: err}
	if p := new(pq.Error); errors.As(err, &p) {
		e.sqlstate = p.Code
	}
	return e
}

// mayHaveRestarted reports whether a check failed in a way that leaves open
// whether the server process which answered before still runs: not by silence.
func mayHaveRestarted(err error) bool {
	e := new(checkError)
	return errors.As(err, &e) && !e.timeout() && e.op != "resolve"
}

// closedByServer reports whether a query failed because the server or something
// between had closed the connection before it could answer.
func closedByServer(err error) bool {
	e := new(checkError)
	if !errors.As(err, &e) || e.timeout() {
		return false
	}
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return true
	}
	if e.sqlstate != "" {
		// Connection exceptions, as poolers report them, and operator intervention.
		return e.sqlstate.Class() == "08" || strings.HasPrefix(string(e.sqlstate), "57P")
	}
	return errors.As(err, new(*net.OpError))
}

// checkError is why a check failed.
type checkError struct {
	op           string // what was being done: resolve, connect, tls, authenticate, query
	err          error
	sqlstate     pqerror.Code // of the server's answer, if that is what failed
	costly       bool         // a TLS handshake or password authentication had begun
	passwordSent bool
	encryption   encryption // of the connection that was tried
}

func (e *checkError) Error() string { return e.op + ": " + e.err.Error() }
func (e *checkError) Unwrap() error { return e.err }

// timeout reports whether the check failed because its time had passed. The time
// of DNS is not counted.
func (e *checkError) timeout() bool {
	var n net.Error
	return e.op != "resolve" && errors.As(e.err, &n) && n.Timeout()
}

// budget is the time that a check may spend on its server. It runs only while
// the check waits for that server, not for DNS or for its turn to connect.
type budget struct{ left time.Duration }

// spend runs f, which must not take longer than what is left, and takes the time
// it took from the budget.
func (b *budget) spend(f func(deadline time.Time) error) error {
	start := time.Now()
	defer func() { b.left -= time.Since(start) }()
	return f(start.Add(b.left))
}
