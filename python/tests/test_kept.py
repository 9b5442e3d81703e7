"""Which tensors of a module keep their type when the others are converted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import weightsync
from weightsync._group import Alone


class Router(torch.nn.Module):
    """As DeepSeek V3 has it: the bias is a buffer in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 2))
        self.register_buffer("e_score_correction_bias", torch.full((4,), 1.001))


class Layer(torch.nn.Module):
    """A layer with a router, a norm and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.norm = torch.nn.LayerNorm(2, bias=False)
        self.k_norm = torch.nn.LayerNorm(2, bias=False)
        self.register_buffer("tokens", torch.zeros(4, dtype=torch.int64))


class Strict(Layer):
    """A model that keeps more in float32, by the lists of transformers."""

    _keep_in_fp32_modules_strict = frozenset({"norm"})
    _keep_in_fp32_modules = ("gate.weight",)


def types(model: torch.nn.Module, dtype: Any, keep: Iterable[str] | None = None) -> dict[str, str]:
    """The types that are published, by the list and by the tensors themselves."""
    source = weightsync.module(model, dtype=dtype, keep=keep)
    listed = {meta.name: meta.dtype for meta in source.metas()}
    sent = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in source.tensors(Alone())}
    short = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64"}
    assert {name: short[dtype] for name, dtype in listed.items()} == sent
    return {name: dtype for name, dtype in listed.items() if dtype in ("F32", "I64")}


BIAS = "gate.e_score_correction_bias"


def test_bias_of_a_router_stays_in_float32() -> None:
    assert types(Layer(), torch.bfloat16) == {BIAS: "F32", "tokens": "I64"}
    assert types(torch.nn.ModuleDict({"model": Layer()}), torch.bfloat16) == {f"model.{BIAS}": "F32", "model.tokens": "I64"}
    sent = dict(weightsync.fsdp2(Layer(), dtype=torch.bfloat16).tensors(Alone()))
    assert torch.equal(sent[BIAS], torch.full((4,), 1.001))


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, {"norm.weight"}), (torch.float16, {"norm.weight", "gate.weight"})])
def test_lists_of_transformers_count_as_they_do_there(dtype: torch.dtype, kept: set[str]) -> None:
    assert set(types(Strict(), dtype)) == {BIAS, "tokens", *kept}
    assert set(types(torch.compile(torch.nn.Sequential(Strict())), dtype)) == {f"0.{name}" for name in (BIAS, "tokens", *kept)}


def test_types_are_those_that_transformers_loads(tmp_path: Path) -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "vocab_size": 32}
    config = transformers.DeepseekV3Config(**size, **heads, **experts, qk_nope_head_dim=4, v_head_dim=4)
    model = transformers.DeepseekV3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    loaded = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    floats = {name: tensor.dtype == torch.float32 for name, tensor in loaded.state_dict().items()}
    listed = {meta.name: meta.dtype == "F32" for meta in weightsync.module(model, dtype=torch.bfloat16).metas()}
    assert any(floats.values())
    assert listed == floats


def test_own_patterns_replace_the_default() -> None:
    assert set(types(Strict(), torch.bfloat16, keep=())) == {"tokens"}
    assert set(types(Strict(), torch.bfloat16, keep=["*norm.weight"])) == {"norm.weight", "k_norm.weight", "tokens"}
    assert set(types(Strict(), torch.bfloat16, keep=[*weightsync.KEPT_IN_FLOAT32, "norm.*"])) == {BIAS, "norm.weight", "tokens"}
    assert set(types(Strict(), torch.bfloat16, keep=["norm"])) == {"tokens"}, "a pattern matches whole names"
    with pytest.raises(TypeError, match="a list of patterns"):
        weightsync.module(Layer(), dtype=torch.bfloat16, keep="norm.*")


def test_module_without_dtype_is_published_as_it_is() -> None:
    model = Layer().to(torch.bfloat16)
    assert {meta.dtype for meta in weightsync.module(model).metas()} == {"BF16", "I64"}
    assert set(types(Layer(), torch.float32)) >= {BIAS, "norm.weight"}
