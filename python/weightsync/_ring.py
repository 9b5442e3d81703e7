"""The stream of a version, written into slots of memory that the agent made.

The layout comes from the agent: where each tensor begins, and where the stream is cut. Gaps are zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._memory import Memory
from ._source import Meta
from .errors import Failed


class Ring:
    """The memory of one publish and the layout of its stream."""

    def __init__(self, memory: Memory, slot_bytes: int, announced: Mapping[str, Any]) -> None:
        layout = announced["layout"]
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.total_bytes = int(layout["totalBytes"])
        self.places = [(str(entry["name"]), int(entry["offset"]), int(entry["bytes"])) for entry in layout["entries"]]
        self._sections = [str(entry.get("section", "model")) for entry in layout["entries"]]
        # Buckets are cut at multiples of a length, or where the agent says.
        bucket_bytes = int(layout["bucketBytes"])
        starts = [int(start) for start in announced.get("cuts") or ()]
        if not starts and bucket_bytes > 0:
            starts = list(range(0, self.total_bytes, bucket_bytes))
        self.ends = [*starts[1:], self.total_bytes] if starts else []
        """Where each bucket ends in the stream."""
        longest = max((end - start for start, end in zip(starts, self.ends, strict=True)), default=0)
        if (starts and starts[0] != 0) or (self.total_bytes > 0) != bool(starts) or not 0 <= longest <= slot_bytes:
            raise Failed(f"buckets of {longest} bytes do not fit slots of {slot_bytes}")

    def check(self, metas: Sequence[Meta]) -> None:
        """The agent's layout must be that of the tensors that were announced."""
        if [(name, length) for name, _, length in self.places] != [(meta.name, meta.bytes) for meta in metas]:
            raise Failed("the agent's layout is not that of the tensors that were announced")
        if self._sections != [meta.section for meta in metas]:
            raise Failed("the agent knows no draft models: its program is older than this package")

    def batches(self) -> list[int]:
        """How many tensors are gathered between two agreements: those that begin in one bucket."""
        counts: dict[int, int] = {}
        for _, offset, _ in self.places:
            bucket = bisect_right(self.ends, offset)
            counts[bucket] = counts.get(bucket, 0) + 1
        return list(counts.values())


class StreamWriter:
    """Writes tensors in order, and hands each slot over when its bucket is full."""

    def __init__(self, ring: Ring, take_slot: Callable[[], int], hand_over: Callable[[int, int, bool], None]) -> None:
        self._ring = ring
        self._take_slot = take_slot
        self._hand_over = hand_over
        self._position = 0
        self._bucket = 0
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
        source = self._ring.memory.reader(tensor)
        end = offset + length
        while self._position < end:
            at, room = self._room(end - self._position)
            self._ring.memory.put(at, source, self._position - offset, room)
            self._advance(room)

    def finish(self) -> None:
        """Writes what follows the last tensor."""
        self._fill_gap(self._ring.total_bytes)

    def _fill_gap(self, until: int) -> None:
        while self._position < until:
            at, room = self._room(until - self._position)
            self._ring.memory.zero(at, room)
            self._advance(room)

    def _room(self, wanted: int) -> tuple[int, int]:
        """Where the next bytes go, and how many of them: at most to the end of the bucket."""
        if self._slot is None:
            self._slot = self._take_slot()
        starts = self._ring.ends[self._bucket - 1] if self._bucket else 0
        at = self._slot * self._ring.slot_bytes + self._position - starts
        return at, min(wanted, self._ring.ends[self._bucket] - self._position)

    def _advance(self, written: int) -> None:
        self._position += written
        if self._slot is not None and self._position == self._ring.ends[self._bucket]:
            later = self._ring.memory.fill(self._slot)
            self._hand_over(self._bucket, self._slot, later)
            self._slot = None
            self._bucket += 1
