#!/usr/bin/env bash
# Build the program of an earlier commit into the cache, once, and print its path.
#
#   previous.sh [COMMIT]
#
# Without COMMIT: the newest release before this commit (its tag), else the commit that tests/tools/previous-commit names.
# It takes the dependencies that this tree compiled, which saves minutes, and never writes into this tree's target folder.
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

# The compiled packages of others, as links or copies: cargo takes those that fit. This tree's own are left out, because cargo cannot
# distinguish packages at the same place in two trees.
share_dependencies() {
  local from=$PWD/target/debug to=$1/debug file
  [ -d "$from/.fingerprint" ] || return 0
  mkdir -p "$to/deps" "$to/.fingerprint"
  # The cache may lie on another file system.
  local link=-al
  cp -al "$from/build" "$to/" 2>/dev/null || { link=-a && cp -a "$from/build" "$to/"; }
  for file in "$from"/.fingerprint/* "$from"/deps/*.{rlib,rmeta,so,d}; do
    case $(basename "$file") in
    weightsync* | libweightsync*) ;;
    *) cp "$link" "$file" "$to/$(basename "$(dirname "$file")")/" ;;
    esac
  done
}

# `once` calls it where a failing command does not end the script.
compile() {
  local dir=$1
  mkdir "$dir/source" &&
    git archive "$commit" | tar -x -C "$dir/source" &&
    share_dependencies "$dir/target" &&
    CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=$dir/target cargo build --locked --workspace --bins --manifest-path "$dir/source/Cargo.toml" &&
    mv "$dir/target/debug/weightsync" "$dir/weightsync" &&
    rm -rf "$dir/source" "$dir/target"
}

dir=$WEIGHTSYNC_CACHE/previous-$commit
once "$dir" compile
echo "$dir/weightsync"
