"""One worker's end of a feed: the buckets of a version in shared memory, announced by the engine's agent, checked and handed over.

A thread takes what the agent says and checks every tensor's digest over the shared bytes while the engine still serves; the engine's own
thread takes what was checked, in order, when it loads. Buckets in memory of the worker's GPU it copies and checks itself (`_gpu_feed`).
Decides whether the announced buckets are a whole version. It never maps memory so that a loader which writes into what it is given changes
it for others, never says that a place may be used again while anyone looks into it (an engine may keep views of tensors until a whole layer
is there), and never reads pickle.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ._dtypes import BITS, byte_length, common_name
from ._gpu_feed import GpuFeed, Place, place
from ._socket import Wire
from .errors import Failed, WeightSyncError

PROTOCOL = 1
"""Version of the lines on the socket; the agent sends its version."""

FIRST_WORD = 60.0
"""Seconds until the agent must describe the memory; later it sends its own silence limit."""

Digester = Callable[[memoryview], str]

Make = Callable[["mmap.mmap", "Tensor", bool], Any]
"""Makes an engine's tensor of one in the shared memory; a copy where the last argument says that its place is used again."""


def digesters() -> dict[str, Digester]:
    """Digests that can be computed here, by the names that agents know: `blake3` comes with vLLM, `xxh3-128` with the package xxhash."""
    found: dict[str, Digester] = {}
    with contextlib.suppress(ImportError):
        xxhash = importlib.import_module("xxhash")
        found["xxh3-128"] = lambda data: str(xxhash.xxh3_128_hexdigest(data))
    with contextlib.suppress(ImportError):
        blake3 = importlib.import_module("blake3")
        found["blake3"] = lambda data: str(blake3.blake3(data).hexdigest())
    return found


@dataclass(frozen=True)
class Tensor:
    """A tensor in the shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    digest: str


@dataclass(frozen=True)
class Bucket:
    """Tensors that the agent announced together. `copy`: their place is used again as soon as they were taken."""

    sequence: int
    copy: bool
    draft: bool
    """Whether they are for the draft model, which follows the model."""
    tensors: tuple[Tensor, ...]
    place: Place | None = None
    """Where they lie on the worker's GPU; offsets of tensors count from there. None in memory of the host."""


class Feed:
    """A connection to the agent for one version, and the thread that listens on it."""

    def __init__(
        self,
        socket: str,
        token: str,
        rank: int,
        ranks: int,
        device: str,
        active: bool = False,
        gpu: GpuFeed | None = None,
        make: Make | None = None,
    ) -> None:
        self.token = token
        self._make = make or _of_torch
        self._gpu = gpu
        self._digesters = digesters()
        self._wire = Wire(socket.removeprefix("@"))
        self._saying = threading.Lock()
        self._arrived: queue.SimpleQueue[Bucket | BaseException | None] = queue.SimpleQueue()
        self._memory: mmap.mmap | None = None
        self._length = 0
        self.over = False
        """Whether every bucket was taken."""
        self._draft = False
        self._whole = False
        self._ahead: Bucket | None = None
        hello = {"token": token, "protocol": PROTOCOL, "rank": rank, "ranks": ranks, "device": device, "open": active, "draft": True}
        on_gpu = {} if gpu is None else {"gpu": gpu.uuid}
        digests = [*sorted(self._digesters), *(["gsum64"] if gpu is not None else [])]
        self._say({"hello": {**hello, **on_gpu, "digests": digests}})
        threading.Thread(target=self._listen, name="weightsync-feed", daemon=True).start()

    def turn_to(self, *, draft: bool) -> None:
        """What follows is taken by the draft model, or by the model. Raises where that is not what comes next."""
        if draft != (self._ahead is not None):
            raise Failed("a draft model was to be updated before its model, or without one in the version")
        self._draft, self._whole = draft, False

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Every tensor for the model as (name, the engine's tensor), in the order of the buckets; waits for those that are still to come.

        A tensor of a bucket that is not copied looks into the shared memory, which stays as it is for as long as anything looks into it.
        Raises what went wrong: a digest that differs, an agent that is gone or silent.
        """
        while True:
            bucket, self._ahead = self._ahead or self._arrived.get(), None
            if bucket is None:
                self._whole = self.over = True
                return
            if isinstance(bucket, BaseException):
                raise bucket
            if bucket.draft != self._draft:
                self._whole, self._ahead = True, bucket
                return
            if bucket.place is not None:
                copy = self._copied(bucket, bucket.place)
                self._say({"taken": bucket.sequence})
                for tensor in bucket.tensors:
                    yield tensor.name, _shaped(copy[tensor.offset : tensor.offset + tensor.length], tensor)
                continue
            for tensor in bucket.tensors:
                yield tensor.name, self._tensor(tensor, bucket.copy)
            self._say({"taken": bucket.sequence})

    def must_be_whole(self) -> None:
        """Raises unless every bucket for the model was taken: a loader may stop early without an error."""
        if not self._whole:
            raise Failed("the model stopped taking tensors before the end of those for it")

    def did(self, step: str) -> None:
        """Reports that a step of the session was taken. Does nothing if the agent is gone."""
        with contextlib.suppress(WeightSyncError):
            self._say({"did": step})

    def failed(self, why: str) -> None:
        """Reports that this worker cannot continue."""
        with contextlib.suppress(WeightSyncError):
            self._say({"failed": why})

    def close(self) -> None:
        """Ends the connection. What looks into the memory keeps it."""
        self._wire.close()
        self._memory = None
        if self._gpu is not None:
            self._gpu.close()

    def _listen(self) -> None:
        try:
            silence = self._open(self._next(FIRST_WORD))
            expected, drafts = 0, False
            while True:
                message = self._next(silence)
                match message["event"]:
                    case "alive":
                        continue
                    case "bucket":
                        bucket = _bucket(message, self._length)
                        if bucket.sequence != expected:
                            raise Failed(f"bucket {bucket.sequence} was announced, {expected} was expected")
                        if drafts and not bucket.draft:
                            raise Failed(f"bucket {bucket.sequence} of the model was announced after one of its draft model")
                        drafts = bucket.draft
                        # Buckets on a GPU are checked where they are copied.
                        if bucket.place is None:
                            self._check(bucket)
                            self._say({"verified": expected})
                        self._arrived.put(bucket)
                        expected += 1
                    case "end":
                        if message.get("buckets") != expected:
                            raise Failed(f"the agent ended after {message.get('buckets')} buckets, {expected} were announced")
                        self._arrived.put(None)
                        return
                    case event:
                        raise Failed(f"the agent sent {event!r}, which is not known here")
        except Exception as error:
            self.failed(str(error))
            self._arrived.put(error)

    def _next(self, within: float) -> dict[str, Any]:
        message = self._wire.receive(within)
        if message is None:
            raise Failed(f"the agent sent nothing for {within:g} s")
        return message

    def _open(self, message: Mapping[str, Any]) -> float:
        if message["event"] == "gpu" and self._gpu is not None and message.get("digest") == "gsum64":
            return float(message["silence"])
        if message["event"] != "memory":
            raise Failed(f"the agent sent {message['event']!r}, a description of the memory was expected")
        if message.get("digest") not in self._digesters:
            raise Failed(f"the agent uses digests {message.get('digest')!r}, which cannot be computed here")
        self._digest = self._digesters[message["digest"]]
        if not self._wire.descriptors:
            raise Failed("no memory was passed with its description")
        descriptor = self._wire.descriptors.popleft()
        try:
            length = int(message["bytes"])
            size = os.fstat(descriptor).st_size
            if size < length:
                raise Failed(f"the shared memory has {size} bytes, {length} were announced")
            # Private: a loader that changes in place what it is given changes its own copy of the page, not what other ranks read.
            self._memory = mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) if length else None
            self._length = length
        finally:
            os.close(descriptor)
        if self._memory is not None:
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_DONTFORK)
        return float(message["silence"])

    def _check(self, bucket: Bucket) -> None:
        memory = self._memory
        if memory is None:
            raise Failed("the feed was closed")
        with memoryview(memory) as view:
            for tensor in bucket.tensors:
                with view[tensor.offset : tensor.offset + tensor.length] as part:
                    computed = self._digest(part)
                if computed != tensor.digest:
                    raise Failed(f"tensor {tensor.name} is not what the agent says: its digest is {computed}, not {tensor.digest}")

    def _copied(self, bucket: Bucket, place: Place) -> Any:
        if self._gpu is None:
            raise Failed("the agent announced memory on a GPU, and this worker has no GPU")
        copy = self._gpu.take(place)
        sums = self._gpu.sums(copy, [(tensor.offset, tensor.length) for tensor in bucket.tensors])
        for tensor, computed in zip(bucket.tensors, sums, strict=True):
            if computed != tensor.digest:
                raise Failed(f"tensor {tensor.name} is not what the agent says: its digest is {computed}, not {tensor.digest}")
        return copy

    def _tensor(self, tensor: Tensor, copy: bool) -> Any:
        if self._memory is None:
            raise Failed("the feed was closed")
        return self._make(self._memory, tensor, copy)

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._saying:
            self._wire.send(message)


def _of_torch(memory: mmap.mmap, tensor: Tensor, copy: bool) -> Any:
    torch = importlib.import_module("torch")
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.length, offset=tensor.offset)
    return _shaped(flat.clone() if copy else flat, tensor)


def _shaped(flat: Any, tensor: Tensor) -> Any:
    """Bytes as a tensor of its type and shape: a view of them, where they can be read as its type."""
    torch = importlib.import_module("torch")
    dtype = getattr(torch, common_name(tensor.dtype))
    if flat.data_ptr() % (BITS[tensor.dtype] // 8):
        flat = flat.clone()
    return flat.view(dtype).view(tensor.shape)


def _bucket(message: Mapping[str, Any], memory: int) -> Bucket:
    """Reads a bucket; refuses one that does not lie in the memory or whose lengths are not those of its types and shapes."""
    on_gpu = place(message["memory"], message.get("bytes")) if "memory" in message else None
    memory = memory if on_gpu is None else on_gpu.length
    try:
        tensors = tuple(
            Tensor(str(name), str(dtype), tuple(map(int, shape)), int(offset), int(length), str(digest))
            for name, dtype, shape, offset, length, digest in message["tensors"]
        )
        bucket = Bucket(int(message["sequence"]), bool(message["copy"]), bool(message.get("draft")), tensors, on_gpu)
    except (KeyError, TypeError, ValueError) as error:
        raise Failed(f"the agent described an invalid bucket: {error}") from error
    for tensor in tensors:
        known = tensor.dtype in BITS and min(tensor.shape, default=1) > 0
        if not known or tensor.length != byte_length(tensor.dtype, tensor.shape):
            raise Failed(f"tensor {tensor.name}: {tensor.length} bytes are no {tensor.dtype} of the shape {list(tensor.shape)}")
        if tensor.offset < 0 or tensor.offset + tensor.length > memory:
            raise Failed(f"tensor {tensor.name} does not lie in the shared memory")
    return bucket
