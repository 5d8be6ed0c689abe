package main

import (
	"bytes"
	"context"
	"database/sql/driver"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// A connection is opened by us up to and including TLS, and only then given to
// lib/pq, as if it were not encrypted. So one place keeps the deadline, the turns
// and libpq's meaning of sslmode. No context that can end reaches lib/pq: when
// one does, it opens a second connection to cancel the query, and lingers for
// seconds on a host that does not answer.

// encryption is how a connection was made.
type encryption uint8

const (
	encryptionUnknown encryption = iota
	plain
	encrypted
)

// open opens a connection within b: it resolves the name, connects to the first
// of its addresses that accepts, and authenticates.
func (l *link) open(ctx context.Context, b *budget) (*session, error) {
	addrs, unresolved := l.resolve(ctx)
	if unresolved != nil {
		return nil, asCheckError("resolve", unresolved)
	}
	if err := l.turns.awaitStart(ctx); err != nil {
		return nil, asCheckError("connect", err)
	}
	password, unreadable := l.password()
	if unreadable != nil {
		return nil, asCheckError("authenticate", unreadable)
	}
	attempts := l.encryptions()
	s, err := l.openOne(ctx, b, addrs, attempts[0], password)
	if len(attempts) > 1 && b.left > 0 && ctx.Err() == nil && refused(err, attempts[1]) {
		l.warnPlain(err)
		s, err = l.openOne(ctx, b, addrs, attempts[1], password)
	}
	if wrongPassword(err) && b.left > 0 && ctx.Err() == nil {
		// It may have been changed on the server and in its file just now.
		if again, e := l.password(); e == nil && again != password {
			s, err = l.openOne(ctx, b, addrs, err.encryption, again)
		}
	}
	if err != nil {
		return nil, err
	}
	l.worked = s.encryption
	return s, nil
}

// encryptions returns the kinds of connection to try. Where the mode allows
// both, they come in libpq's order, but with what worked last first.
func (l *link) encryptions() []encryption {
	switch l.cfg.tls.mode {
	case sslDisable:
		return []encryption{plain}
	case sslAllow:
		if l.worked != encrypted {
			return []encryption{plain, encrypted}
		}
		return []encryption{encrypted, plain}
	case sslPrefer:
		if l.worked != plain {
			return []encryption{encrypted, plain}
		}
		return []encryption{plain, encrypted}
	}
	return []encryption{encrypted}
}

// warnPlain logs once that TLS failed and libpq's rules for PGSSLMODE=prefer have
// us go on without it.
func (l *link) warnPlain(err *checkError) {
	if err.op == "tls" && !l.warnedPlain {
		l.warnedPlain = true
		l.log.Warn("TLS failed, connecting without encryption as PGSSLMODE="+string(l.cfg.tls.mode)+" allows",
			"host", l.name, errAttr(err.err))
	}
}

// wrongPassword reports whether the server turned the password down.
func wrongPassword(err *checkError) bool {
	return err != nil && err.sqlstate == pqerror.InvalidPassword
}

// refused reports whether err says that the server does not take the kind of
// connection that was tried, but may take the other: the TLS handshake failed, or
// a rule in pg_hba.conf turned the connection away before it asked for a
// password.
func refused(err *checkError, other encryption) bool {
	return err != nil && !err.timeout() && err.encryption != other &&
		(err.op == "tls" && err.costly || err.sqlstate == pqerror.InvalidAuthorizationSpecification && !err.passwordSent)
}

// resolve returns the addresses of the host. Its time is not counted, and a slow
// answer delays only this host.
func (l *link) resolve(ctx context.Context) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(l.host.addr); err == nil {
		return []netip.Addr{a}, nil
	}
	return l.lookup(ctx, "ip", l.host.addr)
}

// openOne makes one attempt to open a connection. The turn is taken only after
// TCP has connected, so that unreachable hosts do not hold up the others.
func (l *link) openOne(ctx context.Context, b *budget, addrs []netip.Addr, kind encryption, password string) (*session, *checkError) {
	s := &session{encryption: kind}
	err := b.spend(func(deadline time.Time) (err error) {
		s.tcp, err = dialAny(ctx, addrs, l.host.port, deadline)
		return err
	})
	if err != nil {
		return nil, asCheckError("connect", err)
	}
	release, err := l.turns.acquire(ctx)
	if err == nil {
		err = b.spend(func(deadline time.Time) error {
			defer s.limit(ctx, deadline)()
			return contained(func() error { return s.start(l, password) })
		})
		release(s.costly)
	}
	if err != nil {
		s.tcp.Close()
		if s.wire != nil && s.wire.passwordShown {
			err = redact(err, password)
		}
		e := asCheckError(s.doing, err)
		e.costly, e.passwordSent, e.encryption = s.costly, s.wire != nil && s.wire.passwordWanted, s.encryption
		return nil, e
	}
	s.opened = time.Now()
	return s, nil
}

// redact removes the password from what a server answered that was told it.
func redact(err error, password string) error {
	if p := new(pq.Error); password != "" && errors.As(err, &p) {
		p.Message = strings.ReplaceAll(p.Message, password, "***")
		return err
	}
	if password == "" || errors.As(err, new(net.Error)) || !strings.Contains(err.Error(), password) {
		return err
	}
	return errors.New(strings.ReplaceAll(err.Error(), password, "***"))
}

// dialAny connects to the first of addrs that accepts before the deadline. Each
// gets an equal share of the time that is left for it and those behind it.
func dialAny(ctx context.Context, addrs []netip.Addr, port uint16, deadline time.Time) (*net.TCPConn, error) {
	var errs []error
	for i, a := range addrs {
		share := time.Until(deadline) / time.Duration(len(addrs)-i)
		d := net.Dialer{Deadline: time.Now().Add(share)}
		c, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(a.Unmap(), port).String())
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 1 {
		return nil, errs[0]
	}
	return nil, errors.Join(errs...)
}

// session is one connection to a server.
type session struct {
	tcp        *net.TCPConn // carries the deadlines
	wire       *wire        // what lib/pq talks through
	conn       driver.QueryerContext
	encryption encryption
	opened     time.Time
	doing      string // what start is doing, for errors
	costly     bool   // start came to a TLS handshake or password
}

// grace is how much longer a check may take when we are stopping, so that its
// connection can be ended as the protocol wants.
const grace = 250 * time.Millisecond

// limit bounds all that is done on the connection by deadline, and soon ends it
// when ctx does, until release is called.
func (s *session) limit(ctx context.Context, deadline time.Time) (release func()) {
	s.tcp.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() {
		if end := time.Now().Add(grace); end.Before(deadline) {
			s.tcp.SetDeadline(end)
		}
	})
	return func() { stop() }
}

// sslRequest asks a server whether it speaks TLS (CancelRequestCode and
// NEGOTIATE_SSL_CODE are in PostgreSQL's libpq/pqcomm.h).
var sslRequest = []byte{0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f}

// start negotiates encryption, and has lib/pq start the session and
// authenticate.
func (s *session) start(l *link, password string) error {
	s.doing = "connect"
	var conn net.Conn = s.tcp
	if s.encryption == encrypted {
		s.doing = "tls"
		agreed, err := s.requestTLS(l.cfg.tls)
		switch {
		case err != nil:
			return err
		case agreed:
			s.costly = true
			if conn, err = l.cfg.tls.handshake(s.tcp, l.host.addr); err != nil {
				return err
			}
		case l.cfg.tls.mode == sslPrefer:
			s.encryption = plain
		default:
			return errors.New("the server does not support TLS, but PGSSLMODE=" + string(l.cfg.tls.mode) + " requires it")
		}
	}

	s.doing = "authenticate"
	s.wire = &wire{Conn: conn}
	connector, err := pq.NewConnectorConfig(pq.Config{
		Host: l.host.addr, Port: l.host.port, SSLMode: pq.SSLModeDisable,
		User: l.cfg.user, Password: password, Passfile: l.cfg.passFile, Database: l.cfg.database,
		ApplicationName: "pg-status",
	})
	if err != nil {
		return err
	}
	connector.Dialer(&wireDialer{s.wire})
	c, err := connector.Connect(context.Background())
	s.costly = s.costly || s.wire.passwordWanted
	if err != nil {
		return l.cfg.tls.explain(err)
	}
	s.conn = c.(driver.QueryerContext)
	return nil
}

// requestTLS asks the server for TLS and reports whether it agreed. It reads one
// byte and no more: whatever came with it would not be protected.
func (s *session) requestTLS(t *tlsSettings) (bool, error) {
	if t.direct {
		return true, nil
	}
	if _, err := s.tcp.Write(sslRequest); err != nil {
		return false, err
	}
	var answer [1]byte
	if _, err := io.ReadFull(s.tcp, answer[:]); err != nil {
		return false, err
	}
	switch answer[0] {
	case 'S':
		return true, nil
	case 'N':
		return false, nil
	}
	return false, fmt.Errorf("unexpected answer %q to a request for TLS; is it a PostgreSQL server?", answer[:])
}

// password returns the password to connect with, from its file if there is one:
// read each time, so that rotation needs no restart.
func (l *link) password() (string, error) {
	if l.cfg.passwordFile != "" {
		p, err := readPasswordFile(l.cfg.passwordFile)
		if err != nil {
			return "", fmt.Errorf("pg_status__pg_password_file: %w", err)
		}
		return p, nil
	}
	if f := l.cfg.passFile; f != "" {
		// libpq and lib/pq pass over such a file, with a warning of their own.
		if info, err := os.Stat(f); err == nil && info.Mode().Perm()&0o177 != 0 {
			return "", fmt.Errorf("PGPASSFILE: permissions of %s should be u=rw (0600) or less", f)
		}
	}
	return l.cfg.password, nil
}

// contained runs f, which calls lib/pq: it indexes into messages without looking
// at their size, and panics where a server sends nonsense in valid frames.
func contained(f func() error) (err error) {
	defer func() {
		if recover() != nil {
			err = errNotPostgreSQL
		}
	}()
	return f()
}

// query runs sql, a form of the query of a check. It must be read to its end
// before the values of its row may be forgotten: they lie in lib/pq's buffer.
func (s *session) query(sql string) (observation, error) {
	start := time.Now()
	s.wire.said = s.wire.said[:0]
	rows, err := s.conn.QueryContext(context.Background(), sql, nil)
	if err != nil {
		return observation{}, s.wire.explain(err)
	}
	row := make([]driver.Value, len(rows.Columns()))
	if err := rows.Next(row); err != nil {
		if err == io.EOF {
			return observation{}, errors.New("invalid result: no row")
		}
		return observation{}, s.wire.explain(err)
	}
	o, invalid := parseRow(row, start, time.Now())
	if err := rows.Close(); err != nil {
		return observation{}, s.wire.explain(err)
	}
	if invalid != nil {
		return observation{}, fmt.Errorf("invalid result: %w", invalid)
	}
	return o, nil
}

// close ends the session as the protocol wants, as far as that does not block.
func (s *session) close() {
	s.tcp.SetDeadline(time.Now().Add(grace))
	if c, ok := s.conn.(io.Closer); ok {
		c.Close()
	}
	s.tcp.Close()
}

// wireDialer gives lib/pq the connection that is already there, once.
type wireDialer struct{ wire *wire }

var errDialedTwice = errors.New("lib/pq wants a second connection")

func (d *wireDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	if d.wire == nil {
		return nil, errDialedTwice
	}
	w := d.wire
	d.wire = nil
	return w, nil
}

func (d *wireDialer) Dial(string, string) (net.Conn, error) {
	return d.DialContext(context.Background(), "", "")
}

func (d *wireDialer) DialTimeout(string, string, time.Duration) (net.Conn, error) {
	return d.DialContext(context.Background(), "", "")
}

// wire watches the messages of a server on their way to lib/pq, which believes
// the length that stands in front of each, allocates up to 4 GiB, and panics on
// a negative one. What is not PostgreSQL's protocol ends here.
type wire struct {
	net.Conn
	head           []byte // of the message whose beginning is being read
	left           int    // bytes of the current message yet to come
	free           bool   // the rest is one error as plain text, of at most left bytes
	sasl           []byte // of an AuthenticationSASLContinue that is being read
	inError        bool   // the current message is an ErrorResponse
	said           []byte // by the last one
	passwordWanted bool
	passwordShown  bool // the server wanted the password itself, not a proof of it
}

// maxMessage is far above the largest message that our session brings, an error
// of at most maxError bytes without its type and length (MAX_ERRLEN of libpq's
// fe-protocol3.c). lib/pq takes what is longer for plain text.
const (
	maxMessage = 1 << 16
	maxError   = 30_000
)

// maxIterations bounds the work that a server may ask for to prove a password
// with SCRAM, as no deadline interrupts it. PostgreSQL's default is 4,096.
const maxIterations = 1_000_000

var errNotPostgreSQL = errors.New("not PostgreSQL's protocol; is it a PostgreSQL server?")

func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if bad := w.inspect(p[:n]); bad != nil {
		return 0, bad
	}
	return n, err
}

// inspect follows the bytes b of the stream. A message is a type, a length that
// counts itself but not the type, and a body, which of an AuthenticationRequest
// begins with its kind.
func (w *wire) inspect(b []byte) error {
	const headLen, authLen = 5, 9
	for len(b) > 0 {
		if w.free && len(b) > w.left {
			return errNotPostgreSQL // an error without end
		}
		if skip := min(w.left, len(b)); skip > 0 {
			if w.sasl != nil {
				w.sasl = append(w.sasl, b[:skip]...)
			}
			if w.inError {
				w.said = append(w.said, b[:skip]...)
			}
			if w.left -= skip; w.left == 0 && w.sasl != nil {
				if err := checkIterations(w.sasl); err != nil {
					return err
				}
				w.sasl = nil
			}
			b = b[skip:]
			continue
		}
		w.head = append(w.head, b[0])
		b = b[1:]
		kind := w.head[0]
		switch {
		case len(w.head) == headLen:
			n := binary.BigEndian.Uint32(w.head[1:])
			if w.inError = kind == 'E'; w.inError {
				w.said = w.said[:0]
			}
			switch {
			case kind == 'E' && (n < 8 || n > maxError+4):
				// A server that cannot start a backend writes "E" and plain text.
				w.free, w.left = true, maxError
				continue
			case bytes.IndexByte([]byte("RKSZTDCENAIvGHdcsnt123VW"), kind) < 0,
				n < 4 || kind == 'R' && n < 8, n > maxMessage:
				return errNotPostgreSQL
			case kind == 'R':
				continue // to the kind
			}
			w.left = int(n) - 4
		case len(w.head) == authLen:
			const ok, cleartext, saslContinue = 0, 3, 11
			kind := binary.BigEndian.Uint32(w.head[headLen:])
			w.passwordWanted = w.passwordWanted || kind != ok
			w.passwordShown = w.passwordShown || kind == cleartext
			if kind == saslContinue {
				w.sasl = []byte{}
			}
			w.left = int(binary.BigEndian.Uint32(w.head[1:])) - 8
		default:
			continue
		}
		w.head = w.head[:0]
	}
	return nil
}

// lastWords is the error with which a server ended the session.
type lastWords struct{ said *pq.Error }

func (e lastWords) Error() string        { return e.said.Error() }
func (e lastWords) Is(target error) bool { return target == driver.ErrBadConn }
func (e lastWords) Unwrap() error        { return e.said }

// explain returns the error with which the server ended the session, if it did:
// of that, lib/pq only tells that the connection is bad.
func (w *wire) explain(err error) error {
	if n := net.Error(nil); errors.As(err, &n) && n.Timeout() || errors.Is(err, errNotPostgreSQL) {
		return err
	}
	e := &pq.Error{}
	for field := range bytes.SplitSeq(w.said, []byte{0}) {
		if len(field) > 1 {
			switch value := string(field[1:]); field[0] {
			case 'S':
				e.Severity = value
			case 'C':
				e.Code = pqerror.Code(value)
			case 'M':
				e.Message = value
			}
		}
	}
	if !e.Fatal() || e.Message == "" {
		return err
	}
	return lastWords{e}
}

// checkIterations looks at how much work the server's first message of SCRAM
// asks for: "r=nonce,s=salt,i=iterations" (RFC 5802).
func checkIterations(message []byte) error {
	for attribute := range bytes.SplitSeq(message, []byte{','}) {
		if count, ok := bytes.CutPrefix(attribute, []byte("i=")); ok {
			if n, err := strconv.Atoi(string(count)); err != nil || n > maxIterations {
				return fmt.Errorf("the server asks for %.20q iterations of SCRAM; at most %d are made", count, maxIterations)
			}
		}
	}
	return nil
}
