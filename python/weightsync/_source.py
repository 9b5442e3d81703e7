"""What a publish reads: a list of tensors, and passes over them in that order.

A source can be read again from its first tensor as long as the version is not released: a replica may die while it is sent. That is why
a generator is no source, and a function that makes one is.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._dtypes import byte_length, dtype_name

if TYPE_CHECKING:
    from ._group import Group


@dataclass(frozen=True)
class Meta:
    """A tensor as engines know it: checkpoint name, element type, full shape."""

    name: str
    dtype: str
    """safetensors name, for instance `BF16`."""
    shape: tuple[int, ...]
    section: str = "model"
    """Which of an engine's models it is for: `model`, or `draft` for the one that drafts tokens."""

    @property
    def bytes(self) -> int:
        """Length in bytes."""
        return byte_length(self.dtype, self.shape)

    @staticmethod
    def of(meta: Any) -> Meta:
        """From `(name, dtype, shape)`, or anything with these three attributes (vLLM's `ParamMeta`, a tensor's own types)."""
        if isinstance(meta, tuple) and len(meta) == 3 and not hasattr(meta, "dtype"):
            name, dtype, shape = meta
        else:
            try:
                name, dtype, shape = meta.name, meta.dtype, meta.shape
            except AttributeError:
                raise TypeError(f"{meta!r} is neither (name, dtype, shape) nor an object with these attributes") from None
        if not isinstance(name, str) or not name:
            raise TypeError(f"{name!r} is no name of a tensor")
        return Meta(name, dtype_name(dtype), tuple(map(int, shape)))


class Source(ABC):
    """Tensors of one version. Made by the functions of this package; every rank of a group has the same."""

    @abstractmethod
    def metas(self) -> list[Meta]:
        """All tensors in the order in which they come; the same at every call and on every rank."""

    def known(self) -> Iterable[Any] | None:
        """The tensors, where they are there before a pass; for their places only."""
        return None

    @abstractmethod
    def tensors(self, group: Group) -> Iterator[tuple[str, Any]]:
        """A fresh pass over all tensors, complete on rank 0. Each step may be a collective operation of the group."""


def checked_version(version: Any) -> int:
    """A version as an `int`: any whole number, of numpy too. Raises `ValueError` for anything else."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{version!r} is no version: a whole number that only grows is")
    return number


def metas_of(metas: Iterable[Any]) -> list[Meta]:
    """Checked metas; a name that comes twice is refused."""
    known = [Meta.of(meta) for meta in metas]
    names = {meta.name for meta in known}
    if len(names) != len(known):
        twice = sorted({meta.name for meta in known if sum(other.name == meta.name for other in known) > 1})
        raise ValueError(f"tensors appear twice: {', '.join(twice[:5])}")
    if not known:
        raise ValueError("a version needs at least one tensor")
    return known
