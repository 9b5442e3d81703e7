#!/usr/bin/env bash
# guest.sh DIR: what an emulated guest with a software RDMA device (Soft-RoCE, rdma_rxe) is made of, into DIR.
#
#   DIR/qemu         qemu-system-x86_64, and the libraries of it that this machine lacks
#   DIR/vmlinuz      Debian's kernel
#   DIR/system.cpio  the guest's files, all but the tests: kernel modules, busybox, rdma, libibverbs with the provider rxe, and NIXL with UCX
#
# NIXL names the file libnixl_capi.so. It takes Debian's packages and installs none of them.
set -euo pipefail
dir=$1
capi=${NIXL:?the file libnixl_capi.so}
own=$(dirname "$capi")
wheel=$(dirname "$own")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/verbs/files.sh
source "$here/files.sh"

command -v apt-get >/dev/null || { echo "the guest is made of Debian's packages, and there is no apt-get here" >&2; exit 1; }
work=$dir/work
mkdir -p "$work/archives/partial" "$work/packages" "$work/root" "$dir/qemu"
# Lists that are too old name files that are gone.
[ "$(id -u)" != 0 ] || apt-get update -qq
apt=(apt-get -q -y -o "Dir::Cache::archives=$work/archives" -o Debug::NoLocking=1)

# QEMU, and those of its libraries that are not installed.
"${apt[@]}" install --download-only --reinstall --no-install-recommends qemu-system-x86
for package in "$work"/archives/*.deb; do
  dpkg-deb -x "$package" "$dir/qemu"
done

kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ {print $2; exit}')
(cd "$work/packages" && "${apt[@]}" download "$kernel" busybox-static ibverbs-providers libibverbs1 libnl-3-200 libnl-route-3-200)
for package in "$work"/packages/*.deb; do
  dpkg-deb -x "$package" "$work/from"
done
from=$work/from root=$work/root
cp "$from"/boot/vmlinuz-* "$dir/vmlinuz"

# In the order in which they are loaded.
mkdir -p "$root/modules"
number=10
for module in udp_tunnel ip6_udp_tunnel ib_core ib_uverbs crc32_generic crc32-pclmul rdma_rxe dummy; do
  file=$(find "$from/lib/modules" -name "$module.ko" -o -name "$module.ko.xz")
  case $file in
  *.ko) cp "$file" "$root/modules/$number-$module.ko" ;;
  *.ko.xz) xz -dc "$file" >"$root/modules/$number-$module.ko" ;;
  *) echo "$kernel has no module $module" >&2 && exit 1 ;;
  esac
  number=$((number + 1))
done

mkdir -p "$root"/{bin,dev,etc/libibverbs.d,proc,root,run,sys,tmp}
cp "$from/bin/busybox" "$root/bin/"
cp "$here/init" "$root/init"
for tool in ip rdma; do
  with_libraries "$root" "$(command -v $tool)"
done
echo 'root:x:0:0::/root:/bin/sh' >"$root/etc/passwd"
echo '127.0.0.1 localhost' >"$root/etc/hosts"

# The provider of rxe, and the library that loads it.
libraries=usr/lib/x86_64-linux-gnu
mkdir -p "$root/$libraries/libibverbs"
cp "$from"/$libraries/libibverbs/librxe-*.so "$root/$libraries/libibverbs/"
cp "$from/etc/libibverbs.d/rxe.driver" "$root/etc/libibverbs.d/"
for library in "$from"/$libraries/libibverbs.so.1 "$from"/{,usr/}lib/x86_64-linux-gnu/libnl{,-route}-3.so.200; do
  [ ! -e "$library" ] || cp -L "$library" "$root/$libraries/"
done

# NIXL, at the place that it has here. Of its plugins UCX alone, and what those libraries need.
libs=$wheel/nixl_cu12.libs
for library in "$capi" "$own/plugins/libplugin_UCX.so" "$libs"/ucx/libuct_{cma,ib}.so.*; do
  with_libraries "$root" "$library"
done
cp -r "$wheel"/nixl_cu12-*.dist-info "$root$wheel/"
# The wheel's own libibverbs finds no provider of rxe: Debian's in its place.
for library in "$root$libs"/libibverbs-*.so.*; do
  cp -L "$from/$libraries/libibverbs.so.1" "$library"
done

archive "$root" >"$dir/system.cpio"
rm -rf "$work"
