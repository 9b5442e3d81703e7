"""vLLM's own trainer interface on top of WeightSync, with the real package."""

from __future__ import annotations

import pytest
import torch
from conftest import Agent
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync.integrations.vllm import WeightSyncTrainerEngine, WeightSyncTrainerInitInfo


def test_a_module_source_is_published_a_version_higher_each_time(agent: Agent) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)).to(torch.bfloat16)
    info = WeightSyncTrainerInitInfo(rank=0, socket=agent.socket, version=6)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=None, source=ModuleSource(model))
    assert isinstance(engine, WeightSyncTrainerEngine)
    for version in (7, 8):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        engine.send_weights()
        assert engine.version == version
        assert engine.result is not None
        assert engine.result.version == version
        written = load_file(agent.file(version))
        expected = dict(model.named_parameters())
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], parameter) for name, parameter in expected.items())
    engine.shutdown()


def test_a_trainer_without_a_source_is_refused(agent: Agent) -> None:
    with pytest.raises(ValueError, match="a source is needed"):
        WeightTransferTrainerFactory.trainer_init(WeightSyncTrainerInitInfo(rank=0, socket=agent.socket), client=None)
