#!/usr/bin/env bash
# Bring the kind cluster up, and print the path of its kubeconfig. Safe to run again, also after an interruption.
#
# Where docker runs, it is used, with kind's own node image. Elsewhere a docker daemon of our own is started, with a
# node image built here (12 minutes on 2 cores the first time). WEIGHTSYNC_NODE_IMAGE names another image to use.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mkdir -p "$WEIGHTSYNC_STATE" "$WEIGHTSYNC_SHARE"
# One of two that start it at a time waits for the other.
exec 8>"$WEIGHTSYNC_STATE/lock"
flock 8

"$here/packages.sh"
"$here/vllm-venv.sh" >/dev/null
"$here/docker-up.sh" 8>&-
source "$here/env.sh" # for DOCKER_HOST, if it is our own now
"$here/tools.sh"

image=${WEIGHTSYNC_NODE_IMAGE:-}
if [ -z "$image" ] && [ -S "$WEIGHTSYNC_STATE/docker.sock" ]; then
  answer=$("$here/node-image.sh")
  read -r image archive <<<"$answer"
  if ! docker image inspect "$image" >/dev/null 2>&1; then
    say "loading the node image"
    docker load --quiet --input "$archive" >/dev/null
    docker image ls --quiet --filter "before=$image" "${image%:*}" | xargs --no-run-if-empty docker image rm --force >/dev/null
  fi
fi

# A cluster of this very configuration that answers is kept; any other is made again.
config=$("$here/kind-config.sh")
made=$WEIGHTSYNC_STATE/config
if [ "$(cat "$made" 2>/dev/null)" = "$image$config" ] &&
  timeout 10 kubectl get --raw /readyz >/dev/null 2>&1; then
  say "the cluster is up already"
else
  rm -f "$made"
  kind delete cluster --quiet --name "$WEIGHTSYNC_CLUSTER"
  say "creating the cluster"
  create() {
    kind create cluster --verbosity 1 --config <(echo "$config") --wait 180s ${image:+--image "$image"} >"$WEIGHTSYNC_STATE/kind.log" 2>&1 8>&-
  }
  # Seen once, next to a build that held both cores: kind gave up after 70 s, and printed nothing because of its quiet option.
  create || { tail -n 40 "$WEIGHTSYNC_STATE/kind.log" >&2; say "once more"; kind delete cluster --quiet --name "$WEIGHTSYNC_CLUSTER"; create; } ||
    { tail -n 40 "$WEIGHTSYNC_STATE/kind.log" >&2; exit 1; }
  kubectl wait --for=condition=Ready pods --all --all-namespaces --timeout=180s >/dev/null
  printf %s "$image$config" >"$made"
  say "the cluster is ready"
fi
echo "$KUBECONFIG"
