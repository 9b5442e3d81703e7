"""The tensors of a step that the agent shares from its memory.

The step's name says where the agent listens. The worker connects, maps what it gets, and checks every tensor's digest over the shared bytes
before it hands the tensor out. Decides nothing about weights: a digest that differs, or an agent that is gone or silent, is an error, and
the agent learns of it. The lines are those of `weightsync/_feed.py`, whose code is used.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from weightsync._feed import PROTOCOL, Feed, Tensor
from weightsync.errors import Failed

from .tensors import TYPES, made

PREFIX = "weightsync-memory:"


def look() -> None:
    """What such steps need is there."""
    if importlib.util.find_spec("xxhash") is None:
        raise ModuleNotFoundError("steps from memory are checked by the package xxhash: install it in the server's environment")


def tensors(step_id: str, rank: int, ranks: int) -> Iterator[tuple[str, Any]]:
    """Names and tensors of their own memory."""
    protocol, socket, token = step_id.removeprefix(PREFIX).split(":")
    if int(protocol) != PROTOCOL:
        raise Failed(f"the agent speaks protocol {protocol}, this package {PROTOCOL}: install the package of the agent's version")
    # The loaders take tensors of the host, wherever they compute.
    feed = Feed(socket, token, rank, ranks, "cpu", make=_made)
    try:
        feed.did("started")
        yield from feed.tensors()
        feed.must_be_whole()
        feed.did("updated")
        feed.did("finished")
    except GeneratorExit:
        feed.failed("the server's loader stopped taking tensors before the end")
        raise
    except Exception as error:
        feed.failed(str(error))
        raise
    finally:
        feed.close()


def _made(memory: mmap.mmap, tensor: Tensor, copy: bool) -> Any:
    if tensor.dtype not in TYPES:
        raise Failed(f"tensor {tensor.name} is of the type {tensor.dtype}, which Paddle has not")
    array = np.frombuffer(memory, dtype=TYPES[tensor.dtype][0], count=math.prod(tensor.shape), offset=tensor.offset)
    return made(array, tensor.dtype, tensor.shape)
