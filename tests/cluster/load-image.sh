#!/usr/bin/env bash
# load-image.sh ARCHIVE...: put images into the cluster's node, for pods with imagePullPolicy IfNotPresent or Never.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

for archive in "$@"; do
  kind load image-archive --name "$WEIGHTSYNC_CLUSTER" "$archive"
done
