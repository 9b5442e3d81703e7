"""The socket of the agent of this pod: its name, and lines and descriptors over it.

The name is abstract (Linux): no path, works on a read-only root, gone with its process. It lives in the network namespace, which the
containers of a pod share.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from .errors import AgentLost, Failed

PREFIX = "weightsync/"
ACCEPTS_CONNECTIONS = 1 << 16
LONGEST_LINE = 256 << 20
IMAGE_USER = 65532
"""User of the agent's own image, which a sidecar runs as."""


def peer_user(connected: socket.socket) -> int:
    """The user of the listener, from the kernel."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def check_user(user: int, environment: Mapping[str, str]) -> None:
    """Refuses an agent of another user: on a host's network any process can listen under an abstract name.

    Taken are this process's own user, root, the user of the agent's image, and those in WEIGHTSYNC_AGENT_UIDS (numbers with commas between
    them, or `any`).
    """
    more = [each.strip() for each in environment.get("WEIGHTSYNC_AGENT_UIDS", "").split(",") if each.strip()]
    if user in (os.geteuid(), 0, IMAGE_USER) or "any" in more or str(user) in more:
        return
    found = f"user {user} listens on the agent's socket, and this process is of user {os.geteuid()}"
    raise AgentLost(f"{found}: if that is the agent, name its user in WEIGHTSYNC_AGENT_UIDS", phase="connect")


def find(environment: Mapping[str, str], table_path: str = "/proc/net/unix") -> str:
    """The agent's socket: WEIGHTSYNC_SOCKET, else WEIGHTSYNC_POD_UID, else the only one in this network namespace."""
    if named := environment.get("WEIGHTSYNC_SOCKET"):
        return named.removeprefix("@")
    if uid := environment.get("WEIGHTSYNC_POD_UID"):
        return PREFIX + uid
    names = set()
    try:
        with open(table_path, encoding="utf-8", errors="replace") as table:
            for line in table:
                fields = line.split()
                if len(fields) == 8 and fields[7].startswith("@" + PREFIX) and int(fields[3], 16) & ACCEPTS_CONNECTIONS:
                    names.add(fields[7].removeprefix("@"))
    except (OSError, ValueError) as error:
        raise AgentLost(f"the agent's socket cannot be looked up: {error}: set WEIGHTSYNC_SOCKET", phase="connect") from error
    if len(names) > 1:
        shown = ", ".join(sorted(names))
        raise AgentLost(f"several agents listen here ({shown}): name one in WEIGHTSYNC_SOCKET", phase="connect")
    if not names:
        raise AgentLost("no agent listens in this network namespace: is the sidecar running?", retryable=True, phase="connect")
    return names.pop()


class Wire:
    """A connected socket: whole lines in and out, descriptors in. One thread may read while another writes."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(10)
            self._socket.connect("\0" + name)
        except OSError as error:
            self._socket.close()
            raise AgentLost(f"no agent answers at @{name}: {error}", retryable=True, phase="connect") from error
        try:
            check_user(peer_user(self._socket), os.environ)
        except AgentLost:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._heard = bytearray()
        self._looked_at = 0
        self.descriptors: deque[int] = deque()
        _OPEN.add(self)

    def close(self) -> None:
        """Ends the connection: the agent sees it at once, and a reader of this process wakes up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Closes the descriptors without a word to the agent (a forked child must not keep its parent's connection alive)."""
        _OPEN.discard(self)
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def send(self, message: Mapping[str, Any], silence: float = 10) -> None:
        """Sends a line; ends with AgentLost when the agent takes no byte for `silence` seconds."""
        rest = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not self._ready(select.POLLOUT, silence):
                    raise AgentLost(f"the agent took nothing for {silence:g} s", retryable=True) from None
            except OSError as error:
                raise AgentLost(f"the agent went away: {error}", retryable=True) from error

    def receive(self, within: float) -> dict[str, Any] | None:
        """The next line, or None when none came within so many seconds. AgentLost when the connection ended."""
        deadline = time.monotonic() + within
        while True:
            end = self._heard.find(b"\n", self._looked_at)
            if end >= 0:
                line = bytes(self._heard[:end])
                del self._heard[: end + 1]
                self._looked_at = 0
                return _message(line)
            self._looked_at = len(self._heard)
            if self._looked_at > LONGEST_LINE:
                raise Failed("the agent sent a line without an end")
            if not self._ready(select.POLLIN, deadline - time.monotonic()):
                return None
            self._receive_some()

    def _receive_some(self) -> None:
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            raise AgentLost(f"the agent went away: {error}", retryable=True) from error
        self.descriptors.extend(descriptors)
        if not chunk:
            raise AgentLost("the agent closed the connection", retryable=True)
        self._heard += chunk

    def _ready(self, event: int, within: float) -> bool:
        try:
            poll = select.poll()
            poll.register(self._socket, event)
            return bool(poll.poll(max(0, within) * 1000))
        except (OSError, ValueError) as error:
            raise AgentLost("the connection was closed", retryable=True) from error


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise Failed(f"the agent sent a line that is no JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("event"), str):
        raise Failed("the agent sent a line without an event")
    return message


def map_ring(descriptor: int, length: int) -> mmap.mmap:
    """Maps the ring and closes its descriptor. Refuses memory that could shrink under us: that would be a signal, not an error."""
    try:
        size = os.fstat(descriptor).st_size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if size < length or not seals & fcntl.F_SEAL_SHRINK:
            raise Failed(f"the agent's ring has {size} bytes, {length} were announced, or it is not sealed")
        ring = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    # Data loaders fork: a child has no use for the ring.
    with contextlib.suppress(OSError):
        ring.madvise(mmap.MADV_DONTFORK)
    return ring


_OPEN: weakref.WeakSet[Wire] = weakref.WeakSet()


def _forget_all() -> None:
    for wire in list(_OPEN):
        wire.forget()


# A forked child (a data loader's worker) that outlives its trainer would otherwise keep the connection open, and the agent would not
# notice for a while that the trainer is dead.
os.register_at_fork(after_in_child=_forget_all)
