#!/usr/bin/env bash
# Print kind's configuration for the cluster: one node, with the folders that pods run the real vLLM from.
#
# Pods mount the node's /host, read-only, as /host:
#   /host/usr     this machine's /usr, for glibc and the libraries that Python loads
#   /host/python  the Python that made the virtual environment
#   /host/vllm    the virtual environment's folder (venv below it)
#   /host/share   $WEIGHTSYNC_SHARE: checkpoints, scripts and packages of the tests
# The image of test-images.sh has the links that make these look like an ordinary root file system.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$here/docker-env.sh"

venv=$("$here/vllm-venv.sh" --print)
python=$("$venv/bin/python" -c 'import sys; print(sys.base_prefix)')

cat <<YAML
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
name: $WEIGHTSYNC_CLUSTER
YAML
if [ -S "$WEIGHTSYNC_STATE/docker.sock" ]; then
  # Our own docker publishes ports inside its network namespace.
  cat <<YAML
networking:
  apiServerAddress: $CLUSTER_ADDRESS
  apiServerPort: 6443
YAML
fi
cat <<YAML
kubeadmConfigPatches:
# kind still runs on machines with cgroup v1; a kubelet must be informed that it may.
- |
  kind: KubeletConfiguration
  failCgroupV1: false
# The cluster is made again after every crash of the machine: do not wait for the disk.
- |
  kind: ClusterConfiguration
  etcd:
    local:
      extraArgs:
      - {name: unsafe-no-fsync, value: "true"}
nodes:
- role: control-plane
  extraMounts:
  - {hostPath: /usr, containerPath: /host/usr, readOnly: true}
  - {hostPath: "$python", containerPath: /host/python, readOnly: true}
  - {hostPath: "$(dirname "$venv")", containerPath: /host/vllm, readOnly: true}
  - {hostPath: "$WEIGHTSYNC_SHARE", containerPath: /host/share, readOnly: true}
YAML
