#!/usr/bin/env bash
# Change one expression of the pure files at a time, and check that a unit test notices.
#
#   survivors.sh [FILE...]      all changes of these files; without names, of all pure files
#   survivors.sh --shard K/N    the K-th of N parts of all changes, from 0
#   survivors.sh --shards       print the parts, each of which takes less than an hour on two cores
#
# cargo-mutants (https://mutants.rs) makes the changes. It works in a copy of this tree under target/survivors, whose own target folder begins
# with the dependencies that this tree compiled and stays for the next run. tests/tools/survivors.txt lists the changes that no test notices.
# One that it does not list is an error: a test is missing. A change that makes a test run for too long counts as noticed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
source "$here/../tools/dependencies.sh"
cd "$here/../.."

VERSION=27.1.0
SHARDS=16
# A broken loop shows by its time: tests of one crate take seconds.
DEADLINE_S=${WEIGHTSYNC_SURVIVORS_DEADLINE_S:-180}
listed=tests/tools/survivors.txt
work=$PWD/target/survivors
core=(crates/core/src/membership{.rs,/**} crates/core/src/plan{.rs,/**})
agent=(crates/agent/src/{rollout/state.rs,rollout/state/**,rollout/readiness.rs,lead/waves.rs,source/history.rs,space.rs})
# Those of the agent's tests that open no connection.
agents_tests=(pure:: waves:: state:: machine::)

shard=()
case ${1:-} in
--shards)
  for ((number = 0; number < SHARDS; number++)); do echo "$number/$SHARDS"; done
  exit
  ;;
--shard)
  shard=(--shard "${2:?usage: survivors.sh --shard K/N}")
  shift 2
  ;;
esac
if [ $# -gt 0 ]; then
  core=() agent=()
  for file in "$@"; do
    case $file in
    crates/core/src/*) core+=("$file") ;;
    crates/agent/src/*) agent+=("$file") ;;
    *) die "$file is no file of crates/core or crates/agent" ;;
    esac
  done
fi

install() { CARGO_PROFILE_DEV_DEBUG=0 cargo install --locked --debug --version "$VERSION" cargo-mutants --root "$1"; }
once "$WEIGHTSYNC_CACHE/cargo-mutants-$VERSION" install
tool=$WEIGHTSYNC_CACHE/cargo-mutants-$VERSION/bin/cargo-mutants

tree=$work/tree
copy_workspace "$tree"
# Each change compiles the crate and runs its unit tests once: to optimise it takes longer than they do.
sed -i '/^weightsync-core\.opt-level/d' "$tree/Cargo.toml"
[ -d "$tree/target" ] || share_dependencies target/debug "$tree/target/debug" -l

# run PACKAGE FILES -- FILTER...: what became of each change, into the files of target/survivors/PACKAGE.
run() {
  local package=$1 files=() status=0
  shift
  while [ "$1" != -- ]; do files+=(--file "$1") && shift; done
  shift
  [ ${#files[@]} -gt 0 ] || return 0
  rm -rf "${work:?}/$package"
  mkdir "$work/$package"
  # Texts for people are no decisions.
  CARGO_INCREMENTAL=1 CARGO_TARGET_DIR=$tree/target "$tool" mutants --dir "$tree" --in-place --output "$work/$package" --colors never \
    --no-shuffle --timeout "$DEADLINE_S" --package "weightsync-$package" "${files[@]}" "${shard[@]}" --exclude-re 'impl .*(Display|Debug)' \
    -- --lib -- "$@" || status=$?
  # 2: some were missed, 3: some ran for too long.
  case $status in 0 | 2 | 3) ;; *) die "cargo-mutants failed ($status): $work/$package/mutants.out" ;; esac
}

# outcome NAME...: the changes that ended so, without their places, in order.
outcome() {
  local name
  for name in "$@"; do cat "$work"/{core,agent}/mutants.out/"$name".txt 2>/dev/null || true; done | sed -E 's/:[0-9]+:[0-9]+: /: /' | LC_ALL=C sort
}

rm -rf "${work:?}"/{core,agent}
run core "${core[@]}" --
run agent "${agent[@]}" -- "${agents_tests[@]}"

unlisted=$(LC_ALL=C comm -13 <(grep -v '^#' "$listed" | LC_ALL=C sort) <(outcome missed))
noticed=$(LC_ALL=C comm -12 <(grep -v '^#' "$listed" | LC_ALL=C sort -u) <(outcome caught timeout | uniq))
[ -z "$noticed" ] || printf 'a test notices these now; take them out of %s, unless another place of the function has the same change:\n%s\n' "$listed" "$noticed"
[ -z "$unlisted" ] || printf 'no test notices these changes, and %s does not list them:\n%s\n' "$listed" "$unlisted"
failed=$(grep -c . <<<"$unlisted" || true)
echo "$(($(outcome caught timeout missed | wc -l) - failed)) passed, $failed failed"
[ "$failed" = 0 ]
