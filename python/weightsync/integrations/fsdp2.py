"""A transformers model under FSDP2 (`fully_shard`), published under the names of its checkpoint.

    from weightsync.integrations import fsdp2
    publisher.publish(fsdp2.source(model, dtype=torch.bfloat16), version=step)

transformers 5 keeps the experts of a layer in one tensor (`mlp.experts.gate_up_proj`), checkpoints and engines know them one by one: they
are taken apart here. Shards are gathered one tensor at a time; on the host into memory that is allocated once. See
docs/integrations/fsdp2.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from .._dtypes import common_name, dtype_name
from .._group import Group
from .._scratch import Scratch
from .._source import Meta, Source, metas_of
from .._tensors import describe_named
from ..sources import module_tensors

Piece = tuple[str, Callable[[Any], Any]]
"""A checkpoint's name, and the view of the gathered tensor that goes there."""


def source(model: Any, dtype: Any = None, rename: Callable[[str], str | None] | None = None) -> Source:
    """All parameters and persistent buffers under checkpoint names, converted to `dtype` where they are floating-point and it is given.

    `rename` changes a checkpoint name at the end (a prefix of a wrapper, for instance), or drops the tensor with None. Works without FSDP2
    and in one process as well.
    """
    return _Export(model, dtype, rename)


class _Export(Source):
    def __init__(self, model: Any, dtype: Any, rename: Callable[[str], str | None] | None) -> None:
        self._model = model
        self._dtype = dtype_name(dtype) if dtype is not None else None
        self._rename = rename

    def metas(self) -> list[Meta]:
        import torch

        found = []
        for name, tensor in module_tensors(self._model).items():
            stored, shape = describe_named(name, tensor)
            # Shapes only: no memory is taken on this device.
            ghost = torch.empty(tuple(shape), device="meta")
            for piece, view in self._pieces(name, shape):
                found.append(Meta(piece, self._target(stored), tuple(view(ghost).shape)))
        return metas_of(found)

    def known(self) -> Iterable[Any]:
        return module_tensors(self._model).values()

    def tensors(self, group: Group) -> Iterator[tuple[str, Any]]:
        scratch = Scratch()
        for name, tensor in module_tensors(self._model).items():
            stored, shape = describe_named(name, tensor)
            pieces = self._pieces(name, shape)
            if not pieces:
                continue
            scratch.reset()
            if group.size == 1 and getattr(tensor, "device_mesh", None) is not None and tensor.device_mesh.size() > 1:
                raise TypeError(f"{name} is sharded over ranks: all of them must publish, with Publisher.from_env(group=...)")
            full = _gathered(_converted(tensor, stored, self._target(stored)), scratch)
            for piece, view in pieces:
                yield piece, view(full)
            del full

    def _target(self, stored: str) -> str:
        return self._dtype if self._dtype is not None and stored.startswith(("F", "BF")) else stored

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        pieces = []
        for piece, view in _split(name, shape):
            renamed = self._rename(piece) if self._rename is not None else piece
            if renamed is not None:
                pieces.append((renamed, view))
        return pieces


def _split(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    """The checkpoint's tensors in one of the model's (transformers 5.19: Mixtral and Qwen MoE layouts, gate before up)."""
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith(".experts") or len(shape) != 3 or last not in ("gate_up_proj", "down_proj"):
        yield name, _whole
        return
    rows = shape[1]
    for expert in range(shape[0]):
        if last == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", partial(_rows, expert, 0, rows)
            continue
        yield f"{prefix}.{expert}.gate_proj.weight", partial(_rows, expert, 0, rows // 2)
        yield f"{prefix}.{expert}.up_proj.weight", partial(_rows, expert, rows // 2, rows)


def _whole(full: Any) -> Any:
    return full


def _rows(expert: int, begin: int, end: int, full: Any) -> Any:
    return full[expert, begin:end]


def _converted(tensor: Any, stored: str, target: str) -> Any:
    """Before the gather: half the bytes for float32 to bfloat16."""
    if stored == target:
        return tensor
    import torch

    return tensor.detach().to(getattr(torch, common_name(target)))


def _gathered(tensor: Any, scratch: Scratch) -> Any:
    """The full tensor, on every rank; even shards of the first dimension go into memory that is kept."""
    tensor = tensor.detach()
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    from torch import distributed as dist

    placements = tensor.placements
    rows = tensor.shape[0] if tensor.dim() else 0
    even = mesh.ndim == 1 and placements[0].is_shard(0) and rows and rows % mesh.size() == 0
    local = tensor.to_local()
    if not even or local.device.type != "cpu":
        return tensor.full_tensor()
    full = scratch.take(tensor.dtype, tuple(tensor.shape), local.device)
    dist.all_gather_into_tensor(full, local.contiguous(), group=mesh.get_group())
    return full
