#!/usr/bin/env bash
# The tests: `scripts/tests.sh fast`, or `all` (the fast ones, then the slow). Options of pytest are passed on. Sessions in real
# time (marked `real_time`) mostly wait: they run one after the other beside all others, which are nicer, so that none of them
# is starved.
set -uo pipefail
cd "$(dirname "$0")/.."
tiers=$1
shift
case $tiers in
fast) in_time="real_time and not slow" ;;
all) in_time="real_time" ;;
*) echo "usage: scripts/tests.sh fast|all [option of pytest ...]" >&2 && exit 2 ;;
esac

said=$(mktemp)
set -m # a group of processes of its own, which ends with this script
.venv/bin/python -m pytest -m "$in_time" -p no:cacheprovider "$@" </dev/null >"$said" 2>&1 &
set +m
session=$!
trap 'kill -- -"$session" 2>/dev/null; rm -f "$said"' EXIT

status=0
note() { case $1 in 0 | 5) ;; *) status=$1 ;; esac } # 5: none was chosen
others() {
    nice -n 10 .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist loadgroup -m "$1 and not real_time" "${@:2}"
    note $?
}
others "not slow" "$@"
[ "$tiers" = fast ] || others slow "$@"
wait "$session"
note $?
echo "[in real time]"
cat "$said"
exit "$status"
