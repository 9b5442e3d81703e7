"""slime's hook after a weight sync through files was written: the checkpoint is published as a version.

    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir DIR
    --custom-update-weight-post-write-path weightsync.integrations.slime.publish

See docs/integrations/slime.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..publisher import Publisher
from ..sources import stream

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
    folder = Path(version_dir)
    number = re.search(r"(\d+)$", folder.name)
    if number is None:
        raise ValueError(f"{folder.name} ends with no number, which would be the version")
    with ExitStack() as opened:
        files = [opened.enter_context(_open(path)) for path in sorted(folder.glob("*.safetensors"))]
        places = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118, it has no __iter__
        slices = [(name, file.get_slice(name)) for name, file in places]
        metas = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]

        def tensors() -> Iterator[tuple[str, Any]]:
            # One at a time, from the page cache.
            return ((name, file.get_tensor(name)) for name, file in places)

        with Publisher.from_env() as publisher:
            publisher.publish(stream(tensors, metas), version=int(number[1]), timeout=TIMEOUT)


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0
