"""AReaL (1.0): a rollout engine whose weights WeightSync's agents bring, and a trainer that makes it.

    from weightsync.integrations.areal import WeightSyncPPOTrainer      # instead of AReaL's PPOTrainer
    with WeightSyncPPOTrainer(config, train_dataset=...) as trainer:
        trainer.train(...)

Set `actor.weight_update_mode=disk`, and `AREAL_LLM_SERVER_ADDRS` to a router of the engines. See docs/integrations/areal.md.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

from areal import PPOTrainer
from areal.api import WeightUpdateMeta
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names
from areal.utils.environ import is_single_controller

from .._supported import check
from ..publisher import Publisher
from ..result import Result
from ._folder import publish_folder

check("areal")


class WeightSyncEngine(RemotevLLMEngine):
    """AReaL's engine for remote vLLM servers, which generates as before. Train rank 0 runs in the pod of the source's agent.

    Each agent pauses its own engine, so AReaL pauses none. The version is AReaL's.
    """

    def __init__(self, config: Any, *, timeout: float = 600, socket: str | None = None) -> None:
        super().__init__(config)
        self._timeout = timeout
        self._publisher = Publisher.from_env(socket=socket)
        # One update at a time, as AReaL makes them.
        self._thread = ThreadPoolExecutor(1, "weightsync-publish")
        self.result: Result | None = None
        """Of the last version that was published."""

    def pause_generation(self) -> None:
        """Nothing: the agents pause."""

    def continue_generation(self) -> None:
        """Nothing: the agents resume."""

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> Future[None]:
        """Publishes the checkpoint in `meta.path` when AReaL says that it was written; done when enough replicas serve it."""
        if meta.use_lora or meta.path is None or meta.version is None:
            raise ValueError("full weights in a folder with a version are published, and nothing else")
        return self._thread.submit(self._publish, meta, self.get_version())

    def _publish(self, meta: WeightUpdateMeta, trained: int) -> None:
        written = names.update_weights_from_disk(self.config.experiment_name, self.config.trial_name, trained)
        name_resolve.wait(written, timeout=self._timeout)
        self.result = publish_folder(self._publisher, Path(meta.path), version=meta.version, timeout=self._timeout)
        if meta.clear_checkpoint_after_load:
            shutil.rmtree(meta.path, ignore_errors=True)

    def destroy(self) -> None:
        """Closes the connection to the agent, too."""
        self._thread.shutdown()
        self._publisher.close()
        super().destroy()


class WeightSyncPPOTrainer(PPOTrainer):
    """AReaL's trainer with that engine, in the mode in which each train process has its own engine (`AREAL_SPMD_MODE=1`)."""

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> WeightSyncEngine:
        if is_single_controller():
            raise ValueError("AReaL's controller starts servers of its own, which have no agents: set AREAL_SPMD_MODE=1")
        config = deepcopy(rollout_config)
        if is_eval:
            # As AReaL's: answers for evaluation are never too old.
            config.max_head_offpolicyness = int(1e12)
        engine = WeightSyncEngine(config)
        engine.initialize(train_data_parallel_size=self.actor_alloc.parallel.dp_size)
        return engine
