package main

import (
	"fmt"
	"math/big"
	"strings"
	"testing"
)

// mustLSN is parseLSN for positions that are known to be right.
func mustLSN(s string) lsn {
	l, err := parseLSN(s)
	if err != nil {
		panic(err)
	}
	return l
}

func TestParseLSN(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want lsn
		text string // as formatted
	}{
		{"0/0", 0, "0/0"},
		{"0/1", 1, "0/1"},
		{"0/3000060", 50331744, "0/3000060"},
		{"1/0", 4294967296, "1/0"},
		{"16/B374D848", 97500059720, "16/B374D848"},
		{"16/b374d848", 97500059720, "16/B374D848"},
		{"a/Bc", 42949673148, "A/BC"},
		{"0/FFFFFFFF", 4294967295, "0/FFFFFFFF"},
		{"FFFFFFFF/FFFFFFFF", 18446744073709551615, "FFFFFFFF/FFFFFFFF"},
		{"00000001/00000000", 4294967296, "1/0"},
		{"00000000/00000000", 0, "0/0"},
		{"1/00000F00", 4294971136, "1/F00"},
		{"10000000/10", 1152921504606846992, "10000000/10"},
	} {
		got, err := parseLSN(tt.in)
		if err != nil || got != tt.want {
			t.Errorf("parseLSN(%q) = %d, %v; want %d", tt.in, uint64(got), err, uint64(tt.want))
		}
		if got := tt.want.String(); got != tt.text {
			t.Errorf("lsn(%d).String() = %q; want %q", uint64(tt.want), got, tt.text)
		}
	}
}

func TestParseLSNRejects(t *testing.T) {
	for _, in := range []string{
		"", "/", "0", "0/", "/0", "1/2/3", "0/ 1", " 0/1", "0/1 ", "0/1\n", "0\\1", "0-1",
		"0/000000001", "000000000/1", "123456789/0", "0/123456789", // 9 digits
		"0/g", "x/0", "0x1/0", "0/0x1", "+1/0", "0/+1", "-1/0", "0/-1", "0/1_0", "0/1.0", "٣/0", "0/١",
	} {
		if got, err := parseLSN(in); err == nil {
			t.Errorf("parseLSN(%q) = %v; want an error", in, got)
		}
	}
}

// naiveLSN reads an LSN digit by digit.
func naiveLSN(s string) (*big.Int, bool) {
	n := new(big.Int)
	halves := strings.Split(s, "/")
	if len(halves) != 2 {
		return nil, false
	}
	for _, half := range halves {
		if half == "" || len(half) > 8 {
			return nil, false
		}
		n.Lsh(n, 32)
		v := new(big.Int)
		for _, c := range strings.ToLower(half) {
			d := strings.IndexRune("0123456789abcdef", c)
			if d < 0 {
				return nil, false
			}
			v.Mul(v, big.NewInt(16)).Add(v, big.NewInt(int64(d)))
		}
		n.Add(n, v)
	}
	return n, true
}

func FuzzParseLSN(f *testing.F) {
	for _, s := range []string{"0/3000060", "16/B374D848", "ffffffff/FFFFFFFF", "0/", "1/2/3", "000000000/1", "+1/0", "0/1_0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := parseLSN(s)
		want, ok := naiveLSN(s)
		if ok != (err == nil) || ok && (!want.IsUint64() || want.Uint64() != uint64(got)) {
			t.Fatalf("parseLSN(%q) = %d, %v; want %v, %v", s, uint64(got), err, want, ok)
		}
		if err != nil {
			return
		}
		text := got.String()
		if again, err := parseLSN(text); err != nil || again != got {
			t.Errorf("parseLSN(%q) = %v, %v; want %v", text, again, err, got)
		}
		if want := fmt.Sprintf("%X/%X", uint64(got)>>32, uint64(got)&0xFFFFFFFF); text != want {
			t.Errorf("lsn(%d).String() = %q; want %q", uint64(got), text, want)
		}
	})
}

func TestPageStart(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"0/0", "0/0"},
		{"0/3000060", "0/3000060"}, // a record behind the segment's header
		// The first page of a segment of 16 MiB has a header of 40 bytes.
		{"0/5000000", "0/5000000"},
		{"0/5000028", "0/5000000"},
		{"0/5000027", "0/5000027"},
		{"0/5000029", "0/5000029"},
		{"0/5000030", "0/5000030"},
		// Other pages, each of 8 KiB, have one of 24 bytes.
		{"0/5002000", "0/5002000"},
		{"0/5002018", "0/5002000"},
		{"0/5004018", "0/5004000"},
		{"0/5003018", "0/5003018"}, // the middle of a page
		{"0/5002017", "0/5002017"},
		{"0/5002019", "0/5002019"},
		{"0/5002020", "0/5002020"},
		{"0/5001FF8", "0/5001FF8"}, // the last 8 bytes of a page
		{"0/5002028", "0/5002000"}, // segments may be of 1 MiB, and nothing is lost
		{"0/5100028", "0/5100000"},
		{"0/FFFFE018", "0/FFFFE000"},
		{"1/28", "1/0"},
		{"16/B374C018", "16/B374C000"},
		{"FFFFFFFF/FF000028", "FFFFFFFF/FF000000"},
	} {
		if got := mustLSN(tt.in).pageStart(); got.String() != tt.want {
			t.Errorf("lsn(%s).pageStart() = %v; want %s", tt.in, got, tt.want)
		}
	}
}

// A replica that has replayed up to the end of a record stands at or behind the
// insert position that a master reported then, and before a later one, however the
// records lie on the pages.
func TestPageStartOrder(t *testing.T) {
	const size = usableSegment
	for _, start := range []uint64{size - 200, size + firstPage - 200, size + firstPage + 7*usablePage - 200} {
		for first := start; first <= start+400; first += 8 { // the end of a record
			for length := uint64(24); length <= 200; length += 8 { // of the next one
				next := first + length
				for _, tt := range []struct {
					replay, insert uint64
					reached        bool
				}{{first, first, true}, {next, next, true}, {next, first, true}, {first, next, false}} {
					replay, insert := endPtr(tt.replay), recPtr(tt.insert)
					if got := replay.pageStart() >= insert.pageStart(); got != tt.reached {
						t.Fatalf("replay %v has reached insert %v: %v; want %v", replay, insert, got, tt.reached)
					}
				}
			}
		}
	}
}

// Positions without page headers are turned into addresses as by PostgreSQL.
func TestWALPositions(t *testing.T) {
	for _, tt := range []struct {
		pos      uint64
		rec, end string
	}{
		{0, "0/28", "0/0"},
		{24, "0/40", "0/40"},
		{8152, "0/2018", "0/2000"}, // 8192 - 40: the first page is full
		{8160, "0/2020", "0/2020"},
		{8152 + 8168, "0/4018", "0/4000"}, // and 8192 - 24 on the second one
		{16728048, "0/1000028", "0/1000000"},
		{16728048 - 8, "0/FFFFF8", "0/FFFFF8"},
		{2 * 16728048, "0/2000028", "0/2000000"},
	} {
		if rec, end := recPtr(tt.pos), endPtr(tt.pos); rec.String() != tt.rec || end.String() != tt.end {
			t.Errorf("position %d = %v, %v; want %s, %s", tt.pos, rec, end, tt.rec, tt.end)
		}
	}
}

func TestParseTimeline(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want timeline // 0 for an error
	}{
		{"1", 1}, {"2", 2}, {"10", 10}, {"4294967295", 4294967295}, {"007", 7},
		{"0", 0}, {"00", 0}, {"4294967296", 0}, {"99999999999999999999", 0}, {"", 0}, {"-1", 0}, {"+1", 0},
		{" 1", 0}, {"1 ", 0}, {"1.0", 0}, {"0x1", 0}, {"1e3", 0}, {"1_0", 0}, {"a", 0}, {"00000001", 1},
	} {
		got, err := parseTimeline(tt.in)
		if got != tt.want || (err == nil) != (tt.want != 0) {
			t.Errorf("parseTimeline(%q) = %d, %v; want %d", tt.in, got, err, tt.want)
		}
	}
}

func TestWALFileTimeline(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want timeline // 0 for an error
	}{
		{"000000010000000000000005", 1},
		{"0000000A00000016000000B3", 10},
		{"0000000a00000016000000b3", 10},
		{"FFFFFFFF0000000000000001", 4294967295},
		{"000000000000000000000005", 0},
		{"", 0},
		{"00000001000000000000000", 0},   // 23 digits
		{"0000000100000000000000050", 0}, // 25
		{"00000001.history", 0},
		{"0000000G0000000000000005", 0},
		{"+00000010000000000000005", 0},
	} {
		got, err := walFileTimeline(tt.in)
		if got != tt.want || (err == nil) != (tt.want != 0) {
			t.Errorf("walFileTimeline(%q) = %d, %v; want %d", tt.in, got, err, tt.want)
		}
	}
}

func TestTimelineDiffers(t *testing.T) {
	for _, tt := range []struct {
		a, b timeline
		want bool
	}{
		{1, 1, false}, {1, 2, true}, {2, 1, true}, {0, 1, false}, {1, 0, false}, {0, 0, false},
		{4294967295, 4294967294, true},
	} {
		if got := tt.a.differs(tt.b); got != tt.want {
			t.Errorf("timeline(%d).differs(%d) = %v; want %v", tt.a, tt.b, got, tt.want)
		}
	}
}

func BenchmarkParseLSN(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseLSN("16/B374D848"); err != nil {
			b.Fatal(err)
		}
	}
}

func TestParseLSNAllocations(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() { mustLSN("16/B374D848") }); n != 0 {
		t.Errorf("parseLSN allocates %v times; want 0", n)
	}
}
