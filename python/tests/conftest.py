"""The other side of the socket: the real server (examples/trainer_socket.rs) in a process of its own, and where its versions lie."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsync

ROOT = Path(__file__).parents[2]
LIMIT = 60
"""Seconds after which something hangs."""

LONGEST = ("test_vllm_plane.py", "test_vllm_refused.py", "test_quick_start.py", "test_wheel.py", "test_integrations.py")
"""With several processes they begin first, so that none waits for them at the end."""
TOGETHER = ("test_group.py", "test_whole.py")
"""Files whose tests share what their module's fixture made, or the order of their versions: one process runs all of them."""

_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n PROCESSES`: each process takes a next test, but all of a file of `TOGETHER`."""
    from xdist.scheduler import LoadScopeScheduling

    class Tests(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return file if Path(file).name in TOGETHER else nodeid

    config.option.loadscopereorder = False
    return Tests(config, log)


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the built programs."""
    command = ["cargo", "build", "--locked", "--workspace", "--bins", "--tests", "--examples"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"


class Agent:
    """A running server."""

    def __init__(self, programs: Path, directory: Path, options: tuple[str, ...], socket: str | None) -> None:
        self.socket = socket or f"weightsync/test-{os.getpid()}-{next(_numbers)}"
        self.directory = directory
        command = [str(programs / "examples" / "trainer_socket"), "--socket", self.socket, "--write", str(directory), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.said() == {"listening": True}

    def said(self) -> dict[str, Any]:
        """The next thing it printed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the agent ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def file(self, version: int) -> Path:
        """The safetensors file that it wrote of a version."""
        return self.directory / f"{version}.safetensors"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def stop(self) -> None:
        """Ends it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start_agent(programs: Path, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts servers with options of the example, and ends them."""
    agents: list[Agent] = []

    def start(*options: str, socket: str | None = None) -> Agent:
        agents.append(Agent(programs, tmp_path, options, socket))
        return agents[-1]

    yield start
    for agent in agents:
        agent.stop()


@pytest.fixture
def agent(start_agent: Callable[..., Agent]) -> Agent:
    """A server with small buckets and two slots, so that every stream goes round its ring."""
    return start_agent("--bucket-bytes", "4096", "--slots", "2")


@pytest.fixture
def publisher(agent: Agent) -> Iterator[weightsync.Publisher]:
    """A publisher of the server `agent`."""
    with weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=5) as publisher:
        yield publisher
