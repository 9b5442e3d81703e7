#!/usr/bin/env bash
# stages.sh TARGET...: run `make TARGET` for each, stop at the first that fails, and print at the end how long each took: seconds, and seconds of a
# processor (without those of containers). Also printed: the GB of disk that were free after it.
# A stage that does not end in time fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The longest stage takes about 15 minutes on two cores.
LIMIT=${STAGE_LIMIT:-40m}

times=()
report() {
  printf '\n%8s %8s %8s  %s\n' seconds busy 'free GB' stage
  printf '%s\n' "${times[@]}"
  rm -f "$clock"
}
trap report EXIT

# What the processes of this script took so far. `times` counts for the shell that calls it, so no subshell may.
clock=$(mktemp)
look() {
  times >"$clock"
  busy=$(awk 'NR == 2 { split($1, a, /[ms]/); split($2, b, /[ms]/); print int(60 * (a[1] + b[1]) + a[2] + b[2]) }' "$clock")
}
note() {
  local before=$busy
  look
  local free
  free=$(df --output=avail --block-size=GB . | tail -n 1)
  times+=("$(printf '%8d %8d %8d  %s' $((SECONDS - started)) $((busy - before)) "${free%GB}" "$1")")
}

for stage in "$@"; do
  printf '\n=== %s\n' "$stage"
  started=$SECONDS
  look
  # In the foreground, so that Ctrl-C reaches it.
  if timeout --foreground --kill-after=1m "$LIMIT" make --no-print-directory "$stage"; then
    note "$stage"
  else
    status=$?
    ((status != 124)) || echo "the stage $stage did not end within $LIMIT" >&2
    note "$stage FAILED"
    exit 1
  fi
done
