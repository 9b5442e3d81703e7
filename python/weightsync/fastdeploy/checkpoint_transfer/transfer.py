"""The class that FastDeploy imports with `FD_USE_GDR_CHECKPOINT_TRANSFER=1`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle

from .config import TransferConfig
from .steps import Steps


class CheckpointTransfer:
    """What one worker keeps over many updates."""

    def __init__(self, config: TransferConfig) -> None:
        # The rank of the configuration is that of a GPU with some strategies, and counts over several servers with others.
        self._steps = Steps(config.directory, config.updates, paddle.distributed.get_rank(), paddle.distributed.get_world_size())

    async def initialize(self) -> None:
        """Looks whether steps can come."""
        self._steps.look()

    async def cleanup(self) -> None:
        """Holds nothing between two steps."""

    def receive_weights_sync(self, step_id: str, output_framework: str = "paddle") -> Iterator[tuple[str, Any]]:
        """Names and tensors in host memory; one tensor is read at a time."""
        if output_framework != "paddle":
            raise ValueError(f"tensors of {output_framework!r} are not made here, only those of paddle")
        return self._steps.tensors(step_id)
