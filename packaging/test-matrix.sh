#!/bin/bash
# Usage: test-matrix.sh [VERSION...], as root on Debian
#
# Runs the end-to-end tests on other PostgreSQL versions than the installed one,
# 13 and 17 unless others are named. The servers run by chroot in a tree of the
# Debian release that has the version; the tests and pg-status run here.
#
# debootstrap makes the trees, once: they are kept in MATRIX_CACHE, a directory.
# MIRROR is where Debian comes from, if not from its own servers.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
. "$here/testlib.sh"
need_root
[ $# -gt 0 ] || set -- 13 17
cache=${MATRIX_CACHE:-${XDG_CACHE_HOME:-/var/cache}/pg-status}

# What is mounted into a tree ends with this script.
[ -n "${PG_STATUS_MOUNTS-}" ] || PG_STATUS_MOUNTS=private exec unshare --mount "$0" "$@"

# release VERSION names the Debian release that has it.
release() {
	case $1 in
	13) echo bullseye ;;
	15) echo bookworm ;;
	17) echo trixie ;;
	*) fail "PostgreSQL $1: no Debian release has it, as far as this script knows" ;;
	esac
}

# inside TREE COMMAND... runs a command in a tree.
inside() {
	chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "${@:2}"
}

# make_tree VERSION TREE makes a Debian with that PostgreSQL and with faketime.
make_tree() {
	local version=$1 new=$2.new
	rm -rf --one-file-system "$new"
	mkdir -p "$cache"
	debootstrap --variant=minbase "$(release "$version")" "$new" ${MIRROR:+"$MIRROR"} >"$new.log" ||
		fail "debootstrap: $(tail -n 5 "$new.log")"
	# No cluster of the package's own, and nothing that starts by itself.
	mkdir -p "$new/etc/postgresql-common"
	echo 'create_main_cluster = false' >"$new/etc/postgresql-common/createcluster.conf"
	printf '#!/bin/sh\nexit 101\n' >"$new/usr/sbin/policy-rc.d"
	chmod 755 "$new/usr/sbin/policy-rc.d"
	inside "$new" apt-get install -y -q --no-install-recommends "postgresql-$version" faketime >>"$new.log" 2>&1 ||
		fail "apt-get install postgresql-$version: $(tail -n 5 "$new.log")"
	inside "$new" apt-get clean
	rm "$new.log"
	mv "$new" "$2"
}

if ! command -v debootstrap >/dev/null; then
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
fi
failed=()
for version; do
	tree=$cache/postgresql-$version
	if [ ! -d "$tree" ]; then
		step "A Debian with PostgreSQL $version, in $tree"
		make_tree "$version" "$tree"
	fi
	mountpoint -q "$tree/dev/shm" || mount -t tmpfs -o mode=1777 tmpfs "$tree/dev/shm" # for the shared memory of the servers
	step "The end-to-end tests on $(inside "$tree" "/usr/lib/postgresql/$version/bin/postgres" --version)"
	(cd "$here/.." && PG_ROOT=$tree PG_BIN='' go test -count=1 -timeout 30m ./e2e) || failed+=("$version")
done
[ ${#failed[@]} = 0 ] || fail "on PostgreSQL ${failed[*]}"
