package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestReadYourWrites has clients that write to the primary, ask for a host that
// has the write, and read it there. One replica keeps falling behind meanwhile.
func TestReadYourWrites(t *testing.T) {
	const (
		clients       = 4
		writes        = 150 // of each client
		readsPerWrite = 10
	)
	c := newCluster(t, 2)
	c.exec(0, "CREATE TABLE t (id text PRIMARY KEY)")
	c.waitReplayed(1)
	c.waitReplayed(2)
	d := startDaemon(t, c.env("pg_status__sleep_ms=10")...)
	d.waitReady()
	d.eventually("/replica?min_lsn="+c.lsn(0), c.name(1))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var background sync.WaitGroup
	background.Go(func() {
		for ctx.Err() == nil {
			for _, statement := range []string{"SELECT pg_wal_replay_pause()", "SELECT pg_wal_replay_resume()"} {
				time.Sleep(100 * time.Millisecond)
				if _, err := c.db(2).Exec(statement); err != nil {
					t.Errorf("%s: %v", statement, err)
					return
				}
			}
			// PostgreSQL 13 looks once a second whether it may go on.
			for from := c.lsn(2); ctx.Err() == nil && c.lsn(2) == from; {
				time.Sleep(10 * time.Millisecond)
			}
		}
	})

	var stale, fromReplica, fromMaster, replicaBehind atomic.Int64
	node := map[string]int{c.name(0): 0, c.name(1): 1, c.name(2): 2}
	client := func(name int) error {
		for w := range writes {
			id := fmt.Sprintf("%d-%d", name, w)
			if _, err := c.db(0).ExecContext(ctx, "INSERT INTO t VALUES ($1)", id); err != nil {
				return err
			}
			position, err := queryText(ctx, c.db(0), writePosition)
			if err != nil {
				return err
			}
			lsn, timeline, _ := strings.Cut(position, "|")
			path := "/replica?min_lsn=" + lsn + "&timeline=" + timeline
			for range readsPerWrite {
				status, host, _, err := d.try("GET", path, "")
				if err != nil {
					return err
				}
				i, ok := node[host]
				if status != 200 || !ok {
					return fmt.Errorf("%s = %d %q; want a host", path, status, host)
				}
				var found bool
				if err := c.db(i).QueryRowContext(ctx, "SELECT count(*) > 0 FROM t WHERE id = $1", id).Scan(&found); err != nil {
					return err
				}
				if !found {
					stale.Add(1)
					t.Errorf("%s = %s, which has no row %s", path, host, id)
				}
				switch i {
				case 0:
					fromMaster.Add(1)
				case 1:
					fromReplica.Add(1)
				case 2:
					fromReplica.Add(1)
					replicaBehind.Add(1)
				}
			}
		}
		return nil
	}
	var group sync.WaitGroup
	for name := range clients {
		group.Go(func() {
			if err := client(name); err != nil {
				t.Errorf("client %d: %v", name, err)
			}
		})
	}
	group.Wait()
	cancel()
	background.Wait()

	reads, replicas := fromMaster.Load()+fromReplica.Load(), fromReplica.Load()
	t.Logf("%d reads, %d (%.0f%%) from a replica, %d of these from the one that falls behind, %d stale",
		reads, replicas, 100*float64(replicas)/float64(max(reads, 1)), replicaBehind.Load(), stale.Load())
	if reads < 5000 {
		t.Errorf("%d reads; want at least 5000", reads)
	}
	// Else this would prove nothing about replicas.
	if replicas < reads/10 || replicaBehind.Load() == 0 {
		t.Errorf("%d of %d reads came from a replica, %d from the one that falls behind; want more", replicas, reads, replicaBehind.Load())
	}
}
