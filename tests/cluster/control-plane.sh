#!/usr/bin/env bash
# Put etcd and kube-apiserver, in the pinned versions, into the cache's bin folder, which env.sh puts on PATH: a bench starts them by itself.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mkdir -p "$WEIGHTSYNC_CACHE/bin"
dir=$(module etcd)
ln -sfn "$dir/etcd" "$WEIGHTSYNC_CACHE/bin/etcd"
dir=$(module kubernetes)
ln -sfn "$dir/kube-apiserver" "$WEIGHTSYNC_CACHE/bin/kube-apiserver"
