"""Bytes: what Python publishes is what the Rust server reads, and the other way round through a checkpoint."""

from __future__ import annotations

import array
import gc
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import safetensors.numpy
import safetensors.torch
import torch
from conftest import LIMIT, Agent

import weightsync


def tensors() -> dict[str, torch.Tensor]:
    """Every shape that is easy to get wrong, and more bytes than the ring."""
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(96, 130, generator=generator)
    return {
        "embed.weight": wide.to(torch.bfloat16),
        "transposed": wide.t(),
        "sliced": wide[1::3, 5:77:2],
        "expanded": torch.arange(5, dtype=torch.int16).expand(3, 5),
        "scalar": torch.tensor(1.5),
        "nothing": torch.empty(0, 4, dtype=torch.float16),
        "mask": torch.tensor([True, False, True]),
        "fp8": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "long": torch.tensor([-1, 2**62]),
        "complex": torch.view_as_complex(wide[:, :128].reshape(96, 64, 2).contiguous()).conj(),
        "parameter": torch.nn.Parameter(wide[:7, :11].clone()),
        "last": torch.ones(3, dtype=torch.uint8),
    }


def test_every_kind_of_tensor_arrives_byte_for_byte(agent: Agent, publisher: weightsync.Publisher) -> None:
    published = tensors()
    result = publisher.publish(published, version=3, timeout=LIMIT)
    assert (result.version, result.installed, result.behind) == (3, ("actors/a",), {"actors/b": "engine does not answer"})
    arrived = safetensors.torch.load_file(agent.file(3))
    assert list(arrived) != []
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in arrived.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in published.items()
    }
    for name, tensor in published.items():
        assert raw(arrived[name]) == raw(tensor.detach().resolve_conj().contiguous()), name


def raw(tensor: torch.Tensor) -> bytes:
    """Bytes of a contiguous tensor."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bytes(flat.reshape(-1).view(torch.uint8).tolist())


def test_numpy_arrays_arrive_whatever_their_order(agent: Agent, publisher: weightsync.Publisher) -> None:
    wide = numpy.random.default_rng(7).standard_normal((64, 100))
    published: dict[str, Any] = {
        "fortran": numpy.asfortranarray(wide.astype("float32")),
        "big-endian": wide.astype(">f8"),
        "backwards": wide[::-1, ::-2],
        "scalar": numpy.float16(0.25),
        "nothing": numpy.zeros((4, 0), dtype="int64"),
    }
    publisher.publish(published, version=1, timeout=LIMIT)
    arrived = safetensors.numpy.load_file(agent.file(1))
    for name, tensor in published.items():
        numpy.testing.assert_array_equal(arrived[name], tensor)


def test_buffers_need_neither_torch_nor_numpy(agent: Agent) -> None:
    code = f"""
import array, sys, weightsync
pub = weightsync.Publisher.from_env(socket={agent.socket!r})
values = memoryview(array.array("f", range(6000))).cast("B").cast("f", (60, 100))
pub.publish({{"w": values, "b": array.array("q", [1, -2])}}, version=1, timeout=60)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([*python(), "-c", code], check=True, timeout=LIMIT, env=environment)
    arrived = safetensors.numpy.load_file(agent.file(1))
    numpy.testing.assert_array_equal(arrived["w"], numpy.arange(6000, dtype="float32").reshape(60, 100))
    assert arrived["b"].tolist() == [1, -2]


def python() -> list[str]:
    """This interpreter."""
    import sys

    return [sys.executable]


def test_a_failed_attempt_is_read_again_from_the_first_tensor(start_agent: Any) -> None:
    agent = start_agent("--bucket-bytes", "4096", "--slots", "2", "--again-after", "5")
    passes = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        passes.append(len(passes))
        yield from tensors().items()

    source = weightsync.stream(export, [(name, tensor.dtype, tensor.shape) for name, tensor in tensors().items()])
    result = publish(agent, source)
    assert (result.attempts, passes) == (2, [0, 1])
    arrived = safetensors.torch.load_file(agent.file(1))
    assert raw(arrived["transposed"]) == raw(tensors()["transposed"].contiguous())


def publish(agent: Agent, source: Any, version: int = 1) -> weightsync.Result:
    """One publish by a publisher of its own."""
    with weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=5) as publisher:
        return publisher.publish(source, version=version, timeout=LIMIT)


def test_a_module_is_published_under_clean_names_and_converted(agent: Agent) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60))
    wrapped = torch.nn.ModuleDict({"_orig_mod": model})
    publish(agent, weightsync.module(wrapped, dtype=torch.bfloat16))
    arrived = safetensors.torch.load_file(agent.file(1))
    assert set(arrived) == set(model.state_dict())
    assert torch.equal(arrived["0.weight"], model[0].weight.detach().to(torch.bfloat16))
    assert arrived["1.num_batches_tracked"].dtype == torch.int64, "whole numbers are not converted"
    publish(agent, model, version=2)
    assert torch.equal(safetensors.torch.load_file(agent.file(2))["0.weight"], model[0].weight.detach())


def test_tied_weights_are_published_once_under_their_first_name(agent: Agent) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(40, 30), "head": torch.nn.Linear(30, 40, bias=False)})
    model["head"].weight = model["embed"].weight
    publish(agent, model)
    assert list(safetensors.torch.load_file(agent.file(1))) == ["embed.weight"]


def test_vllms_weight_source_is_taken_as_it_is(agent: Agent) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    model = torch.nn.Linear(70, 90)
    publish(agent, ModuleSource(model))
    assert torch.equal(safetensors.torch.load_file(agent.file(1))["weight"], model.weight.detach())


def test_parts_are_put_together(agent: Agent) -> None:
    full = torch.arange(5000, dtype=torch.float32).reshape(50, 100)
    other = torch.arange(12).reshape(3, 4)

    def parts() -> Iterator[tuple[Any, ...]]:
        yield "w", full[20:, :], (20, 0)
        yield "w", full[:20, 60:], (0, 60)
        yield "w", full[:20, :60].numpy(), (0, 0)
        yield "other", other
        yield "empty", torch.empty(0, 3)

    publish(agent, weightsync.sharded(parts, [("w", "float32", (50, 100)), ("other", torch.int64, (3, 4)), ("empty", "F32", (0, 3))]))
    arrived = safetensors.torch.load_file(agent.file(1))
    assert torch.equal(arrived["w"], full)
    assert torch.equal(arrived["other"], other)


def test_safetensors_package_checkpoint_is_read_alike_by_rust(agent: Agent, programs: Path, tmp_path: Path) -> None:
    written = {name: tensor.detach().resolve_conj().contiguous() for name, tensor in tensors().items() if name != "complex"}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(written, file)
    for version, options in ((1, []), (2, ["--on-agent"])):
        command = [programs / "weightsync", "publish", file, "--version", str(version), "--socket", "@" + agent.socket, *options]
        done = subprocess.run([*command, "--output", "json"], capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["version"] == version
        arrived = safetensors.torch.load_file(agent.file(version))
        for name, tensor in written.items():
            assert raw(arrived[name]) == raw(tensor), name


def test_the_ring_is_mapped_once_for_many_versions(agent: Agent, publisher: weightsync.Publisher) -> None:
    big = {"w": array.array("f", range(100_000))}
    handles = [publisher.publish_async(big, version=version, timeout=LIMIT) for version in (1, 2, 3)]
    for handle in handles:
        handle.wait()
    publisher.publish(big, version=4, timeout=LIMIT)
    before = rings()
    for version in range(5, 9):
        publisher.publish(big, version=version, timeout=LIMIT)
    assert rings() == before
    assert before == 1, "surplus connections and their rings are given up"


def rings() -> int:
    """Rings that this process has mapped; those that only the traceback of an earlier test's error holds do not count."""
    gc.collect()
    return sum("weightsync-ring" in line for line in Path("/proc/self/maps").read_text().splitlines())
