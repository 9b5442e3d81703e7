#!/usr/bin/env bash
# recipes/node-image.sh DIR: kind's node image from the root file system, kind's base files, the programs and the
# system images, as the archive DIR/node.tar. Follows images/base/Dockerfile and pkg/build/nodeimage of kind 0.33.0.
# Wants ROOTFS, IMAGES, KUBERNETES, CONTAINERD, RUNC, CRICTL, CNI and KIND_SOURCE, and NAME, the image's name.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
dir=$1
node=$dir/tree
files=$KIND_SOURCE/images/base/files
cp -a "$ROOTFS" "$node"

# --- kind's base files, and the services that a container must not run
mkdir -p "$node"/kind/{bin,manifests} "$node"/opt/cni/bin "$node"/etc/{containerd,kubernetes/manifests,cni/net.d} \
  "$node/etc/systemd/system/kubelet.service.d"
install -m755 "$files"/usr/local/bin/entrypoint "$node/usr/local/bin/"
install -m755 "$files"/kind/bin/* "$node/kind/bin/"
install -m644 "$files"/etc/crictl.yaml "$node/etc/"
install -m644 "$files"/etc/containerd/config.toml "$node/etc/containerd/"
install -m644 "$files"/etc/default/kubelet "$node/etc/default/"
install -m644 "$files"/etc/sysctl.d/* "$node/etc/sysctl.d/"
install -m644 "$files"/etc/systemd/system/*.{service,slice} "$node/etc/systemd/system/"
install -m644 "$files"/etc/systemd/system/kubelet.service.d/* "$node/etc/systemd/system/kubelet.service.d/"
(
  cd "$node"
  rm -f lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service \
    lib/systemd/system/{multi-user,local-fs}.target.wants/* etc/systemd/system/*.wants/* \
    lib/systemd/system/sockets.target.wants/*{udev,initctl}* lib/systemd/system/basic.target.wants/*
  echo ReadKMsg=no >>etc/systemd/journald.conf
)
chroot "$node" systemctl enable kubelet.service containerd.service undo-mount-hacks.service
chroot "$node" systemctl mask systemd-binfmt.service

# --- programs
install -m755 "$CONTAINERD"/{containerd,containerd-shim-runc-v2,ctr} "$CRICTL/crictl" "$node/usr/local/bin/"
install -m755 "$RUNC/runc" "$node/usr/local/sbin/"
install -m755 "$CNI"/{host-local,loopback,ptp,bridge,portmap} "$node/opt/cni/bin/"
install -m755 "$KUBERNETES"/{kubeadm,kubelet,kubectl} "$node/usr/bin/"
"$CONTAINERD/ctr" oci spec |
  jq '.hooks.createContainer += [{"path": "/kind/bin/mount-product-files.sh"}] | del(.process.rlimits)' \
    >"$node/etc/containerd/cri-base.json"

# --- what a confined machine needs, and what does no harm on another
# Without CAP_SYS_RESOURCE nothing may lower oom_score_adj.
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$node/etc/containerd/config.toml"
grep -q 'restrict_oom_score_adj = true' "$node/etc/containerd/config.toml"
# With cgroup v1, systemd mounts every controller that /proc/cgroups lists and nobody has mounted, for the whole
# machine: hide those from it, the way kind itself hides "misc". With cgroup v2 this line is never reached.
"$here/node/hide-controllers.py" "$node/usr/local/bin/entrypoint"
# A privileged container shares /proc/sys/fs and /proc/sys/kernel with the machine: leave its values alone.
rm -f "$node"/usr/lib/sysctl.d/{99-protect-links,50-pid-max}.conf

# --- version, manifests and system images
"$KUBERNETES/kubeadm" version -o short | tr -d '\n' >"$node/kind/version"
kindnetd=$(grep -oE 'docker.io/kindest/kindnetd:[^"]*' "$KIND_SOURCE/pkg/build/nodeimage/const_cni.go")
sed "s#KINDNETD_IMAGE#$kindnetd#" "$here/node/default-cni.yaml" >"$node/kind/manifests/default-cni.yaml"
cp "$here/node/default-storage.yaml" "$node/kind/manifests/"

# The images go into the node's content store by a containerd of our own, not unpacked, as kind does it.
scratch=$(mktemp -d)
cat >"$scratch/config.toml" <<TOML
version = 3
root = "$node/var/lib/containerd"
state = "$scratch/state"
disabled_plugins = ["io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images", "io.containerd.grpc.v1.cri"]
[grpc]
  address = "$scratch/sock"
TOML
mkdir -p "$node/var/lib/containerd"
PATH=$CONTAINERD:$PATH containerd --config "$scratch/config.toml" &
daemon=$!
trap 'kill $daemon 2>/dev/null || true; rm -rf "$scratch"' EXIT
for _ in $(seq 100); do
  [ -S "$scratch/sock" ] && break
  sleep 0.1
done
for archive in "$IMAGES"/*.tar; do
  "$CONTAINERD/ctr" -a "$scratch/sock" -n k8s.io images import --label=io.cri-containerd.pinned=pinned \
    --all-platforms --no-unpack --digests "$archive"
done
kill $daemon
wait $daemon || true
rm -rf "$node/var/lib/containerd/tmpmounts"

"$here/image.py" "$NAME" "$dir/node.tar" "$node" --keep-owners --env container=docker \
  --entrypoint '["/usr/local/bin/entrypoint", "/sbin/init"]' --stop-signal SIGRTMIN+3
rm -rf "$node"
