"""A worker's end of a feed, against an agent of this file's own: rings, two ranks, digests that differ, agents that go away."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import blake3
import pytest
import torch
from conftest import LIMIT

from weightsync._feed import Feed, digesters
from weightsync._gpu_feed import GpuFeed
from weightsync.errors import AgentLost, Failed

_numbers = itertools.count()


class FakeAgent:
    """Listens for some ranks, and shares a memfd with them."""

    def __init__(self, ranks: int, length: int, gpus: list[GpuFeed] | None = None) -> None:
        self.name = f"weightsync-feed/test-{os.getpid()}-{next(_numbers)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen()
        self.memory = os.memfd_create("test")
        os.ftruncate(self.memory, length)
        self._length = length
        device = "cpu" if gpus is None else "cuda"
        self.feeds = [Feed(self.name, "token", rank, ranks, device, gpu=gpus[rank] if gpus else None) for rank in range(ranks)]
        self._workers = [self._listener.accept()[0] for _ in self.feeds]
        self._files = [worker.makefile("r", encoding="utf-8") for worker in self._workers]
        self.hellos = [self.heard(rank)["hello"] for rank in range(ranks)]

    def open(self, silence: float = LIMIT) -> None:
        line = {"event": "memory", "bytes": self._length, "digest": "blake3", "silence": silence}
        for worker in self._workers:
            socket.send_fds(worker, [json.dumps(line).encode() + b"\n"], [self.memory])

    def say(self, line: dict[str, Any]) -> None:
        for worker in self._workers:
            worker.sendall(json.dumps(line).encode() + b"\n")

    def heard(self, rank: int) -> dict[str, Any]:
        self._workers[rank].settimeout(LIMIT)
        line: dict[str, Any] = json.loads(self._files[rank].readline())
        return line

    def put(
        self, sequence: int, name: str, tensor: torch.Tensor, offset: int, copy: bool, digest: str | None = None, draft: bool = False
    ) -> None:
        data = tensor.view(torch.uint8).numpy().tobytes()
        os.pwrite(self.memory, data, offset)
        digest = digest or blake3.blake3(data).hexdigest()
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}[tensor.dtype]
        place = [name, dtype, list(tensor.shape), offset, len(data), digest]
        self.say({"event": "bucket", "sequence": sequence, "copy": copy, "tensors": [place], **({"draft": True} if draft else {})})

    def die(self) -> None:
        for file, worker in zip(self._files, self._workers, strict=True):
            file.close()
            worker.close()

    def close(self) -> None:
        self.die()
        self._listener.close()
        os.close(self.memory)
        for feed in self.feeds:
            feed.close()


@pytest.fixture
def agent_of() -> Any:
    agents: list[FakeAgent] = []

    def start(ranks: int, length: int) -> FakeAgent:
        agents.append(FakeAgent(ranks, length))
        return agents[-1]

    yield start
    for agent in agents:
        agent.close()


Start = Callable[[int, int], FakeAgent]


def model(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{number}", torch.randn(16, 4, generator=generator).to(torch.bfloat16)) for number in range(6)]


def test_a_place_that_is_used_again_holds_nobodys_tensor(agent_of: Start) -> None:
    tensors = model(1)
    agent = agent_of(1, 128)
    agent.open()

    def feed() -> None:
        for sequence, (name, tensor) in enumerate(tensors):
            agent.put(sequence, name, tensor, 0, copy=True)
            assert agent.heard(0) == {"verified": sequence}
            assert agent.heard(0) == {"taken": sequence}
        agent.say({"event": "end", "buckets": len(tensors)})

    feeding = threading.Thread(target=feed)
    feeding.start()
    # Kept until all are there, as layerwise reload keeps them.
    kept = dict(agent.feeds[0].tensors())
    feeding.join(LIMIT)
    agent.feeds[0].must_be_whole()
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors)


def test_two_ranks_share_memory_without_seeing_writes(agent_of: Start) -> None:
    tensors = model(2)
    agent = agent_of(2, 128 * len(tensors))
    agent.open()
    assert [(hello["rank"], hello["ranks"], hello["token"]) for hello in agent.hellos] == [(0, 2, "token"), (1, 2, "token")]
    for sequence, (name, tensor) in enumerate(tensors):
        agent.put(sequence, name, tensor, 128 * sequence, copy=False)
    agent.say({"event": "end", "buckets": len(tensors)})
    first = dict(agent.feeds[0].tensors())
    for tensor in first.values():
        tensor.zero_()
    second = dict(agent.feeds[1].tensors())
    assert all(torch.equal(second[name], tensor) for name, tensor in tensors)
    agent.feeds[1].close()
    # What looks into the memory keeps it.
    assert all(torch.equal(second[name], tensor) for name, tensor in tensors)


@pytest.mark.parametrize("copy", [True, False])
def test_draft_model_comes_after_its_model(agent_of: Start, copy: bool) -> None:
    model_tensors, draft_tensors = model(3), model(4)
    agent = agent_of(1, 128 * 12)
    assert agent.hellos[0]["draft"]
    agent.open()
    feed = agent.feeds[0]
    for sequence, (name, tensor) in enumerate([*model_tensors, *draft_tensors]):
        agent.put(sequence, name, tensor, 128 * sequence, copy, draft=sequence >= 6)
    agent.say({"event": "end", "buckets": 12})
    with pytest.raises(Failed, match="before its model"):
        feed.turn_to(draft=True)
    for draft, expected in ((False, model_tensors), (True, draft_tensors)):
        feed.turn_to(draft=draft)
        taken = dict(feed.tensors())
        feed.must_be_whole()
        assert feed.over == draft
        assert len(taken) == 6
        assert all(torch.equal(taken[name], tensor) for name, tensor in expected)


def test_model_bucket_after_its_draft_model_is_refused(agent_of: Start) -> None:
    agent = agent_of(1, 256)
    agent.open()
    name, tensor = model(5)[0]
    agent.put(0, name, tensor, 0, copy=False, draft=True)
    agent.put(1, name, tensor, 128, copy=False)
    feed = agent.feeds[0]
    assert not list(feed.tensors())
    feed.turn_to(draft=True)
    with pytest.raises(Failed, match="after one of its draft model"):
        list(feed.tensors())


def test_wrong_digest_is_refused_before_the_tensor_is_seen(agent_of: Start) -> None:
    agent = agent_of(1, 256)
    agent.open()
    (name, tensor), (other, second) = model(3)[:2]
    agent.put(0, name, tensor, 0, copy=False)
    agent.put(1, other, second, 128, copy=False, digest="0" * 64)
    tensors = agent.feeds[0].tensors()
    assert next(tensors)[0] == name
    with pytest.raises(Failed, match=r"layer\.1 is not what the agent says"):
        next(tensors)
    assert agent.heard(0) == {"verified": 0}
    said = [agent.heard(0), agent.heard(0)]
    assert {"taken": 0} in said
    assert any("layer.1" in line.get("failed", "") for line in said)
    with pytest.raises(Failed, match="before the end"):
        agent.feeds[0].must_be_whole()


def test_an_agent_that_dies_or_falls_silent_ends_the_wait(agent_of: Start) -> None:
    dead = agent_of(1, 256)
    dead.open()
    dead.put(0, *model(4)[0], 0, copy=False)
    taking = dead.feeds[0].tensors()
    next(taking)
    dead.die()
    with pytest.raises(AgentLost):
        list(taking)
    silent = agent_of(1, 256)
    silent.open(silence=0.2)
    with pytest.raises(Failed, match="sent nothing"):
        list(silent.feeds[0].tensors())


@pytest.mark.parametrize(
    "tensor",
    [
        ["w", "BF16", [4], 0, 7, ""],
        ["w", "BF16", [4], 250, 8, ""],
        ["w", "BF16", [4], -8, 8, ""],
        ["w", "F7", [4], 0, 8, ""],
        ["w", "BF16", [-2, -2], 0, 8, ""],
        ["w", "BF16", [0], 0, 0, ""],
        ["w", "BF16", "4", 0],
    ],
)
def test_a_tensor_that_makes_no_sense_is_refused(agent_of: Start, tensor: list[Any]) -> None:
    agent = agent_of(1, 256)
    agent.open()
    agent.say({"event": "bucket", "sequence": 0, "copy": False, "tensors": [tensor]})
    with pytest.raises(Failed):
        list(agent.feeds[0].tensors())


def test_buckets_that_are_missing_are_missed(agent_of: Start) -> None:
    skipped = agent_of(1, 256)
    skipped.open()
    skipped.put(1, *model(5)[0], 0, copy=False)
    with pytest.raises(Failed, match="0 was expected"):
        list(skipped.feeds[0].tensors())
    short = agent_of(1, 256)
    short.open()
    short.say({"event": "end", "buckets": 1})
    with pytest.raises(Failed, match="ended after 1 buckets"):
        list(short.feeds[0].tensors())


def test_strided_tensor_is_read(agent_of: Start) -> None:
    agent = agent_of(1, 256)
    agent.open()
    tensor = torch.arange(8, dtype=torch.float32)
    agent.put(0, "w", tensor, 3, copy=False)
    agent.say({"event": "end", "buckets": 1})
    assert torch.equal(dict(agent.feeds[0].tensors())["w"], tensor)


def test_what_vllm_brings_is_enough_to_check_digests() -> None:
    assert "blake3" in digesters()
