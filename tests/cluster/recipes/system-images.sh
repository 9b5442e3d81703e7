#!/usr/bin/env bash
# recipes/system-images.sh DIR: image archives, under the names that kubeadm and kind's manifests ask for, in DIR.
# Wants ROOTFS, KUBERNETES, ETCD, COREDNS and KIND_SOURCE: folders that node-image.sh names.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
dir=$1
trees=$(mktemp -d)
trap 'rm -rf "$trees"' EXIT

version=$("$KUBERNETES/kubeadm" version -o short)
names=$("$KUBERNETES/kubeadm" config images list --kubernetes-version "$version")
kubeadm_name() { grep "/$1:" <<<"$names"; }
kind_name() { grep -rhoE "docker.io/kindest/$1:[^\"]*" "$KIND_SOURCE/pkg/build/nodeimage/" | head -1; }

# program_image NAME FILE [ARGUMENT...]: an image with one static program in /usr/local/bin.
program_image() {
  local name=$1 file=$2 tree
  shift 2
  tree=$trees/$(basename "$file")
  mkdir -p "$tree/usr/local/bin" "$tree/tmp"
  cp "$file" "$tree/usr/local/bin/"
  "$here/image.py" "$name" "$dir/$(basename "$file").tar" "$tree" "$@"
}

for program in kube-apiserver kube-controller-manager kube-scheduler; do
  program_image "$(kubeadm_name $program)" "$KUBERNETES/$program"
done
program_image "$(kubeadm_name etcd)" "$ETCD/etcd"
program_image "$(kubeadm_name coredns)" "$COREDNS/coredns" --entrypoint '["/usr/local/bin/coredns"]'

mkdir "$trees/pause"
gcc -static -Os -s -o "$trees/pause/pause" "$here/node/pause.c"
sandbox=$(awk -F'"' '/sandbox_image/ {print $2}' "$KIND_SOURCE/images/base/files/etc/containerd/config.toml")
"$here/image.py" "$sandbox" "$dir/pause.tar" "$trees/pause" --entrypoint '["/pause"]'

busybox_tree "$trees/busybox"
"$here/image.py" "$(kind_name kindnetd)" "$dir/kindnetd.tar" "$trees/busybox"

# kube-proxy writes its rules with the iptables, nft and conntrack programs: they come out of the node's root file
# system, with the libraries they load.
tree=$trees/proxy
mkdir -p "$tree"/usr/{local/bin,sbin,bin,lib,lib64} "$tree"/{etc,run,tmp} "$tree/var/lib"
for link in sbin bin lib lib64; do ln -s "usr/$link" "$tree/$link"; done
cp "$KUBERNETES/kube-proxy" "$tree/usr/local/bin/"
cp "$ROOTFS/etc/protocols" "$tree/etc/" 2>/dev/null || true
extensions=/usr/lib/x86_64-linux-gnu/xtables
mkdir -p "$tree/$(dirname $extensions)"
cp -r "$ROOTFS$extensions" "$tree$extensions"
programs=(/usr/sbin/xtables-nft-multi /usr/sbin/nft /usr/sbin/conntrack /usr/bin/ip)
for program in "${programs[@]}"; do cp -L "$ROOTFS$program" "$tree/usr/sbin/"; done
for name in iptables ip6tables; do
  for tool in $name $name-save $name-restore; do ln -s xtables-nft-multi "$tree/usr/sbin/$tool"; done
done
extension_files=("$ROOTFS$extensions"/*.so)
# shellcheck disable=SC2016
chroot "$ROOTFS" sh -c 'ldd "$@" || true' - "${programs[@]}" "${extension_files[@]#"$ROOTFS"}" |
  grep -oE '/[^ :]+' | grep -v "^$extensions" | sort -u >"$trees/libraries"
while read -r file; do
  [ -e "$tree$file" ] && continue
  mkdir -p "$tree$(dirname "$file")"
  cp "$ROOTFS$(chroot "$ROOTFS" realpath "$file")" "$tree$file"
done <"$trees/libraries"
chroot "$tree" /usr/sbin/iptables -m statistic --help >/dev/null
chroot "$tree" /usr/sbin/nft --version
chroot "$tree" /usr/sbin/conntrack --version
"$here/image.py" "$(kubeadm_name kube-proxy)" "$dir/kube-proxy.tar" "$tree"
