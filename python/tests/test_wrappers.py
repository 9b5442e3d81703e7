"""Names of wrapped modules, in any order of nesting; tensors and versions of unusual kinds, each refused by its name or taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import LIMIT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import weightsync
from weightsync._source import Source

PLAIN = {"embed.weight", "layers.0.module.weight", "layers.0.module.bias", "layers.1.weight", "layers.1.bias"}
"""A part of a name that is called `module` stays, where it is the model's own."""


class Inner(torch.nn.Module):
    """A layer whose own part has the name that wrappers give to theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(4, 4)


class Net(torch.nn.Module):
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.layers = torch.nn.ModuleList([Inner(), torch.nn.Linear(4, 4)])


class DeepSpeedEngine(torch.nn.Module):
    """Has the name and the attribute of DeepSpeed's engine (deepspeed 0.17, read), which needs a GPU."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture(scope="module")
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch's own group of one rank, which DDP needs."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compile": torch.compile,
    "ddp": torch.nn.parallel.DistributedDataParallel,
    "parallel": torch.nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
    "deepspeed": DeepSpeedEngine,
}


def names(source: Source) -> set[str]:
    return {meta.name for meta in source.metas()}


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("order", [*((name,) for name in WRAPPERS), *itertools.permutations(WRAPPERS, 2), tuple(WRAPPERS)], ids="-".join)
def test_names_of_a_wrapped_model_are_its_own(order: tuple[str, ...]) -> None:
    model: Any = Net()
    for wrapper in order:
        model = WRAPPERS[wrapper](model)
    assert names(weightsync.module(model)) == PLAIN


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_a_wrapped_layer_are_its_own(wrapper: str) -> None:
    model = Net()
    model.layers[1] = WRAPPERS[wrapper](model.layers[1])
    assert names(weightsync.module(torch.compile(model))) == PLAIN


ODD: dict[str, Any] = {
    "complex128": torch.zeros(2, dtype=torch.complex128),
    "float4": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "uint4": torch.empty(2, dtype=torch.uint4, device="meta"),
    "quantised": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "None": None,
    "float": 1.5,
    "list": [1.0],
    "objects": np.array([None]),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
def test_tensor_that_cannot_be_published_is_named(publisher: weightsync.Publisher, value: Any) -> None:
    tensors = {"first.weight": torch.zeros(3), "layers.7.odd.weight": value}
    with pytest.raises((TypeError, weightsync.WeightSyncError), match=r"layers\.7\.odd\.weight"):
        publisher.publish(tensors, version=1, timeout=LIMIT)
    # And nothing is lost by it.
    assert publisher.publish({"first.weight": torch.zeros(3)}, version=2, timeout=LIMIT).version == 2


@pytest.mark.parametrize("version", [np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)], ids=repr)
def test_whole_number_of_another_library_is_a_version(publisher: weightsync.Publisher, version: Any) -> None:
    assert publisher.publish({"w": torch.zeros(3)}, version=version, timeout=LIMIT).version == 3


@pytest.mark.parametrize("version", [True, 3.0, "3", -1, np.float32(3), np.bool_(True), 1 << 63, None], ids=repr)
def test_anything_else_is_no_version(publisher: weightsync.Publisher, version: Any) -> None:
    with pytest.raises(ValueError, match="is no version"):
        publisher.publish({"w": torch.zeros(3)}, version=version, timeout=LIMIT)
