"""What a digest of every bucket takes from the broadcasts next to it: torch's NCCL broadcasts on all GPUs, and kernels like gsum64 after
each on a stream of its own, in several shapes.

One line of JSON for each shape: GB/s with and without, and their ratio. `nothing` launches a kernel that reads nothing, `in cache` one that
reads the same MiB again and again: they show the share of launching and of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

import cupy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
#define P 0x9E3779B97F4A7C15ull
__device__ __forceinline__ u64 mix(u64 d, u64 k) { u64 x = d ^ k; return (u64)(u32)x * (u32)(x >> 32) + x; }
__device__ __forceinline__ ulonglong2 load(const ulonglong2* p, u64 policy) {
    ulonglong2 v;
#if LOAD == 0
    v = *p;
#elif LOAD == 1
    v = __ldcs(p);
#elif LOAD == 2
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u64 {%0, %1}, [%2], %3;" : "=l"(v.x), "=l"(v.y) : "l"(p), "l"(policy));
#else
    asm volatile("ld.global.nc.L1::no_allocate.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p));
#endif
    return v;
}
extern "C" __global__ void digest(const ulonglong2* base, u64 pairs, u64 within, u64* sums) {
    u64 policy = 0;
#if LOAD == 2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    // Each block has one stretch, as pieces of parts have.
    u64 each = (pairs + gridDim.x - 1) / gridDim.x, begin = each * blockIdx.x, end = min(begin + each, pairs);
    u64 a = 0, b = 0, step = blockDim.x, i = begin + threadIdx.x;
    for (; i + (AHEAD - 1) * step < end; i += AHEAD * step) {
        ulonglong2 v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) v[j] = load(base + (i + j * step) % within, policy);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) { u64 k = (2 * (i + j * step) + 1) * P; a += mix(v[j].x, k); b += mix(v[j].y, k + P); }
#if NAP
        __nanosleep(NAP);
#endif
    }
    a += b;
    for (int o = 16; o; o >>= 1) a += __shfl_down_sync(0xffffffffu, a, o);
    if ((threadIdx.x & 31) == 0) atomicAdd(sums, a);
}
"""
LOADS = {"plain": 0, "streaming": 1, "evict first": 2, "no allocate": 3}
# Blocks, threads, loads in flight, how they load, nap in ns, least priority; what is read.
SHAPES: list[tuple[int, int, int, str, int, str]] = [
    (16, 1024, 4, "plain", 0, "all"),
    (16, 1024, 4, "plain", 0, "nothing"),
    (16, 1024, 4, "plain", 0, "in cache"),
    (16, 1024, 4, "streaming", 0, "all"),
    (16, 1024, 4, "evict first", 0, "all"),
    (16, 1024, 4, "no allocate", 0, "all"),
    (12, 1024, 4, "plain", 0, "all"),
    (12, 1024, 4, "evict first", 0, "all"),
    (10, 1024, 8, "evict first", 0, "all"),
    (16, 512, 8, "evict first", 0, "all"),
    (16, 512, 8, "plain", 0, "all"),
    (8, 1024, 8, "evict first", 0, "all"),
    (8, 1024, 16, "evict first", 0, "all"),
    (16, 1024, 2, "plain", 0, "all"),
    (64, 128, 4, "evict first", 0, "all"),
    (100, 128, 4, "plain", 0, "all"),
    (132, 64, 4, "plain", 0, "all"),
    (132, 64, 4, "evict first", 0, "all"),
    (100, 64, 8, "evict first", 0, "all"),
    (24, 1024, 4, "evict first", 200, "all"),
]


def rank(number: int, a: argparse.Namespace, port: int) -> None:
    torch.cuda.set_device(number)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=place, rank=number, world_size=a.gpus, pg_options=options)
    size = a.mib << 20
    buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(4)]
    sums = torch.zeros(4, dtype=torch.int64, device="cuda")
    aside = torch.cuda.Stream()

    def once(kernel: object, blocks: int, threads: int, pairs: int, within: int) -> float:
        free = [torch.cuda.Event() for _ in buffers]
        dist.barrier()
        torch.cuda.synchronize()
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        current = torch.cuda.current_stream()
        works = []
        for i in range(a.buckets):
            at = i % len(buffers)
            if kernel is not None and i >= len(buffers):
                current.wait_event(free[at])
            work = dist.broadcast(buffers[at], src=0, async_op=True)
            works.append(work)
            if kernel is None:
                continue
            with torch.cuda.stream(aside):
                work.wait()
                with cupy.cuda.ExternalStream(aside.cuda_stream):
                    numbers = tuple(cupy.uint64(value) for value in (buffers[at].data_ptr(), pairs, within, sums.data_ptr()))
                    kernel((blocks,), (threads,), numbers)  # type: ignore[operator]
                free[at].record(aside)
        for work in works:
            work.wait()
        current.wait_stream(aside)
        ended.record()
        torch.cuda.synchronize()
        return a.buckets * size / 1e6 / begun.elapsed_time(ended)

    once(None, 0, 0, 0, 1)
    for blocks, threads, ahead, how, nap, read in SHAPES:
        words = (f"-DLOAD={LOADS[how]}", f"-DAHEAD={ahead}", f"-DNAP={nap}")
        kernel = cupy.RawKernel(SOURCE, "digest", options=words)
        pairs = 0 if read == "nothing" else size // 16
        within = (1 << 16) if read == "in cache" else size // 16
        once(kernel, blocks, threads, pairs, within)
        plain, alongside = [], []
        for _ in range(a.runs):
            plain.append(once(None, 0, 0, 0, 1))
            alongside.append(once(kernel, blocks, threads, pairs, within))
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            numbers = tuple(cupy.uint64(value) for value in (buffers[0].data_ptr(), pairs, within, sums.data_ptr()))
            begun.record()
            kernel((blocks,), (threads,), numbers)
            ended.record()
        torch.cuda.synchronize()
        if number == 0:
            ratio = statistics.median(alongside) / statistics.median(plain)
            shape = {"blocks": blocks, "threads": threads, "ahead": ahead, "load": how, "nap": nap, "reads": read}
            figures = {"without": round(statistics.median(plain), 1), "with": round(statistics.median(alongside), 1)}
            alone = {"alone_us": round(begun.elapsed_time(ended) * 1e3)}
            print(json.dumps(shape | figures | {"ratio": round(ratio, 4)} | alone), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in [("gpus", 0), ("mib", 256), ("buckets", 128), ("runs", 3)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    a.gpus = a.gpus or torch.cuda.device_count()
    mp.spawn(rank, args=(a, 29700 + os.getpid() % 200), nprocs=a.gpus)


if __name__ == "__main__":
    main()
