"""Rank 0 in torch, driving LMDeploy's group endpoints as XTuner does (InternLM/xtuner#1828): the figure that ours is compared with.

One bucket after the other: flatten, ask the engine, broadcast while it waits, take its answer; the last one says `finished`. Prints one
JSON object: milliseconds of each update, from the trainer's tensors, and from buckets that were flattened before.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from lmdeploy.utils import FlattenedTensorBucket, init_custom_process_group

from tests.gpu.lmdeploy import models

GROUP = "xtuner"


def post(url: str, path: str, body: dict[str, Any]) -> None:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    if not answer["success"]:
        raise RuntimeError(answer["message"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    weights = [models.tensors(models.DENSE, seed, "cuda:0") for seed in (2, 3)]
    pool = ThreadPoolExecutor(2)
    place = {"master_address": "127.0.0.1", "master_port": args.port}
    body = place | {"rank_offset": 1, "world_size": 2, "group_name": GROUP, "backend": "nccl"}
    begun = time.monotonic()
    asked = pool.submit(post, args.url, "/init_weights_update_group", body)
    init = f"tcp://127.0.0.1:{args.port}"
    group = init_custom_process_group("nccl", init, world_size=2, rank=0, group_name=GROUP)
    asked.result(60)
    init_ms = (time.monotonic() - begun) * 1e3

    def update(buckets: list[list[tuple[str, torch.Tensor]]], flat: list[torch.Tensor] | None) -> float:
        torch.cuda.synchronize()
        begun = time.monotonic()
        for number, bucket in enumerate(buckets):
            tensor = flat[number] if flat else FlattenedTensorBucket(named_tensors=bucket).get_flattened_tensor()
            said = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": GROUP,
                "load_format": "flattened_bucket",
                "finished": number + 1 == len(buckets),
            }
            asked = pool.submit(post, args.url, "/update_weights_from_distributed", said)
            dist.broadcast(tensor, src=0, group=group)
            asked.result(60)
        torch.cuda.synchronize()
        return (time.monotonic() - begun) * 1e3

    all_buckets = [models.cut(each, args.mib << 20) for each in weights]
    first = update(all_buckets[0], None)
    whole = [update(all_buckets[run % 2], None) for run in range(args.runs)]
    flats = [[FlattenedTensorBucket(named_tensors=bucket).get_flattened_tensor() for bucket in buckets] for buckets in all_buckets]
    flattened = [update(all_buckets[run % 2], flats[run % 2]) for run in range(args.runs + 1)]
    with_token = []
    for run in range(args.runs):
        with_token.append(update(all_buckets[run % 2], None))
        token = {"model": "m", "prompt": "a", "max_tokens": 1, "temperature": 0}
        head = {"content-type": "application/json"}
        request = urllib.request.Request(args.url + "/v1/completions", json.dumps(token).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()
    # Both ends at once: the end of a group is a rendezvous.
    asked = pool.submit(post, args.url, "/destroy_weights_update_group", {"group_name": GROUP})
    dist.destroy_process_group(group)
    asked.result(60)
    said = {
        "buckets": len(all_buckets[0]),
        "init_ms": init_ms,
        "first_ms": first,
        "ms": whole,
        "flattened_before_ms": flattened,
        "token_between_ms": with_token,
    }
    print(json.dumps(said), flush=True)


main()
