"""Log-probs of fresh vLLM engines, each in a process of its own: what every saved version must give."""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from typing import Any

from vllm import LLM, SamplingParams
from watch import PROBE


def logprobs(folder: str) -> list[float]:
    """The log-probs that a new engine gives to the tokens of PROBE after it loaded this checkpoint."""
    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        max_model_len=64,
        max_num_seqs=32,
        num_gpu_blocks_override=256,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt: Any = engine.generate([{"prompt_token_ids": PROBE}], sampling, use_tqdm=False)[0].prompt_logprobs
    return [position[token].logprob for token, position in zip(PROBE[1:], prompt[1:], strict=True)]


if __name__ == "__main__":
    # Processes are copies of this one, so vLLM is imported once. What it imported is no garbage to search.
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as processes:
        for folder, result in zip(sys.argv[1:], processes.imap(logprobs, sys.argv[1:], chunksize=1), strict=True):
            print(json.dumps({"folder": folder, "logprobs": result}), flush=True)
