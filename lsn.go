package main

import (
	"fmt"
	"strconv"
	"strings"
)

// lsn is a position in the write-ahead log, in bytes from its beginning. 0 is
// PostgreSQL's InvalidXLogRecPtr: it precedes every record and stands for
// "unknown".
type lsn uint64

// parseLSN reads the text form of pg_lsn: two hexadecimal numbers of at most 8
// digits, of either case, with a slash between them.
func parseLSN(s string) (lsn, error) {
	hi, lo, ok := strings.Cut(s, "/")
	h, okHi := parseHalf(hi)
	l, okLo := parseHalf(lo)
	if !ok || !okHi || !okLo {
		return 0, fmt.Errorf("%q is not an LSN", s)
	}
	return lsn(h)<<32 | lsn(l), nil
}

// parseHalf reads one half of an LSN. The length is checked because ParseUint
// takes any number of leading zeros, and PostgreSQL does not.
func parseHalf(s string) (uint32, bool) {
	if len(s) == 0 || len(s) > 8 {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 16, 32)
	return uint32(n), err == nil
}

// String formats l as pg_lsn does, such as 16/B374D848.
func (l lsn) String() string { return string(l.append(nil)) }

// append appends the text form of l to b.
func (l lsn) append(b []byte) []byte {
	const digits = "0123456789ABCDEF"
	hex := func(v uint32) {
		for shift := 28; shift >= 0; shift -= 4 {
			if v>>shift != 0 || shift == 0 {
				b = append(b, digits[v>>shift&15])
			}
		}
	}
	hex(uint32(l >> 32))
	b = append(b, '/')
	hex(uint32(l))
	return b
}

// The WAL is written in pages of XLOG_BLCKSZ bytes. Each begins with a header,
// longer on the first page of a segment file (SizeOfXLogShortPHD and
// SizeOfXLogLongPHD in access/xlog_internal.h).
const (
	walPageSize        = 8192
	walShortPageHeader = 24
	walLongPageHeader  = 40
)

// pageStart returns l, or, when no more than a page header stands before l on
// its page, the start of that page.
//
// On a page boundary pg_current_wal_insert_lsn already counts the header of the
// next page (XLogBytePosToRecPtr), while a replica that has replayed everything
// reports the boundary itself (XLogBytePosToEndRecPtr): after pg_switch_wal the
// master stays at 0/5000028 and its replicas at 0/5000000. Positions are
// therefore compared by their pageStart. No record ends just behind a short
// header, as its continuation takes at least 8 bytes more. One may end 40 bytes
// into a page that is not a segment's first; it began on the page before, so
// that no replica stands between the two, and nothing is lost by moving both.
func (l lsn) pageStart() lsn {
	if off := l % walPageSize; off == walShortPageHeader || off == walLongPageHeader {
		return l - off
	}
	return l
}

// timeline is a WAL history's number, from 1 up. 0 stands for "unknown".
type timeline uint32

// parseTimeline reads the decimal number of a timeline, 1 to 4294967295.
func parseTimeline(s string) (timeline, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a timeline", s)
	}
	return timeline(n), nil
}

// walFileTimeline returns the timeline in the name of a WAL file, its first 8
// hexadecimal digits.
func walFileTimeline(name string) (timeline, error) {
	if len(name) != 24 {
		return 0, fmt.Errorf("%q is not the name of a WAL file", name)
	}
	n, err := strconv.ParseUint(name[:8], 16, 32)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not the name of a WAL file", name)
	}
	return timeline(n), nil
}

// differs reports whether t and u are both known and not the same. An unknown
// timeline differs from none.
func (t timeline) differs(u timeline) bool { return t != 0 && u != 0 && t != u }
