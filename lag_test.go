package main

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

func TestLag(t *testing.T) {
	for _, tt := range []struct {
		in     lag
		text   string
		limit  uint64
		within bool
	}{
		{lag{}, "null", 0, false},
		{lag{}, "null", math.MaxUint64, false},
		{lag{0, true}, "0", 0, true},
		{lag{1, true}, "1", 0, false},
		{lag{1000, true}, "1000", 1000, true},
		{lag{1001, true}, "1001", 1000, false},
		{lag{math.MaxUint64, true}, "18446744073709551615", math.MaxUint64, true},
	} {
		if got := tt.in.String(); got != tt.text {
			t.Errorf("%+v.String() = %q; want %q", tt.in, got, tt.text)
		}
		if got := tt.in.within(tt.limit); got != tt.within {
			t.Errorf("lag %v within %d = %v; want %v", tt.in, tt.limit, got, tt.within)
		}
	}
}

func TestLagOf(t *testing.T) {
	for _, tt := range []struct {
		in   time.Duration
		want uint64
	}{
		{0, 0}, {999_999, 0}, {1_000_000, 1}, {1_999_999, 1}, {2 * time.Hour, 7_200_000}, {-1, 0}, {-time.Hour, 0},
	} {
		if got := lagOf(tt.in); got != (lag{tt.want, true}) {
			t.Errorf("lagOf(%v) = %v; want %d", tt.in, got, tt.want)
		}
	}
}

func TestLeast(t *testing.T) {
	for _, tt := range []struct{ a, b, want lag }{
		{lag{}, lag{}, lag{}},
		{lag{5, true}, lag{}, lag{5, true}},
		{lag{5, true}, lag{6, true}, lag{5, true}},
		{lag{0, true}, lag{6, true}, lag{0, true}},
		{lag{5, true}, lag{5, true}, lag{5, true}},
		{lag{0, true}, lag{}, lag{0, true}},
	} {
		if got := least(tt.a, tt.b); got != tt.want {
			t.Errorf("least(%v, %v) = %v; want %v", tt.a, tt.b, got, tt.want)
		}
		if got := least(tt.b, tt.a); got != tt.want {
			t.Errorf("least(%v, %v) = %v; want %v", tt.b, tt.a, got, tt.want)
		}
	}
}

// A check runs from seen to seen+took by our clock, and the server's clock is read
// somewhere between, so it is known to be ahead of ours by clock-end to clock-start.
// The correction is the most by which the replica's may be behind the master's:
// (master's clock - start) - (replica's clock - end), if that is above 0.
func TestCommitAge(t *testing.T) {
	moment := func(from, clock, to int) trait {
		return func(s *hostState) {
			seen(from)(s)
			took(to - from)(s)
			off(clock - from)(s)
		}
	}
	for _, tt := range []struct {
		name    string
		replica trait // start, its clock, end
		commit  int   // by the clock of the master
		master  trait // nil for none
		want    int
	}{
		{"no master", moment(1000, 1004, 1010), 704, nil, 300},
		{"no master, the clock is behind", moment(1000, 404, 1010), 704, nil, -300},
		// Both clocks agree with ours, and we cannot know it: 500-500 to 510-500, and
		// 1000-1010 to 1000-1000.
		{"clocks that agree, read at the beginning", moment(1000, 1000, 1010), 704, moment(500, 500, 510), 306},
		{"clocks that agree, read at the end", moment(1000, 1010, 1010), 704, moment(500, 510, 510), 316},
		{"clocks that agree, read apart", moment(1000, 1010, 1010), 704, moment(500, 500, 510), 306},
		{"read apart the other way", moment(1000, 1000, 1010), 704, moment(500, 510, 510), 316},
		{"checks without duration", moment(1000, 1000, 1000), 704, moment(500, 500, 500), 296},
		{"30 s behind", moment(1000, -29000, 1000), 704, moment(500, 500, 500), 296},
		{"30 s behind, between", moment(1000, -28996, 1010), 704, moment(500, 504, 510), 310},
		{"30 s ahead", moment(1000, 31000, 1000), 704, moment(500, 500, 500), 30296},
		{"5 ms ahead, which the round trip hides", moment(1000, 1007, 1010), 704, moment(500, 502, 510), 308},
		{"15 ms ahead", moment(1000, 1017, 1010), 704, moment(500, 502, 510), 313},
		{"the master is 30 s ahead", moment(1000, 1000, 1000), 30704, moment(500, 30500, 500), 296},
		{"the master is 30 s behind", moment(1000, 1000, 1000), -29296, moment(500, -29500, 500), 30296},
		{"the master was checked later", moment(1000, -29000, 1000), 704, moment(2000, 2000, 2000), 296},
		{"the master was checked an hour ago", moment(3_600_000, 3_590_000, 3_600_000), 3_599_704, moment(0, 0, 0), 296},
		{"a commit of the future", moment(1000, 1000, 1000), 1200, moment(500, 500, 500), -200},
	} {
		r := replica(tt.replica, committed(tt.commit)).observation
		var m *observation
		if tt.master != nil {
			s := master(tt.master)
			m = &s.observation
		}
		if got, ok := commitAge(r, m); got != millis(tt.want) || !ok {
			t.Errorf("%s: commitAge = %v, %v; want %v, true", tt.name, got, ok, millis(tt.want))
		}
		r.lastReplay = time.Time{}
		if got, ok := commitAge(r, m); ok {
			t.Errorf("%s, nothing replayed: commitAge = %v, true; want false", tt.name, got)
		}
	}
}

func TestByteLag(t *testing.T) {
	for _, tt := range []struct {
		name                               string
		master, replay, receive, latestEnd string
		receiving                          bool
		want                               lag
	}{
		{"caught up", "0/3000100", "0/3000100", "0/3000100", "0/3000100", true, lag{0, true}},
		{"behind the master", "0/3000100", "0/3000060", "0/3000060", "0/3000060", true, lag{0xA0, true}},
		{"behind what it received", "0/3000060", "0/3000060", "0/3000100", "0/3000080", true, lag{0xA0, true}},
		{"behind what its upstream has", "0/3000060", "0/3000060", "0/3000080", "0/3000100", true, lag{0xA0, true}},
		{"ahead of the master's last check", "0/3000000", "0/3000100", "0/3000100", "0/3000100", true, lag{0, true}},
		{"ahead of all, from the archive", "0/3000000", "0/3000100", "0/0", "0/0", false, lag{0, true}},
		{"from the archive", "0/3000100", "0/3000060", "0/0", "0/0", false, lag{0xA0, true}},
		{"the receiver is down", "0/4000000", "0/3000000", "0/3000000", "0/0", false, lag{0x1000000, true}},
		{"never a master", "0/0", "0/3000060", "0/3000100", "0/3000080", true, lag{0xA0, true}},
		{"never a master, no receiver", "0/0", "0/3000060", "0/3000100", "0/0", false, lag{}},
		{"never a master, receiving nothing yet", "0/0", "0/3000060", "0/0", "0/0", true, lag{0, true}},
		{"over 4 GiB", "2/0", "0/3000000", "0/3000000", "0/3000000", true, lag{0x1FD000000, true}},
		// What is only the header of a page is nothing to replay.
		{"the master behind a segment's header", "0/5000028", "0/5000000", "0/5000000", "0/5000000", true, lag{0, true}},
		{"the master behind a page's header", "0/5002018", "0/5002000", "0/5002000", "0/5002000", true, lag{0, true}},
		{"replay behind a page's header", "0/5002020", "0/5002018", "0/5002020", "0/5002020", true, lag{0x20, true}},
		{"received behind a page's header", "0/5000000", "0/5000000", "0/5000028", "0/0", true, lag{0, true}},
		{"reported behind a page's header", "0/5000000", "0/5000000", "0/0", "0/5002018", true, lag{0x2000, true}},
	} {
		o := observation{
			standby: true, replay: mustLSN(tt.replay), receive: mustLSN(tt.receive),
			latestEnd: mustLSN(tt.latestEnd), receiving: tt.receiving,
		}
		if got := byteLag(o, mustLSN(tt.master)); got != tt.want {
			t.Errorf("%s: byteLag = %v; want %v", tt.name, got, tt.want)
		}
	}
}

// moments describes what a history says of each position, in milliseconds.
func moments(h *masterHistory, positions ...string) string {
	text := ""
	for _, pos := range positions {
		if at, ok := h.replayed(mustLSN(pos)); ok {
			text += fmt.Sprintf(" %s=%d", pos, at.Sub(testBase).Milliseconds())
		} else {
			text += " " + pos + "=none"
		}
	}
	return text[1:]
}

func TestMasterHistory(t *testing.T) {
	type seen struct {
		insert string
		ms     int
	}
	for _, tt := range []struct {
		name string
		seen []seen
		want string
	}{
		{"empty", nil, "0/0=none 0/3000060=none FFFFFFFF/FFFFFFFF=none"},
		{"one", []seen{{"0/3000060", 10}}, "0/3000058=none 0/3000060=10 0/3000068=10"},
		{"the latest time of a position", []seen{{"0/3000060", 10}, {"0/3000060", 20}}, "0/3000058=none 0/3000060=20"},
		{"several", []seen{{"0/3000060", 10}, {"0/3000100", 20}, {"0/3000200", 30}},
			"0/3000058=none 0/3000060=10 0/30000F8=10 0/3000100=20 0/30001F8=20 0/3000200=30 1/0=30"},
		{"behind a header", []seen{{"0/5000000", 10}, {"0/5000028", 20}, {"0/5000060", 30}},
			"0/4FFFFF8=none 0/5000000=20 0/5000028=20 0/5000060=30"},
		{"back", []seen{{"0/3000060", 10}, {"0/3000200", 20}, {"0/3000100", 30}},
			"0/3000060=none 0/30000F8=none 0/3000100=30 0/3000200=30"},
		{"back and on", []seen{{"0/3000200", 20}, {"0/3000100", 30}, {"0/3000300", 40}},
			"0/3000100=30 0/3000200=30 0/3000300=40"},
	} {
		var h masterHistory
		for _, s := range tt.seen {
			h.add(mustLSN(s.insert), testBase.Add(millis(s.ms)))
		}
		var positions []string
		for _, field := range strings.Fields(tt.want) {
			pos, _, _ := strings.Cut(field, "=")
			positions = append(positions, pos)
		}
		if got := moments(&h, positions...); got != tt.want {
			t.Errorf("%s: replayed: %s; want %s", tt.name, got, tt.want)
		}
		h.reset()
		if got := moments(&h, "1/0"); got != "1/0=none" {
			t.Errorf("%s, after a reset: replayed: %s; want 1/0=none", tt.name, got)
		}
	}
}

// Position n is seen at n milliseconds. When there are 512, the older half goes.
func TestMasterHistoryIsBounded(t *testing.T) {
	var h masterHistory
	position := func(n int) lsn { return lsn(n)*walPageSize + 800 }
	for n := 1; n <= 10_000; n++ {
		h.add(position(n), testBase.Add(millis(n)))
		if got := len(h.entries); got > 512 || got < min(n, 257) {
			t.Fatalf("%d entries after %d positions; want 257 to 512", got, n)
		}
		oldest := n - len(h.entries) + 1
		for _, tt := range []struct {
			at   lsn
			want int // 0 for none
		}{
			{position(n), n}, {position(n) - 8, n - 1}, {position(n) + walPageSize*50, n},
			{position(oldest), oldest}, {position(oldest) - 8, 0},
		} {
			if tt.want < oldest {
				tt.want = 0
			}
			at, ok := h.replayed(tt.at)
			if ok != (tt.want > 0) || ok && at.Sub(testBase) != millis(tt.want) {
				t.Fatalf("after %d positions, replayed(%v) = %v, %v; want %d ms", n, tt.at, at.Sub(testBase), ok, tt.want)
			}
		}
	}
	// Seeing one position for long takes no room.
	size := len(h.entries)
	for n := range 2000 {
		h.add(position(10_000), testBase.Add(millis(10_000+n)))
	}
	if len(h.entries) != size {
		t.Errorf("%d entries after seeing the last position again; want %d", len(h.entries), size)
	}
}

func TestMasterHistoryAllocations(t *testing.T) {
	var h masterHistory
	n := 0
	for ; n < 2*historyLen; n++ {
		h.add(lsn(n)*1000, testBase)
	}
	if got := testing.AllocsPerRun(2*historyLen, func() { n++; h.add(lsn(n)*1000, testBase); h.replayed(lsn(n) * 990) }); got != 0 {
		t.Errorf("a full history allocates %v times; want 0", got)
	}
}
