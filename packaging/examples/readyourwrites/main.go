// Command readyourwrites is a guestbook whose readers see at once what they have
// written, from a replica where possible.
//
//	curl -c jar -b jar -d 'Hello' http://127.0.0.1:8080/
//	curl -c jar -b jar http://127.0.0.1:8080/
//
// It asks pg-status, at the URL in PG_STATUS, before each use of the database, and
// so follows the master. The position of a client's last write travels in a
// cookie. It is signed, by the key in SECRET, so that nobody can ask for a
// position that no replica will ever reach. DSN is how to connect, host and port
// apart; LISTEN is where to serve.
//
//	CREATE TABLE guestbook (id bigserial PRIMARY KEY, entry text NOT NULL);
package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lib/pq"
)

// position is how far the write-ahead log was after a write.
type position struct{ lsn, timeline string }

// selectPosition must run after the commit, and on the server of the write.
const selectPosition = `SELECT pg_current_wal_insert_lsn(),
	('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint`

// cluster has a pool for every host that pg-status has named so far.
type cluster struct {
	status string // URL of pg-status
	dsn    string

	mu    sync.Mutex // guards the following
	pools map[string]*sql.DB
}

// ask returns the pool of the host that pg-status names, and its address.
func (c *cluster) ask(ctx context.Context, question string) (*sql.DB, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.status+question, nil)
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Accept", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, "", fmt.Errorf("asking pg-status for %s: %s", question, resp.Status)
	}
	var answer struct {
		Host string
		Port int
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return nil, "", err
	}
	db, err := c.pool(answer.Host, answer.Port)
	return db, fmt.Sprintf("%s:%d", answer.Host, answer.Port), err
}

func (c *cluster) pool(host string, port int) (*sql.DB, error) {
	dsn := fmt.Sprintf("%s host='%s' port=%d connect_timeout=5", c.dsn, host, port)
	c.mu.Lock()
	defer c.mu.Unlock()
	if db := c.pools[dsn]; db != nil {
		return db, nil
	}
	connector, err := pq.NewConnector(dsn)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(10)
	db.SetConnMaxIdleTime(time.Minute) // a host that is not named any more gives them back
	c.pools[dsn] = db
	return db, nil
}

// attempts is how often we ask again when a host turns out to be down, or no
// master any more: pg-status may be a moment behind.
const attempts = 3

// write runs a statement on the master, as a transaction of its own. It is not
// repeated once it may have been committed.
func (c *cluster) write(ctx context.Context, statement string, args ...any) (p position, err error) {
	for range attempts {
		var again bool
		p, again, err = c.writeOnce(ctx, statement, args)
		if !again {
			return p, err
		}
	}
	return p, err
}

func (c *cluster) writeOnce(ctx context.Context, statement string, args []any) (p position, again bool, err error) {
	db, _, err := c.ask(ctx, "/master?wait_ms=3000")
	if err != nil {
		return p, false, err
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		return p, true, err
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, statement, args...); err != nil {
		return p, errors.Is(err, driver.ErrBadConn) || readOnly(err), err
	}
	err = conn.QueryRowContext(ctx, selectPosition).Scan(&p.lsn, &p.timeline)
	return p, false, err
}

// readOnly reports whether a statement was refused by a server in recovery.
func readOnly(err error) bool {
	var e *pq.Error
	return errors.As(err, &e) && e.Code == "25006" // read_only_sql_transaction
}

// read calls f with a host that has the write at p.
func (c *cluster) read(ctx context.Context, p position, f func(*sql.DB) error) (host string, err error) {
	question := "/replica"
	if p.lsn != "" {
		question += "?min_lsn=" + url.QueryEscape(p.lsn) + "&timeline=" + url.QueryEscape(p.timeline) + "&wait_ms=100"
	}
	for range attempts {
		var db *sql.DB
		if db, host, err = c.ask(ctx, question); err != nil {
			return "", err
		}
		if err = f(db); err == nil {
			return host, nil
		}
	}
	return "", err
}

// guestbook serves the pages.
type guestbook struct {
	cluster *cluster
	secret  []byte
}

const cookieName = "position"

// cookieAge is how long a position is kept. After a failover, reads with a
// position of before go to the master until there is a new one.
const cookieAge = 5 * time.Minute

// sign returns p as a cookie's value: 0-3000060-2.signature.
func (g *guestbook) sign(p position) string {
	value := strings.Replace(p.lsn, "/", "-", 1) + "-" + p.timeline
	return value + "." + hex.EncodeToString(g.mac(value))
}

func (g *guestbook) mac(value string) []byte {
	m := hmac.New(sha256.New, g.secret)
	io.WriteString(m, value)
	return m.Sum(nil)
}

// position returns that of the client's last write, nothing if there is none that
// we have signed.
func (g *guestbook) position(r *http.Request) (p position) {
	cookie, err := r.Cookie(cookieName)
	if err != nil {
		return p
	}
	value, signature, _ := strings.Cut(cookie.Value, ".")
	mac, err := hex.DecodeString(signature)
	parts := strings.Split(value, "-")
	if err != nil || !hmac.Equal(mac, g.mac(value)) || len(parts) != 3 {
		return p
	}
	return position{lsn: parts[0] + "/" + parts[1], timeline: parts[2]}
}

func (g *guestbook) serveWrite(w http.ResponseWriter, r *http.Request) {
	entry, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 10<<10))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	p, err := g.cluster.write(r.Context(), "INSERT INTO guestbook (entry) VALUES ($1)", string(entry))
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	http.SetCookie(w, &http.Cookie{
		Name: cookieName, Value: g.sign(p), Path: "/", MaxAge: int(cookieAge / time.Second),
		HttpOnly: true, SameSite: http.SameSiteLaxMode,
	})
	w.WriteHeader(http.StatusNoContent)
}

func (g *guestbook) serveRead(w http.ResponseWriter, r *http.Request) {
	var page strings.Builder
	host, err := g.cluster.read(r.Context(), g.position(r), func(db *sql.DB) error {
		page.Reset()
		rows, err := db.QueryContext(r.Context(), "SELECT id, entry FROM guestbook ORDER BY id DESC LIMIT 100")
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var id int64
			var entry string
			if err := rows.Scan(&id, &entry); err != nil {
				return err
			}
			page.WriteString(strconv.FormatInt(id, 10) + " " + entry + "\n")
		}
		return rows.Err()
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("X-Host", host) // to see who has answered
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	io.WriteString(w, page.String())
}

func getenv(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func main() {
	secret := os.Getenv("SECRET")
	if secret == "" {
		log.Fatal("SECRET is not set")
	}
	g := &guestbook{
		cluster: &cluster{
			status: getenv("PG_STATUS", "http://127.0.0.1:8000"),
			dsn:    getenv("DSN", "user=postgres dbname=postgres sslmode=disable"),
			pools:  map[string]*sql.DB{},
		},
		secret: []byte(secret),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /{$}", g.serveWrite)
	mux.HandleFunc("GET /{$}", g.serveRead)
	log.Fatal(http.ListenAndServe(getenv("LISTEN", "127.0.0.1:8080"), mux))
}
