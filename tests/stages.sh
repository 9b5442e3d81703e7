#!/usr/bin/env bash
# stages.sh TARGET...: run `make TARGET` for each, stop at the first that fails, and say at the end how long each took.
# A stage that does not end in time fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The longest stage takes about 15 minutes on two cores.
LIMIT=${STAGE_LIMIT:-40m}

times=()
report() {
  printf '\n%8s  %s\n' seconds stage
  printf '%s\n' "${times[@]}"
}
trap report EXIT

for stage in "$@"; do
  printf '\n=== %s\n' "$stage"
  started=$SECONDS
  # In the foreground, so that Ctrl-C reaches it.
  if timeout --foreground --kill-after=1m "$LIMIT" make --no-print-directory "$stage"; then
    times+=("$(printf '%8d  %s' $((SECONDS - started)) "$stage")")
  else
    status=$?
    ((status != 124)) || echo "the stage $stage did not end within $LIMIT" >&2
    times+=("$(printf '%8d  %s FAILED' $((SECONDS - started)) "$stage")")
    exit 1
  fi
done
