"""A trainer that moves its weights itself, with real agents and simulated engines: informed of every epoch, and of its end in time."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.numpy
import torch.distributed as dist
from conftest import LIMIT
from test_whole import BOTH, Group, tensors, until

import weightsync

SOON = 10
"""Seconds in which a trainer must hear of a lost member, on a busy machine too."""


class Plane:
    """A data plane of the user's own: has each engine read a folder, by the engine's own routes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def bring(self, url: str | None, version: int, weight_version: str | None = None) -> None:
        assert url is not None
        folder = self._directory / f"plane-{version}"
        if not folder.exists():
            folder.mkdir()
            safetensors.numpy.save_file(dict(tensors(version)), folder / "model.safetensors")
        self.post(url, "/pause?mode=keep")
        self.post(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        if weight_version is not None:
            self.post(url, "/update_weight_version", {"new_version": weight_version})
        self.post(url, "/resume")

    def post(self, url: str, path: str, body: object = None) -> None:
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            assert answer.status == 200

    def served(self, url: str | None) -> object:
        """What the simulated engine computes of the weights that it serves."""
        with urllib.request.urlopen(f"{url}/simulator/digest", timeout=LIMIT) as answer:
            return json.load(answer)["tensors"]


@pytest.fixture
def group(programs: Path, tmp_path: Path) -> Iterator[Group]:
    group = Group(programs, tmp_path, "External", {"timeoutSeconds": 30, "silenceSeconds": 5})
    try:
        yield group
    finally:
        group.stop()


@pytest.fixture
def topology(group: Group) -> Iterator[weightsync.Topology]:
    with weightsync.Topology.from_env(socket=group.socket, connect_timeout=LIMIT) as topology:
        yield topology


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    """The user's own data plane."""
    return Plane(tmp_path)


def of_both(topology: weightsync.Topology) -> Iterator[weightsync.Epoch]:
    """Epochs with both replicas."""
    for epoch in topology.watch(timeout=LIMIT):
        if {replica.name for replica in epoch.replicas} == BOTH:
            yield epoch


def brought(epoch: weightsync.Epoch, plane: Plane, version: int, digest: str | None = None) -> weightsync.Result:
    """A version that goes well."""
    with epoch.version(version, digest=digest) as update:
        for replica in epoch.replicas:
            plane.bring(replica.url, version)
            update.report(replica.name)
    assert update.result is not None
    return update.result


def test_epoch_names_members_and_a_reserved_port(topology: weightsync.Topology) -> None:
    epoch = next(of_both(topology))
    assert epoch.world_size == 3
    assert sorted(rank for replica in epoch.replicas for rank in replica.ranks) == [1, 2]
    assert epoch.group.endswith(f"-{epoch.number}")
    assert (epoch.current, epoch.timeout, epoch.min_ready) == (None, 30, 1)
    with socket.socket() as thief, pytest.raises(OSError, match="in use") as raised:
        thief.bind((epoch.address, epoch.port))
    assert raised.value.errno == errno.EADDRINUSE
    store = epoch.store()
    client = dist.TCPStore(epoch.address, epoch.port, epoch.world_size, is_master=False, use_libuv=False)
    store.set("key", "value")
    assert client.get("key") == b"value"
    with pytest.raises(weightsync.Failed, match="given once"):
        epoch.listener()


def test_a_version_counts_when_the_engines_were_proven(topology: weightsync.Topology, plane: Plane) -> None:
    epoch = next(of_both(topology))
    before = {plane.served(replica.url) is not None for replica in epoch.replicas}
    assert before == {True}
    result = brought(epoch, plane, 1, digest="one")
    assert (set(result.installed), result.epoch, result.version) == (BOTH, epoch.number, 1)
    with pytest.raises(weightsync.ManifestChanged), epoch.version(1, digest="two"):
        raise AssertionError("never entered")
    with pytest.raises(weightsync.VersionNotHigher), epoch.version(0):
        raise AssertionError("never entered")
    epoch.check()
    assert set(brought(epoch, plane, 1, digest="one").installed) == BOTH, "the current version may come again"
    assert set(brought(epoch, plane, 2).installed) == BOTH
    assert len({json.dumps(plane.served(replica.url)) for replica in epoch.replicas}) == 1


def test_unreported_replica_lags_until_fed_again(group: Group, topology: weightsync.Topology, plane: Plane) -> None:
    epoch = next(of_both(topology))
    first, second = epoch.replicas
    with epoch.version(1) as update:
        plane.bring(first.url, 1)
        update.report(first.name)
    assert update.result is not None
    assert update.result.installed == (first.name,)
    assert "nothing" in update.result.behind[second.name]
    with weightsync.Publisher.from_env(socket=group.socket) as publisher:
        until(lambda: {r.name: r.state for r in publisher.roster().replicas}.get(second.name) == "dirty" or None, "a dirty replica")
        assert brought(epoch, plane, 2).behind == {}
        until(lambda: {r.state for r in publisher.roster().replicas} == {"ready"} or None, "two ready replicas")


def test_engine_that_reports_another_version_is_not_believed(topology: weightsync.Topology, plane: Plane) -> None:
    epochs = of_both(topology)
    epoch = next(epochs)
    with epoch.version(1, engine_version="step-1") as update:
        for replica, said in zip(epoch.replicas, ("step-1", "step-0"), strict=True):
            plane.bring(replica.url, 1, said)
            update.report(replica.name)
    assert update.result is not None
    assert update.result.installed == (epoch.replicas[0].name,)
    assert "step-0" in update.result.behind[epoch.replicas[1].name]


def test_lost_rollout_is_reported_and_next_epoch_updates(group: Group, topology: weightsync.Topology, plane: Plane) -> None:
    epochs = of_both(topology)
    epoch = next(epochs)
    heard: list[str] = []
    reported = threading.Event()

    def abort(reason: str) -> None:
        heard.append(reason)
        reported.set()

    epoch.on_fenced(abort)

    def broken_off() -> None:
        with epoch.version(1) as update:
            plane.bring(epoch.replicas[0].url, 1)
            update.report(epoch.replicas[0].name)
            os.kill(group.agent("actor-1"), signal.SIGKILL)
            # As a collective that lacks a rank: it ends when it is aborted.
            assert reported.wait(SOON)
            raise ConnectionError("the collective was aborted")

    with pytest.raises(weightsync.Fenced, match="actor-1") as raised:
        broken_off()
    assert raised.value.retryable
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert "actor-1" in heard[0]
    second = next(epochs)
    assert second.number > epoch.number
    assert set(brought(second, plane, 1).installed) == BOTH


def test_an_engine_that_dies_while_it_is_fed_ends_the_epoch(group: Group, topology: weightsync.Topology, plane: Plane) -> None:
    epochs = of_both(topology)
    epoch = next(epochs)

    def broken_off() -> None:
        with epoch.version(1):
            os.kill(group.engine(0), signal.SIGKILL)
            assert epoch.fenced.wait(SOON)
            epoch.check()

    with pytest.raises(weightsync.Fenced, match="actor-0"):
        broken_off()
    assert set(brought(next(epochs), plane, 1).installed) == BOTH


def test_a_version_that_takes_too_long_is_ended_by_its_deadline(topology: weightsync.Topology, plane: Plane) -> None:
    epochs = of_both(topology)
    epoch = next(epochs)

    def stuck() -> None:
        with epoch.version(1, timeout=1):
            assert epoch.fenced.wait(SOON)
            raise TimeoutError("aborted")

    with pytest.raises(weightsync.Fenced, match=r"did not end (in time|within)"):
        stuck()
    assert set(brought(next(epochs), plane, 1).installed) == BOTH


def test_group_that_cannot_form_is_given_up(topology: weightsync.Topology, plane: Plane) -> None:
    epochs = of_both(topology)
    epoch = next(epochs)
    reasons: list[str] = []
    epoch.on_fenced(reasons.append)
    with pytest.raises(weightsync.Fenced, match="was not formed within"), epoch.forming(timeout=0.2):
        assert epoch.fenced.wait(SOON)
    assert reasons == [epoch.reason]
    second = next(epochs)
    assert second.number > epoch.number
    second.report(second.replicas[0].name, ok=False, reason="its rank did not come")
    third = next(epochs)
    assert third.number > second.number
    assert set(brought(third, plane, 1).installed) == BOTH


def test_trainer_that_dies_midway_leaves_no_false_whole(group: Group, topology: weightsync.Topology) -> None:
    epoch = next(of_both(topology))
    topology.close()
    code = f"""
import os, weightsync
for epoch in weightsync.Topology.from_env(socket={group.socket!r}).watch():
    if epoch.number >= {epoch.number} and len(epoch.replicas) == 2:
        epoch.version(1).__enter__()
        os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(Path(__file__).parents[1])}, timeout=LIMIT, check=True)
    with weightsync.Publisher.from_env(socket=group.socket) as publisher:
        until(lambda: {replica.state for replica in publisher.roster().replicas} == {"dirty"} or None, "two dirty replicas")


def test_what_does_not_fit_the_delivery_is_refused(group: Group, topology: weightsync.Topology) -> None:
    next(of_both(topology))
    with (
        weightsync.Publisher.from_env(socket=group.socket) as publisher,
        pytest.raises(weightsync.Refused, match="External"),
    ):
        publisher.publish(weightsync.state_dict(dict(tensors(1))), version=1, timeout=LIMIT)


def test_group_of_agents_has_no_epochs_to_watch(programs: Path, tmp_path: Path) -> None:
    group = Group(programs, tmp_path)
    try:
        with (
            weightsync.Topology.from_env(socket=group.socket, connect_timeout=LIMIT) as topology,
            pytest.raises(weightsync.NotAllowed, match=r"spec\.delivery"),
        ):
            next(topology.watch(timeout=LIMIT))
    finally:
        group.stop()


def test_no_epoch_is_a_timeout_and_no_agent_is_a_lost_one(start_agent: object) -> None:
    agent = start_agent()  # type: ignore[operator]
    with weightsync.Topology.from_env(socket=agent.socket) as topology, pytest.raises(weightsync.Timeout, match="no epoch"):
        next(topology.watch(timeout=0.5))
    with (
        weightsync.Topology.from_env(socket="weightsync/unknown", connect_timeout=0.3) as topology,
        pytest.raises(weightsync.AgentLost),
    ):
        next(topology.watch(timeout=LIMIT))


def test_agent_that_dies_ends_its_epoch_and_successor_is_found(group: Group, topology: weightsync.Topology, plane: Plane) -> None:
    epochs = of_both(topology)
    epoch = next(epochs)
    os.kill(group.agent("trainer"), signal.SIGKILL)
    assert epoch.fenced.wait(SOON)
    assert "agent" in str(epoch.reason)
    with pytest.raises(weightsync.Fenced), epoch.version(1):
        raise AssertionError("never entered")
    assert set(brought(next(epochs), plane, 1).installed) == BOTH


RANKS = """
import json, os, sys, torch.distributed as dist, weightsync
from test_topology import Plane, of_both
from pathlib import Path
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
plane = Plane(Path(sys.argv[4]))
seen = {}
with weightsync.Topology.from_env(dist.group.WORLD, socket=sys.argv[3], rank_timeout=60) as topology:
    epochs = of_both(topology)
    epoch = next(epochs)
    seen["members"] = [replica.name for replica in epoch.replicas]
    with epoch.version(1) as update:
        if rank == 1:
            for replica in epoch.replicas:
                plane.bring(replica.url, 1)
                update.report(replica.name)
    seen["installed"] = list(update.result.installed)
    try:
        with epoch.version(2):
            if rank == 1:
                raise OSError("the link is down")
    except Exception as error:
        seen["failed"] = type(error).__name__
        seen["said"] = "the link is down" in str(error)
    seen["fenced"] = epoch.fenced.is_set()
    seen["next"] = next(epochs).number > epoch.number
print(json.dumps(seen), flush=True)
# A gloo group that is taken down after the other rank has gone can abort its process (torch 2.13).
os._exit(0)
"""


def test_all_ranks_follow_rank_0(group: Group, plane: Plane, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path / "rendezvous"), group.socket, str(tmp_path)]
    processes = [
        subprocess.Popen([sys.executable, "-c", RANKS, str(rank), *arguments], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=4 * LIMIT)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    finally:
        for process in processes:
            process.kill()
    zero, one = (json.loads(text.splitlines()[-1]) for text in said)
    assert zero["installed"] == one["installed"] == sorted(BOTH)
    assert zero["members"] == one["members"] == sorted(BOTH)
    assert (zero["failed"], one["failed"]) == ("RanksDisagree", "OSError")
    assert zero["said"]
    assert one["said"]
    assert zero["fenced"]
    assert one["fenced"]
    assert zero["next"]
    assert one["next"]
    # The engines compute with version 1: to bring it once more changes nothing.
    urls = [f"http://127.0.0.1:{port}" for port in group.ports]
    served = [plane.served(url) for url in urls]
    plane.bring(urls[0], 1)
    assert served == [plane.served(urls[0])] * 2
    plane.bring(urls[0], 2)
    assert plane.served(urls[0]) not in served
