#!/usr/bin/env bash
# gdr-files.sh WHEEL DEBIAN ROOT: put what an agent needs for transport.gdr into the image's folder ROOT: NIXL with its plugin UCX at /opt/nixl,
# rdma-core with its providers, and the libraries that those need.
#
# WHEEL is an unpacked wheel nixl-cu12 or nixl-cu13. DEBIAN holds the unpacked packages libibverbs1, ibverbs-providers, libnl-3-200 and
# libnl-route-3-200; `/` where they are installed.
set -euo pipefail
wheel=$(realpath "$1") debian=$2 root=$3

own=$(cd "$wheel"/.nixl_cu*.mesonpy.libs && pwd)
libs=$(cd "$wheel"/nixl_cu1?.libs && pwd)
triple=$(uname -m)-linux-gnu
to=$root/opt/nixl

# place FILE: into ROOT; what lies in the wheel goes below /opt/nixl.
place() {
  local at
  at=$(realpath -s "$1")
  case $at in
  "$wheel"/*) at=$to/${at#"$wheel"/} ;;
  *) at=$root$at ;;
  esac
  [ -e "$at" ] || install -D -m755 "$1" "$at"
}

# Only the plugin UCX and those of UCX's modules that a list of transports can name. The drivers of GPUs come with the container's runtime.
for file in "$own"/libnixl_capi.so "$own"/plugins/libplugin_UCX.so "$libs"/ucx/lib{uct_cma,uct_ib,uct_ib_mlx5,uct_cuda,ucm_cuda}.so.*; do
  place "$file"
  while read -r library; do
    place "$library"
  done < <(ldd "$file" | awk '$2 == "=>" && $3 ~ /^\// {print $3} $1 ~ /^\// {print $1}')
done
# The version is read from the name of this folder.
cp -r "$wheel"/nixl_cu1?-*.dist-info "$to/"

# rdma-core's libraries and providers. The wheel's own libibverbs finds no provider, and libmlx5 serves only devices that the same file opened: both
# names in the wheel lead to Debian's file.
system=usr/lib/$triple
mkdir -p "$root/$system/libibverbs" "$root/etc"
for library in ibverbs mlx4 mlx5 efa hns mana nl-3 nl-route-3; do
  for from in "$debian/$system" "$debian/lib/$triple"; do
    find "$from" -maxdepth 1 -name "lib$library.so.*" -exec cp -a -t "$root/$system" {} +
  done 2>/dev/null || true
done
cp -a "$debian/$system"/libibverbs/*.so "$root/$system/libibverbs/"
cp -r "$debian/etc/libibverbs.d" "$root/etc/"
for library in ibverbs mlx5; do
  [ -e "$root/$system/lib$library.so.1" ] || { echo "lib$library.so.1 is not in $debian" >&2; exit 1; }
  for bundled in "$to/${libs##*/}/lib$library-"*.so.*; do
    ln -sf "/$system/lib$library.so.1" "$bundled"
  done
done
