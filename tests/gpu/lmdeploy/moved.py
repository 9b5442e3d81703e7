"""The whole way, moved by agents: a torch process publishes tensors of its GPU, NCCL moves them, LMDeploy takes them on another GPU."""

from __future__ import annotations

import json
import re
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from tests.gpu.lmdeploy.bed import Bed
from tests.gpu.lmdeploy.group import Group
from tests.gpu.lmdeploy.server import Load, Server, gpu_memory


def milliseconds(told: list[dict[str, Any]]) -> list[float]:
    return [round(each["s"] * 1e3, 1) for each in told]


def short(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a line says of each publish."""
    lines = []
    for each in told:
        result = each.get("result", {})
        line = {"s": round(each.get("s", 0), 4), "released_s": round(each.get("released_s", 0), 4), "error": each.get("error")}
        line |= {name: result.get(name) for name in ("version", "attempts", "epoch", "phases_ms", "behind", "memory")}
        lines.append({name: value for name, value in line.items() if value not in (None, {}, 0)})
    return lines


def steps(group: Group) -> list[str]:
    """The last installs as the rollout's agent tells them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", group.logs())
    return [line.split("confirmed", 1)[1] for line in plain.splitlines() if "the engine confirmed" in line][-6:]


def whole_step(bed: Bed, server: Server, way: str, *, retain_mib: int, runs: int = 8) -> None:
    """Text as a fresh server's, and what a publish takes."""
    group = Group(bed.args, server, bed.trainer("dense"), f"{way.replace('_', '-')}-{retain_mib}", retain_mib=retain_mib)
    try:
        told = group.publish(3, 2, 3, limit=120)
        bed.check("published", server.says() == bed.text("dense", 3), way=way, retain_mib=retain_mib, versions=short(told))
        told = group.publish(*[2, 3] * (runs // 2))
        ms = milliseconds(told)
        values = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "runs": short(told), "steps": steps(group)}
        bed.note("whole step", way=way, retain_mib=retain_mib, **values)
        spaced(bed, group, retain_mib, 2, 3, 2, 3, 2, 3)
    finally:
        bed.keep(group)
        group.stop()


def spaced(bed: Bed, group: Group, retain_mib: int, *seeds: int) -> None:
    """As in training: what an update left to do (a token, a copy) is done before the next one."""
    told = []
    for seed in seeds:
        time.sleep(1)
        told += group.publish(seed)
    bed.note("whole step", retain_mib=retain_mib, between="a second", ms=milliseconds(told), runs=short(told), steps=steps(group))


def awake(bed: Bed) -> None:
    """The route without sleep: what a step takes, requests in flight, and what is held after 20 updates."""
    server = bed.server("awake")
    whole_step(bed, server, "update_weights", retain_mib=8192)
    whole_step(bed, server, "update_weights", retain_mib=65536)
    group = Group(bed.args, server, bed.trainer("dense"), "awake")
    try:
        group.publish(3, 2, limit=120)
        told = group.publish(*[3, 2] * 5)
        ms = milliseconds(told)
        values = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "runs": short(told), "steps": steps(group)}
        bed.note("whole step", way="update_weights", retain_mib=0, **values)
        spaced(bed, group, 0, 3, 2, 3, 2, 3, 2)
        bed.check("text", server.says() == bed.text("dense", 2), way="update_weights")
        load = Load(server, 8, 200)
        time.sleep(1)
        told = group.publish(3, 2, 3)
        time.sleep(1)
        ends = load.stop()
        good = not any(end.startswith("HTTP 5") and end != "HTTP 503" for end in ends)
        bed.check(
            "requests in flight", good, way="update_weights", ends=ends, refused_s=load.gaps, versions=short(told), steps=steps(group)[-3:]
        )
        bed.check("text after requests in flight", server.says() == bed.text("dense", 3), way="update_weights")
        group.publish(2, 3)
        before = {"mib": gpu_memory(0), "engine": server.descriptors(), "ours": group.holdings()}
        group.publish(*[2, 3] * 10)
        after = {"mib": gpu_memory(0), "engine": server.descriptors(), "ours": group.holdings()}
        flat = after["mib"] - before["mib"] <= 64 and after["engine"] - before["engine"] <= 4
        more = {name: held["descriptors"] - before["ours"].get(name, held)["descriptors"] for name, held in after["ours"].items()}
        bed.check("flat over 20 updates", flat and all(few <= 2 for few in more.values()), before=before, after=after)
        bed.check("text after 20 updates", server.says() == bed.text("dense", 3), way="update_weights")
    finally:
        bed.keep(group)
        group.stop()


def asleep(bed: Bed) -> None:
    """The route of sleeping servers: checkpoint-engine."""
    server = bed.server("asleep")
    whole_step(bed, server, "checkpoint-engine", retain_mib=65536, runs=6)
    group = Group(bed.args, server, bed.trainer("dense"), "asleep")
    try:
        group.publish(2, limit=120)
        load = Load(server, 8, 200)
        time.sleep(1)
        told = group.publish(3, 2, 3)
        time.sleep(1)
        ends = load.stop()
        bed.note(
            "requests in flight", way="checkpoint-engine", ends=ends, refused_s=load.gaps, versions=short(told), steps=steps(group)[-3:]
        )
    finally:
        bed.keep(group)
        group.stop()


def beside(bed: Bed) -> None:
    """Tokens a second of an engine on a GPU beside which another one is given weights, and without."""
    quiet, fed = bed.server("asleep"), bed.server("awake")
    group = Group(bed.args, fed, bed.trainer("dense"), "beside")
    try:
        group.publish(2, 3, limit=120)
        rates: dict[str, list[float]] = {"without": [], "beside": []}
        published = 0
        for _ in range(3):
            for what, seconds in (("without", 4.0), ("beside", 4.0)):
                load = Load(quiet, 8, 32)
                time.sleep(0.5)
                tokens, begun = load.tokens, time.monotonic()
                while time.monotonic() - begun < seconds:
                    if what == "beside":
                        group.publish(2, 3)
                        published += 2
                    else:
                        time.sleep(0.1)
                rates[what].append(round((load.tokens - tokens) / (time.monotonic() - begun), 1))
                load.stop()
        ratio = statistics.median(rates["beside"]) / statistics.median(rates["without"])
        bed.note("decode beside updates", tokens_per_s=rates, ratio=round(ratio, 4), published=published)
    finally:
        group.stop()


def kills(bed: Bed) -> None:
    """SIGKILL in the middle of a broadcast: the receiver's worker, its agent, the source's worker and its agent."""
    server, trainer = bed.server("awake"), bed.trainer("dense")
    group = Group(bed.args, server, trainer, "kills", retain_mib=16384)
    try:
        group.publish(2, 3, limit=120)
        for which in ("actor worker", "actor agent", "trainer worker", "trainer agent"):
            for turn in range(3):
                seed = 2 + turn % 2
                killed = group.kill_in_transfer(seed, which, 0.01 * turn, 45)
                told = group.end(45)
                took = time.monotonic() - killed
                # A source's agent takes its publish along; the trainer tries again, as trainers do.
                again = [] if told["event"] == "done" else group.publish(seed, limit=60)
                bed.check(
                    "killed in a broadcast",
                    server.says() == bed.text("dense", seed) and trainer.process.poll() is None,
                    which=which,
                    s=round(took, 3),
                    whole_s=round(time.monotonic() - killed, 3),
                    publish=short([told]),
                    again=short(again),
                    events=group.since(killed),
                )
        bed.check("published after all kills", bool(group.publish(2)) and server.says() == bed.text("dense", 2))
    finally:
        bed.keep(group)
        group.stop()


def engine_killed(bed: Bed) -> None:
    """SIGKILL of the engine in a broadcast; a new one is started at once, as a pod's restart would."""
    server, trainer = bed.server("awake"), bed.trainer("dense")
    group = Group(bed.args, server, trainer, "engine-killed", retain_mib=16384)
    try:
        group.publish(2, 3, limit=120)
        group.begin(2, watch=True, limit=200)
        trainer.hear("transfer", limit=60)
        server.stop(signal.SIGKILL)
        new = bed.restart("awake")
        healthy: list[float] = []
        threading.Thread(target=lambda: healthy.append(new.healthy()), daemon=True).start()
        told = group.end(200)
        done = time.monotonic()
        seen = {"publish": short([told]), "after_healthy_s": round(done - healthy[0], 3) if healthy else None}
        good = told["event"] == "done" and new.says() == bed.text("dense", 2)
        bed.check("engine killed in a broadcast", good and trainer.process.poll() is None, **seen)
    finally:
        bed.keep(group)
        group.stop()


def experts(bed: Bed) -> None:
    """A small model with sixteen experts, graphs on."""
    server = bed.server("experts")
    group = Group(bed.args, server, bed.trainer("experts"), "experts", bucket_mib=256)
    try:
        for seed in (2, 3, 2):
            told = group.publish(seed, limit=120)
            bed.check("published", server.says() == bed.text("experts", seed), way="experts", versions=short(told), steps=steps(group)[-1:])
        ms = milliseconds(group.publish(*[3, 2] * 4))
        bed.note("whole step", way="experts", ms=statistics.median(ms), runs=ms)
        bed.check("text", server.says() == bed.text("experts", 2), way="experts")
    finally:
        bed.keep(group)
        group.stop()


def colocated(bed: Bed) -> None:
    """Trainer and engine on one GPU: the engine's member has no rank and is fed by CUDA IPC."""
    between_gpus(bed, "nccl", "by CUDA IPC", trainer_gpu=0)


def reads(bed: Bed) -> None:
    """The same through NIXL: the engine's member reads the memory of the trainer's agent. UCX does that by CUDA IPC, too."""
    between_gpus(bed, "gdr", "NIXL is open on a GPU", trainer_gpu=0)


def reads_apart(bed: Bed) -> None:
    """Through NIXL from the trainer's GPU to the engine's."""
    between_gpus(bed, "gdr", "NIXL is open on a GPU", trainer_gpu=1)


def between_gpus(bed: Bed, transport: str, by: str, *, trainer_gpu: int) -> None:
    """Text, time, no copy through the host, and SIGKILL of the receiver's worker, its agent and the source's worker."""
    server, where = bed.server("awake"), "apart" if trainer_gpu else "colocated"
    way, name = f"{where} over {transport}", f"{where}-{transport}"
    group = Group(bed.args, server, bed.trainer("dense", trainer_gpu), name, trainer_gpu=trainer_gpu, transport=transport)
    try:
        told = group.publish(2, 3, limit=120)
        bed.check("published", server.says() == bed.text("dense", 3), way=way, versions=short(told), steps=steps(group))
        told = group.publish(*[2, 3] * 4)
        ms = milliseconds(told)
        values = {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), "runs": short(told), "steps": steps(group)}
        bed.note("whole step", way=way, **values)
        bed.check("text", server.says() == bed.text("dense", 3), way=way)
        said = re.sub(r"\x1b\[[0-9;]*m", "", group.logs()) + json.dumps([event for _, event in group.events])
        memory = [each.get("result", {}).get("memory", "") for each in told]
        good = by in said and all(where.startswith("gpu ") for where in memory)
        # Bytes that pass the host lie in a directory of the version first.
        kept = [str(path) for path in Path(f"/dev/shm/weightsync-{name}").rglob("*.safetensors")]
        bed.check("no copy through the host", good and not kept, way=way, memory=memory[-1:], kept=kept)
        for which in ("actor worker", "actor agent", "trainer worker"):
            killed = group.kill_in_transfer(2, which, 0.0, 45, most=0.04)
            end = group.end(45)
            again = [] if end["event"] == "done" else group.publish(2, limit=60)
            took = round(time.monotonic() - killed, 3)
            text = server.says() == bed.text("dense", 2)
            bed.check("killed in a copy", text, way=way, which=which, s=took, publish=short([end]), again=short(again))
            group.publish(3, limit=60)
        bed.check("text after kills", server.says() == bed.text("dense", 3), way=way)
    finally:
        bed.keep(group)
        group.stop()
