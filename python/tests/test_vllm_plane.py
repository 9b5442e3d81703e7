"""Real vLLM servers (CPU) that a real torch trainer feeds by vLLM's own group code on gloo, fenced by WeightSync: one dies in the middle.

Two servers of vLLM on a small checkpoint: a minute or two on an idle machine.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import LIMIT, ROOT
from gloo_plane import Plane, post
from local_documents import free_port, write_documents
from test_whole import until

import weightsync

START = 900
"""Seconds that vLLM may take to start on a machine that builds something else."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'python' / 'tests'}",
}


class Servers:
    """`weightsync local` with two real vLLM servers, whose agents only watch and prove."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.ports: list[int] = []
        rollouts = []
        for number in (0, 1):
            self.ports.append(free_port())
            serve = [str(Path(sys.executable).with_name("vllm")), "serve", str(directory / "1"), "--served-model-name", "m"]
            serve += ["--host", "127.0.0.1", "--port", str(self.ports[-1]), "--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "4"]
            serve += ["--max-model-len", "256", "--num-gpu-blocks-override", "64", "--worker-extension-cls", "gloo_plane.Worker"]
            # One rank: it needs no process of its own.
            serve += ["--distributed-executor-backend", "uni"]
            environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            rollouts.append({"name": f"actor-{number}", "port": self.ports[-1], "command": serve, "environment": environment})
        name = f"plane-{os.getpid()}"
        file = write_documents(
            directory / "local.yaml",
            name,
            rollouts,
            state=directory / "state",
            delivery="External",
            update={"pause": "External", "timeoutSeconds": 120},
        )
        with open(directory / "local.log", "wb") as log:
            command = [programs / "weightsync", "local", "-f", file]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.socket = f"@weightsync/{name}-trainer"

    def kill(self, number: int) -> None:
        """Kills a server with all its processes, without a word."""
        port = str(self.ports[number]).encode()
        victims = [pid for pid in _children(self.process.pid) if port in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        assert len(victims) == 1
        for pid in [victims[0], *_descendants(victims[0])]:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(LIMIT)


def _children(pid: int) -> list[int]:
    return [int(child) for children in Path(f"/proc/{pid}/task").glob("*/children") for child in children.read_text().split()]


def _descendants(pid: int) -> list[int]:
    found = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


@pytest.fixture
def servers(programs: Path, tmp_path: Path) -> Iterator[Servers]:
    make = [sys.executable, ROOT / "tests/engine/make_checkpoint.py", tmp_path, "--seed", "1", "2", "3"]
    subprocess.run(make, check=True, timeout=LIMIT)
    servers = Servers(programs, tmp_path)
    try:
        yield servers
    finally:
        servers.stop()


def completion(url: str | None) -> Any:
    """What a server computes: text and log-probs."""
    body = {
        "model": "m",
        "prompt": "The quick brown fox",
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
        "cache_salt": uuid.uuid4().hex,
    }
    choice = post(url, "/v1/completions", body)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def read(url: str | None, directory: Path) -> Any:
    """What the same server computes when it reads the checkpoint from its files."""
    post(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
    post(url, "/reset_prefix_cache")
    return completion(url)


def brought(epoch: weightsync.Epoch, tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Forms a group for an epoch and brings version 3; who was proven."""
    with epoch.forming(timeout=90):
        plane = Plane(epoch)
    try:
        with epoch.version(3, timeout=90) as update:
            plane.bring(update, tensors)
    finally:
        plane.abort()
    assert update.result is not None
    return update.result.installed


def healthy(port: int) -> bool | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return True if answer.status == 200 else None
    except OSError:
        return None


def test_vllm_group_trainer_hears_of_a_dead_rank(servers: Servers, tmp_path: Path) -> None:
    weights = {version: safetensors.torch.load_file(tmp_path / str(version) / "model.safetensors") for version in (2, 3)}
    deadline = time.monotonic() + START
    while not all(healthy(port) for port in servers.ports):
        assert time.monotonic() < deadline, "vLLM did not start"
        time.sleep(0.5)
    with weightsync.Topology.from_env(socket=servers.socket, connect_timeout=LIMIT) as topology:
        epochs = (epoch for epoch in topology.watch(timeout=LIMIT * 2))
        epoch = next(epoch for epoch in epochs if len(epoch.replicas) == 2)
        before = completion(epoch.replicas[0].url)
        with epoch.forming(timeout=90):
            plane = Plane(epoch)
        with epoch.version(2, timeout=90) as update:
            plane.bring(update, weights[2])
        assert update.result is not None
        assert len(update.result.installed) == 2, update.result
        answers = [completion(replica.url) for replica in epoch.replicas]
        assert answers[0] == answers[1] != before
        reported: queue.SimpleQueue[float] = queue.SimpleQueue()
        killed: list[float] = []
        epoch.on_fenced(lambda reason: reported.put(time.monotonic()))

        def kill() -> None:
            servers.kill(1)
            killed.append(time.monotonic())

        def broken_off() -> None:
            try:
                with epoch.version(3, timeout=90) as update:
                    plane.bring(update, weights[3], between=kill)
            finally:
                plane.abort()

        with pytest.raises(weightsync.Fenced, match="actor-1") as raised:
            broken_off()
        # Anyone who works with the epoch may hear of it before the one who listens.
        took = reported.get(timeout=LIMIT) - killed[0]
        assert took < 10, "the trainer was informed within its deadline"
        print(f"reported {took:.2f} s after the kill: {raised.value}")
        served: list[tuple[str, ...]] = []
        for epoch in epochs:
            try:
                served.append(brought(epoch, weights[3]))
            # A server that has just started may be too slow to take part: then there is another epoch, too.
            except (weightsync.Fenced, weightsync.NotEnoughReplicas) as error:
                print(f"once more: {error}")
                continue
            if len(epoch.replicas) == 2:
                break
            # The server that was killed starts again, and comes as a joiner that lacks the version.
            assert epoch.fenced.wait(START)
        assert served[0][0] == "rollouts/actor-0", "the survivor did not wait for the other"
        assert len(served[-1]) == 2
        answers = [completion(replica.url) for replica in epoch.replicas]
        assert answers[0] == answers[1] == read(epoch.replicas[0].url, tmp_path / "3")
        with weightsync.Publisher.from_env(socket=servers.socket) as publisher:
            until(lambda: {replica.state for replica in publisher.roster().replicas} == {"ready"} or None, "two ready replicas")
