"""Weights that a trainer gives as a generator that can be read once, without a list of what will come.

The first version is read into host memory on rank 0, because nothing is known of it before. From then on the list is known, and tensors go
to the agent while they come; such a version can be sent once only, and another attempt of it is fed from what the agent kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._source import Meta, Source
from .._tensors import describe_named
from ..errors import SourceFailed
from ..sources import state_dict, stream


class Once:
    """Makes sources of generators, on each rank of a group alike."""

    def __init__(self) -> None:
        self._metas: list[Meta] | None = None

    def source(self, weights: Iterable[tuple[str, Any]], rank: int) -> Source:
        """Of one version. Every rank reads its generator in step; what rank 0 gets is published."""
        if self._metas is not None:
            return stream(once(weights), self._metas)
        metas: list[Meta] = []
        kept: dict[str, Any] = {}
        for name, tensor in weights:
            dtype, shape = describe_named(name, tensor)
            metas.append(Meta(name, dtype, tuple(shape)))
            # Of every rank the list is needed, of rank 0 the bytes too; and its generator may use the tensor's memory again.
            if rank == 0:
                kept[name] = _copy(tensor)
        self._metas = metas
        return state_dict(kept) if rank == 0 else stream(lambda: ((meta.name, None) for meta in metas), metas)

    def forget(self) -> None:
        """The list may be another one the next time."""
        self._metas = None


def once(weights: Iterable[tuple[str, Any]]) -> Callable[[], Iterator[tuple[str, Any]]]:
    """What `stream` takes, of weights that can be read once only: a second attempt says so."""
    left = [weights]

    def factory() -> Iterator[tuple[str, Any]]:
        if not left:
            raise SourceFailed(
                "these weights can be read once only, and the update has to be repeated: "
                "set spec.update.retainMiB, or publish the next step",
                retryable=True,
            )
        return iter(left.pop())

    return factory


def _copy(tensor: Any) -> Any:
    if hasattr(tensor, "detach"):
        return tensor.detach().to("cpu", copy=True)
    return tensor.copy()
