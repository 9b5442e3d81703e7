#!/usr/bin/env bash
# What .github/workflows/release.yml does for a tag v1.2.3:
#
#   release.sh check TAG         every file that has the version agrees with the tag, and the changelog has it
#   release.sh files TAG FOLDER  put the release's files into FOLDER, which must not exist; `make wheel` ran before
#   release.sh image TAG         print the image and its registry, named by the chart's values alone, as NAME=VALUE
#   release.sh notes TAG         print the version's section of the changelog
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

command=${1:-} tag=${2:-}
version=${tag#v}
[ -n "$version" ] && [ "v$version" = "$tag" ] || die "a tag is a version after a v: v1.2.3, not \"$tag\""

# notes: from the version's heading to the next one.
notes() {
  awk -v version="$version" '/^## / { inside = ($2 == version || $2 == "[" version "]"); next } inside' CHANGELOG.md
}

# agrees FILE EXPRESSION: the first line of FILE that the expression of sed reads a version from has this one.
agrees() {
  local found
  found=$(sed -nE "$2" "$1" | head -n 1)
  [ "$found" = "$version" ] || die "$1 has version \"$found\", and the tag is $tag"
}

check() {
  agrees Cargo.toml 's/^version = "(.*)"$/\1/p'
  agrees python/pyproject.toml 's/^version = "(.*)"$/\1/p'
  agrees charts/weightsync/Chart.yaml 's/^version: (.*)$/\1/p'
  agrees charts/weightsync/Chart.yaml 's/^appVersion: "?([^"]*)"?$/\1/p'
  [[ $(notes) =~ [^[:space:]] ]] || die "CHANGELOG.md has no section \"## $version\""
}

files() {
  local to=$1 wheels=(python/dist/weightsync-"$version"-*.whl)
  [ -e "${wheels[0]}" ] && [ ${#wheels[@]} = 1 ] || die "not one wheel of $version in python/dist: make wheel"
  mkdir "$to"
  tar -czf "$to/weightsync-$version-$(uname -m)-linux.tar.gz" -C target/dist weightsync weightsync-dev kubectl-weightsync
  cp "${wheels[0]}" deploy/install.yaml "$to/"
  tests/cluster/tools.sh
  (source tests/cluster/env.sh && helm package --destination "$to" charts/weightsync)
  (cd "$to" && sha256sum -- * >SHA256SUMS)
}

image() {
  local name
  name=$(sed -nE '/^image:/,/^[a-z]/s/^  repository: (.*)$/\1/p' charts/weightsync/values.yaml)
  [[ $name == */* ]] || die "charts/weightsync/values.yaml has no image.repository with a registry"
  echo "registry=${name%%/*}"
  echo "image=$name:$version"
}

case $command in
  check) check ;;
  files) check && files "${3:?a folder}" ;;
  image) image ;;
  notes) notes ;;
  *) die "release.sh check|files|image|notes TAG" ;;
esac
