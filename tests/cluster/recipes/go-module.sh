#!/usr/bin/env bash
# recipes/go-module.sh NAME DIR: build the programs that modules/NAME/go.mod lists as tools into DIR.
#
# Each project is a module of its own, because `go install PACKAGE@VERSION` refuses modules with replace lines, and
# because one module for all would raise everyone's dependencies to the highest version that anyone asks for.
set -euo pipefail
name=$1 dir=$2
cd "$(dirname "${BASH_SOURCE[0]}")/../modules/$name"

version() { go list -m -f '{{.Version}}' "$1"; }

export CGO_ENABLED=0
flags='-s -w'
tags=''
case $name in
  kubernetes)
    # Without these the servers report v0.0.0, and kubeadm refuses the kubelet.
    v=$(version k8s.io/kubernetes)
    IFS=. read -r major minor _ <<<"${v#v}"
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
      flags+=" -X $package.gitVersion=$v -X $package.gitMajor=$major -X $package.gitMinor=$minor"
    done
    ;;
  containerd)
    tags='no_btrfs no_devmapper no_zfs'
    ;;
  crictl)
    flags+=" -X sigs.k8s.io/cri-tools/pkg/version.Version=$(version sigs.k8s.io/cri-tools)"
    ;;
  runc)
    # Static, so that it does not matter which glibc and libseccomp the node has.
    export CGO_ENABLED=1
    tags='seccomp netgo osusergo'
    flags+=" -linkmode external -extldflags -static -X main.version=$(version github.com/opencontainers/runc)"
    ;;
esac

go build -trimpath -tags "$tags" -ldflags "$flags" -o "$dir/" tool
[ ! -e "$dir/server" ] || mv "$dir/server" "$dir/etcd" # go.etcd.io/etcd/server/v3
ls -l "$dir"
