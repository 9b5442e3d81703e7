"""A data plane as users have them, on CPU: vLLM's own stateless torch group (gloo) between a trainer and the workers of vLLM servers.

`Worker` is given to real vLLM servers by `--worker-extension-cls gloo_plane.Worker`; `join`, `send` and `post` are the trainer's side.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

import weightsync

JOINING = 60.0
"""Seconds until a rank gives up one that does not come."""


class Worker:
    """What is added to vLLM's worker."""

    group: Any = None

    def plane_join(self, address: str, port: int, rank_offset: int, world_size: int) -> None:
        """A rank of the trainer's group. The group of an epoch before is dropped with its connections."""
        self.group = None
        limit = timedelta(seconds=JOINING)
        rank = rank_offset + self.rank  # type: ignore[attr-defined]
        self.group = stateless_init_torch_distributed_process_group(address, port, rank, world_size, "gloo", timeout=limit)

    def plane_receive(self, metas: list[list[Any]]) -> None:
        """Takes all tensors, and loads them only when the last one came."""
        received = []
        for name, dtype, shape in metas:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor]).wait()
            received.append((name, tensor))
        self.reload_weights(weights_iterator=received)  # type: ignore[attr-defined]


def post(url: str | None, path: str, body: object = None, timeout: float = 300) -> Any:
    """A request to a server."""
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


class Plane:
    """The trainer's side, for one epoch."""

    def __init__(self, epoch: weightsync.Epoch) -> None:
        self._epoch = epoch
        self._calls = ThreadPoolExecutor(len(epoch.replicas))
        joins = []
        for replica in epoch.replicas:
            place = [epoch.address, epoch.port, replica.rank_offset, epoch.world_size]
            joins.append(self._call(replica.url, "plane_join", place))
        self._group = stateless_init_torch_distributed_process_group(
            epoch.address, epoch.port, 0, epoch.world_size, "gloo", listen_socket=epoch.listener(), timeout=timedelta(seconds=JOINING)
        )
        for join in joins:
            join.result(JOINING)

    def _call(self, url: str | None, method: str, arguments: list[Any]) -> Future[Any]:
        return self._calls.submit(post, url, "/collective_rpc", {"method": method, "args": arguments})

    def abort(self) -> None:
        """Ends the trainer's part of the group: gloo has no abort, but anyone who waits for rank 0 hears that its connections closed.

        A worker that waits on is what a wedged engine is: its front answers, and it computes nothing.
        """
        self._group = None

    def bring(self, update: weightsync.Update, tensors: dict[str, torch.Tensor], between: Any = None) -> None:
        """Broadcasts all tensors; `between` is called in the middle."""
        metas = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
        for replica in self._epoch.replicas:
            post(replica.url, "/pause?mode=keep")
        calls = {replica: self._call(replica.url, "plane_receive", [metas]) for replica in self._epoch.replicas}
        for number, tensor in enumerate(tensors.values()):
            if between is not None and number == len(tensors) // 2:
                between()
            self._group.broadcast([tensor.clone()]).wait()
        for replica, call in calls.items():
            call.result(JOINING)
            post(replica.url, "/resume")
            update.report(replica.name)
