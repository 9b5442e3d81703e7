"""XTuner's own `WeightUpdater`, `WeightIterator` and rollout records from a checkout. Run by tests/tools/upstream.sh.

XTuner's class is bound to rollouts, updates, is bound to others and updates again, with each kind of transport. Not XTuner's: the model, of
which `WeightIterator` asks for buckets of a checkpoint's tensors, and the rollouts, which are records only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xtuner
from conftest import Agent
from safetensors.torch import load_file
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.weight_update import RolloutWeightUpdateTarget, WeightUpdater

from weightsync.integrations.xtuner import WeightSyncTransport, install


class Model:
    """The two things that `WeightIterator` asks of a model."""

    fsdp_config = None

    def __init__(self) -> None:
        self.step = 0

    def _load_spec_params(self) -> list[tuple[str, Any]]:
        return [(f"layer.{number}.weight", SimpleNamespace(is_fused=number % 2 == 0)) for number in range(4)]

    def _get_hf_param(self, params: list[tuple[str, Any]], dtype: torch.dtype, **_: Any) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        for name, _ in params:
            yield [name], [torch.full((300,), float(self.step), dtype=dtype)]


@pytest.fixture
def restored() -> Iterator[None]:
    """XTuner's class with its own methods afterwards."""
    own = WeightUpdater._set_transport, WeightUpdater._reset_transport
    yield
    WeightUpdater._set_transport, WeightUpdater._reset_transport = own


def targets(*states: str) -> tuple[RolloutWeightUpdateTarget, ...]:
    """Rollouts in these states."""
    return tuple(RolloutWeightUpdateTarget(rank, (rank,), f"http://127.0.0.1:{rank + 1}", state) for rank, state in enumerate(states))


@pytest.mark.parametrize("kind", ["nccl", "ipc", "checkpoint_engine"])
def test_each_step_of_xtuners_updater_is_one_version(
    kind: str, agent: Agent, restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTUNER_USE_SGLANG", "1")
    # torch has it for accelerators only; XTuner calls it on a CPU too.
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    print(f"XTuner from {xtuner.__file__}")
    install(socket=agent.socket)
    model = Model()
    settings = SimpleNamespace(model_cfg=None, update_weight_bucket_size_in_gb=1)
    updater = WeightUpdater(rank=0, logger=logging.getLogger("xtuner"), config=settings, engine=SimpleNamespace(model=model))
    rollouts = RolloutConfig(env="", model_path=str(tmp_path), tokenizer_path=str(tmp_path), weight_transport_type=kind, context_length=256)
    transport = None
    for step, states in enumerate([("active", "active"), ("active", "failed"), ("active", "active")], start=1):
        updater.bind_rollout_weight_update(targets=targets(*states), rollout_config=rollouts)
        assert isinstance(updater._transport, WeightSyncTransport)
        # XTuner's own methods build another transport when a rollout fails or comes back.
        assert transport in (None, updater._transport)
        transport = updater._transport
        model.step = step
        if kind == "checkpoint_engine":
            updater.weight_update(need_register=True, need_update=False)
            # XTuner offloads its model here.
            model.step = -1
            updater.weight_update(need_register=False, need_update=True)
        else:
            updater.weight_update()
        assert transport.result is not None
        assert transport.result.version == step
        arrived = load_file(agent.file(step))
        assert len(arrived) == 4
        assert all(torch.equal(tensor, torch.full((300,), float(step), dtype=torch.bfloat16)) for tensor in arrived.values())
    transport.teardown()
