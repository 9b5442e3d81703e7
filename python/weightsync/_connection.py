"""A connection to the agent and what is known over it: one publish at a time, followed by a thread that only listens.

The thread never calls user code and never takes part in a collective operation. Anyone who waits, waits on a condition with a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ._memory import GpuMemory, HostMemory, Memory
from ._ring import Ring
from ._socket import Wire, map_ring
from .errors import AgentLost, Failed, WeightSyncError, from_agent
from .result import Progress, Result

PROTOCOL = 1
SILENCE = 10.0
"""Seconds. A live agent sends a message each second while a publish runs."""
CLIENT = "weightsync-python"


def greet(wire: Wire) -> None:
    """Says hello, and hears that the agent speaks our protocol."""
    # The agent's last message, if there is one, explains more than a broken pipe.
    with contextlib.suppress(AgentLost):
        wire.send({"op": "hello", "protocol": PROTOCOL, "client": CLIENT})
    reply = wire.receive(SILENCE)
    if reply is None:
        raise AgentLost(f"the agent did not answer within {SILENCE:g} s", retryable=True, phase="connect")
    if reply["event"] == "error":
        raise from_agent(reply["error"])
    if reply["event"] != "welcome" or reply.get("protocol") != PROTOCOL:
        raise Failed(f"the agent greets with {reply['event']}, not in protocol {PROTOCOL}")


@dataclass
class GpuRing:
    """A ring in GPU memory, as the agent announced it."""

    announced: dict[str, Any]
    """The agent's whole message."""
    slots: int
    slot_bytes: int
    memory: GpuMemory | None = None
    """Opened here; the agent has not confirmed the check bytes yet."""


@dataclass
class Published:
    """All that was heard about one publish."""

    version: int
    accepted: bool = False
    gpu_ring: GpuRing | None = None
    """Memory on a GPU that the agent offers and that is not agreed on yet."""
    ring: Ring | None = None
    """Where to write; none as long as that is not agreed on."""
    host_because: str | None = None
    """Why the ring is in host memory although tensors are on a GPU."""
    memory: str = "host"
    """As `Result.memory`."""
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
        self._memory: Memory | None = None
        self._retired: list[Memory] = []
        self._writing = threading.Lock()
        self._quiet_since = time.monotonic()
        try:
            greet(self._wire)
        except BaseException:
            self._wire.close()
            raise
        self._reader = threading.Thread(target=self._listen, name="weightsync-reader", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends the connection and waits for its thread."""
        # First: the agent frees a GPU's memory when it is closed here.
        self._give_memory_back()
        self._wire.close()
        if self._reader is not threading.current_thread():
            self._reader.join(SILENCE)

    def _give_memory_back(self) -> None:
        with self.changed:
            self._retire(self._memory)
            self._memory = None
        self.drop_retired()

    def _retire(self, memory: Memory | None) -> None:
        if memory is not None:
            self._retired.append(memory)

    def drop_retired(self) -> None:
        """Releases memory that is not used any more, and notifies the agent; a GPU may have to finish its work first."""
        with self.changed:
            retired, self._retired = self._retired, []
        for memory in retired:
            memory.close()
            if isinstance(memory, GpuMemory):
                with contextlib.suppress(WeightSyncError):
                    self._send({"op": "closed", "ring": memory.ring})

    def opened(self, publish: Published, ring: GpuRing, memory: GpuMemory) -> None:
        """The offered memory was opened here."""
        with self.changed:
            if publish.gpu_ring is not ring:
                # Meanwhile the agent offered another.
                self._retire(memory)
                return
            ring.memory = memory
        self.say({"op": "opened", "ring": memory.ring, "events": memory.events})

    def unopened(self, publish: Published, ring: GpuRing, reason: str) -> None:
        """The offered memory cannot be opened; the agent offers another."""
        with self.changed:
            if publish.gpu_ring is ring:
                publish.gpu_ring = None
        self.say({"op": "unopened", "ring": int(ring.announced["gpu"]["ring"]), "reason": reason[:500]})

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

    def _send(self, message: dict[str, Any]) -> None:
        with self._writing:
            self._wire.send(message)

    def say(self, message: dict[str, Any]) -> None:
        """Sends a line; the reader's word for a lost agent is the better one if both have one."""
        try:
            self._send(message)
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
                            raise AgentLost(f"the agent sent nothing for {quiet:.0f} s", retryable=True)
                self.drop_retired()
        except WeightSyncError as error:
            self._end(error)
        except Exception as error:
            self._end(Failed(f"invalid message from the agent: {error!r}"))

    def _end(self, error: WeightSyncError) -> None:
        with self.changed:
            self.lost = error
            publish = self._publish
            if publish is not None and not publish.over:
                error.phase = publish.phase
                publish.error = error
            self.changed.notify_all()
        self._wire.close()
        self._give_memory_back()

    def _hear(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "roster":
            self.roster = message["roster"]
            self.rosters_heard += 1
            return
        if event == "close":
            if isinstance(self._memory, GpuMemory) and self._memory.ring == int(message["ring"]):
                self._retire(self._memory)
                self._memory = None
            return
        publish = self._publish
        if publish is None or publish.over:
            # The end of something that ended already, for example a slot that was still read.
            if event == "error":
                raise from_agent(message["error"])
            return
        if event == "accepted":
            publish.accepted = True
        elif event == "ring":
            self._take_ring(publish, message)
        elif event == "ready":
            self._ready(publish, message)
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
            publish.result = Result.of(message["result"], publish.memory)
        elif event == "error":
            publish.error = from_agent(message["error"])

    def _take_ring(self, publish: Published, message: dict[str, Any]) -> None:
        slots, slot_bytes = int(message["slots"]), int(message["slotBytes"])
        publish.free = deque(range(slots))
        publish.attempt = int(message["attempt"])
        publish.host_because = message.get("hostBecause")
        if publish.gpu_ring is not None:
            # Opened, but the worker did not find there what was written.
            self._retire(publish.gpu_ring.memory)
            publish.gpu_ring = None
        announced = message.get("gpu")
        if announced is not None:
            kept = self._memory
            if announced["proven"]:
                if not isinstance(kept, GpuMemory) or kept.ring != int(announced["ring"]):
                    raise Failed("the agent continues with memory that was never opened here")
                publish.ring = Ring(kept, slot_bytes, message)
                publish.memory = f"gpu {kept.place}"
            else:
                publish.ring = None
                publish.gpu_ring = GpuRing(message, slots, slot_bytes)
            return
        if message["memfd"]:
            if not self._wire.descriptors:
                raise Failed("the agent announced a ring and sent no memory")
            self._keep(HostMemory(map_ring(self._wire.descriptors.popleft(), slots * slot_bytes)))
        if not isinstance(self._memory, HostMemory):
            raise Failed("the agent continues with memory that it never sent")
        publish.ring = Ring(self._memory, slot_bytes, message)
        publish.memory = f"host: {publish.host_because}" if publish.host_because else "host"

    def _ready(self, publish: Published, message: dict[str, Any]) -> None:
        ring = publish.gpu_ring
        if ring is None or ring.memory is None or ring.memory.ring != int(message["ring"]):
            raise Failed("the agent reports memory as ready that was not opened here")
        ring.memory.use_events = bool(message["events"])
        self._keep(ring.memory)
        publish.ring = Ring(ring.memory, ring.slot_bytes, ring.announced)
        publish.memory = f"gpu {ring.memory.place}"
        publish.gpu_ring = None

    def _keep(self, memory: Memory) -> None:
        if self._memory is not memory:
            self._retire(self._memory)
        self._memory = memory
