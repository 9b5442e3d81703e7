"""Torch on the engine's own GPU, handing buckets over by CUDA IPC as XTuner does (InternLM/lmdeploy#4397): ours is compared with it.

One tensor and one event are opened by the engine for all buckets of an update. Each bucket is flattened into that tensor, and the engine
loads from it without a copy. Nothing is verified. Prints one JSON object: milliseconds of each update back to back, and with one token
between two updates.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from typing import Any

import torch
from lmdeploy.utils import FlattenedTensorBucket, serialize_state_dict

from tests.gpu.lmdeploy import models


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=8)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    both = [models.cut(models.tensors(models.DENSE, seed, "cuda:0"), args.mib << 20) for seed in (2, 3)]
    most = max(sum(tensor.numel() for _, tensor in bucket) for buckets in both for bucket in buckets)
    shared = torch.empty(most, dtype=torch.bfloat16, device="cuda:0")
    event = torch.cuda.Event(interprocess=True)

    def update(buckets: list[list[tuple[str, torch.Tensor]]]) -> float:
        torch.cuda.synchronize()
        begun = time.monotonic()
        for number, bucket in enumerate(buckets):
            flat = FlattenedTensorBucket(named_tensors=bucket, flattened_tensor=shared)
            event.record()
            said: dict[str, Any] = {"metadata": flat.get_metadata(), "require_clone": False}
            if number == 0:
                said |= {"flattened_tensor": shared, "event_ipc_handle": event.ipc_handle()}
            body = {
                "serialized_named_tensors": serialize_state_dict(said),
                "load_format": "flattened_bucket",
                "finished": number + 1 == len(buckets),
            }
            post(args.url, "/update_weights", body)
            event.wait()
        torch.cuda.synchronize()
        return (time.monotonic() - begun) * 1e3

    first = update(both[0])
    whole = [update(both[run % 2]) for run in range(1, args.runs + 1)]
    with_token = []
    for run in range(1, args.runs + 1):
        post(args.url, "/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 1, "temperature": 0})
        with_token.append(update(both[run % 2]))
    print(json.dumps({"buckets": len(both[0]), "first_ms": first, "ms": whole, "token_between_ms": with_token}), flush=True)


main()
