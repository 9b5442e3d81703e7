"""Tensors on GPUs: a trainer's process writes them into memory of the agent's worker, on the stand-in for the driver (tests/fakegpu)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import safetensors.torch
import torch
from conftest import LIMIT, ROOT, Agent
from local_documents import free_port, simulated_vllm, write_documents

import weightsync

GPUS = [f"GPU-fa4e0000-0000-4000-8000-00000000000{number}" for number in range(2)]


@pytest.fixture(scope="session")
def stand_in() -> Path:
    """The folder of the stand-in's libraries."""
    built = subprocess.run([ROOT / "tests" / "fakegpu" / "build.sh"], capture_output=True, text=True, timeout=600, check=True)
    return Path(built.stdout.strip())


@pytest.fixture
def machine(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with two GPUs, for every process that is started; no rule of the driver may have been broken at its end."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    monkeypatch.setenv("FAKEGPU_DIR", str(folder))
    monkeypatch.setenv("FAKEGPU_COUNT", "2")
    monkeypatch.setenv("FAKEGPU_MEMORY_MIB", "1024")
    monkeypatch.setenv("FAKEGPU_JITTER_US", "200")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))
    yield folder
    violations = folder / "violations"
    assert not violations.exists(), violations.read_text()


Start = Callable[..., Agent]


@pytest.fixture
def agent_with_gpu(machine: Path, start_agent: Start, programs: Path) -> Start:
    """Starts agents whose worker is on the first GPU."""

    def start(*options: str) -> Agent:
        return start_agent("--gpu", GPUS[0], "--worker", str(programs / "weightsync"), "--bucket-bytes", "65536", *options)

    return start


def run(scenario: str, agent: Agent | Whole, stand_in: Path) -> dict[str, Any]:
    """What a trainer saw."""
    command = [sys.executable, fake_cuda.__file__, scenario, agent.socket, str(stand_in / "libcuda.so.1")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def assert_arrived(agent: Agent, version: int) -> None:
    arrived = safetensors.torch.load_file(agent.file(version))
    expected = fake_cuda.tensors()
    assert set(arrived) == set(expected)
    for name, tensor in expected.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)) if tensor.dim() else True, name
    assert arrived["scalar"].item() == 1.5


def test_tensors_are_written_to_worker_memory_after_events(agent_with_gpu: Start, stand_in: Path) -> None:
    agent = agent_with_gpu()
    seen = run("some_versions", agent, stand_in)
    assert seen["memory"] == [f"gpu {GPUS[0]}"] * 3
    assert seen["logged"] == []
    assert seen["followed"] == [0, 0, 0], "the trainer's own stream is followed at each publish"
    for version in (1, 2, 3):
        said = agent.said()
        assert said["onGpu"] == said["behindEvents"] == said["buckets"] > 1
        assert_arrived(agent, version)


def test_a_failed_attempt_is_written_again_into_the_same_memory(agent_with_gpu: Start, stand_in: Path) -> None:
    agent = agent_with_gpu("--again-after", "2")
    seen = run("one_version", agent, stand_in)
    assert seen["attempts"] == [2]
    assert_arrived(agent, 1)


def test_events_that_cannot_be_shared_are_waited_for(agent_with_gpu: Start, stand_in: Path) -> None:
    agent = agent_with_gpu()
    seen = run("without_events", agent, stand_in)
    assert seen["memory"] == [f"gpu {GPUS[0]}"] * 3
    for version in (1, 2, 3):
        said = agent.said()
        assert (said["onGpu"], said["behindEvents"]) == (said["buckets"], 0)
        assert_arrived(agent, version)


def test_memory_the_worker_finds_unwritten_is_not_used(agent_with_gpu: Start, stand_in: Path) -> None:
    agent = agent_with_gpu()
    seen = run("wrong_memory", agent, stand_in)
    assert seen["memory"][0].startswith("host: the trainer wrote a check")
    assert "wrote a check" in seen["logged"][0]
    assert agent.said()["onGpu"] == 0


def test_tensors_on_another_gpu_go_through_host_with_notice(agent_with_gpu: Start, stand_in: Path) -> None:
    agent = agent_with_gpu()
    seen = run("on_another_gpu", agent, stand_in)
    assert GPUS[0] in seen["memory"][0]
    assert GPUS[1] in seen["memory"][0]
    assert_arrived(agent, 1)


def test_dead_worker_is_replaced_in_the_next_attempt(agent_with_gpu: Start, stand_in: Path) -> None:
    agent = agent_with_gpu("--kill-worker-after", "2")
    seen = run("one_version", agent, stand_in)
    assert seen["attempts"] == [2]
    assert seen["memory"] == [f"gpu {GPUS[0]}"]
    assert_arrived(agent, 1)


def test_driver_without_foreign_memory_leaves_host_memory(machine: Path, agent_with_gpu: Start, stand_in: Path) -> None:
    agent = agent_with_gpu()
    (machine / "faults").write_text("cuIpcOpenMemHandle_v2 * error 801\n")
    seen = run("one_version", agent, stand_in)
    assert "cuIpcOpenMemHandle_v2" in seen["memory"][0]
    assert_arrived(agent, 1)


def test_a_slice_of_a_gpu_is_not_offered(machine: Path, agent_with_gpu: Start, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_with_gpu()
    monkeypatch.setenv("FAKEGPU_MIG", "1")
    seen = run("one_version", agent, stand_in)
    assert "MIG" in seen["memory"][0]
    assert_arrived(agent, 1)


def test_tensors_of_the_host_need_no_gpu(agent: Agent, publisher: weightsync.Publisher) -> None:
    result = publisher.publish(fake_cuda.tensors(), version=1, timeout=LIMIT)
    assert result.memory == "host"


class Whole:
    """A trainer's agent on the first GPU and a rollout on the second, in one group over NCCL."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.directory = directory
        self.name = f"kept-{os.getpid()}"
        start = directory / "start"
        start.mkdir()
        named = {name: tensor.contiguous() for name, tensor in fake_cuda.tensors().items()}
        safetensors.torch.save_file(named, start / "model.safetensors")
        port = free_port()
        command = simulated_vllm(programs / "weightsync-dev", start, port)
        file = write_documents(
            directory / "local.yaml",
            self.name,
            [{"name": "actor", "port": port, "command": command, "gpus": [GPUS[1]]}],
            state=directory / "state",
            trainer_gpu=GPUS[0],
            transport={"type": "NCCL", "bucketMiB": 1},
            membership={"keep": 3},
            update={"retainMiB": 64, "silenceSeconds": 5},
        )
        with open(directory / "local.log", "wb") as log:
            self.process = subprocess.Popen([programs / "weightsync", "local", "-f", file], stdout=log, stderr=log)
        self.socket = f"weightsync/{self.name}-trainer"

    def logged(self, words: str) -> int:
        log = self.directory / "state" / "trainer-agent.log"
        return log.read_text().count(words) if log.exists() else 0

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < end, f"{what} did not come: {(self.directory / 'local.log').read_text()[-2000:]}"
            time.sleep(0.02)

    def wait_for_pinned(self, times: int) -> None:
        """Waits until memory was pinned so often for the copy of a next version."""
        self.wait("pinned memory", lambda: self.logged("memory is pinned for the copy of the next version") >= times)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(LIMIT)


def test_memory_for_copies_is_pinned_between_updates(machine: Path, stand_in: Path, programs: Path, tmp_path: Path) -> None:
    """The first two of three kept versions use what is pinned when the group forms; for the third, memory is pinned after the second."""
    group = Whole(programs, tmp_path)
    try:
        group.wait_for_pinned(1)
        # A call that meets its order leaves a mark.
        order(machine, "\n".join(f"cuMemHostRegister_v2@0 {call} delay 1" for call in range(1, 100)))
        assert run("one_version", group, stand_in)["memory"] == [f"gpu {GPUS[0]}"]
        assert list((machine / "fired").iterdir()) == [], "nothing is pinned while a version travels"
        assert run("second_version", group, stand_in)["attempts"] == [1]
        group.wait_for_pinned(2)
    finally:
        group.stop()


def order(machine: Path, faults: str) -> None:
    """Faults of the driver from now on."""
    (machine / "faults.new").write_text(f"{faults}\n")
    (machine / "faults.new").rename(machine / "faults")
