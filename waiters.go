package main

import "sync"

// waiters are requests that wait for a view to their liking. Each new view is
// shown to all of them by its publisher, so that only those wake up that have
// something to do: while replicas lag there may be a thousand, and hundreds of
// views a second.
type waiters struct {
	mu  sync.Mutex
	all []*waiter
}

// waiter is one of them.
type waiter struct {
	likes func(*view) bool // called by others, one at a time
	now   chan struct{}    // holds a value when it has liked a view
	at    int              // its index in all
}

// add has each view that is published from now on shown to likes, until remove.
func (s *waiters) add(likes func(*view) bool) *waiter {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &waiter{likes: likes, now: make(chan struct{}, 1), at: len(s.all)}
	s.all = append(s.all, w)
	return w
}

func (s *waiters) remove(w *waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := len(s.all) - 1
	s.all[w.at], s.all[end].at = s.all[end], w.at
	s.all[end] = nil
	s.all = s.all[:end]
}

// show wakes those who like v.
func (s *waiters) show(v *view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.all {
		if w.likes(v) {
			select {
			case w.now <- struct{}{}:
			default:
			}
		}
	}
}
