"""The group in which the ranks of a trainer publish, where it gives none."""

from __future__ import annotations

import contextlib
from typing import Any


def gloo_group() -> Any:
    """A new gloo group of all ranks; None where there is one rank. All ranks call it alike."""
    with contextlib.suppress(ImportError):
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return dist.new_group(backend="gloo")
    return None
