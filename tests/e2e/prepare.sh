#!/usr/bin/env bash
# Make a running cluster ready for the end-to-end tests: images, checkpoints and scripts where pods find them, the chart installed.
# Safe to run again; a changed product is loaded and rolled out anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/cluster/env.sh

images=$(tests/cluster/test-images.sh)
product=$(tests/cluster/product-image.sh)
# shellcheck disable=SC2086 # one word an image
tests/cluster/load-image.sh $images $product

venv=$(tests/cluster/vllm-venv.sh)
mkdir -p "$WEIGHTSYNC_SHARE/models" "$WEIGHTSYNC_SHARE/e2e"
[ -e "$WEIGHTSYNC_SHARE/models/base/config.json" ] ||
  "$venv/bin/python" tests/engine/make_checkpoint.py "$WEIGHTSYNC_SHARE/models/base" --seed 1
rm -rf "$WEIGHTSYNC_SHARE/python"
mkdir -p "$WEIGHTSYNC_SHARE/python"
cp -r python/weightsync "$WEIGHTSYNC_SHARE/python/"
cp tests/e2e/trainer.py "$WEIGHTSYNC_SHARE/e2e/"

helm upgrade --install weightsync charts/weightsync --namespace weightsync-system --create-namespace \
  --set image.repository=docker.io/local/weightsync --set image.tag=test --set image.pullPolicy=Never --wait --timeout 120s >/dev/null
# The tag stays the same when the product changes.
kubectl -n weightsync-system rollout restart deployment/weightsync >/dev/null
kubectl -n weightsync-system rollout status deployment/weightsync --timeout=120s
