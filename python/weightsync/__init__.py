"""WeightSync's client for trainers: publishes weights to the rollout engines of a group, through the agent beside this process."""

from __future__ import annotations

from ._source import Meta, Source
from .errors import (
    AgentLost,
    Cancelled,
    Failed,
    ManifestChanged,
    NotAllowed,
    NotEnoughReplicas,
    RanksDisagree,
    Refused,
    SourceFailed,
    Superseded,
    Timeout,
    VersionNotHigher,
    WeightSyncError,
)
from .publisher import Publisher, PublishHandle
from .result import Progress, Replica, Result, Roster
from .sources import fsdp2, module, sharded, state_dict, stream

__all__ = [
    "AgentLost",
    "Cancelled",
    "Failed",
    "ManifestChanged",
    "Meta",
    "NotAllowed",
    "NotEnoughReplicas",
    "Progress",
    "PublishHandle",
    "Publisher",
    "RanksDisagree",
    "Refused",
    "Replica",
    "Result",
    "Roster",
    "Source",
    "SourceFailed",
    "Superseded",
    "Timeout",
    "VersionNotHigher",
    "WeightSyncError",
    "fsdp2",
    "module",
    "sharded",
    "state_dict",
    "stream",
]
