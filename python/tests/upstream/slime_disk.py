"""slime's own `UpdateWeightFromDisk` from a checkout, with its own loader of the hook. Run by tests/tools/upstream.sh.

Not slime's: who writes the checkpoint (that needs Megatron on GPUs), and the packages around the class, which import it.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Agent
from packages import bare_packages
from safetensors.torch import load_file, save_file

HOOK = "weightsync.integrations.slime.publish"


def weights(step: int) -> dict[str, torch.Tensor]:
    return {f"layer.{number}.weight": torch.full((300,), float(step + number), dtype=torch.bfloat16) for number in range(4)}


@pytest.fixture
def updater(tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """slime's class; its checkpoints have two files."""
    step = iter(range(1, 9))

    def save(args: Namespace, folder: Path, *_: Any, **__: Any) -> None:
        tensors = list(weights(next(step)).items())
        save_file(dict(tensors[:2]), folder / "model-1.safetensors")
        save_file(dict(tensors[2:]), folder / "model-2.safetensors")

    bare_packages(monkeypatch, "slime", "backends", "backends.megatron_utils", "backends.megatron_utils.update_weight")
    saver = ModuleType("slime.backends.megatron_utils.hf_checkpoint_saver")
    saver.save_hf_model_to_path = save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, saver.__name__, saver)
    monkeypatch.setenv("WEIGHTSYNC_SOCKET", agent.socket)
    made = importlib.import_module("slime.backends.megatron_utils.update_weight.update_weight_from_disk").UpdateWeightFromDisk
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
    settings = Namespace(
        update_weight_mode="full", update_weight_disk_dir=str(tmp_path / "disk"), custom_update_weight_post_write_path=HOOK
    )
    yield made(settings, [], dict, model_name="m", quantization_config=None)
    dist.destroy_process_group()


def test_each_update_through_slimes_disk_is_a_version(updater: Any, agent: Agent) -> None:
    for version in (1, 2, 3):
        updater.update_weights()
        arrived, expected = load_file(agent.file(version)), weights(version)
        assert arrived.keys() == expected.keys()
        assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())


def test_slimes_differences_are_refused(updater: Any) -> None:
    updater.args.update_weight_mode = "delta"
    with pytest.raises(ValueError, match="full"):
        updater.update_weights()
