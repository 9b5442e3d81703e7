"""XTuner's `WeightTransport` (v1, `xtuner/v1/rl/weight_update/transport.py`): its batches go to WeightSync's agents.

XTuner v1 is not on PyPI, so this file takes its interface by shape: `update(weight_iterator)` with `iter_batch_groups()`, whose batches
have `state_dict`; `reset_rollout_info`, `after_update_*`, `teardown`, `has_registered_checkpoint`. See docs/integrations/xtuner.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._source import Meta
from .._tensors import describe
from ..publisher import Publisher
from ..result import Result
from ..sources import stream


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

    def reset_rollout_info(self, rollout_info: Any) -> None:
        """Rollouts changed, by XTuner's books; the agents know by themselves."""
        self.rollout_info = rollout_info

    def update(self, weight_iterator: Any, version: int | None = None, **_: Any) -> None:
        """Publishes one version; returns when enough replicas serve it. Raises `weightsync.WeightSyncError` on every rank alike.

        The iterator is read once more than it is sent, the first time: the agents want the list of tensors first.
        """
        number = self._next if version is None else version
        if self._metas is None:
            self._metas = [Meta(name, *_described(tensor)) for name, tensor in _tensors(weight_iterator)]
        try:
            self.result = self._publisher.publish(
                stream(lambda: _tensors(weight_iterator), self._metas), version=number, timeout=self._timeout
            )
        except Exception:
            self._metas = None
            raise
        finally:
            # A number that failed is free for the same weights only, and XTuner trains on.
            self._next = number + 1
        if self.logger is not None:
            self.logger.info(f"version {number}: {len(self.result.installed)} replicas serve it, behind: {dict(self.result.behind)}")

    def after_update_per_group(self) -> None:
        """Nothing is held for a group of batches."""

    def after_update_all_groups(self) -> None:
        """Nothing is held for an update."""

    def teardown(self) -> None:
        """Closes the connection to the agent."""
        self._publisher.close()

    def has_registered_checkpoint(self) -> bool:
        """No: a joiner is fed by the agents, from what they retain."""
        return False


def _tensors(weight_iterator: Any) -> Iterator[tuple[str, Any]]:
    for batches in weight_iterator.iter_batch_groups():
        for batch in batches:
            yield from batch.state_dict.items()


def _described(tensor: Any) -> tuple[str, tuple[int, ...]]:
    dtype, shape = describe(tensor)
    return dtype, tuple(shape)
