"""What can go wrong in a publish, as one exception a cause.

`retryable` of every error shows whether the same call may succeed later; `phase` and `member` show where it happened. After a failed
publish the replicas that were not touched serve the old version, the others stay out of service, and training may continue. Whether the
version is served is open after `OutcomeUnknown` and `AgentLost` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WeightSyncError(Exception):
    """Base of all errors of this package."""

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        phase: str | None = None,
        member: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retryable = retryable
        """Whether the same call may succeed later."""
        self.phase = phase
        """The step that was running: connect, queue, transfer, verify, staged, activate, or ranks."""
        self.member = member
        """The member at fault, where it is one."""

    def __str__(self) -> str:
        where = [f"{word} {value}" for word, value in (("phase", self.phase), ("member", self.member)) if value]
        return f"{self.message} [{', '.join(where)}]" if where else self.message


class NotEnoughReplicas(WeightSyncError):
    """Fewer replicas than `minReady` could take the version."""


class VersionNotHigher(WeightSyncError):
    """The number is not higher than one that was published before. Numbers may be skipped, never go back."""


class VersionPinned(WeightSyncError):
    """`spec.targetVersion` holds the group at a version: publish again once it is cleared."""


class VersionRefused(WeightSyncError):
    """The canary refused the version (`spec.canary`): engines that loaded it do not answer as they must.

    Give other weights a higher number.
    """


class ManifestChanged(WeightSyncError):
    """A number whose publish failed was used again with other tensors."""


class AgentLost(WeightSyncError):
    """No agent listens, or it went away in the middle. Publish again when it is back."""


class Timeout(WeightSyncError, TimeoutError):
    """A deadline passed; `phase` and `member` show where."""


class OutcomeUnknown(WeightSyncError):
    """The order to switch was sent to engines, and their results did not arrive: the version may be served.

    The same number with the same weights may be published again, or a higher one; the roster shows what replicas serve.
    """


class Fenced(WeightSyncError):
    """The epoch ended, or is of no use any more: abort what runs in it, and continue in the next one from `Topology.watch()`."""


class Superseded(WeightSyncError):
    """Another publish with `queue="latest"` took the place of this one while it waited."""


class Cancelled(WeightSyncError):
    """The publish was cancelled."""


class SourceFailed(WeightSyncError):
    """The source raised, or what it gave is not what it announced. The cause is chained on the rank where it happened."""


class RanksDisagree(WeightSyncError):
    """The ranks of the group were not asked for the same publish, or a rank is gone."""


class NotAllowed(WeightSyncError):
    """The agent does not serve this user, or speaks another protocol."""


class Refused(WeightSyncError):
    """The agent refuses the request; the message has the cause."""


class Failed(WeightSyncError):
    """Anything else that went wrong at the agent."""


_BY_CODE: dict[str, type[WeightSyncError]] = {
    "NotEnoughReplicas": NotEnoughReplicas,
    "VersionNotHigher": VersionNotHigher,
    "ManifestChanged": ManifestChanged,
    "VersionPinned": VersionPinned,
    "VersionRefused": VersionRefused,
    "Timeout": Timeout,
    "OutcomeUnknown": OutcomeUnknown,
    "Fenced": Fenced,
    "Superseded": Superseded,
    "Cancelled": Cancelled,
    "Invalid": Refused,
    "NotAllowed": NotAllowed,
    "AgentLost": AgentLost,
}

_BY_NAME: dict[str, type[WeightSyncError]] = {kind.__name__: kind for kind in (*_BY_CODE.values(), SourceFailed, RanksDisagree, Failed)}


def from_agent(error: Mapping[str, Any]) -> WeightSyncError:
    """The exception for an error object of the agent."""
    kind = _BY_CODE.get(str(error.get("code")), Failed)
    phase = error.get("phase")
    member = error.get("member")
    return kind(
        str(error.get("message", "the agent gave no reason")),
        retryable=bool(error.get("retryable", False)),
        phase=phase.lower() if isinstance(phase, str) else None,
        member=member if isinstance(member, str) else None,
    )


def to_plain(error: WeightSyncError) -> dict[str, Any]:
    """The error as JSON, for the other ranks of a group."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "retryable": error.retryable,
        "phase": error.phase,
        "member": error.member,
    }


def from_plain(plain: Mapping[str, Any]) -> WeightSyncError:
    """The same error on another rank."""
    kind = _BY_NAME.get(str(plain["kind"]), Failed)
    return kind(str(plain["message"]), retryable=bool(plain["retryable"]), phase=plain["phase"], member=plain["member"])
