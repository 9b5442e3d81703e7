"""The part of FastDeploy's transfer library that its workers use. A WeightSync agent lays the steps into a folder, or shares its memory.

FastDeploy asks for it in two ways. With `FD_USE_GDR_CHECKPOINT_TRANSFER=1` it imports `checkpoint_transfer.transfer`, and takes tensors
of a checkpoint. Without, it imports the class of this file, and takes its own parameters (`update_weights_by_rdma`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .steps import Steps


class CheckpointTransfer:
    """What one worker keeps over many updates, as a server without the flag makes it: all of `--rsync_config` by name."""

    def __init__(
        self, *, directory: str = "", updates: str = "folder", local_rank: int = 0, group_size: int = 1, **_others: object
    ) -> None:
        self._steps = Steps(directory, updates, local_rank, group_size)

    def initialize(self) -> None:
        """Looks whether steps can come."""
        self._steps.look()

    def receive_stream(self, step_id: str, verify_checksum: bool = False) -> Iterator[tuple[str, Any]]:
        """Names and tensors in host memory. From memory all digests are checked, whatever `verify_checksum` says; a folder has none."""
        return self._steps.tensors(step_id)
