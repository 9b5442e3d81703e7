#!/usr/bin/env bash
# Break one rule of the membership at a time, and check that the model test notices.
#
#   mutants.sh [NAME...]    these mutants; without names, all
#   mutants.sh --changed    all, if the membership, the model or a mutant changed since `all` last passed; else four, which the commit chooses
#
# Each file crates/core/tests/mutants/NAME.patch breaks one rule. Its head names the test that must fail, and a part of the law that the
# first failure must state. The script works in copies of this tree under target/mutants, one for each core of the machine; each copy has
# a target folder of its own, which begins with the dependencies that this tree compiled. A patch that does not apply, a mutant that does
# not compile, and a test that runs for too long are errors. None of them counts as caught. When all are caught, the file
# crates/core/tests/mutants/checked holds the hash of what they were checked with; nothing else of the working tree is changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
source "$here/../tools/dependencies.sh"
cd "$here/../.."

checked=crates/core/tests/mutants/checked
patches=$PWD/crates/core/tests/mutants
work=$PWD/target/mutants
jobs=${WEIGHTSYNC_MUTANTS_JOBS:-$(nproc)}
# A broken rule shows within seconds; a test that passes takes half a minute on a slow machine.
deadline=${WEIGHTSYNC_MUTANTS_DEADLINE_S:-180}
# What decides whether a mutant is caught; unit tests do not.
inputs=(crates/core/src/membership crates/core/src/membership.rs crates/core/src/plan crates/core/src/plan.rs crates/core/tests tests/tools/mutants.sh)
# Without a change of these, so many are tried.
FEW=4

hash_of_inputs() {
    find "${inputs[@]}" -type f ! -path "$checked" ! -path 'crates/core/src/*/tests*' | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-16
}

# A copy is no part of the repository: git must apply a patch to it as to any folder.
apply_patch() { GIT_CEILING_DIRECTORIES=$work git apply "$@"; }

# Each mutant changes one file.
export CARGO_INCREMENTAL=1
model() { CARGO_TARGET_DIR=$PWD/target timeout "$deadline" cargo test --quiet --offline --workspace --test model "$@"; }

# Fails unless the test fails in time by the law.
run_test() {
    local test=$1 law=$2 status=0
    model -- --exact "$test" >output 2>&1 || status=$?
    case $status in
    0) grep -q '^test result: ok. 1 passed' output && echo "survived: $test passes" || echo "error: there is no test $test" ;;
    124) echo "error: $test still ran after $deadline s" ;;
    *)
        # The first failure is a line that says where it is, and one that states the law.
        if ! grep -q '^The first:$' output; then
            echo "error: $test ended without a broken law: $(tail -n 1 output)"
        elif grep -A 2 '^The first:$' output | grep -qF -- "$law"; then
            return 0
        else
            echo "survived: $test fails by another law than '$law': $(grep -A 2 '^The first:$' output | tail -n 2 | cut -c -300 | tr '\n' ' ')"
        fi
        ;;
    esac
    return 1
}

try_mutant() {
    local name=$1 patch=$patches/$1.patch test law begin=$SECONDS why
    test=$(sed -n 's/^test: //p' "$patch")
    law=$(sed -n 's/^law: //p' "$patch")
    if [ -z "$test" ] || [ -z "$law" ]; then
        echo "FAILED $name: its head names no test or no law"
    elif ! apply_patch "$patch" 2>output; then
        echo "FAILED $name: the patch does not apply: $(head -n 1 output)"
    else
        if ! model --jobs 1 --no-run >output 2>&1; then
            echo "FAILED $name: it does not compile: $(grep -m 1 '^error' output)"
        elif why=$(run_test "$test" "$law"); then
            echo "caught $name by $test in $((SECONDS - begin)) s"
        else
            echo "FAILED $name: $why"
        fi
        apply_patch --reverse "$patch"
    fi
}

# Tries every mutant whose turn it is, in one copy.
work_through() {
    local number=$1 at
    shift
    local names=("$@")
    cd "$work/$number"
    for ((at = number; at < ${#names[@]}; at += jobs)); do
        try_mutant "${names[at]}"
    done
}

every=()
for patch in "$patches"/*.patch; do
    every+=("$(basename "$patch" .patch)")
done
names=("$@")
if [ "${1:-}" = --changed ]; then
    names=()
    if [ "$(cat "$checked" 2>/dev/null)" = "$(hash_of_inputs)" ]; then
        first=$((16#$(git rev-parse HEAD | cut -c1-7)))
        for ((at = 0; at < FEW; at++)); do names+=("${every[(first + at * ${#every[@]} / FEW) % ${#every[@]}]}"); done
        echo "nothing that decides changed since all were caught: ${names[*]}"
    fi
fi
[ ${#names[@]} -gt 0 ] || names=("${every[@]}")
for name in "${names[@]}"; do
    [ -f "$patches/$name.patch" ] || { echo "there is no $patches/$name.patch" >&2; exit 1; }
done
((jobs <= ${#names[@]})) || jobs=${#names[@]}

for ((number = 0; number < jobs; number++)); do
    copy_workspace "$work/$number"
    [ -d "$work/$number/target" ] || share_dependencies target/debug "$work/$number/target/debug"
done

results=$work/results
: >"$results"
workers=()
for ((number = 0; number < jobs; number++)); do
    work_through "$number" "${names[@]}" | tee -a "$results" &
    workers+=($!)
done
for worker in "${workers[@]}"; do
    wait "$worker"
done
passed=$(grep -c '^caught ' "$results" || true)
echo "$passed passed, $((${#names[@]} - passed)) failed"
[ "$passed" = ${#names[@]} ]
[ "$passed" -lt ${#every[@]} ] || hash_of_inputs >"$checked"
