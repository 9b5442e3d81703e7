"""The tensors of a step, one by one, as FastDeploy's loaders take them.

A step is a folder with a checkpoint's safetensors files, under the step's name in the configured folder. Decides what is no step: a name
that leaves the folder, a file that is cut short, and a tensor that is there twice are errors before the first tensor is handed out, so that
a worker's weights are as they were. Never waits for a step: a worker that asks for one holds its server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from .config import TransferConfig

LONGEST_HEADER = 100_000_000
"""Bytes of the longest header that the safetensors format allows."""

# Element type: the type whose bytes numpy reads, and Paddle's own name where numpy has none.
TYPES: dict[str, tuple[str, str | None]] = {
    "BOOL": ("bool", None), "U8": ("uint8", None), "I8": ("int8", None), "I16": ("int16", None), "I32": ("int32", None),
    "I64": ("int64", None), "F16": ("float16", None), "F32": ("float32", None), "F64": ("float64", None),
    "BF16": ("uint16", "bfloat16"), "F8_E4M3": ("uint8", "float8_e4m3fn"), "F8_E5M2": ("uint8", "float8_e5m2"),
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


class CheckpointTransfer:
    """What one worker keeps over many updates."""

    def __init__(self, config: TransferConfig) -> None:
        self.folder = Path(config.directory)

    async def initialize(self) -> None:
        """Looks whether the folder is there."""
        if not self.folder.is_absolute() or not self.folder.is_dir():
            raise NotADirectoryError(f'"directory" of --rsync_config is no folder of steps: {str(self.folder)!r}')

    async def cleanup(self) -> None:
        """Holds nothing."""

    def receive_weights_sync(self, step_id: str, output_framework: str = "paddle") -> Iterator[tuple[str, Any]]:
        """Names and tensors in host memory; one tensor is read at a time."""
        if output_framework != "paddle":
            raise ValueError(f"tensors of {output_framework!r} are not made here, only those of paddle")
        for name, stored in self.look(step_id).items():
            yield name, read(stored)

    def look(self, step_id: str) -> dict[str, Stored]:
        """The tensors of a step, all files looked at."""
        if step_id in ("", ".", "..") or "/" in step_id or "\0" in step_id:
            raise ValueError(f"{step_id!r} is no step")
        files = sorted((self.folder / step_id).glob("*.safetensors"))
        if not files:
            why = "the agent lays those that it asks for, and you lay the one of version.yaml"
            raise FileNotFoundError(f"step {step_id!r} is not in {self.folder}: {why}")
        found: dict[str, Stored] = {}
        for file in files:
            for name, stored in header(file).items():
                if name in found:
                    raise ValueError(f"step {step_id!r} has {name} twice")
                found[name] = stored
        return found


def header(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds; each tensor's bytes are there."""
    length = file.stat().st_size
    with file.open("rb") as opened:
        start = int.from_bytes(opened.read(8), "little")
        if length < 8 or start > min(length - 8, LONGEST_HEADER):
            raise ValueError(f"{file} is no safetensors file, or cut short")
        described = json.loads(opened.read(start))
    stored: dict[str, Stored] = {}
    for name, tensor in described.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = tensor["dtype"], tuple(tensor["shape"]), tensor["data_offsets"]
        if dtype not in TYPES:
            raise ValueError(f"{name} in {file} is of the type {dtype}, which Paddle has not")
        size = np.dtype(TYPES[dtype][0]).itemsize * math.prod(shape)
        if begin < 0 or end - begin != size or 8 + start + end > length:
            raise ValueError(f"{name} in {file} is cut short")
        stored[name] = Stored(file, 8 + start + begin, dtype, shape)
    return stored


def read(stored: Stored) -> Any:
    """A tensor of its own memory."""
    through, named = TYPES[stored.dtype]
    array = np.fromfile(stored.file, dtype=through, count=math.prod(stored.shape), offset=stored.offset).reshape(stored.shape)
    tensor = paddle.to_tensor(array, place=paddle.CPUPlace())
    return tensor if named is None else tensor.view(named)
