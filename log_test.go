package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
)

// logTime is 2026-08-21 12:34:56.123789 UTC, in a zone where it is 14:34.
var logTime = time.Date(2026, 8, 21, 14, 34, 56, 123789000, time.FixedZone("", 2*60*60))

// logged returns what the handler of l, which must write to buf, makes of one
// record at logTime.
func logged(t *testing.T, l *slog.Logger, buf *bytes.Buffer, level slog.Level, msg string, attrs ...slog.Attr) string {
	t.Helper()
	buf.Reset()
	r := slog.NewRecord(logTime, level, msg, 0)
	r.AddAttrs(attrs...)
	if err := l.Handler().Handle(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	return buf.String()
}

// around returns the place where two long lines part, for a readable message.
func around(got, want string) string {
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	cut := func(s string) string { return s[max(0, i-20):min(len(s), i+40)] }
	return fmt.Sprintf("%d bytes, want %d; at byte %d got %q, want %q", len(got), len(want), i, cut(got), cut(want))
}

func TestLogRecord(t *testing.T) {
	// ENOENT is 2 wherever we run.
	enoent := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ENOENT)}

	tests := []struct {
		level slog.Level
		msg   string
		attrs []slog.Attr
		text  string
		json  string
	}{
		// The severities.
		{slog.LevelDebug, "m", nil,
			`2026-08-21T12:34:56.123Z DEBUG http: m`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"DEBUG","component":"http","message":"m"}`},
		{slog.LevelInfo, "server started", []slog.Attr{slog.String("address", "0.0.0.0"), slog.Int("port", 8000)},
			`2026-08-21T12:34:56.123Z INFO http: server started address=0.0.0.0 port=8000`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"http","message":"server started address=0.0.0.0 port=8000"}`},
		{slog.LevelWarn, "m", nil,
			`2026-08-21T12:34:56.123Z WARNING http: m`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"WARNING","component":"http","message":"m"}`},
		{slog.LevelError, "m", nil,
			`2026-08-21T12:34:56.123Z ERROR http: m`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"ERROR","component":"http","message":"m"}`},
		{levelFatal, "m", nil,
			`2026-08-21T12:34:56.123Z FATAL http: m`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"ERROR","component":"http","message":"m"}`},

		// Values are not quoted.
		{slog.LevelInfo, "m", []slog.Attr{slog.Bool("a", true), slog.Int64("b", -5), slog.Uint64("c", 1<<63), slog.String("d", ""),
			slog.Duration("e", 1500*time.Millisecond), slog.String("f", "two words"), slog.Any("g", lsn(0x3000060))},
			`2026-08-21T12:34:56.123Z INFO http: m a=true b=-5 c=9223372036854775808 d= e=1.5s f=two words g=0/3000060`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"http","message":"m a=true b=-5 c=9223372036854775808 d= e=1.5s f=two words g=0/3000060"}`},

		// Errors, with the number of a system error.
		{slog.LevelError, "m", []slog.Attr{errAttr(errors.New("bad"))},
			`2026-08-21T12:34:56.123Z ERROR http: m error=bad`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"ERROR","component":"http","message":"m error=bad"}`},
		{slog.LevelError, "m", []slog.Attr{errAttr(enoent), slog.String("host", "a")},
			`2026-08-21T12:34:56.123Z ERROR http: m error=dial tcp: connect: no such file or directory host=a (errno=2)`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"ERROR","component":"http","message":"m error=dial tcp: connect: no such file or directory host=a (errno=2)","errno":2}`},
		{slog.LevelError, "the first counts", []slog.Attr{errAttr(errors.New("a")), errAttr(syscall.ENOENT), errAttr(syscall.EPERM)},
			`2026-08-21T12:34:56.123Z ERROR http: the first counts error=a error=no such file or directory error=operation not permitted (errno=2)`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"ERROR","component":"http","message":"the first counts error=a error=no such file or directory error=operation not permitted (errno=2)","errno":2}`},
		{slog.LevelError, "m", []slog.Attr{errAttr(nil)},
			`2026-08-21T12:34:56.123Z ERROR http: m error=<nil>`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"ERROR","component":"http","message":"m error=<nil>"}`},

		// Characters, in the message and in a value.
		{slog.LevelInfo, "a\nb\tc\rd", []slog.Attr{slog.String("k\n", "\x00\x1b[31m\x7f")},
			"2026-08-21T12:34:56.123Z INFO http: a b c d k =  [31m ",
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"http","message":"a\nb\tc\rd k\n=\u0000\u001b[31m\u007f"}`},
		{slog.LevelInfo, "\u0080\u0085\u009f\u2028\u2029.", nil,
			"2026-08-21T12:34:56.123Z INFO http:      .",
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"http","message":"\u0080\u0085\u009f\u2028\u2029."}`},
		{slog.LevelInfo, `"quoted" \ <a>&'`, nil,
			`2026-08-21T12:34:56.123Z INFO http: "quoted" \ <a>&'`,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"http","message":"\"quoted\" \\ <a>&'"}`},
		{slog.LevelInfo, "\xff\xe2\x82 é€𝄞 \xed\xa0\x80", nil, // a byte, two of three bytes, a surrogate
			"2026-08-21T12:34:56.123Z INFO http: \ufffd\ufffd\ufffd é€𝄞 \ufffd\ufffd\ufffd",
			"{\"@timestamp\":\"2026-08-21T12:34:56.123Z\",\"levelStr\":\"INFO\",\"component\":\"http\",\"message\":\"\ufffd\ufffd\ufffd é€𝄞 \ufffd\ufffd\ufffd\"}"},
	}
	for _, tt := range tests {
		var buf bytes.Buffer
		text := component(newLogger(&buf, slog.LevelDebug, false), "http")
		if got := logged(t, text, &buf, tt.level, tt.msg, tt.attrs...); got != tt.text+"\n" {
			t.Errorf("text of %q %v =\n%q; want\n%q", tt.msg, tt.attrs, got, tt.text+"\n")
		}
		json := component(newLogger(&buf, slog.LevelDebug, true), "http")
		if got := logged(t, json, &buf, tt.level, tt.msg, tt.attrs...); got != tt.json+"\n" {
			t.Errorf("JSON of %q %v =\n%q; want\n%q", tt.msg, tt.attrs, got, tt.json+"\n")
		}
	}
}

func TestLogWith(t *testing.T) {
	var buf bytes.Buffer
	l := newLogger(&buf, slog.LevelInfo, false)
	host := component(l, "monitor").With("host", "a", errAttr(syscall.ENOENT))

	const prefix = "2026-08-21T12:34:56.123Z INFO "
	tests := []struct {
		l    *slog.Logger
		want string
	}{
		{l, "main: m k=v"},
		{component(l, "selection"), "selection: m k=v"},
		{host, "monitor: m host=a error=no such file or directory k=v (errno=2)"},
		{component(host, "http"), "http: m host=a error=no such file or directory k=v (errno=2)"},
		{component(host, "a\nb"), "a b: m host=a error=no such file or directory k=v (errno=2)"},
		{l.WithGroup("g").With("a", 1), "main: m a=1 k=v"},
	}
	for _, tt := range tests {
		if got, want := logged(t, tt.l, &buf, slog.LevelInfo, "m", slog.String("k", "v")), prefix+tt.want+"\n"; got != want {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
}

func TestLogLevel(t *testing.T) {
	levels := []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError, levelFatal}
	for i, limit := range levels {
		var buf bytes.Buffer
		l := newLogger(&buf, limit, false)
		for _, level := range levels {
			l.Log(t.Context(), level, "m", slog.Group("g", "k", "v"))
		}
		if got, want := strings.Count(buf.String(), "\n"), len(levels)-i; got != want {
			t.Errorf("%d records at level %v; want %d", got, limit, want)
		}
	}
}

func TestErrnoOf(t *testing.T) {
	tests := []struct {
		err  error
		want syscall.Errno
		ok   bool
	}{
		{nil, 0, false},
		{errors.New("no such file or directory"), 0, false},
		{syscall.ENOENT, 2, true},
		{fmt.Errorf("opening: %w", &os.PathError{Op: "open", Path: "/a", Err: syscall.ENOENT}), 2, true},
		{os.ErrDeadlineExceeded, 0, false},
	}
	for _, tt := range tests {
		if got, ok := errnoOf(tt.err); got != tt.want || ok != tt.ok {
			t.Errorf("errnoOf(%v) = %d, %v; want %d, %v", tt.err, got, ok, tt.want, tt.ok)
		}
	}
}

// An x is one byte and an é two in both formats; a newline is one byte in text
// and two in JSON, an escape character one and six.
func TestLogValueIsShortened(t *testing.T) {
	x := func(n int) string { return strings.Repeat("x", n) }
	tests := []struct {
		value      string
		text, json string // of the value
	}{
		{x(1024), x(1024), x(1024)},
		{x(1025), x(1010) + "...[truncated]", x(1010) + "...[truncated]"},
		// The mark stands behind a whole character.
		{x(1009) + "é" + x(20), x(1009) + "...[truncated]", x(1009) + "...[truncated]"},
		{x(1008) + "é" + x(20), x(1008) + "é...[truncated]", x(1008) + "é...[truncated]"},
		{x(1023) + "\n", x(1023) + " ", x(1010) + "...[truncated]"},
		{x(1009) + "\n" + x(14), x(1009) + " " + x(14), x(1009) + "...[truncated]"},
		{strings.Repeat("\x1b", 1024), strings.Repeat(" ", 1024), strings.Repeat(`\u001b`, 168) + "...[truncated]"},
		// An invalid byte becomes three: 336*3 = 1008.
		{strings.Repeat("\xff", 1024), strings.Repeat("\ufffd", 336) + "...[truncated]", strings.Repeat("\ufffd", 336) + "...[truncated]"},
	}
	for _, tt := range tests {
		var buf bytes.Buffer
		attrs := []slog.Attr{slog.String("k", tt.value), slog.String("host", "a")}
		want := "2026-08-21T12:34:56.123Z INFO main: m k=" + tt.text + " host=a\n"
		if got := logged(t, newLogger(&buf, slog.LevelInfo, false), &buf, slog.LevelInfo, "m", attrs...); got != want {
			t.Errorf("text of value %.20q of %d bytes: %s", tt.value, len(tt.value), around(got, want))
		}
		want = `{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"main","message":"m k=` + tt.json + ` host=a"}` + "\n"
		if got := logged(t, newLogger(&buf, slog.LevelInfo, true), &buf, slog.LevelInfo, "m", attrs...); got != want {
			t.Errorf("JSON of value %.20q of %d bytes: %s", tt.value, len(tt.value), around(got, want))
		}
	}
}

func TestLogRecordIsShortened(t *testing.T) {
	x := func(n int) string { return strings.Repeat("x", n) }
	tests := []struct {
		json bool
		msg  string
		errs []slog.Attr
		want string
	}{
		// 36 bytes before the message and a newline behind it: 4095 - 37 = 4058,
		// and 4058 - 14 = 4044 with the mark.
		{false, x(4058), nil, "2026-08-21T12:34:56.123Z INFO main: " + x(4058)},
		{false, x(4059), nil, "2026-08-21T12:34:56.123Z INFO main: " + x(4044) + "...[truncated]"},
		{false, x(4043) + "é" + x(20), nil, "2026-08-21T12:34:56.123Z INFO main: " + x(4043) + "...[truncated]"},
		// " (errno=2)" takes another 10.
		{false, x(4059), []slog.Attr{errAttr(syscall.ENOENT)},
			"2026-08-21T12:34:56.123Z INFO main: " + x(4034) + "...[truncated] (errno=2)"},
		// 89 bytes before the message, 3 behind it: 4003, and 3989 with the mark.
		{true, x(4003), nil,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"main","message":"` + x(4003) + `"}`},
		{true, x(4004), nil,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"main","message":"` + x(3989) + `...[truncated]"}`},
		{true, x(3988) + "\x1b" + x(20), nil,
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"main","message":"` + x(3988) + `...[truncated]"}`},
		{true, strings.Repeat(`"`, 4000), nil, // 1994*2 = 3988
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"main","message":"` + strings.Repeat(`\"`, 1994) + `...[truncated]"}`},
		// " (errno=2)" and ",\"errno\":2" take 10 each.
		{true, x(4004), []slog.Attr{errAttr(syscall.ENOENT)},
			`{"@timestamp":"2026-08-21T12:34:56.123Z","levelStr":"INFO","component":"main","message":"` + x(3969) + `...[truncated] (errno=2)","errno":2}`},
	}
	for _, tt := range tests {
		var buf bytes.Buffer
		if got := logged(t, newLogger(&buf, slog.LevelInfo, tt.json), &buf, slog.LevelInfo, tt.msg, tt.errs...); got != tt.want+"\n" {
			t.Errorf("message %.20q of %d bytes %v, JSON %v: %s", tt.msg, len(tt.msg), tt.errs, tt.json, around(got, tt.want+"\n"))
		}
	}
}

func FuzzRecord(f *testing.F) {
	f.Add("server started", "port", "8000", false)
	f.Add("a\nb\u2028\x1b[2J", "k\"\\", "\xff\x80\xc3", true)
	f.Add(strings.Repeat("\x00", 5000), "", strings.Repeat("é", 2000), true)
	f.Add(strings.Repeat("\xf0\x9d", 3000), strings.Repeat("k", 5000), strings.Repeat("\\", 1020), false)
	f.Fuzz(func(t *testing.T, msg, key, value string, system bool) {
		err := errors.New(value)
		if system {
			err = fmt.Errorf("%s: %w", value, syscall.ENOENT)
		}
		for _, asJSON := range []bool{false, true} {
			var buf bytes.Buffer
			l := component(newLogger(&buf, slog.LevelInfo, asJSON), "monitor")
			line := logged(t, l, &buf, levelFatal, msg, slog.String(key, value), errAttr(err))
			if len(line) >= 4096 {
				t.Errorf("%d bytes; want less than 4096: %q", len(line), line)
			}
			if strings.Count(line, "\n") != 1 || !strings.HasSuffix(line, "\n") {
				t.Errorf("not one line: %q", line)
			}
			if !utf8.ValidString(line) {
				t.Errorf("invalid UTF-8: %q", line)
			}
			if want := " (errno=2)"; system != strings.Contains(line, want) && !strings.Contains(msg+key+value, want) {
				t.Errorf("system error: %v, but the line is %q", system, line)
			}
			if asJSON {
				checkJSONRecord(t, line, system)
			}
		}
	})
}

func checkJSONRecord(t *testing.T, line string, system bool) {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal([]byte(line), &fields); err != nil {
		t.Fatalf("%v: %q", err, line)
	}
	if errno, ok := fields["errno"]; ok != system || ok && errno != 2.0 {
		t.Errorf("errno = %v; want one: %v", errno, system)
	}
	if fields["levelStr"] != "ERROR" || fields["component"] != "monitor" {
		t.Errorf("levelStr or component is wrong: %q", line)
	}
}

// A gate is a writer that waits until it is opened.
type gate struct {
	opened chan struct{}
	mu     sync.Mutex // guards the following
	writes []string
}

func newGate() *gate { return &gate{opened: make(chan struct{})} }

func (g *gate) Write(p []byte) (int, error) {
	<-g.opened
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writes = append(g.writes, string(p))
	return len(p), nil
}

func (g *gate) written() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.writes
}

// write writes each record to w, which must not refuse one.
func write(t *testing.T, w io.Writer, records ...string) {
	t.Helper()
	for _, r := range records {
		if n, err := w.Write([]byte(r)); n != len(r) || err != nil {
			t.Fatalf("Write of %d bytes = %d, %v; want all, nil", len(r), n, err)
		}
	}
}

func TestLogWriterPassesRecordsOn(t *testing.T) {
	g := newGate()
	close(g.opened)
	lw := newLogWriter(g)
	record := []byte("a\n")
	if n, err := lw.Write(record); n != 2 || err != nil {
		t.Errorf("Write = %d, %v; want 2, nil", n, err)
	}
	record[0] = 'x' // the writer has a copy
	write(t, lw, "b\n", "c\n")
	lw.close(time.Minute)
	if got, want := fmt.Sprintf("%q", g.written()), `["a\n" "b\n" "c\n"]`; got != want {
		t.Errorf("written: %s; want %s", got, want)
	}
	write(t, lw, "late\n")
	lw.close(time.Minute)
	if got := g.written(); len(got) != 3 {
		t.Errorf("written after close: %q", got[3:])
	}
}

func TestLogWriterReportsItsLosses(t *testing.T) {
	// The bubble's clock starts at midnight UTC on 1 January 2000.
	const lossText = "2000-01-01T00:00:00.000Z WARNING main: log records dropped count=%d\n"
	const lossJSON = `{"@timestamp":"2000-01-01T00:00:00.000Z","levelStr":"WARNING","component":"main","message":"log records dropped count=%d"}` + "\n"
	for _, asJSON := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			g := newGate()
			lw := newLogWriter(g)
			// The level does not matter: the lost records may have been of any.
			component(newLogger(lw, levelFatal, asJSON), "http")
			loss := lossText
			if asJSON {
				loss = lossJSON
			}

			// 256 records of 1024 bytes fill the buffer, with the one being written.
			var records []string
			for i := range 256 {
				records = append(records, fmt.Sprintf("%1023d\n", i))
			}
			write(t, lw, records...)
			synctest.Wait()
			// Once a record is dropped, shorter ones are too, so that the report
			// stands where all of them would.
			write(t, lw, "x\n", "y\n", strings.Repeat("z", 4094)+"\n")
			synctest.Wait()
			close(g.opened)
			synctest.Wait()
			write(t, lw, "after\n")
			synctest.Wait()

			want := append(records, fmt.Sprintf(loss, 3), "after\n")
			if got := g.written(); strings.Join(got, "") != strings.Join(want, "") {
				t.Errorf("JSON %v: %d records, the last %q; want %d, %q", asJSON, len(got), got[max(0, len(got)-2):], len(want), want[256:])
			}

			// What can never fit is counted too, and counting starts anew.
			write(t, lw, strings.Repeat("x", 256<<10+1))
			synctest.Wait()
			if got, want := g.written()[len(want):], fmt.Sprintf(loss, 1); len(got) != 1 || got[0] != want {
				t.Errorf("JSON %v: after a record that cannot fit: %q; want %q", asJSON, got, want)
			}
			lw.close(0)
			<-lw.done
		})
	}
}

func TestLogWriterTakesRecordsAgainWhenHalfIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		lw := newLogWriter(g)
		record := strings.Repeat("x", 1023) + "\n"
		for range 256 {
			write(t, lw, record)
		}
		synctest.Wait()
		write(t, lw, "dropped 1\n")
		for range 127 {
			g.opened <- struct{}{}
			synctest.Wait()
		}
		write(t, lw, "dropped 2\n") // 129 records are left, one more than half
		g.opened <- struct{}{}
		synctest.Wait()
		write(t, lw, "taken\n")
		close(g.opened)
		synctest.Wait()

		got := g.written()
		want := []string{record, "2000-01-01T00:00:00.000Z WARNING main: log records dropped count=2\n", "taken\n"}
		if len(got) != 258 || strings.Join(got[255:], "") != strings.Join(want, "") {
			t.Errorf("%d records, ending in %q; want 258, %q", len(got), got[max(0, len(got)-3):], want)
		}
		lw.close(0)
		<-lw.done
	})
}

func TestLogWriterCloseKeepsItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		lw := newLogWriter(g)
		write(t, lw, "a\n", "b\n", strings.Repeat("x", 256<<10)) // the last is dropped
		synctest.Wait()                                          // a is being written

		start := time.Now()
		lw.close(3 * time.Second)
		if got := time.Since(start); got != 3*time.Second {
			t.Errorf("close returned after %v; want 3s", got)
		}
		// Later than that nothing is written but what had begun.
		write(t, lw, "late\n")
		close(g.opened)
		<-lw.done
		if got := g.written(); len(got) != 1 || got[0] != "a\n" {
			t.Errorf("written: %q; want only a", got)
		}
	})
}

func TestLogWriterCloseFlushes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		lw := newLogWriter(g)
		write(t, lw, "a\n", "b\n")
		time.AfterFunc(2*time.Second, func() { close(g.opened) })

		start := time.Now()
		lw.close(3 * time.Second)
		if got := time.Since(start); got != 2*time.Second {
			t.Errorf("close returned after %v; want 2s, when all is written", got)
		}
		if got := strings.Join(g.written(), ""); got != "a\nb\n" {
			t.Errorf("written: %q; want a and b", got)
		}
	})
}

// Nobody reads the pipe, then somebody does.
func TestLogWriterOnStalledPipe(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	lw := newLogWriter(w)
	log := newLogger(lw, slog.LevelInfo, false)

	// Some 1.3 MB, more than the buffer and any pipe's default together.
	const sent = 5000
	value := strings.Repeat("v", 200)
	for i := range sent {
		log.Info("record", "i", i, "value", value)
	}
	lines := make(chan []string)
	go func() {
		b, _ := io.ReadAll(r)
		lines <- strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	}()
	lw.close(time.Minute) // all is read, so it does not take that long
	w.Close()

	got := <-lines
	n := len(got) - 1
	for i, line := range got[:n] {
		if want := fmt.Sprintf(" INFO main: record i=%d value=%s", i, value); !strings.HasSuffix(line, want) {
			t.Fatalf("line %d = %q; want …%q", i, line, want)
		}
	}
	if want := fmt.Sprintf(" WARNING main: log records dropped count=%d", sent-n); n == sent || !strings.HasSuffix(got[n], want) {
		t.Errorf("the line after %d records = %q; want …%q", n, got[n], want)
	}
}

func TestLogWriterCloseOnStalledPipe(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	lw := newLogWriter(w)
	for range 256 {
		write(t, lw, strings.Repeat("x", 1023)+"\n")
	}
	start := time.Now()
	lw.close(10 * time.Millisecond)
	if got := time.Since(start); got > 10*time.Second {
		t.Errorf("close(10ms) took %v", got)
	}
	// The write that hangs now fails, and its goroutine ends.
	r.Close()
	<-lw.done
}

// failsOnce fails its first write.
type failsOnce struct {
	gate
	failed bool
}

func (f *failsOnce) Write(p []byte) (int, error) {
	if !f.failed {
		f.failed = true
		return 0, syscall.EPIPE
	}
	return f.gate.Write(p)
}

func TestLogWriterSurvivesErrors(t *testing.T) {
	f := &failsOnce{gate: gate{opened: make(chan struct{})}}
	close(f.opened)
	lw := newLogWriter(f)
	write(t, lw, "a\n", "b\n", "c\n")
	lw.close(time.Minute)
	if got := strings.Join(f.written(), ""); got != "b\nc\n" {
		t.Errorf("written: %q; want all but the first, which failed", got)
	}
}

// A closed pipe and a closed file, as stderr may be.
func TestLogWriterOnClosedFiles(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	for range 2 {
		lw := newLogWriter(w)
		write(t, lw, "a\n", "b\n")
		lw.close(time.Minute)
		w.Close()
	}
}

// Every record is one write, and the race detector looks on.
func TestLoggersShareAWriter(t *testing.T) {
	var buf bytes.Buffer
	l := newLogger(&buf, slog.LevelInfo, true)
	var wg sync.WaitGroup
	for _, name := range []string{"http", "monitor"} {
		wg.Go(func() {
			for range 100 {
				component(l, name).Info("m")
			}
		})
	}
	wg.Wait()
	lines := strings.SplitAfter(buf.String(), "\n")
	if len(lines) != 201 {
		t.Fatalf("%d lines; want 200", len(lines)-1)
	}
	for _, line := range lines[:200] {
		if !json.Valid([]byte(line)) {
			t.Errorf("not a record: %q", line)
		}
	}
}
