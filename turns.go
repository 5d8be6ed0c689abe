package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// turns makes new connections take turns, first come, first served, because TLS
// and SCRAM cost far more than a status query.
type turns struct {
	spacing time.Duration // between the starts of two connections
	turn    chan struct{} // holds a value while nobody has the turn
	opening atomic.Int32  // connections being opened or waiting to be

	mu    sync.Mutex // guards the following
	start time.Time  // of the next connection
}

const (
	turnLimit  = time.Second            // how long one connection may keep the turn
	costlyRest = 100 * time.Millisecond // between a costly set-up and the next
	maxSpacing = 250 * time.Millisecond
)

func newTurns(sleep time.Duration, hosts int) *turns {
	t := &turns{spacing: min(sleep/time.Duration(hosts), maxSpacing), turn: make(chan struct{}, 1)}
	t.turn <- struct{}{}
	return t
}

// awaitStart waits until a connection may start.
func (t *turns) awaitStart(ctx context.Context) error {
	t.mu.Lock()
	now := time.Now()
	at := t.start
	if at.Before(now) {
		at = now
	}
	t.start = at.Add(t.spacing)
	t.mu.Unlock()
	return sleep(ctx, at.Sub(now))
}

// acquire waits for the turn to negotiate and authenticate. The turn ends with
// release, or by itself after turnLimit. (Goroutines receive from a channel in
// the order in which they came.)
func (t *turns) acquire(ctx context.Context) (release func(costly bool), err error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-t.turn:
	}
	var once sync.Once
	pass := func() { t.turn <- struct{}{} }
	limit := time.AfterFunc(turnLimit, func() { once.Do(pass) })
	return func(costly bool) {
		limit.Stop()
		once.Do(func() {
			if costly {
				time.AfterFunc(costlyRest, pass)
			} else {
				pass()
			}
		})
	}, nil
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
