"""The whole way, moved by agents: a torch process publishes tensors of its GPU, NCCL moves them, LMDeploy takes them on another GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.gpu.lmdeploy.fixture import Fixture
from tests.gpu.lmdeploy.floors import feed
from tests.gpu.lmdeploy.group import Group, uuids
from tests.gpu.lmdeploy.server import Load, Server, gpu_memory


def milliseconds(reported: list[dict[str, Any]]) -> list[float]:
    return [round(each["s"] * 1e3, 1) for each in reported]


def short(reported: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a line says of each publish."""
    lines = []
    for each in reported:
        result = each.get("result", {})
        line = {"s": round(each.get("s", 0), 4), "released_s": round(each.get("released_s", 0), 4), "error": each.get("error")}
        line |= {name: result.get(name) for name in ("version", "attempts", "epoch", "phases_ms", "behind", "memory")}
        lines.append({name: value for name, value in line.items() if value not in (None, {}, 0)})
    return lines


def steps(group: Group) -> list[str]:
    """The last installs as the rollout's agent reports them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", group.logs())
    return [line.split("confirmed", 1)[1] for line in plain.splitlines() if "the engine confirmed" in line][-6:]


def whole_step(fixture: Fixture, server: Server, way: str, *, retain_mib: int, runs: int = 8) -> None:
    """Text as a fresh server's, and what a publish takes."""
    group = Group(fixture.args, server, fixture.trainer("dense"), f"{way.replace('_', '-')}-{retain_mib}", retain_mib=retain_mib)
    try:
        reported = group.publish(3, 2, 3, limit=120)
        fixture.check("published", server.says() == fixture.text("dense", 3), way=way, retain_mib=retain_mib, versions=short(reported))
        reported = group.publish(*[2, 3] * (runs // 2))
        ms = milliseconds(reported)
        values = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "runs": short(reported), "steps": steps(group)}
        fixture.note("whole step", way=way, retain_mib=retain_mib, **values)
        spaced(fixture, group, retain_mib, 2, 3, 2, 3, 2, 3)
    finally:
        fixture.keep(group)
        group.stop()


def spaced(fixture: Fixture, group: Group, retain_mib: int, *seeds: int) -> None:
    """As in training: what an update left to do (a token, a copy) is done before the next one."""
    reported = []
    for seed in seeds:
        time.sleep(1)
        reported += group.publish(seed)
    fixture.note(
        "whole step", retain_mib=retain_mib, between="a second", ms=milliseconds(reported), runs=short(reported), steps=steps(group)
    )


def awake(fixture: Fixture) -> None:
    """The route without sleep: what a step takes, requests in flight, and what is held after 20 updates."""
    server = fixture.server("awake")
    whole_step(fixture, server, "update_weights", retain_mib=8192)
    whole_step(fixture, server, "update_weights", retain_mib=65536)
    group = Group(fixture.args, server, fixture.trainer("dense"), "awake")
    try:
        group.publish(3, 2, limit=120)
        reported = group.publish(*[3, 2] * 5)
        ms = milliseconds(reported)
        values = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "runs": short(reported), "steps": steps(group)}
        fixture.note("whole step", way="update_weights", retain_mib=0, **values)
        spaced(fixture, group, 0, 3, 2, 3, 2, 3, 2)
        fixture.check("text", server.says() == fixture.text("dense", 2), way="update_weights")
        load = Load(server, 8, 200)
        time.sleep(1)
        reported = group.publish(3, 2, 3)
        time.sleep(1)
        ends = load.stop()
        good = not any(end.startswith("HTTP 5") and end != "HTTP 503" for end in ends)
        fixture.check(
            "requests in flight",
            good,
            way="update_weights",
            ends=ends,
            refused_s=load.gaps,
            versions=short(reported),
            steps=steps(group)[-3:],
        )
        fixture.check("text after requests in flight", server.says() == fixture.text("dense", 3), way="update_weights")
        group.publish(2, 3)
        before = {"mib": gpu_memory(0), "engine": server.descriptors(), "ours": group.holdings()}
        group.publish(*[2, 3] * 10)
        after = {"mib": gpu_memory(0), "engine": server.descriptors(), "ours": group.holdings()}
        flat = after["mib"] - before["mib"] <= 64 and after["engine"] - before["engine"] <= 4
        more = {name: held["descriptors"] - before["ours"].get(name, held)["descriptors"] for name, held in after["ours"].items()}
        fixture.check("flat over 20 updates", flat and all(few <= 2 for few in more.values()), before=before, after=after)
        fixture.check("text after 20 updates", server.says() == fixture.text("dense", 3), way="update_weights")
    finally:
        fixture.keep(group)
        group.stop()


def asleep(fixture: Fixture) -> None:
    """The route of sleeping servers: checkpoint-engine."""
    server = fixture.server("asleep")
    whole_step(fixture, server, "checkpoint-engine", retain_mib=65536, runs=6)
    group = Group(fixture.args, server, fixture.trainer("dense"), "asleep")
    try:
        group.publish(2, limit=120)
        load = Load(server, 8, 200)
        time.sleep(1)
        reported = group.publish(3, 2, 3)
        time.sleep(1)
        ends = load.stop()
        fixture.note(
            "requests in flight", way="checkpoint-engine", ends=ends, refused_s=load.gaps, versions=short(reported), steps=steps(group)[-3:]
        )
    finally:
        fixture.keep(group)
        group.stop()


def alongside(fixture: Fixture) -> None:
    """Tokens a second of an engine on a GPU next to which another one is given weights, and without."""
    quiet, fed = fixture.server("asleep"), fixture.server("awake")
    group = Group(fixture.args, fed, fixture.trainer("dense"), "alongside")
    try:
        group.publish(2, 3, limit=120)
        rates: dict[str, list[float]] = {"without": [], "alongside": []}
        published = 0
        for _ in range(3):
            for what, seconds in (("without", 4.0), ("alongside", 4.0)):
                load = Load(quiet, 8, 32)
                time.sleep(0.5)
                tokens, begun = load.tokens, time.monotonic()
                while time.monotonic() - begun < seconds:
                    if what == "alongside":
                        group.publish(2, 3)
                        published += 2
                    else:
                        time.sleep(0.1)
                rates[what].append(round((load.tokens - tokens) / (time.monotonic() - begun), 1))
                load.stop()
        ratio = statistics.median(rates["alongside"]) / statistics.median(rates["without"])
        fixture.note("decode next to updates", tokens_per_s=rates, ratio=round(ratio, 4), published=published)
    finally:
        group.stop()


def kills(fixture: Fixture) -> None:
    """SIGKILL in the middle of a broadcast: the receiver's worker, its agent, the source's worker and its agent."""
    server, trainer = fixture.server("awake"), fixture.trainer("dense")
    group = Group(fixture.args, server, trainer, "kills", retain_mib=16384)
    try:
        group.publish(2, 3, limit=120)
        for which in ("actor worker", "actor agent", "trainer worker", "trainer agent"):
            for turn in range(3):
                seed = 2 + turn % 2
                killed = group.kill_in_transfer(seed, which, 0.01 * turn, 45)
                reported = group.end(45)
                took = time.monotonic() - killed
                # A source's agent takes its publish along; the trainer tries again, as trainers do.
                again = [] if reported["event"] == "done" else group.publish(seed, limit=60)
                fixture.check(
                    "killed in a broadcast",
                    server.says() == fixture.text("dense", seed) and trainer.process.poll() is None,
                    which=which,
                    s=round(took, 3),
                    whole_s=round(time.monotonic() - killed, 3),
                    publish=short([reported]),
                    again=short(again),
                    events=group.since(killed),
                )
        fixture.check("published after all kills", bool(group.publish(2)) and server.says() == fixture.text("dense", 2))
    finally:
        fixture.keep(group)
        group.stop()


def engine_killed(fixture: Fixture) -> None:
    """SIGKILL of the engine in a broadcast; a new one is started at once, as a pod's restart would."""
    server, trainer = fixture.server("awake"), fixture.trainer("dense")
    group = Group(fixture.args, server, trainer, "engine-killed", retain_mib=16384)
    try:
        group.publish(2, 3, limit=120)
        group.begin(2, watch=True, limit=200)
        trainer.hear("transfer", limit=60)
        server.stop(signal.SIGKILL)
        new = fixture.restart("awake")
        healthy: list[float] = []
        threading.Thread(target=lambda: healthy.append(new.healthy()), daemon=True).start()
        reported = group.end(200)
        done = time.monotonic()
        seen = {"publish": short([reported]), "after_healthy_s": round(done - healthy[0], 3) if healthy else None}
        good = reported["event"] == "done" and new.says() == fixture.text("dense", 2)
        fixture.check("engine killed in a broadcast", good and trainer.process.poll() is None, **seen)
    finally:
        fixture.keep(group)
        group.stop()


def experts(fixture: Fixture) -> None:
    """A small model with sixteen experts, graphs on."""
    server = fixture.server("experts")
    group = Group(fixture.args, server, fixture.trainer("experts"), "experts", bucket_mib=256)
    try:
        for seed in (2, 3, 2):
            reported = group.publish(seed, limit=120)
            fixture.check(
                "published",
                server.says() == fixture.text("experts", seed),
                way="experts",
                versions=short(reported),
                steps=steps(group)[-1:],
            )
        ms = milliseconds(group.publish(*[3, 2] * 4))
        fixture.note("whole step", way="experts", ms=statistics.median(ms), runs=ms)
        fixture.check("text", server.says() == fixture.text("experts", 2), way="experts")
    finally:
        fixture.keep(group)
        group.stop()


def colocated(fixture: Fixture) -> None:
    """Trainer and engine on one GPU: the engine's member has no rank and is fed by CUDA IPC."""
    between_gpus(fixture, "nccl", "by CUDA IPC", trainer_gpu=0)


def reads(fixture: Fixture) -> None:
    """The same through NIXL: the engine's member reads the memory of the trainer's agent. UCX does that by CUDA IPC, too."""
    between_gpus(fixture, "gdr", "NIXL is open on a GPU", trainer_gpu=0)


def reads_apart(fixture: Fixture) -> None:
    """Through NIXL from the trainer's GPU to the engine's."""
    between_gpus(fixture, "gdr", "NIXL is open on a GPU", trainer_gpu=1)


def ranks(fixture: Fixture) -> None:
    """A server of two ranks: fed what lies on both GPUs, in either order of the GPUs."""
    server, both = fixture.server("ranks"), uuids()[:2]
    for seed, order in ((2, both), (3, both[::-1]), (2, both)):
        fed = feed(fixture, "ranks", seed, *(word for uuid in order for word in ("--gpu", uuid)))
        fixture.check("fed", server.says() == fixture.text("dense", seed), gpus=order, seed=seed, reported=fed)


def torch_by_ipc(fixture: Fixture, server: Server) -> None:
    """The same endpoint of the same server, driven from torch alone: see xtuner_ipc.py."""
    words = [sys.executable, "-m", "tests.gpu.lmdeploy.xtuner_ipc", "--url", server.url]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"}, check=False)
    if done.returncode:
        raise RuntimeError(f"torch failed: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    medians = {"median_ms": statistics.median(said["ms"]), "token_median_ms": statistics.median(said["token_between_ms"])}
    fixture.note("driven from torch by IPC", text=server.says() == fixture.text("dense", 2), **medians, **said)


def between_gpus(fixture: Fixture, transport: str, by: str, *, trainer_gpu: int) -> None:
    """Text, time, no copy through the host, and SIGKILL of the receiver's worker, its agent and the source's worker."""
    server, where = fixture.server("awake"), "apart" if trainer_gpu else "colocated"
    way, name = f"{where} over {transport}", f"{where}-{transport}"
    if not trainer_gpu:
        torch_by_ipc(fixture, server)
    group = Group(fixture.args, server, fixture.trainer("dense", trainer_gpu), name, trainer_gpu=trainer_gpu, transport=transport)
    try:
        reported = group.publish(2, 3, limit=120)
        fixture.check("published", server.says() == fixture.text("dense", 3), way=way, versions=short(reported), steps=steps(group))
        reported = group.publish(*[2, 3] * 4)
        ms = milliseconds(reported)
        values = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "runs": short(reported), "steps": steps(group)}
        fixture.note("whole step", way=way, **values)
        spaced(fixture, group, 0, 2, 3, 2, 3, 2, 3)
        fixture.check("text", server.says() == fixture.text("dense", 3), way=way)
        said = re.sub(r"\x1b\[[0-9;]*m", "", group.logs()) + json.dumps([event for _, event in group.events])
        memory = [each.get("result", {}).get("memory", "") for each in reported]
        good = by in said and all(where.startswith("gpu ") for where in memory)
        # Bytes that pass the host lie in a directory of the version first.
        kept = [str(path) for path in Path(f"/dev/shm/weightsync-{name}").rglob("*.safetensors")]
        fixture.check("no copy through the host", good and not kept, way=way, memory=memory[-1:], kept=kept)
        for which in ("actor worker", "actor agent", "trainer worker"):
            killed = group.kill_in_transfer(2, which, 0.0, 45, most=0.04)
            end = group.end(45)
            again = [] if end["event"] == "done" else group.publish(2, limit=60)
            took = round(time.monotonic() - killed, 3)
            text = server.says() == fixture.text("dense", 2)
            fixture.check("killed in a copy", text, way=way, which=which, s=took, publish=short([end]), again=short(again))
            group.publish(3, limit=60)
        fixture.check("text after kills", server.says() == fixture.text("dense", 3), way=way)
    finally:
        fixture.keep(group)
        group.stop()
    if not trainer_gpu:
        torch_by_ipc(fixture, server)
