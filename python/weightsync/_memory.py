"""Where a publish writes its buckets: slots in memory that the agent made, on the host or on the GPU of the tensors.

In host memory a slot is full when it was written. On a GPU, writing only queues copies on our stream: the slot's event fires when they
are done, and the agent's worker waits for it before it reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from ._cuda import Cuda
from ._driver import DriverError
from ._tensors import Bytes, as_bytes
from .errors import Failed, Timeout

COPY_SECONDS = 60.0
"""A GPU that does not finish the copy of one bucket within so many seconds hangs."""


class MemoryGone(Exception):
    """The connection ended while a bucket was written; the waiting caller gets the cause."""


class Memory(Protocol):
    """Slots, one after the other."""

    place: str
    """`host`, or the GPU."""

    def reader(self, tensor: Any) -> Any:
        """Gets a tensor ready for `put`."""

    def put(self, at: int, source: Any, start: int, length: int) -> None:
        """Writes `length` bytes of a tensor, from its byte `start` on, at that place."""

    def zero(self, at: int, length: int) -> None:
        """Writes zeros."""

    def fill(self, slot: int) -> bool:
        """Ends the writing of a slot; true when its bytes are there only when its event fires."""

    def close(self) -> None:
        """Gives the memory back."""


class HostMemory:
    """A mapped memfd."""

    place = "host"

    def __init__(self, memory: mmap.mmap) -> None:
        # None once it was given back: the agent may die while a tensor is written, and the run hears of that at its next step.
        self._memory: memoryview | None = memoryview(memory)

    def reader(self, tensor: Any) -> Bytes:
        return as_bytes(tensor)

    def put(self, at: int, source: Bytes, start: int, length: int) -> None:
        memory = self._memory
        if memory is not None:
            source.copy(start, memory[at : at + length])

    def zero(self, at: int, length: int) -> None:
        memory = self._memory
        if memory is not None:
            memory[at : at + length] = bytes(length)

    def fill(self, slot: int) -> bool:
        return False

    def close(self) -> None:
        # Unmapped when nothing refers to it any more.
        self._memory = None


class GpuMemory:
    """A block of the agent's worker, opened by its CUDA IPC handle, and one event a slot that the worker can wait for.

    Raises Failed with the cause if anything differs from the agent's description.
    """

    def __init__(self, cuda: Cuda, devices: Mapping[str, int], announced: Mapping[str, Any], slots: int, slot_bytes: int) -> None:
        self.ring = int(announced["ring"])
        self.place = str(announced["gpu"])
        device = devices.get(self.place)
        if device is None:
            raise Failed(f"the agent offers memory on {self.place}, the tensors lie on {', '.join(devices)}")
        self.events: list[str] = []
        """What the worker opens each slot's event by (base64); empty when events cannot be shared."""
        self.use_events = False
        """Whether the worker opened them."""
        self._cuda, self._driver, self._device = cuda, cuda.driver, device
        self._stream = cuda.stream(device)
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._open = True
        self._own: list[int] = []
        # What the copies of a slot read in host memory stays as long as they may run.
        self._read: dict[int, list[Any]] = {}
        length = slots * slot_bytes
        try:
            with self._driver.on(device):
                self._address = self._driver.open_memory(b64decode(announced["handle"], validate=True))
                try:
                    self._prepare(length, b64decode(announced["check"], validate=True), slots)
                except BaseException:
                    self._driver.close_memory(self._address)
                    raise
        except (DriverError, ValueError) as error:
            raise Failed(f"memory of the agent's worker on {self.place} cannot be opened: {error}") from error
        _OPEN.add(self)

    def _prepare(self, length: int, check: bytes, slots: int) -> None:
        start, there = self._driver.block(self._address)
        if start > self._address or start + there < self._address + length:
            raise Failed(f"the block on {self.place} ends after {start + there - self._address} bytes, {length} were announced")
        self._own = [self._driver.make_event() for _ in range(slots)]
        self._share_events()
        if len(check) > self._slot_bytes:
            raise Failed("the agent's check does not fit a slot")
        written = ctypes.create_string_buffer(check, len(check))
        self._driver.copy_from_host(self._address + length - len(check), ctypes.addressof(written), len(check), self._stream)
        for event in self._own:
            self._driver.record(event, self._stream)
        if not self._driver.wait(self._own[-1], COPY_SECONDS):
            raise Failed(f"{self.place} did not finish a copy of {len(check)} bytes within {COPY_SECONDS:g} s")

    def _share_events(self) -> None:
        try:
            self.events = [b64encode(self._driver.event_handle(event)).decode() for event in self._own]
        except DriverError:
            # Then each slot is waited for here.
            self.events = []

    def reader(self, tensor: Any) -> tuple[Any, bool]:
        return self._cuda.flat(tensor, self._device)

    def put(self, at: int, source: tuple[Any, bool], start: int, length: int) -> None:
        flat, on_gpu = source
        address = self._cuda.address(flat) + start
        slot, in_slot = divmod(at, self._slot_bytes)
        if in_slot == 0:
            # The slot was lent again: what filled it before is done.
            self._read.pop(slot, None)
        with self._usable():
            if on_gpu:
                self._driver.copy(self._address + at, address, length, self._stream)
            else:
                self._read.setdefault(slot, []).append(flat)
                self._driver.copy_from_host(self._address + at, address, length, self._stream)

    def zero(self, at: int, length: int) -> None:
        with self._usable():
            self._driver.zero(self._address + at, length, self._stream)

    def fill(self, slot: int) -> bool:
        with self._usable():
            self._driver.record(self._own[slot], self._stream)
            if not self.use_events and not self._driver.wait(self._own[slot], COPY_SECONDS):
                message = f"{self.place} did not finish the copy of a bucket within {COPY_SECONDS:g} s"
                raise Timeout(message, retryable=True, phase="transfer")
        return self.use_events

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Keeps the memory open while something is queued."""
        with self._lock:
            if not self._open:
                raise MemoryGone
            with self._driver.on(self._device):
                yield

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
        _OPEN.discard(self)
        with self._driver.on(self._device):
            # What is queued must not run into memory that is gone: that would be the end of the trainer's context.
            done = self._own[-1]
            self._driver.record(done, self._stream)
            if not self._driver.wait(done, COPY_SECONDS):
                # Better lost than taken away under a copy.
                return
            for event in self._own:
                self._driver.drop_event(event)
            self._driver.close_memory(self._address)

    def forget(self) -> None:
        """In a forked child: the driver must not be called there, and the memory is the parent's."""
        self._lock = threading.Lock()
        self._open = False


_OPEN: weakref.WeakSet[GpuMemory] = weakref.WeakSet()


def _forget_all() -> None:
    for memory in list(_OPEN):
        memory.forget()


os.register_at_fork(after_in_child=_forget_all)
