"""The tensors of a step in a folder, one by one.

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

from .tensors import TYPES, made

LONGEST_HEADER = 100_000_000
"""Bytes of the longest header that the safetensors format allows."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def tensors(folder: Path, step_id: str) -> Iterator[tuple[str, Any]]:
    """Names and tensors of their own memory; all files are looked at before the first."""
    for name, stored in look(folder, step_id).items():
        yield name, read(stored)


def look(folder: Path, step_id: str) -> dict[str, Stored]:
    """The tensors of a step."""
    if step_id in ("", ".", "..") or "/" in step_id or "\0" in step_id:
        raise ValueError(f"{step_id!r} is no step")
    files = sorted((folder / step_id).glob("*.safetensors"))
    if not files:
        why = "the agent lays those that it asks for, and you lay the one that the server starts with"
        raise FileNotFoundError(f"step {step_id!r} is not in {folder}: {why}")
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
    count = math.prod(stored.shape)
    array = np.fromfile(stored.file, dtype=TYPES[stored.dtype][0], count=count, offset=stored.offset)
    return made(array, stored.dtype, stored.shape)
