#!/usr/bin/env bash
# Start a docker daemon of our own, in a network namespace of its own, for machines where none runs.
#
# The namespace has one link, to this machine, and no route beyond it: nothing that the cluster sends can leave the
# machine, its firewall rules and network settings stay in there, and all of it ends with the namespace.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$here/docker-env.sh"

timeout 10 docker info >/dev/null 2>&1 && exit
[ "$(id -u)" = 0 ] || die "no docker answers, and starting one takes root"
"$here/docker-down.sh"
mkdir -p "$WEIGHTSYNC_STATE"

# The kubelet and the node's systemd raise these for the whole machine; docker-down.sh puts them back.
sysctl -e fs.file-max fs.inotify kernel.panic kernel.panic_on_oops kernel.keys vm.overcommit_memory vm.panic_on_oom \
  >"$WEIGHTSYNC_STATE/sysctl.before" 2>/dev/null || true

ip netns add "$NAMESPACE"
ip link add "$HOST_LINK" type veth peer name link0 netns "$NAMESPACE"
ip address add "$HOST_ADDRESS/30" dev "$HOST_LINK"
ip link set "$HOST_LINK" up
ip -n "$NAMESPACE" address add "$CLUSTER_ADDRESS/30" dev link0
ip -n "$NAMESPACE" link set link0 up
ip -n "$NAMESPACE" link set lo up

runtime=()
if ! may_sys_resource; then
  runtime=(--add-runtime "confined=$here/node/runc-without-sys-resource" --default-runtime confined)
fi

# nsenter rather than `ip netns exec`, which would hide the machine's cgroups after a fresh /sys.
nohup setsid nsenter --net="/run/netns/$NAMESPACE" /usr/sbin/dockerd \
  --data-root "$WEIGHTSYNC_STATE/docker" --exec-root "$WEIGHTSYNC_STATE/docker-run" \
  --pidfile "$WEIGHTSYNC_STATE/docker.pid" --host "unix://$WEIGHTSYNC_STATE/docker.sock" \
  --storage-driver overlay2 --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent "/$NAMESPACE" "${runtime[@]}" \
  >"$WEIGHTSYNC_STATE/docker.log" 2>&1 </dev/null &

export DOCKER_HOST=unix://$WEIGHTSYNC_STATE/docker.sock
for _ in $(seq 120); do
  timeout 5 docker info >/dev/null 2>&1 && break
  sleep 0.5
done
timeout 5 docker info >/dev/null || die "docker did not start: $(tail -5 "$WEIGHTSYNC_STATE/docker.log")"

# kind would make its network with IPv6, which not every machine has rules for.
docker network inspect kind >/dev/null 2>&1 || docker network create --driver bridge kind >/dev/null
say "docker runs in the network namespace $NAMESPACE"
