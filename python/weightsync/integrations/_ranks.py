"""What the ranks of a trainer publish in, and from which number on, where it gives neither."""

from __future__ import annotations

import contextlib
from typing import Any

from ..errors import AgentLost, WeightSyncError
from ..publisher import Publisher


def gloo_group() -> Any:
    """A new gloo group of all ranks; None where there is one rank. All ranks call it alike."""
    with contextlib.suppress(ImportError):
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return dist.new_group(backend="gloo")
    return None


def next_version(publisher: Publisher) -> int:
    """The highest version that a replica serves plus one, and 1 where none serves any: the same on every rank. All call it alike."""
    group = publisher._group
    found: int | str = ""
    if group.rank == 0:
        try:
            found = 1 + max((replica.version or 0 for replica in publisher.roster().replicas), default=0)
        except WeightSyncError as error:
            found = str(error)
    found = group.gather(found)[0]
    if isinstance(found, str):
        raise AgentLost(found, retryable=True)
    return found
