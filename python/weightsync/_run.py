"""One publish, carried out by all ranks together.

Ranks agree before each bucket's tensors are gathered, so none runs ahead of rank 0 into a collective operation that rank 0 will not join,
and all stop at the same bucket with the same error. Between two agreements a rank does exactly what the source's pass does there: rank 0
goes on with it, without writing, even when its agent is lost meanwhile, because the others are in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from . import _notes
from ._connection import Connection, Published
from ._cuda import Cuda
from ._group import Group
from ._memory import MemoryGone
from ._offer import offer, open_offered, to_open, warn_once
from ._ring import Ring, StreamWriter
from ._source import Meta, Source
from ._tensors import describe_named
from ._together import AGAIN, FAIL, GO, WAIT, together
from .errors import Cancelled, RanksDisagree, SourceFailed, Timeout, WeightSyncError
from .result import Result

PATIENCE = 1.0
"""Seconds that rank 0 waits for its agent before it lets the other ranks know that it lives."""

GRACE = 15.0
"""Seconds after a publish's timeout in which its agent may end it with a better word."""


class _Interrupted(Exception):
    """The agent requested the stream again, or failed, while a bucket was written; the next agreement reports it."""


class Run:
    """A publish on one rank."""

    def __init__(self, group: Group, source: Source, request: dict[str, Any], timeout: float, cuda: Cuda | None = None) -> None:
        self.group = group
        self.version = int(request["version"])
        self.published: Published | None = None
        self.connection: Connection | None = None
        self._source = source
        self._metas: list[Meta] = []
        self._request = request
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout + GRACE
        self._attempt = 1
        self._ring: Ring | None = None  # Where the pass that runs writes; rank 0 only.
        self._writer: StreamWriter | None = None
        self._cancelled: Cancelled | None = None
        self._cuda = cuda
        self._devices: dict[str, int] = {}  # The GPUs that tensors lie on, by UUID, as torch counts them.
        self._device = cuda.current_device() if cuda is not None else None

    def begin(self, start: Callable[[dict[str, Any]], tuple[Connection, Published]]) -> None:
        """Has the publish stand in the agent's line. Raises the same error on every rank."""
        try:
            self._metas = self._join()
            self._together(lambda: self._start(start))
            self._together(lambda: self._heard(lambda published: published.accepted or published.ring is not None))
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__)
            raise

    def transfer(self) -> None:
        """Brings all bytes to the agent; returns when the tensors may change. Raises the same error on every rank."""
        with self._our_streams():
            self._transfer()

    def _our_streams(self) -> AbstractContextManager[None]:
        """Alone, in a thread of our own, what the source computes goes to our streams; in a group the caller's thread stays on its own."""
        if self._cuda is None or self._device is None or not self._devices or self.group.size > 1:
            return contextlib.nullcontext()
        return self._cuda.ours(self._device)

    def _transfer(self) -> None:
        try:
            while True:
                # For each pass: the agent may offer other memory than for the last one.
                self._together(self._turn)
                if self._pass(self._metas, self._batches()) != AGAIN:
                    break
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__)
            raise
        finally:
            # The memory is mapped as long as there is a reference to it, and handles are kept.
            self._writer = self._ring = None
            if self.published is not None:
                self.published.ring = None

    def outcome(self, timeout: float, accept_staged: bool) -> Result:
        """Waits for the end, or for `staged`; the same on every rank."""
        deadline = time.monotonic() + timeout
        self._together(lambda: self._outcome(deadline, timeout, accept_staged))
        mine = None
        if self.group.rank == 0:
            published = self._known()
            result = published.result or Result(self.version, staged=True, memory=published.memory)
            _notes.warn_once(result)
            mine = result.plain()
        return Result.of_plain(self.group.gather(mine)[0])

    def activate(self) -> None:
        """Lets engines switch; the word of rank 0 counts."""
        self._together(lambda: self._say({"op": "activate", "version": self.version}))

    def cancel(self, reason: str) -> None:
        """Cancels the publish, from any thread; waiting callers get the error."""
        self._cancelled = Cancelled(reason, retryable=True)
        connection, published = self.connection, self.published
        if connection is None or published is None:
            return
        with connection.changed:
            if published.over:
                return
            published.error = self._cancelled
            connection.changed.notify_all()
        self._leave(connection, reason)

    def _give_up(self, reason: str) -> None:
        """Ends the publish at the agent, if it is not over."""
        if self.connection is not None and self.published is not None and not self.published.over:
            self._leave(self.connection, reason)

    def _leave(self, connection: Connection, reason: str) -> None:
        with contextlib.suppress(WeightSyncError):
            connection.say({"op": "cancel", "reason": reason[:500]})
        # Closed as well: the agent then knows that no byte follows, and the ring of a broken attempt is not used again.
        connection.close()

    def _join(self) -> list[Meta]:
        """All ranks were asked for the same."""
        metas: list[Meta] = []
        error: Exception | None = None
        try:
            metas = self._source.metas()
        except Exception as raised:
            error = raised
        self._together(lambda: GO, error)
        listed = hashlib.sha256(repr(metas).encode()).hexdigest()
        asked = self.group.gather([self.version, listed])
        for rank, (version, other) in enumerate(asked):
            if version != asked[0][0]:
                raise RanksDisagree(f"rank 0 publishes version {asked[0][0]}, rank {rank} version {version}", phase="ranks")
            if other != asked[0][1]:
                raise RanksDisagree(f"rank {rank} lists other tensors than rank 0, or in another order", phase="ranks")
        return metas

    def _start(self, start: Callable[[dict[str, Any]], tuple[Connection, Published]]) -> int:
        if self.group.rank == 0:
            tensors = [_announced(meta) for meta in self._metas]
            request = {**self._request, "tensors": tensors}
            offered = offer(self._cuda, self._source.known()) if self._cuda is not None else None
            if offered is not None and self._cuda is not None:
                request["gpu"], self._devices = offered
                # In the thread that publishes: the tensors are taken in its present state, without a wait for its GPU.
                self._cuda.follow(self._devices.values())
            self.connection, self.published = start(request)
            if self._cancelled is not None:
                raise self._cancelled
        return GO

    def _turn(self) -> int:
        """Rank 0 waits until its publish has its turn, and opens the memory that it is offered."""
        code = self._heard(lambda published: published.ring is not None or to_open(published) is not None)
        if code != GO or self.group.rank != 0:
            return code
        published = self._known()
        assert self.connection is not None
        with self.connection.changed:
            # Both at once: another ring begins another attempt.
            self._ring, self._attempt = published.ring, published.attempt
        if self._ring is None:
            open_offered(self.connection, published, self._cuda, self._devices)
            return WAIT
        self._ring.check(self._metas)
        warn_once(published.host_because)
        return GO

    def _batches(self) -> list[int]:
        batches = self.group.gather(self._ring.batches() if self._ring is not None else None)[0]
        return [int(count) for count in batches]

    def _pass(self, metas: list[Meta], batches: list[int]) -> int:
        """One pass over the source; AGAIN when the agent wants another."""
        if self.group.rank == 0:
            assert self._ring is not None
            self._writer = StreamWriter(self._ring, self._take_slot, self._hand_over)
        tensors: Iterator[tuple[str, Any]] | None = None
        failure: Exception | None = None
        done = 0
        try:
            for count in batches:
                if self._together(self._credit, failure) == AGAIN:
                    return self._again()
                try:
                    tensors = tensors or self._source.tensors(self.group)
                    failure = self._take(tensors, metas[done : done + count], done, len(metas))
                except Exception as raised:
                    failure = raised
                done += count
            if failure is None and tensors is not None:
                failure = _exhaust(tensors, len(metas))
        finally:
            close = getattr(tensors, "close", None)
            if close is not None:
                close()
        if self._together(self._end, failure) == AGAIN:
            return self._again()
        code = self._together(lambda: self._heard(lambda published: published.released))
        return self._again() if code == AGAIN else code

    def _take(self, tensors: Iterator[tuple[str, Any]], expected: list[Meta], done: int, total: int) -> Exception | None:
        """Takes the tensors of one batch. A failure on rank 0 alone is kept until the batch ends, because the others are in it."""
        failure: Exception | None = None
        for at, meta in enumerate(expected, start=done):
            try:
                name, tensor = next(tensors)
            except StopIteration:
                return failure or SourceFailed(f"the source ended after {at} of {total} tensors: it must give all of them in each pass")
            if name != meta.name:
                return failure or SourceFailed(f"the source gave {name} where {meta.name} was due")
            if self.group.rank == 0 and failure is None:
                try:
                    self._write(meta, tensor)
                except MemoryGone:
                    failure = _Interrupted()
                except Exception as raised:
                    failure = raised
            del tensor
        return None if isinstance(failure, _Interrupted) else failure

    def _write(self, meta: Meta, tensor: Any) -> None:
        if getattr(tensor, "full_tensor", None) is not None and hasattr(tensor, "placements"):
            raise SourceFailed(f"{meta.name} is a DTensor: the source must give full tensors, as weightsync.fsdp2(model) does")
        dtype, shape = describe_named(meta.name, tensor)
        if (dtype, shape) != (meta.dtype, meta.shape):
            raise SourceFailed(f"{meta.name} was announced as {meta.dtype} {list(meta.shape)}, the source gave {dtype} {list(shape)}")
        assert self._writer is not None
        try:
            self._writer.write(tensor)
        except (TypeError, NotImplementedError) as error:
            raise TypeError(f"{meta.name}: {error}") from error

    def _credit(self) -> int:
        """Rank 0 waits until it has room for what would be gathered next."""
        return self._heard(lambda published: bool(published.free) or (self._writer is not None and self._writer.slot is not None))

    def _end(self) -> int:
        if self.group.rank != 0:
            return GO
        assert self._writer is not None
        try:
            self._writer.finish()
        except (_Interrupted, MemoryGone):
            return self._heard(lambda published: False)
        return self._say({"op": "end", "attempt": self._attempt})

    def _again(self) -> int:
        """Gives the half-written slot back and starts over."""
        if self.group.rank == 0 and self._writer is not None:
            published = self._known()
            assert self.connection is not None
            with self.connection.changed:
                # Slots of another ring are all free.
                if self._writer.slot is not None and published.ring is self._ring:
                    published.free.append(self._writer.slot)
            self._writer = None
        return AGAIN

    def _take_slot(self) -> int:
        published = self._known()
        assert self.connection is not None
        begun = time.monotonic()
        with self.connection.changed:
            while self._event(published) is None:
                if published.free:
                    return published.free.popleft()
                self.connection.changed.wait(PATIENCE)
                self._check_deadline(published)
                if time.monotonic() - begun > self.group.longest_step:
                    message = f"the agent took no bucket for {self.group.longest_step:g} s while the other ranks waited"
                    raise Timeout(message, retryable=True, phase=published.phase)
        raise _Interrupted

    def _hand_over(self, sequence: int, slot: int, event: bool) -> None:
        later = {"event": True} if event else {}
        self._say({"op": "filled", "attempt": self._attempt, "sequence": sequence, "slot": slot, **later})

    def _say(self, message: dict[str, Any]) -> int:
        if self.group.rank == 0:
            assert self.connection is not None
            published = self._known()
            with self.connection.changed:
                if published.error is not None:
                    raise published.error
            self.connection.say(message)
        return GO

    def _event(self, published: Published) -> int | None:
        """AGAIN or FAIL, if a message of the agent ends the pass."""
        if published.error is not None:
            return FAIL
        return AGAIN if self._writer is not None and published.attempt != self._attempt else None

    def _heard(self, ready: Callable[[Published], bool]) -> int:
        """Rank 0 waits a moment for its agent; the others have nothing to wait for."""
        if self.group.rank != 0:
            return GO
        published = self._known()
        assert self.connection is not None
        with self.connection.changed:
            self.connection.changed.wait_for(lambda: self._event(published) is not None or ready(published), PATIENCE)
            if published.released and ready(published):
                # What failed after the release is the outcome's business.
                return GO
            if published.error is not None:
                raise published.error
            if self._event(published) == AGAIN:
                return AGAIN
            if ready(published):
                return GO
            self._check_deadline(published)
            return WAIT

    def _outcome(self, deadline: float, timeout: float, accept_staged: bool) -> int:
        if self.group.rank != 0:
            return GO
        published = self._known()
        assert self.connection is not None
        with self.connection.changed:
            over = self.connection.changed.wait_for(
                lambda: published.over or (accept_staged and published.staged),
                min(PATIENCE, max(0.0, deadline - time.monotonic())),
            )
            if published.error is not None:
                raise published.error
            if over:
                return GO
            if time.monotonic() >= deadline:
                message = f"version {self.version} had no outcome within {timeout:g} s; it continues: wait again or cancel it"
                raise Timeout(message, retryable=True, phase=published.phase)
            return WAIT

    def _check_deadline(self, published: Published) -> None:
        if time.monotonic() > self._deadline:
            message = f"version {self.version} was not taken within {self._timeout:g} s"
            raise Timeout(message, retryable=True, phase=published.phase)

    def _known(self) -> Published:
        assert self.published is not None
        return self.published

    def _together(self, step: Callable[[], int], failure: Exception | None = None) -> int:
        """All ranks do a step, and continue only when all can."""
        return together(self.group, step, partial(_as_error, self.group), failure)


def _announced(meta: Meta) -> dict[str, Any]:
    section = {"section": meta.section} if meta.section != "model" else {}
    return {"name": meta.name, "dtype": meta.dtype, "shape": list(meta.shape), **section}


def _exhaust(tensors: Iterator[tuple[str, Any]], total: int) -> Exception | None:
    """Lets the source finish its pass: what follows the last tensor may be a collective operation too."""
    try:
        name, _ = next(tensors)
    except StopIteration:
        return None
    except Exception as raised:
        return raised
    return SourceFailed(f"the source gave {name} after the last of {total} announced tensors")


def _as_error(group: Group, failure: Exception) -> WeightSyncError:
    if isinstance(failure, WeightSyncError):
        return failure
    where = f" on rank {group.rank}" if group.size > 1 else ""
    error = SourceFailed(f"the source raised {type(failure).__name__}{where}: {failure}", phase="transfer")
    error.__cause__ = failure
    return error
