#!/usr/bin/env bash
# Build kubeconform into the cache, once, and check objects with it: those of the chart and of the examples. Each field must be one of Kubernetes, of the
# Prometheus operator or of our CRD, and have its type.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
cd "$here/../.."

version=0.8.0
# The Kubernetes of the test cluster.
kubernetes=$(sed -nE 's|^require k8s.io/kubernetes v([^ ]+).*|\1|p' tests/cluster/modules/kubernetes/go.mod)
operator=0.85.0
dir=$WEIGHTSYNC_CACHE/kubeconform-$version-$kubernetes-$operator

# source_of MODULE@VERSION: the folder of its source.
source_of() { go mod download -json "$1" | jq -r .Dir; }

# The program, and the sources of the schemas.
fill() {
  local to=$1 of_kubernetes of_operator
  GOBIN=$to/bin go install "github.com/yannh/kubeconform/cmd/kubeconform@v$version" &&
    of_kubernetes=$(source_of "k8s.io/kubernetes@v$kubernetes") &&
    of_operator=$(source_of "github.com/prometheus-operator/prometheus-operator@v$operator") &&
    mkdir "$to/crds" &&
    cp "$of_kubernetes/api/openapi-spec/swagger.json" "$to/" &&
    cp "$of_operator"/example/prometheus-operator-crd/monitoring.coreos.com_{podmonitors,prometheusrules,servicemonitors}.yaml "$to/crds/"
}
once "$dir" fill

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/schemas"
"$(tests/tools/python.sh)/python" tests/tools/schemas.py "$dir/swagger.json" "$work/schemas" crds/weightsync.dev_weightsyncs.yaml "$dir"/crds/*.yaml
deploy/render.sh --values tests/chart/everything.yaml >"$work/everything.yaml"
deploy/render.sh --values tests/chart/everything.yaml --set injection.method=Webhook >"$work/webhook.yaml"

skipped=(
  # Objects of other operators: tests of `weightsync plan` read them.
  LeaderWorkerSet
  RayCluster
  # A file of `weightsync local`, which is no object of a cluster.
  LocalProcesses
)
"$dir/bin/kubeconform" -strict -summary -skip "$(IFS=, && echo "${skipped[*]}")" \
  -schema-location "$work/schemas/{{ .Group }}-{{ .ResourceKind }}-{{ .ResourceAPIVersion }}.json" \
  "$work/everything.yaml" "$work/webhook.yaml" deploy/install.yaml docs/examples examples
