"""The trainer's side of WeightSync: gives weights to the agent of this pod, and returns the result.

    pub = weightsync.Publisher.from_env()
    pub.publish(model, version=step)

Nothing here waits without a limit, and no error is silent: see `weightsync.errors`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Literal

from ._connection import SILENCE, Connection, Published
from ._cuda import Cuda, TorchCuda
from ._driver import DriverError
from ._group import Alone, Group, Ranks
from ._run import GRACE, Run
from ._socket import find
from ._source import checked_version
from .errors import AgentLost, Failed, Timeout, WeightSyncError
from .result import Progress, Result, Roster
from .sources import as_source


class Publisher:
    """Publishes versions. One for a process; in a group, every rank has one and calls it alike."""

    def __init__(self, group: Group, socket: str | None = None, connect_timeout: float = 30) -> None:
        self._group = group
        self._socket = socket
        self._connect_timeout = connect_timeout
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        self._cuda: Cuda | None = None
        self._look_for_cuda = True

    @classmethod
    def from_env(
        cls,
        group: Any = None,
        *,
        socket: str | None = None,
        connect_timeout: float = 30,
        rank_timeout: float = 600,
    ) -> Publisher:
        """A publisher for this process, or with the other ranks of a group of torch.distributed (gloo is best).

        The agent's socket is `socket`, else WEIGHTSYNC_SOCKET, else that of WEIGHTSYNC_POD_UID, else the only one of this pod. Rank 0
        must run in the pod of the source agent. A publish waits for its agent at most `connect_timeout` seconds, and in one step for
        the slowest rank at most `rank_timeout` seconds.
        """
        ranks: Group = Alone() if group is None else Ranks(group, rank_timeout)
        return cls(ranks, socket.removeprefix("@") if socket else None, connect_timeout)

    def publish(
        self,
        source: Any,
        version: int,
        *,
        queue: Literal["wait", "latest"] = "wait",
        activation: Literal["auto", "manual"] = "auto",
        timeout: float = 600,
    ) -> Result:
        """Publishes and waits until enough replicas serve the version, or hold it (`activation="manual"`)."""
        handle = self.publish_async(source, version, queue=queue, activation=activation, timeout=timeout)
        try:
            return handle.wait()
        except KeyboardInterrupt:
            handle.cancel("the trainer was interrupted")
            raise

    def publish_async(
        self,
        source: Any,
        version: int,
        *,
        queue: Literal["wait", "latest"] = "wait",
        activation: Literal["auto", "manual"] = "auto",
        timeout: float = 600,
    ) -> PublishHandle:
        """Starts a publish. Do not change the tensors before `wait_released()` returned.

        Publishes stand in the agent's line in the order of these calls. Alone, the tensors are read by a thread. In a group they are
        read by the calling thread, which comes back when they are released: two threads must not use one communicator at once. The
        whole publish ends after `timeout` seconds.
        """
        version = checked_version(version)
        if queue not in ("wait", "latest") or activation not in ("auto", "manual"):
            raise ValueError(f"queue is wait or latest, activation auto or manual; not {queue!r} and {activation!r}")
        if not timeout > 0:
            raise ValueError(f"a timeout of {timeout} s leaves no time")
        request = {
            "op": "publish",
            "version": version,
            "queue": queue,
            "activation": activation,
            "repeatable": True,
            "timeoutMs": max(1, round(timeout * 1000)),
        }
        run = Run(self._group, as_source(source), request, timeout, self._gpus())
        return PublishHandle(run, self, timeout, manual=activation == "manual")

    def roster(self, timeout: float = SILENCE) -> Roster:
        """The replicas with their versions, as the agent knows them now. Calls the agent of this pod: in a group, call it on rank 0."""
        for roster in self.watch_roster(timeout):
            return roster
        raise AgentLost("the agent gave no roster", retryable=True)

    def watch_roster(self, timeout: float | None = None) -> Iterator[Roster]:
        """The roster now and after each change, until the iteration is left. Timeout when nothing changed for `timeout` seconds."""
        connection = self._connect()
        try:
            heard, last, since = 0, None, time.monotonic()
            connection.say({"op": "roster", "watch": True})
            while True:
                with connection.changed:
                    answered = connection.changed.wait_for(
                        partial(_has_news, connection, heard),
                        SILENCE if timeout is None else max(0.0, min(SILENCE, since + timeout - time.monotonic())),
                    )
                    if connection.lost is not None:
                        raise connection.lost
                    heard, plain = connection.rosters_heard, connection.roster
                if answered and plain != last:
                    last, since = plain, time.monotonic()
                    assert plain is not None
                    yield Roster.of(plain)
                elif timeout is not None and time.monotonic() - since >= timeout:
                    raise Timeout(f"the roster did not change within {timeout:g} s", retryable=True)
                elif not answered:
                    # An agent that lives answers; its silence shows at the next turn.
                    self._ask_again(connection, heard)
        finally:
            connection.close()

    def close(self) -> None:
        """Closes the connections. A publish that is not released is cancelled; a released one continues in the agent."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _gpus(self) -> Cuda | None:
        """CUDA, once this process uses it; without it, or where the driver refuses, tensors travel through host memory."""
        if self._cuda is None and self._look_for_cuda and self._group.rank == 0:
            try:
                self._cuda = TorchCuda.of_this_process()
            except (DriverError, OSError) as error:
                self._look_for_cuda = False
                logging.getLogger("weightsync").warning("tensors on a GPU travel through host memory, which is slower: %s", error)
        return self._cuda

    def _ask_again(self, connection: Connection, heard: int) -> None:
        connection.say({"op": "roster", "watch": True})
        with connection.changed:
            if not connection.changed.wait_for(partial(_has_news, connection, heard), SILENCE):
                raise AgentLost(f"the agent sent nothing for {SILENCE:g} s", retryable=True)

    def _connect(self) -> Connection:
        """A new connection; an agent that is not there yet is waited for."""
        deadline = time.monotonic() + self._connect_timeout
        while True:
            try:
                return Connection(self._socket or find(os.environ))
            except AgentLost as error:
                if not error.retryable or time.monotonic() >= deadline:
                    raise
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    def _start(self, request: dict[str, Any]) -> tuple[Connection, Published]:
        """Starts a publish on a connection that is free; one such connection is kept for its ring, others are closed."""
        with self._lock:
            self._connections = [connection for connection in self._connections if connection.lost is None]
            free = [connection for connection in self._connections if connection.usable]
            for spare in free[1:]:
                self._connections.remove(spare)
                spare.close()
            if free:
                try:
                    return free[0], free[0].start(request)
                except AgentLost:
                    # The agent restarted since the last publish: search for it again, once.
                    self._connections.remove(free[0])
                    free[0].close()
            connection = self._connect()
            self._connections.append(connection)
            return connection, connection.start(request)


def _has_news(connection: Connection, heard: int) -> bool:
    return connection.lost is not None or connection.rosters_heard > heard


class PublishHandle:
    """A running publish. In a group, every rank calls the same methods in the same order."""

    def __init__(self, run: Run, publisher: Publisher, timeout: float, *, manual: bool) -> None:
        self.version = run.version
        self._run = run
        self._timeout = timeout
        self._manual = manual
        self._released = threading.Event()
        self._error: WeightSyncError | None = None
        # In the calling thread: publishes stand in line in the order in which they were called.
        self._carry_out(partial(run.begin, publisher._start))
        if self._error is not None:
            self._released.set()
        elif run.group.size > 1:
            self._transfer()
        else:
            threading.Thread(target=self._transfer, name=f"weightsync-publish-{self.version}", daemon=True).start()

    @property
    def progress(self) -> Progress | None:
        """How far it is, as last heard; rank 0 only."""
        published = self._run.published
        return published.progress if published is not None else None

    def wait_released(self, timeout: float | None = None) -> None:
        """Returns when the tensors may change: all bytes are retained or delivered. Raises when the publish failed before."""
        limit = self._timeout + 2 * GRACE if timeout is None else timeout
        if not self._released.wait(limit):
            phase = self._run.published.phase if self._run.published is not None else "connect"
            raise Timeout(f"version {self.version} was not released within {limit:g} s", retryable=True, phase=phase)
        if self._error is not None:
            raise self._error

    def wait(self, timeout: float | None = None) -> Result:
        """Waits for the outcome (with `activation="manual"`: until it is staged); returns which replicas serve the version and which do
        not.

        Timeout ends only this wait: the publish continues, and may be waited for again.
        """
        begun = time.monotonic()
        limit = self._timeout + 2 * GRACE if timeout is None else timeout
        self.wait_released(limit)
        return self._outcome(max(0.0, limit - (time.monotonic() - begun)), accept_staged=self._manual)

    def activate(self, timeout: float | None = None) -> Result:
        """Lets engines switch to a staged version (`activation="manual"`), and waits until enough of them have."""
        if not self._manual:
            raise ValueError('only a publish with activation="manual" is activated')
        self.wait_released(timeout)
        self._run.activate()
        self._manual = False
        return self._outcome(self._timeout + 2 * GRACE if timeout is None else timeout, accept_staged=False)

    def cancel(self, reason: str = "the trainer gave it up") -> None:
        """Cancels the publish. Replicas that were not touched continue with the old version."""
        self._run.cancel(reason)

    def _outcome(self, limit: float, *, accept_staged: bool) -> Result:
        try:
            return self._run.outcome(limit, accept_staged)
        except Timeout:
            raise
        except WeightSyncError as error:
            self._error = error
            raise

    def _transfer(self) -> None:
        try:
            self._carry_out(self._run.transfer)
        finally:
            self._released.set()

    def _carry_out(self, step: Callable[[], None]) -> None:
        try:
            step()
        except WeightSyncError as error:
            self._error = error
        except Exception as error:
            # A defect of this package: a wait that never ends would hide it.
            self._error = Failed(f"the publish broke: {error!r}")
            self._error.__cause__ = error
