"""Trainers with tensors on GPUs of the stand-in driver (tests/fakegpu): one scenario a process, for the driver keeps its settings.

Run as `python fake_cuda.py SCENARIO SOCKET LIBCUDA`. Prints one JSON object. torch itself has no GPU here: a tensor of the host stands for
the one that was copied from it to the stand-in's memory, and everything from the copy into the agent's memory on is what a real trainer
runs.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import weightsync
from weightsync._driver import Driver, DriverError
from weightsync._tensors import flat_bytes

LIMIT = 60


@dataclass
class Flat:
    """Bytes on a GPU of the stand-in, or a tensor of the host."""

    address: int
    kept: Any


class FakeCuda:
    """As `weightsync._cuda.TorchCuda`, with the stand-in for CUDA. Tensors named in `on` lie on a GPU, others on the host."""

    torch_version = "2.11.0"
    expandable_segments = True

    def __init__(self, library: str, on: dict[int, int]) -> None:
        self.driver = Driver(library)
        self._on = on
        self._streams: dict[int, int] = {}
        self.followed: list[int] = []

    def device_of(self, tensor: Any) -> int | None:
        return self._on.get(tensor.untyped_storage().data_ptr()) if isinstance(tensor, torch.Tensor) else None

    def current_device(self) -> int:
        return 0

    def stream(self, device: int) -> int:
        if device not in self._streams:
            stream = ctypes.c_void_p()
            with self.driver.on(device):
                self.driver._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
            self._streams[device] = stream.value or 0
        return self._streams[device]

    def follow(self, devices: Iterable[int]) -> None:
        self.followed.extend(devices)

    @contextmanager
    def ours(self, device: int) -> Iterator[None]:
        yield

    def flat(self, tensor: Any, device: int) -> tuple[Flat, bool]:
        flat = flat_bytes(tensor)
        on_gpu = self.device_of(tensor) is not None
        if not on_gpu:
            return Flat(flat.data_ptr(), flat), False
        address = ctypes.c_uint64()
        with self.driver.on(device):
            self.driver._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, flat.numel())))
            if flat.numel():
                self.driver.copy_from_host(address.value, flat.data_ptr(), flat.numel(), self.stream(device))
        return Flat(address.value, flat), True

    def address(self, flat: Flat) -> int:
        return flat.address


def tensors() -> dict[str, torch.Tensor]:
    """Several buckets of several tensors, one alone in its bucket, odd lengths, strides, and one of the host."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(300, 130, generator=generator)
    return {
        "embed": wide.to(torch.bfloat16),
        "transposed": wide.t(),
        "scalar": torch.tensor(1.5),
        "nothing": torch.empty(0, 4),
        "fp8": torch.randn(1033, generator=generator).to(torch.float8_e4m3fn),
        "on the host": torch.arange(7001),
        "last": torch.ones(3, dtype=torch.uint8),
    }


def on_gpus(named: dict[str, torch.Tensor], gpu: int = 0) -> dict[int, int]:
    """All but one of them on that GPU."""
    return {tensor.untyped_storage().data_ptr(): gpu for name, tensor in named.items() if name != "on the host"}


class Scenario:
    """A publisher whose tensors lie on GPUs."""

    def __init__(self, socket: str, library: str, gpu: int = 0) -> None:
        self.tensors = tensors()
        self.cuda = FakeCuda(library, on_gpus(self.tensors, gpu))
        self.publisher = weightsync.Publisher.from_env(socket=socket, connect_timeout=5)
        self.publisher._cuda = self.cuda
        self.logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("weightsync").addHandler(handler)

    def publish(self, version: int) -> weightsync.Result:
        return self.publisher.publish(self.tensors, version=version, timeout=LIMIT)

    def seen(self, results: list[weightsync.Result]) -> dict[str, Any]:
        self.publisher.close()
        return {
            "attempts": [result.attempts for result in results],
            "memory": [result.memory for result in results],
            "logged": self.logged,
            "followed": self.cuda.followed,
        }


def some_versions(scenario: Scenario) -> list[weightsync.Result]:
    """One connection, one mapping, several versions."""
    return [scenario.publish(version) for version in (1, 2, 3)]


def one_version(scenario: Scenario) -> list[weightsync.Result]:
    return [scenario.publish(1)]


def second_version(scenario: Scenario) -> list[weightsync.Result]:
    return [scenario.publish(2)]


def without_events(scenario: Scenario) -> list[weightsync.Result]:
    """The driver exports no event: every copy is waited for."""

    def refuse(event: int) -> bytes:
        raise DriverError("cuIpcGetEventHandle", 801, "CUDA_ERROR_NOT_SUPPORTED")

    scenario.cuda.driver.event_handle = refuse  # type: ignore[method-assign]
    return some_versions(scenario)


def wrong_memory(scenario: Scenario) -> list[weightsync.Result]:
    """What the trainer writes never reaches the worker's memory: the worker must see that before a bucket is taken."""
    copy = scenario.cuda.driver.copy_from_host

    def elsewhere(to: int, source: int, length: int, stream: int) -> None:
        address = ctypes.c_uint64()
        scenario.cuda.driver._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, length)))
        copy(address.value, source, length, stream)

    scenario.cuda.driver.copy_from_host = elsewhere  # type: ignore[method-assign]
    return one_version(scenario)


def on_another_gpu(scenario: Scenario) -> list[weightsync.Result]:
    return one_version(scenario)


ALL = (some_versions, one_version, second_version, without_events, wrong_memory, on_another_gpu)
SCENARIOS: dict[str, Callable[[Scenario], list[weightsync.Result]]] = {scenario.__name__: scenario for scenario in ALL}


def main() -> None:
    name, socket, library = sys.argv[1:]
    scenario = Scenario(socket, library, gpu=1 if name == "on_another_gpu" else 0)
    print(json.dumps(scenario.seen(SCENARIOS[name](scenario))))


if __name__ == "__main__":
    main()
