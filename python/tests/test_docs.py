"""Every code block of docs/trainer.md runs as it is written, and its output is what the programs print."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import torch.distributed as dist
from conftest import LIMIT, ROOT, Agent
from test_whole import Group, tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightsync

TEXT = (ROOT / "docs" / "trainer.md").read_text()


def blocks(language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def shape(text: str) -> str:
    """A text without its numbers, digests and white space: these differ each time."""
    digests = re.sub(r"\b[0-9a-f]{12,64}\b", "DIGEST", text)
    return " ".join(re.sub(r"\d+(\.\d+)?", "N", digests).split())


@pytest.fixture
def names(start_agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the blocks take for granted; a group of one rank among it."""
    monkeypatch.setenv("WEIGHTSYNC_SOCKET", "@" + start_agent().socket)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(30, 40), mesh=init_device_mesh("cpu", (1,)))
        plain = torch.nn.Linear(30, 40)
        with weightsync.Publisher.from_env() as publisher:
            yield {
                "weightsync": weightsync,
                "torch": torch,
                "dist": dist,
                "log": logging.getLogger("trainer"),
                "publisher": publisher,
                "model": plain,
                "draft": torch.nn.Linear(30, 2),
                "sharded_model": model,
                "optimizer": torch.optim.SGD(plain.parameters(), lr=0.1),
                "train": lambda model: None,
                "exported_shapes": [(name, tensor.shape) for name, tensor in plain.named_parameters()],
                "export": lambda model: ((name, tensor.detach().bfloat16()) for name, tensor in model.named_parameters()),
                "my_rows": torch.ones(6144, 4096, dtype=torch.bfloat16),
                "rank": 0,
                "step": 7,
            }
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().splitlines()[0])
def test_every_block_of_python_runs_as_written(code: str, names: dict[str, Any], tmp_path: Path) -> None:
    if "fsdp2" in code:
        names["model"] = names["sharded_model"]
    exec(compile(code, "docs/trainer.md", "exec"), names)
    assert (tmp_path / f"{names['step']}.safetensors").is_file(), "what the block is there for is to publish"


def test_there_are_as_many_blocks_as_the_page_has() -> None:
    fences = re.findall(r"^```(\w*)$", TEXT, re.MULTILINE)
    # Each block has two fences; the closing one names no language.
    assert fences[::2] == [
        "python",
        "text",
        "python",
        "python",
        "python",
        "python",
        "python",
        "python",
        "python",
        "python",
        "python",
        "console",
    ]


def test_publish_result_and_printed_output_are_as_documented(programs: Path, tmp_path: Path) -> None:
    group = Group(programs, tmp_path)
    try:
        with weightsync.Publisher.from_env(socket=group.socket, connect_timeout=LIMIT) as publisher:
            group.wait_for_both(publisher)
            result = publisher.publish(dict(tensors(3)), version=3, timeout=LIMIT)
        # The fence of text is what `publish` returns.
        (shown,) = re.findall(r"^```text\n(Result.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
        assert shape(repr(result)) == shape(shown)
        (tmp_path / "model").mkdir()
        safetensors.numpy.save_file(dict(tensors(4)), tmp_path / "model" / "model.safetensors")
        (console,) = blocks("console")
        for text in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
            line, shown = text.split("\n", 1)
            environment = {"PATH": f"{programs}:/usr/bin:/bin", "WEIGHTSYNC_SOCKET": group.socket}
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True
            )
            # Lines of progress stand in the place of a terminal's bar.
            said = re.sub(r"(?m)^version \d+: (waiting|attempt) .*\n", "", done.stderr)
            assert shape(said + done.stdout) == shape(shown), line
    finally:
        group.stop()
