#!/usr/bin/env bash
# Put kind, kubectl and helm, in the pinned versions, into the cache's bin folder, which env.sh puts on PATH.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mkdir -p "$WEIGHTSYNC_CACHE/bin"
# link NAME FOLDER
link() { ln -sfn "$2/$1" "$WEIGHTSYNC_CACHE/bin/$1"; }

dir=$(module kind)
link kind "$dir"
dir=$(module helm)
link helm "$dir"
# kubectl comes out of Kubernetes as a whole (10 minutes); the machine's own will do where nothing else of it is needed.
if [ ! -S "$WEIGHTSYNC_STATE/docker.sock" ] && command -v kubectl >/dev/null; then
  exit
fi
dir=$(module kubernetes)
link kubectl "$dir"
