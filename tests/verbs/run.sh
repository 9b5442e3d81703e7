#!/usr/bin/env bash
# Run the tests of reads through NIXL over verbs: RDMA queues, keys and registered memory, without allowTcp.
#
#   run.sh         in an emulated guest with a software RDMA device, without a network card and without /dev/kvm (2 minutes on two cores)
#                  (four cases; VERBS_CASES=all runs every case)
#   run.sh here    on this host, with its own RDMA device; UCX_NET_DEVICES=mlx5_0:1 picks one, UCX_IB_GID_INDEX its address
#
# `cargo build --workspace --bins --tests` goes before it. What the guest is made of is cached.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../cluster/lib.sh"
verbs=$(cd "$here/../verbs" && pwd)
# shellcheck source=tests/verbs/files.sh
source "$verbs/files.sh"
cd "$here/../.."

# Seconds until a guest that hangs is killed.
DEADLINE=${VERBS_DEADLINE:-600}

NIXL=$("$here/../tools/nixl.sh")
export NIXL

# With the features of all packages, as `make programs` builds them.
built=$(cargo test --locked --workspace --lib --test host --no-run --message-format=json 2>/dev/null)
test_program() {
  local program
  program=$(jq -r --arg name "$1" 'select(.profile.test and .executable and .target.name == $name) | .executable' <<<"$built")
  [ -x "$program" ] || die "cargo built no test program $1"
  echo "$program"
}
GPU=$(test_program weightsync_gpu)
TRANSPORT=$(test_program weightsync_transport)
HOST=$(test_program host)
export GPU TRANSPORT HOST

if [ "${1:-}" = here ]; then
  VERBS_CASES=${VERBS_CASES:-all} WEIGHTSYNC_NIXL=$NIXL exec sh "$verbs/cases.sh"
fi

guest=$WEIGHTSYNC_CACHE/verbs-guest-$(key ../verbs/guest.sh ../verbs/files.sh ../verbs/init ../tools/nixl.sh)
once "$guest" "$verbs/guest.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/root"
programs=("$GPU" "$TRANSPORT" "$HOST" "$PWD"/target/debug/weightsync{,-dev})
with_libraries "$work/root" "${programs[@]}" "$(command -v setpriv)"
# All of it lies in the guest's memory.
strip "${programs[@]/#/$work/root}"
mkdir "$work/root/tests"
cp "$verbs/cases.sh" "$work/root/tests/"
# Smaller receive queues than UCX's: it clears and registers 60 MB of them for each region, which takes seconds here.
cat >"$work/root/tests/run" <<EOF
export VERBS_CASES='${VERBS_CASES:-}' WEIGHTSYNC_NIXL='$NIXL' GPU='$GPU' TRANSPORT='$TRANSPORT' HOST='$HOST'
export UCX_NET_DEVICES=rxe0:1 UCX_IB_RX_QUEUE_LEN=256 UCX_IB_RX_BUFS_GROW=256 UCX_IB_TX_BUFS_GROW=256
exec sh /tests/cases.sh
EOF
{ cat "$guest/system.cpio" && archive "$work/root"; } >"$work/initrd"

# Emulated: a machine with /dev/kvm may run no stock guest.
qemu=(-accel "tcg,thread=multi" -cpu Westmere -smp 2 -m 3072 -nic none -vga none -display none -monitor none -no-reboot)
qemu+=(-serial stdio -serial "file:$work/status" -kernel "$guest/vmlinuz" -initrd "$work/initrd")
qemu+=(-append 'console=ttyS0 panic=-1 mitigations=off quiet')
LD_LIBRARY_PATH=$guest/qemu/usr/lib/x86_64-linux-gnu:$guest/qemu/lib/x86_64-linux-gnu \
  timeout --foreground --kill-after=5 "$DEADLINE" "$guest/qemu/usr/bin/qemu-system-x86_64" \
  -L "$guest/qemu/usr/share/qemu" -L "$guest/qemu/usr/share/seabios" "${qemu[@]}" </dev/null 2>"$work/qemu.log" | tr -d '\r' ||
  { cat "$work/qemu.log" >&2; die "the guest did not end within $DEADLINE s"; }
status=$(tr -dc 0-9 <"$work/status")
[ -n "$status" ] || die "the guest ended before its tests did"
exit "$status"
