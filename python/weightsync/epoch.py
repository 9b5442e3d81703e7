"""One epoch of a trainer that moves its weights itself: its members and ranks, its end, and its versions."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

from ._epochs import Bringing, EpochConnection, Reported
from ._group import Group
from ._source import checked_version
from ._together import GO, WAIT, together
from .errors import Failed, Fenced, RanksDisagree, Timeout, WeightSyncError, from_plain, to_plain
from .result import Result

PATIENCE = 1.0
"""Seconds that rank 0 waits for its agent before it lets the other ranks know that it lives."""

GRACE = 20.0
"""Seconds after a version's timeout in which its agent may end it with a better word."""

CAUSE = 5.0
"""Seconds that a broken data plane waits for the agent to name the lost member."""


@dataclass(frozen=True)
class EpochReplica:
    """A replica of an epoch."""

    name: str
    url: str | None
    """Its engine, for requests."""
    rank_offset: int
    size: int
    version: int | None
    """The version that its engine serves, complete; none when it serves none or may hold half an update."""

    @property
    def ranks(self) -> range:
        """Its ranks in the group."""
        return range(self.rank_offset, self.rank_offset + self.size)


class Epoch:
    """A committed epoch. Its group is yours to form: rank 0 is this trainer, the replicas have the ranks that follow."""

    def __init__(self, reported: Reported, group: Group, connection: EpochConnection | None) -> None:
        plain = reported.topology
        self.number = reported.number
        self.group = str(plain["group"])
        """A name that no other group ever has: it carries the object's UID and the epoch."""
        self.world_size = int(plain["worldSize"])
        self.address = str(plain["address"])
        """Where the rendezvous listens: this pod."""
        self.port = int(plain["port"])
        """Port of `listener()`, bound before it was announced."""
        self.timeout = int(plain["timeoutMs"]) / 1000
        """Seconds that forming the group, or one version, may take."""
        self.min_ready = int(plain["minReady"])
        version = plain.get("version")
        self.current = int(version) if version is not None else None
        """The version that the replicas should hold; none before the first."""
        self.replicas = tuple(
            EpochReplica(str(one["name"]), one.get("url"), int(one["rankOffset"]), int(one["size"]), one.get("version"))
            for one in plain["replicas"]
        )
        self._reported = reported
        self._ranks = group
        self._connection = connection
        self._update: Update | None = None

    @property
    def lacking(self) -> tuple[EpochReplica, ...]:
        """Replicas that do not hold the current version: joiners, and those that a failed update left half updated."""
        return tuple(replica for replica in self.replicas if replica.version is None or replica.version != self.current)

    @property
    def fenced(self) -> threading.Event:
        """Set when the epoch ends. In a group it is set on rank 0 at once, on the others with their next call."""
        return self._reported.fenced

    @property
    def reason(self) -> str | None:
        """Why it ended."""
        return self._reported.reason

    def on_fenced(self, callback: Callable[[str], object]) -> None:
        """Runs `callback(reason)` when the epoch ends, in a thread of the client: abort your communicator there. Runs at once if it has
        ended.
        """
        self._reported.on_fenced(callback)

    def check(self) -> None:
        """Raises Fenced if the epoch has ended. In a group: in the same way on every rank."""
        together(self._ranks, self._checked, _as_error)

    def listener(self) -> socket.socket:
        """The bound, listening socket of `port`; it can be taken once (rank 0).

        For vLLM: `StatelessProcessGroup.create(epoch.address, epoch.port, 0, epoch.world_size, listen_socket=epoch.listener())`.
        """
        listener, self._reported.listener = self._reported.listener, None
        if listener is None:
            raise Failed("the socket of the rendezvous is on rank 0 only, and is given once")
        return listener

    def store(self, timeout: float | None = None, wait_for_workers: bool = False) -> Any:
        """A `torch.distributed.TCPStore` on that socket (rank 0), for `world_size` clients."""
        import torch.distributed as dist

        descriptor = self.listener().detach()
        try:
            return dist.TCPStore(
                self.address,
                self.port,
                self.world_size,
                is_master=True,
                timeout=timedelta(seconds=self.timeout if timeout is None else timeout),
                wait_for_workers=wait_for_workers,
                master_listen_fd=descriptor,
                use_libuv=False,
            )
        except Exception:
            with contextlib.suppress(OSError):
                socket.socket(fileno=descriptor).close()
            raise

    @contextlib.contextmanager
    def forming(self, timeout: float | None = None) -> Iterator[None]:
        """Around the forming of your group: when it takes longer than `timeout` seconds (else `Epoch.timeout`) the epoch is given up.

        Raises Fenced when the epoch ended meanwhile, with what your code raised as its cause.
        """
        limit = self.timeout if timeout is None else timeout
        timer = threading.Timer(limit, self._give_up, (f"the trainer's group was not formed within {limit:g} s",))
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            self._explain(error)
            self._give_up(f"the trainer's group could not be formed: {type(error).__name__}: {error}"[:400])
            raise
        finally:
            timer.cancel()
        if self.fenced.is_set():
            raise self._over()

    def version(
        self,
        version: int,
        *,
        digest: str | None = None,
        engine_version: str | None = None,
        timeout: float | None = None,
    ) -> Update:
        """Around the movement of one version's bytes. When the body is entered, every engine is marked and none is trusted; when it is
        left, the engines' agents prove the reported replicas, and enough of them must be proven.

        `digest` is whatever identifies the weights: the same number with another digest is refused. `engine_version` is what your data
        plane makes the engines report as their weight version; the agents compare it. The current version may come again, for `lacking`
        replicas.
        """
        version = checked_version(version)
        limit = self.timeout if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"a timeout of {limit} s leaves no time")
        request = {"op": "external", "epoch": self.number, "version": version, "timeoutMs": max(1, round(limit * 1000))}
        if digest is not None:
            request["digest"] = digest
        if engine_version is not None:
            request["engineVersion"] = engine_version
        return Update(self, request, limit)

    def report(self, replica: str, ok: bool, reason: str = "") -> None:
        """What became of a replica: of the version that is under way, or, before one, of the group's forming."""
        if self._update is not None:
            self._update.report(replica, ok, reason)
        elif not ok:
            self.broken(f"{replica}: {reason or 'it cannot take part'}")

    def broken(self, reason: str) -> None:
        """Reports that your group does not work any more: the epoch ends, and another one is requested."""
        self._give_up(reason)

    def _checked(self) -> int:
        if self._ranks.rank == 0 and self.fenced.is_set():
            raise self._over()
        return GO

    def _over(self) -> Fenced:
        return Fenced(f"epoch {self.number} ended: {self.reason}", retryable=True)

    def _give_up(self, reason: str) -> None:
        if self.fenced.is_set():
            return
        if self._connection is not None:
            with contextlib.suppress(WeightSyncError):
                self._connection.say({"op": "broken", "epoch": self.number, "reason": reason[:500]})
        self._reported.fence(reason)

    def _explain(self, error: Exception) -> None:
        """A data plane that breaks often hears of a lost member before the agent does: its word is waited for a moment."""
        if self._ranks.rank == 0 and not isinstance(error, WeightSyncError) and self.fenced.wait(CAUSE):
            raise self._over() from error

    def _leave(self) -> None:
        """The body of the loop was left."""
        self._reported.close()


class Update:
    """A version that your data plane brings: a context manager. In a group, every rank enters and leaves it."""

    def __init__(self, epoch: Epoch, request: dict[str, Any], limit: float) -> None:
        self.version = int(request["version"])
        self.result: Result | None = None
        """The replicas that serve it, after the body was left."""
        self._epoch = epoch
        self._request = request
        self._limit = limit
        self._deadline = 0.0
        self._bringing: Bringing | None = None
        self._reports: dict[str, tuple[bool, str]] = {}

    def report(self, replica: str, ok: bool = True, reason: str = "") -> None:
        """Reports the result of one replica. In a group any rank may report it, and a failure outweighs a success."""
        if replica not in {known.name for known in self._epoch.replicas}:
            raise ValueError(f"{replica!r} is not in epoch {self._epoch.number}")
        known = self._reports.get(replica)
        if known is None or known[0]:
            self._reports[replica] = (bool(ok), reason)

    def __enter__(self) -> Update:
        if self._epoch._update is not None:
            raise ValueError(f"version {self._epoch._update.version} is still under way")
        self._deadline = time.monotonic() + self._limit + GRACE
        together(self._epoch._ranks, self._begin, _as_error)
        together(self._epoch._ranks, lambda: self._heard(lambda bringing: bringing.open), _as_error)
        self._epoch._update = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._epoch._update = None
        if error is not None and not isinstance(error, Exception):
            # An interrupt: do not wait for the other ranks.
            self._cancel(f"the trainer was interrupted: {type(error).__name__}")
            return
        self._agree(error)
        together(self._epoch._ranks, self._conclude, _as_error)
        try:
            together(self._epoch._ranks, lambda: self._heard(lambda bringing: bringing.over), _as_error)
        except WeightSyncError:
            self._ended("the version failed")
            raise
        mine = self._bringing.result if self._bringing is not None else None
        self.result = Result.of_plain(self._epoch._ranks.gather(mine.plain() if mine is not None else None)[0])

    def _begin(self) -> int:
        epoch = self._epoch
        if epoch._ranks.rank != 0:
            return GO
        if epoch.fenced.is_set():
            raise epoch._over()
        connection = epoch._connection
        assert connection is not None
        with connection.changed:
            before = connection.bringing
            if before is not None and not before.over:
                # The one before was given up: the agent's word on it is on its way.
                connection.changed.wait_for(lambda: before.over, PATIENCE)
                if not before.over and time.monotonic() > self._deadline:
                    raise Failed(f"version {before.version} is still under way")
                if not before.over:
                    return WAIT
            self._bringing = connection.bringing = Bringing(self.version)
        connection.say(self._request)
        return GO

    def _heard(self, ready: Callable[[Bringing], bool]) -> int:
        """Rank 0 waits a moment for its agent."""
        epoch = self._epoch
        if epoch._ranks.rank != 0:
            return GO
        connection, bringing = epoch._connection, self._bringing
        assert connection is not None
        assert bringing is not None
        with connection.changed:
            connection.changed.wait_for(lambda: ready(bringing) or bringing.over, PATIENCE)
            if bringing.error is not None:
                raise bringing.error
            if ready(bringing):
                return GO
            if time.monotonic() > self._deadline:
                raise Timeout(f"the agent gave no outcome of version {self.version}", retryable=True)
        return WAIT

    def _agree(self, error: Exception | None) -> None:
        """All ranks left the body well, or all hear why not."""
        epoch = self._epoch
        said = epoch._ranks.gather(None if error is None else f"{type(error).__name__}: {error}"[:2000])
        first = next(((rank, text) for rank, text in enumerate(said) if text is not None), None)
        if first is None:
            return
        rank, text = first
        fenced: Fenced | None = None
        if epoch._ranks.rank == 0:
            # A data plane that breaks often hears of a lost member before the agent does.
            if epoch.fenced.wait(CAUSE):
                fenced = epoch._over()
                self._cancel(fenced.message)
            else:
                self._cancel(f"the trainer's data plane failed on rank {rank}: {text}")
        plain = epoch._ranks.gather(to_plain(fenced) if fenced is not None else None)[0]
        if plain is not None:
            over = fenced if fenced is not None else from_plain(plain)
            epoch._reported.fence(over.message)
            raise over from error
        epoch._reported.fence(f"the trainer's data plane failed on rank {rank}: {text}")
        if error is not None:
            raise error
        raise RanksDisagree(f"rank {rank} failed while version {self.version} was brought: {text}", phase="ranks")

    def _conclude(self) -> int:
        epoch = self._epoch
        all_reports = epoch._ranks.gather([[name, ok, reason] for name, (ok, reason) in self._reports.items()])
        if epoch._ranks.rank != 0:
            return GO
        merged: dict[str, tuple[bool, str]] = {}
        for name, ok, reason in (report for reports in all_reports for report in reports):
            if name not in merged or merged[name][0]:
                merged[name] = (bool(ok), str(reason))
        connection = epoch._connection
        assert connection is not None
        for name, (ok, reason) in merged.items():
            connection.say({"op": "report", "replica": name, "ok": ok, "reason": reason})
        connection.say({"op": "conclude"})
        return GO

    def _cancel(self, reason: str) -> None:
        connection = self._epoch._connection
        if connection is not None and self._bringing is not None and not self._bringing.over:
            with contextlib.suppress(WeightSyncError):
                connection.say({"op": "cancel", "reason": reason[:500]})
        self._ended(reason)

    def _ended(self, reason: str) -> None:
        """After a failed version the data plane is in an unknown state: the epoch is of no use, on any rank."""
        bringing = self._bringing
        said = bringing.error.message if bringing is not None and bringing.error is not None else reason
        self._epoch._reported.fence(said)


def _as_error(failure: Exception) -> WeightSyncError:
    if isinstance(failure, WeightSyncError):
        return failure
    error = Failed(f"the update broke: {failure!r}")
    error.__cause__ = failure
    return error
