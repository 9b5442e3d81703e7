#!/usr/bin/env bash
# Make all that a release has, in dist/, from the built programs (`make dist`): images, chart, manifest, wheels, programs, SBOMs and checksums.
#
# Equal programs give equal files on equal systems. Images hold the glibc of the system that they are made on: their SBOMs name its package.
set -euo pipefail
shopt -s inherit_errexit
umask 022
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/cluster/env.sh
source tests/cluster/env.sh
export LC_ALL=C

version=$(deploy/release.sh version)
machine=$(uname -m)
[ "$machine" = x86_64 ] || { echo "error: images are made on x86-64 only" >&2; exit 1; }
programs=target/dist
# Times in archives: that of the commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 315532800)
export SOURCE_DATE_EPOCH
python=$(tests/tools/dist-venv.sh)
tests/cluster/tools.sh

say() { printf '[%4ds] %s\n' "$SECONDS" "$*" >&2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=$work/dist
mkdir "$out"

# archive OUT.tar.gz FOLDER NAME...: the same names, owners and times wherever it is made.
archive() {
  local to=$1 folder=$2
  shift 2
  tar --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' -C "$folder" -c "$@" | gzip -9n >"$to"
}

say "programs"
bundle() {
  local name=$1 shell folder
  folder=$work/bundles/$name
  shift
  mkdir -p "$folder/completions"
  install -m755 "${@/#/$programs/}" "$folder/"
  install -m644 LICENSE "$folder/"
  case $1 in
  weightsync) for shell in bash fish zsh; do "$programs/weightsync" generate completion $shell >"$folder/completions/weightsync.$shell"; done ;;
  *)
    for shell in bash fish zsh; do "$programs/$1" completion $shell >"$folder/completions/$1.$shell"; done
    "$programs/$1" completion kubectl >"$folder/completions/kubectl_complete-weightsync"
    chmod 755 "$folder/completions/kubectl_complete-weightsync"
    ;;
  esac
  archive "$out/$name.tar.gz" "$work/bundles" "$name"
}
bundle "weightsync-$version-linux-$machine" weightsync weightsync-dev
bundle "kubectl-weightsync-$version-linux-$machine" kubectl-weightsync

say "wheels"
"$python/python" python/build_wheel.py --no-isolation "$programs"/weightsync{,-dev} "$out" >/dev/null
"$python/python" python/build_wheel.py --no-isolation "$out" >/dev/null

say "chart"
deploy/render.sh >"$out/install.yaml"
# helm writes the present time into its archives.
helm package --destination "$work/chart" charts/weightsync >/dev/null
tar -xzf "$work/chart/weightsync-$version.tgz" -C "$work/chart"
archive "$out/weightsync-$version.tgz" "$work/chart" weightsync

repository=$(sed -nE '/^image:/,/^[a-z]/s/^  repository: (.*)$/\1/p' charts/weightsync/values.yaml)
# image SUFFIX [ARGUMENT...]: from the files in $work/image, with further arguments for image.py; and its SBOM, for the packages in $debs.
image() {
  local suffix=$1 archive=$out/weightsync-$version-image$1.tar one unpacked=()
  shift
  for one in "${debs[@]}"; do unpacked+=(--deb "$one"); done
  tests/cluster/image.py "$repository:$version$suffix" "$archive" "$work/image" --entrypoint '["/weightsync"]' --user 65532:65532 "$@"
  deploy/sbom.py weightsync-image "$version$suffix" "$out/weightsync-$version-image$suffix.cdx.json" weightsync --tree "$work/image" "${unpacked[@]}"
  printf '%s@%s %s\n' "$repository:$version$suffix" "$(tar -xOf "$archive" index.json | jq -r '.manifests[0].digest')" "${archive##*/}" >>"$out/images.txt"
  rm -rf "$work/image"
}

say "image"
mkdir "$work/image"
debs=()
tests/cluster/product-image.sh --tree "$programs/weightsync" "$work/image"
image ""

say "image with NIXL"
mkdir "$work/image"
mapfile -t debs < <(tests/cluster/gdr-image.sh --tree "$programs/weightsync" "$work/image")
[ ${#debs[@]} != 0 ]
image -gdr --env WEIGHTSYNC_NIXL=/opt/nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so

say "SBOM, checksums"
deploy/sbom.py weightsync "$version" "$out/weightsync-$version.cdx.json" weightsync weightsync-dev
(cd "$out" && sha256sum -- * >SHA256SUMS)
rm -rf dist
mv "$out" dist
(cd dist && du -bh --apparent-size -- * | sort -k2) >&2
say "made dist"
