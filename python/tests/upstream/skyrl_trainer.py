"""SkyRL's own trainer, worker groups, dispatch and FSDP worker from its wheel, on a Ray of two processes. Run by tests/tools/upstream.sh.

SkyRL's experiment makes the trainer and the client by the hook's class, and the trainer makes its workers. Not SkyRL's: the model, which
its worker would load onto a GPU, the optimizer's step, and who generates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from conftest import Agent
from safetensors.torch import load_file
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.train.config import SkyRLTrainConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightsync.integrations import skyrl

GATHERED = 2
"""Ranks."""


class OnCpu(skyrl.policy_worker("fsdp")):  # type: ignore[misc]
    """A worker whose model two ranks hold in halves, with FSDP2."""

    def init_worker_process_group(self) -> None:
        dist.init_process_group("gloo")
        self.mesh_rank = MeshRank(dp=dist.get_rank(), sp=0, tp=0, pp=0, world_size=GATHERED, dp_size=GATHERED, pp_size=1)

    def init_model(self, *_: Any, **__: Any) -> None:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        model = torch.nn.Sequential(torch.nn.Embedding(37, 8), torch.nn.Linear(8, 53))
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        model.config = SimpleNamespace()
        fully_shard(model, mesh=init_device_mesh("cpu", (GATHERED,)))
        self.model = SimpleNamespace(model=model)
        self._is_lora = self._is_multimodal_lm_only = False

    def step(self) -> None:
        """Adds one to every parameter."""
        with torch.no_grad():
            for parameter in self.model.model.parameters():
                parameter.add_(1)


@pytest.fixture
def cluster(agent: Agent) -> Iterator[None]:
    """A Ray of this process, whose two GPUs nothing uses."""
    environment = {"OMP_NUM_THREADS": "1", "WEIGHTSYNC_SOCKET": agent.socket}
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


@pytest.fixture
def experiment() -> skyrl.WeightSyncExp:
    """With SkyRL's defaults, two policy ranks and a router; it has neither a tokenizer nor data."""
    cfg = SkyRLTrainConfig()
    cfg.trainer.placement.colocate_all = cfg.trainer.placement.colocate_policy_ref = False
    cfg.trainer.placement.policy_num_gpus_per_node = GATHERED
    cfg.trainer.algorithm.use_kl_loss = False
    cfg.generator.inference_engine.run_engines_locally = False
    # Nothing listens there.
    cfg.generator.inference_engine.external_proxy_url = "http://127.0.0.1:1"
    made = object.__new__(skyrl.WeightSyncExp)
    made.cfg, made.tokenizer, made.colocate_pg = cfg, SimpleNamespace(pad_token_id=0), None
    return made


def test_each_sync_of_skyrls_trainer_is_a_version(
    experiment: skyrl.WeightSyncExp, cluster: None, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skyrl, "policy_worker", lambda strategy: OnCpu)
    client = experiment.get_inference_client()
    trainer = experiment.get_trainer(
        cfg=experiment.cfg,
        tracker=None,
        tokenizer=experiment.tokenizer,
        train_dataset=None,
        eval_dataset=None,
        inference_engine_client=client,
        generator=None,
        colocate_pg=None,
    )
    trainer.build_models(None, None, None)
    trainer.init_weight_sync_state()
    for version in (1, 2, 3):
        ray.get(trainer.policy_model.async_run_ray_method("pass_through", "step"))
        # What SkyRL's loop calls after each step, with its pause and its cache.
        asyncio.run(trainer.dispatch.save_weights_for_sampler())
        arrived = load_file(agent.file(version))
        assert {name: tuple(tensor.shape) for name, tensor in arrived.items()} == {
            "0.weight": (37, 8),
            "1.weight": (53, 8),
            "1.bias": (53,),
        }
        assert all(torch.equal(tensor, torch.full_like(tensor, version)) for tensor in arrived.values())
        assert client.weight_version == version


def test_engines_without_agents_are_refused(experiment: skyrl.WeightSyncExp) -> None:
    experiment.cfg.generator.inference_engine.run_engines_locally = True
    with pytest.raises(ValueError, match="external_proxy_url"):
        experiment.get_inference_client()


def test_adapters_alone_are_refused(experiment: skyrl.WeightSyncExp) -> None:
    experiment.cfg.trainer.policy.model.lora.rank = 8
    with pytest.raises(ValueError, match="merge_lora"):
        experiment.get_inference_client()
