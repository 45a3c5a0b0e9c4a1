#!/usr/bin/env bash
# The tests: `scripts/tests.sh fast`, or `all` (the fast ones, then the slow, whether or not those passed). Options of pytest are
# passed on. Sessions in real time (marked `real_time`) mostly wait: they run one after the other beside all others, which are
# nicer, so that few of them are starved. What failed there is shown, and run once more with the machine to itself, which counts.
# What the sessions said comes last, however it ends.
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
sessions() { exec .venv/bin/python -m pytest -m "$in_time" -o cache_dir=.pytest_cache/real_time "$@" </dev/null >>"$said" 2>&1; }
set -m # a group of processes of its own, which ends with this script
sessions "$@" -n 0 &
set +m
session=$!
ended() {
    kill -- -"$session" 2>/dev/null
    echo "[in real time]"
    cat "$said"
    rm -f "$said"
}
trap ended EXIT
# pytest answers Ctrl-C itself, whereupon bash would go on to the slow tests; the sessions are told too, and say what failed
trap 'kill -INT -- -"$session" 2>/dev/null; wait "$session"; exit 130' INT

status=5 # pytest's own where none was chosen
note() { case $1/$status in 5/* | 0/[!5]*) ;; *) status=$1 ;; esac }
others() {
    nice -n 10 .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist loadgroup -m "$1 and not real_time" "${@:2}"
    note $?
}
others "not slow" "$@"
[ "$tiers" = fast ] || others slow "$@"
wait "$session"
beside=$?
if [ $beside = 1 ]; then
    echo "[once more, with the machine to themselves]" >>"$said"
    (sessions "$@" -n 0 --last-failed --last-failed-no-failures none)
    again=$?
    [ $again = 5 ] || beside=$again
fi
note $beside
exit "$status"
