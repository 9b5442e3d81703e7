"""The agent's messages about epochs: a thread receives them and runs the callbacks for the end of an epoch.

Every wait is on a condition with a deadline. A lost agent ends the epoch, because its end would not be reported any more.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ._connection import SILENCE, greet
from ._socket import Wire
from .errors import AgentLost, Failed, WeightSyncError, from_agent
from .result import Result

_LOG = logging.getLogger("weightsync")


class Reported:
    """An epoch as the agent announced it, and its later state."""

    def __init__(self, topology: dict[str, Any], listener: socket.socket | None) -> None:
        self.topology = topology
        self.number = int(topology["epoch"])
        self.listener = listener
        self.fenced = threading.Event()
        self.reason: str | None = None
        self._callbacks: list[Callable[[str], object]] = []
        self._lock = threading.Lock()

    def on_fenced(self, callback: Callable[[str], object]) -> None:
        """Runs it when the epoch ends; at once if it has ended."""
        with self._lock:
            if self.reason is None:
                self._callbacks.append(callback)
                return
            reason = self.reason
        callback(reason)

    def fence(self, reason: str) -> None:
        """Ends the epoch; the first reason counts."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            callbacks, self._callbacks = self._callbacks, []
        self.fenced.set()
        for callback in callbacks:
            try:
                callback(reason)
            except Exception:
                _LOG.exception("what was to run at the end of epoch %d failed", self.number)

    def close(self) -> None:
        """Frees the port, if the socket was not taken."""
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.close()


class Bringing:
    """A version that is under way."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.open = False
        self.result: Result | None = None
        self.error: WeightSyncError | None = None

    @property
    def over(self) -> bool:
        """Whether it has its outcome."""
        return self.result is not None or self.error is not None


class EpochConnection:
    """A greeted connection that hears of every epoch. `changed` guards what was heard."""

    def __init__(self, name: str) -> None:
        self._wire = Wire(name)
        self._writing = threading.Lock()
        self.changed = threading.Condition()
        self.reported: Reported | None = None
        self.bringing: Bringing | None = None
        self.lost: WeightSyncError | None = None
        self.refused: WeightSyncError | None = None
        try:
            greet(self._wire)
            self._wire.send({"op": "watchEpochs"})
        except BaseException:
            self._wire.close()
            raise
        self._heard_at = time.monotonic()
        self._reader = threading.Thread(target=self._listen, name="weightsync-epochs", daemon=True)
        self._reader.start()

    def say(self, message: dict[str, Any]) -> None:
        """Sends a line."""
        with self._writing:
            self._wire.send(message)

    def close(self) -> None:
        """Ends the connection; a version that is under way is given up by that."""
        self._wire.close()
        if self._reader is not threading.current_thread():
            self._reader.join(SILENCE)

    def _listen(self) -> None:
        error: WeightSyncError
        try:
            while True:
                message = self._wire.receive(1)
                if message is not None:
                    self._heard_at = time.monotonic()
                    self._hear(message)
                elif time.monotonic() - self._heard_at > SILENCE:
                    raise AgentLost(f"the agent sent nothing for {SILENCE:g} s", retryable=True)
        except WeightSyncError as raised:
            error = raised
        except Exception as raised:
            error = Failed(f"invalid message from the agent: {raised!r}")
        with self.changed:
            self.lost = error
            reported = self.reported
            if self.bringing is not None and not self.bringing.over:
                self.bringing.error = error
            self.changed.notify_all()
        if reported is not None:
            reported.fence(f"the agent is lost: {error.message}")
        self._wire.close()

    def _hear(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "alive":
            return
        if event == "epoch":
            self._take_epoch(message["topology"])
            return
        over = None
        with self.changed:
            bringing = self.bringing if self.bringing is not None and not self.bringing.over else None
            if event == "fenced":
                over = self.reported
            elif event == "open" and bringing is not None:
                bringing.open = True
            elif event == "done" and bringing is not None:
                bringing.result = Result.of(message["result"], "external")
            elif event == "error":
                error = from_agent(message["error"])
                if bringing is not None:
                    bringing.error = error
                elif error.retryable:
                    _LOG.warning("error from the agent: %s", error)
                else:
                    self.refused = error
            self.changed.notify_all()
        # Without the lock: what was registered may take its time, or ask.
        if over is not None and over.number <= int(message["epoch"]):
            over.fence(str(message["reason"]))
            with self.changed:
                self.changed.notify_all()

    def _take_epoch(self, topology: dict[str, Any]) -> None:
        if not self._wire.descriptors:
            raise Failed("the agent announced an epoch without its socket")
        descriptor = self._wire.descriptors.popleft()
        try:
            listener = socket.socket(fileno=descriptor)
        except OSError as error:
            os.close(descriptor)
            raise Failed(f"the agent sent something that is no socket: {error}") from error
        with self.changed:
            before, self.reported = self.reported, Reported(topology, listener)
            self.refused = None
            self.changed.notify_all()
        if before is not None:
            before.fence("another epoch took its place")
