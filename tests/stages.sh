#!/usr/bin/env bash
# stages.sh TARGET...: run `make TARGET` for each, stop at the first that fails, and say at the end how long each took.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

times=()
report() {
  printf '\n%8s  %s\n' seconds stage
  printf '%s\n' "${times[@]}"
}
trap report EXIT

for stage in "$@"; do
  printf '\n=== %s\n' "$stage"
  started=$SECONDS
  if make --no-print-directory "$stage"; then
    times+=("$(printf '%8d  %s' $((SECONDS - started)) "$stage")")
  else
    times+=("$(printf '%8d  %s FAILED' $((SECONDS - started)) "$stage")")
    exit 1
  fi
done
