#!/bin/bash
# Usage: test-image.sh DIST VERSION, by test.sh in a network namespace of its own
#
# Builds the image from the Dockerfile, on a base made of Debian's
# busybox-static in the place of Alpine, as no registry may be in reach, and runs
# it and its health check with buildah.
set -euo pipefail
dist=$1 version=$2
here=$(dirname "$(realpath "$0")")
. "$here/testlib.sh"
need_root
arch=$(dpkg --print-architecture)
ip link set lo up

work=$(mktemp -d)
service=''
cleanup() {
	local code=$?
	if [ -n "$service" ]; then kill "$service" 2>/dev/null || true; fi
	if [ $code != 0 ] && [ -s "$work/log" ]; then cat "$work/log"; fi
	rm -rf "$work"
}
trap cleanup EXIT
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
b() { buildah --root "$work/storage" --runroot "$work/run" "$@"; }

step "Stand-in for Alpine"
mkdir -p "$work/base/bin" "$work/base/etc" "$work/base/tmp"
install -m 755 "$(command -v busybox)" "$work/base/bin/busybox"
ln -s busybox "$work/base/bin/sh"
echo 'root:x:0:0:root:/:/bin/sh' >"$work/base/etc/passwd"
c=$(b from scratch)
b copy -q "$c" "$work/base" / >/dev/null
b commit -q "$c" localhost/base >/dev/null
b rm "$c" >/dev/null

step "Build"
b build -q --pull-never --format docker -f "$here/Dockerfile" --build-arg BASE=localhost/base \
	--build-arg TARGETARCH="$arch" --build-arg VERSION="$version" --build-arg REVISION=0123abc -t localhost/pg-status "$dist" >"$work/build.log" 2>&1 ||
	fail "buildah: $(cat "$work/build.log")"
config() { b inspect --type image --format "{{$1}}" localhost/pg-status; }
equal "user" "$(config .Docker.Config.User)" "65532:65532"
equal "entrypoint" "$(config .Docker.Config.Entrypoint)" '[/usr/bin/pg-status]'
equal "health check" "$(config .Docker.Config.Healthcheck.Test)" '[CMD /usr/bin/pg-status --healthcheck]'
equal "label version" "$(config 'index .Docker.Config.Labels "org.opencontainers.image.version"')" "$version"
equal "label licenses" "$(config 'index .Docker.Config.Labels "org.opencontainers.image.licenses"')" MIT
equal "label revision" "$(config 'index .Docker.Config.Labels "org.opencontainers.image.revision"')" 0123abc

c=$(b from --pull-never localhost/pg-status)
root=$(b mount "$c")
cmp "$dist/pg-status-linux-$arch" "$root/usr/bin/pg-status" || fail "the image holds another binary"
equal "mode of the binary" "$(stat -c '%a %u:%g' "$root/usr/bin/pg-status")" "755 0:0"
# Alpine 3.24 itself has 9 MB.
size=$(($(du -sb --apparent-size "$root/usr" | cut -f 1) / 1000000))
[ "$size" -lt 11 ] || fail "the image is $size MB larger than Alpine; want less than 20 MB in all"

step "Run"
env=(--env pg_status__hosts=127.0.0.1 --env pg_status__pg_port=1)
! b run "$c" -- /usr/bin/pg-status --healthcheck 2>"$work/health" || fail "--healthcheck passes without a server"
matches "--healthcheck" "$(cat "$work/health")" 'connection refused'
b run "${env[@]}" "$c" -- /usr/bin/pg-status >"$work/log" 2>&1 &
service=$!
eventually '^OK$' curl -sS -m 5 http://127.0.0.1:8000/ready
pid=$(ss -Hltnp 'sport = :8000' | sed -n '1s/.*pid=\([0-9]*\).*/\1/p')
equal "user of the process" "$(awk '/^[UG]id:/ { print $2 }' "/proc/$pid/status" | xargs)" "65532 65532"
b run "${env[@]}" "$c" -- /usr/bin/pg-status --healthcheck || fail "--healthcheck of a ready service"
equal "version" "$(curl -sS -m 5 http://127.0.0.1:8000/version)" "$version"
kill -TERM "$pid"
wait "$service" || fail "the service ended with $? on SIGTERM: $(cat "$work/log")"
service=''
b umount "$c" >/dev/null
b rm "$c" >/dev/null
