"""How a worker is configured: the names that FastDeploy imports, and the two fields of ours.

FastDeploy fills the fields that it knows and passes on those of `--rsync_config` that are fields here; all others it drops.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a process does with weights."""

    INFERENCE = "inference"


class Phase1Backend(Enum):
    """What FastDeploy asks for: GPU_DIRECT with `--load_strategy rsync`, IPC with every other strategy. Both read steps here."""

    GPU_DIRECT = "gpu_direct"
    IPC = "ipc"


@dataclass(frozen=True)
class TransferConfig:
    """One worker's."""

    role: Role
    global_rank: int
    """Its number among all workers of all servers, or of its GPU with IPC."""
    group_size: int
    phase1_backend: Phase1Backend
    directory: str = ""
    """Folder of the steps: the field `directory` of `--rsync_config`, an absolute path."""
    updates: str = "folder"
    """Where the agent's steps come from: `folder`, or `memory` for its own. The step that the server starts with is in the folder."""
