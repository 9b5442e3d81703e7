#!/usr/bin/env bash
# Put etcd, kube-apiserver and kwok, in the pinned versions, into the cache's bin folder, which env.sh puts on PATH: a bench starts them by
# itself. KWOK's own stages, by which its nodes and pods become ready, go into kwok-stages next to it, unchanged.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mkdir -p "$WEIGHTSYNC_CACHE/bin" "$WEIGHTSYNC_CACHE/kwok-stages"
dir=$(module etcd)
ln -sfn "$dir/etcd" "$WEIGHTSYNC_CACHE/bin/etcd"
dir=$(module kubernetes)
ln -sfn "$dir/kube-apiserver" "$WEIGHTSYNC_CACHE/bin/kube-apiserver"
dir=$(module kwok)
ln -sfn "$dir/kwok" "$WEIGHTSYNC_CACHE/bin/kwok"
cd "$here/modules/kwok"
go mod download sigs.k8s.io/kwok
stages=$(go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage
for stage in node/fast/node-initialize node/heartbeat-with-lease/node-heartbeat-with-lease pod/fast/pod-ready pod/fast/pod-delete; do
  install -m 644 "$stages/$stage.yaml" "$WEIGHTSYNC_CACHE/kwok-stages/"
done
