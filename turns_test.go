package main

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// monTurn is one connection that is opened with turns, by its own goroutine.
type monTurn struct {
	comes  time.Duration // after the start
	takes  time.Duration // to set up
	costly bool
}

// monTakeTurns opens connections, in turns, and returns when each had its turn.
func monTakeTurns(t *testing.T, turns *turns, conns []monTurn) (got []time.Duration) {
	t.Helper()
	got = make([]time.Duration, len(conns))
	began := time.Now()
	var wg sync.WaitGroup
	for i, c := range conns {
		wg.Go(func() {
			time.Sleep(c.comes)
			release, err := turns.acquire(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			got[i] = time.Since(began)
			time.Sleep(c.takes)
			release(c.costly)
		})
	}
	wg.Wait()
	return got
}

func TestTurns(t *testing.T) {
	const ms = time.Millisecond
	for _, tt := range []struct {
		name  string
		conns []monTurn
		want  []time.Duration
	}{
		{"first come, first served", []monTurn{{4 * ms, 10 * ms, false}, {3 * ms, 10 * ms, false}, {0, 10 * ms, false}, {1 * ms, 10 * ms, false}},
			monMS(30, 20, 0, 10)},
		{"rest after a costly one", []monTurn{{0, 10 * ms, true}, {1 * ms, 10 * ms, false}, {2 * ms, 10 * ms, true}, {500 * ms, 0, false}},
			monMS(0, 110, 120, 500)},
		{"one that comes during the rest", []monTurn{{0, 10 * ms, true}, {60 * ms, 0, false}}, monMS(0, 110)},
		// One that keeps its turn for too long loses it, and its release then
		// neither passes another's on nor makes it rest.
		{"at most a second", []monTurn{{0, 1500 * ms, true}, {1 * ms, 900 * ms, false}, {2 * ms, 10 * ms, false}}, monMS(0, 1000, 1900)},
		{"a second exactly", []monTurn{{0, time.Second - 1, true}, {1 * ms, 0, false}}, []time.Duration{0, 1100*ms - 1}},
	} {
		synctest.Test(t, func(t *testing.T) {
			turns := newTurns(time.Second, 1)
			if got := monTakeTurns(t, turns, tt.conns); !slices.Equal(got, tt.want) {
				t.Errorf("%s: turns at %v; want %v", tt.name, got, tt.want)
			}
			// Nobody is left with the turn, and there is only one.
			time.Sleep(2 * time.Second)
			if n := len(turns.turn); n != 1 {
				t.Errorf("%s: %d turns in the end; want 1", tt.name, n)
			}
		})
	}
}

// With 64 hosts that wait, each has its turn before any has a second one.
func TestTurnsStarveNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const hosts = 64
		turns := newTurns(time.Second, hosts)
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range hosts {
			wg.Go(func() {
				for range 5 {
					release, err := turns.acquire(t.Context())
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					order = append(order, i)
					mu.Unlock()
					time.Sleep(time.Millisecond)
					release(false)
				}
			})
		}
		wg.Wait()
		for round := range slices.Chunk(order, hosts) {
			if slices.Sort(round); len(slices.Compact(round)) != hosts {
				t.Fatalf("one round of turns was %v; want each of %d hosts once", round, hosts)
			}
		}
	})
}

func TestTurnsEndWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(time.Hour, 1)
		release, err := turns.acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := turns.acquire(ctx); err != context.DeadlineExceeded {
			t.Errorf("acquire beside another = %v; want %v", err, context.DeadlineExceeded)
		}
		release(false)
		release, err = turns.acquire(t.Context())
		if err != nil {
			t.Fatalf("acquire after one that gave up = %v", err)
		}
		release(false)
		turns.awaitStart(t.Context())
		if err := turns.awaitStart(ctx); err != context.DeadlineExceeded {
			t.Errorf("awaitStart = %v; want %v", err, context.DeadlineExceeded)
		}
	})
}

func TestStartSpacing(t *testing.T) {
	for _, tt := range []struct {
		sleep time.Duration
		hosts int
		want  time.Duration // between two starts
	}{
		{time.Second, 3, 250 * time.Millisecond},
		{time.Second, 4, 250 * time.Millisecond},
		{time.Second, 5, 200 * time.Millisecond},
		{time.Second, 64, 15625 * time.Microsecond},
		{100 * time.Millisecond, 1, 100 * time.Millisecond},
		{time.Hour, 1, 250 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			turns, began := newTurns(tt.sleep, tt.hosts), time.Now()
			for i := range 5 {
				turns.awaitStart(t.Context())
				if got, want := time.Since(began), time.Duration(i)*tt.want; got != want {
					t.Errorf("period %v, %d hosts: start %d at %v; want %v", tt.sleep, tt.hosts, i, got, want)
				}
			}
			// Time in which nobody starts does not accumulate.
			time.Sleep(time.Hour)
			began = time.Now()
			turns.awaitStart(t.Context())
			turns.awaitStart(t.Context())
			if got := time.Since(began); got != tt.want {
				t.Errorf("period %v, %d hosts: two starts after a pause take %v; want %v", tt.sleep, tt.hosts, got, tt.want)
			}
		})
	}
}

// monSilent is a server whose TCP connections open and on which nothing ever
// comes back, reached by a link: a kept connection costs the timeout, a new one
// the turn, and its wait for that is not counted.
func monSilent(turns *turns) monAnswer {
	kept := true
	return func(ctx context.Context, timeout time.Duration) (observation, error) {
		if !kept {
			if err := turns.awaitStart(ctx); err != nil {
				return observation{}, err
			}
			release, err := turns.acquire(ctx)
			if err != nil {
				return observation{}, err
			}
			defer release(false)
		}
		kept = false
		return monFrozen()(ctx, timeout)
	}
}

// The README's example: four servers at once that accept and say nothing, each
// attempt to connect keeping the turn for the full second.
func TestFourSilentServers(t *testing.T) {
	for _, phase := range []time.Duration{time.Millisecond, 500 * time.Millisecond, 999 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			var hosts []*monHost
			for i := range 4 {
				hosts = append(hosts, newMonHost(t, monAnswers(0, monReplica)))
				if i == 0 {
					hosts[0].set(monAnswers(0, monMaster))
				}
			}
			c := monConfig(4)
			m, _ := startMon(t, c, hosts...)
			monUntil(hosts[0], 5*time.Second+phase)
			turns := newTurns(c.sleep, len(hosts))
			for _, h := range hosts {
				h.set(monSilent(turns))
			}
			outage := time.Now()
			// The kept connections fail at 7 s; then come two rounds of four turns.
			for v := m.table.view(); slices.ContainsFunc(v.hosts, func(s hostState) bool { return s.alive }); v = m.table.view() {
				<-v.changed
			}
			if got, want := time.Since(outage), 10*time.Second-phase; got < want || got > want+m.patience(m.table.view()) {
				t.Errorf("outage at +%v: all dead after %v; want %v", phase, got, want)
			}
		})
	}
}
