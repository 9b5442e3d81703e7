#!/usr/bin/env bash
# Make a cluster that is up ready for the e2e tests: images loaded, files shared with pods, the chart installed.
# Safe to run again: it brings all of them to the state of this source tree. WEIGHTSYNC_BINARY names a binary other than
# target/release/weightsync, such as the debug build; weightsync-dev lies in the same folder, and the test's liar in its folder examples, or
# where WEIGHTSYNC_LIAR says. With WEIGHTSYNC_DIST, the folder that `make dist` made, the operator is installed from its chart and its image.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
root=$(cd "$here/../.." && pwd)

binary=${WEIGHTSYNC_BINARY:-$root/target/release/weightsync}
product=$("$here/product-image.sh" "$binary")
# Simulated engines are no part of the product's image. Theirs holds the product too, for pods that start the agent themselves.
simulators=$("$here/product-image.sh" "$(dirname "$binary")/weightsync-dev" "$binary")
images=$("$here/test-images.sh")
# What helm installs: the chart, and where its image is.
chart=$root/charts/weightsync
values=(--set image.repository=docker.io/local/weightsync --set image.tag=test)
made=
if [ -n "${WEIGHTSYNC_DIST:-}" ]; then
  version=$("$root/deploy/release.sh" version)
  chart=$WEIGHTSYNC_DIST/weightsync-$version.tgz
  values=()
  made=$WEIGHTSYNC_DIST/weightsync-$version-image.tar
fi
# shellcheck disable=SC2086
"$here/load-image.sh" "$product" "$simulators" $images $made

venv=$("$here/vllm-venv.sh" --print)
mkdir -p "$WEIGHTSYNC_SHARE/models" "$WEIGHTSYNC_SHARE/e2e"
"$venv/bin/python" "$root/tests/engine/make_checkpoint.py" "$WEIGHTSYNC_SHARE/models/base" --seed 1
cp "$root"/tests/e2e/*.py "$WEIGHTSYNC_SHARE/e2e/"
# Makes a new file: the old one may still run.
install "${WEIGHTSYNC_LIAR:-$(dirname "$binary")/examples/liar}" "$WEIGHTSYNC_SHARE/e2e/liar"
install "$(dirname "$binary")/weightsync-dev" "$WEIGHTSYNC_SHARE/e2e/weightsync-dev"
# The stand-in for GPUs: where libnccl looks for libcuda, it finds the same file.
libraries=$(CARGO_TARGET_DIR=$root/target "$root/tests/fakegpu/build.sh")
mkdir -p "$WEIGHTSYNC_SHARE"/gpus/{lib64,nccl}
install "$libraries/libcuda.so.1" "$WEIGHTSYNC_SHARE/gpus/lib64/"
install "$libraries/libnccl.so.2" "$WEIGHTSYNC_SHARE/gpus/nccl/"
ln -f "$WEIGHTSYNC_SHARE/gpus/lib64/libcuda.so.1" "$WEIGHTSYNC_SHARE/gpus/nccl/"
# What vLLM knows of a model's class: without this file, each server starts a second Python with vLLM to look. It goes by the venv alone.
facts=$(dirname "$venv")-facts
# shellcheck disable=SC2016
once "$facts" bash -euc 'VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_CACHE_ROOT=$1 "$0/bin/python" -c "
from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models[\"Qwen3ForCausalLM\"].inspect_model_cls()
" && [ -s "$1"/modelinfos/*-Qwen3ForCausalLM.json ]' "$venv"
rm -rf "$WEIGHTSYNC_SHARE/vllm"
cp -r "$facts" "$WEIGHTSYNC_SHARE/vllm"
chmod -R a+rX "$WEIGHTSYNC_SHARE/vllm"
# BF16 for numpy, in which trainers without torch publish.
types=$WEIGHTSYNC_CACHE/ml-dtypes-0.5.4
once "$types" "$venv/bin/pip" install --disable-pip-version-check --no-deps ml-dtypes==0.5.4 --target
rm -rf "$WEIGHTSYNC_SHARE/python"
mkdir "$WEIGHTSYNC_SHARE/python"
cp -r "$root/python/weightsync" "$types/ml_dtypes" "$WEIGHTSYNC_SHARE/python/"
# Pods cannot write what Python compiles: it is there already.
"$venv/bin/python" -m compileall -q "$WEIGHTSYNC_SHARE/python"
# Ray, for engines that register at run time.
ray=$WEIGHTSYNC_CACHE/ray-2.60.0
once "$ray" "$venv/bin/pip" install --disable-pip-version-check ray==2.60.0 --target
rm -rf "$WEIGHTSYNC_SHARE/ray"
cp -al "$ray" "$WEIGHTSYNC_SHARE/ray"

# An install that failed cannot be upgraded. One that worked is upgraded, not removed: the API server (1.36) goes on with
# the parameters of the old injection policy when a policy with parameters of a built-in kind is deleted and made again.
state=$(helm status weightsync --namespace weightsync-system --output json 2>/dev/null | jq -r .info.status || true)
[ "$state" = deployed ] || helm uninstall weightsync --namespace weightsync-system --ignore-not-found --wait --timeout 60s
# Sidecars request less CPU than by default: on two cores, of which the cluster's own parts reserve one, the pods of three tests have room.
helm upgrade --install weightsync "$chart" --namespace weightsync-system --create-namespace \
  "${values[@]}" --set image.pullPolicy=Never \
  --set networkPolicy.controller.enabled=true \
  --set injection.resources.requests.cpu=10m \
  --wait --timeout 120s
# The same tag may hold a new image.
kubectl -n weightsync-system rollout restart deployment/weightsync
kubectl -n weightsync-system rollout status deployment/weightsync --timeout=120s

# By default kube-proxy requests no CPU, and gets next to none while servers of tests start: Services would change late.
if kubectl -n kube-system get daemonset/kube-proxy >/dev/null 2>&1; then
  kubectl -n kube-system set resources daemonset/kube-proxy --requests=cpu=10m
  kubectl -n kube-system rollout status daemonset/kube-proxy --timeout=120s
fi

# The device plugin that hands the GPUs out; the same file may hold a new program.
kubectl apply -f "$root/tests/e2e/gpus.yaml"
kubectl -n kube-system rollout restart daemonset/gpus
kubectl -n kube-system rollout status daemonset/gpus --timeout=120s
kubectl wait nodes --all --for='jsonpath={.status.allocatable.nvidia\.com/gpu}=15' --timeout=60s
