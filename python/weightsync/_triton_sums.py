"""gsum64 of many parts of a GPU's memory in one launch, for workers that have Triton (vLLM on CUDA brings it).

The same sums as `_gpu_feed.gsum64`, which takes ten launches and nineteen times the traffic for each part. Decides nothing about what a sum
means. Not imported where there is no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Words that a program takes at once."""

MOST_PROGRAMS = 528
"""Programs of one part, four a multiprocessor of an H100: each continues after the others until the part is done."""


@triton.jit  # type: ignore[untyped-decorator]
def _sums(words, firsts, lengths, sums, SPREAD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.program_id(0)
    first = tl.load(firsts + part)
    length = tl.load(lengths + part)
    whole = length // 8
    count = (length + 7) // 8
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    while at < count:
        index = at + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(words + first + index, mask=index < count, other=0)
        # What follows a part inside its last word is not its own.
        kept = ((index * 0 + 1) << ((length % 8) * 8)) - 1
        word = tl.where(index < whole, word, word & kept)
        x = word ^ ((index + 1) * SPREAD)
        mixed = (x & 0xFFFFFFFF) * ((x >> 32) & 0xFFFFFFFF) + x
        total += tl.where(index < count, mixed, 0)
        at += step
    tl.atomic_add(sums + part, tl.sum(total, axis=0))


def sums(data: Any, parts: Sequence[tuple[int, int]], spread: int) -> Any:
    """The sums of some parts of a contiguous tensor of bytes, by first byte (a multiple of 8) and length: 64-bit integers on its device.

    The tensor's memory must be readable to the end of the last word of each part; torch's allocator sees to that.
    """
    firsts = torch.tensor([offset // 8 for offset, _ in parts], dtype=torch.int64, device=data.device)
    lengths = torch.tensor([length for _, length in parts], dtype=torch.int64, device=data.device)
    found = torch.zeros(len(parts), dtype=torch.int64, device=data.device)
    longest = max(length for _, length in parts)
    programs = max(1, min(MOST_PROGRAMS, triton.cdiv(longest, 8 * BLOCK)))
    # A length that is no multiple of 8 cannot be viewed as words; the pointer is all that is used.
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    _sums[(len(parts), programs)](words, firsts, lengths, found, SPREAD=spread, BLOCK=BLOCK)
    return found
