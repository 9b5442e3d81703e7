"""WeightSync's client, through the agent of this pod: a trainer publishes weights to rollout engines, and an engine registers."""

from __future__ import annotations

from ._source import Meta, Source
from .engines import EngineRegistration, register_engine
from .epoch import Epoch, EpochReplica, Update
from .errors import (
    AgentLost,
    Cancelled,
    Failed,
    Fenced,
    ManifestChanged,
    NotAllowed,
    NotEnoughReplicas,
    OutcomeUnknown,
    RanksDisagree,
    Refused,
    SourceFailed,
    Superseded,
    Timeout,
    VersionNotHigher,
    VersionPinned,
    VersionRefused,
    WeightSyncError,
)
from .publisher import Publisher, PublishHandle
from .result import MixedWindow, Progress, Replica, Result, Roster
from .sources import KEPT_IN_FLOAT32, fsdp2, module, sharded, state_dict, stream, with_draft
from .topology import Topology

__version__ = "0.1.0"

__all__ = [
    "KEPT_IN_FLOAT32",
    "AgentLost",
    "Cancelled",
    "EngineRegistration",
    "Epoch",
    "EpochReplica",
    "Failed",
    "Fenced",
    "ManifestChanged",
    "Meta",
    "MixedWindow",
    "NotAllowed",
    "NotEnoughReplicas",
    "OutcomeUnknown",
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
    "Topology",
    "Update",
    "VersionNotHigher",
    "VersionPinned",
    "VersionRefused",
    "WeightSyncError",
    "__version__",
    "fsdp2",
    "module",
    "register_engine",
    "sharded",
    "state_dict",
    "stream",
    "with_draft",
]
