#!/usr/bin/env python3
"""A guestbook whose readers see at once what they have written, from a replica
where possible.

    curl -c jar -b jar -d 'Hello' http://127.0.0.1:8080/
    curl -c jar -b jar http://127.0.0.1:8080/

It asks pg-status, at the URL in PG_STATUS, before each use of the database, and so
follows the master. The position of a client's last write travels in a cookie. It
is signed, by the key in SECRET, so that nobody can ask for a position that no
replica will ever reach. DSN is how to connect, host and port apart; LISTEN is
where to serve. Beside the standard library it takes psycopg2.

    CREATE TABLE guestbook (id bigserial PRIMARY KEY, entry text NOT NULL);
"""

import hmac
import http.cookies
import http.server
import json
import os
import threading
import urllib.parse
import urllib.request

import psycopg2
import psycopg2.errors
import psycopg2.pool

PG_STATUS = os.environ.get("PG_STATUS", "http://127.0.0.1:8000")
DSN = os.environ.get("DSN", "user=postgres dbname=postgres")
LISTEN = os.environ.get("LISTEN", "127.0.0.1:8080")
SECRET = os.environ["SECRET"].encode()

# How often we ask again when a host turns out to be down, or no master any more:
# pg-status may be a moment behind.
ATTEMPTS = 3

# In seconds. After a failover, reads with a position of before go to the master
# until there is a new one.
COOKIE_AGE = 300

# Runs after the commit, in a transaction of its own, on the server of the write.
SELECT_POSITION = """
    SELECT pg_current_wal_insert_lsn(),
           ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint"""


class Cluster:
    """A pool for every host that pg-status has named so far."""

    def __init__(self):
        self.lock = threading.Lock()
        self.pools = {}

    def ask(self, question, **parameters):
        """Returns the host and port that pg-status names."""
        url = PG_STATUS + question + "?" + urllib.parse.urlencode(parameters)
        request = urllib.request.Request(url, headers={"Accept": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            answer = json.load(response)
        return answer["host"], answer["port"]

    def connect(self, host, port):
        """Takes a connection from the host's pool. Give it back with done."""
        with self.lock:
            pool = self.pools.get((host, port))
            if pool is None:
                pool = psycopg2.pool.ThreadedConnectionPool(0, 10, DSN, host=host, port=port, connect_timeout=5)
                self.pools[host, port] = pool
        return pool, pool.getconn()

    def done(self, pool, connection, broken):
        if not broken:
            pool.putconn(connection)
            return
        # Others of this pool are likely to be broken, too. Those in use go on.
        pool.putconn(connection, close=True)
        with self.lock:
            self.pools = {at: p for at, p in self.pools.items() if p is not pool}

    def write(self, statement, arguments):
        """Runs a statement on the master and returns the position after it. It is
        not repeated once it may have been committed."""
        for attempt in range(ATTEMPTS):
            committing, broken = False, True
            host, port = self.ask("/master", wait_ms=3000)
            pool = connection = None
            try:
                pool, connection = self.connect(host, port)
                with connection.cursor() as cursor:
                    cursor.execute(statement, arguments)
                    committing = True
                    connection.commit()
                    cursor.execute(SELECT_POSITION)
                    position = cursor.fetchone()
                    connection.rollback()
                broken = False
                return position
            except (psycopg2.OperationalError, psycopg2.InterfaceError, psycopg2.errors.ReadOnlySqlTransaction):
                if committing or attempt == ATTEMPTS - 1:
                    raise
            finally:
                if connection is not None:
                    self.done(pool, connection, broken)

    def read(self, position, query):
        """Runs a query on a host that has the write at position, and returns the
        host and the rows."""
        parameters = {}
        if position:
            parameters = {"min_lsn": position[0], "timeline": position[1], "wait_ms": 100}
        for attempt in range(ATTEMPTS):
            broken = True
            host, port = self.ask("/replica", **parameters)
            pool = connection = None
            try:
                pool, connection = self.connect(host, port)
                with connection.cursor() as cursor:
                    cursor.execute(query)
                    rows = cursor.fetchall()
                connection.rollback()
                broken = False
                return f"{host}:{port}", rows
            except (psycopg2.OperationalError, psycopg2.InterfaceError):
                if attempt == ATTEMPTS - 1:
                    raise
            finally:
                if connection is not None:
                    self.done(pool, connection, broken)


def mac(value):
    return hmac.new(SECRET, value.encode(), "sha256").hexdigest()


def sign(position):
    """Returns a position as a cookie's value: 0-3000060-2.signature."""
    value = f"{position[0]}-{position[1]}".replace("/", "-")
    return f"{value}.{mac(value)}"


def verify(signed):
    """Returns the position, None if it is not one that we have signed."""
    value, _, signature = signed.partition(".")
    if not hmac.compare_digest(signature.encode(), mac(value).encode()):
        return None
    high, low, timeline = value.split("-")
    return f"{high}/{low}", timeline


CLUSTER = Cluster()


class Guestbook(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def position(self):
        cookie = http.cookies.SimpleCookie(self.headers.get("Cookie", "")).get("position")
        return verify(cookie.value) if cookie else None

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        entry = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        try:
            position = CLUSTER.write("INSERT INTO guestbook (entry) VALUES (%s)", (entry,))
        except (psycopg2.Error, OSError) as error:
            self.answer(503, str(error).encode())
            return
        cookie = f"position={sign(position)}; Path=/; Max-Age={COOKIE_AGE}; HttpOnly; SameSite=Lax"
        self.answer(204, Set_Cookie=cookie)

    def do_GET(self):
        try:
            host, rows = CLUSTER.read(self.position(), "SELECT id, entry FROM guestbook ORDER BY id DESC LIMIT 100")
        except (psycopg2.Error, OSError) as error:
            self.answer(503, str(error).encode())
            return
        page = "".join(f"{id} {entry}\n" for id, entry in rows)
        # X-Host is there to see who has answered.
        self.answer(200, page.encode(), X_Host=host, Content_Type="text/plain; charset=utf-8")


if __name__ == "__main__":
    address, _, port = LISTEN.rpartition(":")
    http.server.ThreadingHTTPServer((address, int(port)), Guestbook).serve_forever()
