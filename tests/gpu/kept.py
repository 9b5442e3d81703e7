"""The first updates of a source that keeps copies, next to later ones.

A source that keeps copies (`retain`) pins host memory for them. It does so between updates, so only the first one may wait for it. This
starts a group over NCCL: a torch trainer on GPU 0, a simulated engine on GPU 1. It publishes the same tensors again and again, with a pause
in between, and prints one line of JSON. It fails where an update after the first takes more than 1.5 times the median of the later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import weightsync

from python.tests.local_documents import simulated_vllm, write_documents
from tests.gpu.trainer import GIB, model, uuid, with_nccl

FIRST = 5
"""Updates that are compared with the median of those after them."""
MOST = 1.5
LIMIT = 300


def sparse(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A checkpoint of the same names and shapes whose bytes are zeros and take no space."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + length]}
        at += length
    head = json.dumps(header).encode()
    with file.open("wb") as to:
        to.write(struct.pack("<Q", len(head)) + head)
        to.truncate(8 + len(head) + at)


def group(program: str, folder: Path, tensors: dict[str, torch.Tensor], retain: int) -> tuple[subprocess.Popen[bytes], str]:
    """Starts `weightsync local`; its process, and the trainer's socket."""
    (folder / "start").mkdir()
    sparse(folder / "start" / "model.safetensors", tensors)
    (folder / "start" / "config.json").write_text("{}")
    command = simulated_vllm(f"{program}-dev", folder / "start", 39150)
    name = f"kept-{os.getpid()}"
    file = write_documents(
        folder / "local.yaml",
        name,
        [{"name": "actor", "port": 39150, "command": command, "gpus": [uuid(1)]}],
        state=folder / "state",
        trainer_gpu=uuid(0),
        transport={"type": "NCCL"},
        update={"retainMiB": retain, "silenceSeconds": 60, "timeoutSeconds": LIMIT},
    )
    with (folder / "local.log").open("wb") as log:
        arguments = [program, "local", "--filename", str(file)]
        return subprocess.Popen(arguments, stdout=log, stderr=log, env=with_nccl()), f"weightsync/{name}-trainer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4, help="size of the model")
    parser.add_argument("--versions", type=int, default=15, help="updates in all")
    parser.add_argument("--pause", type=float, default=5, help="seconds between two updates, in which memory is pinned")
    parser.add_argument("--retain-mib", type=int, default=65536)
    options = parser.parse_args()
    tensors = model(options.gib)
    folder = Path(tempfile.mkdtemp(prefix="weightsync-kept-"))
    process, socket = group(os.environ["WEIGHTSYNC_PROGRAM"], folder, tensors, options.retain_mib)
    try:
        publisher = weightsync.Publisher.from_env(socket=socket, connect_timeout=LIMIT)
        whole, transfer = [], []
        for version in range(1, options.versions + 1):
            begun = time.monotonic()
            result = publisher.publish(tensors, version=version, timeout=LIMIT)
            whole.append(round((time.monotonic() - begun) * 1e3))
            transfer.append(result.phases_ms["transfer"])
            # The simulated engine has no GPU: the first version finds that out, and the later ones go to it through files.
            assert version == 1 or result.attempts == 1, result
            assert result.memory.startswith("gpu "), result
            time.sleep(options.pause)
        publisher.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
    log = (folder / "state" / "trainer-agent.log").read_text()
    median = statistics.median(transfer[FIRST:])
    figures = {
        "gib": round(sum(tensor.numel() * 2 for tensor in tensors.values()) / GIB, 2),
        "gpu": torch.cuda.get_device_name(0),
        "first_transfer_ms": transfer[:FIRST],
        "later_transfer_median_ms": median,
        "later_transfer_ms": transfer[FIRST:],
        "times_of_median": [round(ms / median, 2) for ms in transfer[:FIRST]],
        "first_whole_ms": whole[:FIRST],
        "later_whole_median_ms": statistics.median(whole[FIRST:]),
        "pinned_ahead": log.count("memory is pinned for the copy of the next version"),
    }
    print(json.dumps(figures), flush=True)
    if max(figures["times_of_median"][1:]) > MOST:
        sys.exit(f"an update after the first took more than {MOST} times the later median")


if __name__ == "__main__":
    main()
