"""Ranks in torch, for `benches/gpu`.

receive: one rank that joins a group by its ncclUniqueId (GROUP_ID, base64), takes buckets and compares every byte.
bandwidth: torch's own broadcast on all GPUs, as the figure to reach.
"""

import argparse
import base64
import datetime
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

P = 0x9E3779B97F4A7C15
Q = 0xD1B54A32D192ED03
TIMEOUT = datetime.timedelta(seconds=120)


def signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def receive(a: argparse.Namespace) -> int:
    torch.cuda.set_device(a.rank)
    # ProcessGroupNCCL reads the id of its first communicator under this key when it is not rank 0.
    store = dist.HashStore()
    store.set("0", base64.b64decode(os.environ["GROUP_ID"]))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    group = dist.ProcessGroupNCCL(store, a.rank, a.gpus, options)
    take = dist.BroadcastOptions()
    take.rootRank, take.rootTensor = 0, 0
    proof = torch.zeros(1, dtype=torch.uint8, device="cuda")
    group.broadcast([proof], take).wait()
    words = (a.mib << 20) // 8
    base = torch.arange(1, words + 1, dtype=torch.int64, device="cuda") * signed(P)
    wrong = 0
    for bucket in range(a.buckets):
        got = torch.zeros(a.mib << 20, dtype=torch.uint8, device="cuda")
        group.broadcast([got], take).wait()
        torch.cuda.synchronize()
        wrong += int((got.view(torch.int64) != base + signed(bucket * Q)).sum().item())
    version = torch.cuda.nccl.version()
    print(f"torch {torch.__version__} NCCL {version} rank {a.rank}: {a.buckets} buckets, {wrong} wrong words", flush=True)
    # The source aborts; a destroy would wait for it.
    os._exit(1 if wrong or int(proof.item()) != 0xA7 else 0)


def bandwidth_rank(rank: int, a: argparse.Namespace, port: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=a.gpus, timeout=TIMEOUT)
    buffers = [torch.zeros(a.mib << 20, dtype=torch.uint8, device="cuda") for _ in range(a.buffers)]
    results = []
    for run in range(a.runs + 1):
        dist.barrier()
        torch.cuda.synchronize()
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        works = [dist.broadcast(buffers[i % a.buffers], src=0, async_op=True) for i in range(a.buckets)]
        for work in works:
            work.wait()
        ended.record()
        torch.cuda.synchronize()
        if run:
            results.append(a.buckets * (a.mib << 20) / 1e6 / begun.elapsed_time(ended))
    if rank == 0:
        print("GB/s " + " ".join(f"{result:.2f}" for result in results), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["receive", "bandwidth"])
    for name, default in [("rank", 1), ("gpus", 0), ("mib", 64), ("buckets", 8), ("buffers", 4), ("runs", 5)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    a.gpus = a.gpus or torch.cuda.device_count()
    if a.what == "receive":
        return receive(a)
    mp.spawn(bandwidth_rank, args=(a, 29500 + os.getpid() % 500), nprocs=a.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
