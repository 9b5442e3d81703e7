#!/usr/bin/env bash
# stages.sh STAGE... [--lane STAGE...]...: run `make STAGE` for each, and stop all at the first that fails.
#
# Stages before the first --lane run one after another. Then each lane runs its own stages in order, all lanes at once: most stages wait
# for something, or keep one processor busy. Lanes after the first have a lower priority. They write a stage's output when it ends.
# At the end the script prints for each stage: its seconds, the seconds of a processor (without those of containers), and the GB of disk
# that were free after it. tests/tools/budget.py keeps these figures, and fails a run that grew. A stage that does not end in time fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster/env.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The longest stage takes about half an hour on two cores.
LIMIT=${STAGE_LIMIT:-60m}

work=$(mktemp -d)
: >"$work/rows"
: >"$work/figures"
# What the stages put into the cache (`once` of tests/cluster/lib.sh).
export WEIGHTSYNC_MADE=$work/made
began=$(date +%s)
lanes=()
finish() {
  local status=$?
  trap - EXIT
  for lane in "${lanes[@]}"; do kill "$lane" 2>/dev/null || true; done
  wait
  printf '\n%8s %8s %8s  %s\n' seconds busy 'free GB' stage
  cat "$work/rows"
  tests/tools/budget.py "$work/figures" "$began" "$status" "$work/made" || status=$?
  rm -rf "$work"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# What the processes of this shell took so far. `times` counts for the shell that calls it, so no subshell may.
clock=$work/clock
look() {
  times >"$clock"
  busy=$(awk 'NR == 2 { split($1, a, /[ms]/); split($2, b, /[ms]/); print int(60 * (a[1] + b[1]) + a[2] + b[2]) }' "$clock")
}

# run_stage STAGE COMMAND...: run the command for the stage, and note what it took. Its exit status is the command's.
run_stage() {
  local stage=$1 started=$SECONDS status=0 before free mark=
  shift
  look
  before=$busy
  "$@" || status=$?
  look
  ((status != 124)) || echo "the stage $stage did not end within $LIMIT" >&2
  ((status == 0)) || mark=' FAILED'
  free=$(df --output=avail --block-size=GB . | tail -n 1)
  printf '%8d %8d %8d  %s%s\n' $((SECONDS - started)) $((busy - before)) "${free%GB}" "$stage" "$mark" >>"$work/rows"
  echo "$stage $((SECONDS - started)) $((busy - before)) $status" >>"$work/figures"
  return "$status"
}

# In the foreground, so that Ctrl-C reaches it.
in_front() {
  printf '\n=== %s\n' "$1"
  timeout --foreground --kill-after=1m "$LIMIT" make --no-print-directory "$1"
}

# The stage's processes are a group of their own, and a signal to this shell ends them.
in_lane() {
  local number=$1 stage=$2 status=0
  if ((number == 0)); then
    printf '\n=== %s\n' "$stage"
    exec 3>&1
  else
    exec 3>"$work/output.$number"
  fi
  timeout --kill-after=1m "$LIMIT" nice -n $((number > 0 ? 10 : 0)) make --no-print-directory "$stage" >&3 2>&3 3>&- &
  making=$!
  wait "$making" || status=$?
  making=
  exec 3>&-
  ((number == 0)) || printf '\n=== %s\n' "$stage" | cat - "$work/output.$number"
  return "$status"
}

run_lane() {
  local number=$1 making=
  shift
  clock=$work/clock.$number
  trap - EXIT INT
  # What the stage started must end before the tree can be removed.
  trap '[ -z "$making" ] || { kill "$making" 2>/dev/null; wait "$making"; }; exit 143' TERM
  for stage in "$@"; do
    run_stage "$stage" in_lane "$number" "$stage" || exit 1
  done
}

while (($# > 0)) && [ "$1" != --lane ]; do
  run_stage "$1" in_front "$1" || exit 1
  shift
done

number=0
while (($# > 0)); do
  shift
  stages=()
  while (($# > 0)) && [ "$1" != --lane ]; do
    stages+=("$1")
    shift
  done
  run_lane "$number" "${stages[@]}" &
  lanes+=($!)
  number=$((number + 1))
done
for _ in "${lanes[@]}"; do
  wait -n || exit 1
done
lanes=()
