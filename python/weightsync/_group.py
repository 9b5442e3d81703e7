"""The ranks that publish together: one process, or a group of torch.distributed.

Every operation is bounded. Messages between ranks are JSON in tensors, never pickle.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

from ._scratch import Scratch
from .errors import RanksDisagree

LONGEST_MESSAGE = 1 << 24
"""Bytes of a message between ranks."""


class Group(ABC):
    """The ranks of one publisher; rank 0 is in the agent's pod."""

    rank: int
    size: int
    longest_step: float
    """Seconds that a rank may keep the others waiting: half of what they wait, so that they hear its error and not its silence."""

    @abstractmethod
    def most(self, code: int) -> int:
        """The largest code of all ranks, on all ranks."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """The values (JSON) of all ranks, in their order, on all ranks."""

    @abstractmethod
    def collect(self, mine: list[Any], all_parts: list[list[tuple[str, tuple[int, ...]]]], scratch: Scratch) -> list[list[Any]]:
        """Tensors of all ranks on rank 0; `all_parts` says for each rank which (torch dtype, shape) it has. Elsewhere an empty list.

        On the host, what comes is put into `scratch`.
        """


class Alone(Group):
    """One process."""

    rank = 0
    size = 1
    longest_step = float("inf")

    def most(self, code: int) -> int:
        return code

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, mine: list[Any], all_parts: list[list[tuple[str, tuple[int, ...]]]], scratch: Scratch) -> list[list[Any]]:
        return [mine]


class Ranks(Group):
    """A group of torch.distributed: gloo, or a backend of the accelerator."""

    def __init__(self, group: Any, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._torch = torch
        self._dist = dist
        self._group = group
        self._timeout = timeout
        self.longest_step = timeout / 2
        self.rank = int(dist.get_rank(group))
        self.size = int(dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError("this process is not in the group that it was given")
        on_host = "gloo" in str(dist.get_backend(group))
        self._device = torch.device("cpu") if on_host else _accelerator(torch)

    def most(self, code: int) -> int:
        value = self._torch.tensor([code], dtype=self._torch.int64, device=self._device)
        self._do(lambda: self._dist.all_reduce(value, op=self._dist.ReduceOp.MAX, group=self._group, async_op=True))
        return int(value.item())

    def gather(self, value: Any) -> list[Any]:
        message = json.dumps(value, separators=(",", ":")).encode()
        longest = self.most(len(message))
        if longest > LONGEST_MESSAGE:
            raise RanksDisagree(f"a rank's message has {longest} bytes, the limit is {LONGEST_MESSAGE}", phase="ranks")
        mine = self._torch.zeros(longest, dtype=self._torch.uint8)
        mine[: len(message)] = self._torch.frombuffer(bytearray(message), dtype=self._torch.uint8)
        mine = mine.to(self._device)
        all_of_them = [self._torch.zeros_like(mine) for _ in range(self.size)]
        self._do(lambda: self._dist.all_gather(all_of_them, mine, group=self._group, async_op=True))
        return [json.loads(bytes(one.cpu().tolist()).rstrip(b"\0")) for one in all_of_them]

    def collect(self, mine: list[Any], all_parts: list[list[tuple[str, tuple[int, ...]]]], scratch: Scratch) -> list[list[Any]]:
        if self.rank != 0:
            first = self._dist.get_global_rank(self._group, 0)
            for part in mine:
                self._do(partial(self._dist.isend, _flat(part).to(self._device), dst=first, group=self._group))
            return []
        collected = [mine]
        for rank, parts in enumerate(all_parts[1:], start=1):
            sender = self._dist.get_global_rank(self._group, rank)
            received = []
            for dtype, shape in parts:
                kind = getattr(self._torch, dtype)
                part = scratch.take(self._torch.uint8, (prod(shape) * kind.itemsize,), self._device)
                self._do(partial(self._dist.irecv, part, src=sender, group=self._group))
                received.append(part.view(kind).reshape(shape))
            collected.append(received)
        return collected

    def _do(self, begin: Callable[[], Any]) -> None:
        """Waits for one operation, at most the group's timeout."""
        try:
            begin().wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            cause = str(error).splitlines()[0][:300]
            message = f"a trainer rank is gone, or did not come within {self._timeout:g} s: {cause}"
            raise RanksDisagree(message, phase="ranks") from error


def _flat(tensor: Any) -> Any:
    """The bytes of a tensor: not every backend sends every element type."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _accelerator(torch: Any) -> Any:
    """The device whose backend (NCCL and its like) moves tensors of devices only; `torch.accelerator` is younger than torch 2.6."""
    accelerator = getattr(torch, "accelerator", None)
    return (accelerator.current_accelerator() if accelerator is not None else None) or torch.device("cuda")
