#!/usr/bin/env bash
# Versions and places of a release. `make dist` makes its files, and .github/workflows/release.yml publishes them for a tag v1.2.3.
#
#   release.sh version            print the version, which stands in Cargo.toml; an error if a generated file has another one
#   release.sh check TAG          the tag names that version, and the changelog has it
#   release.sh notes TAG          print the version's section of the changelog, and the digests of dist/images.txt
#   release.sh registry           print the registry of the images, named by the chart's values alone
#   release.sh push [REPOSITORY]  push the images of dist/ by skopeo, to the chart's own repository or to another one
#   release.sh push-chart PLACE   push the chart of dist/ by helm, as oci://registry/path
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# value FILE EXPRESSION: what the expression of sed reads from the first line of FILE that it fits.
value() { sed -nE "$2" "$1" | head -n 1; }

version=$(value Cargo.toml 's/^version = "(.*)"$/\1/p')
repository=$(sed -nE '/^image:/,/^[a-z]/s/^  repository: (.*)$/\1/p' charts/weightsync/values.yaml)
[[ $repository == */* ]] || die "charts/weightsync/values.yaml has no image.repository with a registry"

# section HEADING: of the changelog, without the heading.
section() { awk -v heading="$1" '/^## / { inside = ($2 == heading || $2 == "[" heading "]"); next } inside' CHANGELOG.md; }

agrees() {
  local found
  found=$(value "$1" "$2")
  [ "$found" = "$version" ] || die "$1 has version \"$found\", and Cargo.toml has \"$version\": make generate"
}

checked_version() {
  agrees python/pyproject.toml 's/^version = "(.*)"$/\1/p'
  agrees python/weightsync/__init__.py 's/^__version__ = "(.*)"$/\1/p'
  agrees charts/weightsync/Chart.yaml 's/^version: (.*)$/\1/p'
  agrees charts/weightsync/Chart.yaml 's/^appVersion: "?([^"]*)"?$/\1/p'
  echo "$version"
}

check() {
  checked_version >/dev/null
  [ "$1" = "v$version" ] || die "the tag is \"$1\", and Cargo.toml has version $version"
  [[ $(section "$version") =~ [^[:space:]] ]] || die "CHANGELOG.md has no section \"## $version\""
}

notes() {
  check "$1"
  printf '%s\n\nImages:\n\n' "$(section "$version")"
  sed -E 's/^(\S+) .*$/    \1/' dist/images.txt
}

push() {
  local to=${1:-$repository} image archive name
  while read -r image archive; do
    name=$to:$(sed -E 's/^.*:([^:@]+)@.*$/\1/' <<<"$image")
    skopeo copy --preserve-digests "oci-archive:dist/$archive" "docker://$name" >&2
    echo "$name@${image##*@}"
  done <dist/images.txt
}

command=${1:-}
case $command in
  version) checked_version ;;
  check) check "${2:?a tag}" ;;
  notes) notes "${2:?a tag}" ;;
  registry) echo "${repository%%/*}" ;;
  push) push "${2:-}" ;;
  push-chart) helm push "dist/weightsync-$version.tgz" "${2:?oci://registry/path}" ;;
  *) die "release.sh version | check TAG | notes TAG | registry | push [REPOSITORY] | push-chart PLACE" ;;
esac
