"""Tensors of Paddle in host memory, from bytes that numpy reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

# Element type: the type whose bytes numpy reads, and Paddle's own name where numpy has none.
TYPES: dict[str, tuple[str, str | None]] = {
    "BOOL": ("bool", None), "U8": ("uint8", None), "I8": ("int8", None), "I16": ("int16", None), "I32": ("int32", None),
    "I64": ("int64", None), "F16": ("float16", None), "F32": ("float32", None), "F64": ("float64", None),
    "BF16": ("uint16", "bfloat16"), "F8_E4M3": ("uint8", "float8_e4m3fn"), "F8_E5M2": ("uint8", "float8_e5m2"),
}  # fmt: skip


def made(array: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor of that type and shape; Paddle copies the bytes."""
    tensor = paddle.to_tensor(array.reshape(shape), place=paddle.CPUPlace())
    named = TYPES[dtype][1]
    return tensor if named is None else tensor.view(named)
