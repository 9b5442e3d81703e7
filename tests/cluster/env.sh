# Where the test cluster keeps its things. Source it to talk to the cluster by hand:
#
#   source tests/cluster/env.sh && kubectl get pods -A
#
# It sets variables and PATH only, and may be sourced twice.

# Everything that is built or unpacked, outside the source tree; deleting it costs a rebuild and nothing else.
export WEIGHTSYNC_CACHE=${WEIGHTSYNC_CACHE:-$HOME/.cache/weightsync}

# The cluster's name, and its own folder: the daemon's data and socket, the kubeconfig, the folder shared with pods.
export WEIGHTSYNC_CLUSTER=weightsync
export WEIGHTSYNC_STATE=$WEIGHTSYNC_CACHE/cluster
export KUBECONFIG=$WEIGHTSYNC_STATE/kubeconfig

# What pods see, read-only, as /host/share: checkpoints, scripts and packages that tests put there.
export WEIGHTSYNC_SHARE=$WEIGHTSYNC_STATE/share

# kind, kubectl and helm in the pinned versions come before what the machine has.
case ":$PATH:" in
  *":$WEIGHTSYNC_CACHE/bin:"*) ;;
  *) export PATH=$WEIGHTSYNC_CACHE/bin:$PATH ;;
esac

# The test cluster's own docker daemon, while it runs; else whatever docker the machine has.
if [ -S "$WEIGHTSYNC_STATE/docker.sock" ]; then
  export DOCKER_HOST=unix://$WEIGHTSYNC_STATE/docker.sock
fi
