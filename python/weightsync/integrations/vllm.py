"""vLLM's own trainer interface (0.32, 0.33), implemented by WeightSync: a trainer that was written for it changes one line.

    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from weightsync.integrations.vllm import WeightSyncTrainerInitInfo

    init_info = WeightSyncTrainerInitInfo(rank=rank, group=group)
    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=None, source=ModuleSource(model))
    engine.send_weights()

Importing this module registers the back end `weightsync`. The agents drive the servers, so no client is needed; the servers may be any that
WeightSync knows, whatever they were started with. See docs/integrations/vllm.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from .._supported import check
from ..publisher import Publisher
from ..result import Result

check("vllm")

BACKEND = "weightsync"


@dataclass
class WeightSyncTrainerInitInfo(TrainerInitInfo):
    """How this rank reaches its agent. Rank 0 runs in the pod of the source agent."""

    backend: ClassVar[str] = BACKEND

    group: Any = field(default=None, kw_only=True)
    """Group of torch.distributed of all trainer ranks (gloo is best); None for a trainer of one rank."""
    socket: str | None = field(default=None, kw_only=True)
    """The agent's socket; None: found as by `Publisher.from_env`."""
    version: int = field(default=0, kw_only=True)
    """Number of the last version that was published, by an earlier life of the trainer too: the first one here is one higher."""
    timeout: float = field(default=600, kw_only=True)
    """Seconds after which a publish ends."""


class WeightSyncTrainerEngine(TrainerWeightTransferEngine[WeightSyncTrainerInitInfo]):
    """Publishes its source, a version higher each time."""

    init_info_cls = WeightSyncTrainerInitInfo

    version: int
    """The last version that was published."""
    result: Result | None = None
    """What became of it: which replicas serve it, and which do not and why."""

    def __init__(self, init_info: WeightSyncTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        # A field of the base class since 0.33, whose constructor of 0.32 does not take it.
        self.rank = init_info.rank
        self.version = init_info.version
        self._timeout = init_info.timeout
        self._publisher = Publisher.from_env(init_info.group, socket=init_info.socket)

    @classmethod
    def trainer_init(cls, init_info: WeightSyncTrainerInitInfo, *, client: Any = None, source: Any = None) -> WeightSyncTrainerEngine:
        """On every rank. `client` is not used: the agents speak to the servers."""
        if source is None:
            raise ValueError("a source is needed: vLLM's ModuleSource, or another WeightSource")
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """On every rank: publishes, and returns when enough replicas serve the version. Errors are alike on all."""
        version = self.version + 1
        # A number whose publish failed is not used again: the weights may have changed since.
        self.version = version
        self.result = self._publisher.publish(self.source, version, timeout=self._timeout)

    def shutdown(self) -> None:
        """Closes the connections to the agent."""
        self._publisher.close()


def register() -> None:
    """Makes the back end known to vLLM's factory; importing this module does it."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, WeightSyncTrainerEngine)


register()
