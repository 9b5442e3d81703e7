"""What is offered to the agent and by it: the GPUs of a trainer's tensors, and memory of its worker on one of them.

Memory that cannot be opened is refused with the reason; the agent then offers memory of the host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ._connection import Connection, GpuRing, Published
from ._cuda import Cuda
from ._memory import GpuMemory
from .errors import Failed

_LOG = logging.getLogger("weightsync")
_SAID: set[str] = set()
"""Reasons that were logged: each once in a process."""


def offer(cuda: Cuda, tensors: Iterable[Any] | None) -> tuple[dict[str, Any], dict[str, int]] | None:
    """The description of this process's GPUs for the agent, and their numbers by UUID; None if no tensor is on one.

    `tensors` is none when they are not there yet: then the caller's GPU counts.
    """
    bytes_on: dict[int, int] = {}
    if tensors is None:
        bytes_on[cuda.current_device()] = 0
    else:
        for tensor in tensors:
            device = cuda.device_of(tensor)
            if device is not None:
                bytes_on[device] = bytes_on.get(device, 0) + int(tensor.numel()) * int(tensor.element_size())
    if not bytes_on:
        return None
    devices = sorted(bytes_on, key=lambda device: -bytes_on[device])
    names = [cuda.driver.uuid(device) for device in devices]
    said: dict[str, Any] = {"gpus": names, "torch": cuda.torch_version, "expandableSegments": cuda.expandable_segments}
    with suppress(OSError):
        said["pidNamespace"] = os.stat("/proc/self/ns/pid").st_ino
    return said, dict(zip(names, devices, strict=True))


def to_open(published: Published) -> GpuRing | None:
    """Memory that the agent offers and that was not opened yet."""
    ring = published.gpu_ring
    return ring if ring is not None and ring.memory is None else None


def open_offered(connection: Connection, published: Published, cuda: Cuda | None, devices: Mapping[str, int]) -> None:
    """Opens it, or reports to the agent why not."""
    ring = to_open(published)
    if ring is None:
        return
    try:
        if cuda is None:
            raise Failed("no GPU memory was asked for")
        memory = GpuMemory(cuda, devices, ring.announced["gpu"], ring.slots, ring.slot_bytes)
    except Failed as error:
        connection.unopened(published, ring, error.message)
    else:
        connection.opened(published, ring, memory)


def warn_once(reason: str | None) -> None:
    """Says why tensors on a GPU travel through host memory."""
    if reason is not None and reason not in _SAID:
        _SAID.add(reason)
        _LOG.warning("tensors on a GPU travel through host memory, which is slower: %s", reason)
