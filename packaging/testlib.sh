# What the tests of the packages share; read by them, not run.

step() { echo "== $*"; }

fail() {
	echo "FAIL: $*" >&2
	exit 1
}

need_root() { [ "$(id -u)" = 0 ] || fail "this test boots a system and builds an image: run it as root"; }

# equal WHAT GOT WANT
equal() { [ "$2" = "$3" ] || fail "$1: got $(printf '%q' "$2"); want $(printf '%q' "$3")"; }

# matches WHAT GOT REGEXP: some line of GOT matches.
matches() { grep -Eq -- "$3" <<<"$2" || fail "$1: got $(printf '%q' "$2"); want a match of $3"; }

# eventually WANT COMMAND...: within 15 s COMMAND prints a line that matches the
# regular expression WANT.
eventually() {
	local want=$1 got='' end=$((SECONDS + 15))
	shift
	while [ $SECONDS -lt $end ]; do
		got=$("$@" 2>&1 || true)
		grep -Eq -- "$want" <<<"$got" && return
		sleep 0.1
	done
	fail "$*: got $(printf '%q' "$got") for 15 s; want a match of $want"
}
