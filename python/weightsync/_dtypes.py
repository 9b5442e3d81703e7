"""Element types under the names of the safetensors format, from whatever a trainer calls them.

Neither torch nor numpy is imported: both print their types unmistakably.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one element. Types below eight bits are packed by their makers in ways that differ; they are not published."""

_COMMON_NAMES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""Names that torch, numpy and ml_dtypes agree on."""

_BUFFER_FORMATS: dict[str, str] = {
    "?": "BOOL", "B": "U8", "b": "I8", "h": "I16", "H": "U16", "i": "I32", "I": "U32", "q": "I64", "Q": "U64",
    "l": "I64", "L": "U64", "e": "F16", "f": "F32", "d": "F64",
}  # fmt: skip
"""Formats of the buffer protocol, as array.array and memoryview use them on 64-bit Linux."""


_SEEN: dict[Any, str] = {}
"""Answers that were given: a model of experts has tens of thousands of tensors, and each is asked for at every publish."""


def dtype_name(dtype: Any) -> str:
    """`torch.bfloat16`, `numpy.dtype("float32")`, `numpy.float32`, `"bfloat16"` or `"BF16"` as the safetensors name."""
    try:
        return _SEEN[dtype]
    except (KeyError, TypeError):
        name = _name_of(dtype)
    with suppress(TypeError):
        _SEEN[dtype] = name
    return name


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, str) and dtype in BITS:
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    known = _COMMON_NAMES.get(str(name).removeprefix("torch."))
    if known is None:
        raise TypeError(f"elements of type {dtype} cannot be published; known are {', '.join(BITS)}")
    return known


def common_name(dtype: str) -> str:
    """The name that torch and ml_dtypes use for a safetensors name."""
    return next(common for common, name in _COMMON_NAMES.items() if name == dtype)


def buffer_dtype(view: memoryview) -> str:
    """The type of an object of the buffer protocol."""
    known = _BUFFER_FORMATS.get(view.format.lstrip("@=<"))
    if known is None or BITS[known] != 8 * view.itemsize:
        raise TypeError(f"a buffer of format {view.format!r} cannot be published")
    return known


def byte_length(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    elements = 1
    for dimension in shape:
        elements *= dimension
    return elements * BITS[dtype] // 8
