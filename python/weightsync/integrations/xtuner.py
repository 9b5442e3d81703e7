"""XTuner v1's `WeightUpdater`: its batches go to WeightSync's agents, one version a step.

    from weightsync.integrations.xtuner import install

    install()  # in every train worker, before XTuner binds it to rollouts

XTuner v1 is not on PyPI. What is here takes the interface of its repository (b934f46, 2026-08): `WeightUpdater._set_transport` and
`_reset_transport` make and drop a `WeightTransport`, whose `update(weight_iterator, need_register, need_update)` sends what
`iter_batch_groups()` yields. See docs/integrations/xtuner.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._source import Meta
from .._tensors import describe_named
from ..publisher import Publisher, PublishHandle
from ..result import Result
from ..sources import stream
from ._ranks import gloo_group


class WeightSyncTransport:
    """Takes the place of XTuner's transport on every train rank, and is called alike on all of them.

    `group` are the train ranks (gloo is best); rank 0 runs in the pod of the source's agent. Versions are counted from `first_version`, or
    given by `version` of `update`. XTuner's own targets, ports and groups have no effect: the agents handle membership.
    """

    def __init__(
        self,
        *,
        group: Any = None,
        rollout_info: Any = None,
        logger: Any = None,
        rank: int = 0,
        first_version: int = 1,
        timeout: float = 600,
        rank_timeout: float = 600,
        socket: str | None = None,
    ) -> None:
        self.rollout_info = rollout_info
        self.logger = logger
        self.rank = rank
        self._next = first_version
        self._timeout = timeout
        self._publisher = Publisher.from_env(group, socket=socket, rank_timeout=rank_timeout)
        self._metas: list[Meta] | None = None
        self.result: Result | None = None
        """Of the last update."""

        self._staged: PublishHandle | None = None

    def reset_rollout_info(self, rollout_info: Any) -> None:
        """Rollouts changed, by XTuner's books; the agents know by themselves."""
        self.rollout_info = rollout_info

    def update(
        self, weight_iterator: Any, version: int | None = None, *, need_register: bool = True, need_update: bool = True, **_: Any
    ) -> None:
        """Publishes one version; returns when enough replicas serve it. Raises `weightsync.WeightSyncError` on every rank alike.

        XTuner may ask for the two halves of a step one by one. The first (`need_update=False`) reads the weights, and returns when
        replicas hold them; the second (`need_register=False`) has the engines load them, and reads nothing. A second half without a first
        is for rollouts that came back: their agents have fed them.

        The iterator is read once more than it is sent, the first time: the agents want the list of tensors first.
        """
        if not (need_register or need_update):
            raise ValueError("nothing to do: neither need_register nor need_update")
        if need_register:
            self._drop_staged()
            number = self._next if version is None else version
            # A number that failed is free for the same weights only, and XTuner trains on.
            self._next = number + 1
            self._register(weight_iterator, number, whole=need_update)
        elif self._staged is not None:
            staged, self._staged = self._staged, None
            self.result = staged.activate(self._timeout)
        elif self.result is None:
            raise RuntimeError("no version was registered: update with need_register first")
        if need_update and self.logger is not None and self.result is not None:
            result = self.result
            self.logger.info(f"version {result.version}: {len(result.installed)} replicas serve it, behind: {dict(result.behind)}")

    def _register(self, weight_iterator: Any, version: int, *, whole: bool) -> None:
        try:
            if self._metas is None:
                self._metas = [Meta(name, *describe_named(name, tensor)) for name, tensor in _tensors(weight_iterator)]
            source = stream(lambda: _tensors(weight_iterator), self._metas)
            if whole:
                self.result = self._publisher.publish(source, version=version, timeout=self._timeout)
                return
            handle = self._publisher.publish_async(source, version=version, activation="manual", timeout=self._timeout)
            handle.wait()
        except Exception:
            self._metas = None
            raise
        self._staged = handle

    def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.cancel("the trainer registered a later version")

    def after_update_per_group(self) -> None:
        """Nothing is held for a group of batches."""

    def after_update_all_groups(self) -> None:
        """Nothing is held for an update."""

    def teardown(self) -> None:
        """Closes the connection to the agent."""
        self._publisher.close()

    def has_registered_checkpoint(self) -> bool:
        """Whether there is a version that a rollout which came back can have: its agent feeds it."""
        return self.result is not None or self._staged is not None


def install(*, group: Any = None, **options: Any) -> None:
    """Has every `WeightUpdater` of this process send through one `WeightSyncTransport`, whatever rollouts come and go.

    XTuner's own methods build a transport of its own, and build another one when a rollout's state changes. `group` are the train ranks;
    without it a gloo group of all ranks is made at the first bind, which XTuner calls on every rank. `options` are those of
    `WeightSyncTransport`.
    """
    from xtuner.v1.rl.weight_update import WeightUpdater

    def set_transport(self: Any) -> None:
        own = group if group is not None else gloo_group()
        self._transport = WeightSyncTransport(group=own, rollout_info=self.rollout_info, logger=self.logger, rank=self.rank, **options)

    def reset_transport(self: Any) -> None:
        if self._transport is not None:
            self._transport.reset_rollout_info(self.rollout_info)

    WeightUpdater._set_transport, WeightUpdater._reset_transport = set_transport, reset_transport


def _tensors(weight_iterator: Any) -> Iterator[tuple[str, Any]]:
    for batches in weight_iterator.iter_batch_groups():
        for batch in batches:
            yield from batch.state_dict.items()
