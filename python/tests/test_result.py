"""What a publish result and a roster say of engines that served while they loaded."""

import json

import pytest

from weightsync import MixedWindow, Result, Roster
from weightsync._notes import warn_once

MESSAGE = {
    "version": 7,
    "epoch": 1,
    "attempts": 1,
    "bytes": 4,
    "manifest": "m",
    "installed": ["actors/a", "actors/b"],
    "behind": [],
    "phasesMs": [["load", 1]],
}


def test_mixed_windows_are_typed_and_survive_json() -> None:
    window = {"version": 7, "beginMs": 100, "endMs": 140}
    result = Result.of({**MESSAGE, "mixed": [["actors/a", [window]]]})
    assert result.mixed == {"actors/a": (MixedWindow(7, 100, 140),)}
    assert Result.of_plain(json.loads(json.dumps(result.plain()))) == result
    assert Result.of(MESSAGE).mixed == {}


def test_notes_survive_json_and_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    note = "its names and shapes were compared with those of version 6 only: it cannot be read"
    result = Result.of({**MESSAGE, "notes": [["actors/a", [note]]]})
    assert result.notes == {"actors/a": (note,)}
    assert Result.of_plain(json.loads(json.dumps(result.plain()))) == result
    assert Result.of(MESSAGE).notes == {}
    for version in ("6", "7"):
        warn_once(Result.of({**MESSAGE, "notes": [["actors/a", [note.replace("6", version)]]]}))
    assert [record.getMessage() for record in caplog.records] == [f"version 7 at actors/a: {note}"]


def test_a_sample_is_of_a_mixture_when_it_touches_a_window() -> None:
    window = MixedWindow(7, 100, 140)
    assert [window.touches(*times) for times in [(0, 99), (0, 100), (110, 120), (140, 200), (141, 200)]] == [False, True, True, True, False]
    assert MixedWindow(7, 100, None).touches(1000, 2000)


def test_the_roster_has_the_windows_of_each_replica() -> None:
    replica = {"name": "actors/a", "state": "ready", "version": 7, "rankOffset": 1, "size": 1}
    roster = Roster.of({"replicas": [{**replica, "mixed": [{"version": 7, "beginMs": 1}]}, replica]})
    assert [replica.mixed for replica in roster.replicas] == [(MixedWindow(7, 1, None),), ()]
