#!/bin/bash
# Usage: test-deb.sh DIST VERSION TREE, by test.sh in a network namespace of its own
#
# Installs the .deb with apt into a copy of TREE, a Debian made with debootstrap,
# which it boots with systemd-nspawn, beside a PostgreSQL outside of it.
set -euo pipefail
dist=$1 version=$2 pristine=$3
here=$(dirname "$(realpath "$0")")
. "$here/testlib.sh"
need_root
arch=$(dpkg --print-architecture)
ip link set lo up

work=$(mktemp -d)
chmod 755 "$work" # for the user of PostgreSQL
tree=$work/tree
nspawn=''
leader=''
cleanup() {
	local code=$?
	if [ $code != 0 ] && [ -n "$leader" ]; then
		echo "--- journal of pg-status"
		inside journalctl -b -u pg-status --no-pager -o short-precise | tail -60
	fi
	if [ -n "$leader" ]; then kill -KILL "$leader" 2>/dev/null || true; fi
	if [ -n "$nspawn" ]; then wait "$nspawn" || true; fi
	if [ -s "$work/pg/postmaster.pid" ]; then as_postgres "$pgbin/pg_ctl" -D "$work/pg" -m immediate -s stop || true; fi
	rm -rf "$work"
} 2>/dev/null
trap cleanup EXIT

# inside runs a command in the booted system.
inside() {
	nsenter --target "$leader" --mount --uts --ipc --net --pid -- \
		env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
}
ask() { curl -sS -m 5 "http://127.0.0.1:${port:-8000}$1"; }
# show NAME prints a property of the unit.
show() { inside systemctl show -P "$1" pg-status; }
# journal prints the records of pg-status since mark was called.
journal() { inside journalctl -b -u pg-status --no-pager -o cat --after-cursor="$cursor"; }
mark() { cursor=$(inside journalctl -b --no-pager -n 0 --show-cursor | sed -n 's/^-- cursor: //p'); }
# configure NAME=VALUE... sets lines of /etc/default/pg-status, as an editor would.
configure() {
	local s
	for s; do
		sed -i "s|^#\?${s%%=*}=.*|$s|" "$tree/etc/default/pg-status"
		grep -qx -- "$s" "$tree/etc/default/pg-status" || fail "/etc/default/pg-status has no line for ${s%%=*}"
	done
}
files() {
	(cd "$tree" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./dev -o -path ./run -o -path ./tmp -o -path ./root \
		-o -path ./var/tmp -o -path ./var/log -o -path ./var/cache -o -path ./var/lib/apt -o -path ./var/lib/dpkg \
		-o -path ./var/lib/systemd/timers \) -prune -o -print | sort)
}

step "PostgreSQL outside"
pgbin=$(dirname "$(compgen -G '/usr/lib/postgresql/*/bin/initdb' | tail -n 1)")
as_postgres() { (cd / && runuser -u postgres -- "$@"); }
install -d -o postgres "$work/pg"
as_postgres "$pgbin/initdb" -D "$work/pg" -A trust --no-sync >/dev/null
echo 'host all monitor 127.0.0.1/32 scram-sha-256' >"$work/pg/pg_hba.conf"
echo 'local all postgres trust' >>"$work/pg/pg_hba.conf"
as_postgres "$pgbin/pg_ctl" -D "$work/pg" -s -w -l "$work/pg/log" \
	-o "-h 127.0.0.1 -p 5432 -k $work/pg -c fsync=off" start </dev/null >/dev/null
as_postgres "$pgbin/psql" -qX -h "$work/pg" -c "CREATE ROLE monitor LOGIN PASSWORD 's3cret' IN ROLE pg_monitor"

step "A Debian with systemd"
cp -a --reflink=auto "$pristine" "$tree"
options=(--register=no)
[ -d /run/systemd/system ] || options+=(--keep-unit) # nobody to ask for a scope
systemd-nspawn --quiet --directory "$tree" --machine pg-status-test --boot --console=pipe "${options[@]}" </dev/null >"$work/boot.log" 2>&1 &
nspawn=$!
for ((i = 0; i < 150; i++)); do
	leader=$(pgrep -P "$nspawn" || true)
	[ -n "$leader" ] && inside systemctl is-active -q multi-user.target 2>/dev/null && break
	sleep 0.1
done
[ -n "$leader" ] || fail "the container does not boot: $(tail -n 20 "$work/boot.log")"
eventually '^active$' inside systemctl is-active multi-user.target
mark

step "Installation, with nothing to watch"
cp "$dist/pg-status_${version}_$arch.deb" "$tree/root/pg-status.deb"
files >"$work/before"
out=$(inside apt-get install -y -q /root/pg-status.deb 2>&1) || fail "apt-get install: $out"
matches "apt-get install" "$out" '^/etc/default/pg-status, then run: systemctl restart pg-status'
equal "version" "$(inside pg-status --version)" "pg-status $version"
equal "mode of the conffile" "$(inside stat -c '%a %U:%G' /etc/default/pg-status)" "640 root:root"
equal "enabled" "$(inside systemctl is-enabled pg-status)" enabled
equal "state" "$(show ActiveState) $(show NRestarts)" "inactive 0"
matches "journal" "$(journal)" '^No hosts to watch: set pg_status__hosts in /etc/default/pg-status'
equal "failed units" "$(inside systemctl --failed --no-legend --plain)" ""
inside systemctl restart pg-status || fail "a service without hosts is a failure"

step "Watching a host"
configure pg_status__hosts=127.0.0.1 pg_status__pg_user=monitor pg_status__pg_password=s3cret
mark
inside systemctl restart pg-status
equal "state" "$(show ActiveState)" active
eventually '^127\.0\.0\.1$' ask /master
eventually '127\.0\.0\.1' show StatusText
echo "STATUS=$(show StatusText)"
equal "listens on" "$(ss -Hltn 'sport = :8000' | awk '{ print $4 }')" "127.0.0.1:8000"
matches "journal" "$(journal)" '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}Z INFO http: server started address=127\.0\.0\.1 port=8000$'
matches "journal" "$(journal)" '^[0-9TZ:.-]+ INFO monitor: host state changed host=127\.0\.0\.1 state=alive role=master$'
inside pg-status --healthcheck || fail "--healthcheck of a ready service"
out=$(inside systemd-run --quiet --wait --pipe -p EnvironmentFile=/etc/default/pg-status pg-status --check-config)
matches "--check-config" "$out" '^pg_status__hosts=127\.0\.0\.1$'
[[ $out != *s3cret* ]] || fail "--check-config shows the password"
[ "$(inside stat -c %u "/proc/$(show MainPID)")" -ge 61184 ] || fail "the service does not run as a dynamic user"
matches "systemd-analyze security" "$(inside systemd-analyze security --no-pager pg-status)" 'exposure level for pg-status.service: ([01]\.[0-9]|2\.0) '

step "Watchdog"
equal "WatchdogSec" "$(show WatchdogUSec)" 30s
mkdir -p "$tree/etc/systemd/system/pg-status.service.d"
printf '[Service]\nWatchdogSec=2s\n' >"$tree/etc/systemd/system/pg-status.service.d/watchdog.conf"
inside systemctl daemon-reload
inside systemctl restart pg-status
sleep 5 # more than twice WatchdogSec: who does not feed it is restarted here
equal "restarts of a healthy service" "$(show NRestarts)" 0
mark
pid=$(show MainPID)
inside sh -c "kill -STOP $pid"
eventually '^1$' show NRestarts
eventually '^active$' show ActiveState
matches "journal" "$(journal)" 'Watchdog timeout'
[ "$(show MainPID)" != "$pid" ] || fail "the frozen process is still the service"
eventually '^127\.0\.0\.1$' ask /master
rm -r "$tree/etc/systemd/system/pg-status.service.d"
inside systemctl daemon-reload

step "A crash"
inside systemctl restart pg-status
inside sh -c "kill -KILL $(show MainPID)"
eventually '^1$' show NRestarts
eventually '^127\.0\.0\.1$' ask /master

step "Other settings by a restart"
configure pg_status__http_port=8001 pg_status__log_format=json
mark
inside systemctl restart pg-status
port=8001
eventually '^127\.0\.0\.1$' ask /master
matches "journal" "$(journal)" '^\{"@timestamp":"[0-9TZ:.-]+","levelStr":"INFO","component":"http","message":"server started address=127\.0\.0\.1 port=8001"\}$'
configure pg_status__http_port=8000 pg_status__log_format=text
port=8000

step "A mistake in the settings"
configure pg_status__sleep_ms=soon
mark
! inside systemctl restart pg-status 2>/dev/null || fail "systemctl restart does not tell that the settings are wrong"
sleep 3 # more than RestartSec
equal "state" "$(show ActiveState) $(show NRestarts)" "failed 0"
matches "journal" "$(journal)" '^[0-9TZ:.-]+ FATAL config: .*pg_status__sleep_ms'
configure pg_status__sleep_ms=500

step "The password as a credential"
sed -i 's/^pg_status__pg_password=.*/#&/' "$tree/etc/default/pg-status"
install -D -m 644 "$tree/usr/share/doc/pg-status/examples/password.conf" "$tree/etc/systemd/system/pg-status.service.d/password.conf"
(umask 077 && echo s3cret >"$tree/etc/pg-status.password")
inside systemctl daemon-reload
inside systemctl restart pg-status
eventually '^127\.0\.0\.1$' ask /master
! inside grep -q s3cret "/proc/$(show MainPID)/environ" || fail "the environment holds the password"

step "Upgrade"
# The next version comes with other settings, the user has changed theirs.
cp -a "$here" "$work/packaging"
cp "$here/../README.md" "$here/../LICENSE" "$work/"
echo '# new' >>"$work/packaging/pg-status.default"
"$work/packaging/build-deb.sh" "$dist/pg-status-linux-$arch" "$arch" "$version+1" "$tree/root/next.deb"
sum=$(sha256sum <"$tree/etc/default/pg-status")
pid=$(show MainPID)
out=$(inside apt-get install -y -q -o Dpkg::Options::=--force-confold /root/next.deb 2>&1) || fail "apt-get install: $out"
[[ $out != *"no hosts to watch"* ]] || fail "apt-get install of a configured service asks for hosts"
equal "version of the package" "$(inside dpkg-query -W -f '${Version}' pg-status)" "$(tr - '~' <<<"$version")+1"
equal "conffile" "$(sha256sum <"$tree/etc/default/pg-status")" "$sum"
equal "mode of the conffile" "$(inside stat -c '%a %U:%G' /etc/default/pg-status)" "640 root:root"
[ "$(show MainPID)" != "$pid" ] || fail "the upgrade did not restart the service"
eventually '^127\.0\.0\.1$' ask /master
inside systemctl disable -q pg-status
inside apt-get install -y -q --reinstall /root/next.deb >/dev/null 2>&1
equal "enabled after an upgrade of a disabled service" "$(inside systemctl is-enabled pg-status || true)" disabled

step "Removal"
mark
pid=$(show MainPID)
[ "$pid" != 0 ] || fail "the service does not run"
out=$(inside apt-get remove -y -q pg-status 2>&1) || fail "apt-get remove: $out"
! inside test -e "/proc/$pid" || fail "the process runs on"
matches "journal" "$(journal)" '^[0-9TZ:.-]+ INFO http: server stopped$'
matches "journal" "$(journal)" 'pg-status.service: Deactivated successfully'
[ -e "$tree/etc/default/pg-status" ] || fail "the removal took the settings"
rm -r "$tree/etc/systemd/system/pg-status.service.d" "$tree/etc/pg-status.password"
out=$(inside apt-get purge -y -q pg-status 2>&1) || fail "apt-get purge: $out"
files >"$work/after"
diff "$work/before" "$work/after" || fail "the purge leaves something"
equal "units" "$(inside systemctl list-unit-files --no-legend 'pg-status*' || true)" ""
