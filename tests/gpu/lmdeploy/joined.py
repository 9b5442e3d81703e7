"""`delivery: Engine` on a real LMDeploy: its own workers join a group of which our source agent's worker is rank 0."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import count
from typing import Any

from tests.gpu.lmdeploy.fixture import Fixture
from tests.gpu.lmdeploy.group import Group
from tests.gpu.lmdeploy.moved import milliseconds, short, steps
from tests.gpu.lmdeploy.server import MostMemory, gpu_memory

PORTS = count(29611)
# The last one holds the model as a whole.
BUCKETS_MIB = (1024, 2048, 3072, 6144)


def as_xtuner_does(fixture: Fixture, mib: int = 1024) -> dict[str, Any]:
    """The same endpoints, driven from torch: see xtuner.py."""
    url = fixture.server("joined").url
    words = [sys.executable, "-m", "tests.gpu.lmdeploy.xtuner", "--url", url, "--port", str(next(PORTS)), "--mib", str(mib)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"torch as rank 0 failed: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    fixture.note("driven from torch", mib=mib, median_ms=statistics.median(said["ms"]), **said)
    return said


def phases(reported: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each phase, in ms."""
    each = [publish["result"]["phases_ms"] for publish in reported]
    return {name: statistics.median(ms[name] for ms in each) for name in each[0]}


def whole_step(fixture: Fixture, group: Group, reported: list[dict[str, Any]], before: dict[str, Any] | None, **about: Any) -> None:
    ms = milliseconds(reported)
    values: dict[str, Any] = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "phases_ms": phases(reported)}
    if before:
        values["ratio"] = round(statistics.median(before["ms"]) / statistics.median(ms), 3)
    fixture.note("joined whole step", **about, **values, runs=short(reported), steps=steps(group))


def spaced(fixture: Fixture, group: Group, between: str, **about: Any) -> None:
    """As in training: there is a token between two updates."""
    reported = []
    for seed in (2, 3, 2, 3, 2, 3):
        time.sleep(1) if between == "a second" else fixture.server("joined").says()
        reported += group.publish(seed)
    whole_step(fixture, group, reported, None, between=between, **about)


def publishes(fixture: Fixture) -> None:
    """Text against a fresh server; what a publish takes next to torch's own rank 0 in the same run."""
    server = fixture.server("joined")
    fixture.note("memory before any update", mib=gpu_memory(0))
    before = fixture.attempt("driven from torch", lambda: as_xtuner_does(fixture))
    group = Group(fixture.args, server, fixture.trainer("dense"), "joined", delivery="Engine")
    try:
        reported = group.publish(3, 2, 3, limit=120)
        fixture.check("joined", server.says() == fixture.text("dense", 3), versions=short(reported))
        whole_step(fixture, group, group.publish(*[2, 3] * 5), before)
        fixture.check("joined text", server.says() == fixture.text("dense", 3))
        for between in ("a second", "text"):
            spaced(fixture, group, between)
        deaths(fixture, group)
    finally:
        fixture.keep(group)
        group.stop()
    fixture.attempt("driven from torch", lambda: as_xtuner_does(fixture))


def buckets(fixture: Fixture) -> None:
    """What longer buckets give, next to torch with buckets as long; each length twice, in two orders."""
    before = {mib: fixture.attempt("driven from torch", partial(as_xtuner_does, fixture, mib)) for mib in BUCKETS_MIB}
    for turn, lengths in enumerate((BUCKETS_MIB, BUCKETS_MIB[::-1])):
        for mib in lengths:
            fixture.attempt(f"buckets of {mib} MiB", partial(in_buckets, fixture, mib, turn, before[BUCKETS_MIB[0]]))
    for mib in BUCKETS_MIB[::-1]:
        fixture.attempt("driven from torch", partial(as_xtuner_does, fixture, mib))


def in_buckets(fixture: Fixture, mib: int, turn: int, before: dict[str, Any] | None) -> None:
    """Back to back, a second apart, and what lies on the engine's GPU meanwhile."""
    server, about = fixture.server("joined"), {"mib": mib, "turn": turn}
    group = Group(fixture.args, server, fixture.trainer("dense"), f"buckets-{mib}-{turn}", delivery="Engine", bucket_mib=mib)
    try:
        reported = group.publish(3, 2, 3, limit=120)
        fixture.check("joined", server.says() == fixture.text("dense", 3), **about, versions=short(reported))
        whole_step(fixture, group, group.publish(*[2, 3] * 5), before, **about)
        fixture.check("joined text", server.says() == fixture.text("dense", 3), **about)
        spaced(fixture, group, "a second", **about)
        with MostMemory(0) as memory:
            group.publish(*[2, 3] * 5)
        fixture.note("memory", **about, idle_mib=memory.least, most_mib=memory.most, readings=memory.readings, ours=group.holdings())
        fixture.check("joined text after all", server.says() == fixture.text("dense", 3), **about)
    finally:
        fixture.keep(group)
        group.stop()


def deaths(fixture: Fixture, group: Group) -> None:
    """Rank 0 dies while idle, ten times; then the agent next to the engine, with rank 0 alive."""
    server = fixture.server("joined")
    for which, turns in (("trainer agent", fixture.args.kills), ("actor agent", 3)):
        for turn in range(turns):
            seed = 2 + turn % 2
            group.drain()
            killed = time.monotonic()
            group.kill(which)
            # Who is lost again and again is taken in again later each time, after 300 s at most.
            group.wait("GroupFormed", 330)
            formed = time.monotonic() - killed
            reported = group.publish(seed, limit=60)
            took = time.monotonic() - killed
            events = group.since(killed)
            good = server.says() == fixture.text("dense", seed)
            fixture.check(
                "formed again",
                good,
                which=which,
                turn=turn,
                formed_s=round(formed, 3),
                s=round(took, 3),
                publish=short(reported),
                events=events,
            )


def wedged(fixture: Fixture) -> None:
    """Rank 0 dies inside a broadcast: the engine never leaves it, and that is reported. It cannot be used afterwards."""
    server = fixture.server("joined")
    group = Group(fixture.args, server, fixture.trainer("dense"), "wedged", delivery="Engine")
    try:
        group.publish(2, 3, limit=120)
        killed = group.kill_in_transfer(2, "trainer worker", 0.005, 60)
        named: list[Any] = []
        while time.monotonic() - killed < 60 and not named:
            time.sleep(0.2)
            named = [[round(at - killed, 2), event] for at, event in group.drain() if "edged" in json.dumps(event)]
        reported = group.end(70)
        fixture.note(
            "rank 0 killed in a broadcast",
            named=named,
            publish=short([reported]),
            health=fixture.attempt("health", lambda: server.get("/health")),
        )
    finally:
        fixture.keep(group)
        group.stop()
