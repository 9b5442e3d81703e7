"""TRL (1.16) and any trainer of transformers: a callback that publishes the model after optimizer steps.

    trainer = SFTTrainer(..., callbacks=[WeightSyncCallback()])

Trainers that generate with vLLM send weights themselves. TRL's asynchronous ones take another sender, which is `WeightSyncTransfer`:

    trainer = AsyncGRPOTrainer(..., **WeightSyncTransfer().argument_of(AsyncGRPOTrainer))

For the others (`use_vllm=True`, server mode), `without_communicator` and `WeightSyncCallback.serve` replace what TRL sends. See
docs/integrations/trl.md.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback

from .._adapters import is_adapted, merged
from .._source import Meta, Source
from .._supported import check, needs
from .._tensors import describe_named
from ..errors import SourceFailed, WeightSyncError
from ..publisher import Publisher
from ..result import Result
from ..sources import module, stream
from ._once import Once
from ._ranks import gloo_group

check("trl")

_LOG = logging.getLogger("weightsync")


class WeightSyncCallback(TrainerCallback):
    """Publishes in the same way on every rank, after each `every`-th optimizer step and at the end.

    The version is the global step (the start-up weights are step 0, and are published with `at_start`). `publisher` is made when training
    begins, with a gloo group of all ranks; give one to choose socket and limits. An error that may pass by itself leaves the step out with
    a warning, because the next one publishes newer weights; `strict` raises every error.
    """

    def __init__(
        self,
        publisher: Publisher | None = None,
        *,
        every: int = 1,
        at_start: bool = False,
        dtype: Any = None,
        strict: bool = False,
        timeout: float = 600,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self._publisher = publisher
        self._ours = publisher is None
        self._every = every
        self._at_start = at_start
        self._dtype = dtype
        self._strict = strict
        self._timeout = timeout
        self._last: int | None = None
        self._steps_are_theirs = False
        self.results: list[Result] = []
        """Of the last published versions, newest last."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._ready()
        if self._at_start and not self._steps_are_theirs:
            self._publish(int(state.global_step), lambda: self._source(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self._steps_are_theirs and int(state.global_step) % self._every == 0:
            self._publish(int(state.global_step), lambda: self._source(model))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self._steps_are_theirs and self._last != int(state.global_step):
            self._publish(int(state.global_step), lambda: self._source(model))
        if self._ours and self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def serve(self, trainer: Any) -> None:
        """Has the trainer's `vllm_generation.sync_weights` publish instead of moving weights itself.

        Make the trainer within `without_communicator`: its constructor forms TRL's own group with the server otherwise.
        The names are those that TRL gives to vLLM (`_iter_named_params`, TRL 1.16: FSDP and DeepSpeed are its business). A model with
        adapters is merged apart from the trainer's: TRL merges in place, which changes the frozen weights.
        """
        needs("trl", trainer, "vllm_generation", "give the trainer use_vllm=True, or publish by WeightSyncCallback alone")
        generation = trainer.vllm_generation
        for name in ("sync_weights", "_iter_named_params"):
            needs("trl", generation, name, "publish by WeightSyncCallback alone, and have another process start the vLLM servers")
        if getattr(generation, "mode", "server") != "server":
            raise ValueError("vllm_mode is colocate: vLLM runs in the trainer's own process and has no agent")
        self._steps_are_theirs = True
        metas: list[Meta] = []

        def sync_weights() -> None:
            self._ready()
            if is_adapted(trainer.model):
                self._publish(int(trainer.state.global_step), lambda: merged(trainer.model))
                return
            if not metas:
                # TRL walks its parameters once for the list, too.
                metas.extend(Meta(name, *describe_named(name, tensor)) for name, tensor in generation._iter_named_params())
            self._publish(int(trainer.state.global_step), lambda: stream(generation._iter_named_params, metas))

        generation.sync_weights = sync_weights

    def _ready(self) -> Publisher:
        if self._publisher is None:
            self._publisher = Publisher.from_env(gloo_group())
        return self._publisher

    def _source(self, model: Any) -> Source:
        if model is None:
            raise ValueError("the trainer gives its callbacks no model")
        if is_adapted(model):
            return merged(model)
        return module(model, self._dtype)

    def _publish(self, version: int, source: Callable[[], Source]) -> None:
        if self._last == version:
            return
        try:
            self.results.append(self._ready().publish(source(), version=version, timeout=self._timeout))
            del self.results[:-8]
        except WeightSyncError as error:
            if self._strict or not error.retryable:
                raise
            _LOG.warning("step %d is left out: %s", version, error)
        else:
            self._last = version


class WeightSyncTransfer:
    """TRL's `WeightTransferProtocol`: what `AsyncGRPOTrainer` and `AsyncDistillationTrainer` take as `weight_transfer`.

    TRL calls it on its main process alone; the other ranks take part in gathers only. So it publishes as one rank, which runs in the pod
    of the source's agent. TRL gives no step: versions are counted from `first_version`; without it, from the highest that a replica serves
    plus one. TRL gives no list of tensors either, so the first version is read into host memory.

    TRL counts a version as live when `send_weights` returns. So every error is raised, after the rest of TRL's iterator was read: the
    other ranks wait in its gathers. With `strict=False` an error that may pass by itself is a warning, and the engines keep older weights
    than TRL's `model_version` says until the next step.
    """

    def __init__(
        self,
        publisher: Publisher | None = None,
        *,
        first_version: int | None = None,
        strict: bool = True,
        timeout: float = 600,
    ) -> None:
        self._publisher = publisher
        self._ours = publisher is None
        self._next = first_version
        self._strict = strict
        self._timeout = timeout
        self._once = Once()
        self.results: list[Result] = []
        """Of the last published versions, newest last."""

    def argument_of(self, trainer: type) -> dict[str, WeightSyncTransfer]:
        """The argument by which that trainer class takes another sender; raises `NotThere` where it takes none (TRL 1.18 dropped some)."""
        needs("trl", trainer, "weight_transfer", "use GRPOTrainer in server mode with WeightSyncCallback.serve, or a TRL that has it")
        return {"weight_transfer": self}

    def init_weight_transfer(self) -> None:
        """Connects to the agent. No group with the engines is formed, and none of them need be there."""
        publisher = self._ready()
        if self._next is None:
            self._next = 1 + max((replica.version or 0 for replica in publisher.roster().replicas), default=0)

    def pause(self) -> None:
        """Nothing: each agent pauses its own engine, as `spec.update.pause` says, when the version is there."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publishes; returns when enough replicas serve the version."""
        publisher = self._ready()
        version = 1 if self._next is None else self._next
        # A number that failed is free for the same weights only, and TRL trains on.
        self._next = version + 1
        try:
            # Not the iterator itself: ending the pass must not close it.
            source = self._once.source((named for named in iterator), 0)
            self.results.append(publisher.publish(source, version=version, timeout=self._timeout))
            del self.results[:-8]
        except WeightSyncError as error:
            if isinstance(error, SourceFailed):
                # TRL may give other tensors than before.
                self._once.forget()
            _read_to_its_end(iterator)
            if self._strict or not error.retryable:
                raise
            _LOG.warning("version %d is left out: %s", version, error)

    def resume(self) -> None:
        """Nothing: see `pause`."""

    def destroy(self) -> None:
        """Closes the connection to the agent, if it was made here."""
        if self._ours and self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _ready(self) -> Publisher:
        if self._publisher is None:
            self._publisher = Publisher.from_env()
        return self._publisher


@contextlib.contextmanager
def without_communicator() -> Iterator[None]:
    """Trainers that are made meanwhile form no NCCL group with the vLLM server (`VLLMClient.init_communicator` of TRL 1.16)."""
    from trl.generation.vllm_client import VLLMClient

    needs("trl", VLLMClient, "init_communicator", "the trainer would form its own group with the server: use a TRL that has it")
    own = VLLMClient.init_communicator
    VLLMClient.init_communicator = _no_communicator
    try:
        yield
    finally:
        VLLMClient.init_communicator = own


def _no_communicator(client: Any, device: Any = 0) -> None:
    """In the place of TRL's method."""


def _read_to_its_end(iterator: Iterator[Any]) -> None:
    for _ in iterator:
        pass
