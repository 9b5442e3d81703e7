"""Host memory that is taken for one gathered tensor after another: allocated once, of the largest size that was asked for.

Fresh host memory costs a page fault for each of its pages, every time. On a GPU the allocator of torch keeps what was freed, and copies may
still be under way when the next tensor comes: there every tensor gets memory of its own.
"""

from __future__ import annotations

from math import prod
from typing import Any

ALIGNMENT = 64
"""Bytes at multiples of which tensors begin."""


class Scratch:
    """Allocates space one after the other until `reset`."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._taken = 0
        self._wanted = 0

    def reset(self) -> None:
        """What was taken is used no more. Grows to what was wanted since the last reset."""
        if self._memory is None or self._wanted > self._memory.numel():
            self._memory = None
            if self._wanted:
                import torch

                self._memory = torch.empty(self._wanted, dtype=torch.uint8)
        self._taken = self._wanted = 0

    def take(self, dtype: Any, shape: tuple[int, ...], device: Any) -> Any:
        """A tensor without values."""
        import torch

        length = prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or not length:
            return torch.empty(shape, dtype=dtype, device=device)
        room = -(-length // ALIGNMENT) * ALIGNMENT
        self._wanted += room
        begin = self._taken
        if self._memory is None or begin + room > self._memory.numel():
            return torch.empty(shape, dtype=dtype)
        self._taken += room
        return self._memory[begin : begin + length].view(dtype).reshape(shape)
