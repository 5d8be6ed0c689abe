# The two roles of the demo. The entrypoint of the postgres image reads this
# file once, under set -e, with a server at hand that only listens on a socket.
psql -v ON_ERROR_STOP=1 -U "${POSTGRES_USER:-postgres}" -d postgres <<'SQL'
CREATE ROLE replicator LOGIN REPLICATION PASSWORD 'replicator';
-- Both replicas are copied at the same time, while the primary goes on.
ALTER SYSTEM SET wal_keep_size = '128MB';
CREATE ROLE monitor LOGIN PASSWORD 'monitor' IN ROLE pg_monitor;
SQL
echo 'host replication replicator all scram-sha-256' >>"$PGDATA/pg_hba.conf"
