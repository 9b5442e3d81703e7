"""What two ranks do in the tests of groups: one process a rank, gloo, real FSDP2. Prints one JSON object with what each scenario gave.

Run as `python ranks.py RANK RENDEZVOUS_FILE SOCKETS`, where SOCKETS maps the scenarios that have an agent of their own to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightsync

LIMIT = 60
RANK = int(sys.argv[1])
SOCKETS: dict[str, str] = json.loads(sys.argv[3])
gathered: list[tuple[float, str]] = []
"""When which tensor was gathered on this rank."""


def publisher(scenario: str) -> weightsync.Publisher:
    return weightsync.Publisher.from_env(dist.group.WORLD, socket=SOCKETS[scenario], connect_timeout=5, rank_timeout=30)


def outcome(publish: Callable[[], weightsync.Result]) -> dict[str, Any]:
    """What a publish gave on this rank."""
    try:
        result = publish()
    except weightsync.WeightSyncError as error:
        return {"error": type(error).__name__, "message": str(error), "retryable": error.retryable}
    return {"version": result.version, "installed": list(result.installed), "staged": result.staged, "attempts": result.attempts}


def model() -> torch.nn.Module:
    """The same on both ranks before it is sharded; 37 and 53 do not divide by two."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Embedding(37, 64), torch.nn.Linear(64, 53), torch.nn.LayerNorm(53))


def sharded_model() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    parts = model()
    for part in parts:
        fully_shard(part, mesh=mesh)
    fully_shard(parts, mesh=mesh)
    return parts


def fsdp2() -> dict[str, Any]:
    """A step of training between two versions."""
    parts = sharded_model()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    with publisher("fsdp2") as pub:
        first = outcome(lambda: pub.publish(weightsync.fsdp2(parts), version=1, timeout=LIMIT))
        parts(torch.arange(8)).square().sum().backward()
        handle = pub.publish_async(weightsync.fsdp2(parts, dtype=torch.bfloat16), version=2, timeout=LIMIT)
        handle.wait_released()
        optimizer.step()
        return {"first": first, "second": outcome(handle.wait)}


def parts_of(rank: int) -> Iterator[tuple[Any, ...]]:
    """Columns of one tensor, rows of another, one that only rank 1 has, one that both have."""
    wide = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    yield "columns", wide[:, 50 * rank : 50 * (rank + 1)], (0, 50 * rank)
    if rank == 1:
        yield "rows", wide[30:].to(torch.bfloat16), (30, 0)
        yield "only", torch.full((7,), 3.0)
    else:
        yield "rows", wide[:10].to(torch.bfloat16), (0, 0)
        yield "rows", wide[10:30].to(torch.bfloat16), (10, 0)
    yield "both", torch.ones(5)
    yield "fp8", torch.full((3,), 1.0 + rank).to(torch.float8_e4m3fn), (3 * rank,)
    yield "complex", torch.full((2, 1), complex(rank, 1)).conj(), (0, rank)


SPECS = [
    ("columns", "F32", (60, 100)),
    ("rows", "BF16", (60, 100)),
    ("only", "F32", (7,)),
    ("both", "F32", (5,)),
    ("fp8", "F8_E4M3", (6,)),
    ("complex", "C64", (2, 2)),
]


def sharded() -> dict[str, Any]:
    with publisher("sharded") as pub:
        good = outcome(lambda: pub.publish(weightsync.sharded(lambda: parts_of(RANK), SPECS), version=1, timeout=LIMIT))
        gap = weightsync.sharded(lambda: (part for part in parts_of(RANK) if part[0] != "only" or RANK == 0), SPECS)
        missing = outcome(lambda: pub.publish(gap, version=2, timeout=LIMIT))

        def breaks() -> Iterator[tuple[Any, ...]]:
            yield from parts_of(RANK)
            if RANK == 1:
                raise OSError("no memory left")

        late = weightsync.sharded(breaks, [*SPECS, ("more", "F32", (1,))])
        broken = outcome(lambda: pub.publish(late, version=2, timeout=LIMIT))
        return {"good": good, "missing": missing, "broken": broken}


class Owned:
    """vLLM 0.33's `WeightSource` by its shape: the last tensor is rank 1's alone, as of a later pipeline stage."""

    @property
    def metadata(self) -> list[Any]:
        owners = {"all": None, "both": (0, 1), "mine": (0,), "last": (1,)}
        return [SimpleNamespace(name=name, dtype=torch.float32, shape=(3,), owners=ranks) for name, ranks in owners.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, meta in enumerate(self.metadata):
            if meta.owners is None or RANK in meta.owners:
                yield meta.name, torch.full((3,), float(number))


def owned() -> dict[str, Any]:
    with publisher("owned") as pub:
        return outcome(lambda: pub.publish(Owned(), version=1, timeout=LIMIT))


def export() -> Iterator[tuple[str, torch.Tensor]]:
    """Forty tensors of a bucket each, made by a collective operation as a Megatron export makes them."""
    for number in range(40):
        tensor = torch.full((1024,), float(number + RANK))
        dist.all_reduce(tensor)
        gathered.append((time.monotonic(), str(number)))
        yield str(number), tensor


METAS = [(str(number), "F32", (1024,)) for number in range(40)]


def again() -> dict[str, Any]:
    with publisher("again") as pub:
        return outcome(lambda: pub.publish(weightsync.stream(export, METAS), version=1, timeout=LIMIT))


def stall() -> dict[str, Any]:
    """The agent takes three buckets and no more: how far does each rank get?"""
    gathered.clear()
    with publisher("stall") as pub:
        ended = outcome(lambda: pub.publish(weightsync.stream(export, METAS), version=1, timeout=2))
        return {**ended, "gathered": len(gathered)}


def stall_within_a_tensor() -> dict[str, Any]:
    """Rank 0 has no room in the middle of a tensor: the others hear its error before their own patience ends."""
    with weightsync.Publisher.from_env(dist.group.WORLD, socket=SOCKETS["stall"], connect_timeout=5, rank_timeout=6) as pub:
        return outcome(lambda: pub.publish({"w": torch.zeros(100_000)}, version=2, timeout=LIMIT))


def lost() -> dict[str, Any]:
    gathered.clear()
    with publisher("lost") as pub:
        begun = time.monotonic()
        ended = outcome(lambda: pub.publish(weightsync.stream(export, METAS), version=1, timeout=LIMIT))
        return {**ended, "gathered": len(gathered), "seconds": time.monotonic() - begun}


def one_rank_fails() -> dict[str, Any]:
    """Rank 1 cannot make its tensors, before it enters a collective operation."""

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            yield str(number), torch.zeros(1024)
        if RANK == 1:
            raise ValueError("rank 1 has no tensor 3")
        for number in range(3, 40):
            yield str(number), torch.zeros(1024)

    with publisher("sharded") as pub:
        failed = outcome(lambda: pub.publish(weightsync.stream(half, METAS), version=5, timeout=LIMIT))
        other = outcome(lambda: pub.publish({"w": torch.ones(3)}, version=5 + RANK, timeout=LIMIT))
        unlike = outcome(lambda: pub.publish({"w": torch.ones(3 + RANK)}, version=5, timeout=LIMIT))
        handle = pub.publish_async({"w": torch.ones(3)}, version=6, activation="manual", timeout=LIMIT)
        staged = outcome(handle.wait)
        return {"failed": failed, "other": other, "unlike": unlike, "staged": staged, "activated": outcome(handle.activate)}


def not_all_ranks() -> dict[str, Any]:
    """A sharded model without a group is refused, rather than waiting for ranks that do not come."""
    with weightsync.Publisher.from_env(socket=SOCKETS["sharded"]) as pub:
        return outcome(lambda: pub.publish(weightsync.fsdp2(sharded_model()), version=90 + RANK, timeout=LIMIT))


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    scenarios = (fsdp2, sharded, owned, again, stall, stall_within_a_tensor, lost, one_rank_fails, not_all_ranks)
    seen = {}
    for scenario in scenarios:
        seen[scenario.__name__] = scenario()
        dist.barrier()
    print(json.dumps(seen), flush=True)
    # A gloo group that is taken down after the other rank has gone can abort its process (torch 2.13).
    os._exit(0)


main()
