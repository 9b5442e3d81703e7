#!/usr/bin/env bash
# render.sh [ARGUMENT...]: print what the chart renders for Kubernetes 1.36 and the namespace weightsync-system, with its defaults or with
# further arguments for `helm template`.
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
helm template weightsync charts/weightsync --namespace weightsync-system --kube-version 1.36.3 --no-hooks "$@" | sed "/^# Source: /d"
