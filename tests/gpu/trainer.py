"""A trainer in torch on real GPUs: bytes, memory, what becomes of it when the worker dies, and how long its own work is held back.

Each scenario is a process of its own and prints one line of JSON; the whole fails when a byte or an ending is wrong. The other side is
`examples/trainer_socket`: the real socket, a real worker on the trainer's GPU and, with two GPUs, a second one that every bucket is
broadcast to by NCCL before it is read.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import weightsync
from weightsync._driver import Driver

LIMIT = 120
GIB = 1 << 30


class Agent:
    """A running source."""

    def __init__(self, *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weightsync-"))
        self.socket = f"weightsync/gpu-{os.getpid()}-{time.monotonic_ns()}"
        command = [os.environ["WEIGHTSYNC_TRAINER_SOCKET"], "--socket", self.socket, "--worker", os.environ["WEIGHTSYNC_PROGRAM"]]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=with_nccl())
        assert self.said() == {"listening": True}

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the agent ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def uuid(device: int) -> str:
    """As the driver names it."""
    return Driver().uuid(device)


def with_nccl() -> dict[str, str]:
    """The environment in which workers find the NCCL that this torch has loaded."""
    maps = Path("/proc/self/maps").read_text().split()
    folders = {str(Path(file).parent) for file in maps if "/libnccl.so" in file}
    found = [*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(found)}


def start(*options: str) -> Agent:
    """A source on GPU 0, and a receiver on GPU 1 where there is one."""
    receiver = ("--receiver", uuid(1)) if torch.cuda.device_count() > 1 else ()
    return Agent("--gpu", uuid(0), *receiver, *options)


def model(gib: float, seed: int = 1) -> dict[str, torch.Tensor]:
    """Tensors like those of a dense model of that size, random, on GPU 0."""
    generator = torch.Generator(device="cuda:0").manual_seed(seed)
    hidden, tensors, total = 4096, {}, 0
    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden), (hidden,), (hidden,)]
    layer = 0
    while total < gib * GIB:
        for number, shape in enumerate(shapes):
            tensor = torch.randn(shape, generator=generator, device="cuda:0").to(torch.bfloat16)
            tensors[f"layers.{layer}.{number}"] = tensor
            total += tensor.numel() * 2
        layer += 1
    return tensors


def odd() -> dict[str, torch.Tensor]:
    """Every kind that is easy to get wrong."""
    wide = torch.randn(1500, 1300, device="cuda:0")
    tensors = {
        "transposed": wide.t(),
        "sliced": wide[1::3, 5:777:2],
        "scalar": torch.tensor(1.5, device="cuda:0"),
        "nothing": torch.empty(0, 4, device="cuda:0"),
        "fp8": torch.randn(33001, device="cuda:0").to(torch.float8_e4m3fn),
        "complex": torch.view_as_complex(wide[:, :128].reshape(1500, 64, 2).contiguous()).conj(),
        "parameter": torch.nn.Parameter(wide[:7, :11].clone()),
        "on the host": torch.arange(100_003),
        "pinned": torch.arange(100_003).pin_memory(),
        "last": torch.ones(3, dtype=torch.uint8, device="cuda:0"),
    }
    if torch.cuda.device_count() > 1:
        tensors["on another GPU"] = torch.randn(3001, 2003, device="cuda:1").to(torch.bfloat16)
    return tensors


def raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().resolve_conj()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return flat.contiguous().reshape(-1).view(torch.uint8)


def compare(file: Path, published: dict[str, torch.Tensor]) -> int:
    """Every byte that arrived against what was published; answers how many."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert set(header) == set(published), set(header) ^ set(published)
    total = 0
    for name, tensor in published.items():
        first, end = header[name]["data_offsets"]
        arrived = torch.frombuffer(bytearray(data[8 + length + first : 8 + length + end] or b"\0"), dtype=torch.uint8)
        expected = raw(tensor)
        assert end - first == expected.numel(), name
        assert expected.numel() == 0 or torch.equal(arrived, expected), f"{name} arrived with other bytes"
        total += expected.numel()
    return total


def publisher(agent: Agent) -> weightsync.Publisher:
    return weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=10)


def on_gpu(result: weightsync.Result) -> None:
    assert result.memory == f"gpu {uuid(0)}", result.memory


def bytes_of_a_model() -> dict[str, Any]:
    """1.5 GiB, three versions with a training step between them; every byte compared."""
    folder = tempfile.mkdtemp()
    agent = start("--write", folder)
    tensors, compared = model(1.5), 0
    with publisher(agent) as pub:
        for version in (1, 2, 3):
            # On the trainer's stream and not waited for: what is published must be what this makes.
            for tensor in tensors.values():
                tensor.mul_(1.01)
            result = pub.publish(tensors, version=version, timeout=LIMIT)
            on_gpu(result)
            said = agent.said()
            assert said["onGpu"] == said["behindEvents"] == said["buckets"], said
            compared += compare(Path(folder) / f"{version}.safetensors", tensors)
    agent.stop()
    return {"compared_bytes": compared, "buckets": said["buckets"]}


def bytes_of_odd_tensors() -> dict[str, Any]:
    folder = tempfile.mkdtemp()
    agent = start("--write", folder)
    tensors = odd()
    with publisher(agent) as pub:
        on_gpu(pub.publish(tensors, version=1, timeout=LIMIT))
        compared = compare(Path(folder) / "1.safetensors", tensors)

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            # Tensors that no one holds but the generator, made on the stream that is current here.
            for name, tensor in tensors.items():
                yield name, tensor.clone()

        metas = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        on_gpu(pub.publish(weightsync.stream(export, metas), version=2, timeout=LIMIT))
        compared += compare(Path(folder) / "2.safetensors", tensors)

        # A trainer that works on a stream of its own.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            for tensor in tensors.values():
                if tensor.is_cuda and tensor.is_floating_point() and tensor.element_size() > 1 and tensor.device.index == 0:
                    tensor.data.add_(1)
            on_gpu(pub.publish(tensors, version=3, timeout=LIMIT))
        side.synchronize()
        compared += compare(Path(folder) / "3.safetensors", tensors)
    agent.stop()
    return {"compared_bytes": compared}


def module_converted() -> dict[str, Any]:
    """float32 parameters published as bfloat16."""
    folder = tempfile.mkdtemp()
    agent = start("--write", folder)
    layers = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    with publisher(agent) as pub:
        on_gpu(pub.publish(weightsync.module(layers, dtype=torch.bfloat16), version=1, timeout=LIMIT))
    converted = {name: tensor.to(torch.bfloat16) for name, tensor in layers.state_dict().items()}
    compared = compare(Path(folder) / "1.safetensors", converted)
    agent.stop()
    return {"compared_bytes": compared}


def worker_killed() -> dict[str, Any]:
    """The worker dies while the trainer has copies under way into its memory. The trainer's CUDA context must not notice."""
    folder = tempfile.mkdtemp()
    agent = start("--write", folder, "--kill-worker-after", "2")
    tensors = model(1.5)
    with publisher(agent) as pub:
        result = pub.publish(tensors, version=1, timeout=LIMIT)
        assert result.attempts == 2, result
        on_gpu(result)
        compared = compare(Path(folder) / "1.safetensors", tensors)
        total = sum(float(tensor.float().sum()) for tensor in tensors.values())
        torch.cuda.synchronize()
        on_gpu(pub.publish(tensors, version=2, timeout=LIMIT))
        compared += compare(Path(folder) / "2.safetensors", tensors)
    agent.stop()
    return {"compared_bytes": compared, "sum": total}


def trainer_gone() -> dict[str, Any]:
    """A trainer is killed in the middle; the next one publishes."""
    folder = tempfile.mkdtemp()
    agent = start("--write", folder)
    code = f"""
import sys; sys.argv = ["trainer.py"]; sys.path.insert(0, {str(Path(__file__).parent)!r})
import os, trainer, weightsync
tensors = trainer.model(1.5)
def export():
    for number, item in enumerate(tensors.items()):
        if number == 20:
            os.kill(os.getpid(), 9)
        yield item
metas = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
weightsync.Publisher.from_env(socket={agent.socket!r}).publish(weightsync.stream(export, metas), version=1, timeout=60)
"""
    died = subprocess.run([sys.executable, "-c", code], timeout=LIMIT, check=False)
    assert died.returncode == -9, died.returncode
    failed = agent.said()
    tensors = model(1.5)
    with publisher(agent) as pub:
        on_gpu(pub.publish(tensors, version=2, timeout=LIMIT))
    compared = compare(Path(folder) / "2.safetensors", tensors)
    agent.stop()
    return {"compared_bytes": compared, "said": failed["failed"]}


def expandable_segments() -> dict[str, Any]:
    """The trainer's allocator uses them (set by the caller): nothing of it is shared, so nothing changes."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    assert "expandable_segments:True" in settings
    return bytes_of_odd_tensors()


def other_pid_namespace() -> dict[str, Any]:
    """What the driver itself says when worker and trainer are in different PID namespaces: the agent, which compares its own, is not."""
    folder = tempfile.mkdtemp()
    program = Path(os.environ["WEIGHTSYNC_PROGRAM"]).resolve()
    unshared = Path(folder) / "unshared"
    unshared.write_text(f'#!/bin/sh\nexec unshare --pid --fork --kill-child "{program}" "$@"\n')
    unshared.chmod(0o755)
    os.environ["WEIGHTSYNC_PROGRAM"] = str(unshared)
    agent = start("--write", folder)
    tensors = odd()
    with publisher(agent) as pub:
        result = pub.publish(tensors, version=1, timeout=LIMIT)
    compared = compare(Path(folder) / "1.safetensors", tensors)
    agent.stop()
    return {"compared_bytes": compared, "memory": result.memory}


def twenty_versions() -> dict[str, Any]:
    """Memory of the GPU and descriptors stay as they are."""
    agent = start("--discard") if torch.cuda.device_count() > 1 else start()
    tensors = model(2)
    seen = []
    with publisher(agent) as pub:
        for version in range(1, 21):
            on_gpu(pub.publish(tensors, version=version, timeout=LIMIT))
            agent.said()
            gc.collect()
            torch.cuda.synchronize()
            seen.append((torch.cuda.mem_get_info(0)[0], len(os.listdir("/proc/self/fd")), torch.cuda.memory_reserved(0)))
    agent.stop()
    assert seen[2] == seen[-1], seen
    return {"free_bytes": seen[-1][0], "descriptors": seen[-1][1], "torch_reserved": seen[-1][2]}


def step(a: torch.Tensor, b: torch.Tensor) -> None:
    """A few ms of a trainer's compute."""
    for _ in range(8):
        torch.matmul(a, b)


def held_back() -> dict[str, Any]:
    """How long a trainer's stream is held back while a version is published next to it: its steps with and without, in turn."""
    agent = start("--discard") if torch.cuda.device_count() > 1 else start()
    gib = 5.0
    tensors = model(gib)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    a, b = (torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16) for _ in range(2))

    def steps(count: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step(a, b)
            mark.record()
        torch.cuda.synchronize()
        return [one.elapsed_time(other) for one, other in pairwise(marks)]

    steps(20)
    publishes, calls, alone, alongside, longest_alone, longest_alongside = [], [], [], [], [], []
    with publisher(agent) as pub:
        pub.publish(tensors, version=1, timeout=LIMIT)
        agent.said()
        for version in range(2, 9):
            quiet = steps(60)
            begun = time.perf_counter()
            handle = pub.publish_async(tensors, version=version, timeout=LIMIT)
            calls.append(time.perf_counter() - begun)
            busy = steps(60)
            handle.wait()
            agent.said()
            alone.append(statistics.median(quiet))
            alongside.append(statistics.median(busy))
            longest_alone.append(max(quiet))
            longest_alongside.append(max(busy))
        for version in range(20, 27):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            handle = pub.publish_async(tensors, version=version, timeout=LIMIT)
            handle.wait_released()
            publishes.append(time.perf_counter() - begun)
            handle.wait()
            agent.said()
    agent.stop()
    median = statistics.median
    return {
        "bytes": size,
        "released_after_s": round(median(publishes), 4),
        "gb_per_s": round(size / median(publishes) / 1e9, 1),
        "call_returns_after_ms": round(1e3 * median(calls), 2),
        "step_ms": round(median(alone), 3),
        "step_ms_while_publishing": round(median(alongside), 3),
        "longest_step_ms": round(median(longest_alone), 3),
        "longest_step_ms_while_publishing": round(median(longest_alongside), 3),
    }


SCENARIOS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, str]]] = {
    "bytes_of_a_model": (bytes_of_a_model, {}),
    "bytes_of_odd_tensors": (bytes_of_odd_tensors, {}),
    "module_converted": (module_converted, {}),
    "worker_killed": (worker_killed, {}),
    "trainer_gone": (trainer_gone, {}),
    "expandable_segments": (expandable_segments, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "other_pid_namespace": (other_pid_namespace, {}),
    "twenty_versions": (twenty_versions, {}),
    "held_back": (held_back, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--one", help="run this one here")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if args.one:
        torch.cuda.init()
        print(json.dumps({args.one: SCENARIOS[args.one][0]()}), flush=True)
        return
    failed = []
    for name in args.scenarios:
        command = [sys.executable, __file__, "--one", name]
        try:
            ended = subprocess.run(command, timeout=4 * LIMIT, check=False, env={**os.environ, **SCENARIOS[name][1]}).returncode
        except subprocess.TimeoutExpired:
            ended = -1
        if ended != 0:
            failed.append(name)
    print(json.dumps({"failed": failed}), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
