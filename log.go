package main

// This file implements the log. The rules are:
//
//   - A record is one line and one write of less than 4096 bytes. Linux takes
//     so much into a pipe as a whole (PIPE_BUF), so that processes which share
//     a log do not mix their lines.
//
//   - Attributes are part of the message, as " key=value", in both formats: the
//     JSON fields are those that existing log pipelines expect, and no more.
//
//   - No value can start a new line or move a terminal's cursor: control
//     characters become spaces in text and escapes in JSON.
//
//   - A value takes at most 1024 bytes, so that what follows it is not lost.
//
//   - Logging never waits and never fails. A reader of the log that stops
//     reading costs records, and is told how many.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	maxLogRecord = 4095      // bytes of a line with its newline
	maxLogValue  = 1024      // bytes of one attribute's value, as written
	maxLogBuffer = 256 << 10 // bytes that a logWriter holds
	logTruncated = "...[truncated]"
)

// levelFatal is the level of what ends the process. Logging it does not.
const levelFatal = slog.Level(12)

// newLogger returns a logger that writes records at or above level to w, one
// line each, as text or as JSON. They are of component "main" until component
// says otherwise. If w is a logWriter, it reports its losses in this format.
func newLogger(w io.Writer, level slog.Level, json bool) *slog.Logger {
	h := &logHandler{mu: new(sync.Mutex), w: w, level: level, json: json, component: "main"}
	if lw, ok := w.(*logWriter); ok {
		lw.setFormat(h)
	}
	return slog.New(h)
}

// component returns l for one component: "http", "main", "monitor",
// "selection" or "config".
func component(l *slog.Logger, name string) *slog.Logger {
	return l.With("component", name)
}

// errAttr is the attribute of an error. Where err wraps a system error, its
// number is logged too.
func errAttr(err error) slog.Attr { return slog.Any("error", err) }

// errnoOf returns the number of the system error that err wraps.
func errnoOf(err error) (syscall.Errno, bool) {
	return errors.AsType[syscall.Errno](err)
}

// logHandler is a slog.Handler for the two formats. It is never modified.
type logHandler struct {
	level     slog.Level
	json      bool
	component string        // as written; short
	attrs     string        // of With, rendered
	errno     syscall.Errno // the first one in attrs, or 0

	mu *sync.Mutex // guards w; shared by the handlers that write to it
	w  io.Writer
}

func (h *logHandler) Enabled(_ context.Context, level slog.Level) bool { return level >= h.level }

// WithGroup does nothing: nothing here uses groups.
func (h *logHandler) WithGroup(string) slog.Handler { return h }

func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h2 := *h
	var text strings.Builder
	for _, a := range attrs {
		if a.Key == "component" {
			h2.component = string(h.append(nil, a.Value.String()))
		} else {
			h.add(&text, &h2.errno, a)
		}
	}
	h2.attrs += text.String()
	return &h2
}

func (h *logHandler) Handle(_ context.Context, r slog.Record) error {
	var msg strings.Builder
	msg.WriteString(r.Message)
	msg.WriteString(h.attrs)
	errno := h.errno
	r.Attrs(func(a slog.Attr) bool {
		h.add(&msg, &errno, a)
		return true
	})
	line := h.line(r.Time, r.Level, msg.String(), errno)

	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := h.w.Write(line)
	return err
}

// add appends " key=value" to msg. It sets errno, unless it is set, when the
// value is an error that wraps a system error.
func (h *logHandler) add(msg *strings.Builder, errno *syscall.Errno, a slog.Attr) {
	v := a.Value.Resolve()
	if err, ok := v.Any().(error); ok && *errno == 0 {
		*errno, _ = errnoOf(err)
	}
	msg.WriteString(" " + a.Key + "=" + h.clip(v.String(), maxLogValue))
}

// line renders one record. What is too long is cut from the message, so that
// the errno remains and the JSON stays valid.
func (h *logHandler) line(t time.Time, level slog.Level, msg string, errno syscall.Errno) []byte {
	timestamp := t.UTC().Format("2006-01-02T15:04:05.000Z")
	var suffix, field string
	if errno != 0 {
		suffix = fmt.Sprintf(" (errno=%d)", errno)
		field = fmt.Sprintf(`,"errno":%d`, errno)
	}
	var b []byte
	if h.json {
		// Readers of this format know no FATAL.
		b = fmt.Appendf(b, `{"@timestamp":"%s","levelStr":"%s","component":"%s","message":"`,
			timestamp, severity(min(level, slog.LevelError)), h.component)
		suffix += `"` + field + "}"
	} else {
		b = fmt.Appendf(b, "%s %s %s: ", timestamp, severity(level), h.component)
	}
	suffix += "\n"
	b = h.append(b, h.clip(msg, maxLogRecord-len(b)-len(suffix)))
	return append(b, suffix...)
}

// lossLine renders the record that n others were dropped. It is written at any
// level, as the lost ones may have been of any.
func (h *logHandler) lossLine(n int) []byte {
	return h.line(time.Now(), slog.LevelWarn, fmt.Sprintf("log records dropped count=%d", n), 0)
}

func severity(level slog.Level) string {
	switch {
	case level >= levelFatal:
		return "FATAL"
	case level >= slog.LevelError:
		return "ERROR"
	case level >= slog.LevelWarn:
		return "WARNING"
	case level >= slog.LevelInfo:
		return "INFO"
	}
	return "DEBUG"
}

// clip returns s, or the beginning of s and a mark, such that it takes at most
// limit bytes as written.
func (h *logHandler) clip(s string, limit int) string {
	const longest = len(`\u0000`) // that a byte can become
	if len(s)*longest <= limit {
		return s
	}
	var scratch [longest]byte
	size, cut := 0, 0
	for i, r := range s {
		if size <= limit-len(logTruncated) {
			cut = i
		}
		size += len(h.appendRune(scratch[:0], r))
		if size > limit {
			return s[:cut] + logTruncated
		}
	}
	return s
}

// append appends s as the format writes it.
func (h *logHandler) append(b []byte, s string) []byte {
	for _, r := range s { // an invalid byte is U+FFFD
		b = h.appendRune(b, r)
	}
	return b
}

func (h *logHandler) appendRune(b []byte, r rune) []byte {
	// U+2028 and U+2029 end a line too, for some readers.
	control := unicode.IsControl(r) || r == '\u2028' || r == '\u2029'
	if control && !h.json {
		return append(b, ' ')
	}
	if i := strings.IndexRune("\n\r\t\"\\", r); i >= 0 && h.json {
		return append(b, '\\', `nrt"\`[i])
	}
	if control {
		return fmt.Appendf(b, `\u%04x`, r)
	}
	return utf8.AppendRune(b, r)
}

// logWriter passes records on to a writer that may block or fail. Its own Write
// does neither: it keeps up to maxLogBuffer bytes and, once they are full, drops
// whole records until half of them are free. The record of the loss then stands
// where the lost ones would.
//
// A write that fails loses its record and nothing else. But Go ends the process
// when descriptor 1 or 2 is a closed pipe, unless SIGPIPE is ignored or taken:
// that is main's to do.
type logWriter struct {
	w    io.Writer
	done chan struct{} // closed when run has ended

	mu      sync.Mutex // guards the following
	ready   *sync.Cond // there is something for run
	queue   [][]byte   // records to be written
	size    int        // bytes of queue and of the record being written
	dropped int        // records since the buffer was full; 0 while it takes them
	closed  bool
	format  *logHandler // renders the record of the loss
}

// newLogWriter returns a logWriter and starts its goroutine, which close ends.
func newLogWriter(w io.Writer) *logWriter {
	l := &logWriter{w: w, done: make(chan struct{}), format: &logHandler{component: "main"}}
	l.ready = sync.NewCond(&l.mu)
	go l.run()
	return l
}

func (l *logWriter) setFormat(h *logHandler) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.format = h
}

// Write takes or drops p, one record. It returns len(p) and nil.
func (l *logWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
	case l.dropped > 0 || l.size+len(p) > maxLogBuffer:
		l.dropped++
	default:
		l.enqueueLocked(bytes.Clone(p))
	}
	l.ready.Signal()
	return len(p), nil
}

// close writes what it can within timeout and ends l, which drops what comes
// after. If the writer blocks for longer, its goroutine ends when it no longer
// does, without writing more.
func (l *logWriter) close(timeout time.Duration) {
	l.mu.Lock()
	l.closed = true
	l.ready.Signal()
	l.mu.Unlock()

	select {
	case <-l.done:
	case <-time.After(timeout):
		l.mu.Lock()
		defer l.mu.Unlock()
		l.queue, l.dropped = nil, 0
	}
}

// run writes record after record, each on its own, until l is closed.
func (l *logWriter) run() {
	defer close(l.done)
	for p, ok := l.next(0); ok; p, ok = l.next(len(p)) {
		_, _ = l.w.Write(p) // there is nobody else to tell
	}
}

// next frees the bytes of the record that was written, waits for another and
// takes it from the queue. It returns false when l is closed and nothing is left.
func (l *logWriter) next(written int) ([]byte, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.size -= written
	for {
		if l.dropped > 0 && l.size <= maxLogBuffer/2 {
			l.enqueueLocked(l.format.lossLine(l.dropped))
			l.dropped = 0
		}
		if len(l.queue) > 0 {
			p := l.queue[0]
			l.queue[0] = nil // the array outlives it
			l.queue = l.queue[1:]
			return p, true
		}
		if l.closed {
			return nil, false
		}
		l.ready.Wait()
	}
}

func (l *logWriter) enqueueLocked(p []byte) {
	l.queue = append(l.queue, p)
	l.size += len(p)
}
