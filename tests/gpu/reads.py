"""Reads of one process's memory by another through NIXL's own Python package, with no digest: the figure to reach for `benches/gpu`.

The reader has all buffers in flight, and reads each of them again and again. The memory is of one kind: `gpu` (the source on the first
visible GPU, the reader on the last) or `host`. UCX's settings come from the environment.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing as mp
import time
from multiprocessing.connection import Connection
from typing import Any

import torch


def nixl(name: str) -> Any:
    """An agent of whichever package is there."""
    for package in ("nixl_cu13", "nixl_cu12"):
        try:
            api = importlib.import_module(f"{package}._api")
        except ModuleNotFoundError:
            continue
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    raise SystemExit("neither nixl_cu13 nor nixl_cu12 can be imported")


def buffers(a: argparse.Namespace, fill: int, gpu: int) -> list[torch.Tensor]:
    device = f"cuda:{gpu}" if a.memory == "gpu" else "cpu"
    return [torch.full((a.mib << 20,), fill, dtype=torch.uint8, device=device) for _ in range(a.buffers)]


def source(a: argparse.Namespace, pipe: Connection) -> None:
    mine = buffers(a, 7, 0)
    if a.memory == "gpu":
        torch.cuda.synchronize()
    agent = nixl("source")
    agent.register_memory(mine)
    pipe.send((agent.get_agent_metadata(), [(buffer.data_ptr(), buffer.numel(), 0) for buffer in mine]))
    # Until the reader is through.
    pipe.recv()


def once(agent: Any, handles: list[Any], buckets: int) -> float:
    """Seconds of that many reads, all handles in flight."""
    begun = time.monotonic()
    running: list[Any | None] = [None] * len(handles)
    for number in range(buckets + len(handles)):
        at = number % len(handles)
        while running[at] is not None:
            state = agent.check_xfer_state(running[at])
            if state == "ERR":
                raise SystemExit("a read failed")
            if state == "DONE":
                running[at] = None
        if number < buckets:
            if agent.transfer(handles[at]) == "ERR":
                raise SystemExit("a read was refused")
            running[at] = handles[at]
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=["gpu", "host"], default="gpu")
    for name in ("mib", "buffers", "buckets", "runs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=source, args=(a, there), daemon=True)
    other.start()
    gpu = torch.cuda.device_count() - 1 if a.memory == "gpu" else 0
    if a.memory == "gpu":
        torch.cuda.set_device(gpu)
    mine = buffers(a, 0, gpu)
    agent = nixl("reader")
    agent.register_memory(mine)
    if not here.poll(60):
        raise SystemExit("the source says nothing")
    metadata, theirs = here.recv()
    peer = agent.add_remote_agent(metadata)
    handles = []
    for place, buffer in zip(theirs, mine, strict=True):
        remote = agent.get_xfer_descs([place], "VRAM" if a.memory == "gpu" else "DRAM")
        handles.append(agent.initialize_xfer("READ", agent.get_xfer_descs([buffer]), remote, peer))
    once(agent, handles, len(handles))
    took = [once(agent, handles, a.buckets) for _ in range(a.runs)]
    if not all(bool((buffer == 7).all()) for buffer in mine):
        raise SystemExit("a buffer does not hold what was read")
    print("GB/s", *(f"{a.buckets * (a.mib << 20) / 1e9 / seconds:.3f}" for seconds in took))
    here.send("over")
    other.join(20)


if __name__ == "__main__":
    main()
