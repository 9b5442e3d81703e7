"""verl's `CheckpointEngine` (0.9): the actor's weights go to WeightSync's agents instead of a group of Ray workers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl

Importing this module registers the backend `weightsync`. See docs/integrations/verl.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ..errors import SourceFailed
from ..publisher import Publisher
from ..result import Result
from ._once import Once


@CheckpointEngineRegistry.register("weightsync")
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
        """Actors have their ranks; rollouts have none."""
        actors = {"rank": list(range(actor_wg_world_size)), "actors": [actor_wg_world_size] * actor_wg_world_size}
        rollouts = {"rank": [-1] * rollout_world_size, "actors": [actor_wg_world_size] * rollout_world_size}
        return actors, rollouts

    def init_process_group(self, rank: int, actors: int) -> None:
        """Once: the actors' own group (gloo) and the publisher are kept for all steps."""
        if rank < 0 or self._publisher is not None:
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
        return
        yield ("", None)
