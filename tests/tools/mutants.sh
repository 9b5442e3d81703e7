#!/usr/bin/env bash
# Break one rule of the membership at a time, and check that the model test notices (mutants.sh [NAME...]; without names: all).
#
# Each file crates/core/tests/mutants/NAME.patch breaks one rule. Its head names the test that must fail, and a part of the law that the
# first failure must state. The script works in copies of crates/core under target/mutants, one for each core of the machine; each copy has
# a target folder of its own, which stays for the next run. A patch that does not apply, a mutant that does not compile, and a test that
# runs for too long are errors. None of them counts as caught. The script never changes the working tree, and it uses no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

patches=$PWD/crates/core/tests/mutants
work=$PWD/target/mutants
jobs=${WEIGHTSYNC_MUTANTS_JOBS:-$(nproc)}
# A broken rule shows within seconds; a test that passes takes half a minute on a slow machine.
deadline=${WEIGHTSYNC_MUTANTS_DEADLINE_S:-180}

# A workspace that holds crates/core only, with the versions and profiles of this one. No source file is older than this copy, so that
# cargo builds it again whatever the last run left.
make_copy() {
    local copy=$1
    rm -rf "$copy/crates"
    mkdir -p "$copy/crates/core/tests"
    awk '/^\[/ { keep = /^\[(workspace|profile)[].]/ } keep' Cargo.toml >"$copy/Cargo.toml"
    cp Cargo.lock "$copy/Cargo.lock"
    cp crates/core/Cargo.toml "$copy/crates/core/"
    cp -r crates/core/src "$copy/crates/core/"
    cp -r crates/core/tests/model "$copy/crates/core/tests/"
}

# A copy is no part of the repository: git must apply a patch to it as to any folder.
apply_patch() { GIT_CEILING_DIRECTORIES=$work git apply "$@"; }

# Each mutant changes one file.
export CARGO_INCREMENTAL=1
build() { CARGO_TARGET_DIR=$PWD/target cargo test --quiet --offline --jobs "$1" --package weightsync-core --test model --no-run; }

# Fails unless the test fails in time by the law.
run_test() {
    local test=$1 law=$2 status=0
    CARGO_TARGET_DIR=$PWD/target timeout "$deadline" cargo test --quiet --offline --package weightsync-core --test model -- --exact "$test" \
        >output 2>&1 || status=$?
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
        if ! build 1 >output 2>&1; then
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

names=("$@")
if [ ${#names[@]} = 0 ]; then
    for patch in "$patches"/*.patch; do
        names+=("$(basename "$patch" .patch)")
    done
fi
for name in "${names[@]}"; do
    [ -f "$patches/$name.patch" ] || { echo "there is no $patches/$name.patch" >&2; exit 1; }
done
((jobs <= ${#names[@]})) || jobs=${#names[@]}

# The dependencies are built once, with all cores; the other copies begin with them.
make_copy "$work/0"
(cd "$work/0" && build "$(nproc)")
for ((number = 1; number < jobs; number++)); do
    make_copy "$work/$number"
    [ -d "$work/$number/target" ] || cp -a "$work/0/target" "$work/$number/target"
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
