"""Buckets in memory of a worker's own GPU, which the agent's worker allocated: copied, and every tensor of the copy summed.

A bucket is copied as a whole before anything looks into it: vLLM keeps tensors until all of a layer is there, and the agent's place is used
again as soon as it was taken. Decides that a copy counts only when the gsum64 of every tensor is what the agent says. Never reads pickle,
and never waits for a stream that is not the calling thread's.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import Failed

SPREAD = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as a signed number: torch's integers wrap around like those of the agent."""

PIECE_WORDS = 4 << 20
"""Words that are summed at once: what they are mixed in takes five times their memory."""


class Cuda(Protocol):
    """What is asked of the driver. Tests have one without a GPU."""

    def uuid(self, device: int) -> str:
        """The GPU as the agent names it."""

    def on(self, device: int) -> Any:
        """A context manager in which the device is current."""

    def open_memory(self, handle: bytes) -> int:
        """The address of another process's block."""

    def close_memory(self, address: int) -> None:
        """Undoes `open_memory`."""

    def copy(self, to: int, source: int, length: int, stream: int) -> None:
        """Copies within one device, on a stream."""


@dataclass(frozen=True)
class Place:
    """Place of a bucket in the agent's memory."""

    handle: bytes
    block: int
    """Length of the block that the handle names."""
    offset: int
    length: int


def place(message: Any, length: Any) -> Place:
    """Reads the place of a bucket; refuses one outside its block."""
    try:
        found = Place(base64.b64decode(message["handle"], validate=True), int(message["bytes"]), int(message["offset"]), int(length))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise Failed(f"the agent described invalid memory: {error}") from error
    if found.offset < 0 or found.length < 0 or found.offset + found.length > found.block:
        raise Failed(f"{found.length} bytes from {found.offset} on do not lie in a block of {found.block}")
    return found


class GpuFeed:
    """What a worker needs to take buckets on one GPU."""

    def __init__(self, cuda: Cuda, device: Any, index: int) -> None:
        self._cuda = cuda
        self._device = device
        self._index = index
        self._opened: dict[bytes, int] = {}
        self._triton: Any = None
        self.uuid = cuda.uuid(index)

    @staticmethod
    def of(device: Any) -> GpuFeed | None:
        """For a `torch.device`; None if it is no GPU of CUDA, or its driver refuses: then the agent is notified that there is none."""
        if device.type != "cuda":
            return None
        try:
            driver = importlib.import_module("weightsync._driver")
            torch = importlib.import_module("torch")
            index = torch.cuda.current_device() if device.index is None else device.index
            feed = GpuFeed(driver.Driver(), torch.device("cuda", index), index)
        except Exception:
            logging.getLogger("vllm.weightsync").exception("no weights are taken from this GPU's memory")
            return None
        feed._compile(torch)
        return feed

    def _compile(self, torch: Any) -> None:
        """Compiles the sums, a second's work that no update need wait for, and sees that they are right. Without it torch computes them."""
        try:
            fast = importlib.import_module("weightsync._triton_sums")
            some = torch.arange(100_003, device=self._device).to(torch.uint8)
            parts = [(0, 1), (64, 99_939), (128, 64)]
            reported = fast.sums(some, parts, SPREAD).tolist()
            if reported != [int(gsum64(some[offset : offset + length])) for offset, length in parts]:
                raise ValueError("they are not those that torch computes")
            self._triton = fast
        except Exception as error:
            logging.getLogger("vllm.weightsync").warning("digests take longer: Triton does not compute them here: %s", error)

    def take(self, place: Place) -> Any:
        """A copy of a bucket, as bytes; it is there when what follows on the calling thread's stream runs."""
        torch = importlib.import_module("torch")
        copy = torch.empty(place.length, dtype=torch.uint8, device=self._device)
        if place.length:
            with self._cuda.on(self._index):
                address = self._opened.get(place.handle)
                if address is None:
                    address = self._opened[place.handle] = self._cuda.open_memory(place.handle)
                self._cuda.copy(copy.data_ptr(), address + place.offset, place.length, self._stream(torch))
        return copy

    def sums(self, copy: Any, parts: Sequence[tuple[int, int]]) -> list[str]:
        """The gsum64 of some parts, by first byte and length, as the agent writes it. Waits until the copy is there."""
        if not parts:
            return []
        torch = importlib.import_module("torch")
        # Less than a word has no words that begin anywhere.
        fast = self._triton if copy.numel() >= 8 and all(offset % 8 == 0 for offset, _ in parts) else None
        if fast is not None:
            found = fast.sums(copy, parts, SPREAD)
        else:
            found = torch.stack([gsum64(copy[offset : offset + length]) for offset, length in parts])
        return [f"{value & ((1 << 64) - 1):016x}" for value in found.tolist()]

    def close(self) -> None:
        """Lets the agent's memory go."""
        while self._opened:
            _, address = self._opened.popitem()
            with self._cuda.on(self._index):
                self._cuda.close_memory(address)

    def _stream(self, torch: Any) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream) if self._device.type == "cuda" else 0


def gsum64(data: Any) -> Any:
    """The gsum64 (`crates/core/src/weights/gsum.rs`) of a contiguous tensor of bytes: one 64-bit integer on the same device."""
    torch = importlib.import_module("torch")
    whole = data.numel() // 8 * 8
    tail = data[whole:]
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    words = data[:whole]
    # Both count for torch: where they lie, and where in their storage.
    words = (words.clone() if words.data_ptr() % 8 or words.storage_offset() % 8 else words).view(torch.int64)
    for first in range(0, words.numel(), PIECE_WORDS):
        total += _mixed(torch, words[first : first + PIECE_WORDS], first)
    if tail.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=data.device)
        last[: tail.numel()] = tail
        total += _mixed(torch, last.view(torch.int64), whole // 8)
    return total


def _mixed(torch: Any, words: Any, first: int) -> Any:
    x = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64, device=words.device)
    x *= SPREAD
    x ^= words
    low = x & 0xFFFF_FFFF
    # The shift keeps the sign; the mask takes it away.
    high = (x >> 32) & 0xFFFF_FFFF
    return (low * high + x).sum()
