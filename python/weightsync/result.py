"""What a trainer is told: progress, the outcome of a publish, and the roster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far a publish is."""

    phase: str
    """begin, transfer, verify, staged, activate."""
    bytes: int
    """Bytes that the slowest replica received."""
    total_bytes: int

    @staticmethod
    def of(message: Mapping[str, Any]) -> Progress:
        """From the agent's message."""
        return Progress(str(message["phase"]).lower(), int(message["bytes"]), int(message["totalBytes"]))


@dataclass(frozen=True)
class Result:
    """A version that enough replicas serve, or (`staged`) that waits to be activated."""

    version: int
    installed: tuple[str, ...] = ()
    """Replicas whose engine confirmed it."""
    behind: Mapping[str, str] = field(default_factory=dict)
    """Replicas that do not have it, and why."""
    epoch: int | None = None
    attempts: int = 1
    bytes: int = 0
    manifest: str | None = None
    """blake3 of names, types, shapes and digests of all tensors."""
    phases_ms: Mapping[str, int] = field(default_factory=dict)
    staged: bool = False
    memory: str = "host"
    """Where the tensors were written: `gpu UUID`, `host`, or `host: ` and why not on the GPU that they lie on."""

    @staticmethod
    def of(message: Mapping[str, Any], memory: str = "host") -> Result:
        """From the agent's message."""
        return Result(
            version=int(message["version"]),
            installed=tuple(message["installed"]),
            behind=dict(message["behind"]),
            epoch=int(message["epoch"]),
            attempts=int(message["attempts"]),
            bytes=int(message["bytes"]),
            manifest=str(message["manifest"]),
            phases_ms=dict(message["phasesMs"]),
            memory=memory,
        )

    def plain(self) -> dict[str, Any]:
        """As JSON, for the other ranks of a group."""
        return {**self.__dict__, "installed": list(self.installed), "behind": dict(self.behind), "phases_ms": dict(self.phases_ms)}

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> Result:
        """The inverse of `plain`."""
        return Result(**{**plain, "installed": tuple(plain["installed"])})


@dataclass(frozen=True)
class Replica:
    """One rollout engine."""

    name: str
    url: str | None
    state: str
    """ready, updating, dirty, unknown, behind, or out."""
    version: int | None
    """What its engine serves, as far as known."""
    rank_offset: int
    size: int


@dataclass(frozen=True)
class Roster:
    """Who serves what."""

    epoch: int | None
    version: int | None
    """The last version that reached `minReady`."""
    replicas: tuple[Replica, ...]

    @staticmethod
    def of(message: Mapping[str, Any]) -> Roster:
        """From the agent's message."""
        replicas = tuple(
            Replica(
                name=str(replica["name"]),
                url=replica.get("url"),
                state=str(replica["state"]),
                version=replica.get("version"),
                rank_offset=int(replica["rankOffset"]),
                size=int(replica["size"]),
            )
            for replica in message["replicas"]
        )
        return Roster(message.get("epoch"), message.get("version"), replicas)
