#!/usr/bin/env bash
# Build kube-score into the cache, once, and check the objects of the chart with it: as they are by default, and with everything turned on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
cd "$here/../.."

version=1.20.0
dir=$WEIGHTSYNC_CACHE/kube-score-$version
# shellcheck disable=SC2016
once "$dir" bash -euc 'GOBIN=$1/bin go install "github.com/zegl/kube-score/cmd/kube-score@v$0"' "$version"

exceptions=(
  # A limit makes every update slower, because an update is a short burst.
  --ignore-container-cpu-limit
  # A tag of a version is never moved, and a controller must also start while the registry is away.
  --ignore-test container-image-pull-policy
  # The controller writes no file. Its log is on the node, and the kubelet rotates it.
  --ignore-test container-ephemeral-storage-request-and-limit
  # Topology constraints spread the replicas. This check looks for an affinity only.
  --ignore-test deployment-has-host-podantiaffinity
  # The pods of networkPolicy.agents are those of users.
  --ignore-test networkpolicy-targets-pod
)
of_defaults=(
  # Engines go on serving without a controller, until the next one starts.
  --ignore-test deployment-replicas
  # A policy must know the cluster: ports of the API server, and clients of engines.
  --ignore-test pod-networkpolicy
)
score() { "$dir/bin/kube-score" score --kubernetes-version v1.36 --exit-one-on-warning --color never "${exceptions[@]}" "$@"; }
score "${of_defaults[@]}" deploy/install.yaml
deploy/render.sh --values tests/chart/everything.yaml | score -
