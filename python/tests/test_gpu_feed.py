"""A worker's end of a feed from memory of its GPU: digests, copies, places that are used again, and what makes no sense.

The driver is one of this file's own, whose blocks are in this process; the real one is used on a GPU machine (`tests/gpu/vllm.sh`).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import LIMIT
from test_feed import FakeAgent, model

from weightsync import _gpu_feed
from weightsync._gpu_feed import GpuFeed, gsum64
from weightsync.errors import Failed


class Block:
    """A driver with one block of memory."""

    def __init__(self, length: int) -> None:
        self.memory = ctypes.create_string_buffer(length)
        self.handle = b"h" * 64
        self.opened = 0

    def uuid(self, device: int) -> str:
        return f"GPU-{device}"

    def on(self, device: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def open_memory(self, handle: bytes) -> int:
        assert handle == self.handle
        self.opened += 1
        return ctypes.addressof(self.memory)

    def close_memory(self, address: int) -> None:
        self.opened -= 1

    def copy(self, to: int, source: int, length: int, stream: int) -> None:
        ctypes.memmove(to, source, length)

    def feed(self) -> GpuFeed:
        return GpuFeed(self, torch.device("cpu"), 0)


def defined(data: bytes) -> int:
    """As `crates/core/src/weights/gsum.rs` defines it, word by word."""
    total = 0
    for number, first in enumerate(range(0, len(data), 8)):
        word = int.from_bytes(data[first : first + 8].ljust(8, b"\0"), "little")
        x = word ^ ((number + 1) * 0x9E37_79B9_7F4A_7C15 % (1 << 64))
        total += (x & 0xFFFF_FFFF) * (x >> 32) + x
    return total % (1 << 64)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 64, 1000, 4099])
def test_gsum64_is_what_its_definition_says(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several pieces, the last of them short.
    monkeypatch.setattr(_gpu_feed, "PIECE_WORDS", 100)
    data = bytes((number * 2_654_435_761 >> 7) % 256 for number in range(length))
    assert int(gsum64(as_tensor(data))) % (1 << 64) == defined(data)
    # What begins inside a word is summed as if it did not.
    assert int(gsum64(as_tensor(b"x" + data)[1:])) % (1 << 64) == defined(data)


def test_gsum64_of_large_words_equals_the_agents() -> None:
    # From crates/core/src/weights/tests/gsum.rs: the sum of one word of zeros.
    spread = 0x9E37_79B9_7F4A_7C15
    assert int(gsum64(as_tensor(bytes(8)))) % (1 << 64) == (0x7F4A_7C15 * 0x9E37_79B9 + spread) % (1 << 64)
    ones = b"\xff" * 4096
    assert int(gsum64(as_tensor(ones))) % (1 << 64) == defined(ones)


IN_ONE_LAUNCH = """
import random, torch
from weightsync import _triton_sums
from weightsync._gpu_feed import SPREAD, gsum64
random.seed(5)
_triton_sums.BLOCK, _triton_sums.MOST_PROGRAMS = 16, 3
for _ in range(20):
    data = torch.randint(0, 256, (random.randrange(8, 4000),), dtype=torch.uint8)
    data[:16] = 255
    offsets = [random.randrange(0, data.numel() // 8) * 8 for _ in range(5)]
    parts = [(offset, random.randrange(1, data.numel() // 8 * 8 - offset + 1)) for offset in offsets]
    reported = _triton_sums.sums(data, parts, SPREAD).tolist()
    assert reported == [int(gsum64(data[offset : offset + length])) for offset, length in parts], parts
print("equal")
"""


def test_sums_of_many_parts_in_one_launch_are_those_of_each() -> None:
    """Triton's own interpreter: what is compiled for a GPU is compared there by every worker when it starts."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    words = [sys.executable, "-c", IN_ONE_LAUNCH]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False)
    assert done.stdout == "equal\n", done.stderr[-3000:]


class Agent(FakeAgent):
    """Describes buckets in a block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        super().__init__(1, 8, [block.feed()])
        self.say({"event": "gpu", "digest": "gsum64", "silence": LIMIT})

    def lay(self, sequence: int, tensors: list[tuple[str, torch.Tensor]], offset: int, **other: Any) -> None:
        places, at = [], 0
        for name, tensor in tensors:
            data = tensor.view(torch.uint8).numpy().tobytes()
            ctypes.memmove(ctypes.addressof(self.block.memory) + offset + at, data, len(data))
            places.append([name, "BF16", list(tensor.shape), at, len(data), f"{defined(data):016x}"])
            at += (len(data) + 63) // 64 * 64
        handle = base64.b64encode(self.block.handle).decode()
        memory = {"handle": handle, "bytes": len(self.block.memory), "offset": offset}
        reported = {"sequence": sequence, "copy": True, "draft": False, "memory": memory, "bytes": at, "tensors": places, **other}
        self.say({"event": "bucket", **reported})


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(Block(1024))
    yield agent
    agent.close()


def test_place_is_reused_once_its_bucket_was_copied(agent: Agent) -> None:
    tensors = model(4)
    hello = agent.hellos[0]
    assert (hello["device"], hello["gpu"]) == ("cuda", "GPU-0")
    assert "gsum64" in hello["digests"]

    def feed() -> None:
        for sequence in range(3):
            agent.lay(sequence, tensors[2 * sequence : 2 * sequence + 2], 512)
            assert agent.heard(0) == {"taken": sequence}
            ctypes.memset(agent.block.memory, 0xDD, 1024)
        agent.say({"event": "end", "buckets": 3})

    feeding = threading.Thread(target=feed)
    feeding.start()
    kept = dict(agent.feeds[0].tensors())
    feeding.join(LIMIT)
    agent.feeds[0].must_be_whole()
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors)
    assert agent.block.opened == 1, "a block is opened once"
    agent.feeds[0].close()
    assert agent.block.opened == 0


def test_copy_that_differs_is_refused_and_not_confirmed(agent: Agent) -> None:
    tensors = model(5)
    agent.lay(0, tensors[:2], 0)
    agent.block.memory[130] = bytes([agent.block.memory[130][0] ^ 1])
    with pytest.raises(Failed, match=r"layer\.1 is not what the agent says"):
        list(agent.feeds[0].tensors())


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"memory": {"handle": "?", "bytes": 1024, "offset": 0}}, "invalid memory"),
        ({"memory": {"handle": "aGg=", "bytes": 100, "offset": 0}}, "do not lie in a block of 100"),
        ({"memory": {"bytes": 1024, "offset": 0}}, "invalid memory"),
        ({"bytes": 64}, "does not lie in the shared memory"),
    ],
)
def test_memory_that_makes_no_sense_is_refused(agent: Agent, other: dict[str, Any], why: str) -> None:
    agent.lay(0, model(6)[:2], 0, **other)
    with pytest.raises(Failed, match=why):
        list(agent.feeds[0].tensors())


def test_device_without_gpu_or_driver_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert GpuFeed.of(torch.device("cpu")) is None
    assert not caplog.records
    assert GpuFeed.of(torch.device("cuda", 0)) is None
    assert "no weights are taken" in caplog.text


def test_a_bucket_shorter_than_a_word_is_summed() -> None:
    feed = Block(8).feed()
    feed._triton = "never asked"
    assert feed.sums(as_tensor(b"abc"), [(0, 3)]) == [f"{defined(b'abc'):016x}"]


def test_a_worker_without_a_gpu_is_not_fed_from_one() -> None:
    agent = FakeAgent(1, 8)
    agent.say({"event": "gpu", "digest": "gsum64", "silence": LIMIT})
    with pytest.raises(Failed, match="a description of the memory was expected"):
        list(agent.feeds[0].tensors())
    agent.close()


def test_gpu_worker_is_fed_from_the_host_where_asked() -> None:
    tensors = model(7)
    agent = FakeAgent(1, 128, [Block(64).feed()])
    agent.open()
    agent.put(0, *tensors[0], 0, copy=True)
    agent.say({"event": "end", "buckets": 1})
    assert torch.equal(dict(agent.feeds[0].tensors())["layer.0"], tensors[0][1])
    agent.close()
