#!/usr/bin/env bash
# Delete the cluster, and the docker daemon that up.sh started, with its network. The cache stays.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if timeout 10 docker info >/dev/null 2>&1 && command -v kind >/dev/null; then
  kind delete cluster --quiet --name "$WEIGHTSYNC_CLUSTER"
fi
rm -f "$WEIGHTSYNC_STATE/config" "$KUBECONFIG"
"$here/docker-down.sh"
