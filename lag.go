package main

import (
	"slices"
	"strconv"
	"time"
)

// lag is an amount of milliseconds or bytes that may be unknown. The zero value
// is unknown.
type lag struct {
	n     uint64
	known bool
}

// append appends l to b as JSON.
func (l lag) append(b []byte) []byte {
	if !l.known {
		return append(b, "null"...)
	}
	return strconv.AppendUint(b, l.n, 10)
}

func (l lag) String() string { return string(l.append(nil)) }

// within reports whether l meets a threshold. An unknown lag meets none.
func (l lag) within(limit uint64) bool { return l.known && l.n <= limit }

// lagOf returns d as a lag in whole milliseconds, rounded down, not below 0.
func lagOf(d time.Duration) lag { return lag{uint64(max(0, d).Milliseconds()), true} }

// least returns the smaller of two lags of which either may be unknown.
func least(a, b lag) lag {
	if !a.known || b.known && b.n < a.n {
		return b
	}
	return a
}

// commitAge returns the age of the last transaction that replica has replayed,
// as of its check, and false while it has replayed none since it started.
//
// The replica's clock tells the moment, but the master's clock told when the
// transaction ended. Each check bounds its server's clock between that clock's
// reading less the end of the check and less its start, so that two checks bound
// how far the replica's clock may be behind the master's. The age is increased
// by that much, as only then can it be no less than the true one. A clock that
// is ahead makes the age larger and is left alone. Without master the clocks are
// taken to agree. An age below 0 all the same means that some other clock told
// the time.
func commitAge(replica observation, master *observation) (time.Duration, bool) {
	if replica.lastReplay.IsZero() {
		return 0, false
	}
	age := replica.clock.Sub(replica.lastReplay)
	if master != nil {
		// Our monotonic clock links the two checks, and its own setting drops out.
		between := replica.end.Sub(master.start)
		behind := between - replica.clock.Sub(master.clock)
		age += max(0, behind)
	}
	return age, true
}

// byteLag returns how many bytes of WAL replica has yet to replay, as of its
// check: to the furthest of what it received, what its upstream has reported and
// master, a master's write position, 0 when no master was ever seen. Without a
// master and without a running WAL receiver there is nothing to compare with.
func byteLag(replica observation, master lsn) lag {
	if master == 0 && !replica.receiving {
		return lag{}
	}
	end := max(master.pageStart(), replica.receive.pageStart(), replica.latestEnd.pageStart())
	replay := replica.replay.pageStart()
	if end < replay {
		return lag{0, true}
	}
	return lag{uint64(end - replay), true}
}

// masterHistory remembers how far one master had inserted WAL at the start of
// its recent checks: everything before a position had been inserted, at the
// latest, shortly after that moment. A replica that has replayed up to the
// position therefore shows everything that was committed by then.
type masterHistory struct {
	entries []masterEntry // positions ascending, moments ascending
}

type masterEntry struct {
	insert lsn       // by pageStart
	at     time.Time // start of the latest check that saw this position
}

// historyLen is how many positions are remembered. Checks made every 10 ms for a
// waiting client fill it in 5 seconds.
const historyLen = 512

// add records that a check which started at the given moment saw insert. A
// position before the last one means another WAL history, and a new beginning.
func (h *masterHistory) add(insert lsn, at time.Time) {
	insert = insert.pageStart()
	n := len(h.entries)
	switch {
	case n > 0 && h.entries[n-1].insert == insert:
		h.entries[n-1].at = at
		return
	case n > 0 && h.entries[n-1].insert > insert:
		h.entries = h.entries[:0]
	case n == historyLen:
		h.entries = slices.Delete(h.entries, 0, historyLen/2)
	}
	h.entries = append(h.entries, masterEntry{insert, at})
}

// reset forgets everything, when another master or timeline is followed.
func (h *masterHistory) reset() { h.entries = h.entries[:0] }

// replayed returns the latest moment of which everything inserted by then has
// been replayed at position replay.
func (h *masterHistory) replayed(replay lsn) (time.Time, bool) {
	i, found := slices.BinarySearchFunc(h.entries, replay.pageStart(), func(e masterEntry, l lsn) int {
		switch {
		case e.insert < l:
			return -1
		case e.insert > l:
			return 1
		}
		return 0
	})
	if found {
		i++
	}
	if i == 0 {
		return time.Time{}, false
	}
	return h.entries[i-1].at, true
}
