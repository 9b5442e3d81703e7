"""WeightSync's weight-transfer back end for vLLM 0.32 or newer: buckets from the server's agent, by shared memory of the host or by CUDA
IPC, no pickle.

vLLM finds it by itself where this package is installed (entry point group `vllm.general_plugins`), and uses it when the server is started
with `--weight-transfer-config '{"backend": "weightsync"}'`. The agent drives a session: init (each worker connects to the agent), start,
one update that takes all tensors of the model while they come, finish; and for a version with a draft model a second one, whose target
vLLM sets. Decides the state after a session that did not end well: no layer is disassembled, and no success is reported. It never sets the
version; the agent does, with its last step.

Every rank reports the result of each step on the agent's socket, and no step of an agent raises: vLLM reads the replies of workers one
after the other and stops at the first failure, so that those of the other ranks are permanently taken for replies to later calls
(`v1/executor/multiproc_executor.py` of 0.32 and 0.33: after one failed call of two ranks, every reply of the second is that to the call
before). An init that is no agent's is refused by the last rank alone, whose reply is the last that vLLM reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from ._feed import PROTOCOL, Feed
from ._gpu_feed import GpuFeed
from ._supported import check

check("vllm")

BACKEND = "weightsync"

_FIELDS = ("protocol", "socket", "token")
"""What every agent's init has, of whatever version."""

# Below vLLM's own logger: other names are not shown by its set-up.
logger = init_logger("vllm.weightsync")


def register() -> None:
    """Makes the back end known; vLLM calls it in every process, and may do so twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightSyncTransferEngine)


@dataclass
class WeightSyncInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the agent listens for one version."""

    protocol: int
    """Version of the lines on the socket."""
    socket: str
    """Abstract name, without its leading NUL."""
    token: str
    """What the worker shows, and what the update must name."""


@dataclass
class WeightSyncUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version is to be taken: that of the last init."""

    token: str


class WeightSyncTransferEngine(WeightTransferEngine[WeightSyncInitInfo, WeightSyncUpdateInfo]):  # type: ignore[misc]
    """The part of the back end in one worker."""

    init_info_cls = WeightSyncInitInfo
    update_info_cls = WeightSyncUpdateInfo
    supports_draft_weight_update = True

    _feed: Feed | None = None
    _open = False
    """Whether vLLM counts a session as active: from start to finish."""
    _whole = False
    """Whether the session has loaded its whole model."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """While the server starts: what takes time once is done before any update waits for it."""
        super().__init__(*arguments, **named)
        self._gpu = GpuFeed.of(self.device)

    def parse_init_info(self, init_dict: dict[str, Any]) -> WeightSyncInitInfo:
        """Takes an agent's fields; a wrong one shows when the agent waits for this worker. Another trainer's init is refused.

        Raises: ValueError, in the last rank, so that the trainer gets no 200 and waits for no rank that never joins.
        """
        if not all(name in init_dict for name in _FIELDS) and self.parallel_config.rank == self.parallel_config.world_size - 1:
            fields = ", ".join(sorted(map(str, init_dict))) or "nothing"
            raise ValueError(
                f"this server takes weights from a WeightSync agent, not from a trainer that gives {fields}: publish to the trainer's own "
                "agent (weightsync.integrations has hooks for vLLM's trainer interface, TRL, verl and XTuner), or start the server with "
                """--weight-transfer-config '{"backend": "nccl"}'"""
            )
        protocol, socket, token = (init_dict.get(name) for name in _FIELDS)
        return WeightSyncInitInfo(protocol if isinstance(protocol, int) else 0, str(socket or ""), str(token or ""))

    def init_transfer_engine(self, init_info: WeightSyncInitInfo) -> None:
        """Connects to the agent; buckets are checked from now on, and loaded with the update."""
        if init_info.protocol != PROTOCOL:
            logger.error("the agent speaks version %d of the protocol, this package %d: install the same", init_info.protocol, PROTOCOL)
            return
        self.shutdown()
        config = self.parallel_config
        rank = config.data_parallel_index * config.world_size + config.rank
        ranks = config.data_parallel_size * config.world_size
        try:
            self._feed = Feed(init_info.socket, init_info.token, rank, ranks, self.device.type, self._open, self._gpu)
        except Exception:
            logger.exception("no agent can be reached for a weight update")

    def start_weight_update(self) -> None:
        """Takes layers apart. The engine must be paused from now on until the session ends."""
        with self._reported("started"):
            self._put_layers_back()
            self._open, self._whole = True, False
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes all tensors of the session's model; returns when it has taken the last one, or when that failed."""
        with self._reported("updated"):
            self.receive_weights(WeightSyncUpdateInfo(str(update_info.get("token"))))

    def receive_weights(self, update_info: WeightSyncUpdateInfo) -> None:
        """Loads the announced buckets one by one."""
        feed = self._feed
        if feed is None or feed.token != update_info.token:
            raise RuntimeError("no agent feeds this worker, or another one than the update names")
        # vLLM gives a draft session another target than the one that this was made for.
        feed.turn_to(draft=self.model is not self._default_model)
        self.model.load_weights(feed.tensors())
        feed.must_be_whole()
        self._whole = True

    def finish_weight_update(self) -> None:
        """The last step: post-processing, and every layer whole again. A model that did not come whole gets back what it had."""
        whole, self._open, self._whole = self._whole, False, False
        if not whole:
            self._put_layers_back()
            self._say("ended")
            return
        with self._reported("finished"):
            finalize_layerwise_reload(self.model, self.model_config)
        if self._feed is None or self._feed.over:
            self.shutdown()

    def shutdown(self) -> None:
        """Lets the agent and its memory go."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    @contextlib.contextmanager
    def _reported(self, step: str) -> Iterator[None]:
        """Says that a step was taken, or why not; what a failed one took apart is put together."""
        try:
            yield
        except Exception as error:
            logger.exception("a weight update failed")
            self._whole = False
            with contextlib.suppress(Exception):
                self._put_layers_back()
            if self._feed is not None:
                self._feed.failed(str(error) or type(error).__name__)
        else:
            self._say(step)

    def _say(self, step: str) -> None:
        if self._feed is not None:
            self._feed.did(step)

    def _put_layers_back(self) -> None:
        """Gives layers that a session took apart the tensors back that they compute with, and drops what was kept for them.

        Otherwise the next session would replay the tensors of this one, which are gone or of another version.
        """
        infos = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
        if not infos:
            return
        for info in infos:
            info.loaded_weights.clear()
            info.load_numel = 0
        logger.warning("a weight update did not end: %d layers get back what they had", len(infos))
        finalize_layerwise_reload(self.model, self.model_config)
