#!/usr/bin/env bash
# Print what the chart renders with its defaults, for Kubernetes 1.36 and the namespace weightsync-system.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tests/cluster/env.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cat <<END
# Made from charts/weightsync by \`make install-yaml\`. Do not edit.
#
#   kubectl apply --server-side -f deploy/install.yaml
apiVersion: v1
kind: Namespace
metadata:
  name: weightsync-system
END
helm template weightsync charts/weightsync --namespace weightsync-system --kube-version 1.36.3 --no-hooks 2>/dev/null | sed "/^# Source: /d"
