"""slime's hook after a weight sync through files was written: the checkpoint is published as a version.

    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir DIR
    --custom-update-weight-post-write-path weightsync.integrations.slime.publish

See docs/integrations/slime.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..publisher import Publisher
from ._folder import publish_folder

TIMEOUT = 600.0
"""Seconds after which a publish ends."""


def publish(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """Publishes the checkpoint in `version_dir` from rank 0; returns when enough replicas serve it.

    slime calls it on every rank, and all of them wait for each other after it. The version is the number in the folder's name
    (`weight_v000007`), which slime counts. `rollout_engines` are slime's own actors: the agents reach the engines by themselves.
    """
    if getattr(args, "update_weight_mode", "full") != "full":
        raise ValueError("a folder of differences is no version: set --update-weight-mode full")
    if _rank() != 0:
        return
    with Publisher.from_env() as publisher:
        publish_folder(publisher, Path(version_dir), timeout=TIMEOUT)


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0
