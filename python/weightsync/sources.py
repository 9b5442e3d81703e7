"""What can be published: state dicts, modules, FSDP2 models, parts that ranks hold, streams, and vLLM's `WeightSource`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ._dtypes import common_name, dtype_name
from ._group import Group
from ._source import Meta, Source, metas_of
from ._tensors import describe, describe_named

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile and activation checkpointing put in; no engine knows them."""

_WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"})
"""Modules whose `module` is the model: a part of a name that is of a wrapper only there."""


KEPT_IN_FLOAT32 = ("*.e_score_correction_bias", "*.expert_bias", "*.moe_statics.*")
"""Biases of routers: rounded ones choose other experts. Checkpoints and engines have them in float32."""


def state_dict(tensors: Mapping[str, Any]) -> Source:
    """Tensors by name: torch, numpy, or buffers. DTensors are gathered when the publisher has a group."""
    return _Named(lambda: tensors, None)


def module(model: Any, dtype: Any = None, keep: Iterable[str] | None = None) -> Source:
    """All parameters and persistent buffers of a torch module, converted to `dtype` where they are floating-point and it is given.

    `keep` names tensors that keep their own type, such as `["*.router.weight"]`; `*` stands for any characters. Without it these are
    `KEPT_IN_FLOAT32`, and what a model of transformers keeps in float32 itself when it is loaded in `dtype`. `keep=()` converts all.

    A parameter that has several names (tied embeddings) is published once, under its first: so do checkpoints, and engines tie it again.
    """
    return _Named(lambda: module_tensors(model), dtype, _kept(model, dtype) if keep is None else _matching(keep))


def module_tensors(model: Any) -> Mapping[str, Any]:
    """The tensors of a module as `module` publishes them: cleaned names, tied ones once."""
    _refuse_fsdp1(model)
    return _clean(_untied(model), _wrapped(model))


def fsdp2(model: Any, dtype: Any = None, keep: Iterable[str] | None = None) -> Source:
    """A model that `torch.distributed.fsdp.fully_shard` was applied to: each tensor is converted, then gathered, one at a time.

    Every rank calls publish with it; the gathered tensor lives on each rank until the next one. `dtype` and `keep` are those of `module`.
    """
    return module(model, dtype, keep)


def stream(factory: Callable[[], Iterable[tuple[str, Any]]], metas: Iterable[Any]) -> Source:
    """A function that makes a generator of `(name, tensor)`, with the `(name, dtype, shape)` of all of them in the same order.

    A function, not a generator: when a replica dies while it is sent, the version is read again from its first tensor. In a group
    every rank runs the generator in step; what rank 0 gets is published.
    """
    _refuse_iterator(factory, "stream")
    return _Stream(factory, metas_of(metas))


def sharded(factory: Callable[[], Iterable[Any]], specs: Iterable[Any]) -> Source:
    """Parts that ranks hold, as tensor, pipeline or expert parallel trainers have them.

    `specs` are `(name, dtype, full shape)` of all tensors. On each rank `factory()` gives that rank's parts as `(name, tensor, start)`,
    in the order of `specs`: `start` is the index of the part's first element in the full tensor. A rank may hold several parts of a
    tensor, or none. Equal parts of several ranks (data parallelism) are taken once; together they must cover the tensor.
    """
    from ._sharded import Sharded

    _refuse_iterator(factory, "sharded")
    return Sharded(factory, metas_of(specs))


def with_draft(model: Any, draft: Any) -> Source:
    """A model, and the model that drafts tokens for it in the engine (EAGLE, MTP, a small one), as one version.

    Both are whatever `publish` takes. `draft` has the names that the draft model's own checkpoint has. A version is served when an engine
    took every tensor of both; an engine that cannot take both is named, with what would help.
    """
    return _WithDraft(as_source(model), as_source(draft))


def as_source(what: Any) -> Source:
    """A source, a mapping, a torch module, or vLLM's `WeightSource`.

    That has `metadata()` and can be iterated again (0.32), or it has a property `metadata` and `iter_full()` (0.33).
    """
    if isinstance(what, Source):
        return what
    if isinstance(what, Mapping):
        return state_dict(what)
    if isinstance(what, Iterator):
        raise TypeError(
            f"a {type(what).__name__} can be read once only, and a version may have to be sent again: "
            "use weightsync.stream(factory, metas) with the function that makes it"
        )
    # In this order: reading 0.33's property computes the list.
    if hasattr(what, "iter_full") and hasattr(type(what), "metadata"):
        return _weight_source(what)
    if callable(getattr(what, "metadata", None)) and hasattr(what, "__iter__"):
        return _Metadata(what)
    if callable(getattr(what, "state_dict", None)):
        return module(what)
    raise TypeError(f"{type(what).__name__} cannot be published: see weightsync.state_dict, module, fsdp2, sharded and stream")


class _Named(Source):
    """Tensors by name; DTensors are made full one at a time."""

    def __init__(self, tensors: Callable[[], Mapping[str, Any]], dtype: Any, keeps: re.Pattern[str] | None = None) -> None:
        self._tensors = tensors
        self._dtype = dtype_name(dtype) if dtype is not None else None
        self._keeps = keeps

    def metas(self) -> list[Meta]:
        listed = ((name, *describe_named(name, tensor)) for name, tensor in self._items())
        return metas_of((name, self._target(name, dtype) or dtype, shape) for name, dtype, shape in listed)

    def known(self) -> Iterable[Any]:
        return (tensor for _, tensor in self._items())

    def tensors(self, group: Group) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._items():
            target = self._dtype and self._target(name, describe_named(name, tensor)[0])
            if target is not None:
                # Before the gather: half the bytes for float32 to bfloat16.
                tensor = _convert(tensor, target)
            full = getattr(tensor, "full_tensor", None)
            if full is not None:
                if group.size == 1 and tensor.device_mesh.size() > 1:
                    raise TypeError(f"{name} is sharded over ranks: all of them must publish, with Publisher.from_env(group=...)")
                tensor = tensor.detach().full_tensor()
            yield name, tensor

    def _items(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._tensors().items():
            if isinstance(tensor, Mapping):
                raise TypeError(f"{name} is a {type(tensor).__name__}: a state dict of tensors is needed, not one of state dicts")
            yield name, tensor

    def _target(self, name: str, dtype: str) -> str | None:
        """The type to convert to; integers, booleans and what is kept stay what they are."""
        kept = self._keeps is not None and self._keeps.search(name)
        return self._dtype if dtype.startswith(("F", "BF")) and not kept else None


class _Stream(Source):
    def __init__(self, factory: Callable[[], Iterable[tuple[str, Any]]], metas: list[Meta]) -> None:
        self._factory = factory
        self._metas = metas

    def metas(self) -> list[Meta]:
        return self._metas

    def tensors(self, group: Group) -> Iterator[tuple[str, Any]]:
        return iter(self._factory())


class _Metadata(Source):
    """vLLM's `vllm.distributed.weight_transfer.base.WeightSource`, by its shape: vLLM need not be there.

    Until 0.32 every rank yields every tensor. From 0.33 on a rank yields those that it owns (`ParamMeta.owners`, None for all ranks).
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def metas(self) -> list[Meta]:
        return metas_of(self._listed())

    def tensors(self, group: Group) -> Iterator[tuple[str, Any]]:
        owners = [getattr(meta, "owners", None) for meta in self._listed()]
        everyone = set(range(group.size))
        if all(ranks is None or everyone <= set(ranks) for ranks in owners):
            return iter(self._pass())
        from ._sharded import Sharded

        # Parts that are whole tensors, of the ranks that own them.
        return Sharded(self._pass, self.metas()).tensors(group)

    def _listed(self) -> Any:
        metadata = self._source.metadata
        return metadata() if callable(metadata) else metadata

    def _pass(self) -> Iterable[tuple[str, Any]]:
        iter_full = getattr(self._source, "iter_full", None)
        whole: Iterable[tuple[str, Any]] = self._source if iter_full is None else iter_full()
        return whole


def _weight_source(what: Any) -> Source:
    implemented = getattr(what, "implements_iter_full", None)
    if implemented is not None and not implemented():
        raise TypeError(f"{type(what).__name__} has iter_local() alone: implement iter_full(), or use weightsync.sharded")
    return _Metadata(what)


class _WithDraft(Source):
    def __init__(self, model: Source, draft: Source) -> None:
        self._model = model
        self._draft = draft

    def metas(self) -> list[Meta]:
        return [*self._model.metas(), *(replace(meta, section="draft") for meta in self._draft.metas())]

    def known(self) -> Iterable[Any] | None:
        model, draft = self._model.known(), self._draft.known()
        return None if model is None or draft is None else (*model, *draft)

    def tensors(self, group: Group) -> Iterator[tuple[str, Any]]:
        yield from self._model.tensors(group)
        yield from self._draft.tensors(group)


def _matching(patterns: Iterable[str], parts: Iterable[str] = ()) -> re.Pattern[str] | None:
    """Finds names that a pattern matches as a whole, or that have one of these parts between dots; None for no name at all."""
    if isinstance(patterns, str):
        raise TypeError(f"keep takes a list of patterns, not one text: keep=[{patterns!r}]")
    whole = [rf"^{re.escape(pattern).replace(re.escape('*'), '.*')}$" for pattern in patterns]
    between = [rf"(?:^|\.){re.escape(part)}(?:\.|$)" for part in parts]
    return re.compile("|".join([*whole, *between])) if whole or between else None


def _kept(model: Any, dtype: Any) -> re.Pattern[str] | None:
    """What keeps float32 by default: transformers has two lists for that (`_dtype_plan`), one of which counts for float16 alone."""
    lists = {"BF16": ["_keep_in_fp32_modules_strict"], "F16": ["_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"]}
    counted = lists.get(dtype_name(dtype), []) if dtype is not None else []
    modules = getattr(model, "modules", None)
    every = list(modules()) if counted and callable(modules) else []
    parts = {part for each in every for name in counted for part in getattr(each, name, None) or ()}
    return _matching(KEPT_IN_FLOAT32, sorted(parts)) if counted else None


def _convert(tensor: Any, dtype: str) -> Any:
    if describe(tensor)[0] == dtype:
        return tensor
    if hasattr(tensor, "detach"):
        import torch

        return tensor.detach().to(getattr(torch, common_name(dtype)))
    return tensor.astype(common_name(dtype))


def _untied(model: Any) -> dict[str, Any]:
    """The state dict without the later names of a parameter that has several."""
    seen: set[int] = set()
    again: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            again.add(name)
        seen.add(id(parameter))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}


def _wrapped(model: Any) -> set[tuple[str, ...]]:
    """The places of wrapped modules, in names without the parts that only wrappers have: wrappers contain each other in any order."""
    wrappers = ((name, part) for name, part in model.named_modules(remove_duplicate=False))
    return {
        (*_without_wrapper_names(name), "module")
        for name, part in wrappers
        if any(base.__name__ in _WRAPPER_CLASSES for base in type(part).__mro__)
    }


def _without_wrapper_names(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part and part not in _WRAPPER_NAMES)


def _clean(tensors: Mapping[str, Any], wrapped: set[tuple[str, ...]]) -> dict[str, Any]:
    cleaned: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = _without_wrapper_names(name)
        plain = ".".join(part for at, part in enumerate(parts) if parts[: at + 1] not in wrapped)
        if plain in cleaned:
            raise ValueError(f"{plain} appears twice once the names of wrappers are removed: publish a state dict with names of your own")
        cleaned[plain] = tensor
    return cleaned


def _refuse_fsdp1(model: Any) -> None:
    modules = getattr(model, "modules", None)
    if modules is not None and any(type(part).__name__ == "FullyShardedDataParallel" for part in modules()):
        raise TypeError("FSDP1 gathers the whole model at once: use fully_shard (FSDP2), or weightsync.stream with your own export")


def _refuse_iterator(factory: Any, name: str) -> None:
    if isinstance(factory, Iterator) or inspect.isgenerator(factory):
        raise TypeError(f"weightsync.{name} takes the function that makes the generator, not the generator: it may be read again")
    if not callable(factory):
        raise TypeError(f"weightsync.{name} takes a function that gives tensors, not a {type(factory).__name__}")
