# Sourced by the scripts next to it: runs the program of benches/gpu.
# shellcheck shell=bash
bench() {
  if [ -n "${WEIGHTSYNC_GPU_BENCH:-}" ]; then
    "$WEIGHTSYNC_GPU_BENCH" "$@"
  else
    cargo bench --locked --bench gpu -- "$@"
  fi
}
