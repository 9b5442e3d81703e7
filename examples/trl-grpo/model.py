"""A small random Qwen3 whose tokens are single characters."""

from __future__ import annotations

import string
from pathlib import Path

import tokenizers
import torch
import transformers

CHARACTERS = string.printable[:95]
END = "<end>"


def make(folder: Path) -> None:
    """Writes a checkpoint with a tokenizer: half a million weights in float32."""
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=len(CHARACTERS),
        pad_token_id=len(CHARACTERS),
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokens = {character: number for number, character in enumerate([*CHARACTERS, END])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(folder)
