"""Full tensors from the parts that ranks hold, one tensor at a time, on rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

from ._dtypes import common_name
from ._group import Group
from ._scratch import Scratch
from ._source import Meta, Source
from ._tensors import describe_named, to_torch
from .errors import SourceFailed

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and shape of a part."""


class Sharded(Source):
    """See `weightsync.sharded`. Parts are put together with torch."""

    def __init__(self, factory: Callable[[], Iterable[Any]], metas: list[Meta]) -> None:
        self._factory = factory
        self._metas = metas

    def metas(self) -> list[Meta]:
        return self._metas

    def tensors(self, group: Group) -> Iterator[tuple[str, Any]]:
        parts = _Parts(iter(self._factory()))
        scratch = Scratch()
        for meta in self._metas:
            # Anyone who took the tensor before copied it: a pass asks for the next one only then.
            scratch.reset()
            error = None
            mine: list[tuple[Box, Any]] = []
            try:
                mine = [_checked(meta, tensor, start) for tensor, start in parts.of(meta.name)]
            except Exception as raised:
                error = f"rank {group.rank}: {type(raised).__name__}: {raised}"
            # Every rank sends its parts, or its failure, before a byte moves: none waits for a part that will not come.
            said = group.gather([error, [box for box, _ in mine]])
            failed = next((other for other, _ in said if other is not None), None)
            if failed is not None:
                raise SourceFailed(failed)
            boxes = [[(tuple(start), tuple(shape)) for start, shape in theirs] for _, theirs in said]
            wanted = _chosen(meta, boxes)
            kept = [tensor for box, tensor in mine if (group.rank, box) in wanted]
            shapes = [
                [(common_name(meta.dtype), shape) for start, shape in theirs if (rank, (start, shape)) in wanted]
                for rank, theirs in enumerate(boxes)
            ]
            collected = group.collect(kept, shapes, scratch)
            if group.rank != 0:
                yield meta.name, None
                continue
            places = [box for rank, theirs in enumerate(boxes) for box in theirs if (rank, box) in wanted]
            yield meta.name, _put_together(meta, places, [tensor for tensors in collected for tensor in tensors], scratch)
        parts.expect_end()


class _Parts:
    """A rank's parts, read one ahead to see where a tensor's parts end."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._parts = parts
        self._ahead: Any = None

    def of(self, name: str) -> Iterator[tuple[Any, Any]]:
        while self._peek() and self._ahead[0] == name:
            _, tensor, *start = self._ahead
            self._ahead = None
            yield tensor, start[0] if start else None

    def expect_end(self) -> None:
        if self._peek():
            raise SourceFailed(f"a part of {self._ahead[0]} came late, or is of no tensor of the specs: parts come in their order")

    def _peek(self) -> bool:
        if self._ahead is None:
            self._ahead = next(self._parts, None)
        return self._ahead is not None


def _checked(meta: Meta, tensor: Any, start: Any) -> tuple[Box, Any]:
    dtype, shape = describe_named(meta.name, tensor)
    first = tuple(int(index) for index in start) if start is not None else (0,) * len(shape)
    if dtype != meta.dtype:
        raise ValueError(f"{meta.name} is {meta.dtype}, its part is {dtype}")
    inside = len(shape) == len(first) == len(meta.shape)
    if not inside or any(at < 0 or at + length > full for at, length, full in zip(first, shape, meta.shape, strict=True)):
        raise ValueError(f"{meta.name} is {list(meta.shape)}, its part {list(shape)} at {list(first)} does not lie inside")
    return (first, shape), to_torch(tensor)


def _chosen(meta: Meta, boxes: list[list[Box]]) -> set[tuple[int, Box]]:
    """Each place once, from the first rank that has it. Raises, on every rank alike, when places overlap or do not cover the tensor."""
    owner: dict[Box, int] = {}
    for rank, theirs in enumerate(boxes):
        for box in theirs:
            if prod(box[1]):
                owner.setdefault(box, rank)
    places = list(owner)
    for at, box in enumerate(places):
        if any(_overlap(box, other) for other in places[:at]):
            raise SourceFailed(f"{meta.name}: the part {list(box[1])} at {list(box[0])} overlaps another one")
    covered, all_of_it = sum(prod(shape) for _, shape in places), prod(meta.shape)
    if covered != all_of_it:
        raise SourceFailed(f"{meta.name}: its parts hold {covered} of {all_of_it} elements")
    return {(rank, box) for box, rank in owner.items()}


def _overlap(one: Box, other: Box) -> bool:
    return all(
        start < other_start + other_length and other_start < start + length
        for start, length, other_start, other_length in zip(one[0], one[1], other[0], other[1], strict=True)
    )


def _put_together(meta: Meta, places: list[Box], tensors: list[Any], scratch: Scratch) -> Any:
    import torch

    if len(tensors) == 1 and places[0][1] == meta.shape:
        return tensors[0]
    # On a GPU where a part lies on one: its memory is where the tensor goes next.
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    full = scratch.take(getattr(torch, common_name(meta.dtype)), meta.shape, device)
    for (start, shape), tensor in zip(places, tensors, strict=True):
        full[tuple(slice(at, at + length) for at, length in zip(start, shape, strict=True))] = tensor
    return full
