"""A trainer that moves its weights itself, fenced by WeightSync (`delivery: External`).

    topology = weightsync.Topology.from_env()
    for epoch in topology.watch():
        ...                                  # form your own group: epoch.store(), epoch.listener(), epoch.replicas
        with epoch.version(step) as update:
            ...                              # move your own bytes
            update.report("actors/actor-0", ok=True)

WeightSync provides epochs, ranks, a bound port, deadlines, readiness and the proof after an update; you move the bytes. When a member dies,
the epoch is fenced, the callbacks of `on_fenced` run, and the next epoch follows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any

from ._epochs import EpochConnection, Reported
from ._group import Alone, Group, Ranks
from ._socket import find
from ._together import GO, WAIT, together
from .epoch import Epoch
from .errors import AgentLost, Failed, Timeout, WeightSyncError

PATIENCE = 1.0
"""Seconds that rank 0 waits for its agent before it lets the other ranks know that it lives."""


class Topology:
    """Epochs as they come. One for a process; in a group, every rank has one and calls it alike."""

    def __init__(self, group: Group, socket: str | None = None, connect_timeout: float = 30) -> None:
        self._group = group
        self._socket = socket
        self._connect_timeout = connect_timeout
        self._connection: EpochConnection | None = None
        self._last: Reported | None = None

    @classmethod
    def from_env(
        cls,
        group: Any = None,
        *,
        socket: str | None = None,
        connect_timeout: float = 30,
        rank_timeout: float = 600,
    ) -> Topology:
        """As `Publisher.from_env`: rank 0 runs in the pod of the source's agent and calls it, the others follow it."""
        ranks: Group = Alone() if group is None else Ranks(group, rank_timeout)
        return cls(ranks, socket.removeprefix("@") if socket else None, connect_timeout)

    def watch(self, timeout: float | None = None) -> Iterator[Epoch]:
        """Each epoch once, when it is committed; when the body of the loop is left, the next one is waited for.

        Timeout when no epoch came for `timeout` seconds. A restarted agent is searched again, for `connect_timeout` seconds.
        """
        while True:
            epoch = self._next(timeout)
            # A caller that leaves the loop may continue with its epoch.
            yield epoch
            epoch._leave()

    def close(self) -> None:
        """Ends the connection; a version that is under way is given up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _next(self, timeout: float | None) -> Epoch:
        deadline = None if timeout is None else time.monotonic() + timeout
        found: list[Reported] = []
        together(self._group, partial(self._look, deadline, timeout, found), _as_error)
        reported = found[0] if found else None
        topology = self._group.gather(reported.topology if reported is not None else None)[0]
        if reported is None:
            reported = Reported(topology, None)
        return Epoch(reported, self._group, self._connection)

    def _look(self, deadline: float | None, timeout: float | None, found: list[Reported]) -> int:
        """Rank 0 waits a moment for an epoch that was not given yet."""
        if self._group.rank != 0:
            return GO
        connection = self._connected()
        left = PATIENCE if deadline is None else max(0.0, min(PATIENCE, deadline - time.monotonic()))
        with connection.changed:
            connection.changed.wait_for(lambda: self._fresh(connection) or connection.lost or connection.refused, left)
            if connection.refused is not None:
                raise connection.refused
            reported = connection.reported
            if reported is not None and self._fresh(connection):
                self._last = reported
                found[:] = [reported]
                return GO
        if deadline is not None and time.monotonic() >= deadline:
            raise Timeout(f"no epoch was committed within {timeout:g} s", retryable=True, phase="queue")
        return WAIT

    def _fresh(self, connection: EpochConnection) -> bool:
        reported = connection.reported
        return reported is not None and reported is not self._last and not reported.fenced.is_set()

    def _connected(self) -> EpochConnection:
        connection = self._connection
        if connection is not None and connection.lost is None:
            return connection
        if connection is not None:
            connection.close()
            self._connection = None
            if not connection.lost or not connection.lost.retryable:
                raise connection.lost or Failed("the connection to the agent was closed")
        deadline = time.monotonic() + self._connect_timeout
        while True:
            try:
                self._connection = EpochConnection(self._socket or find(os.environ))
                return self._connection
            except AgentLost as error:
                if not error.retryable or time.monotonic() >= deadline:
                    raise
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))


def _as_error(failure: Exception) -> WeightSyncError:
    if isinstance(failure, WeightSyncError):
        return failure
    error = Failed(f"waiting for an epoch broke: {failure!r}")
    error.__cause__ = failure
    return error
