#!/usr/bin/env bash
# Build kind's node image from Debian packages and Go modules, for machines that reach no image registry.
# Prints the image's name and the archive that holds it. 12 minutes on 2 cores from nothing; then at once.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

recipe=$(key image.py lib.sh recipes/{go-module,rootfs,system-images,node-image}.sh node modules)
image=$WEIGHTSYNC_CACHE/node-image-$recipe
export NAME=docker.io/local/kind-node:$recipe

if [ ! -e "$image/.complete" ]; then
  [ "$(id -u)" = 0 ] || die "building the node image takes root (debootstrap, chroot)"
  (cd "$here/modules/kind" && go mod download sigs.k8s.io/kind)
  KIND_SOURCE=$(cd "$here/modules/kind" && go list -m -f '{{.Dir}}' sigs.k8s.io/kind)
  KUBERNETES=$(module kubernetes)
  ETCD=$(module etcd)
  COREDNS=$(module coredns)
  CONTAINERD=$(module containerd)
  RUNC=$(module runc)
  CRICTL=$(module crictl)
  CNI=$(module cni-plugins)
  ROOTFS=$WEIGHTSYNC_CACHE/rootfs-$(key recipes/rootfs.sh)
  IMAGES=$WEIGHTSYNC_CACHE/system-images-$recipe
  export KIND_SOURCE KUBERNETES ETCD COREDNS CONTAINERD RUNC CRICTL CNI IMAGES
  once "$ROOTFS" "$here/recipes/rootfs.sh"
  export ROOTFS=$ROOTFS/tree
  once "$IMAGES" "$here/recipes/system-images.sh"
  once "$image" "$here/recipes/node-image.sh"
fi
echo "$NAME $image/node.tar"
