#!/usr/bin/env python3
"""Feed a real SGLang that runs on the CPU in three ways, and compare it with a fresh server on the same weights.

    sglang_compare.py URL FRESH_URL CHECKPOINT OTHER

URL serves CHECKPOINT, FRESH_URL serves OTHER. Each way brings OTHER into the first server: files, tensors of another process
(`/update_weights_from_tensor`), and a group over gloo (`/update_weights_from_distributed`). After each, answers with their
log-probs and the sums of `/weights_checker` must be those of the fresh server; the sums must also be those of the files.
One line of JSON a check; exit code 1 when one failed.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import io
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing
from safetensors.torch import load_file

PROMPTS = ["The quick brown fox", "a", "The trainer sends its weights. " * 8, *(f"number {i} jumps over {i * i} dogs" for i in range(20))]
TIMEOUT = datetime.timedelta(seconds=60)
GROUP = "compare"
failed = False


def check(what: str, right: bool, **more: object) -> None:
    global failed
    failed = failed or not right
    print(json.dumps({"check": what, "right": right, **more}), flush=True)


def call(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, text = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode(errors="replace")


def done(url: str, path: str, body: dict[str, Any]) -> None:
    status, answer = call(url, path, body)
    assert status == 200, (path, status, answer)


def flush(url: str) -> None:
    """It is refused until the last request has left the scheduler, a little after its answer."""
    end = time.monotonic() + TIMEOUT.total_seconds()
    while call(url, "/flush_cache", {})[0] != 200:
        assert time.monotonic() < end, "the cache cannot be flushed"
        time.sleep(0.05)


def load(url: str, checkpoint: Path) -> None:
    done(url, "/update_weights_from_disk", {"model_path": str(checkpoint), "load_format": "safetensors", "flush_cache": False})
    flush(url)


def sums(url: str) -> dict[str, str]:
    status, answer = call(url, "/weights_checker", {"action": "checksum"})
    assert (status, answer["success"]) == (200, True), answer
    found: dict[str, str] = answer["ranks"][0]["checksums"]
    return found


def answers(url: str) -> list[Any]:
    """Of every prompt as a first question: with a part of it in the cache, it may be computed in other pieces."""
    found = []
    for prompt in PROMPTS:
        flush(url)
        params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        status, answer = call(url, "/generate", {"text": prompt, "sampling_params": params, "return_logprob": True})
        assert status == 200, answer
        found.append([answer["text"], answer["meta_info"]["output_token_logprobs"]])
    return found


def sum_of(tensor: torch.Tensor) -> str:
    """Of a server without CUDA: the first 8 bytes of SHA-256 of the tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).digest()[:8].hex()


def sums_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Under the names of SGLang's Qwen3, which keeps some tensors as one."""
    joined = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    first = {parts[0]: (whole, parts) for whole, parts in joined.items()}
    rest = {part for parts in joined.values() for part in parts[1:]}
    found = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if part in first:
            whole, parts = first[part]
            found[name.replace(part, whole)] = sum_of(torch.cat([tensors[name.replace(part, each)] for each in parts]))
        elif part not in rest:
            found[name] = sum_of(tensor)
    return found


def by_tensors(url: str, tensors: dict[str, torch.Tensor]) -> None:
    # Descriptors are handed over only between processes that know one secret.
    torch.multiprocessing.set_sharing_strategy("file_system")
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump(list(tensors.items()))
    body = {"serialized_named_tensors": [base64.b64encode(pickled.getvalue()).decode()], "flush_cache": False}
    status, answer = call(url, "/update_weights_from_tensor", body)
    check("tensors outside a session are refused", status == 400 and answer["success"] is False, message=answer["message"])
    done(url, "/begin_weight_update", {})
    done(url, "/update_weights_from_tensor", body)
    done(url, "/end_weight_update", {})


def by_group(url: str, tensors: dict[str, torch.Tensor]) -> None:
    """This process is rank 0."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    # gloo connects when a group is made, so that the call and rank 0 wait for each other.
    joining = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2, "group_name": GROUP}
    engine = threading.Thread(target=done, args=(url, "/init_weights_update_group", {**joining, "backend": "gloo"}))
    engine.start()
    prefixed = c10d.PrefixStore(GROUP, store)
    group, _ = c10d._new_process_group_helper(2, 0, [], c10d.Backend("gloo"), prefixed, group_name=GROUP, timeout=TIMEOUT)
    engine.join()
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    items = list(tensors.items())
    done(url, "/begin_weight_update", {})
    for some, bucket in [(items[:10], False), (items[10:], True)]:
        body: dict[str, Any] = {"names": [name for name, _ in some], "group_name": GROUP, "flush_cache": False}
        body["dtypes"] = [str(tensor.dtype).removeprefix("torch.") for _, tensor in some]
        body["shapes"] = [list(tensor.shape) for _, tensor in some]
        parts = [tensor.contiguous() for _, tensor in some]
        if bucket:
            body["load_format"] = "flattened_bucket"
            parts = [torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])]
        engine = threading.Thread(target=done, args=(url, "/update_weights_from_distributed", body))
        engine.start()
        for part in parts:
            group.broadcast([part], options).wait()
        engine.join()
    done(url, "/end_weight_update", {})
    done(url, "/destroy_weights_update_group", {"group_name": GROUP})


def main() -> int:
    url, fresh, checkpoint, other = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    _, info = call(url, "/server_info")
    check("version", info["version"] == "0.5.23", version=info["version"], device=info["device"], attention=info["attention_backend"])
    tensors = load_file(other / "model.safetensors")
    expected, fresh_sums, before = answers(fresh), sums(fresh), answers(url)
    check("sums of the fresh server are those of its files", fresh_sums == sums_of(tensors), tensors=len(fresh_sums))
    check("the versions answer differently", all(a != b for a, b in zip(before, expected, strict=True)))
    ways: dict[str, Callable[[], None]] = {
        "files": lambda: load(url, other),
        "tensors": lambda: by_tensors(url, tensors),
        "group": lambda: by_group(url, tensors),
    }
    for way, feed in ways.items():
        feed()
        same = sum(a == b for a, b in zip(answers(url), expected, strict=True))
        check(f"{way}: answers and log-probs are the fresh server's", same == len(PROMPTS), same=same, of=len(PROMPTS))
        check(f"{way}: sums are the fresh server's", sums(url) == fresh_sums)
        load(url, checkpoint)
        check(f"{way}: the first version is back", answers(url) == before)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
