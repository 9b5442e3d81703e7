"""The CUDA driver by ctypes: memory of another process, events that it can wait for, and copies on a stream.

The driver and not torch, because what is opened here was allocated by the agent's worker: torch's allocator, whatever its settings,
has no part in it, and every torch version is served by the same few calls. Each call is checked, and none blocks: who waits, asks
again until a deadline. CUDA is never initialised here in a process that does not use it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

HANDLE_BYTES = 64
"""Length of a CUipcMemHandle and of a CUipcEventHandle."""

_SUCCESS = 0
_NOT_READY = 600
_EVENT_DISABLE_TIMING = 2
_EVENT_INTERPROCESS = 4
_LAZY_PEER_ACCESS = 1


class DriverError(Exception):
    """A call that the driver refused."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class _Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle: passed by value."""

    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


class Driver:
    """A loaded libcuda. Its methods may be called from any thread; those about a device need `on(device)` around them."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        self._contexts: dict[int, c_void_p] = {}
        self._lock = threading.Lock()
        self._call("cuInit", c_uint(0))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._code(name, *arguments)
        if code != _SUCCESS:
            raise DriverError(name, code, self._name_of(code))

    def _code(self, name: str, *arguments: Any) -> int:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(name, -1, "this driver does not have it") from None
        return int(function(*arguments))

    def _name_of(self, code: int) -> str:
        name = c_char_p()
        try:
            known = self._library.cuGetErrorName(c_int(code), byref(name)) == _SUCCESS
        except AttributeError:
            known = False
        return name.value.decode() if known and name.value else "error"

    def uuid(self, device: int) -> str:
        """The device as the driver names it: `GPU-...`, or `MIG-...` for a slice of one. Devices count as in torch."""
        uuid = (c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", byref(uuid), self._device(device))
        digits = bytes(uuid).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        return ("MIG-" if "MIG" in self.name(device) else "GPU-") + "-".join(parts)

    def name(self, device: int) -> str:
        """The device's name for people."""
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, c_int(len(name)), self._device(device))
        return name.value.decode(errors="replace")

    def _device(self, ordinal: int) -> c_int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), c_int(ordinal))
        return device

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Has the device's primary context, which is torch's too, be current in this thread."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                # Never released: torch holds it for the life of the process as well.
                context = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(device))
                self._contexts[device] = context
        before = c_void_p()
        self._call("cuCtxGetCurrent", byref(before))
        if before.value != context.value:
            self._call("cuCtxSetCurrent", context)
        try:
            yield
        finally:
            if before.value != context.value:
                self._call("cuCtxSetCurrent", before)

    def open_memory(self, handle: bytes) -> int:
        """The address of another process's block. The same block must not be opened twice without being closed."""
        address = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(address), _handle(handle), c_uint(_LAZY_PEER_ACCESS))
        return int(address.value)

    def close_memory(self, address: int) -> None:
        """Undoes `open_memory`. Nothing may be under way to or from it."""
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def block(self, address: int) -> tuple[int, int]:
        """Start and length of the allocation that an address lies in."""
        start, length = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(start), byref(length), c_uint64(address))
        return int(start.value), int(length.value)

    def make_event(self) -> int:
        """An event that other processes can open."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), c_uint(_EVENT_DISABLE_TIMING | _EVENT_INTERPROCESS))
        return event.value or 0

    def event_handle(self, event: int) -> bytes:
        """What another process opens it by."""
        handle = _Handle()
        self._call("cuIpcGetEventHandle", byref(handle), c_void_p(event))
        return bytes(handle)

    def drop_event(self, event: int) -> None:
        """Destroys an event; one that is still pending is destroyed when it fires."""
        self._call("cuEventDestroy_v2", c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        """The event fires when all that the stream holds now is done."""
        self._call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def fired(self, event: int) -> bool:
        """Whether the last record of the event fired."""
        code = self._code("cuEventQuery", c_void_p(event))
        if code not in (_SUCCESS, _NOT_READY):
            raise DriverError("cuEventQuery", code, self._name_of(code))
        return code == _SUCCESS

    def wait(self, event: int, seconds: float) -> bool:
        """Waits until the event fired; false when it did not within so many seconds."""
        return _poll(lambda: self.fired(event), seconds)

    def copy(self, to: int, source: int, length: int, stream: int) -> None:
        """Copies within one device."""
        self._call("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(source), c_size_t(length), c_void_p(stream))

    def copy_from_host(self, to: int, source: int, length: int, stream: int) -> None:
        """Copies from host memory, which must stay as it is until the stream is past this."""
        self._call("cuMemcpyHtoDAsync_v2", c_uint64(to), c_void_p(source), c_size_t(length), c_void_p(stream))

    def zero(self, to: int, length: int, stream: int) -> None:
        """Writes zeros."""
        self._call("cuMemsetD8Async", c_uint64(to), c_ubyte(0), c_size_t(length), c_void_p(stream))


def _handle(handle: bytes) -> _Handle:
    if len(handle) != HANDLE_BYTES:
        raise DriverError("CUDA IPC", -1, f"a handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
    return _Handle.from_buffer_copy(handle)


def _poll(done: Callable[[], bool], seconds: float) -> bool:
    """Asks at once, then ever less often: a copy of a bucket takes a fraction of a millisecond."""
    deadline = time.monotonic() + seconds
    pause = 2e-5
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True
