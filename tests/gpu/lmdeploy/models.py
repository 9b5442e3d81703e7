"""Random checkpoints made on a GPU: Qwen3 of any size, dense or with experts. Two seeds are two versions of one layout.

Equal sizes and seeds give equal tensors, on the same kind of GPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.engine.make_checkpoint import END, make_tokenizer

SHARD = 4 << 30


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int = 0
    expert_inner: int = 0


# 5.7 GB in bfloat16, and a small model with sixteen experts.
DENSE = Size(hidden=2560, layers=20, inner=9728, heads=32, kv_heads=8, vocab=151_936)
EXPERTS = Size(hidden=1024, layers=8, inner=3072, heads=16, kv_heads=4, vocab=32_000, experts=16, expert_inner=768)
SIZES = {"dense": DENSE, "experts": EXPERTS}


def config(size: Size) -> dict[str, object]:
    plain: dict[str, object] = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
    if not size.experts:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | plain
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.expert_inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    } | plain


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Names and shapes in checkpoint order."""
    hidden, head = size.hidden, 128
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size.vocab, hidden)}
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (size.heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": (size.kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": (size.kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, size.heads * head),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
        parts = [(f"{at}.mlp", size.inner)]
        if size.experts:
            found[f"{at}.mlp.gate.weight"] = (size.experts, hidden)
            parts = [(f"{at}.mlp.experts.{expert}", size.expert_inner) for expert in range(size.experts)]
        for part, inner in parts:
            found[f"{part}.gate_proj.weight"] = (inner, hidden)
            found[f"{part}.up_proj.weight"] = (inner, hidden)
            found[f"{part}.down_proj.weight"] = (hidden, inner)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (size.vocab, hidden)}


def tensors(size: Size, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Weights wide enough that the next token is no tie; norms near one."""
    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    for name, shape in shapes(size).items():
        values = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0.0, 0.05, generator=generator)
        made[name] = values + 1.0 if len(shape) == 1 else values
    return made


def write(out: Path, size: Size, seed: int, device: str = "cuda:0") -> Path:
    out.mkdir(parents=True)
    made = {name: tensor.cpu() for name, tensor in tensors(size, seed, device).items()}
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in made.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if used + bytes_ > SHARD and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += bytes_
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, out / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(config(size), indent=2))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}))
    tokenizer = make_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "model_max_length": 4096}
    (out / "tokenizer_config.json").write_text(json.dumps(about))
    return out


def cut(weights: dict[str, torch.Tensor], limit: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Tensors in buckets of at most `limit` bytes, in their order."""
    buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
    used = 0
    for name, tensor in weights.items():
        length = tensor.numel() * tensor.element_size()
        if buckets[-1] and used + length > limit:
            buckets.append([])
            used = 0
        buckets[-1].append((name, tensor))
        used += length
    return buckets


def main() -> None:
    """`OUT SIZE SEED...`: OUT/SIZE-SEED for each seed."""
    out, size, *seeds = sys.argv[1:]
    for seed in seeds:
        write(Path(out) / f"{size}-{seed}", SIZES[size], int(seed))


if __name__ == "__main__":
    main()
