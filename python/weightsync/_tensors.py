"""A tensor of torch, numpy or the buffer protocol, as bytes that can be copied in pieces.

Row-major and little-endian, whatever strides, byte order or device it has. Copies one tensor at most, and never changes it.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from ._dtypes import buffer_dtype, common_name, dtype_name


class Bytes(Protocol):
    """The bytes of one tensor."""

    def copy(self, start: int, into: memoryview) -> None:
        """Fills `into` with the bytes from `start` on."""


def is_torch(tensor: Any) -> bool:
    """Whether it is a torch tensor; torch is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def is_numpy(tensor: Any) -> bool:
    """Whether it is a numpy array or scalar."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(tensor, (numpy.ndarray, numpy.generic))


def describe(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Element type (safetensors name) and shape."""
    if is_torch(tensor) or is_numpy(tensor):
        return dtype_name(tensor.dtype), tuple(map(int, tensor.shape))
    try:
        view = memoryview(tensor)
    except TypeError:
        raise TypeError(f"{type(tensor).__name__} is neither a torch tensor, a numpy array nor a buffer") from None
    return buffer_dtype(view), tuple(view.shape or ())


def describe_named(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """`describe`, whose error says which tensor it is."""
    if is_torch(tensor) and tensor.is_meta:
        raise TypeError(f"{name} is on the device meta, so it has no elements: load or initialise it before it is published")
    try:
        return describe(tensor)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error


def as_bytes(tensor: Any) -> Bytes:
    """The bytes of a tensor that `describe` knows."""
    if is_torch(tensor):
        return _Torch(tensor)
    if is_numpy(tensor):
        return _Buffer(_numpy_bytes(tensor))
    view = memoryview(tensor)
    return _Buffer(view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes()))


def to_torch(tensor: Any) -> Any:
    """A torch tensor with the same elements, on its device."""
    import torch

    if is_torch(tensor):
        return tensor.detach()
    dtype, shape = describe(tensor)
    data = bytearray(_Buffer(_numpy_bytes(tensor)).view if is_numpy(tensor) else memoryview(tensor).tobytes())
    kind = getattr(torch, common_name(dtype))
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


class _Buffer:
    def __init__(self, view: memoryview) -> None:
        self.view = view

    def copy(self, start: int, into: memoryview) -> None:
        into[:] = self.view[start : start + len(into)]


class _Torch:
    def __init__(self, tensor: Any) -> None:
        import torch

        self._torch = torch
        self._bytes = flat_bytes(tensor)

    def copy(self, start: int, into: memoryview) -> None:
        if into:
            # Straight into the shared memory, from a GPU as well.
            target = self._torch.frombuffer(into, dtype=self._torch.uint8)
            target.copy_(self._bytes[start : start + len(into)])


def flat_bytes(tensor: Any) -> Any:
    """The bytes of a tensor that `describe` knows as a torch tensor of one dimension, on its device; a view of it where that can be."""
    import torch

    tensor = to_torch(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be published: make it dense")
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _numpy_bytes(array: Any) -> memoryview:
    import numpy

    array = numpy.ascontiguousarray(array)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    # A reshape and a view of it: types of ml_dtypes are unknown to the buffer protocol, bytes are not.
    return memoryview(array.reshape(-1).view(numpy.uint8)) if array.size else memoryview(b"")
