"""A Megatron-Core GPT model, from what each rank holds of it to a checkpoint's names: tensor, pipeline and expert parallel.

    from weightsync.integrations import megatron
    source = megatron.source(shape, place, lambda: dict(model.named_parameters()), dtype=torch.bfloat16)
    publisher.publish(source, version=step)                   # on every rank, with Publisher.from_env(group=...)

No rank gathers anything before: each says where its part lies in the checkpoint's tensor (rows of q, k and v within the fused qkv, halves
of a gated layer, its own experts), and rank 0 gets every place once, one tensor at a time, into memory that is kept. See
docs/integrations/megatron.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .._source import Source
from ..sources import sharded

Part = tuple[str, Any, tuple[int, ...]]
"""A checkpoint's name, a view of this rank's tensor, and the index of its first element in the full one."""


@dataclass(frozen=True)
class Shape:
    """The whole model, in Megatron-Core's words (`TransformerConfig`)."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    """Without the padding that Megatron adds."""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    num_moe_experts: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_hidden_size: int = 0
    moe_layers: tuple[int, ...] | None = None
    """Layers with experts; all of them when not given."""

    def has_experts(self, layer: int) -> bool:
        """Whether that layer has experts."""
        return self.num_moe_experts > 0 and (self.moe_layers is None or layer in self.moe_layers)


@dataclass(frozen=True)
class Place:
    """Where a rank stands (`megatron.core.parallel_state`)."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1
    first_layer: int = 0
    """Number of the first layer of its pipeline stage."""


def source(shape: Shape, place: Place, parameters: Callable[[], Mapping[str, Any]], dtype: Any) -> Source:
    """What every rank publishes alike; `parameters` gives this rank's own (`dict(model.named_parameters())`), of type `dtype`."""
    return sharded(lambda: parts(shape, place, parameters()), [(name, dtype, full) for name, full in tensors(shape)])


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and full shapes of the checkpoint (those of Llama, Qwen2, Qwen3 and Qwen3-MoE), in order."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query, keys = heads * shape.kv_channels, shape.num_query_groups * shape.kv_channels
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        for name, rows in (("q", query), ("k", keys), ("v", keys)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, hidden)
            if shape.qkv_bias:
                yield f"{at}.self_attn.{name}_proj.bias", (rows,)
        if shape.qk_norm:
            yield f"{at}.self_attn.q_norm.weight", (shape.kv_channels,)
            yield f"{at}.self_attn.k_norm.weight", (shape.kv_channels,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, query)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        if not shape.has_experts(layer):
            yield from _gated(f"{at}.mlp", shape.ffn_hidden_size, hidden)
            continue
        yield f"{at}.mlp.gate.weight", (shape.num_moe_experts, hidden)
        for expert in range(shape.num_moe_experts):
            yield from _gated(f"{at}.mlp.experts.{expert}", shape.moe_ffn_hidden_size, hidden)
        if shape.shared_expert_hidden_size:
            yield from _gated(f"{at}.mlp.shared_expert", shape.shared_expert_hidden_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def parts(shape: Shape, place: Place, parameters: Mapping[str, Any]) -> Iterator[Part]:
    """What a rank holds, in the order of `tensors`. Raises ValueError for a parameter that it does not know: nothing is left out."""
    found: dict[str, list[Part]] = {}
    for name, tensor in parameters.items():
        for part in _parts_of(shape, place, _plain(name), tensor.detach()):
            found.setdefault(part[0], []).append(part)
    for name, _ in tensors(shape):
        yield from found.pop(name, ())
    if found:
        raise ValueError(f"parts of tensors that the shape does not have: {', '.join(sorted(found)[:5])}")


def _gated(at: str, ffn: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (ffn, hidden)
    yield f"{at}.up_proj.weight", (ffn, hidden)
    yield f"{at}.down_proj.weight", (hidden, ffn)


def _plain(name: str) -> str:
    """Without what wrappers put in front (DDP, Float16Module)."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _parts_of(shape: Shape, place: Place, name: str, tensor: Any) -> Iterator[Part]:
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name == "output_layer.weight" and shape.tied_embeddings:
            return
        target = "model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"
        start = place.tensor_rank * tensor.shape[0]
        # The padding of the vocabulary is Megatron's own.
        rows = max(0, min(tensor.shape[0], shape.vocab_size - start))
        if rows:
            yield target, tensor[:rows], (start, 0)
        return
    if name == "decoder.final_layernorm.weight":
        yield "model.norm.weight", tensor, (0,)
        return
    head, _, rest = name.removeprefix("decoder.layers.").partition(".")
    if not name.startswith("decoder.layers.") or not head.isdigit():
        raise ValueError(f"{name} is no parameter of a GPT model that this export knows")
    layer = place.first_layer + int(head)
    yield from _layer(shape, place, f"model.layers.{layer}", name, rest, tensor)


_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""By themselves, or within the following linear layer (Transformer Engine)."""


def _layer(shape: Shape, place: Place, at: str, name: str, rest: str, tensor: Any) -> Iterator[Part]:
    if rest in _NORMS:
        yield f"{at}.{_NORMS[rest]}", tensor, (0,)
    elif rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        yield from _qkv(shape, place, f"{at}.self_attn", rest.rpartition(".")[2], tensor)
    elif rest == "self_attention.linear_proj.weight":
        yield f"{at}.self_attn.o_proj.weight", tensor, (0, place.tensor_rank * tensor.shape[1])
    elif rest == "mlp.router.weight":
        yield f"{at}.mlp.gate.weight", tensor, (0, 0)
    elif rest.startswith("mlp.experts."):
        yield from _experts(shape, place, f"{at}.mlp.experts", name, rest.removeprefix("mlp.experts."), tensor)
    elif rest.startswith("mlp.shared_experts.linear_fc"):
        yield from _linear(f"{at}.mlp.shared_expert", rest.rpartition("linear_")[2], tensor, place.tensor_rank, name)
    elif rest.startswith("mlp.linear_fc"):
        yield from _linear(f"{at}.mlp", rest.rpartition("linear_")[2], tensor, place.tensor_rank, name)
    else:
        raise ValueError(f"{name} is no parameter of a GPT model that this export knows")


def _qkv(shape: Shape, place: Place, at: str, kind: str, tensor: Any) -> Iterator[Part]:
    """Megatron keeps, for each query group, the rows of its queries, then of its key, then of its value."""
    groups = shape.num_query_groups // place.tensor_size
    queries, channels = shape.num_attention_heads // shape.num_query_groups, shape.kv_channels
    if groups * place.tensor_size != shape.num_query_groups:
        raise ValueError(f"{shape.num_query_groups} query groups over {place.tensor_size} tensor parallel ranks: not known here")
    each = tensor.reshape(groups, queries + 2, channels, *tensor.shape[1:])
    first = place.tensor_rank * groups
    rest = (0,) * (tensor.dim() - 1)
    for letter, heads, rows in (("q", slice(0, queries), queries), ("k", slice(-2, -1), 1), ("v", slice(-1, None), 1)):
        mine = each[:, heads].reshape(groups * rows * channels, *tensor.shape[1:])
        yield f"{at}.{letter}_proj.{kind}", mine, (first * rows * channels, *rest)


def _experts(shape: Shape, place: Place, at: str, name: str, rest: str, tensor: Any) -> Iterator[Part]:
    """One by one (`local_experts.3.linear_fc1.weight`), or grouped (`linear_fc1.weight3`); numbers are this rank's own."""
    first = place.expert_rank * (shape.num_moe_experts // place.expert_size)
    if rest.startswith("local_experts."):
        number, _, linear = rest.removeprefix("local_experts.").partition(".")
        linear = linear.removeprefix("linear_")
    else:
        linear, _, number = rest.removeprefix("linear_").partition(".weight")
        linear += ".weight"
    if not number.isdigit():
        raise ValueError(f"{name} holds experts in a way that this export does not know")
    yield from _linear(f"{at}.{first + int(number)}", linear, tensor, place.expert_tensor_rank, name)


def _linear(at: str, linear: str, tensor: Any, rank: int, name: str) -> Iterator[Part]:
    """A gated layer: of each rank first its rows of the gate, then its rows of what is gated; and the way back."""
    if linear == "fc1.weight":
        half = tensor.shape[0] // 2
        yield f"{at}.gate_proj.weight", tensor[:half], (rank * half, 0)
        yield f"{at}.up_proj.weight", tensor[half:], (rank * half, 0)
    elif linear == "fc2.weight":
        yield f"{at}.down_proj.weight", tensor, (0, rank * tensor.shape[1])
    else:
        raise ValueError(f"{name} is no parameter of a gated layer without bias")
