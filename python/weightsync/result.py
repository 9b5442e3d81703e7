"""Results for a trainer: progress, the outcome of a publish, and the roster."""

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
class MixedWindow:
    """A time in which an engine answered requests while a version was loaded into it.

    An answer that was in progress at any moment of it comes from a mixture of two versions: drop it. Times are those of the replica's
    clock.
    """

    version: int
    """The version that was loaded."""
    begin_ms: int
    """Milliseconds since 1970."""
    end_ms: int | None
    """Milliseconds since 1970; None while the engine may serve a mixture still."""

    @staticmethod
    def of(message: Mapping[str, Any]) -> MixedWindow:
        """From the agent's message."""
        end = message.get("endMs")
        return MixedWindow(int(message["version"]), int(message["beginMs"]), None if end is None else int(end))

    def touches(self, begin_ms: int, end_ms: int) -> bool:
        """Whether an answer that was under way from `begin_ms` to `end_ms` (milliseconds since 1970) may come from a mixture."""
        return end_ms >= self.begin_ms and (self.end_ms is None or begin_ms <= self.end_ms)


def _windows(messages: Any) -> tuple[MixedWindow, ...]:
    return tuple(MixedWindow.of(message) for message in messages)


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
    mixed: Mapping[str, tuple[MixedWindow, ...]] = field(default_factory=dict)
    """Replicas whose engine answered requests while this version was loaded, and when. Replicas that paused are absent."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Replicas whose engine's checkpoint does not quite agree with the tensors, and how: some lose precision, or nothing was compared."""
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
            mixed={name: _windows(windows) for name, windows in message.get("mixed", ())},
            notes={name: tuple(notes) for name, notes in message.get("notes", ())},
            memory=memory,
        )

    def plain(self) -> dict[str, Any]:
        """As JSON, for the other ranks of a group."""
        mixed = {name: [dict(window.__dict__) for window in windows] for name, windows in self.mixed.items()}
        notes = {name: list(notes) for name, notes in self.notes.items()}
        lists = {"installed": list(self.installed), "behind": dict(self.behind), "phases_ms": dict(self.phases_ms), "mixed": mixed}
        return {**self.__dict__, **lists, "notes": notes}

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> Result:
        """The inverse of `plain`."""
        mixed = {name: tuple(MixedWindow(**window) for window in windows) for name, windows in plain["mixed"].items()}
        notes = {name: tuple(notes) for name, notes in plain["notes"].items()}
        return Result(**{**plain, "installed": tuple(plain["installed"]), "mixed": mixed, "notes": notes})


@dataclass(frozen=True)
class Replica:
    """One rollout engine."""

    name: str
    url: str | None
    state: str
    """ready, updating, dirty, unknown, after, or out."""
    version: int | None
    """What its engine serves, as far as known."""
    rank_offset: int
    size: int
    mixed: tuple[MixedWindow, ...] = ()
    """When its engine answered requests while a version was loaded: the last few times."""


@dataclass(frozen=True)
class Roster:
    """The replicas and their versions."""

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
                mixed=_windows(replica.get("mixed", ())),
            )
            for replica in message["replicas"]
        )
        return Roster(message.get("epoch"), message.get("version"), replicas)
