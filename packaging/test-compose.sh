#!/bin/bash
# Usage: test-compose.sh DIST, by test.sh in network and mount namespaces of its own
#
# Runs the scripts of the Compose example with this machine's PostgreSQL, as the
# postgres image would: no registry may be in reach. Each container is an address.
set -euo pipefail
dist=$1
here=$(dirname "$(realpath "$0")")
. "$here/testlib.sh"
need_root
ip link set lo up

work=$(mktemp -d)
chown postgres "$work"
service=''
cleanup() {
	local code=$? data
	if [ $code != 0 ]; then tail -n 20 "$work"/*.log; fi
	if [ -n "$service" ]; then kill "$service" || true; fi
	for data in "$work"/{primary,replica-1,replica-2}; do
		if [ -s "$data/postmaster.pid" ]; then as "$(basename "$data")" pg_ctl -m immediate -s stop || true; fi
	done
	umount /etc/hosts || true
	rm -rf "$work"
}
trap cleanup EXIT
printf '%s\n' '127.0.0.1 localhost' '127.0.0.2 primary' '127.0.0.3 replica-1' '127.0.0.4 replica-2' >"$work/hosts"
mount --bind "$work/hosts" /etc/hosts
cp "$here"/compose/*.sh "$work"
echo postgres >"$work/password"
chmod 644 "$work/password"

pgbin=$(dirname "$(compgen -G '/usr/lib/postgresql/*/bin/initdb' | tail -n 1)")
# as HOST COMMAND... runs a command in the stead of a container.
as() {
	local host=$1
	shift
	(cd / && exec runuser -u postgres -- env PATH="$pgbin:$PATH" PGDATA="$work/$host" PGPASSWORD=replicator "$@")
}
start() { as "$1" pg_ctl -s -w -l "$work/$1.log" -o "-k $work -c listen_addresses=$2 -c fsync=off" start </dev/null >/dev/null; }

# The entrypoint of the image.
mkdir "$work/primary"
chown postgres "$work/primary"
as primary initdb --pwfile="$work/password" -A scram-sha-256 --auth-local=trust --no-sync >/dev/null
printf '\nhost all all all scram-sha-256\n' >>"$work/primary/pg_hba.conf"
start primary ''
as primary env PGHOST="$work" bash -Eeo pipefail -c ". '$work/primary.sh'" >/dev/null
as primary pg_ctl -s -w stop
start primary primary

for host in replica-1 replica-2; do
	install -d -o postgres "$work/$host" "$work/sockets-$host"
	printf '#!/bin/sh\nexec "%s/postgres" -c listen_addresses="%s" -k "%s" -c fsync=off\n' "$pgbin" "$host" "$work/sockets-$host" >"$work/sockets-$host/postgres"
	chmod 755 "$work/sockets-$host/postgres"
	as "$host" env PATH="$work/sockets-$host:$pgbin:$PATH" bash "$work/replica.sh" >"$work/$host.log" 2>&1 &
done

for host in replica-1 replica-2; do eventually 'accepting' as "$host" pg_isready -h "$host"; done
env -i $(sed -n 's/^ *\(pg_status__[a-z_]*\): /\1=/p' "$here/compose/docker-compose.yml") \
	"$dist/pg-status-linux-$(dpkg --print-architecture)" 2>"$work/pg-status.log" &
service=$!
ask() { curl -sS -m 5 "http://127.0.0.1:8000$1"; }
eventually '^replica-1$' ask /replica
eventually '^replica-2$' ask /replica
equal /master "$(ask /master)" primary
as primary pg_ctl -m fast -s stop
as replica-1 pg_ctl -s promote
eventually '^replica-1$' ask /master
