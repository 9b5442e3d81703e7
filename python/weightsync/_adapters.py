"""A PEFT model as the weights that an engine loads: base plus adapters, computed apart from the model.

PEFT's own `merge_adapter` adds a delta to the trainer's parameters, and `unmerge_adapter` subtracts it. In bfloat16 the two round
differently, so the frozen base drifts with each pass (huggingface/trl#6688). Here a layer is copied in float32, PEFT merges the copy, and
the copy is dropped: one layer at a time, on the layer's own device. Nothing here writes into a tensor of the model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from ._source import Meta, Source
from ._tensors import describe_named
from .sources import stream

_LOG = logging.getLogger("weightsync")


def is_adapted(model: Any) -> bool:
    """Whether PEFT put adapters into a model."""
    return hasattr(model, "merge_adapter") and hasattr(model, "prefix")


def merged(model: Any) -> Source:
    """A PEFT model under the names of its base model. Raises `TypeError` for sharded and for quantised base weights."""
    parts = _parts(model)
    metas = [Meta(part.published, *describe_named(part.published, part.parameter)) for part in parts]
    return stream(lambda: _tensors(_parts(model)), metas)


class _Part:
    """A parameter that is published, and the layers with adapters whose deltas it gets: more than one where layers are tied."""

    def __init__(self, published: str, parameter: Any) -> None:
        self.published = published
        self.parameter = parameter
        self.layers: list[tuple[str, Any]] = []
        """Each with the parameter's name within the layer."""


def _parts(model: Any) -> list[_Part]:
    parts: dict[int, _Part] = {}
    for layer, name, inner, parameter in _walk(model):
        if _is_adapter(model, name) or _is_left_out(model, name):
            continue
        # DTensors, and parts of DeepSpeed's ZeRO-3.
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id"):
            raise TypeError(f"{name} is sharded: publish from weightsync.stream with your own export, which merges the adapters")
        if layer is not None and not parameter.is_floating_point():
            raise TypeError(f"{name} is quantised ({parameter.dtype}), so no adapter can be merged into it: publish from weightsync.stream")
        part = parts.setdefault(id(parameter), _Part(_published(name), parameter))
        if layer is not None:
            part.layers.append((inner, layer))
    return list(parts.values())


def _walk(model: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Each parameter as `(outermost layer with adapters or None, name, name within that layer, parameter)`.

    A tied parameter comes once for each name.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BaseTunerLayer) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = module
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.split(".")
        outer = next((".".join(path[:end]) for end in range(1, len(path)) if ".".join(path[:end]) in layers), None)
        yield (None, name, name, parameter) if outer is None else (layers[outer], name, name[len(outer) + 1 :], parameter)


def _is_adapter(model: Any, name: str) -> bool:
    return model.prefix in name or "trainable_tokens_" in name


def _is_left_out(model: Any, name: str) -> bool:
    """Whether a parameter is what PEFT keeps aside: originals of modules that are trained whole, and other adapters of such modules."""
    if ".original_module." in name:
        return True
    if ".modules_to_save." not in name:
        return False
    return name.split(".modules_to_save.")[1].split(".")[0] not in model.active_adapters


def _published(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".token_adapter", "")
    head, _, rest = name.partition(".modules_to_save.")
    return f"{head}.{rest.partition('.')[2]}" if rest else name


def _tensors(parts: list[_Part]) -> Iterator[tuple[str, Any]]:
    # The layer of the tensor before: a layer is merged once for all of its parameters, weight and bias.
    last: tuple[Any, Any] = (None, None)
    for part in parts:
        value = part.parameter.detach()
        if len(part.layers) == 1:
            ((inner, layer),) = part.layers
            if last[0] is not layer:
                last = (layer, _merge(layer, inner, value))
            value = last[1].get_parameter(inner).detach()
        elif part.layers:
            _LOG.debug("%s is tied: it gets the adapters of %d layers, as in PEFT's own merge", part.published, len(part.layers))
            for inner, layer in part.layers:
                value = _merge(layer, inner, value).get_parameter(inner).detach()
        yield part.published, value.to(part.parameter.dtype)


def _merge(layer: Any, inner: str, value: Any) -> Any:
    """A float32 copy of the layer after PEFT's merge, which found `value` in its parameter `inner`."""
    import torch

    with torch.no_grad():
        apart = _apart(layer, inner, value)
        if not apart.merged:
            apart.merge()
        return apart


def _apart(module: Any, inner: str, value: Any) -> Any:
    """A copy of a module, in float32, that shares no tensor or list with it and has no hooks. Its parameter `inner` is `value`."""
    from torch.nn import Parameter

    def float32(tensor: Any) -> Any:
        own = tensor.detach().clone()
        return own.float() if own.is_floating_point() else own

    apart = copy.copy(module)
    for name, held in vars(module).items():
        if isinstance(held, (list, dict, set)):
            apart.__dict__[name] = copy.copy(held)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        apart.__dict__[hooks] = type(getattr(module, hooks))()
    for name, parameter in module._parameters.items():
        if parameter is not None:
            own = float32(value if name == inner else parameter)
            apart._parameters[name] = Parameter(own, requires_grad=False) if own.is_floating_point() else own
    for name, buffer in module._buffers.items():
        apart._buffers[name] = None if buffer is None else float32(buffer)
    head, _, rest = inner.partition(".")
    for name, child in module._modules.items():
        if child is not None:
            apart._modules[name] = _apart(child, rest if name == head else "", value)
    return apart
