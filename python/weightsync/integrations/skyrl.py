"""SkyRL (0.3): an entrypoint whose policy workers publish to WeightSync's agents instead of a group with the engines.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=weightsync.integrations.skyrl \
        generator.inference_engine.run_engines_locally=false generator.inference_engine.external_proxy_url=ROUTER ...

SkyRL imports the module that `trainer.override_entrypoint` names, and calls its `main`. See docs/integrations/skyrl.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import ray
import torch.distributed as dist
from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightTransferSender
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from .._source import Meta
from .._supported import check
from ..publisher import Publisher
from ..result import Result
from ..sources import stream
from ._once import once
from ._ranks import gloo_group, next_version

check("skyrl")

OVERRIDE = "trainer.override_entrypoint="


class WeightSyncSender(WeightTransferSender):
    """SkyRL's sender, on every policy rank; rank 0 runs in the pod of the source's agent.

    SkyRL gives no step. Versions continue after the highest that a replica serves.
    """

    handles_prefix_cache_reset = True

    def __init__(self, timeout: float = 600, **named: Any) -> None:
        self._publisher = Publisher.from_env(gloo_group(), **named)
        self._next = next_version(self._publisher)
        self._timeout = timeout
        self.result: Result | None = None
        """Of the last version that was sent."""

    async def send_chunks(self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list[Any]] | None = None, **_: Any) -> None:
        """Publishes one version; returns when enough replicas serve it.

        Runs in the calling thread to its end: the gathers of SkyRL's generator belong there.
        """
        if weight_metadata is None:
            raise ValueError("the names, types and shapes of all tensors are needed: weight_metadata")
        metas = map(Meta, weight_metadata["names"], weight_metadata["dtype_names"], map(tuple, weight_metadata["shapes"]))
        version = self._next
        # A number that failed is free for the same weights only, and SkyRL may train on.
        self._next = version + 1
        named = (pair for chunk in chunks for pair in zip(chunk.names, chunk.tensors, strict=True))
        self.result = self._publisher.publish(stream(once(named), metas), version=version, timeout=self._timeout)

    def teardown(self) -> None:
        """Closes the connection to the agent."""
        self._publisher.close()


class WeightSyncPolicyWorker(PolicyWorkerBase):
    """Comes after SkyRL's own worker class in the order of base classes: its part of setting up the sync is replaced.

    SkyRL's asks every engine for its size, and forms a group with all of them.
    """

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Connects to the agent, once."""
        if getattr(self, "_weight_transfer_sender", None) is None:
            self._weight_transfer_sender = WeightSyncSender()
        dist.barrier()


def policy_worker(strategy: str) -> type[PolicyWorkerBase]:
    """SkyRL's worker class of `trainer.strategy`, which publishes."""
    if strategy == "megatron":
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase as Own
    else:
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase as Own
    return type("WeightSyncPolicyWorker", (Own, WeightSyncPolicyWorker), {})


class WeightSyncTrainer(RayPPOTrainer):
    """SkyRL's trainer with policy workers that publish."""

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """As SkyRL's, with another policy worker."""
        super().build_models(ray.remote(num_gpus=1)(policy_worker(self.cfg.trainer.strategy)), CriticWorker, RefWorker)


class WeightSyncExp(BasePPOExp):
    """SkyRL's experiment with that trainer, and engines that their agents alone control."""

    def get_trainer(self, *args: Any, **named: Any) -> RayPPOTrainer:
        """See `WeightSyncTrainer`."""
        return WeightSyncTrainer(*args, **named)

    def get_inference_client(self) -> Any:
        """SkyRL's client, which generates through the router and neither pauses nor resets an engine: the agents do."""
        if self.cfg.trainer.placement.colocate_all or self.cfg.generator.inference_engine.run_engines_locally:
            raise ValueError("the engines need agents: set run_engines_locally=false, colocate_all=false and external_proxy_url")
        client = super().get_inference_client()
        if client.uses_lora_weight_sync:
            raise ValueError("adapters alone are not published: merge them (Megatron's lora_config.merge_lora), or train full weights")
        client.server_urls = []
        return client


def run(cfg: SkyRLTrainConfig) -> None:
    """Trains; in a Ray worker."""
    WeightSyncExp(cfg).run()


def main() -> None:
    """What SkyRL calls."""
    cfg = SkyRLTrainConfig.from_cli_overrides([arg for arg in sys.argv[1:] if not arg.startswith(OVERRIDE)])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(run).remote(cfg))
