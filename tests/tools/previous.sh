#!/usr/bin/env bash
# Build the program of an earlier commit into the cache, once, and print its path.
#
#   previous.sh [COMMIT]
#
# Without COMMIT: the newest release before this commit (its tag), else the commit that tests/tools/previous-commit names.
# Its dependencies are compiled into this tree's target folder, which saves minutes; target/debug holds this tree's program afterwards.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
cd "$here/../.."

wanted=${1:-$(git describe --tags --abbrev=0 HEAD^ 2>/dev/null || cat tests/tools/previous-commit)}
find_commit() { git rev-parse --verify --quiet "$wanted^{commit}"; }
commit=$(find_commit) || { git fetch --quiet --depth=1 origin "$wanted" 2>/dev/null && commit=$(find_commit); } || {
  # A shallow clone holds few commits.
  echo "this clone lacks the earlier commit $wanted, and its origin too: agents are replaced by agents of this very build" >&2
  echo "$PWD/target/debug/weightsync"
  exit
}

# `once` calls it where a failing command does not end the script.
compile() {
  local dir=$1 status=0
  mkdir "$dir/source"
  git archive "$commit" | tar -x -C "$dir/source" &&
    CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=$PWD/target cargo build --locked --workspace --bins --manifest-path "$dir/source/Cargo.toml" &&
    cp target/debug/weightsync "$dir/weightsync" || status=1
  rm -rf "$dir/source"
  # This tree's program takes its place in target/debug again; with the features of all stages, so that nothing is compiled again.
  make --no-print-directory programs || status=1
  return $status
}

dir=$WEIGHTSYNC_CACHE/previous-$commit
once "$dir" compile
echo "$dir/weightsync"
