#!/usr/bin/env bash
# Run tests two at a time: tests/two_at_once.sh PYTHON [pytest's arguments].
#
# The tests kill real processes and hold real sockets on two cores that may be shared, so up to five that failed beside
# others are run once more, alone, and have to pass there. More failures, or a run that did not come to its end, fail at
# once. What failed the first time stays in the output.
set -uo pipefail
python=$1
shift
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
"$python" -m pytest -o cache_dir="$cache" -n 2 "$@"
code=$?
[ "$code" -eq 1 ] || exit "$code"
failed=$("$python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' "$cache/v/cache/lastfailed")
[ "$failed" -le 5 ] || exit 1
echo "$failed failed beside other tests: once more, alone."
"$python" -m pytest -o cache_dir="$cache" --last-failed --last-failed-no-failures none "$@"
