#!/usr/bin/env python3
"""Make a small Qwen3 checkpoint with random weights: config, tokenizer and safetensors, from nothing but its arguments.

Equal arguments give equal files. Two seeds give two versions of one layout: the same config, tokenizer, tensor names,
shapes and dtypes, and other weights, so their completions differ.

    make_checkpoint.py OUT --seed 1
    make_checkpoint.py OUT --seed 1 2 3        # OUT/1, OUT/2, OUT/3
    make_checkpoint.py OUT --seed 1 --layers 8 --hidden 1024 --intermediate 4096 --vocab 32000 --shards 4
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
CORPUS = ["The quick brown fox jumps over the lazy dog, and the trainer sends its weights to every rollout."]


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: it reads any text, and its few merges are always the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_config(args: argparse.Namespace) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
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
        "dtype": "bfloat16",
    }


def tensor_shapes(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """The names and shapes of Qwen3ForCausalLM's state dict, in checkpoint order."""
    hidden, inner, head = args.hidden, args.intermediate, 128
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (args.vocab, hidden)}
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (args.heads * head, hidden),
            f"{prefix}.self_attn.k_proj.weight": (args.kv_heads * head, hidden),
            f"{prefix}.self_attn.v_proj.weight": (args.kv_heads * head, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, args.heads * head),
            f"{prefix}.self_attn.q_norm.weight": (head,),
            f"{prefix}.self_attn.k_norm.weight": (head,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (args.vocab, hidden)}
    return shapes


def make_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Normal weights wide enough (0.08) that the model's next token is not a tie; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.empty(shape).normal_(0.0, 0.08, generator=generator)
        tensors[name] = (values + 1.0 if len(shape) == 1 else values).to(torch.bfloat16)
    return tensors


def write_weights(out: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata)
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i * shards // len(tensors)] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, out / file, metadata)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def make_checkpoint(out: Path, seed: int, args: argparse.Namespace) -> None:
    """Write into a neighbouring folder and rename it, so that OUT is never half a checkpoint."""
    part = out.with_name(f".{out.name}.{os.getpid()}")
    part.mkdir(parents=True)
    try:
        (part / "config.json").write_text(json.dumps(make_config(args), indent=2))
        generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        (part / "generation_config.json").write_text(json.dumps(generation))
        make_tokenizer().save(str(part / "tokenizer.json"))
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
        (part / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": 512}))
        write_weights(part, make_tensors(tensor_shapes(args), seed), args.shards)
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, which an engine under another user cannot read
        if out.exists():
            shutil.rmtree(out)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the checkpoint's folder; replaced if it exists")
    parser.add_argument("--seed", type=int, nargs="+", required=True, help="several seeds make a folder each, named by the seed")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=320, help="rows of the embedding; the tokenizer uses fewer")
    parser.add_argument("--shards", type=int, default=1, help="files to spread the tensors over")
    args = parser.parse_args()
    out = args.out.resolve()
    for seed in args.seed:
        make_checkpoint(out if len(args.seed) == 1 else out / str(seed), seed, args)


if __name__ == "__main__":
    main()
