"""The stream of a version, written into slots of shared memory.

The layout comes from the agent: where each tensor begins, and where the stream is cut. Gaps are zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

from ._source import Meta
from ._tensors import as_bytes
from .errors import Failed


class Ring:
    """The shared memory of one publish and the layout of its stream."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int, layout: dict[str, Any]) -> None:
        self.memory = memoryview(memory)
        self.slot_bytes = slot_bytes
        self.total_bytes = int(layout["totalBytes"])
        self.bucket_bytes = int(layout["bucketBytes"])
        self.places = [(str(entry["name"]), int(entry["offset"]), int(entry["bytes"])) for entry in layout["entries"]]
        if self.bucket_bytes < 1 or min(self.bucket_bytes, self.total_bytes) > slot_bytes:
            raise Failed(f"buckets of {self.bucket_bytes} bytes do not fit slots of {slot_bytes}")

    def check(self, metas: Sequence[Meta]) -> None:
        """The agent's layout must be that of the tensors that were announced."""
        if [(name, length) for name, _, length in self.places] != [(meta.name, meta.bytes) for meta in metas]:
            raise Failed("the agent's layout is not that of the tensors that were announced")

    def batches(self) -> list[int]:
        """How many tensors are gathered between two agreements: those that begin in one bucket."""
        counts: dict[int, int] = {}
        for _, offset, _ in self.places:
            bucket = offset // self.bucket_bytes
            counts[bucket] = counts.get(bucket, 0) + 1
        return list(counts.values())


class StreamWriter:
    """Writes tensors in order, and hands each slot over when its bucket is full."""

    def __init__(self, ring: Ring, take_slot: Callable[[], int], hand_over: Callable[[int, int], None]) -> None:
        self._ring = ring
        self._take_slot = take_slot
        self._hand_over = hand_over
        self._position = 0
        self._slot: int | None = None
        self._next = 0

    @property
    def slot(self) -> int | None:
        """The slot that is half full, if one is."""
        return self._slot

    def write(self, tensor: Any) -> None:
        """Writes the next tensor; its type and shape were checked."""
        _, offset, length = self._ring.places[self._next]
        self._next += 1
        self._fill_gap(offset)
        source = as_bytes(tensor)
        end = offset + length
        while self._position < end:
            room = self._room(end - self._position)
            source.copy(self._position - offset, room)
            self._advance(len(room))

    def finish(self) -> None:
        """Writes what follows the last tensor."""
        self._fill_gap(self._ring.total_bytes)

    def _fill_gap(self, until: int) -> None:
        while self._position < until:
            room = self._room(until - self._position)
            room[:] = bytes(len(room))
            self._advance(len(room))

    def _room(self, wanted: int) -> memoryview:
        """Where the next bytes go, at most to the end of the bucket."""
        if self._slot is None:
            self._slot = self._take_slot()
        at = self._position % self._ring.bucket_bytes
        start = self._slot * self._ring.slot_bytes + at
        return self._ring.memory[start : start + min(wanted, self._ring.bucket_bytes - at)]

    def _advance(self, written: int) -> None:
        self._position += written
        if self._slot is not None and (self._position % self._ring.bucket_bytes == 0 or self._position == self._ring.total_bytes):
            self._hand_over((self._position - 1) // self._ring.bucket_bytes, self._slot)
            self._slot = None
