"""verl's own `CheckpointEngineManager`, worker groups and dispatch, on a Ray of two processes. Run by tests/tools/upstream.sh.

verl's trainer makes the manager that `rollout.checkpoint_manager_class` names, by the same function as here. Not verl's: the model. Its
actor workers give tensors that both ranks add up, as an export of a sharded actor does.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from conftest import ROOT, Agent
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.config import CheckpointEngineConfig

MANAGER = "weightsync.integrations.verl.WeightSyncCheckpointManager"


class Actor(Worker):
    """The two calls that the manager makes, as verl's `ActorRolloutRefWorker` has them."""

    def __init__(self, socket: str) -> None:
        super().__init__()
        import torch.distributed as dist

        import weightsync.integrations.verl  # noqa: F401

        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        self.checkpoint_engine = CheckpointEngineRegistry.new("weightsync", bucket_size=1 << 20, is_master=self.rank == 0, socket=socket)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        metrics: dict[str, float] = await self.checkpoint_engine.send_weights(self.weights(global_steps or 0), global_steps=global_steps)
        return metrics

    def weights(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            tensor = torch.full((300,), float(step + self.rank))
            torch.distributed.all_reduce(tensor)
            yield f"layer.{number}.weight", tensor

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class DeadReplica:
    """Any call of it is an error, as of an actor that has died."""

    workers = (SimpleNamespace(),)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a dead replica was asked for")


@pytest.fixture
def cluster() -> Iterator[None]:
    """A Ray of this process."""
    paths = f"{ROOT / 'python'}:{ROOT / 'python/tests'}:{ROOT / 'python/tests/upstream'}"
    environment = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture
def actors(cluster: None, agent: Agent) -> Iterator[RayWorkerGroup]:
    """Two actor ranks."""
    made = RayClassWithInitArgs(cls=ray.remote(Actor), socket=agent.socket)
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False, max_colocate_count=1), made, bin_pack=False)
    yield group
    for worker in group.workers:
        ray.kill(worker)


CONFIG = CheckpointEngineConfig(backend="weightsync", custom_backend_module="weightsync.integrations.verl")


def test_verls_manager_publishes_each_step_without_replicas(actors: RayWorkerGroup, agent: Agent) -> None:
    manager = load_class_from_fqn(MANAGER, "CheckpointEngineManager")(config=CONFIG, actor_wg=actors, replicas=[DeadReplica()])
    assert isinstance(manager, CheckpointEngineManager)
    for step in (1, 2, 3):
        metrics = manager.update_weights(step)
        assert metrics["weightsync/installed"] == 1
        arrived = load_file(agent.file(step))
        assert len(arrived) == 4
        assert all(torch.equal(tensor, torch.full((300,), 2.0 * step + 1)) for tensor in arrived.values())

    # verl's own manager would call the rollouts' workers.
    manager = CheckpointEngineManager(config=CONFIG, actor_wg=actors, replicas=[])
    rollout = SimpleNamespace(world_size=1, execute_checkpoint_engine=lambda *_: [ray.put({})])
    with pytest.raises(RuntimeError, match="WeightSyncCheckpointManager"):
        manager.build_process_group(rollout)
