package main

import (
	"math/rand/v2"
	"testing"
)

// TestWaiters: a view is shown to those who wait, whoever came and went before,
// and wakes those who like it, once.
func TestWaiters(t *testing.T) {
	type client struct {
		*waiter
		shown int
	}
	var (
		ws      waiters
		waiting []*client
		r       = rand.New(rand.NewPCG(1, 2))
	)
	for range 1000 {
		switch n := r.IntN(3); {
		case n > 0:
			c := &client{}
			pleased := n == 1
			c.waiter = ws.add(func(v *view) bool {
				c.shown++
				return v.ready && pleased
			})
			waiting = append(waiting, c)
		case len(waiting) > 0:
			i := r.IntN(len(waiting))
			c := waiting[i]
			ws.remove(c.waiter)
			waiting = append(waiting[:i:i], waiting[i+1:]...)
			shown := c.shown
			ws.show(&view{ready: true})
			if c.shown != shown {
				t.Fatal("a view was shown to one who has gone")
			}
		}
	}
	for _, c := range waiting {
		c.shown = 0
		for len(c.now) > 0 {
			<-c.now
		}
	}
	ws.show(&view{})
	for _, c := range waiting {
		if c.shown != 1 || len(c.now) != 0 {
			t.Fatalf("a view that nobody likes was shown %d times and woke %d; want 1, 0", c.shown, len(c.now))
		}
	}
	ws.show(&view{ready: true})
	ws.show(&view{ready: true})
	for _, c := range waiting {
		want := 0
		if c.likes(&view{ready: true}) {
			want = 1
		}
		if c.shown != 4 || len(c.now) != want {
			t.Fatalf("after two more it was shown %d times and %d wake-ups are due; want 4, %d", c.shown, len(c.now), want)
		}
	}
	for _, c := range waiting {
		ws.remove(c.waiter)
	}
	if len(ws.all) != 0 {
		t.Errorf("%d wait when all have gone; want none", len(ws.all))
	}
}

// BenchmarkWaiters is a check of one of three hosts while 1,000 requests wait for
// a position that none has replayed.
func BenchmarkWaiters(b *testing.B) {
	s := httpServer(httpHosts("m", "r1", "r2")...)
	s.monitor.table.observe(0, httpMaster(0x3000060))
	s.monitor.table.observe(1, httpReplica(0x2FFFE98, 10))
	f := filter{minLSN: 0x4000000, hasMinLSN: true}
	for range 1000 {
		s.monitor.table.waiters.add(func(v *view) bool { return v.pickReplica(&f, 0) >= 0 })
	}
	for b.Loop() {
		s.monitor.table.observe(2, httpReplica(0x2FFFE98, 10))
	}
}
