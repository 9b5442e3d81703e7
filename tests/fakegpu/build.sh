#!/usr/bin/env bash
# Build libcuda.so.1 and libnccl.so.2 of the stand-in, once for these sources, and print the folder that holds them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

key=$(cat build.sh ./*.h ./*.cpp | sha256sum | cut -c1-16)
out=$(realpath -m "${CARGO_TARGET_DIR:-../../target}/fakegpu/$key")
if [ ! -e "$out" ]; then
  mkdir -p "$(dirname "$out")"
  made=$(mktemp -d "$out.XXXXXX")
  trap 'rm -rf "$made"' EXIT
  compile() { g++ -std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -pthread "$@"; }
  parts=()
  for source in *.cpp; do
    compile -c "$source" -o "$made/${source%.cpp}.o" &
    parts+=($!)
  done
  for part in "${parts[@]}"; do wait "$part"; done
  # Containers need not have the C++ library.
  alone=(-static-libstdc++ -static-libgcc "-Wl,--exclude-libs,ALL")
  compile -shared "${alone[@]}" -Wl,-z,defs,-soname,libcuda.so.1 -o "$made/libcuda.so.1" "$made"/{report,device,memory,stream,ipc,module}.o
  # Found next to it, and only there: a real driver on the machine is not for this NCCL.
  compile -shared "${alone[@]}" -Wl,-z,defs,-soname,libnccl.so.2 -o "$made/libnccl.so.2" "$made"/{nccl,group,links}.o "$made/libcuda.so.1" "-Wl,-rpath,\$ORIGIN"
  rm "$made"/*.o
  # Anyone who comes second finds the folder taken and keeps the first one's.
  mv -T "$made" "$out" 2>/dev/null || [ -e "$out/libnccl.so.2" ]
fi
echo "$out"
