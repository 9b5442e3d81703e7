#!/usr/bin/env bash
# Keep the compiled dependencies of this tree in the cache, for the next clone.
#
#   compiled.sh restore    put them into target/debug, where nothing is compiled yet
#   compiled.sh keep       put those of target/debug into the cache, if it has none of this lock file, compiler and profile
#
# Only packages of others are kept. Cargo compares what it finds with what it needs, so an entry that does not fit costs time and no more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
source "$here/../tools/dependencies.sh"
cd "$here/../.."

# Entries of earlier lock files that are kept: each takes a GB or two.
EARLIER=1

target=${CARGO_TARGET_DIR:-target}/debug
kept=$WEIGHTSYNC_CACHE/compiled-$(dependencies_key)

case ${1:-} in
restore)
  if [ ! -d "$target/.fingerprint" ] && [ -e "$kept/.complete" ]; then
    say "compiled dependencies come from the cache"
    touch "$kept/.complete"
    share_dependencies "$kept" "$target"
  fi
  ;;
keep)
  once "$kept" share_dependencies "$target"
  find "$WEIGHTSYNC_CACHE" -mindepth 2 -maxdepth 2 -path '*/compiled-*/.complete' ! -path "$kept/*" -printf '%T@ %h\n' | sort -rn |
    tail -n +$((EARLIER + 1)) | cut -d' ' -f2 | while read -r old; do rm -rf "$old" "$old".lock "$old".log; done
  ;;
*) die "usage: compiled.sh restore | keep" ;;
esac
