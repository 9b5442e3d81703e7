"""Registers an engine with the agent of its pod, from the process that runs the engine's server.

For pools with `engine.discovery: Registered`: engines that start and end while their pod runs, such as Ray actors with free ports. A
registration lasts as long as its process. It must never outlive it, and never stop the engine because the agent is away.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType

from ._connection import greet
from ._socket import Wire, find
from .errors import AgentLost, Failed, Timeout, WeightSyncError, from_agent

_LOG = logging.getLogger(__name__)
AGAIN = 0.25
"""Seconds between tries to reach an agent that started again."""
ANSWER = 10.0
"""Seconds in which the agent must answer."""


class EngineRegistration:
    """The registration of one engine; ends with `close`, with the context, or with this process."""

    def __init__(self, port: int, address: str | None, socket: str | None, api_key: str | None = None) -> None:
        self.port = port
        """Port of the engine's server."""
        given = {"address": address, "apiKey": api_key}
        self._request = {"op": "register", "port": port, **{name: value for name, value in given.items() if value is not None}}
        self._socket = socket
        self._closed = threading.Event()
        self._wire: Wire | None = None

    @property
    def registered(self) -> bool:
        """Whether the agent holds the registration now."""
        return self._wire is not None

    def close(self) -> None:
        """Ends the registration: the engine leaves its group."""
        self._closed.set()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def __enter__(self) -> EngineRegistration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _register(self) -> Wire:
        wire = Wire(self._socket or find(os.environ))
        try:
            greet(wire)
            wire.send(self._request)
            reply = wire.receive(ANSWER)
            if reply is None:
                raise AgentLost(f"the agent did not answer within {ANSWER:g} s", retryable=True, phase="connect")
            if reply["event"] == "error":
                raise from_agent(reply["error"])
            if reply["event"] != "registered":
                raise Failed(f"the agent answers a registration with {reply['event']}")
        except BaseException:
            wire.close()
            raise
        return wire

    def _start(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._wire = self._register()
                break
            except WeightSyncError as error:
                if not error.retryable:
                    raise
                if time.monotonic() > deadline:
                    message = f"the engine on port {self.port} could not register within {timeout:g} s: {error.message}"
                    raise Timeout(message, retryable=True, phase="connect") from error
            time.sleep(AGAIN)
        threading.Thread(target=self._keep, name=f"weightsync-engine-{self.port}", daemon=True).start()

    def _keep(self) -> None:
        """Registers again whenever the agent started again."""
        problem = ""
        while not self._closed.is_set():
            wire = self._wire
            try:
                if wire is None:
                    wire = self._register()
                    self._wire = wire
                    problem = ""
                    _LOG.info("the engine on port %d is registered again", self.port)
                # The agent sends nothing more; the end of the connection is all there is to learn.
                wire.receive(3600)
            except WeightSyncError as error:
                if wire is not None:
                    wire.close()
                self._wire = None
                if not self._closed.is_set() and error.message != problem:
                    problem = error.message
                    _LOG.warning("the engine on port %d is not registered, trying again: %s", self.port, error)
                self._closed.wait(AGAIN)
        # Closed while it registered.
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def register_engine(
    port: int, address: str | None = None, *, api_key: str | None = None, socket: str | None = None, timeout: float = 60
) -> EngineRegistration:
    """Registers the engine whose server listens on `port` of this pod; keep the result for as long as the engine serves.

    Call it in the process that runs the server, or that starts and ends it. `address` is where the server listens if not on 127.0.0.1: the
    pod's own address. `api_key` is what the server asks of its clients (vLLM's `--api-key`). The agent sends it to this port alone, and its
    own key to no registered engine. The agent's socket is `socket`, else WEIGHTSYNC_SOCKET, else that of WEIGHTSYNC_POD_UID, else the only
    one here.
    Raises `Timeout` if no agent that takes engines is there within `timeout` seconds, and `NotAllowed` or `Refused` if it refuses.
    """
    registration = EngineRegistration(port, address, socket.removeprefix("@") if socket else None, api_key)
    registration._start(timeout)
    return registration
