"""Python to engines, through real agents: `weightsync local` with simulated engines, and members that die in the middle of a version."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy
import pytest
import safetensors.numpy
from conftest import LIMIT
from local_documents import free_port, simulated_vllm, write_documents

import weightsync

METAS = [(f"layer.{number}", "F32", (256, 256)) for number in range(24)]
BOTH = {"rollouts/actor-0", "rollouts/actor-1"}
T = TypeVar("T")
_numbers = itertools.count()


class Group:
    """A trainer's agent and two rollouts on this host."""

    def __init__(self, programs: Path, directory: Path, delivery: str = "Agent", update: dict[str, object] | None = None) -> None:
        self.directory = directory
        self.ports = []
        self.name = f"whole-{os.getpid()}-{next(_numbers)}"
        safetensors.numpy.save_file(dict(tensors(0)), directory / "model.safetensors")
        rollouts = []
        for number in (0, 1):
            port = free_port()
            self.ports.append(port)
            engine = simulated_vllm(programs / "weightsync-dev", directory, port)
            rollouts.append({"name": f"actor-{number}", "port": port, "command": engine})
        file = write_documents(
            directory / "local.yaml",
            self.name,
            rollouts,
            state=directory / "state",
            delivery=delivery,
            transport={"bucketMiB": 1},
            health={"periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 2},
            update={"retainMiB": 0, **(update or {})},
        )
        with open(directory / "local.log", "wb") as log:
            self.process = subprocess.Popen([programs / "weightsync", "local", "-f", file], stdout=log, stderr=log)
        self.socket = f"@weightsync/{self.name}-trainer"

    def agent(self, pod: str) -> int:
        """The process of a pod's agent; the kernel knows it by the environment that it was started with."""

        def found() -> int | None:
            wanted = f"POD_NAME={pod}".encode()
            return next((pid for pid in self._children() if wanted in _read(pid, "environ")), None)

        return until(found, f"an agent of {pod}")

    def engine(self, number: int) -> int:
        """The process of a rollout's engine."""

        def found() -> int | None:
            wanted = str(self.ports[number]).encode()
            return next((pid for pid in self._children() if {b"simulate-engine", wanted} <= set(_read(pid, "cmdline"))), None)

        return until(found, f"the engine of actor-{number}")

    def _children(self) -> list[int]:
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for children in lists for pid in children.read_text().split()]

    def wait_for_both(self, publisher: weightsync.Publisher) -> None:
        """Waits until both replicas are members."""

        def complete() -> bool | None:
            states = {replica.name: replica.state for replica in publisher.roster().replicas}
            return True if set(states) == BOTH and set(states.values()) == {"ready"} else None

        until(complete, "a group of two replicas")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(LIMIT)


def _read(pid: int, what: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    except OSError:
        return []


def until(probe: Callable[[], T | None], what: str) -> T:
    """Waits for something, for a limited time."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if (seen := probe()) is not None:
            return seen
        time.sleep(0.02)
    raise TimeoutError(f"{what} did not come")


def tensors(version: int) -> Iterator[tuple[str, numpy.ndarray]]:
    generator = numpy.random.default_rng(version)
    for name, _, shape in METAS:
        yield name, generator.standard_normal(shape).astype("float32")


@pytest.fixture(scope="module")
def group(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(programs, tmp_path_factory.mktemp("whole"))
    try:
        yield group
    finally:
        group.stop()


@pytest.fixture
def publisher(group: Group) -> Iterator[weightsync.Publisher]:
    """A publisher of a group whose replicas are both members."""
    with weightsync.Publisher.from_env(socket=group.socket, connect_timeout=LIMIT) as publisher:
        group.wait_for_both(publisher)
        yield publisher


def paused_in_the_middle(version: int, reached: Callable[[], None]) -> weightsync.Source:
    """Tensors, and something that happens once between the eighth and the ninth of the first pass."""
    passes = []

    def export() -> Iterator[tuple[str, numpy.ndarray]]:
        passes.append(1)
        for number, tensor in enumerate(tensors(version)):
            if number == 8 and len(passes) == 1:
                reached()
            yield tensor

    return weightsync.stream(export, METAS)


def test_versions_reach_both_engines(publisher: weightsync.Publisher) -> None:
    for version in (1, 2):
        result = publisher.publish(weightsync.state_dict(dict(tensors(version))), version=version, timeout=LIMIT)
        assert set(result.installed) == BOTH, result
    assert {replica.version for replica in publisher.roster().replicas} == {2}


def test_rollout_that_dies_midway_does_not_stop_the_trainer(group: Group, publisher: weightsync.Publisher) -> None:
    victim = group.agent("actor-1")
    source = paused_in_the_middle(3, lambda: os.kill(victim, signal.SIGKILL))
    result = publisher.publish(source, version=3, timeout=LIMIT)
    assert result.version == 3
    assert "rollouts/actor-0" in result.installed, result


def test_agent_death_is_retryable_and_version_succeeds_later(group: Group, publisher: weightsync.Publisher) -> None:
    victim = group.agent("trainer")
    source = paused_in_the_middle(4, lambda: os.kill(victim, signal.SIGKILL))
    begun = time.monotonic()
    with pytest.raises(weightsync.AgentLost) as raised:
        publisher.publish(source, version=4, timeout=LIMIT)
    assert raised.value.retryable
    assert time.monotonic() - begun < 5
    result = publisher.publish(source, version=4, timeout=LIMIT)
    assert (result.version, bool(result.installed)) == (4, True)
