"""Who may be the agent at the other end of the socket."""

from __future__ import annotations

import os
import socket
import uuid

import pytest

from weightsync import _socket
from weightsync.errors import AgentLost


def test_listener_of_this_user_is_taken() -> None:
    name = f"weightsync/{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        _socket.Wire(name).close()


def test_listener_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"weightsync/{uuid.uuid4()}"
    other = os.geteuid() + 4711
    monkeypatch.setattr(_socket, "peer_user", lambda _: other)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        with pytest.raises(AgentLost, match=f"user {other} listens"):
            _socket.Wire(name)
        for allowed in (f"1, {other}", "any"):
            monkeypatch.setenv("WEIGHTSYNC_AGENT_UIDS", allowed)
            _socket.Wire(name).close()


def test_root_and_the_user_of_the_image_are_taken() -> None:
    for user in (0, os.geteuid(), _socket.IMAGE_USER):
        _socket.check_user(user, {})
