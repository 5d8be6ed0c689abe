#!/bin/bash
# Shows pg-status at work: starts a PostgreSQL primary and two streaming replicas
# in a temporary directory, writes to the primary, and runs ./pg-status against
# them until Ctrl-C. Installs Debian's PostgreSQL when there is none.
#
#   packaging/demo.sh         run until Ctrl-C or SIGTERM
#   packaging/demo.sh --once  ask every endpoint once and stop
#
# PG_STATUS names the program to run. pg_status__pg_port and pg_status__http_port
# choose ports, by default the first free ones from 5433 and 8000; any other
# pg_status__… variable is passed on.
set -euo pipefail

repo=$(cd "$(dirname "$0")/.." && pwd)
program=${PG_STATUS:-$repo/pg-status}
once=
case "${1-}" in
--once) once=1 ;;
'') ;;
*) echo "usage: demo.sh [--once]" >&2; exit 2 ;;
esac
if [ ! -x "$program" ]; then
	echo "demo: there is no $program; run: make build" >&2
	exit 1
fi
cd / # where every user may be

sudo=
[ "$(id -u)" = 0 ] || sudo=sudo

# bindir prints the directory of the newest PostgreSQL server's programs.
bindir() { ls -d /usr/lib/postgresql/*/bin/postgres 2>/dev/null | sort -V | tail -n 1 | xargs -r dirname; }

# Installs what is missing. Debian's package would also make and start a server of
# its own, on 5432, which nobody has asked for.
if [ -z "$(bindir)" ] || ! command -v curl >/dev/null; then
	echo "demo: installing postgresql and curl" >&2
	if [ -n "$sudo" ] && ! command -v sudo >/dev/null; then
		echo "demo: as root, run: apt-get install postgresql curl" >&2
		exit 1
	fi
	conf=/etc/postgresql-common/createcluster.d/pg-status-demo.conf
	$sudo mkdir -p "${conf%/*}"
	echo 'create_main_cluster = false' | $sudo tee "$conf" >/dev/null
	$sudo apt-get update -qq
	$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql curl
	$sudo rm "$conf"
fi
bin=$(bindir)

# PostgreSQL refuses to run as root.
as_postgres() { "$@"; }
[ "$(id -u)" != 0 ] || as_postgres() { runuser -u postgres -- "$@"; }

# free_port prints the first port, from $1 on, that no host of 127.0.0.1-3 uses.
free_port() {
	local port=$1 host used
	while :; do
		used=
		for host in 1 2 3; do
			! (exec 3<>"/dev/tcp/127.0.0.$host/$port") 2>/dev/null || used=1
		done
		[ -n "$used" ] || break
		port=$((port + 1))
	done
	echo "$port"
}

dir=$(mktemp -d "${TMPDIR:-/tmp}/pg-status-demo.XXXXXX")
chmod 755 "$dir"
[ -n "$sudo" ] || chown postgres "$dir"
daemon= writer=

cleanup() {
	trap '' INT TERM
	[ -z "$writer" ] || kill "$writer" 2>/dev/null || :
	[ -z "$daemon" ] || kill "$daemon" 2>/dev/null || :
	wait || :
	local node
	for node in 3 2 1; do
		[ ! -f "$dir/$node/postmaster.pid" ] || as_postgres "$bin/pg_ctl" stop -D "$dir/$node" -m immediate >/dev/null 2>&1 || :
	done
	rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 0' INT TERM

port=${pg_status__pg_port:-$(free_port 5433)}
http=${pg_status__http_port:-$(free_port 8000)}
export PGPASSWORD=postgres # also what pg-status uses by itself

# sql runs a statement on host $1.
sql() { "$bin/psql" -X -A -t -q -h "$1" -p "$port" -U postgres -d postgres -v ON_ERROR_STOP=1 -c "$2"; }

# start starts the server of node $1.
start() {
	as_postgres "$bin/pg_ctl" start -w -t 60 -D "$dir/$1" -l "$dir/$1.log" \
		-o "-c listen_addresses=127.0.0.$1 -c port=$port -c unix_socket_directories= -c fsync=off" >/dev/null ||
		{ cat "$dir/$1.log" >&2; exit 1; }
}

echo "demo: starting a primary on 127.0.0.1:$port and replicas on 127.0.0.2 and 127.0.0.3" >&2
echo postgres >"$dir/password"
as_postgres "$bin/initdb" -D "$dir/1" -U postgres -A scram-sha-256 --pwfile="$dir/password" -N >/dev/null
printf 'host %s all 127.0.0.0/8 scram-sha-256\n' all replication | as_postgres tee -a "$dir/1/pg_hba.conf" >/dev/null
start 1
for node in 2 3; do
	as_postgres env PGPASSWORD=postgres "$bin/pg_basebackup" -D "$dir/$node" -R -c fast -N \
		-d "host=127.0.0.1 port=$port user=postgres"
	start "$node"
done
sql 127.0.0.1 'CREATE TABLE demo (at timestamptz)'

pg_status__hosts=127.0.0.1,127.0.0.2,127.0.0.3 pg_status__pg_port=$port \
	pg_status__http_listen_address=${pg_status__http_listen_address:-127.0.0.1} pg_status__http_port=$http \
	"$program" &
daemon=$!
url=http://127.0.0.1:$http
until curl -sf "$url/ready" >/dev/null; do
	kill -0 "$daemon" || { wait "$daemon"; exit 1; }
	sleep 0.1
done

# Five writes a second, to whichever host pg-status says is the master.
while sleep 0.2; do
	! master=$(curl -sf "$url/master") || sql "$master" 'INSERT INTO demo VALUES (now())' || :
done >/dev/null 2>&1 &
writer=$!

if [ -n "$once" ]; then
	position=$(sql 127.0.0.1 "INSERT INTO demo VALUES (now())" &&
		sql 127.0.0.1 "SELECT 'min_lsn=' || pg_current_wal_insert_lsn() || '&timeline=1'")
	for path in /live /ready /version /master /replica "/replica?$position&wait_ms=2000" \
		/sync_by_time /sync_by_bytes /sync_by_time_or_bytes /sync_by_time_and_bytes \
		/most_sync_by_bytes '/status?host=127.0.0.2' /hosts; do
		echo "$ curl '$url$path'"
		curl -sS --fail "$url$path"
		echo
	done
	exit
fi

cat <<END

pg-status runs, and its log follows. In another terminal, try:

  curl $url/master
  curl $url/replica
  curl '$url/sync_by_time?lag_ms=500'
  curl -H 'Accept: application/json' $url/most_sync_by_bytes
  curl $url/hosts

Stop the primary, promote a replica, have the other one follow it, and ask again:

  kill -INT \$(head -n 1 $dir/1/postmaster.pid)
  psql 'host=127.0.0.2 port=$port user=postgres password=postgres' -c 'SELECT pg_promote()'
  psql 'host=127.0.0.3 port=$port user=postgres password=postgres' \\
    -c "ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.2 port=$port user=postgres password=postgres'" \\
    -c 'SELECT pg_reload_conf()'

Ctrl-C ends everything and removes it.

END
wait "$daemon"
