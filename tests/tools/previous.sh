#!/usr/bin/env bash
# Build the program of an earlier commit into the cache, once, and print its path.
#
#   previous.sh [COMMIT]
#
# Without COMMIT: the newest release before this commit (its tag), else the commit that tests/tools/previous-commit names.
# It takes the dependencies that this tree compiled, which saves minutes, and never writes into this tree's target folder. That takes the
# profiles of this tree too: how much is optimised changes no message.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
source "$here/../tools/dependencies.sh"
cd "$here/../.."

wanted=${1:-$(git describe --tags --abbrev=0 HEAD^ 2>/dev/null || cat tests/tools/previous-commit)}
find_commit() { git rev-parse --verify --quiet "$wanted^{commit}"; }
commit=$(find_commit) || { git fetch --quiet --depth=1 origin "$wanted" 2>/dev/null && commit=$(find_commit); } || {
  # A shallow clone holds few commits.
  echo "this clone lacks the earlier commit $wanted, and its origin too: agents are replaced by agents of this very build" >&2
  echo "$PWD/target/debug/weightsync"
  exit
}

# profiles_of MANIFEST: its sections of profiles; other_sections MANIFEST: all others.
profiles_of() { awk '/^\[/ { keep = /^\[profile[].]/ } keep' "$1"; }
other_sections() { awk '/^\[/ { skip = /^\[profile[].]/ } !skip' "$1"; }

# `once` calls it where a failing command does not end the script.
compile() {
  local dir=$1
  mkdir "$dir/source" &&
    git archive "$commit" | tar -x -C "$dir/source" &&
    { other_sections "$dir/source/Cargo.toml" && profiles_of Cargo.toml; } >"$dir/Cargo.toml" &&
    mv "$dir/Cargo.toml" "$dir/source/Cargo.toml" &&
    share_dependencies target/debug "$dir/target/debug" -l &&
    CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=$dir/target cargo build --locked --workspace --bins --manifest-path "$dir/source/Cargo.toml" &&
    mv "$dir/target/debug/weightsync" "$dir/weightsync" &&
    rm -rf "$dir/source" "$dir/target"
}

dir=$WEIGHTSYNC_CACHE/previous-$commit
once "$dir" compile
echo "$dir/weightsync"
