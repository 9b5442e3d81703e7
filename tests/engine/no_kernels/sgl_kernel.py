"""Names of kernels that SGLang 0.5.23 imports on every CPU, and calls only with a draft model. Nothing is computed here: a call fails.

The package on PyPI holds kernels for CUDA alone. On a processor without AMX, SGLang computes with torch and needs none of its own.
"""

from __future__ import annotations

from typing import NoReturn

NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(name)

    def absent(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"the kernel {name} is not here")

    return absent
