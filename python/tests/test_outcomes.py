"""What a trainer hears when all is well, and when its agent, its replicas or its own patience fail."""

from __future__ import annotations

import array
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT, Agent

import weightsync
from weightsync import _connection

BIG = {"w": array.array("f", range(100_000))}
SMALL = {"w": array.array("f", [1.0])}


def publisher_of(agent: Agent) -> weightsync.Publisher:
    return weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=5)


def test_a_number_may_be_skipped_and_never_goes_back(publisher: weightsync.Publisher) -> None:
    publisher.publish(SMALL, version=2, timeout=LIMIT)
    publisher.publish(SMALL, version=9, timeout=LIMIT)
    for version in (9, 3):
        with pytest.raises(weightsync.VersionNotHigher, match="9") as raised:
            publisher.publish(SMALL, version=version, timeout=LIMIT)
        assert not raised.value.retryable


def test_killed_agent_is_lost_at_once_and_successor_serves(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent("--bucket-bytes", "4096", "--slots", "2", "--die-after", "3")
    with publisher_of(agent) as publisher:
        begun = time.monotonic()
        with pytest.raises(weightsync.AgentLost) as raised:
            publisher.publish(BIG, version=1, timeout=LIMIT)
        assert raised.value.retryable
        assert raised.value.phase == "transfer"
        assert time.monotonic() - begun < 5
        start_agent(socket=agent.socket)
        assert publisher.publish(BIG, version=1, timeout=LIMIT).version == 1


def test_agent_restarted_between_publishes_is_found(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    with publisher_of(agent) as publisher:
        publisher.publish(SMALL, version=1, timeout=LIMIT)
        agent.stop()
        start_agent(socket=agent.socket)
        assert publisher.publish(SMALL, version=2, timeout=LIMIT).version == 2


def test_an_agent_that_hangs_is_lost_after_its_silence(start_agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "SILENCE", 2.0)
    agent = start_agent("--bucket-bytes", "4096", "--slots", "2", "--stall-after", "3")
    with publisher_of(agent) as publisher:
        handle = publisher.publish_async(BIG, version=1, timeout=LIMIT)
        with pytest.raises(weightsync.Timeout) as waited:
            handle.wait_released(timeout=3)
        assert waited.value.phase == "transfer", "an agent that waits talks, and is not lost"
        agent.signal(signal.SIGSTOP)
        with pytest.raises(weightsync.AgentLost, match="sent nothing"):
            handle.wait(timeout=30)


def test_no_agent_is_a_retryable_error_in_bounded_time() -> None:
    with (
        weightsync.Publisher.from_env(socket="weightsync/unknown", connect_timeout=0.5) as publisher,
        pytest.raises(weightsync.AgentLost, match="@weightsync/unknown") as raised,
    ):
        publisher.publish(SMALL, version=1, timeout=LIMIT)
    assert raised.value.retryable
    assert raised.value.phase == "connect"


def test_publish_that_no_member_takes_ends_at_its_timeout(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent("--bucket-bytes", "4096", "--slots", "2", "--stall-after", "2")
    with publisher_of(agent) as publisher:
        running = publisher.publish_async(BIG, version=1, timeout=LIMIT)
        waiting = publisher.publish_async(SMALL, version=2, timeout=1)
        with pytest.raises(weightsync.Timeout, match="earlier publish") as raised:
            waiting.wait()
        assert raised.value.retryable
        running.cancel()
        with pytest.raises(weightsync.Cancelled):
            running.wait()


def test_latest_takes_the_place_of_what_waits(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent("--bucket-bytes", "4096", "--slots", "2", "--stall-after", "2")
    with publisher_of(agent) as publisher:
        running = publisher.publish_async(BIG, version=1, timeout=LIMIT)
        with pytest.raises(weightsync.Timeout):
            running.wait_released(timeout=0.5)
        waiting = publisher.publish_async(SMALL, version=2, timeout=LIMIT)
        with pytest.raises(weightsync.Timeout):
            waiting.wait_released(timeout=0.5)
        latest = publisher.publish_async(SMALL, version=3, queue="latest", timeout=LIMIT)
        with pytest.raises(weightsync.Superseded, match="version 3"):
            waiting.wait()
        running.cancel("the step was a bad one")
        with pytest.raises(weightsync.Cancelled, match="a bad one"):
            running.wait()
        assert latest.wait().version == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NotEnoughReplicas", weightsync.NotEnoughReplicas),
        ("ManifestChanged", weightsync.ManifestChanged),
        ("VersionPinned", weightsync.VersionPinned),
        ("VersionRefused", weightsync.VersionRefused),
        ("Timeout", weightsync.Timeout),
        ("OutcomeUnknown", weightsync.OutcomeUnknown),
        ("Invalid", weightsync.Refused),
        ("OutOfSpace", weightsync.Failed),
    ],
)
def test_each_failure_has_its_own_error(start_agent: Callable[..., Agent], code: str, kind: type[weightsync.WeightSyncError]) -> None:
    with publisher_of(start_agent("--fail", code)) as publisher:
        handle = publisher.publish_async(SMALL, version=1, timeout=LIMIT)
        handle.wait_released()
        for _ in range(2):
            with pytest.raises(weightsync.WeightSyncError, match="as asked") as raised:
                handle.wait()
            assert type(raised.value) is kind


def test_a_manual_version_is_staged_until_it_is_activated(publisher: weightsync.Publisher) -> None:
    handle = publisher.publish_async(SMALL, version=1, activation="manual", timeout=LIMIT)
    staged = handle.wait()
    assert (staged.staged, staged.installed) == (True, ())
    result = handle.activate()
    assert (result.staged, result.installed) == (False, ("actors/a",))
    with pytest.raises(ValueError, match="manual"):
        publisher.publish_async(SMALL, version=2, timeout=LIMIT).activate()


def test_roster_is_sent_and_watched(publisher: weightsync.Publisher) -> None:
    roster = publisher.roster()
    assert [(replica.name, replica.state, replica.version) for replica in roster.replicas] == [
        ("actors/a", "ready", None),
        ("actors/b", "out", None),
    ]
    seen: list[int | None] = []

    def watch() -> None:
        for roster in publisher.watch_roster(timeout=LIMIT):
            seen.append(roster.version)
            if roster.version == 5:
                return

    watching = threading.Thread(target=watch)
    watching.start()
    while not seen:
        time.sleep(0.01)
    publisher.publish(SMALL, version=5, timeout=LIMIT)
    watching.join(LIMIT)
    assert seen == [None, 5]
    with pytest.raises(weightsync.Timeout, match="did not change"):
        list(publisher.watch_roster(timeout=0.2))


def test_a_dead_trainer_is_seen_though_its_data_loader_lives_on(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent("--bucket-bytes", "4096", "--slots", "2", "--stall-after", "2")
    code = f"""
import array, os, time, weightsync
pub = weightsync.Publisher.from_env(socket={agent.socket!r})
handle = pub.publish_async({{"w": array.array("f", range(100_000))}}, version=1, timeout=60)
while handle.progress is None:
    time.sleep(0.01)
if os.fork() == 0:
    time.sleep(60)
os._exit(0)
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True) as trainer:
        said = agent.said()
        assert "by its trainer" in said["failed"] or "went away" in said["failed"]
        os.killpg(trainer.pid, signal.SIGKILL)


def test_releasing_comes_before_the_outcome(publisher: weightsync.Publisher) -> None:
    gathered = []

    def export() -> Iterator[tuple[str, Any]]:
        gathered.append("begun")
        yield "w", BIG["w"]
        gathered.append("ended")

    handle = publisher.publish_async(weightsync.stream(export, [("w", "F32", (100_000,))]), version=1, timeout=LIMIT)
    handle.wait_released()
    assert gathered == ["begun", "ended"]
    assert handle.wait().bytes == 400_000
