"""All that is asked of torch.cuda: where tensors lie, their bytes on a GPU, and streams of our own that compute does not wait for.

Never initialises CUDA, never synchronises a stream of the trainer, and never has one of them wait for us.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from ._driver import Driver
from ._tensors import flat_bytes


class Cuda(Protocol):
    """What the rest of the package knows of CUDA. Tests have one without a GPU."""

    driver: Driver
    torch_version: str
    expandable_segments: bool

    def device_of(self, tensor: Any) -> int | None:
        """The GPU that a tensor lies on."""

    def current_device(self) -> int:
        """The calling thread's GPU."""

    def stream(self, device: int) -> int:
        """Our own stream of a GPU."""

    def follow(self, devices: Iterable[int]) -> None:
        """Has our streams wait for what the calling thread queued so far on these GPUs."""

    def ours(self, device: int) -> AbstractContextManager[None]:
        """In the calling thread, what is queued goes to our streams, and `device` is the current one."""

    def flat(self, tensor: Any, device: int) -> tuple[Any, bool]:
        """The bytes of a tensor, contiguous, and whether they lie on that GPU (else: in host memory).

        What our stream of that GPU is given next comes after whatever makes them. Those on the GPU stay until the stream is past it, those
        in host memory as long as they are referred to.
        """

    def address(self, flat: Any) -> int:
        """Where these bytes begin."""


class TorchCuda:
    """torch.cuda of this process."""

    def __init__(self, torch: Any, driver: Driver) -> None:
        self._torch = torch
        self.driver = driver
        self.torch_version = str(torch.__version__)
        self.expandable_segments = expandable_segments(os.environ)
        self._streams: dict[int, Any] = {}

    @staticmethod
    def of_this_process() -> TorchCuda | None:
        """None where torch is not used with CUDA: it is not initialised for the question."""
        torch = sys.modules.get("torch")
        if torch is None or torch.version.cuda is None or not torch.cuda.is_initialized():
            return None
        return TorchCuda(torch, Driver())

    def device_of(self, tensor: Any) -> int | None:
        device = getattr(tensor, "device", None)
        if not isinstance(device, self._torch.device) or device.type != "cuda":
            return None
        return int(device.index) if device.index is not None else self.current_device()

    def current_device(self) -> int:
        return int(self._torch.cuda.current_device())

    def stream(self, device: int) -> int:
        return int(self._stream(device).cuda_stream)

    def _stream(self, device: int) -> Any:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._torch.cuda.Stream(device=device)
        return stream

    def follow(self, devices: Iterable[int]) -> None:
        for device in devices:
            self._stream(device).wait_stream(self._torch.cuda.current_stream(device))

    @contextmanager
    def ours(self, device: int) -> Iterator[None]:
        with ExitStack() as stack:
            for other in [*(other for other in list(self._streams) if other != device), device]:
                stack.enter_context(self._torch.cuda.stream(self._stream(other)))
            yield

    def flat(self, tensor: Any, device: int) -> tuple[Any, bool]:
        at = self.device_of(tensor)
        if at is None:
            return flat_bytes(tensor).cpu(), False
        stream, made_by = self._stream(at), self._torch.cuda.current_stream(at)
        if made_by != stream:
            stream.wait_stream(made_by)
            # Else its memory could be given to another tensor when the last reference goes, before it was copied.
            tensor.detach().record_stream(stream)
        self._stream(device)
        with self.ours(device):
            flat = flat_bytes(tensor)
            # torch knows whether two GPUs reach each other, and what to do when they do not.
            return (flat if at == device else flat.to(self._torch.device("cuda", device), non_blocking=True)), True

    def address(self, flat: Any) -> int:
        return int(flat.data_ptr())


def expandable_segments(environment: Any) -> bool:
    """Whether the environment asks torch's allocator for expandable segments."""
    settings = ",".join(environment.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return any(setting.replace(" ", "").lower() == "expandable_segments:true" for setting in settings.split(","))
