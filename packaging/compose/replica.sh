# A streaming replica of the host called primary: copied at the first start,
# then a server as any other.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
	pg_basebackup -h primary -U replicator -D "$PGDATA" -R -X stream -c fast
	chmod 700 "$PGDATA"
fi
exec postgres
