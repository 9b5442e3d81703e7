"""What is refused before, or while, a source is read: with the name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import LIMIT, Agent
from safetensors.torch import load_file

import weightsync
from weightsync._dtypes import dtype_name
from weightsync._scratch import Scratch
from weightsync.sources import as_source

ONES = torch.ones(4)
METAS = [("a", torch.float32, (4,)), ("b", torch.float32, (4,))]


def two() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", ONES
    yield "b", ONES


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: as_source(two()), "can be read once only"),
        (lambda: as_source(iter([("a", ONES)])), "can be read once only"),
        (lambda: as_source(42), "int cannot be published"),
        (lambda: as_source({"model": {"a": ONES}}).metas(), "not one of state dicts"),
        (lambda: as_source({"a": "text"}).metas(), "neither a torch tensor"),
        (lambda: as_source({"a": torch.zeros(4).to(torch.complex128)}).metas(), "cannot be published"),
        (lambda: weightsync.stream(two(), METAS), "not the generator"),  # type: ignore[arg-type]
        (lambda: weightsync.sharded(two(), METAS), "not the generator"),  # type: ignore[arg-type]
        (lambda: weightsync.stream([("a", ONES)], METAS), "takes a function"),  # type: ignore[arg-type]
        (lambda: weightsync.stream(two, [("a", torch.float32)]), "neither"),
        (lambda: dtype_name("float4_e2m1fn_x2"), "cannot be published"),
    ],
)
def test_what_is_no_source_is_refused_with_a_way_out(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize(("metas", "words"), [([*METAS, METAS[0]], "appear twice: a"), ([], "at least one")])
def test_lists_of_tensors_are_checked(metas: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        weightsync.stream(two, metas)


def short() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", ONES


def long() -> Iterator[tuple[str, torch.Tensor]]:
    yield from two()
    yield "c", ONES


def swapped() -> Iterator[tuple[str, torch.Tensor]]:
    yield "b", ONES


def other_type() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", ONES.double()


def other_shape() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", ONES.reshape(2, 2)


def breaks() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", ONES
    raise RuntimeError("no memory left")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (short, "ended after 1 of 2 tensors"),
        (long, "gave c after the last of 2"),
        (swapped, "gave b where a was due"),
        (other_type, r"announced as F32 \[4\], the source gave F64"),
        (other_shape, r"gave F32 \[2, 2\]"),
        (breaks, "raised RuntimeError: no memory left"),
    ],
)
def test_source_that_breaks_its_layout_fails_one_publish(
    agent: Agent, publisher: weightsync.Publisher, factory: Callable[[], Iterator[Any]], words: str
) -> None:
    with pytest.raises(weightsync.SourceFailed, match=words) as raised:
        publisher.publish(weightsync.stream(factory, METAS), version=1, timeout=LIMIT)
    assert not raised.value.retryable
    said = agent.said()
    assert said["version"] == 1
    assert "failed" in said, "the agent heard of it, and waits for nothing"
    assert publisher.publish(weightsync.stream(two, METAS), version=1, timeout=LIMIT).version == 1


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([("w", torch.zeros(2, 4), (0, 0))], "hold 8 of 16"),
        ([("w", torch.zeros(4, 4), (1, 0))], "does not lie inside"),
        ([("w", torch.zeros(3, 4), (0, 0)), ("w", torch.zeros(2, 4), (2, 0))], "overlaps"),
        ([("w", torch.zeros(4, 4, dtype=torch.float64))], "is F32, its part is F64"),
        ([("x", torch.zeros(4, 4))], "hold 0 of 16"),
        ([("w", torch.zeros(4, 4)), ("x", torch.zeros(4, 4))], "of no tensor of the specs"),
    ],
)
def test_parts_that_do_not_make_the_tensor_are_named(publisher: weightsync.Publisher, parts: list[Any], words: str) -> None:
    source = weightsync.sharded(lambda: iter(parts), [("w", "F32", (4, 4))])
    with pytest.raises(weightsync.SourceFailed, match=words):
        publisher.publish(source, version=1, timeout=LIMIT)


@pytest.mark.parametrize("wrong", [{"version": -1}, {"version": 1.0}, {"version": True}, {"timeout": 0}, {"queue": "newest"}])
def test_arguments_that_make_no_sense_are_refused(publisher: weightsync.Publisher, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"version|timeout|queue"):
        publisher.publish_async({"a": ONES}, **{"version": 1, **wrong})


def test_gather_memory_is_allocated_once() -> None:
    scratch = Scratch()
    places = []
    for _ in range(3):
        scratch.reset()
        first = scratch.take(torch.float32, (300,), "cpu")
        second = scratch.take(torch.bfloat16, (7, 5), "cpu")
        first.fill_(1.0)
        second.fill_(2.0)
        assert (first.shape, second.shape) == ((300,), (7, 5))
        assert float(first.sum()) == 300.0, "two rooms do not overlap"
        places.append((first.data_ptr(), second.data_ptr()))
    assert places[1] == places[2]
    assert scratch.take(torch.float32, (0, 3), "cpu").shape == (0, 3)


def test_a_model_and_its_draft_model_are_one_version(agent: Agent, publisher: weightsync.Publisher) -> None:
    model, draft = {"w": torch.ones(4), "v": torch.zeros(3)}, {"w": torch.full((5,), 2.0)}
    source = weightsync.with_draft(model, weightsync.state_dict(draft))
    assert [(meta.name, meta.section) for meta in source.metas()] == [("w", "model"), ("v", "model"), ("w", "draft")]
    assert publisher.publish(source, version=1, timeout=LIMIT).version == 1
    held = load_file(agent.file(1))
    assert {name: tensor.tolist() for name, tensor in held.items()} == {"w": [1] * 4, "v": [0] * 3, "draft/w": [2] * 5}


class Owned:
    """vLLM 0.33's `WeightSource` by its shape: the list is a property, and a pass has a name."""

    def __init__(self, *, local: bool = False) -> None:
        self._local = local

    @property
    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name, dtype=torch.float32, shape=(4,), owners=owners) for name, owners in (("a", None), ("b", (0,)))]

    def implements_iter_full(self) -> bool:
        return not self._local

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from two()


def test_source_with_a_metadata_property_is_published(publisher: weightsync.Publisher, agent: Agent) -> None:
    source = Owned()
    for version in (1, 2):
        publisher.publish(source, version=version, timeout=LIMIT)
        arrived = load_file(agent.file(version))
        assert {name: torch.equal(tensor, ONES) for name, tensor in arrived.items()} == {"a": True, "b": True}


def test_source_of_local_parts_alone_is_refused() -> None:
    with pytest.raises(TypeError, match="iter_local"):
        as_source(Owned(local=True))
