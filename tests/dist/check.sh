#!/usr/bin/env bash
# Install and run what `make dist` made (`make dist-test`): every file of dist/, without this source tree where that is possible.
#
# Wheels are installed into an empty virtual environment of each Python from 3.10 on that this machine has.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
cd "$here/../.."

dist=$PWD/dist
version=$(deploy/release.sh version)
tools=$(tests/tools/dist-venv.sh)
tests/cluster/tools.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# equal WHAT FOUND EXPECTED
equal() { [ "$2" = "$3" ] || die "$1: found \"$2\", expected \"$3\""; }
# runs PROGRAM [ARGUMENT...]: the program prints its name and this version, without any environment.
runs() { equal "${*: -1} --version" "$(env -i "$@" --version)" "$(basename "${*: -1}") $version"; }
passed=0
pass() { say "$*" && passed=$((passed + 1)); }

[ -e "$dist/SHA256SUMS" ] || die "there is no dist/SHA256SUMS: make dist"
(cd "$dist" && sha256sum --check --quiet SHA256SUMS)
equal "files without a checksum" "$(cd "$dist" && comm -3 <(find . -type f ! -name SHA256SUMS -printf '%f\n' | sort) <(cut -c67- SHA256SUMS | sort))" ""
pass "checksums"

wheels=("$dist"/weightsync-"$version"-py3-none-*.whl)
equal "wheels" ${#wheels[@]} 2
pure=$dist/weightsync-$version-py3-none-any.whl
full=$(printf '%s\n' "${wheels[@]}" | grep manylinux)
"$tools/twine" check --strict "${wheels[@]}"
"$tools/check-wheel-contents" "${wheels[@]}"
tag=$(basename "$full" .whl | cut -d- -f5)
report=$("$tools/auditwheel" show "$full")
# It names the oldest system on which all symbols are found.
[[ $report == *"\"$tag\""* ]] || die "auditwheel finds another platform than $tag: $report"
pass "wheels: twine, check-wheel-contents, auditwheel: $tag"

pythons=0
declare -A tried=()
for python in $(compgen -c python3. | sort -u) "$HOME"/.pyenv/versions/*/bin/python3; do
  # A shim of pyenv may lead nowhere.
  found=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3] if sys.version_info >= (3, 10) else "")' 2>/dev/null) || continue
  [ -n "$found" ] && [ -z "${tried[$found]:-}" ] || continue
  tried[$found]=1
  for wheel in "$full" "$pure"; do
    rm -rf "$work/venv"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-index "$wheel"
    code='import weightsync, weightsync.integrations.fsdp2, importlib.metadata as m; weightsync.Publisher; print(m.version("weightsync"))'
    equal "import by Python $found" "$(cd "$work" && env -i "$work/venv/bin/python" -I -c "$code")" "$version"
    if [ "$wheel" = "$full" ]; then
      runs "$work/venv/bin/weightsync"
      runs "$work/venv/bin/weightsync-dev"
    else
      equal "programs of the pure wheel" "$(find "$work/venv/bin" -name 'weightsync*')" ""
    fi
  done
  pythons=$((pythons + 1))
  pass "wheels in Python $found"
done
[ "$pythons" -gt 0 ] || die "this machine has no Python from 3.10 on"

for archive in "$dist"/*-linux-*.tar.gz; do
  tar -xzf "$archive" -C "$work"
  folder=$work/$(basename "$archive" .tar.gz)
  for program in "$folder"/*weightsync*; do runs "$program"; done
  for completion in "$folder"/completions/*; do [ -s "$completion" ] || die "$completion is empty"; done
  for completion in "$folder"/completions/*.bash; do bash -n "$completion"; done
  [ -s "$folder/LICENSE" ] || die "$archive has no license"
  pass "programs of $(basename "$archive")"
done
program=$work/weightsync-$version-linux-$(uname -m)/weightsync
# A trainer, three simulated engines, and a kill in the middle of an update.
env -i timeout 120 "$program-dev" demo --megabytes 8 >"$work/demo" 2>&1 || die "the demo failed: $(tail -n 20 "$work/demo")"
pass "demo"

mapped=()
[ "$(id -u)" = 0 ] || mapped=(--map-root-user)
while read -r name archive; do
  folder=$work/image
  rm -rf "$folder"
  mkdir -p "$folder/layout" "$folder/root"
  tar -xf "$dist/$archive" -C "$folder/layout"
  for blob in "$folder"/layout/blobs/sha256/*; do equal "a blob of $archive" "$(sha256sum <"$blob" | cut -c-64)" "$(basename "$blob")"; done
  digest=$(jq -r '.manifests[0].digest' "$folder/layout/index.json")
  equal "the digest of $archive" "$digest" "${name##*@}"
  manifest=$folder/layout/blobs/sha256/${digest#sha256:}
  for layer in $(jq -r '.layers[].digest' "$manifest"); do tar -xf "$folder/layout/blobs/sha256/${layer#sha256:}" -C "$folder/root"; done
  cmp "$program" "$folder/root/weightsync"
  # With the image's own files alone.
  equal "the program in $archive" "$(env -i unshare "${mapped[@]}" --root="$folder/root" /weightsync --version)" "weightsync $version"
  pass "image $archive, $digest"
done <"$dist/images.txt"

"$tools/python" - "$dist"/*.cdx.json <<'END'
import json, pathlib, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
validator = JsonStrictValidator(SchemaVersion.V1_6)
for name in sys.argv[1:]:
    text = pathlib.Path(name).read_text()
    error = validator.validate_str(text)
    crates = {part["name"] for part in json.loads(text)["components"] if part.get("purl", "").startswith("pkg:cargo/")}
    lacks = {"tokio", "rustls", "kube"} - crates
    if error or lacks:
        sys.exit(f"{name}: {error or lacks}")
END
jq -e '.components | any(.name == "/weightsync")' "$dist/weightsync-$version-image.cdx.json" >/dev/null || die "the image's SBOM lacks its program"
pass "SBOMs by the schema of CycloneDX"

chart=$dist/weightsync-$version.tgz
helm lint --strict --quiet "$chart"
# Outside of the source tree.
(cd "$work" && helm template weightsync "$chart" --namespace weightsync-system --kube-version 1.36.3 2>/dev/null | sed '/^# Source: /d') >"$work/chart.yaml"
diff "$work/chart.yaml" <(sed '1,/^  name: weightsync-system$/d' "$dist/install.yaml") >&2 || die "install.yaml is not what the chart renders"
cmp "$dist/install.yaml" deploy/install.yaml
pass "chart and install.yaml"

echo "$passed passed, 0 failed"
