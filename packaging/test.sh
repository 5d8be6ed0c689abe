#!/bin/bash
# Usage: test.sh DIST VERSION, as root on Debian
#
# Tests the packages that make dist left in DIST: that they are what they say,
# that another build gives the same bytes, that the .deb does its work on a
# Debian with systemd as PID 1, and that the image does its own. Installs the
# Debian packages that this takes. With DEBIAN_TREE, the name of a directory, the
# Debian that boots is kept there for the next time.
set -euo pipefail
dist=$(realpath "$1") version=$2
here=$(dirname "$(realpath "$0")")
. "$here/testlib.sh"
: "${SOURCE_DATE_EPOCH:?must be what make dist had}"
need_root

export DEBIAN_FRONTEND=noninteractive
packages="buildah busybox-static curl debootstrap file iproute2 lintian man-db procps systemd systemd-container util-linux"
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || packages+=" postgresql"
for p in $packages; do
	dpkg-query -W -f '${db:Status-Status}\n' "$p" 2>/dev/null | grep -qx installed || missing+=" $p"
done
if [ -n "${missing-}" ]; then
	apt-get update -qq
	# shellcheck disable=SC2086 # several names
	apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$dist"

step "What is in $dist"
for f in pg-status-{linux,darwin}-{amd64,arm64} pg-status-"$version"-{linux,darwin}-{amd64,arm64}.tar.gz pg-status_"$version"_{amd64,arm64}.deb; do
	grep -q " $f\$" SHA256SUMS || fail "SHA256SUMS does not name $f"
done
sha256sum --quiet -c SHA256SUMS || fail "SHA256SUMS is wrong"
check_binary() { # PLATFORM PATTERN
	file -b "pg-status-$1" | grep -Eq "$2" || fail "pg-status-$1 is: $(file -b "pg-status-$1")"
}
check_binary linux-amd64 '^ELF 64-bit LSB executable, x86-64.* statically linked.* stripped'
check_binary linux-arm64 '^ELF 64-bit LSB executable, ARM aarch64.* statically linked.* stripped'
check_binary darwin-amd64 '^Mach-O 64-bit x86_64 executable'
check_binary darwin-arm64 '^Mach-O 64-bit arm64 executable'
native=pg-status-linux-$(dpkg --print-architecture)
equal "$native --version" "$("./$native" --version)" "pg-status $version"

step "The tarball, unpacked and run"
for platform in linux-amd64 darwin-arm64; do
	mkdir -p "$work/$platform"
	tar -C "$work/$platform" -xzf "pg-status-$version-$platform.tar.gz"
done
equal "the darwin tarball holds" "$(cd "$work/darwin-arm64" && echo */*)" \
	"$(printf "pg-status-$version-darwin-arm64/%s " LICENSE README.md copyright pg-status pg-status.8 pg-status.env | sed 's/ $//')"
equal "the linux tarball holds" "$(cd "$work/linux-amd64" && echo */*)" \
	"$(printf "pg-status-$version-linux-amd64/%s " LICENSE README.md copyright password.conf pg-status pg-status.8 pg-status.env pg-status.service | sed 's/ $//')"
(
	cd "$work/linux-amd64/pg-status-$version-linux-amd64"
	grep -q '^ExecStart=/usr/local/bin/pg-status$' pg-status.service || fail "the unit of the tarball starts something else"
	set -a # as a shell user would
	. ./pg-status.env
	pg_status__hosts=127.0.0.1
	./pg-status --check-config >"$work/effective" || fail "pg-status.env is not valid"
)
grep -qx 'pg_status__http_listen_address=127.0.0.1' "$work/effective" || fail "pg-status.env does not listen on 127.0.0.1 alone"

step "lintian"
for arch in amd64 arm64; do
	lintian --allow-root --fail-on error,warning --tag-display-limit 0 "pg-status_${version}_$arch.deb" || fail "lintian has something to say"
done

step "The unit"
level=$(systemd-analyze security --offline=true "$here/pg-status.service" | sed -n 's/.*exposure level for pg-status.service: \([0-9.]*\).*/\1/p')
awk -v l="$level" 'BEGIN { exit !(l != "" && l <= 2.0) }' || fail "systemd-analyze security: $level; want at most 2.0"
echo "systemd-analyze security: $level"

step "The same bytes from another build elsewhere"
mkdir "$work/copy"
tar -C "$here/.." --exclude=.git --exclude=./dist -cf - . | tar -C "$work/copy" -xf -
(
	umask 077
	export TZ=Asia/Tokyo LC_ALL=C.UTF-8 GOCACHE="$work/cache" # so that everything is compiled again
	make -s -C "$work/copy" dist DIST="$work/again" VERSION="$version"
)
diff SHA256SUMS "$work/again/SHA256SUMS" || fail "two builds differ"
rm -rf "$work/cache" "$work/copy"

step "The .deb under systemd"
tree=${DEBIAN_TREE:-$work/debian}
if [ ! -d "$tree" ]; then
	debootstrap --variant=minbase --include=dbus,systemd-sysv "${DEBIAN_SUITE:-bookworm}" "$tree.new" >"$work/log" ||
		fail "debootstrap: $(tail -n 5 "$work/log")"
	mv "$tree.new" "$tree"
fi
# A network of its own: the addresses and ports of this machine are in use.
unshare --net "$here/test-deb.sh" "$dist" "$version" "$tree"

step "The image"
unshare --net "$here/test-image.sh" "$dist" "$version"

step "The example for Docker Compose"
unshare --net --mount "$here/test-compose.sh" "$dist"

echo "All packages passed."
