#!/usr/bin/env bash
# Run the long forms of the tests, part by part, and note in bench-records/test-all.md what ran, when, and how it ended.
#
#   test-all.sh [PART...]    these parts; without names, all, which takes most of a day on two cores
#   test-all.sh --list       print the parts
#
# Each part takes less than an hour on two cores. A part that failed does not stop the others; the exit status is 1 then. Parts that take
# repositories from GitHub take them from UPSTREAM_GIT=URL instead, where that is set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
cd "$here/../.."

record=bench-records/test-all.md
LIMIT=${PART_LIMIT:-60m}

# What each part runs.
declare -A parts=(
  [chaos]='make chaos'
  [seeds]='make programs && WEIGHTSYNC_DEMO_SEEDS=20 cargo test --locked --workspace --test host -- demo_ends_well'
  [gdr]='make gdr-test GDR_STORIES=stories::'
  [verbs]='make verbs-test VERBS_CASES=all'
  [mutants]='make mutants'
  [fuzz]='make fuzz CASES=8000'
  [avx2]='make engine-test CPU=avx2'
  [e2e-dist]='make e2e-dist'
  [wheels]="make upstream FRAMEWORKS='trl verl vllm skyrl areal openrlhf'"
  [checkouts]="make upstream FRAMEWORKS='xtuner slime prime-rl nemo-rl'"
  [fastdeploy]='make upstream-fastdeploy'
  [sglang]='make programs && tests/engine/sglang.sh target/debug/weightsync-dev'
)
order=(chaos seeds gdr verbs mutants fuzz avx2 e2e-dist wheels checkouts fastdeploy sglang)
for shard in $(tests/tools/survivors.sh --shards); do
  parts[survivors-${shard%/*}]="tests/tools/survivors.sh --shard $shard"
  order+=("survivors-${shard%/*}")
done

# results LOG: add up the closing lines of cargo's tests, pytest, and our own scripts.
results() {
  awk '
    { gsub(/\033\[[0-9;]*m/, "") }
    /^test result: / || /^=+ .* in [0-9.]+s/ || /^[0-9]+ passed/ {
      for (i = 2; i <= NF; i++) {
        if ($i ~ /^passed/) passed += $(i - 1)
        if ($i ~ /^failed/) failed += $(i - 1)
        if ($i ~ /^(ignored|skipped)/) ignored += $(i - 1)
      }
    }
    END { printf "%d passed, %d failed, %d ignored", passed, failed, ignored }' "$1"
}

# note PART SECONDS RESULT: put a row into the table in the place of the earlier one of this part.
note() {
  local row
  row="| $1 | $(date -u +%F) | $(git rev-parse --short HEAD) | $(awk -F': ' '/^model name/ { print $2; exit }' /proc/cpuinfo), $(nproc) | $2 | $3 |"
  { grep -vF "| $1 |" "$record" && echo "$row"; } >"$record.part"
  mv "$record.part" "$record"
  say "$row"
}

if [ "${1:-}" = --list ]; then
  for part in "${order[@]}"; do printf '%-14s %s\n' "$part" "${parts[$part]}"; done
  exit
fi
[ $# -gt 0 ] || set -- "${order[@]}"
for part in "$@"; do
  [ -n "${parts[$part]:-}" ] || die "no part $part: ${order[*]}"
done
logs=$(mktemp -d)
status=0
for part in "$@"; do
  started=$SECONDS
  say "$part: ${parts[$part]} (its output: $logs/$part)"
  if timeout --kill-after=1m "$LIMIT" bash -euo pipefail -c "${parts[$part]}" >"$logs/$part" 2>&1; then
    note "$part" $((SECONDS - started)) "$(results "$logs/$part")"
  else
    tail -n 40 "$logs/$part" >&2
    note "$part" $((SECONDS - started)) "failed: $(results "$logs/$part")"
    status=1
  fi
done
exit "$status"
