#!/usr/bin/env bash
# Stop the test cluster's own docker daemon and undo what docker-up.sh did; images stay, for the next time.
# Does nothing where docker-up.sh did nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$here/docker-env.sh"

pid_file=$WEIGHTSYNC_STATE/docker.pid
if [ -e "$pid_file" ]; then
  pid=$(<"$pid_file")
  # The pid may be another's by now, if the machine was restarted.
  if grep -qz dockerd "/proc/$pid/cmdline" 2>/dev/null; then
    kill "$pid"
    timeout 60 tail --pid="$pid" -f /dev/null || die "docker (pid $pid) does not end"
  fi
  rm -f "$pid_file"
fi
rm -f "$WEIGHTSYNC_STATE/docker.sock"

# A killed daemon leaves its mounts: unmount them, innermost first.
findmnt --list --noheadings --output TARGET | grep "^$WEIGHTSYNC_STATE/" | LC_ALL=C sort -r |
  while read -r target; do umount "$target"; done || true

if [ -e "/run/netns/$NAMESPACE" ]; then
  ip netns delete "$NAMESPACE"
fi
# The other end of the link goes with the namespace, unless a process still holds it.
ip link delete "$HOST_LINK" 2>/dev/null || true

find /sys/fs/cgroup -maxdepth 2 -type d -name "$NAMESPACE" 2>/dev/null | while read -r group; do
  find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
done

if [ -e "$WEIGHTSYNC_STATE/sysctl.before" ]; then
  sysctl --quiet --load="$WEIGHTSYNC_STATE/sysctl.before" || true
  rm "$WEIGHTSYNC_STATE/sysctl.before"
fi
