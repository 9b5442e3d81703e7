"""A connection to the agent and what is known over it: one publish at a time, followed by a thread that only listens.

The thread never calls user code and never takes part in a collective operation. Whoever waits, waits on a condition with a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ._ring import Ring
from ._socket import Wire, map_ring
from .errors import AgentLost, Failed, WeightSyncError, from_agent
from .result import Progress, Result

PROTOCOL = 1
SILENCE = 10.0
"""Seconds. An agent that lives says something each second while a publish runs."""
CLIENT = "weightsync-python"


@dataclass
class Published:
    """All that was heard about one publish."""

    version: int
    accepted: bool = False
    ring: Ring | None = None
    free: deque[int] = field(default_factory=deque)
    attempt: int = 0
    reason: str = ""
    released: bool = False
    staged: bool = False
    progress: Progress | None = None
    result: Result | None = None
    error: WeightSyncError | None = None

    @property
    def phase(self) -> str:
        """The step that runs."""
        if self.progress is not None:
            return self.progress.phase
        return "transfer" if self.attempt else "queue"

    @property
    def over(self) -> bool:
        """Whether it has its outcome."""
        return self.result is not None or self.error is not None


class Connection:
    """A greeted connection. `changed` guards everything that was heard."""

    def __init__(self, name: str) -> None:
        self._wire = Wire(name)
        self.changed = threading.Condition()
        self.lost: WeightSyncError | None = None
        self.roster: dict[str, Any] | None = None
        self.rosters_heard = 0
        self._publish: Published | None = None
        self._memory: Any = None
        self._quiet_since = time.monotonic()
        try:
            self._greet()
        except BaseException:
            self._wire.close()
            raise
        self._reader = threading.Thread(target=self._listen, name="weightsync-reader", daemon=True)
        self._reader.start()

    def _greet(self) -> None:
        # The agent's last words, if it has any, say more than a broken pipe.
        with contextlib.suppress(AgentLost):
            self._wire.send({"op": "hello", "protocol": PROTOCOL, "client": CLIENT})
        reply = self._wire.receive(SILENCE)
        if reply is None:
            raise AgentLost(f"the agent did not answer within {SILENCE:g} s", retryable=True, phase="connect")
        if reply["event"] == "error":
            raise from_agent(reply["error"])
        if reply["event"] != "welcome" or reply.get("protocol") != PROTOCOL:
            raise Failed(f"the agent greets with {reply['event']}, not in protocol {PROTOCOL}")

    def close(self) -> None:
        """Ends the connection and waits for its thread."""
        self._wire.close()
        if self._reader is not threading.current_thread():
            self._reader.join(SILENCE)

    @property
    def usable(self) -> bool:
        """Whether another publish may start here."""
        with self.changed:
            return self.lost is None and (self._publish is None or self._publish.over)

    def start(self, request: dict[str, Any]) -> Published:
        """Sends a publish request."""
        with self.changed:
            publish = self._publish = Published(int(request["version"]))
            self._quiet_since = time.monotonic()
        self.say(request)
        return publish

    def say(self, message: dict[str, Any]) -> None:
        """Sends a line; the reader's word for a lost agent is the better one if both have one."""
        try:
            self._wire.send(message)
        except WeightSyncError as error:
            with self.changed:
                self.changed.wait_for(lambda: self.lost is not None, timeout=1)
                raise (self.lost or error) from None

    def _listen(self) -> None:
        try:
            while True:
                message = self._wire.receive(1)
                with self.changed:
                    if message is not None:
                        self._quiet_since = time.monotonic()
                        self._hear(message)
                        self.changed.notify_all()
                    elif self._publish is not None and not self._publish.over:
                        quiet = time.monotonic() - self._quiet_since
                        if quiet > SILENCE:
                            raise AgentLost(f"the agent said nothing for {quiet:.0f} s", retryable=True)
        except WeightSyncError as error:
            self._end(error)
        except Exception as error:
            self._end(Failed(f"what the agent says cannot be understood: {error!r}"))

    def _end(self, error: WeightSyncError) -> None:
        with self.changed:
            self.lost = error
            publish = self._publish
            if publish is not None and not publish.over:
                error.phase = publish.phase
                publish.error = error
            self.changed.notify_all()
        self._wire.close()
        self._memory = None

    def _hear(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "roster":
            self.roster = message["roster"]
            self.rosters_heard += 1
            return
        publish = self._publish
        if publish is None or publish.over:
            # The end of something that is over already, for instance a slot that was still read.
            if event == "error":
                raise from_agent(message["error"])
            return
        if event == "accepted":
            publish.accepted = True
        elif event == "ring":
            self._take_ring(publish, message)
        elif event == "free":
            publish.free.append(int(message["slot"]))
        elif event == "again":
            publish.attempt, publish.reason = int(message["attempt"]), str(message["reason"])
        elif event == "released":
            publish.released = True
        elif event == "progress":
            publish.progress = Progress.of(message)
        elif event == "staged":
            publish.staged = True
        elif event == "done":
            publish.released = True
            publish.result = Result.of(message["result"])
        elif event == "error":
            publish.error = from_agent(message["error"])

    def _take_ring(self, publish: Published, message: dict[str, Any]) -> None:
        slots, slot_bytes = int(message["slots"]), int(message["slotBytes"])
        if message["memfd"]:
            if not self._wire.descriptors:
                raise Failed("the agent announced a ring and sent no memory")
            self._memory = map_ring(self._wire.descriptors.popleft(), slots * slot_bytes)
        publish.ring = Ring(self._memory, slot_bytes, message["layout"])
        publish.free = deque(range(slots))
        publish.attempt = int(message["attempt"])
