#!/usr/bin/env bash
# A torch trainer publishes tensors on a GPU through a real source agent's socket and worker; see trainer.py. One GPU or more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ -z "${WEIGHTSYNC_PROGRAM:-}" ]; then
  cargo build --locked --release --bin weightsync --example trainer_socket
fi
export WEIGHTSYNC_PROGRAM=${WEIGHTSYNC_PROGRAM:-target/release/weightsync}
export WEIGHTSYNC_TRAINER_SOCKET=${WEIGHTSYNC_TRAINER_SOCKET:-target/release/examples/trainer_socket}
export PYTHONPATH=$PWD/python
exec python3 tests/gpu/trainer.py "$@"
