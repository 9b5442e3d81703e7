#!/usr/bin/env bash
# recipes/rootfs.sh DIR: a Debian root file system with what kind's base image has, in DIR/tree.
#
# Bookworm, not trixie: the systemd of trixie refuses to run on a machine with cgroup v1.
set -euo pipefail
dir=$1

# The mirror that this machine uses; debootstrap's own choice where there is none to find.
mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)

packages=systemd,systemd-sysv,conntrack,iptables,nftables,iproute2,ethtool,mount,kmod,libseccomp2,pigz,e2fsprogs
packages+=,ca-certificates,curl,jq,procps,socat,iputils-ping
debootstrap --variant=minbase --include="$packages" bookworm "$dir/tree" ${mirror:+"$mirror"}

cd "$dir/tree"
rm -rf var/cache/apt/* var/lib/apt/lists/* var/cache/debconf/* var/log/* usr/share/{doc,man,locale,info}/*
rm -f etc/resolv.conf etc/hostname
: >etc/machine-id
