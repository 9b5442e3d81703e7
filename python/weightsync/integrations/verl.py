"""verl's `CheckpointEngine` (0.9): the actor's weights go to WeightSync's agents instead of a group of Ray workers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl
    actor_rollout_ref.rollout.checkpoint_manager_class=weightsync.integrations.verl.WeightSyncCheckpointManager

Importing this module registers the backend `weightsync`. The manager leaves verl's replicas alone, which verl's own does not. See
docs/integrations/verl.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.ray_utils import auto_await

from .._supported import check
from ..errors import SourceFailed
from ..publisher import Publisher
from ..result import Result
from ._once import Once

check("verl")

BACKEND = "weightsync"


@CheckpointEngineRegistry.register(BACKEND)
class WeightSyncCheckpointEngine(CheckpointEngine):
    """verl's interface, by which all actor ranks send and the rollout's workers receive nothing: the engines' agents receive.

    Engines are reached by their agents, so no group is built and a rollout that dies does not affect others. `global_steps` is the version;
    without it versions are counted.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        timeout: float = 600,
        rank_timeout: float = 600,
        socket: str | None = None,
    ) -> None:
        # The agent cuts buckets by its own settings; verl passes its number to every backend.
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._timeout = timeout
        self._rank_timeout = rank_timeout
        self._socket = socket
        self._publisher: Publisher | None = None
        self._rank = -1
        self._once = Once()
        self._last: int | None = None
        self.result: Result | None = None
        """Of the last version that was sent."""

    def prepare(self) -> dict[str, Any]:
        """Nothing is to be known of each other."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Actors have their ranks.

        Rollout workers are refused. verl would have them finish a load of weights that did not come, while the agents load: what vLLM does
        after a load changes weights that it was done to before.
        """
        if rollout_world_size > 0:
            raise RuntimeError(
                "the engines' agents load the weights, not verl's rollout workers: set actor_rollout_ref.rollout.checkpoint_manager_class="
                "weightsync.integrations.verl.WeightSyncCheckpointManager"
            )
        return {"rank": list(range(actor_wg_world_size)), "actors": [actor_wg_world_size] * actor_wg_world_size}, {}

    def init_process_group(self, rank: int, actors: int) -> None:
        """Once: the actors' own group (gloo) and the publisher are kept for all steps."""
        if self._publisher is not None:
            return
        group = None
        if actors > 1:
            import torch.distributed as dist

            group = dist.new_group(backend="gloo")
        self._rank = rank
        self._publisher = Publisher.from_env(group, socket=self._socket, rank_timeout=self._rank_timeout)

    def finalize(self) -> None:
        """Nothing is held between two steps but the connection to the agent."""

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> dict[str, float]:
        """Publishes what the actor's generator gives; returns when enough replicas serve it. On every actor rank.

        Runs in the calling thread to its end: the generator's collective operations belong there.
        """
        if self._publisher is None:
            raise RuntimeError("init_process_group was not called: verl builds the topology before it sends")
        version = global_steps if global_steps is not None else (self._last if self._last is not None else -1) + 1
        source = self._once.source(weights, self._rank)
        try:
            result = self._publisher.publish(source, version=version, timeout=self._timeout)
        except SourceFailed:
            # The actor may give other tensors than before (adapters that are merged, or not).
            self._once.forget()
            raise
        self._last, self.result = version, result
        return {
            "weightsync/installed": float(len(result.installed)),
            "weightsync/behind": float(len(result.behind)),
            **{f"weightsync/{phase}_s": ms / 1000 for phase, ms in result.phases_ms.items()},
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Nothing comes this way: the engine's agent loads the version."""
        raise RuntimeError("the engine's agent loads the weights, not verl's rollout worker")
        yield ("", None)


class WeightSyncCheckpointManager(CheckpointEngineManager):
    """verl's manager, with an update that calls the actors alone.

    verl's own aborts requests, puts engines to sleep and calls a worker of every replica; a dead one ends the training. Here the agents
    pause and load their engines, as many as there are at that moment. Other backends (`naive`) are verl's business as before.
    """

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Publishes one version from all actor ranks; the metrics are those of the actors."""
        if self.backend != BACKEND:
            metrics: dict[str, Any] = await super().update_weights(global_steps=global_steps)
            return metrics
        actors = self.actor_wg
        places, _ = self.backend_cls.build_topology(actors.world_size, 0, [])
        ray.get(actors.execute_checkpoint_engine(method=["init_process_group"] * actors.world_size, **places))
        results = ray.get(actors.update_weights(global_steps=global_steps, mode=self.backend))
        ray.get(actors.execute_checkpoint_engine(["finalize"] * actors.world_size))
        return {name: value for result in results if isinstance(result, dict) for name, value in result.items()}
